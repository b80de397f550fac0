"""Decodes Debezium's envelope in JSON, with or without the schema beside its payload."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import compress
from typing import Any, cast

import msgspec
import pyarrow as pa
from confluent_kafka import Message

from onceflow.connectors.kafka.decoding import Decoded, PlainDecoder
from onceflow.connectors.kafka.fitting import Faults
from onceflow.connectors.kafka.json.columns import (
    CONVERSION_ERRORS,
    Convert,
    converter_of,
    record_type,
)
from onceflow.connectors.kafka.json.instants import FINER, any_finer, holds_instants, make_exact
from onceflow.connectors.kafka.json.records import (
    DECODE_ERRORS,
    column_reader,
    fault_of,
    late_fault_of,
)
from onceflow.core.msgspec_decoders import json_decoder
from onceflow.sources.kafka.debezium import (
    DELETE,
    NO_AFTER,
    NO_BEFORE,
    NO_COLUMN_IN_KEY,
    PUTS,
    UnavailableValues,
    describe_other_operation,
    schema_of_changes,
)
from onceflow.sources.kafka.debezium_units import WrittenUnits

_BASE64 = "Invalid decimal string"
"""What is said of a decimal that stands there as bytes in base64."""
_DECIMAL_ADVICE = "; Debezium writes decimals as text with decimal.handling.mode=string"


class DebeziumJsonDecoder(PlainDecoder):
    """Decodes changes to the columns of the rows that they change."""

    def __init__(self, columns: pa.Schema, unavailable: UnavailableValues) -> None:
        self._unavailable = unavailable
        self._changes = schema_of_changes(columns)
        loose = pa.schema([column.with_nullable(True) for column in columns])
        put, deleted = record_type(columns), record_type(loose)
        self._decode = _decoder_of(
            _with_payload("Change", [("op", str), ("after", put), ("before", deleted)])
        )
        self._decode_key = _decoder_of(
            msgspec.defstruct("Key", [("payload", cast("Any", deleted) | None, None)])
        )
        self._decode_loose = _decoder_of(deleted)
        self._columns = columns
        self._units = WrittenUnits(columns)
        self._has_instants = any(holds_instants(column.type) for column in columns)
        self._loose = loose
        self._read_columns = column_reader(len(columns))
        self._converters: list[Convert] = [converter_of(column.type) for column in columns]

    def decode(self, values: Sequence[bytes | None], messages: Sequence[Message]) -> Decoded:
        """Decode `values` to changes of rows; tombstones change nothing."""
        faults: Faults = {}
        kept: list[int] = []
        records: list[Any] = []
        operations: list[str] = []
        finer = self._has_instants and any_finer(values)
        for at, value in enumerate(values):
            if value is None:
                continue
            try:
                outer = self._decode(value)
                # With schemas in the messages the change is in `payload`, without them it is the
                # whole value.
                change = outer if outer.payload is None else outer.payload
                record = self._find_row(change, messages[at])
                self._units.of(outer.schema).convert(record)
                if finer and FINER.search(value):
                    make_exact(record, _read_row_as_written(value, change.op), self._columns)
            except DECODE_ERRORS as error:
                faults[at] = _envelope_fault(error, value, self._columns)
                continue
            kept.append(at)
            records.append(record)
            operations.append(change.op)
        return self._convert(kept, records, operations, faults)

    def _find_row(self, change: Any, message: Message) -> Any:
        """Return the row that `change` is about.

        Raises:
            ValueError: There is none, or it cannot be decoded; see `DECODE_ERRORS`.
        """
        if change.op in PUTS:
            if change.after is None:
                raise ValueError(NO_AFTER)
            return change.after
        if change.op != DELETE:
            raise ValueError(describe_other_operation(change.op))
        if change.before is not None:
            return change.before
        key = message.key()
        if key is None:
            raise ValueError(NO_BEFORE)
        # Without `before` (REPLICA IDENTITY DEFAULT) only the record's key says which row is
        # deleted.
        payload = self._decode_key(key).payload
        row = self._decode_loose(key) if payload is None else payload
        if all(value is None for value in msgspec.structs.astuple(row)):
            raise ValueError(NO_COLUMN_IN_KEY)
        return row

    def _convert(
        self, kept: list[int], records: list[Any], operations: list[str], faults: Faults
    ) -> Decoded:
        try:
            columns = self._arrays(records)
        except CONVERSION_ERRORS:
            late = [self._late_fault(record) for record in records]
            faults |= {at: why for at, why in zip(kept, late, strict=True) if why is not None}
            return self._leave_out_faults(kept, records, operations, faults)
        before = len(faults)
        self._unavailable.note_rows(columns, self._changes, kept, faults)
        if len(faults) > before:
            return self._leave_out_faults(kept, records, operations, faults)
        return Decoded([*columns, pa.array(operations, pa.string())], kept, faults)

    def _leave_out_faults(
        self, kept: list[int], records: list[Any], operations: list[str], faults: Faults
    ) -> Decoded:
        good = [at not in faults for at in kept]

        columns = self._arrays(list(compress(records, good)))
        operation = pa.array(compress(operations, good), pa.string())
        return Decoded([*columns, operation], list(compress(kept, good)), faults)

    def _arrays(self, records: list[Any]) -> list[pa.Array]:
        columns = self._read_columns(records)
        return [convert(column) for convert, column in zip(self._converters, columns, strict=True)]

    def _late_fault(self, record: Any) -> str | None:
        values = [column[0] for column in self._read_columns([record])]
        return late_fault_of(values, self._loose, self._converters)


def _with_payload(name: str, fields: list[tuple[str, Any]]) -> type[msgspec.Struct]:
    """Return a type that has `fields` itself, or `payload` with these fields beside a schema."""
    optional: list[Any] = [(field, kind | None, None) for field, kind in fields]
    inner: Any = msgspec.defstruct(f"{name}Payload", optional)
    around: list[Any] = [("payload", inner | None, None), ("schema", msgspec.Raw, msgspec.Raw())]
    return msgspec.defstruct(name, [*optional, *around])


def _decoder_of(kind: Any) -> Callable[[Any], Any]:
    return cast("Callable[[Any], Any]", json_decoder(kind).decode)


def _read_row_as_written(value: bytes, operation: str) -> Any:
    """Return the row of a change as plain JSON; None where only the key has it."""
    outer: Any = msgspec.json.decode(value)
    change = outer if outer.get("payload") is None else outer["payload"]
    return change.get("before" if operation == DELETE else "after")


def _envelope_fault(error: Exception, value: bytes, columns: pa.Schema) -> str:
    """Say what is wrong with `value`, and in which column if the fault is inside a row."""
    # The path of the error begins in the envelope; users know the column.
    for part in ("payload.after.", "payload.before.", "after.", "before."):
        shown = str(error).replace(f"`$.{part}", "`$.")
        if shown != str(error):
            fault = fault_of(ValueError(shown), b"null", columns).removesuffix(", found None")
            return f"{fault}{_DECIMAL_ADVICE if _BASE64 in fault else ''}"
    return fault_of(error, value, columns)
