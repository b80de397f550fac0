"""Consumed messages to Arrow batches. The hottest code of the product; see the numbers in it.

A chunk is at most `CHUNK` messages taken at once: few enough to stay in the processor's cache (2000
and more cost a fifth more), many enough that the work per chunk does not count. Inside a chunk
values and messages lie side by side, so a value that cannot be decoded names its offset and why.

Measured with 100-byte records of four fields: value 0.02, decode 0.15, columns 0.08 us a record.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, Protocol, cast

import msgspec
import numpy as np
import pyarrow as pa
from confluent_kafka import Message

from onceflow.core.dead_letters import DeadLetter, origin_columns
from onceflow.core.errors import BadRecord
from onceflow.core.spi import OnBadRow
from onceflow.sources.kafka.json_columns import (
    CONVERSION_ERRORS,
    Convert,
    checked_late,
    converter_of,
    record_type,
)
from onceflow.sources.kafka.settings import KafkaSettings, ValueFormat

_PATH = re.compile(r" - at `\$\.(.+)`$", re.DOTALL)
_VALUE_LENGTH_MAX = 40
_EXCERPT_BYTES = 64


def bad_record(message: Message, fault: str) -> BadRecord:
    """Return the error that names where `message` lies and its `fault`."""
    return BadRecord(
        f"{message.topic()}-{message.partition()} offset {message.offset()}: {fault}. The value"
        f" starts {_excerpt(message.value())}. Correct the schema or the producer, or leave such"
        " records out with on_bad_record='drop'"
    )


def fault_of(error: Exception, value: bytes | None, columns: pa.Schema) -> str:
    """Say why `value` could not be decoded, with the column and what stands in it."""
    if value is None:
        return "it has no value (a tombstone), and format 'json' needs one"
    reason = str(error)
    path = _PATH.search(reason)
    if path is None:
        return reason
    name = next(
        (
            column.name
            for column in columns
            if path[1] == column.name or path[1].startswith((f"{column.name}.", f"{column.name}["))
        ),
        None,
    )
    if name is None:
        return reason
    return f"column {name!r} ({columns.field(name).type}): {reason}, found {_found(value, name)}"


def late_fault_of(
    values: Sequence[Any], columns: pa.Schema, converters: Sequence[Convert]
) -> str | None:
    """Say which of a record's `values` does not fit its column, or None when all do."""
    for value, column, convert in zip(values, columns, converters, strict=True):
        try:
            convert([value])
        except CONVERSION_ERRORS as error:
            return f"column {column.name!r} ({column.type}) cannot hold {_short(value)}: {error}"
    return None


def _found(value: bytes, name: str) -> str:
    try:
        decoded = cast("object", msgspec.json.decode(value))
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return "it unreadable"
    if isinstance(decoded, dict):
        return _short(cast("dict[str, object]", decoded).get(name))
    return _short(decoded)


def _excerpt(value: bytes | None) -> str:
    """Return the start of `value`, printable and short."""
    if value is None:
        return "no value (a tombstone)"
    shown = repr(value[:_EXCERPT_BYTES])[1:]
    return f"{shown} ({len(value)} bytes)" if len(value) > _EXCERPT_BYTES else shown


def _short(value: object) -> str:
    shown = str(value) if not isinstance(value, str) else repr(value)
    return f"{shown[:_VALUE_LENGTH_MAX]}…" if len(shown) > _VALUE_LENGTH_MAX else shown


logger = logging.getLogger("onceflow.sources.kafka")

CHUNK = 500
_SAMPLE_STEP = 64
"""Every 64th message is measured; that bounds memory, and nothing depends on it being exact."""

_DECODE_ERRORS = (msgspec.MsgspecError, TypeError, ValueError, RecursionError)

RAW_SCHEMA = pa.schema(
    [
        pa.field("key", pa.binary()),
        pa.field("value", pa.binary()),
        pa.field("topic", pa.string(), nullable=False),
        pa.field("partition", pa.int32(), nullable=False),
        pa.field("offset", pa.int64(), nullable=False),
        pa.field("timestamp", pa.timestamp("ms", "UTC")),
        pa.field("timestampType", pa.int32(), nullable=False),
    ]
)
"""Spark's columns of a Kafka source. timestampType: 0 the producer's, 1 the broker's, -1 none."""

HEADERS_FIELD = pa.field(
    "headers",
    pa.list_(pa.struct([pa.field("key", pa.string()), pa.field("value", pa.binary())])),
)
"""Spark's column of a record's headers: null where it has none."""

METADATA_FIELDS = (
    pa.field("_topic", pa.string(), nullable=False),
    pa.field("_partition", pa.int32(), nullable=False),
    pa.field("_offset", pa.int64(), nullable=False),
    pa.field("_timestamp", pa.timestamp("ms", "UTC")),
)


def rows_by_partition(rows: pa.RecordBatch) -> list[tuple[str, int]] | None:
    """Return (split id, rows) of each run of rows of one partition; None: they do not tell."""
    origin = origin_columns(rows.schema)
    if not origin or not rows.num_rows:
        return None
    topics = rows.column(origin[0]).dictionary_encode()
    partitions = rows.column(origin[1]).to_numpy(zero_copy_only=False)
    codes = topics.indices.to_numpy(zero_copy_only=False)
    new = (partitions[1:] != partitions[:-1]) | (codes[1:] != codes[:-1])
    starts = [0, *(np.flatnonzero(new) + 1).tolist()]
    return [
        (f"{topics[at].as_py()}-{partitions[at]}", end - at)
        for at, end in zip(starts, [*starts[1:], rows.num_rows], strict=True)
    ]


class Rows(Protocol):
    """Collects the rows of one batch."""

    size_bytes: int
    """About how many bytes of values are collected."""
    dropped_count: int
    """Bad records left out so far, over all batches."""
    letters: list[DeadLetter]
    """Those of them that go to the sink of dead letters, since somebody last took them away."""

    def __len__(self) -> int:
        """Return how many rows are collected."""
        ...

    def add(self, messages: list[Message]) -> None:
        """Collect `messages`, none of which is an event."""
        ...

    def take(self) -> pa.RecordBatch:
        """Return the rows collected as one batch, and start the next one."""
        ...


def schema_of_rows(settings: KafkaSettings) -> pa.Schema:
    """Return the schema of the batches."""
    if settings.format is ValueFormat.RAW:
        return RAW_SCHEMA.append(HEADERS_FIELD) if settings.include_headers else RAW_SCHEMA
    if not settings.include_metadata:
        return settings.columns
    return pa.schema([*settings.columns, *METADATA_FIELDS])


def rows_of(settings: KafkaSettings) -> Rows:
    """Return the collector that `settings` ask for."""
    return RawRows(settings) if settings.format is ValueFormat.RAW else JsonRows(settings)


class RawRows:
    """Keys and values as they are."""

    def __init__(self, settings: KafkaSettings) -> None:
        self._schema = schema_of_rows(settings)
        self._include_headers = settings.include_headers
        self.size_bytes = 0
        self.dropped_count = 0
        self.letters: list[DeadLetter] = []
        self._messages: list[Message] = []

    def __len__(self) -> int:
        return len(self._messages)

    def add(self, messages: list[Message]) -> None:
        """Collect `messages`."""
        self._messages += messages
        self.size_bytes += _size_bytes(messages)

    def take(self) -> pa.RecordBatch:
        """Return one batch of `RAW_SCHEMA`, with headers if they are asked for."""
        messages, self._messages, self.size_bytes = self._messages, [], 0
        stamps = list(map(_TIMESTAMP, messages))
        arrays = [
            pa.array(list(map(_KEY, messages)), type=pa.binary()),
            pa.array(list(map(_VALUE, messages)), type=pa.binary()),
            *_places(messages),
            _timestamps(stamps),
            pa.array([kind - 1 for kind, _ in stamps], type=pa.int32()),
        ]
        if self._include_headers:
            arrays.append(_headers(messages))
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)


class JsonRows:
    """One JSON object a record."""

    def __init__(self, settings: KafkaSettings) -> None:
        self.size_bytes = 0
        self.dropped_count = 0
        self.letters: list[DeadLetter] = []
        self._columns = settings.columns
        self._schema = schema_of_rows(settings)
        self._on_bad_record = settings.on_bad_record
        self._include_metadata = settings.include_metadata
        # Messages are let go chunk by chunk, unless something may still have to be said of them.
        self._keep_messages = settings.include_metadata or checked_late(settings.columns)
        kind = record_type(settings.columns)
        self._decode = cast("Callable[[Any], Any]", msgspec.json.Decoder(kind).decode)
        self._read_columns = _column_reader(len(settings.columns))
        self._converters: list[Convert] = [converter_of(column.type) for column in self._columns]
        self._records: list[Any] = []
        self._messages: list[list[Message]] = []

    def __len__(self) -> int:
        return len(self._records)

    def add(self, messages: list[Message]) -> None:
        """Decode and collect `messages`.

        Raises:
            BadRecord: One cannot be decoded, and such are not to be dropped.
        """
        try:
            records = list(map(self._decode, map(_VALUE, messages)))
        except _DECODE_ERRORS:
            records, messages = self._add_one_by_one(messages)
        self._records += records
        self.size_bytes += _size_bytes(messages)
        if self._keep_messages:
            self._messages.append(messages)

    def take(self) -> pa.RecordBatch:
        """Return the records collected as one batch.

        Raises:
            BadRecord: A value does not fit its column, and such are not to be dropped.
        """
        records, self._records, self.size_bytes = self._records, [], 0
        chunks, self._messages = self._messages, []
        messages = list(chain.from_iterable(chunks))
        try:
            arrays = self._arrays(records)
        except CONVERSION_ERRORS:
            if not self._keep_messages:
                raise
            records, messages = self._convert_one_by_one(records, messages)
            arrays = self._arrays(records)
        if self._include_metadata:
            arrays += [*_places(messages), _timestamps(list(map(_TIMESTAMP, messages)))]
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)

    def _arrays(self, records: list[Any]) -> list[pa.Array]:
        columns = self._read_columns(records)
        return [convert(column) for convert, column in zip(self._converters, columns, strict=True)]

    def _add_one_by_one(self, messages: list[Message]) -> tuple[list[Any], list[Message]]:
        records: list[Any] = []
        good: list[Message] = []
        for message in messages:
            try:
                records.append(self._decode(message.value()))
            except _DECODE_ERRORS as error:
                self._refuse(message, fault_of(error, message.value(), self._columns))
            else:
                good.append(message)
        return records, good

    def _convert_one_by_one(
        self, records: list[Any], messages: list[Message]
    ) -> tuple[list[Any], list[Message]]:
        good: list[tuple[Any, Message]] = []
        for record, message in zip(records, messages, strict=True):
            values = [column[0] for column in self._read_columns([record])]
            fault = late_fault_of(values, self._columns, self._converters)
            if fault is None:
                good.append((record, message))
            else:
                self._refuse(message, fault)
        return [record for record, _ in good], [message for _, message in good]

    def _refuse(self, message: Message, fault: str) -> None:
        error = bad_record(message, fault)
        if self._on_bad_record is OnBadRow.FAIL:
            raise error from None
        if self._on_bad_record is OnBadRow.DEAD_LETTER:
            self.letters.append(
                DeadLetter(
                    fault,
                    message.topic(),
                    message.partition(),
                    message.offset(),
                    message.key(),
                    message.value(),
                )
            )
        self.dropped_count += 1
        # 1, 10, 100, …: a topic full of bad records must not fill the disk with log lines.
        if str(self.dropped_count).strip("0") == "1":
            logger.warning(
                "%s (%d so far): %s", self._on_bad_record.value, self.dropped_count, error
            )


def _column_reader(count: int) -> Callable[[list[Any]], tuple[list[Any], ...]]:
    """Return a function from records to the lists of their fields c0, c1 and so on.

    Written out and compiled, as dataclasses do it: an attribute by its literal name costs 9 ns,
    `operator.attrgetter` 18.
    """
    lists = "".join(f"[record.c{index} for record in records]," for index in range(count))
    return cast(
        "Callable[[list[Any]], tuple[list[Any], ...]]",
        eval(f"lambda records: ({lists})"),  # noqa: S307 - holds nothing but the count
    )


_VALUE: Callable[[Message], bytes | None] = Message.value
_KEY: Callable[[Message], bytes | None] = Message.key
_TOPIC: Callable[[Message], str | None] = Message.topic
_PARTITION: Callable[[Message], int | None] = Message.partition
_OFFSET: Callable[[Message], int | None] = Message.offset
_TIMESTAMP: Callable[[Message], tuple[int, int]] = Message.timestamp


def _places(messages: Sequence[Message]) -> list[pa.Array]:
    return [
        pa.array(list(map(_TOPIC, messages)), type=pa.string()),
        pa.array(list(map(_PARTITION, messages)), type=pa.int32()),
        pa.array(list(map(_OFFSET, messages)), type=pa.int64()),
    ]


def _headers(messages: Sequence[Message]) -> pa.Array:
    found = [
        cast("Sequence[tuple[str, bytes | None]] | None", message.headers()) for message in messages
    ]
    return pa.array(
        [
            None if pairs is None else [{"key": key, "value": value} for key, value in pairs]
            for pairs in found
        ],
        type=HEADERS_FIELD.type,
    )


def _timestamps(stamps: Sequence[tuple[int, int]]) -> pa.Array:
    return pa.array(
        [stamp if kind else None for kind, stamp in stamps], type=pa.timestamp("ms", "UTC")
    )


def _size_bytes(messages: Sequence[Message]) -> int:
    return _SAMPLE_STEP * sum(map(len, messages[::_SAMPLE_STEP]))
