"""Finds the tables that rows go to; makes and alters them where the user asked for that.

Columns of the stream are matched to those of a table by name.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager

import pyarrow as pa
import sqlalchemy as sa
from sqlalchemy.schema import CreateColumn, CreateTable

from onceflow.core.errors import ConfigError
from onceflow.sinks.sql.dialect import Dialect
from onceflow.sinks.sql.session import AccessDenied, Session
from onceflow.sinks.sql.settings import SqlSettings
from onceflow.sinks.sql.tables import ColumnFit, Table, TableColumn, TableName, Target
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


class TableResolver:
    """The tables of one writer or committer, each looked at when it is first needed."""

    def __init__(
        self,
        settings: SqlSettings,
        schema: pa.Schema,
        connected: Callable[[], Session],
        rules: ChangeRules | None = None,
    ) -> None:
        """Look at nothing yet; `connected` gives the session to ask on.

        `rules` are the settings' own unless given.
        """
        self._settings = settings
        self._schema = schema
        self._connected = connected
        self._rules = settings.rules if rules is None else rules
        self._known: dict[TableName, Target] = {}

    def named(self, name: TableName) -> Target:
        """Return the table `name`, which takes rows of the schema.

        One that is missing, or lacks columns, is created or gets them when the user asked for that,
        on a session of its own. A new table is locked by nobody, so that is done whatever is
        prepared; a crash leaves it empty.

        Raises:
            ConfigError: There is none, or it does not take the rows.
            SinkError: The server cannot be reached now.
        """
        found = self._known.get(name)
        if found is None:
            found = self._known[name] = self._found(name)
        return found

    def keyed(self, name: TableName) -> Target:
        """Return the table `name` for rows that are only keys to delete.

        Raises:
            ConfigError: There is none, or it does not have the columns.
        """
        dialect = self._settings.dialect
        table = dialect.found(self._connected(), name)
        if table is None:
            raise missing(self._settings, name, self._schema)
        return Target(table, key_matched(dialect, table, self._schema))

    def _found(self, name: TableName) -> Target:
        settings, dialect = self._settings, self._settings.dialect
        table = dialect.found(self._connected(), name)
        if table is None:
            with settings.endpoint.connect("onceflow looks for a table") as own:
                # As it is while nobody alters it: MariaDB hides one that is altered.
                with dialect.one_at_a_time(own):
                    table = dialect.found(own, name)
                if table is None and settings.create:
                    table = created(settings, own, name, self._schema, self._rules)
        elif settings.evolve and self._lacks_columns(table):
            with settings.endpoint.connect("onceflow adds columns") as own:
                table = evolved(settings, own, table, self._schema, self._rules)
        if table is None:
            raise missing(settings, name, self._schema)
        require_writable(table)
        return Target(table, matched(dialect, table, self._schema, self._rules))

    def _lacks_columns(self, table: Table) -> bool:
        return any(table.column(field.name) is None for field in self._rules.written(self._schema))


def missing(settings: SqlSettings, name: TableName, schema: pa.Schema) -> ConfigError:
    """Return the error that says how to create the table."""
    rules = settings.rules
    key = rules.primary_key if set(rules.primary_key) <= set(schema.names) else ()
    controls = {rules.operation_column, rules.table_column}
    columns = pa.schema([field for field in schema if field.name not in controls])
    return ConfigError(
        f"table {name} {settings.dialect.absence} in {settings.endpoint}. Pass create=True, or "
        f"run: {creation(settings.dialect, name, columns, key)}"
    )


def require_writable(table: Table) -> None:
    """Return when transactions keep what they write to `table`.

    Raises:
        ConfigError: It is no table, or one of a kind that does not.
    """
    if table.unfit is not None:
        raise ConfigError(f"table {table.name}: {table.unfit}")


def created(
    settings: SqlSettings,
    session: Session,
    name: TableName,
    schema: pa.Schema,
    rules: ChangeRules,
) -> Table:
    """Return the table, created for rows of `schema` unless somebody just did.

    Raises:
        ConfigError: It cannot be created so, the user may not, or it is not found afterwards.
    """
    dialect = settings.dialect
    if not name.schema and not dialect.has_schema(session, None):
        raise ConfigError(
            f"table {name}: the search path names no schema in which to create it; write "
            "table='schema.table'"
        )
    statement = creation(dialect, name, rules.written(schema), rules.primary_key)
    cannot = f"table {name} cannot be created in {settings.endpoint}"
    with dialect.one_at_a_time(session):
        if dialect.found(session, name) is None:
            with _told_who_may(cannot, statement, "Run as a user who may"):
                session.execute(statement)
            dialect.log.info("created table %s", name)
    table = dialect.found(session, name)
    if table is None:
        raise ConfigError(
            f"table {name} was created in {settings.endpoint} and is not found there: "
            "grant the user INSERT on it, and write its schema before its name"
        )
    return table


def evolved(
    settings: SqlSettings, session: Session, table: Table, schema: pa.Schema, rules: ChangeRules
) -> Table:
    """Return the table with a nullable column for each field of `schema` that it lacked.

    Waits for whoever uses the table, as long as the lock timeout; a transaction prepared on it
    stands in the way until it is committed.

    Raises:
        ConfigError: A field has no type there, or the user may not alter the table.
    """
    dialect = settings.dialect
    cannot = f"table {table.name} in {settings.endpoint} cannot be given the columns that it lacks"
    with dialect.one_at_a_time(session):
        now = dialect.found(session, table.name) or table
        lacking = [one for one in rules.written(schema) if now.column(one.name) is None]
        if lacking:
            for statement in additions(dialect, table.name, lacking):
                with _told_who_may(cannot, statement, "Run as its owner"):
                    session.execute(statement)
            names = ", ".join(field.name for field in lacking)
            dialect.log.info("table %s got the columns %s", table.name, names)
    return dialect.found(session, table.name) or table


@contextmanager
def _told_who_may(cannot: str, statement: str, advice: str) -> Generator[None, None, None]:
    """Raise `ConfigError` when the user may not: what `cannot` be done, and who is to run it."""
    try:
        yield
    except AccessDenied as error:
        raise ConfigError(f"{cannot}: {error}. {advice}: {statement}") from error
