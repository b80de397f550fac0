"""A native decoder of plain JSON records into Arrow columns, without an object for each value.

The JSON decoder (`value_formats.JsonRows`) uses it for records that the native reader has fetched.

A record is plain if it is an object without a line feed and names each column once. The columns are
integers of at most 18 digits, and text without escape sequences. Other members are values of these
kinds in ASCII, or true, false or null. JSON gives such a text only one meaning. The other decoder
reads or refuses all records that are not plain.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, Final, cast

import pyarrow as pa
from pyarrow import types

from onceflow.sources.kafka.fetched import FetchedRecords

ROWS_MIN: Final = 64
"""The minimum number of records to decode natively.

For fewer, building the arrays costs more than the other decoder.
"""
_COLUMNS_MAX = 64
_NATIVE = "onceflow_kafka_native"


class NativeJson:
    """A decoder of records that the native reader has fetched; see `open_native_json`."""

    def __init__(self, columns: pa.Schema, kinds: bytes, decode: Callable[..., Any]) -> None:
        self._types = columns.types
        self._names = tuple(name.encode() for name in columns.names)
        self._kinds = kinds
        self._nullable = bytes(column.nullable for column in columns)
        self._decode = decode

    def decode(self, fetched: FetchedRecords) -> list[pa.Array] | None:
        """Return one column for each field, or None if a record is not plain JSON."""
        count = len(fetched)
        # The line feed after each value separates it from the next value.
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
    """Return a decoder for `columns`, or None if it cannot decode their types or is not installed.

    The package of the native reader contains it, from version 0.3 on.
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
