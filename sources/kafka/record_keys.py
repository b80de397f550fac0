"""The keys of records as one column, `_key`, beside those of the value.

By a schema registry a key is decoded as a value is, by a subject of its own: a record, message or
object becomes a struct, and what is none becomes a value of its type. A record without a key has
null. A key that cannot be decoded makes a bad record of it, as a value does.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol, cast

import pyarrow as pa
from confluent_kafka import Message

from onceflow.connectors.kafka.decoding import BatchDecoder, Decoded, PlainDecoder
from onceflow.connectors.kafka.fitting import Faults
from onceflow.connectors.kafka.json.columns import CONVERSION_ERRORS, converter_of, record_type
from onceflow.connectors.kafka.json.records import (
    DECODE_ERRORS,
    column_reader,
    fault_of,
    late_fault_of,
)
from onceflow.connectors.kafka.keys import KEY_COLUMN, KeyFormat
from onceflow.connectors.kafka.wire import HEADER_BYTES, UNFRAMED, schema_id_of
from onceflow.core.decoders import json_decoder
from onceflow.core.protocol.invariant import InvariantViolation
from onceflow.sources.kafka.decoded_rows import Rows
from onceflow.sources.kafka.messages import KEY, SplitRuns, runs_of
from onceflow.sources.kafka.settings import KafkaSettings


class RowsOfValues(Rows, Protocol):
    """Tells which messages its rows are of."""

    kept: list[Message]
    """Those of the rows that were taken last."""


class KeyedRows:
    """Rows with their records' keys."""

    def __init__(
        self,
        rows: RowsOfValues,
        decoder: BatchDecoder,
        schema: pa.Schema,
        place: int,
        topics: Sequence[str] = (),
        *,
        by_split: bool = False,
    ) -> None:
        """Put what `decoder` makes of keys at `place` of `schema`."""
        self.runs: SplitRuns = []
        self._by_split = by_split
        self._topics = topics
        self._rows = rows
        self._decoder = decoder
        self._schema = schema
        self._place = place
        self.refusals = rows.refusals

    @property
    def size_bytes(self) -> int:
        """About how many bytes of values are collected."""
        return self._rows.size_bytes

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, messages: list[Message]) -> None:
        """Collect `messages`; as the rows of values raise."""
        self._decoder.expect(list(map(KEY, messages)), messages)
        self._rows.add(messages)

    def ready(self) -> bool:
        """Return whether every schema that keys and values need is there.

        Raises:
            SourceUnavailable: One did not come within the deadline.
            ConfigError: The registry refuses us.
        """
        of_keys = self._decoder.ready()
        return self._rows.ready() and of_keys

    def take(self) -> pa.RecordBatch:
        """Return the rows collected as one batch; none may be left of it.

        Raises:
            BadRecord: A record cannot be decoded, and such are not to be left out.
        """
        batch, messages = self._rows.take(), self._rows.kept
        keys = list(map(KEY, messages))
        places = [place for place, key in enumerate(keys) if key is not None]
        decoded = self._decoder.decode(
            [keys[place] for place in places], [messages[place] for place in places]
        )
        bad = {places[one]: why for one, why in decoded.faults.items()}
        for place in sorted(bad):
            self.refusals.refuse(messages[place], f"its key: {bad[place]}")
        (column,) = decoded.columns
        if len(decoded.kept) < len(messages):
            found = {places[one]: at for at, one in enumerate(decoded.kept)}
            good = [place for place in range(len(messages)) if place not in bad]
            # A record without a key has no place among those decoded, and so null.
            column = column.take(pa.array([found.get(place) for place in good], pa.int64()))
            batch = batch.take(pa.array(good, pa.int64()))
            messages = [messages[place] for place in good]
        if self._by_split:
            self.runs = runs_of(messages, self._topics)
        arrays = [*batch.columns[: self._place], column, *batch.columns[self._place :]]
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)


def key_decoder(settings: KafkaSettings) -> BatchDecoder:
    """Return what decodes keys to one column.

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
            from onceflow.connectors.kafka.avro.decoder import AvroDecoder, as_member

            columns = pa.schema([field])
            read = partial(as_member, name=KEY_COLUMN)
            return AvroDecoder(columns, None, settings.open_schemas(), read)
        case KeyFormat.PROTOBUF if schema is not None:
            from onceflow.connectors.kafka.protobuf.decoder import MessageDecoder

            return MessageDecoder(schema, settings.open_schemas())
        case _:
            raise InvariantViolation(f"keys are decoded by {settings.key_format} without a schema")


class _Bytes(PlainDecoder):
    """Keys as they are."""

    def decode(self, values: Sequence[bytes | None], messages: Sequence[Message]) -> Decoded:
        """Return `values`."""
        del messages
        return Decoded([pa.array(values, pa.binary())], range(len(values)), {})


class _Texts(PlainDecoder):
    """Keys in UTF-8."""

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
        for place, value in enumerate(values):
            try:
                kept[place] = (value or b"").decode()
            except UnicodeDecodeError as error:
                faults[place] = f"it is no text in UTF-8: {error}"
        return Decoded([pa.array(kept.values(), pa.string())], list(kept), faults)


class _Documents(PlainDecoder):
    """JSON behind the registry's header; read as the only field of an object."""

    def __init__(self, field: pa.Field) -> None:
        self._columns = pa.schema([field])
        self._decode = json_decoder(record_type(self._columns)).decode
        self._read = column_reader(1)
        self._convert = converter_of(field.type)

    def decode(self, values: Sequence[bytes | None], messages: Sequence[Message]) -> Decoded:
        """Return what `values` hold."""
        del messages
        faults: Faults = {}
        kept: list[int] = []
        records: list[Any] = []
        for place, value in enumerate(values):
            if value is None or schema_id_of(value) is None:
                faults[place] = UNFRAMED
                continue
            document = b'{"' + KEY_COLUMN.encode() + b'":' + value[HEADER_BYTES:] + b"}"
            try:
                records.append(cast("Any", self._decode(document)))
                kept.append(place)
            except DECODE_ERRORS as error:
                faults[place] = fault_of(error, document, self._columns)
        (column,) = self._read(records)
        try:
            return Decoded([self._convert(column)], kept, faults)
        except CONVERSION_ERRORS:
            pass
        whys = [late_fault_of([one], self._columns, [self._convert]) for one in column]
        faults |= {place: why for place, why in zip(kept, whys, strict=True) if why is not None}
        fitting = [one for one, why in zip(column, whys, strict=True) if why is None]
        kept = [place for place in kept if place not in faults]
        return Decoded([self._convert(fitting)], kept, faults)
