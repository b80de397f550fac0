"""The comparison of the schema of written data files with the schema that the table has now.

The table may change between the start of a writer and the commit. Readers find columns by their
field ids, so a column may get another name, a wider type or another position.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pyiceberg.manifest import DataFile
from pyiceberg.schema import Schema
from pyiceberg.table.metadata import TableMetadata


def find_broken_requirement(written: Schema, table: Schema, files: Sequence[DataFile]) -> str:
    """Return why `files` would break a required column of `table`; empty if they do not.

    Args:
        written: The schema of the files.
        table: The schema of the table.
        files: The data files.
    """
    known = written.field_ids
    for field_id in _list_required(written, table):
        name = table.find_column_name(field_id)
        if field_id not in known:
            return f"the table has got the required column {name!r}, which the files lack"
        if written.find_field(field_id).required:
            continue
        counts = [(file.null_value_counts or {}).get(field_id) for file in files]
        if any(count != 0 for count in counts):
            return f"column {name!r} is required by now, and a data file may have nulls in it"
    return ""


def find_dropped_column(written: Schema, table: Schema) -> tuple[str, bool]:
    """Return the name of a column of `written` that `table` lacks, and True if the name is reused.

    The name is empty if there is no such column.
    """
    for field_id in sorted(written.field_ids - table.field_ids):
        name = written.find_column_name(field_id) or ""
        return name, name in table.column_names
    return "", False


def is_dropped_column(name: str, metadata: TableMetadata) -> bool:
    """Return True if the table had a column `name`, and has none of the columns of that name.

    A renamed column is not dropped: its id is still in the table.
    """
    ids = {
        field.field_id
        for schema in metadata.schemas
        for field in schema.fields
        if field.name == name
    }
    return bool(ids) and ids.isdisjoint(field.field_id for field in metadata.schema().fields)


def _list_required(written: Schema, table: Schema) -> Iterator[int]:
    """Yield the ids of required fields of `table`.

    A column that is not in `written` is null in all its rows, so its inner fields do not count.
    """
    for column in table.fields:
        inner = [column.field_id]
        if column.field_id in written.field_ids:
            inner = sorted(Schema(column).field_ids)
        yield from (field_id for field_id in inner if table.find_field(field_id).required)
