"""The keys of rows as values that compare as Postgres compares them."""

from __future__ import annotations

from collections.abc import Sequence

from onceflow.clients.postgres.catalog import literal
from onceflow.clients.postgres.pgoutput import Value
from onceflow.core.errors import BadRecord
from onceflow.sources.postgres.columns import format_uuid
from onceflow.sources.postgres.first_copy import Key
from onceflow.sources.postgres.table import SourceColumn, SourceTable


def key_of(table: SourceTable, row: Sequence[Value]) -> Key:
    """Return the key of `row`, which has the table's columns.

    Raises:
        BadRecord: The row has no value in a column of the key.
    """
    names = [column.name for column in table.columns]
    return tuple(
        _comparable(table, column, row[names.index(column.name)]) for column in table.key_columns
    )


def _comparable(table: SourceTable, column: SourceColumn, value: Value) -> int | str:
    """Return whole numbers as int, texts as str: Python orders both as Postgres does.

    UUIDs become their text, which has the order of their bytes.
    """
    if not isinstance(value, bytes):
        raise BadRecord(
            f"a change of table {table.name} has no value in column {column.name!r} of its key"
        )
    if column.source.name == "uuid":
        return format_uuid(value)
    if column.source.name in ("text", "varchar"):
        return value.decode()
    return int.from_bytes(value, "big", signed=True)


def key_literals(table: SourceTable, key: Key) -> str:
    """Return the SQL expressions of the values of `key`, to compare with `order_expression`."""
    return ", ".join(
        _literal(column, value) for column, value in zip(table.key_columns, key, strict=True)
    )


def _literal(column: SourceColumn, value: int | str) -> str:
    if isinstance(value, int):
        return str(value)
    text = literal(value)
    return text if column.has_own_order else f"pg_catalog.convert_to({text}, 'UTF8')"
