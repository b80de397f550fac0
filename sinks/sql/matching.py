"""Matches the columns of the stream to those of a table, by name; makes the DDL where they lack."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import sqlalchemy as sa
from sqlalchemy.schema import CreateColumn, CreateTable

from onceflow.core.errors import ConfigError
from onceflow.sinks.sql.dialect import Dialect
from onceflow.sinks.sql.tables import ColumnFit, Table, TableColumn, TableName
from onceflow.sinks.sql.values import plain
from onceflow.sinks.sql.write_mode import ChangeRules, WriteMode


def matched(
    dialect: Dialect, table: Table, schema: pa.Schema, rules: ChangeRules
) -> tuple[ColumnFit, ...]:
    """Return how each column of `schema` goes into `table`, in the schema's order.

    Further columns of the table are left to their defaults; columns that only say what to do with
    the row are not written.

    Raises:
        ConfigError: Rows of `schema` cannot be written; names every column that is at fault.
    """
    schema = rules.written(schema)
    _require_different_names(dialect, table, schema)
    found = [_match(dialect, table, field, rules) for field in schema]
    fits = [one for one in found if not isinstance(one, str)]
    faults = [one for one in found if isinstance(one, str)]
    if rules.mode is not WriteMode.UPDATE:
        faults += _unfilled(table, schema)
    if rules.changes_in_place and not faults:
        faults += _key_faults(dialect, table, rules) + _missing_privileges(
            dialect, table, fits, rules
        )
    if faults:
        raise ConfigError(f"rows cannot be written to table {table.name}: {'; '.join(faults)}")
    return tuple(fits)


def key_matched(dialect: Dialect, table: Table, schema: pa.Schema) -> tuple[ColumnFit, ...]:
    """Return how the key columns, which are all of `schema`, are compared with those of `table`.

    Raises:
        ConfigError: They cannot be; names every column that is at fault.
    """
    rules = ChangeRules(WriteMode.UPDATE, tuple(schema.names))
    found = [_match(dialect, table, field, rules) for field in schema]
    faults = [one for one in found if isinstance(one, str)]
    if not faults and dialect.deletes_by_index and table.index_over(schema.names) is None:
        faults = _key_faults(dialect, table, rules)
    if faults:
        raise ConfigError(f"rows cannot be deleted from table {table.name}: {'; '.join(faults)}")
    return tuple(one for one in found if not isinstance(one, str))


def creation(
    dialect: Dialect, name: TableName, schema: pa.Schema, primary_key: Sequence[str]
) -> str:
    """Return the CREATE TABLE by which rows of `schema` fit the table as they are.

    Raises:
        ConfigError: A column has no type there, or a key column is not in the schema.
    """
    missing = [one for one in primary_key if one not in schema.names]
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
    return dialect.compiled(CreateTable(table))


def additions(dialect: Dialect, name: TableName, fields: Sequence[pa.Field]) -> Sequence[str]:
    """Return the ALTER TABLEs that add a nullable column for each of `fields`.

    Raises:
        ConfigError: A field has no type there.
    """
    columns = [_column(dialect, field, is_key=False, nullable=True) for field in fields]
    sa.Table(name.name, sa.MetaData(), *columns, schema=name.schema)
    added = [f"ADD COLUMN {dialect.compiled(CreateColumn(one))}" for one in columns]
    parts = added if dialect.adds_columns_one_by_one else [", ".join(added)]
    return [f"ALTER TABLE {dialect.identifier(name)} {part}" for part in parts]


def _column(
    dialect: Dialect, field: pa.Field, *, is_key: bool, nullable: bool
) -> sa.Column[object]:
    kind = dialect.column_type(field, is_key=is_key)
    if kind is None:
        raise ConfigError(
            f"column {field.name!r}: no {dialect.product} is made from Arrow type {field.type}; "
            "create the table yourself, or convert the column in the pipeline "
            f"({dialect.no_type_advice})"
        )
    return sa.Column(field.name, kind, nullable=nullable and not is_key, autoincrement=False)


def _require_different_names(dialect: Dialect, table: Table, schema: pa.Schema) -> None:
    names = [name.lower() if dialect.folds_names else name for name in schema.names]
    if not names or len(set(names)) < len(names):
        differ = "columns with different names"
        if dialect.folds_names:
            differ = "columns whose names differ in more than upper and lower case"
        raise ConfigError(f"rows for table {table.name} need {differ}: {schema.names}")


def _match(dialect: Dialect, table: Table, field: pa.Field, rules: ChangeRules) -> ColumnFit | str:
    """Return how `field` is written, or what is wrong with it."""
    column = table.column(field.name)
    if column is None:
        return (
            f"it has no column {field.name!r} (it has "
            f"{', '.join(other.name for other in table.columns)}); add it, or drop it from the rows"
        )
    if column.generated:
        return f"column {field.name!r} is generated by the table; drop it from the rows"
    if not column.insertable and rules.mode is not WriteMode.UPDATE:
        return (
            f"the {dialect.user} may not write column {field.name!r}. Run: GRANT INSERT ON "
            f"{dialect.identifier(table.name)} TO {table.grantee}"
        )
    is_key = rules.changes_in_place and field.name in rules.primary_key
    return dialect.fit(column, plain(field.type), is_key=is_key) or (
        f"column {field.name!r} has Arrow type {field.type} in the rows and {dialect.product} "
        f"{column.type.shown} in the table, which does not take it unchanged; cast it in the "
        "pipeline or alter the table"
    )


def _unfilled(table: Table, schema: pa.Schema) -> list[str]:
    return [
        f"its column {column.name!r} is NOT NULL without a default, and the rows do not have it"
        for column in table.columns
        if not (column.nullable or column.has_default or column.generated)
        and column.name not in schema.names
    ]


def _key_faults(dialect: Dialect, table: Table, rules: ChangeRules) -> list[str]:
    """Say why rows cannot be found by their key."""
    faults: list[str] = []
    if table.index_over(rules.primary_key) is None:
        faults.append(
            f"it has no unique index over exactly ({', '.join(rules.primary_key)}), by which "
            f"write_mode={rules.mode.value!r} finds rows. Run: ALTER TABLE "
            f"{dialect.identifier(table.name)} ADD PRIMARY KEY "
            f"({', '.join(map(dialect.quoted, rules.primary_key))})"
        )
    keys = [table.column(name) for name in rules.primary_key]
    return faults + [one.key_fault for one in keys if one is not None and one.key_fault]


def _missing_privileges(
    dialect: Dialect, table: Table, fits: Sequence[ColumnFit], rules: ChangeRules
) -> list[str]:
    """Say why rows cannot be changed once they are found."""
    written: list[TableColumn] = [fit.column for fit in fits]
    others = [column for column in written if column.name not in rules.primary_key]
    needed: list[str] = []
    if not all(column.updatable for column in dialect.assigned(table, others, rules)):
        needed.append("UPDATE")
    if not all(column.readable for column in written):
        needed.append("SELECT")
    if (rules.tombstones or rules.operation_column) and not table.deletable:
        needed.append("DELETE")
    grant = f"GRANT {', '.join(needed)} ON {dialect.identifier(table.name)} TO {table.grantee}"
    return [f"the {dialect.user} lacks privileges. Run: {grant}"] if needed else []
