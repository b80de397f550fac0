"""A decoder of Debezium's envelope in JSON, with or without a schema beside its payload."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import compress
from typing import Any, cast

import msgspec
import pyarrow as pa
from confluent_kafka import Message

from onceflow.core.decoding import json_decoder
from onceflow.formats.debezium.changes import (
    DELETE,
    NO_AFTER,
    NO_BEFORE,
    NO_COLUMN_IN_KEY,
    PUTS,
    UPDATE,
    DebeziumOptions,
    UnavailableValues,
    describe_other_operation,
    describe_unknown_key,
    schema_of_changes,
)
from onceflow.formats.debezium.fields import WrittenFields, types_to_decode
from onceflow.formats.decoding import Decoded, PlainDecoder
from onceflow.formats.fitting import Faults
from onceflow.formats.json.columns import (
    CONVERSION_ERRORS,
    DECODE_ERRORS,
    FINER,
    Convert,
    any_finer,
    column_reader,
    converter_of,
    fault_of,
    holds_instants,
    late_fault_of,
    make_exact,
    record_type,
)

_BASE64 = "Invalid decimal string"
"""The decoder's error text for a decimal that is written as base64 bytes."""
_SIDES: Mapping[str, str] = {**dict.fromkeys(PUTS, "after"), DELETE: "before"}
"""The side of an envelope that holds the row, by the operation."""
_SCHEMA: Any = ("schema", msgspec.Raw, msgspec.Raw())
_DECIMAL_ADVICE = "; Debezium writes decimals as text with decimal.handling.mode=string"


class DebeziumJsonDecoder(PlainDecoder):
    """A decoder of changes to columns: those of the changed rows, and the operation."""

    def __init__(
        self, columns: pa.Schema, unavailable: UnavailableValues, options: DebeziumOptions
    ) -> None:
        self._unavailable = unavailable
        self._changes = schema_of_changes(columns)
        read = types_to_decode(columns, options.binary_handling_mode)
        loose = pa.schema([column.with_nullable(True) for column in columns])
        put = record_type(read)
        deleted = record_type(pa.schema([column.with_nullable(True) for column in read]))
        self._decode = _make_decoder(
            _with_payload("Change", [("op", str), ("after", put), ("before", deleted)])
        )
        key: list[Any] = [("payload", cast("Any", deleted) | None, None), _SCHEMA]
        self._decode_key = _make_decoder(msgspec.defstruct("Key", key))
        self._decode_loose = _make_decoder(deleted)
        self._columns = columns
        modes = options.decimal_handling_mode, options.binary_handling_mode
        self._fields = WrittenFields(columns, *modes)
        self._primary_key = [
            (name, f"c{columns.get_field_index(name)}") for name in options.primary_key
        ]
        self._has_instants = any(holds_instants(column.type) for column in columns)
        self._loose = loose
        self._read_columns = column_reader(len(columns))
        self._converters: list[Convert] = [converter_of(column.type) for column in columns]

    def decode(self, values: Sequence[bytes | None], messages: Sequence[Message]) -> Decoded:
        """Decode `values` to changes of rows. Tombstones change nothing."""
        faults: Faults = {}
        kept: list[int] = []
        records: list[Any] = []
        operations: list[str] = []
        finer = self._has_instants and any_finer(values)
        for at, value in enumerate(values):
            if value is None:
                continue
            try:
                changes = self._read_changes(value, messages[at], finer=finer)
            except DECODE_ERRORS as error:
                faults[at] = _envelope_fault(error, value, self._columns)
                continue
            for operation, record in changes:
                kept.append(at)
                records.append(record)
                operations.append(operation)
        return self._convert(kept, records, operations, faults)

    def _read_changes(
        self, value: bytes, message: Message, *, finer: bool
    ) -> Sequence[tuple[str, Any]]:
        """Return the changes of a message, each as an operation and a row.

        Raises:
            ValueError: The message has no change, or it cannot be decoded; see `DECODE_ERRORS`.
        """
        outer = self._decode(value)
        # With schemas enabled the change is in `payload`; without them it is the whole value.
        change = outer if outer.payload is None else outer.payload
        row = self._find_row(change, message)
        self._complete(row, outer.schema, value, _SIDES.get(change.op), finer=finer)
        if change.op != UPDATE or not self._primary_key:
            return [(change.op, row)]
        if change.before is None or any(
            getattr(change.before, attribute) is None for _, attribute in self._primary_key
        ):
            self._require_key_of_table(message)
            return [(change.op, row)]
        self._complete(change.before, outer.schema, value, "before", finer=finer)
        if all(
            getattr(change.before, attribute) == getattr(row, attribute)
            for _, attribute in self._primary_key
        ):
            return [(change.op, row)]
        return [(DELETE, change.before), (change.op, row)]

    def _complete(
        self, row: Any, schema: msgspec.Raw, text: bytes, side: str | None, *, finer: bool
    ) -> None:
        """Convert the values of `row` to the columns' types, with the exact values in `text`."""
        self._fields.of(schema).convert(row)
        is_finer = finer and FINER.search(text) is not None
        if is_finer or self._fields.may_have_two_meanings(text, schema):
            written = _read_row_as_written(text, side)
            if written is not None:
                if not bytes(schema):
                    self._fields.check_meanings(written)
                make_exact(row, written, self._columns)

    def _find_row(self, change: Any, message: Message) -> Any:
        """Return the row that `change` concerns.

        Raises:
            ValueError: There is no row, or it cannot be decoded; see `DECODE_ERRORS`.
        """
        if change.op in PUTS:
            if change.after is None:
                raise ValueError(NO_AFTER)
            return change.after
        if change.op != DELETE:
            raise ValueError(describe_other_operation(change.op))
        if change.before is not None and _has_values(change.before):
            return change.before
        row = self._read_key(message)
        if row is None:
            raise ValueError(NO_BEFORE)
        # Without `before`, or with an empty one (REPLICA IDENTITY DEFAULT), only the record's key
        # identifies the deleted row.
        if not _has_values(row):
            raise ValueError(NO_COLUMN_IN_KEY)
        return row

    def _read_key(self, message: Message) -> Any:
        """Return the row in the record's key, or None if the record has no key.

        Raises:
            ValueError: The key cannot be decoded; see `DECODE_ERRORS`.
        """
        key = message.key()
        if key is None:
            return None
        outer = self._decode_key(key)
        row = self._decode_loose(key) if outer.payload is None else outer.payload
        finer = self._has_instants and any_finer([key])
        self._complete(row, outer.schema, key, None, finer=finer)
        return row

    def _require_key_of_table(self, message: Message) -> None:
        """Raise ValueError if the record's key lacks a column of `primary_key=`.

        Debezium writes a change of the table's own key as a delete and a create.
        """
        row = self._read_key(message)
        lacking = [
            name for name, attribute in self._primary_key if getattr(row, attribute, None) is None
        ]
        if lacking:
            raise ValueError(describe_unknown_key(lacking))

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


def _has_values(row: Any) -> bool:
    return any(value is not None for value in msgspec.structs.astuple(row))


def _with_payload(name: str, fields: list[tuple[str, Any]]) -> type[msgspec.Struct]:
    """Return a type that has `fields` itself, or has `payload` with these fields and a schema."""
    optional: list[Any] = [(field, kind | None, None) for field, kind in fields]
    inner: Any = msgspec.defstruct(f"{name}Payload", optional)
    around: list[Any] = [("payload", inner | None, None), _SCHEMA]
    return msgspec.defstruct(name, [*optional, *around])


def _make_decoder(kind: Any) -> Callable[[Any], Any]:
    return cast("Callable[[Any], Any]", json_decoder(kind).decode)


def _read_row_as_written(text: bytes, side: str | None) -> Any:
    """Return a side of a change, or the row of a key if `side` is None, as plain JSON."""
    outer: Any = msgspec.json.decode(text)
    inner = outer if outer.get("payload") is None else outer["payload"]
    return inner if side is None else inner.get(side)


def _envelope_fault(error: Exception, value: bytes, columns: pa.Schema) -> str:
    """Describe the fault of `value`, with the column if the fault is inside a row."""
    # The error's path begins in the envelope, but users know only the column.
    for part in ("payload.after.", "payload.before.", "after.", "before."):
        shown = str(error).replace(f"`$.{part}", "`$.")
        if shown != str(error):
            fault = fault_of(ValueError(shown), b"null", columns).removesuffix(", found None")
            return f"{fault}{_DECIMAL_ADVICE if _BASE64 in fault else ''}"
    return fault_of(error, value, columns)
