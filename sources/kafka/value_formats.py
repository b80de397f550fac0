"""The collectors that turn consumed messages into Arrow batches.

This is the hottest code of the product.

A chunk is at most `CHUNK` messages that are taken together. So it fits into the processor's cache
(2000 and more messages cost a fifth more), and the work per chunk does not matter. Inside a chunk,
values and messages have the same order, so the error for a bad value can name its offset.

Measured with 100-byte records of four fields: value 0.02, decode 0.15, columns 0.08 us a record.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, cast

import msgspec
import pyarrow as pa
from confluent_kafka import Message
from typing_extensions import assert_never

from onceflow.core.decoding import json_decoder
from onceflow.core.errors import InvariantViolation
from onceflow.formats.decoding import BatchDecoder, read_headers
from onceflow.formats.json.columns import (
    CONVERSION_ERRORS,
    DECODE_ERRORS,
    FINER,
    Convert,
    any_finer,
    column_reader,
    converter_of_members,
    fault_of,
    has_late_checks,
    holds_instants,
    late_fault_of,
    make_exact,
    record_type,
    record_type_of_members,
)
from onceflow.formats.registry_schemas import HEADER_BYTES, TOMBSTONE, UNFRAMED, schema_id_of
from onceflow.sources.kafka.decoded_rows import DecodedRows, Rows, open_native_json
from onceflow.sources.kafka.fetched import FetchedRecords
from onceflow.sources.kafka.messages import (
    KEY,
    METADATA_FIELDS,
    TIMESTAMP,
    VALUE,
    Records,
    Refusals,
    SplitRuns,
    estimate_size_bytes,
    leave_out_untimely,
    messages_of,
    metadata_columns,
    position_columns,
    split_runs_of,
    timestamp_column,
)
from onceflow.sources.kafka.record_keys import KeyedRows, key_decoder
from onceflow.sources.kafka.settings import KafkaSettings, ValueFormat

CHUNK = 500


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
"""The columns of Spark's Kafka source. timestampType: 0 the producer's, 1 the broker's, -1 none."""

HEADERS_FIELD = pa.field(
    "headers",
    pa.list_(pa.struct([pa.field("key", pa.string()), pa.field("value", pa.binary())])),
)
"""Spark's column of a record's headers, null for a record without headers."""


def schema_of_rows(settings: KafkaSettings) -> pa.Schema:
    """Return the schema of the batches."""
    if settings.format is ValueFormat.RAW:
        return RAW_SCHEMA.append(HEADERS_FIELD) if settings.include_headers else RAW_SCHEMA
    values = schema_of_values(settings)
    if settings.key_field is None:
        return values
    return values.insert(key_column_index(settings), settings.key_field)


def schema_of_values(settings: KafkaSettings) -> pa.Schema:
    """Return the schema of the batches without the column of keys."""
    columns = settings.columns
    if settings.format.is_debezium:
        from onceflow.formats.debezium.changes import schema_of_changes

        columns = schema_of_changes(columns)
    return pa.schema([*columns, *METADATA_FIELDS]) if settings.include_metadata else columns


def key_column_index(settings: KafkaSettings) -> int:
    """Return the index of the column of keys, which follows the value's columns."""
    behind = len(METADATA_FIELDS) if settings.include_metadata else 0
    return len(schema_of_values(settings)) - behind


def require_columns(value_format: ValueFormat, columns: pa.Schema) -> None:
    """Raise ConfigError if values of the format cannot fill `columns`.

    The message names the column.
    """
    match value_format:
        case ValueFormat.JSON | ValueFormat.JSON_SCHEMA | ValueFormat.DEBEZIUM_JSON:
            record_type(columns)
        case ValueFormat.CSV:
            from onceflow.formats.csv_rows import require_csv_columns

            require_csv_columns(columns)
        case ValueFormat.RAW | ValueFormat.AVRO | ValueFormat.PROTOBUF | ValueFormat.DEBEZIUM_AVRO:
            pass
        case _:
            assert_never(value_format)


def rows_of(settings: KafkaSettings, *, by_split: bool = False) -> Rows:
    """Return the collector for `settings`. With `by_split` it fills `runs`.

    Raises:
        ConfigError: It needs a schema registry, whose client is not installed or refuses an option.
    """
    if settings.format is ValueFormat.RAW:
        return RawRows(settings, by_split=by_split)
    rows: JsonRows | DecodedRows
    if settings.format in {ValueFormat.JSON, ValueFormat.JSON_SCHEMA}:
        rows = JsonRows(settings, by_split=by_split)
    else:
        schema, decoder = schema_of_values(settings), _decoder(settings)
        rows = DecodedRows(settings, schema, decoder, by_split=by_split)
    if settings.key_format is None:
        return rows
    schema, column_index = schema_of_rows(settings), key_column_index(settings)
    return KeyedRows(
        rows, key_decoder(settings), schema, column_index, settings.topics, by_split=by_split
    )


def _decoder(settings: KafkaSettings) -> BatchDecoder:
    """Return the decoder of a format. Its modules are imported at the first use."""
    columns, schema = settings.columns, settings.reader_schema
    match settings.format:
        case ValueFormat.AVRO:
            from onceflow.formats.avro.decoder import AvroDecoder, avro_record

            reader = None if schema is None else avro_record(schema.kept)
            return AvroDecoder(columns, reader, settings.open_schemas())
        case ValueFormat.PROTOBUF if schema is not None:
            from onceflow.formats.protobuf.decoder import ProtobufDecoder

            return ProtobufDecoder(columns, schema, settings.message, settings.open_schemas())
        case ValueFormat.DEBEZIUM_AVRO:
            from onceflow.formats.avro.decoder import avro_record
            from onceflow.formats.debezium.avro import DebeziumAvroDecoder
            from onceflow.formats.debezium.changes import UnavailableValues

            reader = None if schema is None else avro_record(schema.kept)
            unavailable = UnavailableValues(settings.unavailable_value_placeholder)
            options = settings.debezium_options
            options.check(columns)
            key = options.primary_key
            return DebeziumAvroDecoder(columns, settings.open_schemas(), unavailable, reader, key)
        case ValueFormat.DEBEZIUM_JSON:
            from onceflow.formats.debezium.changes import UnavailableValues
            from onceflow.formats.debezium.json import DebeziumJsonDecoder

            unavailable = UnavailableValues(settings.unavailable_value_placeholder)
            return DebeziumJsonDecoder(columns, unavailable, settings.debezium_options)
        case ValueFormat.CSV:
            from onceflow.formats.csv_rows import CsvDecoder

            return CsvDecoder(columns)
        case _:
            raise InvariantViolation(
                f"{settings.format} is not decoded by the batch, or its schema is unknown"
            )


class RawRows:
    """A collector of keys and values as bytes."""

    def __init__(self, settings: KafkaSettings, *, by_split: bool = False) -> None:
        self.runs: SplitRuns = []
        self._by_split = by_split
        self._topics = settings.topics
        self._schema = schema_of_rows(settings)
        self._include_headers = settings.include_headers
        self.size_bytes = 0
        self.refusals = Refusals(settings.on_bad_record)
        self._chunks: list[Records] = []
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, messages: Records) -> None:
        """Collect `messages`.

        Raises:
            BadRecord: Headers cannot be read, and `on_bad_record` is "fail".
        """
        if self._include_headers:
            messages = list(filter(self._has_readable_headers, messages_of(messages)))
        self._chunks.append(messages)
        self._count += len(messages)
        self.size_bytes += estimate_size_bytes(messages)

    def _has_readable_headers(self, message: Message) -> bool:
        """Return True if the headers can be read. If not, refuse `message`."""
        try:
            read_headers(message)
        except ValueError as error:
            self.refusals.refuse(message, f"its headers: {error}")
            return False
        return True

    def ready(self) -> bool:
        """Return True: raw rows wait for no schema."""
        return True

    def take(self) -> pa.RecordBatch:
        """Return one batch of `RAW_SCHEMA`, with headers if the settings ask for them."""
        chunks: Sequence[Records] = self._chunks
        self._chunks, self._count, self.size_bytes = [], 0, 0
        arrays = join_columns([self._columns(chunk) for chunk in chunks or [[]]])
        times = arrays[RAW_SCHEMA.get_field_index("timestamp")]
        arrays, chunks = leave_out_untimely(arrays, times, chunks, self.refusals)
        if self._by_split:
            self.runs = list(
                chain.from_iterable(
                    split_runs_of(kept_chunk, self._topics) for kept_chunk in chunks
                )
            )
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)

    def _columns(self, chunk: Records) -> list[pa.Array]:
        positions, times = position_columns(chunk), timestamp_column(chunk)
        if isinstance(chunk, FetchedRecords) and not self._include_headers:
            keys, values = chunk.key_column(), chunk.value_column()
            return [keys, values, *positions, times, chunk.time_kind_column()]
        messages = messages_of(chunk)
        arrays = [
            pa.array(list(map(KEY, messages)), type=pa.binary()),
            pa.array(list(map(VALUE, messages)), type=pa.binary()),
            *positions,
            times,
            pa.array([kind - 1 for kind, _ in map(TIMESTAMP, messages)], type=pa.int32()),
        ]
        return [*arrays, _headers(messages)] if self._include_headers else arrays


class JsonRows:
    """A collector of records that are one JSON object each."""

    def __init__(self, settings: KafkaSettings, *, by_split: bool = False) -> None:
        self.runs: SplitRuns = []
        self._by_split = by_split
        self._topics = settings.topics
        self._runs: SplitRuns = []
        """The runs of the collected rows. Unused if messages are kept, because `take` reads those.
        """
        self.size_bytes = 0
        self.refusals = Refusals(settings.on_bad_record)
        self._columns = settings.columns
        self._schema = schema_of_values(settings)
        self._include_metadata = settings.include_metadata
        # Messages are freed chunk by chunk unless a later step or an error message needs them.
        self._keep_messages = (
            settings.include_metadata
            or settings.key_format is not None
            or has_late_checks(settings.columns)
        )
        self._has_keys = settings.key_format is not None
        self.kept: list[Message] = []
        """The messages of the rows taken last, for the column of keys; empty without keys."""
        kind = record_type_of_members(settings.columns)
        decoder = json_decoder(kind)
        self._decode = cast("Callable[[Any], Any]", decoder.decode)
        self._decode_lines = cast("Callable[[bytes], list[Any]]", decoder.decode_lines)
        self._has_instants = any(holds_instants(column.type) for column in self._columns)
        self._header_bytes = 0
        if settings.format is ValueFormat.JSON_SCHEMA:
            self._header_bytes = HEADER_BYTES
            self._decode = behind_header(self._decode)
        self._read_columns = column_reader(len(settings.columns))
        self._converters: list[Convert] = [
            converter_of_members(column.type) for column in self._columns
        ]
        # The native decoder creates no record objects, which a later step or error may need.
        is_plain = settings.format is ValueFormat.JSON and not self._keep_messages
        self._native = open_native_json(settings.columns) if is_plain else None
        self._parts: list[list[pa.Array]] = []
        """The columns of the rows before `_records`, in parts."""
        self._part_rows = 0
        self._records: list[Any] = []
        self._chunks: list[Records] = []

    def __len__(self) -> int:
        return self._part_rows + len(self._records)

    def add(self, messages: Records) -> None:
        """Decode and collect `messages`.

        Raises:
            BadRecord: A record cannot be decoded, and `on_bad_record` is "fail".
        """
        if isinstance(messages, FetchedRecords):
            if self._native is not None:
                arrays = self._native.decode(messages)
                if arrays is not None:
                    self._convert_records()
                    self._add_part(arrays)
                    self._collect([], messages)
                    return
            records = self._decode_together(messages)
            if records is not None:
                self._collect(records, messages)
                return
        messages = messages_of(messages)
        values = list(map(VALUE, messages))
        try:
            records = list(map(self._decode, values))
        except DECODE_ERRORS:
            # A record of the chunk cannot be decoded. Only now decode each record separately.
            records, messages = self._add_one_by_one(messages)
        if self._has_instants and any_finer(values):
            records, messages = self._with_exact_instants(records, messages)
        self._collect(records, messages)

    def _collect(self, records: list[Any], messages: Records) -> None:
        self._records += records
        self.size_bytes += estimate_size_bytes(messages)
        if self._keep_messages:
            self._chunks.append(messages)
        elif self._by_split:
            # Count now, because the messages themselves are not kept.
            self._runs += split_runs_of(messages, self._topics)

    def _convert_records(self) -> None:
        """Turn the records since the last part into a new part, so that rows keep their order."""
        if self._records:
            records, self._records = self._records, []
            self._add_part(self._arrays(records))

    def _add_part(self, arrays: list[pa.Array]) -> None:
        self._parts.append(arrays)
        self._part_rows += len(arrays[0])

    def _decode_together(self, fetched: FetchedRecords) -> list[Any] | None:
        """Return the records of `fetched`, or None if they must be decoded one by one.

        Each value begins with `{` and ends with `}`, with a line feed between two values. In JSON,
        a line feed between `}` and `{` cannot be inside a text, array or object. So no value ends
        inside another one's text. If there are as many objects as values, each value is one object.
        """
        if not fetched.are_objects or fetched.separator != b"\n" or self._header_bytes:
            return None
        try:
            records = self._decode_lines(fetched.values)
        except DECODE_ERRORS:
            return None
        if len(records) != len(fetched) or (self._has_instants and any_finer([fetched.values])):
            return None
        return records

    def ready(self) -> bool:
        """Return True: JSON rows wait for no schema."""
        return True

    def take(self) -> pa.RecordBatch:
        """Return the collected records as one batch.

        Raises:
            BadRecord: A value does not fit its column, and `on_bad_record` is "fail".
        """
        self.size_bytes = 0
        if self._parts:
            return self._take_parts()
        records, self._records = self._records, []
        chunks: Sequence[Records] = self._chunks
        self._chunks = []
        try:
            arrays = self._arrays(records)
        except CONVERSION_ERRORS:
            # Without the messages the bad record cannot be named. `has_late_checks` keeps them
            # where needed.
            if not self._keep_messages:
                raise
            messages = list(chain.from_iterable(map(messages_of, chunks)))
            records, messages = self._convert_one_by_one(records, messages)
            arrays, chunks = self._arrays(records), [messages]
        if self._include_metadata:
            arrays += join_columns([metadata_columns(chunk) for chunk in chunks or [[]]])
            arrays, chunks = leave_out_untimely(arrays, arrays[-1], chunks, self.refusals)
        if self._has_keys:
            self.kept = list(chain.from_iterable(map(messages_of, chunks)))
        if self._by_split:
            of_chunks = chain.from_iterable(
                split_runs_of(kept_chunk, self._topics) for kept_chunk in chunks
            )
            self.runs = list(of_chunks) if self._keep_messages else self._runs
            self._runs = []
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)

    def _take_parts(self) -> pa.RecordBatch:
        """Return the parts joined to one batch. There are no parts if messages are kept."""
        self._convert_records()
        parts, self._parts, self._part_rows = self._parts, [], 0
        if self._by_split:
            self.runs, self._runs = self._runs, []
        arrays = parts[0] if len(parts) == 1 else join_columns(parts)
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)

    def _arrays(self, records: list[Any]) -> list[pa.Array]:
        columns = self._read_columns(records)
        return [convert(column) for convert, column in zip(self._converters, columns, strict=True)]

    def _with_exact_instants(
        self, records: list[Any], messages: list[Message]
    ) -> tuple[list[Any], list[Message]]:
        good: list[tuple[Any, Message]] = []
        for record, message in zip(records, messages, strict=True):
            # msgspec cuts instants to microseconds, so the text is read again for the further
            # digits.
            text = (message.value() or b"")[self._header_bytes :]
            try:
                if FINER.search(text):
                    make_exact(record, msgspec.json.decode(text), self._columns)
            except ValueError as error:
                self.refusals.refuse(message, str(error))
            else:
                good.append((record, message))
        return [record for record, _ in good], [message for _, message in good]

    def _add_one_by_one(self, messages: list[Message]) -> tuple[list[Any], list[Message]]:
        records: list[Any] = []
        good: list[Message] = []
        for message in messages:
            try:
                records.append(self._decode(message.value()))
            except DECODE_ERRORS as error:
                value = message.value()
                json = None if value is None else value[self._header_bytes :]
                self.refusals.refuse(message, fault_of(error, json, self._columns))
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
                self.refusals.refuse(message, fault)
        return [record for record, _ in good], [message for _, message in good]


def join_columns(parts: Sequence[list[pa.Array]]) -> list[pa.Array]:
    """Return the columns with the rows of all `parts`, in order."""
    return [pa.concat_arrays(list(column)) for column in zip(*parts, strict=True)]


def behind_header(decode: Callable[[Any], Any]) -> Callable[[bytes | None], Any]:
    """Return a function that removes the registry's header from a value and calls `decode`."""

    def decode_behind_header(value: bytes | None) -> Any:
        if value is None:
            raise ValueError(TOMBSTONE)
        if schema_id_of(value) is None:
            raise ValueError(UNFRAMED)
        return decode(memoryview(value)[HEADER_BYTES:])

    return decode_behind_header


def _headers(messages: Sequence[Message]) -> pa.Array:
    return pa.array(
        [
            None if pairs is None else [{"key": key, "value": value} for key, value in pairs]
            for pairs in map(read_headers, messages)
        ],
        type=HEADERS_FIELD.type,
    )
