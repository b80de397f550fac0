"""A decoder of Debezium's envelope in Avro. It decodes columns, each from `before` or `after`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from confluent_kafka import Message
from typing_extensions import override

from onceflow.core.errors import ConfigError
from onceflow.formats.avro.decoder import AvroDecoder
from onceflow.formats.avro.schema import Record, arrow_type
from onceflow.formats.debezium import changes
from onceflow.formats.decoding import Decoded
from onceflow.formats.fitting import Faults
from onceflow.formats.registry_schemas import SchemaCache


def columns_of_change(envelope: Record) -> pa.Schema:
    """Return the columns of the rows whose changes have this envelope.

    Raises:
        ConfigError: The record is not an envelope.
    """
    after = next((member for member in envelope.members if member.name == "after"), None)
    kind = None if after is None else arrow_type(after.type)
    if kind is None or not pa.types.is_struct(kind):
        raise ConfigError(
            "it is not a Debezium envelope: its field 'after' is missing, or is not a record"
        )
    return pa.schema(list(kind))


class DebeziumAvroDecoder(AvroDecoder):
    """A decoder of changes to columns: those of the changed rows, and the operation."""

    def __init__(
        self,
        columns: pa.Schema,
        schemas: SchemaCache,
        unavailable: changes.UnavailableValues,
        reader: Record | None = None,
        primary_key: Sequence[str] = (),
    ) -> None:
        """Prepare for rows of `columns`, with the defaults and aliases of the envelope `reader`.

        An update that changes a column of `primary_key` also deletes the old row.

        Raises:
            ConfigError: A default of the envelope does not fit its field's type.
        """
        loose = pa.struct([column.with_nullable(True) for column in columns])
        envelope = pa.schema([("before", loose), ("after", loose), ("op", pa.string())])
        super().__init__(envelope, reader, schemas)
        self._unavailable = unavailable
        self._row_columns = columns
        self._primary_key = [(name, columns.get_field_index(name)) for name in primary_key]

    @override
    def decode(self, values: Sequence[bytes | None], messages: Sequence[Message]) -> Decoded:
        """Decode `values` to changes of rows. Tombstones change nothing."""
        envelopes = super().decode(values, messages)
        faults: Faults = {at: why for at, why in envelopes.faults.items() if values[at] is not None}
        envelopes = self._split_updates(envelopes, faults)
        before, after, operation = envelopes.columns
        deletes: Any = pc.fill_null(pc.equal(operation, changes.DELETE), False)
        self._require_sides(envelopes.kept, operation, before, after, faults)
        columns = [
            pc.if_else(deletes, _member(before, at), _member(after, at))
            for at in range(len(self._row_columns))
        ]
        self._require_values(columns, envelopes.kept, deletes, faults)
        self._unavailable.note_rows(columns, self._row_columns, envelopes.kept, faults)
        # So far faults have the index of a value; `drop_rows` needs the index of a row.
        late = {row: faults.pop(at) for row, at in enumerate(envelopes.kept) if at in faults}
        return Decoded([*columns, operation], envelopes.kept, faults).drop_rows(late)

    def _split_updates(self, envelopes: Decoded, faults: Faults) -> Decoded:
        """Return the envelopes with a delete of `before` ahead of each update that changes the key.

        Add to `faults` the updates whose old key is unknown.
        """
        if not self._primary_key:
            return envelopes
        before, after, operation = envelopes.columns
        operations: list[Any] = operation.to_pylist()
        is_update = np.array([word == changes.UPDATE for word in operations], np.bool_)
        is_known = np.ones(len(operations), np.bool_)
        is_moved = np.zeros(len(operations), np.bool_)
        for name, at in self._primary_key:
            # Compare in Arrow: a key may be a date that Python cannot represent.
            old, new = _member(before, at), _member(after, at)
            unknown = is_update & old.is_null().to_numpy(zero_copy_only=False)
            for row in np.flatnonzero(unknown).tolist():
                faults.setdefault(envelopes.kept[row], changes.describe_unknown_key([name]))
            is_same: Any = pc.fill_null(pc.equal(old, new), False)
            is_known &= ~unknown
            is_moved |= ~is_same.to_numpy(zero_copy_only=False)
        rows = np.repeat(np.arange(len(operations)), 1 + (is_update & is_known & is_moved)).tolist()
        if len(rows) == len(operations):
            return envelopes
        words = [
            changes.DELETE if following == row else operations[row]
            for row, following in zip(rows, [*rows[1:], None], strict=True)
        ]
        taken = pa.array(rows, pa.int64())
        columns = [before.take(taken), after.take(taken), pa.array(words, pa.string())]
        return Decoded(columns, [envelopes.kept[row] for row in rows], envelopes.faults)

    def _require_sides(
        self,
        kept: Sequence[int],
        operation: pa.Array,
        before: pa.Array,
        after: pa.Array,
        faults: Faults,
    ) -> None:
        sides = zip(
            kept,
            operation.to_pylist(),
            before.is_valid().to_pylist(),
            after.is_valid().to_pylist(),
            strict=True,
        )
        for at, word, has_before, has_after in sides:
            if word in changes.PUTS:
                if not has_after:
                    faults[at] = changes.NO_AFTER
            elif word != changes.DELETE:
                faults[at] = changes.describe_other_operation(word)
            elif not has_before:
                faults[at] = changes.NO_BEFORE_IN_AVRO

    def _require_values(
        self, columns: Sequence[pa.Array], kept: Sequence[int], deletes: pa.Array, faults: Faults
    ) -> None:
        """Add to `faults` the puts without a value in a NOT NULL column."""
        for values, column in zip(columns, self._row_columns, strict=True):
            if column.nullable or not values.null_count:
                continue
            missing: Any = pc.and_(values.is_null(), pc.invert(deletes))
            for at in np.flatnonzero(missing.to_numpy(zero_copy_only=False)).tolist():
                why = f"column {column.name!r} is NOT NULL and has no value"
                faults.setdefault(kept[at], why)


def _member(side: pa.Array, at: int) -> pa.Array:
    """Return a member of structs, with null for each struct that is null."""
    member: pa.Array = pc.struct_field(side, [at])
    return member
