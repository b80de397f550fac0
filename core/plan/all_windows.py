"""Windows without a key: which aggregates each subtask computes first, and the rows in between."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pyarrow as pa

from onceflow.core.plan.aggregates import Aggregate
from onceflow.core.state import AccumulatorColumn
from onceflow.core.state.aggregates.accumulator_shape import AccumulatorShape, make_shape
from onceflow.core.state.api.descriptors import DIGITS_MAX

ALL = "onceflow.all"
"""The key column of windows without a key. It is 0 in each row, so one subtask gets all rows."""
PANE, RECORDS = "onceflow.pane", "onceflow.records"
"""The columns with the start of a pane, in ms, and with its number of records."""
_MERGED = ("sum", "count", "min", "max", "avg")


_WIDE = pa.decimal128(DIGITS_MAX, 0)


def list_totals(
    aggregates: Mapping[str, Aggregate], schema: pa.Schema, key: Sequence[str]
) -> list[AccumulatorColumn]:
    """Return the columns of totals for windows with the key columns `key`.

    Without a key, sums of integers are kept as decimals. Rows of several subtasks arrive in any
    order, so an intermediate sum may exceed 64 bits in one run and not in another.
    """
    totals = [aggregate.total(name, schema) for name, aggregate in aggregates.items()]
    if tuple(key) != (ALL,):
        return totals
    return [
        replace(total, type=_WIDE) if total.op == "sum" and total.type == pa.int64() else total
        for total in totals
    ]


def make_pane_shape(aggregates: Mapping[str, Aggregate], schema: pa.Schema) -> AccumulatorShape:
    """Return the shape of the totals of panes without a key, as subtasks send them."""
    columns = [aggregate.total(name, schema) for name, aggregate in aggregates.items()]
    return make_shape("onceflow.panes", [pa.int64()], columns, namespaced=True)


def can_merge(aggregates: Mapping[str, Aggregate], schema: pa.Schema) -> bool:
    """Return True if the totals of two sets of records give the totals of all their records."""
    shape = make_pane_shape(aggregates, schema)
    return not shape.of_bytes and all(column.op in _MERGED for column in shape.columns)


def make_gathered_schema(schema: pa.Schema) -> pa.Schema:
    """Return the schema of records with the column `ALL`."""
    return schema.append(pa.field(ALL, pa.int64()))


def make_panes_schema(aggregates: Mapping[str, Aggregate], schema: pa.Schema) -> pa.Schema:
    """Return the schema of the rows of panes; see `runtime.dataflow.all_windows`."""
    numbers = [pa.field(name, pa.int64()) for name in (ALL, PANE, RECORDS)]
    signature = make_pane_shape(aggregates, schema).meta.signature
    return pa.schema([*numbers, pa.field(signature, pa.large_binary())])
