"""The decoding of whole batches of messages, natively where the records are plain JSON.

The JSON decoder (`value_formats.JsonRows`) uses it for records that the native reader has fetched.

A record is plain if it is an object without a line feed and names each column once. The columns are
integers of at most 18 digits, and text without escape sequences. Other members are values of these
kinds in ASCII, or true, false or null. JSON gives such a text only one meaning. The other decoder
reads or refuses all records that are not plain.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from itertools import chain
from typing import Any, Final, Protocol, cast

import pyarrow as pa
from confluent_kafka import Message
from pyarrow import types

from onceflow.core.arrow.instants import BEYOND_PYTHON, rows_beyond_python
from onceflow.formats.decoding import BatchDecoder, Decoded
from onceflow.sources.kafka.fetched import FetchedRecords
from onceflow.sources.kafka.messages import (
    VALUE,
    Records,
    Refusals,
    SplitRuns,
    estimate_size_bytes,
    leave_out_untimely,
    messages_of,
    metadata_columns,
    split_runs_of,
)
from onceflow.sources.kafka.settings import KafkaSettings

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
    kinds = [_find_kind(column.type) for column in columns]
    if not 1 <= len(kinds) <= _COLUMNS_MAX or None in kinds:
        return None
    try:
        decode = cast("Callable[..., Any]", import_module(_NATIVE).decode_json)
    except (ImportError, AttributeError):
        return None
    return NativeJson(columns, "".join(map(str, kinds)).encode(), decode)


def _find_kind(kind: pa.DataType) -> str | None:
    if types.is_string(kind):
        return "s"
    if types.is_int64(kind):
        return "q"
    return "i" if types.is_int32(kind) else None


def drop_beyond_python(decoded: Decoded, schema: pa.Schema) -> Decoded:
    """Return `decoded` without the rows whose dates or times Python cannot represent."""
    faults: dict[int, str] = {}
    for name, column in zip(schema.names, decoded.columns, strict=False):
        for row in rows_beyond_python(column):
            faults.setdefault(row, f"column {name!r} ({column.type}) holds {BEYOND_PYTHON}")
    return decoded.drop_rows(faults)


class Rows(Protocol):
    """A collector of the rows of one batch after another."""

    refusals: Refusals
    """The handler of bad records, for all batches."""
    runs: SplitRuns
    """The runs of the rows that `take` returned last; empty without `by_split`."""

    @property
    def size_bytes(self) -> int:
        """The approximate number of bytes of the collected values."""
        ...

    def __len__(self) -> int:
        """Return the number of collected rows."""
        ...

    def add(self, messages: Records) -> None:
        """Collect `messages`, which must not contain events."""
        ...

    def ready(self) -> bool:
        """Return True if `take` can run without waiting, for instance for a schema.

        Raises:
            SourceUnavailable: A schema did not arrive within the deadline.
        """
        ...

    def take(self) -> pa.RecordBatch:
        """Return the collected rows as one batch, and start the next batch."""
        ...


class DecodedRows:
    """A collector that decodes its messages when the batch is taken."""

    def __init__(
        self,
        settings: KafkaSettings,
        schema: pa.Schema,
        decoder: BatchDecoder,
        *,
        by_split: bool = False,
    ) -> None:
        self.size_bytes = 0
        self.runs: SplitRuns = []
        self._by_split = by_split
        self._topics = settings.topics
        self.refusals = Refusals(settings.on_bad_record)
        self._schema = schema
        self._include_metadata = settings.include_metadata
        self._keep_messages = (
            settings.include_metadata or settings.key_format is not None or by_split
        )
        self.kept: list[Message] = []
        self._decoder = decoder
        self._messages: list[Message] = []
        self._values: list[bytes | None] = []

    def __len__(self) -> int:
        return len(self._messages)

    def add(self, messages: Records) -> None:
        """Collect `messages`."""
        messages = messages_of(messages)
        values = list(map(VALUE, messages))
        self._decoder.expect(values, messages)
        self._messages += messages
        self._values += values
        self.size_bytes += estimate_size_bytes(messages)

    def ready(self) -> bool:
        """Return True if every schema that the rows need has arrived.

        Raises:
            SourceUnavailable: A schema did not arrive within the deadline.
            ConfigError: The registry refuses the user.
        """
        return self._decoder.ready()

    def take(self) -> pa.RecordBatch:
        """Return the collected rows as one batch. The batch is empty if all records were bad.

        Raises:
            BadRecord: A record cannot be decoded, and `on_bad_record` is "fail".
        """
        messages, self._messages, self.size_bytes = self._messages, [], 0
        values, self._values = self._values, []
        decoded = drop_beyond_python(self._decoder.decode(values, messages), self._schema)
        for index in sorted(decoded.faults):
            self.refusals.refuse(messages[index], decoded.faults[index])
        columns = list(decoded.columns)
        if self._keep_messages:
            self.kept = [messages[index] for index in decoded.kept]
        if self._include_metadata:
            columns += metadata_columns(self.kept)
            columns, chunks = leave_out_untimely(columns, columns[-1], [self.kept], self.refusals)
            self.kept = list(chain.from_iterable(map(messages_of, chunks)))
        if self._by_split:
            self.runs = split_runs_of(self.kept, self._topics)
        return pa.RecordBatch.from_arrays(columns, schema=self._schema)
