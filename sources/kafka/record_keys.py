"""The collector that decodes the keys of records to the column `_key`.

With a schema registry a key is decoded like a value, by its own subject. An Avro record, a message
or an object becomes a struct. Any other key becomes a value of its type. A record without a key has
null in `_key`. A record whose key cannot be decoded is a bad record.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol, cast

import msgspec
import pyarrow as pa
from confluent_kafka import Message

from onceflow.clients.kafka.settings import KEY_COLUMN, KeyFormat
from onceflow.core.decoding import json_decoder
from onceflow.core.errors import InvariantViolation
from onceflow.formats.decoding import BatchDecoder, Decoded, PlainDecoder
from onceflow.formats.fitting import Faults
from onceflow.formats.json.columns import (
    CONVERSION_ERRORS,
    DECODE_ERRORS,
    FINER,
    column_reader,
    converter_of,
    fault_of,
    holds_instants,
    late_fault_of,
    make_exact,
    record_type,
)
from onceflow.formats.registry_schemas import HEADER_BYTES, UNFRAMED, schema_id_of
from onceflow.sources.kafka.decoded_rows import Rows, drop_beyond_python
from onceflow.sources.kafka.messages import KEY, Records, SplitRuns, messages_of, split_runs_of
from onceflow.sources.kafka.settings import KafkaSettings


class RowsOfValues(Rows, Protocol):
    """A collector of rows that keeps the rows' messages."""

    kept: list[Message]
    """The messages of the rows that `take` returned last."""


class KeyedRows:
    """A collector that adds the records' keys to the rows of another collector."""

    def __init__(
        self,
        rows: RowsOfValues,
        decoder: BatchDecoder,
        schema: pa.Schema,
        column_index: int,
        topics: Sequence[str] = (),
        *,
        by_split: bool = False,
    ) -> None:
        """Add the decoded keys to the rows of `rows`, as column number `column_index`.

        `decoder` converts the keys. `schema` has all columns, including that of the keys.
        """
        self.runs: SplitRuns = []
        self._by_split = by_split
        self._topics = topics
        self._rows = rows
        self._decoder = decoder
        self._schema = schema
        self._column_index = column_index
        self._key_columns = pa.schema([schema.field(column_index)])
        self.refusals = rows.refusals

    @property
    def size_bytes(self) -> int:
        """The approximate number of bytes of the collected values."""
        return self._rows.size_bytes

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, messages: Records) -> None:
        """Collect `messages`. Raises the errors of the collector of values."""
        messages = messages_of(messages)
        self._decoder.expect(list(map(KEY, messages)), messages)
        self._rows.add(messages)

    def ready(self) -> bool:
        """Return True if every schema that keys and values need has arrived.

        Raises:
            SourceUnavailable: A schema did not arrive within the deadline.
            ConfigError: The registry refuses the user.
        """
        # Call both, so that both send their requests to the registry at the same time.
        of_keys = self._decoder.ready()
        return self._rows.ready() and of_keys

    def take(self) -> pa.RecordBatch:
        """Return the collected rows as one batch. The batch is empty if all records were bad.

        Raises:
            BadRecord: A record cannot be decoded, and `on_bad_record` is "fail".
        """
        batch, messages = self._rows.take(), self._rows.kept
        keys = list(map(KEY, messages))
        indices = [index for index, key in enumerate(keys) if key is not None]
        decoded = self._decoder.decode(
            [keys[index] for index in indices], [messages[index] for index in indices]
        )
        decoded = drop_beyond_python(decoded, self._key_columns)
        bad = {indices[row]: why for row, why in decoded.faults.items()}
        for index in sorted(bad):
            self.refusals.refuse(messages[index], f"its key: {bad[index]}")
        (column,) = decoded.columns
        if len(decoded.kept) < len(messages):
            key_row_of = {indices[row]: kept_row for kept_row, row in enumerate(decoded.kept)}
            good = [index for index in range(len(messages)) if index not in bad]
            # A record without a key has no row among the decoded keys, so `take` gives it null.
            column = column.take(pa.array([key_row_of.get(index) for index in good], pa.int64()))
            batch = batch.take(pa.array(good, pa.int64()))
            messages = [messages[index] for index in good]
        if self._by_split:
            self.runs = split_runs_of(messages, self._topics)
        arrays = [
            *batch.columns[: self._column_index],
            column,
            *batch.columns[self._column_index :],
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)


def key_decoder(settings: KafkaSettings) -> BatchDecoder:
    """Return the decoder of keys to one column.

    Raises:
        ConfigError: The registry's client, or Protobuf, is not installed, or refuses an option.
    """
    field, schema = settings.key_field, settings.key_schema
    match settings.key_format:
        case KeyFormat.STRING:
            return _Texts()
        case KeyFormat.RAW:
            return _Bytes()
        case KeyFormat.JSON_SCHEMA if field is not None:
            return _Documents(field)
        case KeyFormat.AVRO if field is not None:
            from onceflow.formats.avro.decoder import AvroDecoder, as_member

            columns = pa.schema([field])
            read = partial(as_member, name=KEY_COLUMN)
            reader = None if schema is None else read(schema.kept)
            return AvroDecoder(columns, reader, settings.open_key_schemas(), read)
        case KeyFormat.PROTOBUF if schema is not None:
            from onceflow.formats.protobuf.decoder import MessageDecoder

            return MessageDecoder(schema, settings.open_key_schemas())
        case _:
            raise InvariantViolation(f"keys are decoded by {settings.key_format} without a schema")


class _Bytes(PlainDecoder):
    """A decoder that keeps keys as bytes."""

    def decode(self, values: Sequence[bytes | None], messages: Sequence[Message]) -> Decoded:
        """Return `values` as they are."""
        del messages
        return Decoded([pa.array(values, pa.binary())], range(len(values)), {})


class _Texts(PlainDecoder):
    """A decoder of keys that are UTF-8 text."""

    def decode(self, values: Sequence[bytes | None], messages: Sequence[Message]) -> Decoded:
        """Return `values` as text."""
        del messages
        try:
            texts = pa.array(values, pa.binary()).cast(pa.string())
            return Decoded([texts], range(len(values)), {})
        except pa.ArrowInvalid:
            pass
        faults: Faults = {}
        kept: dict[int, str] = {}
        for index, value in enumerate(values):
            try:
                kept[index] = (value or b"").decode()
            except UnicodeDecodeError as error:
                faults[index] = f"it is not text in UTF-8: {error}"
        return Decoded([pa.array(kept.values(), pa.string())], list(kept), faults)


class _Documents(PlainDecoder):
    """A decoder of JSON after the registry's header.

    It reads each key as the only field of an object.
    """

    def __init__(self, field: pa.Field) -> None:
        self._columns = pa.schema([field])
        self._decode = json_decoder(record_type(self._columns)).decode
        self._check_document = json_decoder(msgspec.Raw).decode
        self._read = column_reader(1)
        self._convert = converter_of(field.type)
        self._has_instants = holds_instants(field.type)

    def decode(self, values: Sequence[bytes | None], messages: Sequence[Message]) -> Decoded:
        """Decode `values`, JSON documents after the registry's header."""
        del messages
        faults: Faults = {}
        kept: list[int] = []
        records: list[Any] = []
        for index, value in enumerate(values):
            if value is None or schema_id_of(value) is None:
                faults[index] = UNFRAMED
                continue
            # Wrap the key into an object of one field, so that the decoder of records can read it.
            text = value[HEADER_BYTES:]
            document = b'{"' + KEY_COLUMN.encode() + b'":' + text + b"}"
            try:
                # A text such as `1,"a":2` is not a JSON document, but would add fields to the
                # object.
                self._check_document(text)
                record = cast("Any", self._decode(document))
                if self._has_instants and FINER.search(text):
                    make_exact(record, msgspec.json.decode(document), self._columns)
            except DECODE_ERRORS as error:
                faults[index] = fault_of(error, document, self._columns)
            else:
                records.append(record)
                kept.append(index)
        (column,) = self._read(records)
        try:
            return Decoded([self._convert(column)], kept, faults)
        except CONVERSION_ERRORS:
            pass
        whys = [late_fault_of([decoded], self._columns, [self._convert]) for decoded in column]
        faults |= {index: why for index, why in zip(kept, whys, strict=True) if why is not None}
        fitting = [decoded for decoded, why in zip(column, whys, strict=True) if why is None]
        kept = [index for index in kept if index not in faults]
        return Decoded([self._convert(fitting)], kept, faults)
