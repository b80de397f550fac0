"""The tables that onceflow creates, as SQLAlchemy describes them.

The text is SQLAlchemy's, psycopg runs it: one connection, one transaction, one way to fail.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pyarrow as pa
import sqlalchemy as sa
from pyarrow import types as arrow
from sqlalchemy.dialects import postgresql
from sqlalchemy.dialects.postgresql.base import PGDialect
from sqlalchemy.schema import CreateColumn, CreateIndex, CreateTable, DDLElement
from sqlalchemy.types import TypeEngine

from onceflow.core.errors import ConfigError
from onceflow.sinks.postgres.types import DECIMAL_PRECISION_MAX, is_text, plain
from onceflow.sinks.sql import TableName, ledger_table, sinks_table

_SqlType = TypeEngine[Any]
# In another parameter style each % of a name would be doubled.
_DIALECT = cast("Any", PGDialect)(paramstyle="named")
_INTEGER_TYPES: dict[pa.DataType, _SqlType] = {
    pa.int8(): sa.SmallInteger(),
    pa.int16(): sa.SmallInteger(),
    pa.int32(): sa.Integer(),
    pa.int64(): sa.BigInteger(),
    pa.uint8(): sa.SmallInteger(),
    pa.uint16(): sa.Integer(),
    pa.uint32(): sa.BigInteger(),
    # bigint ends at half of uint64.
    pa.uint64(): sa.Numeric(20, 0),
}
_OTHER_TYPES: dict[pa.DataType, _SqlType] = {
    pa.bool_(): sa.Boolean(),
    pa.float16(): postgresql.REAL(),
    pa.float32(): postgresql.REAL(),
    pa.float64(): postgresql.DOUBLE_PRECISION(),
    pa.date32(): sa.Date(),
    pa.date64(): sa.Date(),
}


def create_statement(table: TableName, schema: pa.Schema, primary_key: Sequence[str]) -> str:
    """Return the CREATE TABLE by which rows of `schema` fit `table` as they are.

    Raises:
        ConfigError: A column has no type in Postgres, or a key column is not in the schema.
    """
    missing = [name for name in primary_key if name not in schema.names]
    if missing:
        raise ConfigError(
            f"primary_key names {', '.join(missing)}, and the rows have only the columns "
            f"{', '.join(schema.names)}"
        )
    columns = [
        sa.Column(
            field.name,
            _sql_type(field),
            nullable=field.nullable and field.name not in primary_key,
            autoincrement=False,
        )
        for field in schema
    ]
    key = [sa.PrimaryKeyConstraint(*primary_key)] if primary_key else []
    return _text(
        CreateTable(sa.Table(table.name, sa.MetaData(), *columns, *key, schema=table.schema))
    )


def added_columns(table: TableName, fields: Sequence[pa.Field]) -> str:
    """Return the ALTER TABLE that adds a nullable column for each of `fields`.

    Raises:
        ConfigError: A field has no type in Postgres.
    """
    columns = [sa.Column(field.name, _sql_type(field), nullable=True) for field in fields]
    described = sa.Table(table.name, sa.MetaData(), *columns, schema=table.schema)
    name = _DIALECT.identifier_preparer.format_table(described)
    added = ", ".join(f"ADD COLUMN IF NOT EXISTS {_text(CreateColumn(one))}" for one in columns)
    return f"ALTER TABLE {name} {added}"


def bookkeeping_statements(schema: str) -> tuple[str, ...]:
    """Return the statements that create the ledger and the fence in an existing `schema`."""
    tables = (ledger_table(schema), sinks_table(schema))
    elements: list[DDLElement] = []
    for table in tables:
        elements.append(CreateTable(table, if_not_exists=True))
        elements += [CreateIndex(index, if_not_exists=True) for index in table.indexes]
    return tuple(_text(element) for element in elements)


def _sql_type(field: pa.Field) -> _SqlType:
    given = plain(field.type)
    if isinstance(field.type, pa.UuidType):
        return postgresql.UUID()
    found = _scalar_type(given)
    if found is None and (arrow.is_list(given) or arrow.is_large_list(given)):
        element = _scalar_type(given.value_type)
        found = None if element is None else postgresql.ARRAY(element)
    if found is None:
        raise ConfigError(
            f"column {field.name!r}: no Postgres type is made from Arrow type {field.type}; create "
            "the table yourself, or convert the column in the pipeline (nested data to JSON text)"
        )
    return found


def _scalar_type(given: pa.DataType) -> _SqlType | None:
    known = _INTEGER_TYPES.get(given) or _OTHER_TYPES.get(given)
    if known is not None:
        return known
    if is_text(given):
        return sa.Text()
    if arrow.is_timestamp(given):
        return sa.DateTime(timezone=given.tz is not None)
    if arrow.is_decimal(given) and given.precision <= DECIMAL_PRECISION_MAX:
        # Arrow's negative scales mean trailing zeros before the point.
        return sa.Numeric(given.precision - min(given.scale, 0), max(given.scale, 0))
    for is_kind, made in (
        (arrow.is_binary, postgresql.BYTEA()),
        (arrow.is_large_binary, postgresql.BYTEA()),
        (arrow.is_binary_view, postgresql.BYTEA()),
        (arrow.is_fixed_size_binary, postgresql.BYTEA()),
        (arrow.is_time, sa.Time()),
        (arrow.is_duration, postgresql.INTERVAL()),
    ):
        if is_kind(given):
            return cast("_SqlType", made)
    return None


def _text(element: DDLElement | CreateColumn) -> str:
    return str(element.compile(dialect=_DIALECT)).strip()
