"""The encoding of rows to records: the columns of key, value, topic, partition and headers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import cache
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types as arrow
from typing_extensions import assert_never

from onceflow.clients.kafka.settings import KEY_COLUMN
from onceflow.core.arrow.kinds import cast_rows, is_list, is_text, to_plain_rows, to_plain_type
from onceflow.core.arrow.nested_rows import filter_batch
from onceflow.core.errors import ConfigError, InvariantViolation
from onceflow.core.spi.bad_rows import BadRows
from onceflow.formats.encoding import WrittenSchema, value_encoder
from onceflow.formats.faulty_parts import ENCODING_ERRORS
from onceflow.formats.json.encoder import JsonObjects
from onceflow.sinks.kafka import record_keys
from onceflow.sinks.kafka.record_keys import build_schema_text, resolve_written_schema
from onceflow.sinks.kafka.records import (
    FRAME_BYTES,
    HEADER_TYPE,
    HEADERS,
    KEY,
    PARTITION,
    TOPIC,
    TOPIC_TYPE,
    VALUE,
    record_bytes,
    stamp,
)
from onceflow.sinks.kafka.settings import KafkaSinkSettings, RecordFormat

RAW_COLUMNS = (KEY, VALUE, HEADERS)
"""The columns that `format="raw"` writes, under Spark's names."""
ORIGIN_COLUMNS = ("topic", "partition", "offset", "timestamp", "timestampType")
"""Further columns of a raw Kafka source, which are ignored without an error."""


def require_columns(settings: KafkaSinkSettings, schema: pa.Schema) -> None:
    """Raise ConfigError unless rows of `schema` have the columns that the settings name.

    Raises:
        ConfigError: A column is missing, or its type does not fit its purpose.
    """
    if settings.topic_column is not None:
        _require(schema, settings.topic_column, "topic_column", is_text, "a string")
    if settings.partition_column is not None:
        _require(
            schema, settings.partition_column, "partition_column", arrow.is_integer, "an integer"
        )
    if settings.headers_column is not None:
        _require(schema, settings.headers_column, "headers", _is_headers, _HEADERS_WANTED)
    for name in settings.key:
        _require(schema, name, "key", lambda _: True, "")
    if settings.format is RecordFormat.RAW:
        _require_raw(settings, schema)


_HEADERS_WANTED = "a list of structs (key: string, value: binary or string), or a map of those"


def _require_raw(settings: KafkaSinkSettings, schema: pa.Schema) -> None:
    if settings.key:
        raise ConfigError("format='raw' takes the key from the column 'key'; omit key=")
    _require(schema, VALUE, "format='raw'", record_keys.holds_bytes, "binary or string")
    if KEY in schema.names:
        _require(schema, KEY, "format='raw'", record_keys.holds_bytes, "binary or string")
    if HEADERS in schema.names:
        _require(schema, HEADERS, "format='raw'", _is_headers, _HEADERS_WANTED)
    used = {settings.topic_column, settings.partition_column, settings.headers_column}
    lost = sorted(set(schema.names) - {*RAW_COLUMNS, *ORIGIN_COLUMNS} - used)
    if lost:
        raise ConfigError(
            f"format='raw' writes the columns {', '.join(RAW_COLUMNS)}, and columns {lost} would be"
            " lost: drop them before the sink, or use format='json'"
        )


def _require(
    schema: pa.Schema, name: str, setting: str, fits: Callable[[pa.DataType], bool], expected: str
) -> None:
    if name not in schema.names:
        raise ConfigError(f"{setting}: the rows have no column {name!r}, only {schema.names}")
    kind = to_plain_type(schema.field(name).type)
    if not fits(kind):
        raise ConfigError(f"{setting}: column {name!r} is {kind} and must be {expected}")


def _is_headers(kind: pa.DataType) -> bool:
    if arrow.is_map(kind):
        return is_text(kind.key_type) and record_keys.holds_bytes(kind.item_type)
    if not is_list(kind) or not arrow.is_struct(kind.value_type):
        return False
    members = list(kind.value_type)
    return [member.name for member in members] == ["key", "value"] and all(
        record_keys.holds_bytes(member.type) for member in members
    )


class RecordEncoder:
    """An encoder of batches of one schema; it leaves out or refuses rows that are no records."""

    def __init__(self, settings: KafkaSinkSettings, schema: pa.Schema, bad_rows: BadRows) -> None:
        """Choose the columns.

        Raises:
            ConfigError: The rows lack the columns or types that the settings name.
        """
        self._settings = settings
        self._schema = schema
        self._bad_rows = bad_rows
        self._partitions: dict[str, int] = {}
        self._find_compacted_topics: Callable[[], Collection[str]] = tuple
        require_columns(settings, schema)
        self._null_key = record_keys.find_null_key(settings, schema)
        headers = settings.headers_column
        if headers is None and settings.format is RecordFormat.RAW and HEADERS in schema.names:
            headers = HEADERS
        self._headers = headers
        self._registered_keys: record_keys.RegisteredKeys | None = None
        if settings.key_format is not None and settings.key_format.registered:
            self._registered_keys = record_keys.RegisteredKeys(settings, schema)
            self._key: record_keys.EncodeRows = _before_schema
        else:
            self._key = record_keys.plain_key_encoder(settings, schema)
        self._value = _value_encoder(settings, schema, headers)

    def ask_schema(self) -> None:
        """Ask the registry for the schemas of keys and values, before the first row.

        Raises:
            ConfigError: The registry refuses the rows' schema or the user, or has no schema that
                fits.
            SinkError: It did not reply within the sink's deadline.
        """
        if self._settings.format.registered:
            columns = _value_columns(self._settings, self._schema, self._headers)
            schema = resolve_written_schema(self._settings, columns)
            self._value = _build_registered_encoder(self._settings, columns, schema)
        keys = self._registered_keys
        if keys is not None:
            self._key = keys.encoder(resolve_written_schema(keys.settings, keys.columns))

    def know_partitions(self, counts: dict[str, int]) -> None:
        """Set the number of partitions of each topic; rows with other partitions are refused."""
        self._partitions = counts

    def refuse_null_keys(self, find_compacted_topics: Callable[[], Collection[str]]) -> None:
        """Refuse rows that have no key and go to a compacted topic: its broker rejects them.

        If a topic is compacted only later, its broker still rejects such rows at their commit.

        Args:
            find_compacted_topics: Returns the topics that are compacted. It is called once, for the
                first row without a key. Most jobs have no such row, and do not ask the broker.
        """
        self._find_compacted_topics = cache(find_compacted_topics)

    def encode(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return the records of `batch`, in order, in the layout of `records`.

        Raises:
            BadRow: A row cannot be a record, and bad rows fail the job.
        """
        rows = self._routable(to_plain_rows(batch))
        parts = [part for part in self._encode(rows) if part.num_rows]
        if not parts:
            return stamp(self._no_records(), self._settings.topics)
        records = parts[0] if len(parts) == 1 else _join(parts)
        return stamp(records, self._settings.topics)

    def _encode(self, rows: pa.RecordBatch) -> list[pa.RecordBatch]:
        """Return the records; halve `rows` to find those that cannot be encoded."""
        if not rows.num_rows:
            return []
        try:
            return [self._within_limits(rows, self._records(rows))]
        except ENCODING_ERRORS as error:
            # Bad rows are rare. Halving needs some twenty more tries for one bad row in a million;
            # checking each row would slow down every batch.
            if rows.num_rows == 1:
                self._bad_rows.reject(rows, [f"the row cannot be encoded: {error}"])
                return []
            half = rows.num_rows // 2
            # In row order, which is the order in the topic.
            return [*self._encode(rows.slice(0, half)), *self._encode(rows.slice(half))]

    def _records(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        settings = self._settings
        columns: dict[str, pa.Array] = {KEY: self._key(rows), VALUE: self._value(rows)}
        if settings.topic_column is not None:
            # A dictionary, because many rows name few topics.
            names = rows.column(settings.topic_column).cast(pa.string())
            columns[TOPIC] = cast_rows(names.dictionary_encode(), TOPIC_TYPE)
        if settings.partition_column is not None:
            columns[PARTITION] = rows.column(settings.partition_column).cast(pa.int32())
        if self._headers is not None:
            columns[HEADERS] = _headers(rows.column(self._headers))
        return pa.RecordBatch.from_pydict(columns)

    def _no_records(self) -> pa.RecordBatch:
        """Return an empty batch of records, without encoding: there may be no value to encode."""
        settings = self._settings
        kinds: dict[str, pa.DataType] = {KEY: pa.binary(), VALUE: pa.binary()}
        if settings.topic_column is not None:
            kinds[TOPIC] = TOPIC_TYPE
        if settings.partition_column is not None:
            kinds[PARTITION] = pa.int32()
        if self._headers is not None:
            kinds[HEADERS] = HEADER_TYPE
        return pa.RecordBatch.from_pydict({name: pa.array([], kinds[name]) for name in kinds})

    def _within_limits(self, rows: pa.RecordBatch, records: pa.RecordBatch) -> pa.RecordBatch:
        limit = self._settings.message_bytes_max
        if self._headers is None and records.nbytes + FRAME_BYTES <= limit:
            # Even one record with the bytes of all would not be too large.
            return records
        sizes = record_bytes(records)
        too_large: Any = pc.greater(sizes, limit)
        if not pc.any(too_large).as_py():
            return records
        refused_sizes: list[int] = sizes.filter(too_large).to_pylist()
        self._bad_rows.reject(
            filter_batch(rows, too_large),
            [
                f"the record takes {size} bytes, over message.max.bytes={limit}; raise it here and"
                " max.message.bytes at the topic"
                for size in refused_sizes
            ],
        )
        return records.filter(pc.invert(too_large))

    def _routable(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Return the rows whose topic and partition exist."""
        settings = self._settings
        if settings.topic_column is not None:
            known: Any = pc.is_in(
                rows.column(settings.topic_column).cast(pa.string()), pa.array(settings.topics)
            )
            rows = self._bad_rows.sift(
                rows,
                pc.invert(known),
                f"column {settings.topic_column!r} must name one of the topics"
                f" {', '.join(settings.topics)}",
                shows=settings.topic_column,
            )
        if settings.partition_column is not None:
            rows = self._with_partitions(rows, settings.partition_column)
        if self._null_key:
            rows = self._with_keys(rows, self._null_key)
        return rows

    def _with_keys(self, rows: pa.RecordBatch, column: str) -> pa.RecordBatch:
        """Return the rows that have a key, or whose topic is not compacted."""
        keys: Any = rows.column(column)
        if not keys.null_count or not (topics := self._find_compacted_topics()):
            return rows
        compacted = pa.array([topic in topics for topic in self._topics(rows)])
        why = f"column {column!r} is the key, and a compacted topic takes no records without one"
        return self._bad_rows.sift(rows, pc.and_(keys.is_null(), compacted), why, shows=column)

    def _with_partitions(self, rows: pa.RecordBatch, column: str) -> pa.RecordBatch:
        counts: Any = pa.array([self._count(topic) for topic in self._topics(rows)], pa.int64())
        asked: Any = rows.column(column).cast(pa.int64())
        wrong: Any = pc.or_(pc.less(asked, 0), pc.greater_equal(asked, counts))
        why = f"column {column!r} must be a partition of the row's topic"
        return self._bad_rows.sift(rows, wrong, why, shows=column)

    def _topics(self, rows: pa.RecordBatch) -> list[str]:
        column = self._settings.topic_column
        if column is None:
            return [self._settings.topics[0]] * rows.num_rows
        topics: list[str] = rows.column(column).to_pylist()
        return topics

    def _count(self, topic: str) -> int:
        # Any partition passes before the brokers were asked: `validate` does not ask them.
        return self._partitions.get(topic, 2**31)


def _headers(column: pa.Array) -> pa.Array:
    """Return the headers of each row as a list.

    Raises:
        ValueError: A header has no key, or a key with a NUL.
    """
    rows: list[Any] = column.to_pylist()
    headers: list[list[dict[str, Any]] | None] = []
    for row in rows:
        pairs: Sequence[Any] = [
            (header["key"], header["value"]) if isinstance(header, dict) else header
            for header in row or ()
        ]
        for key, _ in pairs:
            _check_header_key(key)
        headers.append([{"key": key, "value": _bytes(value)} for key, value in pairs] or None)
    return pa.array(headers, HEADER_TYPE)


def _check_header_key(key: str | bytes | None) -> None:
    if key is None:
        raise ValueError("a header without key")
    if ("\0" if isinstance(key, str) else b"\0") in key:  # type: ignore[operator]
        raise ValueError(f"the header key {key!r}: librdkafka would cut it off at the NUL")


def _bytes(value: Any) -> bytes | None:
    return value.encode() if isinstance(value, str) else value


def _value_columns(
    settings: KafkaSinkSettings, schema: pa.Schema, headers: str | None
) -> pa.Schema:
    apart = {settings.topic_column, settings.partition_column, headers}
    if settings.key_format is not None and settings.key == (KEY_COLUMN,):
        apart.add(KEY_COLUMN)
    return pa.schema([field for field in schema if field.name not in apart])


def _value_encoder(
    settings: KafkaSinkSettings, schema: pa.Schema, headers: str | None
) -> record_keys.EncodeRows:
    match settings.format:
        case RecordFormat.RAW:
            return lambda rows: rows.column(VALUE).cast(pa.binary())
        case RecordFormat.AVRO | RecordFormat.PROTOBUF | RecordFormat.JSON_SCHEMA:
            # Built only for its errors: a type that no schema can hold is refused before any broker
            # is asked.
            if settings.auto_register:
                build_schema_text(settings, _value_columns(settings, schema, headers))
            return _before_schema
        case RecordFormat.JSON:
            columns = _value_columns(settings, schema, headers)
            names = columns.names
            objects = JsonObjects(columns)
            return lambda rows: pa.array(
                objects.encode([rows.column(name) for name in names]), pa.binary()
            )
        case _:
            assert_never(settings.format)


def _before_schema(rows: pa.RecordBatch) -> pa.Array:
    raise InvariantViolation(
        f"{rows.num_rows} rows were to be encoded before their schema is known"
    )


def _build_registered_encoder(
    settings: KafkaSinkSettings, columns: pa.Schema, schema: WrittenSchema
) -> record_keys.EncodeRows:
    encode = value_encoder(settings.schema_kind, columns, schema, alone=False)
    return lambda rows: pa.array(encode([rows.column(name) for name in columns.names]), pa.binary())


def _join(batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    schema = batches[0].schema
    columns = [
        pa.concat_arrays([batch.column(index) for batch in batches])
        if not arrow.is_dictionary(field.type)
        # Each part has its own dictionary; the joined column has one.
        else pa.concat_arrays(
            [batch.column(index).dictionary_decode() for batch in batches]
        ).dictionary_encode()
        for index, field in enumerate(schema)
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)
