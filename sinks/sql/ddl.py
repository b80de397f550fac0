"""The text of CREATE and ALTER statements, made by SQLAlchemy.

Import this module only where something is created: importing SQLAlchemy takes a worker longer than
all its other imports together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import sqlalchemy as sa
from sqlalchemy.dialects.mysql import MEDIUMTEXT
from sqlalchemy.engine import Dialect as Compiler
from sqlalchemy.schema import CreateColumn, CreateIndex, CreateTable, DDLElement

from onceflow.clients.sql.tables import TableName
from onceflow.core.errors import ConfigError
from onceflow.core.protocol.ids import SINK_ID_LENGTH_MAX, TRANSACTION_ID_LENGTH_MAX
from onceflow.sinks.sql.dialect import Dialect
from onceflow.sinks.sql.ledger import BATCHES, COMMIT_MODE_LENGTH_MAX, LEDGER, SINKS

SOURCE_LENGTH_MAX = 128


def creation(
    dialect: Dialect, name: TableName, schema: pa.Schema, primary_key: Sequence[str]
) -> str:
    """Return the CREATE TABLE statement of a table that accepts rows of `schema` unchanged.

    Raises:
        ConfigError: A column has no type on this server, or a key column is not in the schema.
    """
    missing = [column for column in primary_key if column not in schema.names]
    if missing:
        raise ConfigError(
            f"primary_key names {', '.join(missing)}, and the rows have only the columns "
            f"{', '.join(schema.names)}"
        )
    columns = [
        _column(dialect, field, is_key=field.name in primary_key, nullable=field.nullable)
        for field in schema
    ]
    key = [sa.PrimaryKeyConstraint(*primary_key)] if primary_key else []
    table = sa.Table(
        name.name,
        sa.MetaData(),
        *columns,
        *key,
        schema=name.schema,
        **dialect.options_of_tables,
    )
    return _compile(dialect, CreateTable(table))


def additions(dialect: Dialect, name: TableName, fields: Sequence[pa.Field]) -> Sequence[str]:
    """Return the ALTER TABLE statements that add a nullable column for each of `fields`.

    Raises:
        ConfigError: A field has no type on this server.
    """
    columns = [_column(dialect, field, is_key=False, nullable=True) for field in fields]
    sa.Table(name.name, sa.MetaData(), *columns, schema=name.schema)
    added = [f"ADD COLUMN {_compile(dialect, CreateColumn(column))}" for column in columns]
    parts = added if dialect.adds_columns_one_by_one else [", ".join(added)]
    return [f"ALTER TABLE {dialect.identifier(name)} {part}" for part in parts]


def _column(
    dialect: Dialect, field: pa.Field, *, is_key: bool, nullable: bool
) -> sa.Column[object]:
    dialect.check_name(field.name)
    kind = dialect.column_type(field, is_key=is_key)
    if kind is None:
        raise ConfigError(
            f"column {field.name!r}: no {dialect.product} is made from Arrow type {field.type}; "
            "create the table yourself, or convert the column in the rows "
            f"({dialect.no_type_advice})"
        )
    return sa.Column(field.name, kind, nullable=nullable and not is_key, autoincrement=False)


def ledger_creation(dialect: Dialect, schema: str) -> Sequence[str]:
    """Return the statements that create both tables of a ledger in `schema`, indexes last."""
    tables = (_ledger(dialect, schema), _sinks(dialect, schema))
    indexes = [
        CreateIndex(index, if_not_exists=dialect.creates_index_if_missing)
        for table in tables
        for index in table.indexes
    ]
    elements: list[DDLElement] = [CreateTable(table, if_not_exists=True) for table in tables]
    return [_compile(dialect, element) for element in (*elements, *indexes)]


def batches_creation(dialect: Dialect, schema: str) -> str:
    """Return the statement that creates the table of batches in `schema`."""
    return _compile(dialect, CreateTable(_batches(dialect, schema), if_not_exists=True))


def _compile(dialect: Dialect, element: DDLElement | CreateColumn) -> str:
    compiler: Compiler = dialect.compiler()
    return str(element.compile(dialect=compiler)).strip()


def _bookkeeping(dialect: Dialect, schema: str, name: str, *parts: Any) -> sa.Table:
    options = dialect.options_of_bookkeeping
    return sa.Table(name, sa.MetaData(), *parts, schema=schema or None, **options)


def _ledger(dialect: Dialect, schema: str) -> sa.Table:
    return _bookkeeping(
        dialect,
        schema,
        LEDGER,
        sa.Column("transaction_id", sa.String(TRANSACTION_ID_LENGTH_MAX), primary_key=True),
        sa.Column("sink_id", sa.String(SINK_ID_LENGTH_MAX), nullable=False),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("checkpoint", sa.BigInteger, nullable=False),
        sa.Column("subtask", sa.Integer, nullable=False),
        sa.Column("row_count", sa.BigInteger, nullable=False),
        _now("prepared_at"),
        # Used by pruning, which selects by sink and age.
        sa.Index("onceflow_ledger_by_checkpoint", "sink_id", "checkpoint"),
    )


def _sinks(dialect: Dialect, schema: str) -> sa.Table:
    return _bookkeeping(
        dialect,
        schema,
        SINKS,
        sa.Column("sink_id", sa.String(SINK_ID_LENGTH_MAX), primary_key=True),
        sa.Column("job", sa.Text, nullable=False),
        sa.Column("log_id", sa.Text, nullable=False),
        sa.Column("attempt", sa.Integer, nullable=False),
        _now("claimed_at"),
        # The choice of `open` for the attempt, so that all its subtasks use the same mode.
        sa.Column("commit_mode", sa.String(COMMIT_MODE_LENGTH_MAX)),
    )


def _batches(dialect: Dialect, schema: str) -> sa.Table:
    listed = sa.Text().with_variant(MEDIUMTEXT(), "mysql", "mariadb")
    return _bookkeeping(
        dialect,
        schema,
        BATCHES,
        sa.Column("sink_id", sa.String(SINK_ID_LENGTH_MAX), primary_key=True),
        sa.Column("source", sa.String(SOURCE_LENGTH_MAX), primary_key=True),
        sa.Column("number", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("fingerprint", sa.String(64), nullable=False),
        sa.Column("run", sa.String(64), nullable=False),
        sa.Column("committables", listed, nullable=False),
        sa.Column("settled", sa.Integer, nullable=False),
        _now("decided_at"),
    )


def _now(name: str) -> sa.Column[Any]:
    moment = sa.DateTime(timezone=True)
    return sa.Column(name, moment, nullable=False, server_default=sa.func.now())
