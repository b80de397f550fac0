"""The conversion of Avro records to Arrow columns, in batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from onceflow.formats.avro.cursors import Cursors, Rows
from onceflow.formats.avro.schema import (
    AvroType,
    Entries,
    Fixed,
    Items,
    Record,
    Scalar,
    Symbols,
    Union,
    arrow_type,
    is_null,
    is_nullable,
)


class AvroRecords:
    """A reader of one schema's records at the positions of cursors."""

    def __init__(self, schema: Record, names: frozenset[str]) -> None:
        """Prepare to read some members of the schema.

        Args:
            schema: The schema with which the records were written.
            names: The members to return. Other members are skipped.
        """
        self._schema = schema
        self._wanted = names

    def columns(self, cursors: Cursors, rows: Rows) -> dict[str, pa.Array]:
        """Read `rows`, and return each member of `names` with a value for each of `rows`.

        The values of rows in the cursors' `faults` are meaningless.
        """
        columns: dict[str, pa.Array] = {}
        for member in self._schema.members:
            cursors.field = f"field {member.name!r}"
            if member.name in self._wanted:
                columns[member.name] = _read(member.type, cursors, rows)
            else:
                _pass(member.type, cursors, rows)
        cursors.require_ends(rows)
        return columns


def _read(node: AvroType, cursors: Cursors, rows: Rows) -> pa.Array:
    values: pa.Array
    match node:
        case Scalar():
            values = _read_scalar(node, cursors, rows)
        case Fixed():
            values = _read_fixed(node, cursors, rows)
        case Symbols(names=names):
            values = _read_symbols(names, cursors, rows)
        case Union():
            values = _read_union(node, cursors, rows)
        case Record():
            values = _read_record(node, cursors, rows)
        case Items():
            values = _read_items(node, cursors, rows)
        case Entries():
            values = _read_entries(node, cursors, rows)
    return values


def _read_scalar(scalar: Scalar, cursors: Cursors, rows: Rows) -> pa.Array:
    arrow, values = scalar.arrow, pa.nulls(0)
    match scalar.kind:
        case "long":
            values = _view(pa.array(cursors.longs(rows)), arrow)
        case "int":
            values = _view(pa.array(cursors.ints(rows)), arrow)
        case "string":
            values = cursors.strings(rows)
        case "double":
            values = pa.array(cursors.raw_bytes(rows, 8).view("<f8")[:, 0])
        case "float":
            values = pa.array(cursors.raw_bytes(rows, 4).view("<f4")[:, 0])
        case "boolean":
            values = pa.array(cursors.booleans(rows))
        case "bytes":
            decimal = arrow if pa.types.is_decimal(arrow) else None
            values = cursors.decimals(rows, None, decimal) if decimal else cursors.binary(rows)
        case _:
            values = pa.nulls(rows.size)
    return values


def _read_fixed(fixed: Fixed, cursors: Cursors, rows: Rows) -> pa.Array:
    if pa.types.is_decimal(fixed.arrow):
        return cursors.decimals(rows, fixed.size_bytes, fixed.arrow)
    buffer = pa.py_buffer(np.ascontiguousarray(cursors.raw_bytes(rows, fixed.size_bytes)))
    return pa.Array.from_buffers(fixed.arrow, rows.size, [None, buffer], 0)


def _read_record(record: Record, cursors: Cursors, rows: Rows) -> pa.Array:
    field = cursors.field
    parts: list[pa.Array] = []
    for member in record.members:
        cursors.field = f"{field}.{member.name}"
        parts.append(_read(member.type, cursors, rows))
    cursors.field = field
    if not parts:
        return pa.array([{}] * rows.size, pa.struct([]))
    return pa.StructArray.from_arrays(parts, fields=list(arrow_type(record)))


def _read_items(node: Items, cursors: Cursors, rows: Rows) -> pa.Array:
    if _has_no_bytes(node.item):
        ends = cursors.empty_items(rows)
        owners = np.repeat(rows, np.diff(ends))
        items = _read(node.item, cursors, owners)
        return pa.ListArray.from_arrays(pa.array(ends), items, type=arrow_type(node))
    offsets, parts, order = cursors.blocks(rows, lambda some: _read(node.item, cursors, some))
    kind = arrow_type(node.item)
    items = pa.concat_arrays(parts).take(pa.array(order)) if parts else pa.array([], kind)
    return pa.ListArray.from_arrays(pa.array(offsets), items, type=arrow_type(node))


def _has_no_bytes(node: AvroType) -> bool:
    """Return True if every value of `node` is encoded as zero bytes."""
    match node:
        case Record(members=members):
            return all(_has_no_bytes(member.type) for member in members)
        case Fixed(size_bytes=size_bytes):
            return size_bytes == 0
        case Scalar() | Symbols() | Items() | Entries() | Union():
            return is_null(node)


def _view(numbers: pa.Array, arrow: pa.DataType) -> pa.Array:
    return numbers if numbers.type == arrow else numbers.view(arrow)


def _read_symbols(names: Sequence[str], cursors: Cursors, rows: Rows) -> pa.Array:
    codes = _choices(len(names), "a symbol that its enum does not have in", cursors, rows)
    return pa.array(list(names), pa.string()).take(pa.array(codes))


def _choices(count: int, why: str, cursors: Cursors, rows: Rows) -> NDArray[np.int64]:
    """Read numbers from 0 to `count` - 1. Refuse rows with other numbers."""
    numbers = cursors.longs(rows)
    wrong = (numbers < 0) | (numbers >= count)
    if wrong.any():
        cursors.refuse(rows[wrong], why)
        numbers[wrong] = 0
    return numbers


def _read_union(union: Union, cursors: Cursors, rows: Rows) -> pa.Array:
    chosen = _choices(len(union.branches), "a branch that its union has not in", cursors, rows)
    members: list[pa.Array] = []
    null = np.zeros(rows.size, np.bool_)
    for branch, node in enumerate(union.branches):
        having = np.flatnonzero(chosen == branch)
        if is_null(node):
            null[having] = True
        else:
            members.append(_spread(_read(node, cursors, rows[having]), having, rows.size))
    kind = arrow_type(union)
    if len(members) == 1:
        return members[0]
    if not members:
        return pa.nulls(rows.size)
    return pa.StructArray.from_arrays(members, fields=list(kind), mask=pa.array(null))


def _spread(values: pa.Array, at: NDArray[np.int64], count: int) -> pa.Array:
    """Return `count` values: those of `values` at the indices `at`, and null elsewhere."""
    if at.size == count:
        return values
    indices = np.zeros(count, np.int64)
    indices[at] = np.arange(at.size)
    absent = np.ones(count, np.bool_)
    absent[at] = False
    return values.take(pa.array(indices, mask=absent))


def _read_entries(node: Entries, cursors: Cursors, rows: Rows) -> pa.Array:
    value = node.value
    entry = pa.struct(
        [
            pa.field("key", pa.string(), nullable=False),
            pa.field("value", arrow_type(value), nullable=is_nullable(value)),
        ]
    )

    def read(some: Rows) -> pa.Array:
        keys = cursors.strings(some)
        return pa.StructArray.from_arrays([keys, _read(value, cursors, some)], fields=list(entry))

    offsets, parts, order = cursors.blocks(rows, read)
    pairs = pa.concat_arrays(parts).take(pa.array(order)) if parts else pa.array([], entry)
    entries = cast("pa.StructArray", pairs)
    keys, values = entries.field(0), entries.field(1)
    maps: pa.Array = pa.MapArray.from_arrays(pa.array(offsets), keys, values, type=arrow_type(node))
    return maps


def _pass(node: AvroType, cursors: Cursors, rows: Rows) -> None:
    """Move the cursors past a value that is not needed."""
    match node:
        case Scalar(kind="string" | "bytes"):
            cursors.spans(rows)
        case _:
            _read(node, cursors, rows)
