"""JSON records of the plain form, decoded natively into Arrow columns: no Python object a value.

The plain form is a part of what the other decoder takes: objects without a line feed, whose columns
are integers of at most 18 digits and text without escape sequences, each named once; what is no
column is such a value, too, in ASCII, or true, false or null. To these texts JSON gives one meaning
only. All others are left to the other decoder, which takes or refuses them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, Final, cast

import pyarrow as pa
from pyarrow import types

from onceflow.sources.kafka.fetched import FetchedRecords

ROWS_MIN: Final = 64
"""Fewer records cost less by the other decoder: arrays are made of each read here."""
_COLUMNS_MAX = 64
_NATIVE = "onceflow_kafka_native"


class NativeJson:
    """Decodes what the native reader has read. Use `open_native_json`."""

    def __init__(self, columns: pa.Schema, kinds: bytes, decode: Callable[..., Any]) -> None:
        self._types = columns.types
        self._names = tuple(name.encode() for name in columns.names)
        self._kinds = kinds
        self._nullable = bytes(column.nullable for column in columns)
        self._decode = decode

    def decode(self, fetched: FetchedRecords) -> list[pa.Array] | None:
        """Return a column each of the records; None if one is not of the plain form."""
        count = len(fetched)
        # The line feed behind each value tells one from the next.
        if count < ROWS_MIN or not fetched.are_objects or fetched.separator != b"\n":
            return None
        decoded = self._decode(fetched.values, count, self._names, self._kinds, self._nullable)
        if decoded is None:
            return None
        is_ascii, columns = cast("tuple[bool, list[tuple[Any, ...]]]", decoded)
        arrays = [
            _wrap_buffers(kind, count, *buffers)
            for kind, buffers in zip(self._types, columns, strict=True)
        ]
        return arrays if is_ascii or _is_valid_text(arrays) else None


def _wrap_buffers(kind: pa.DataType, count: int, null_count: int, *buffers: bytes | None) -> Any:
    wrapped = [None if buffer is None else pa.py_buffer(buffer) for buffer in buffers]
    return pa.Array.from_buffers(kind, count, wrapped, null_count)


def _is_valid_text(arrays: Sequence[pa.Array]) -> bool:
    try:
        for array in arrays:
            array.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def open_native_json(columns: pa.Schema) -> NativeJson | None:
    """Return a decoder of records with `columns`; None if they have other types, or it is missing.

    It is in the package of the native reader, from its version 0.3.
    """
    kinds = [_kind_of(column.type) for column in columns]
    if not 1 <= len(kinds) <= _COLUMNS_MAX or None in kinds:
        return None
    try:
        decode = cast("Callable[..., Any]", import_module(_NATIVE).decode_json)
    except (ImportError, AttributeError):
        return None
    return NativeJson(columns, "".join(map(str, kinds)).encode(), decode)


def _kind_of(kind: pa.DataType) -> str | None:
    if types.is_string(kind):
        return "s"
    if types.is_int64(kind):
        return "q"
    return "i" if types.is_int32(kind) else None
