"""The comparison of the layout for which rows were written with the layout that the table has now.

An overwrite with another schema gives a table other columns and other partitions, under the same
id. Delta finds columns by name, and uses a file's partition values without reading the file.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable, Field, Schema

from onceflow.core.arrow.kinds import cast_table
from onceflow.sinks.delta.layout import fits, to_arrow_schema
from onceflow.sinks.lake.changes import DELETES


@dataclass(frozen=True, slots=True)
class TableLayout:
    """The columns and partition columns of a table."""

    columns: Schema
    partition_by: Sequence[str]


def read_layout(table: DeltaTable) -> TableLayout:
    """Return the layout of `table`."""
    return TableLayout(table.schema(), list(table.metadata().partition_columns))


def find_misfit(written: TableLayout, table: TableLayout, statistics: Sequence[str]) -> str:
    """Return why files of layout `written` cannot be added to a table of layout `table`.

    Empty if they can.

    Args:
        written: The layout of the files.
        table: The layout of the table.
        statistics: The statistics of each file, as JSON.
    """
    if written.partition_by != table.partition_by:
        return (
            f"it is partitioned by {table.partition_by} now, and the files were written for"
            f" partitions by {written.partition_by}"
        )
    old = {field.name: field for field in written.columns.fields}
    new = {field.name: field for field in table.columns.fields}
    for name, field in old.items():
        if name not in new:
            return f"it has no column {name!r} any more"
        if new[name].type != field.type:
            return f"column {name!r} has type {new[name].type} now, and {field.type} in the files"
    for name, field in new.items():
        if field.nullable:
            continue
        if name not in old or (old[name].nullable and _may_have_nulls(old[name], statistics)):
            return f"column {name!r} takes no null any more, and the files may have nulls in it"
    return ""


def find_change_misfit(rows: pa.Table, table: DeltaTable) -> str:
    """Return why staged changes `rows` cannot be merged into `table`; empty if they can."""
    schema = to_arrow_schema(table)
    for field in rows.schema:
        if field.name == DELETES:
            continue
        if field.name not in schema.names:
            return f"it has no column {field.name!r} any more"
        kind = schema.field(field.name).type
        if not fits(field.type, kind):
            return f"column {field.name!r} has type {kind} now, and {field.type} in the rows"
    puts = rows.filter(pc.invert(rows[DELETES]))
    for field in schema:
        if field.nullable or not puts.num_rows:
            continue
        if field.name not in rows.column_names or puts[field.name].null_count:
            return f"column {field.name!r} takes no null any more, and a row has a null in it"
    return ""


def cast_changes(rows: pa.Table, table: DeltaTable) -> pa.Table:
    """Return staged changes `rows` in the types that `table` has now.

    Raises:
        ArrowInvalid: A value does not fit.
    """
    schema = to_arrow_schema(table)
    fields = [
        field.with_type(schema.field(field.name).type) if field.name != DELETES else field
        for field in rows.schema
    ]
    return rows if fields == list(rows.schema) else cast_table(rows, pa.schema(fields))


def _may_have_nulls(column: Field, statistics: Sequence[str]) -> bool:
    return any(json.loads(text).get("nullCount", {}).get(column.name) != 0 for text in statistics)
