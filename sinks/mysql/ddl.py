"""The tables that onceflow creates, as SQLAlchemy describes them.

The text is SQLAlchemy's, our session runs it: one connection, one way to fail.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pyarrow as pa
import sqlalchemy as sa
from pyarrow import types as arrow
from sqlalchemy.dialects import mysql
from sqlalchemy.dialects.mysql.base import MySQLDialect
from sqlalchemy.schema import CreateColumn, CreateIndex, CreateTable, DDLElement
from sqlalchemy.types import TypeEngine

from onceflow.core.errors import ConfigError
from onceflow.sinks.mysql.names import identifier, quoted
from onceflow.sinks.mysql.types import is_bytes, is_text, plain
from onceflow.sinks.sql import TableName, ledger_table, sinks_table

_SqlType = TypeEngine[Any]
# In another parameter style each % of a name would be doubled.
_DIALECT = cast("Any", MySQLDialect)(paramstyle="named")
_CHARSET = "utf8mb4"
# Text that differs in a byte is another key.
_KEY_COLLATION = "utf8mb4_bin"
# An index takes 3072 bytes: three key columns of so many letters.
_KEY_LENGTH = 255
_BINARY_LENGTH_MAX = 255
_DECIMAL_PRECISION_MAX, _DECIMAL_SCALE_MAX = 65, 30
_TYPES: dict[pa.DataType, _SqlType] = {
    pa.bool_(): sa.Boolean(),
    pa.int8(): mysql.TINYINT(),
    pa.int16(): mysql.SMALLINT(),
    pa.int32(): mysql.INTEGER(),
    pa.int64(): mysql.BIGINT(),
    pa.uint8(): mysql.TINYINT(unsigned=True),
    pa.uint16(): mysql.SMALLINT(unsigned=True),
    pa.uint32(): mysql.INTEGER(unsigned=True),
    pa.uint64(): mysql.BIGINT(unsigned=True),
    pa.float16(): mysql.FLOAT(),
    pa.float32(): mysql.FLOAT(),
    pa.float64(): mysql.DOUBLE(),
    pa.date32(): sa.Date(),
    pa.date64(): sa.Date(),
}


def create_statement(table: TableName, schema: pa.Schema, primary_key: Sequence[str]) -> str:
    """Return the CREATE TABLE by which rows of `schema` fit `table` as they are.

    Raises:
        ConfigError: A column has no type there, or a key column is not in the schema.
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
            _sql_type(field, is_key=field.name in primary_key),
            nullable=field.nullable and field.name not in primary_key,
            autoincrement=False,
        )
        for field in schema
    ]
    key = [sa.PrimaryKeyConstraint(*primary_key)] if primary_key else []
    described = sa.Table(
        table.name,
        sa.MetaData(),
        *columns,
        *key,
        schema=table.schema,
        mysql_engine="InnoDB",
        mysql_charset=_CHARSET,
    )
    return _text(CreateTable(described))


def added_columns(table: TableName, fields: Sequence[pa.Field]) -> str:
    """Return the ALTER TABLE that adds a nullable column for each of `fields`.

    Raises:
        ConfigError: A field has no type there.
    """
    columns = [
        sa.Column(field.name, _sql_type(field, is_key=False), nullable=True) for field in fields
    ]
    sa.Table(table.name, sa.MetaData(), *columns, schema=table.schema)
    added = ", ".join(f"ADD COLUMN {_text(CreateColumn(one))}" for one in columns)
    return f"ALTER TABLE {identifier(table)} {added}"


def bookkeeping_statements(database: str) -> tuple[str, ...]:
    """Return the statements that create ledger and fence; the last ones create indexes."""
    tables = (ledger_table(database), sinks_table(database))
    for table in tables:
        table.dialect_options["mysql"]._non_defaults.update(  # pyright: ignore[reportPrivateUsage]
            {"engine": "InnoDB", "charset": _CHARSET, "collate": _KEY_COLLATION}
        )
    elements: list[DDLElement] = [CreateTable(table, if_not_exists=True) for table in tables]
    elements += [CreateIndex(index) for table in tables for index in table.indexes]
    return tuple(_text(element) for element in elements)


def create_database(database: str) -> str:
    """Return the statement that creates `database`."""
    return f"CREATE DATABASE IF NOT EXISTS {quoted(database)}"


def _sql_type(field: pa.Field, *, is_key: bool) -> _SqlType:
    given = plain(field.type)
    found = _key_type(given) if is_key else None
    found = found or _TYPES.get(given) or _other_type(given)
    if found is None:
        raise ConfigError(
            f"column {field.name!r}: no type of MySQL is made from Arrow type {field.type}; create "
            "the table yourself, or convert the column in the pipeline (nested data to JSON text, "
            "durations to whole numbers)"
        )
    return found


def _key_type(given: pa.DataType) -> _SqlType | None:
    if is_text(given):
        return mysql.VARCHAR(_KEY_LENGTH, charset=_CHARSET, collation=_KEY_COLLATION)
    if is_bytes(given) and not arrow.is_fixed_size_binary(given):
        return mysql.VARBINARY(_KEY_LENGTH)
    return None


def _other_type(given: pa.DataType) -> _SqlType | None:
    if is_bytes(given):
        fixed = arrow.is_fixed_size_binary(given) and given.byte_width <= _BINARY_LENGTH_MAX
        return mysql.BINARY(given.byte_width) if fixed else mysql.LONGBLOB()
    if arrow.is_timestamp(given):
        return mysql.TIMESTAMP(fsp=6) if given.tz else mysql.DATETIME(fsp=6)
    if arrow.is_decimal(given):
        # Arrow's negative scales mean trailing zeros before the point.
        precision, scale = given.precision - min(given.scale, 0), max(given.scale, 0)
        fits = precision <= _DECIMAL_PRECISION_MAX and scale <= _DECIMAL_SCALE_MAX
        return mysql.DECIMAL(precision, scale) if fits else None
    if is_text(given):
        return mysql.LONGTEXT()
    return mysql.TIME(fsp=6) if arrow.is_time(given) else None


def _text(element: DDLElement | CreateColumn) -> str:
    return str(element.compile(dialect=_DIALECT)).strip()
