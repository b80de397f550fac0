"""A table of Postgres that a job looks up by key, while the table changes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import pyarrow as pa
from typing_extensions import assert_never, override

from onceflow.clients.postgres.binary_rows import RowBuffer
from onceflow.clients.postgres.catalog import identifier, literal, quote
from onceflow.clients.postgres.connection import PostgresEndpoint, PostgresSession, endpoint_of
from onceflow.clients.sql.lookups import ReopenedSession
from onceflow.clients.sql.session import DatabaseAccess, SqlError
from onceflow.core.argument_types import check_fields
from onceflow.core.arrow.schema_text import SchemaLike, schema_of
from onceflow.core.errors import ConfigError, InvariantViolation
from onceflow.core.setting_values import accept_durations
from onceflow.core.spi.lookups import LookupReader, LookupSource
from onceflow.core.spi.options import document_options, option
from onceflow.sources.postgres.copying import (
    SET_TEXT_FORM,
    find_columns,
    read_all_rows,
    select_rows,
    split_rows,
)
from onceflow.sources.postgres.refusals import to_session_error
from onceflow.sources.postgres.row_builder import RowBuilder
from onceflow.sources.postgres.slot import connect, logger
from onceflow.sources.postgres.table import (
    SourceColumn,
    SourceTable,
    describe_table,
    format_name,
    parse_name,
)

_SESSION_NAME = "onceflow lookups"
_KEY_ORDERS = ("number", "text", "uuid", "bool")
"""The orders of the types by which rows are looked up: Arrow has each of their values in one form,
and the server finds equal ones by an index."""
_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_BIGINT = range(-(2**63), 2**63)
_UNTRANSLATABLE = "22P05"
# LOCK TABLE would need a privilege on the whole table.
_LOCK = """
    SELECT FROM {table} LIMIT 0;
    {text_form}
"""
_INDEXES = """
    SELECT 1 FROM pg_catalog.pg_index AS i
    WHERE i.indrelid = {oid} AND i.indisvalid AND i.indpred IS NULL AND i.indnkeyatts >= {count}
      AND {count} = (
          SELECT count(*) FROM pg_catalog.pg_attribute AS a
          WHERE a.attrelid = i.indrelid AND a.attname IN ({names})
            AND a.attnum = ANY ((i.indkey::int2[])[0:{count} - 1]))
    LIMIT 1
"""


@document_options
@accept_durations
@check_fields
@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class PostgresTable(DatabaseAccess, LookupSource):
    """A table of Postgres for `Stream.lookup_join`.

    Values are read as by `PostgresChanges`, each exactly or refused. Rows are looked up by columns
    of integers, text, varchar, uuid or boolean, which should have an index. Texts are equal if all
    of their characters are. Creating the object opens no connection.

    Raises:
        ConfigError: A setting is wrong. The message names it and the value to give instead.
    """

    table: str = field(
        metadata=option(
            "Name of the table: `table` or `schema.table`; upper and lower case are kept. A part"
            " with a dot in it is in double quotes"
        )
    )
    schema: SchemaLike | None = field(
        default=None,
        metadata=option(
            "Columns to read, with their types: DDL as in `id BIGINT, name STRING`, an Arrow"
            " schema, or a mapping from name to type. Default: all columns of the table"
        ),
    )
    _described: SourceTable | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        parse_name(self.table)
        if self.schema is not None:
            object.__setattr__(self, "schema", schema_of(self.schema))
        assert self.endpoint

    def __repr__(self) -> str:
        return f"PostgresTable(table={self.table!r}, {self.endpoint})"

    @property
    def endpoint(self) -> PostgresEndpoint:
        """The address of the database and the settings of its connections."""
        return endpoint_of(self, lock_timeout_s=self.statement_timeout_s)

    @override
    def describe(self, on: Sequence[str]) -> pa.Schema:
        with connect(self.endpoint, _SESSION_NAME) as session:
            table = describe_table(
                session,
                parse_name(self.table),
                None if self.schema is None else schema_of(self.schema),
                is_followed=False,
                stops_at_new_columns=False,
                has_generated=True,
            )
            columns = _key_columns(table, on)
            with session.transaction():
                session.query(f"{select_rows(table)} LIMIT 0")
            names = ", ".join(literal(column.name) for column in columns)
            indexes = _INDEXES.format(oid=table.oid, count=len(columns), names=names)
            if columns and not session.query(indexes):
                logger.warning(
                    "lookup_join: table %s has no index that begins with %s, so each question reads"
                    " the whole table. Create one: CREATE INDEX ON %s (%s)",
                    table.name,
                    ", ".join(on),
                    identifier(table.name),
                    ", ".join(map(quote, on)),
                )
        object.__setattr__(self, "_described", table)
        return table.schema

    @override
    def open(self, on: Sequence[str], name: str) -> LookupReader:
        if self._described is None:
            raise InvariantViolation(f"{self} is opened, and describe() was not called")
        return _Reader(self.endpoint, self._described, on, name)


def _key_columns(table: SourceTable, on: Sequence[str]) -> Sequence[SourceColumn]:
    """Return the columns of the key that the table has.

    Raises:
        ConfigError: A column has a type by which rows are not looked up.
    """
    by_name = {column.name: column for column in table.columns}
    columns = [by_name[name] for name in on if name in by_name]
    for column in columns:
        if column.order not in _KEY_ORDERS:
            raise ConfigError(
                f"lookup_join(on={column.name!r}): column {column.name!r} of table {table.name} has"
                f" type {column.source.shown}. Rows are looked up by integers, text, varchar, uuid"
                " and boolean: name another column"
            )
    return columns


class _Reader(LookupReader):
    """A reader of the table's rows by keys, on a session of its own."""

    def __init__(
        self, endpoint: PostgresEndpoint, table: SourceTable, on: Sequence[str], name: str
    ) -> None:
        self._endpoint, self._table = endpoint, table
        self._columns = _key_columns(table, on)
        self._builder = RowBuilder(table)
        self._session = ReopenedSession(lambda: endpoint.connect(name))

    @override
    def read(self, keys: pa.RecordBatch) -> pa.RecordBatch:
        columns = [keys.column(column.name).to_pylist() for column in self._columns]
        literals = [
            row
            for values in zip(*columns, strict=True)
            if (row := self._write_key(values)) is not None
        ]
        try:
            rows = self._session.ask(lambda session: self._read(session, literals))
        except SqlError as error:
            raise to_session_error(error, str(self._endpoint)) from error
        if not len(rows):
            return pa.RecordBatch.from_pylist([], self._table.schema)
        built = self._builder.build_copied(split_rows(self._table, rows), len(rows))
        return built.select(self._table.schema.names)

    def _write_key(self, values: Sequence[object]) -> str | None:
        """Return the key as SQL, or None if no row can have it."""
        texts: list[str] = []
        for column, value in zip(self._columns, values, strict=True):
            match column.order:
                case "number":
                    assert isinstance(value, int), value
                    if value not in _BIGINT:
                        return None
                    texts.append(f"'{value}'::pg_catalog.int8")
                case "bool":
                    texts.append("true" if value else "false")
                case "uuid" if _UUID.fullmatch(str(value)) is None:
                    return None
                case "text" if "\0" in str(value):
                    # Postgres has no texts with U+0000.
                    return None
                case "uuid" | "text":
                    texts.append(literal(str(value)))
                case "bytea" | "numeric" | "date" | "timestamp" | "timestamptz" | None:
                    raise InvariantViolation(f"rows are not looked up by column {column.name!r}")
                case _ as unknown:
                    assert_never(unknown)
        return f"({', '.join(texts)})"

    def _read(self, session: PostgresSession, keys: Sequence[str]) -> RowBuffer:
        """Return the rows of `keys`, in binary format."""
        try:
            return self._select(session, keys)
        except SqlError as error:
            if error.code != _UNTRANSLATABLE:
                raise
        # The database's encoding lacks a character: of a key, which then no row has, or of a row.
        return self._select(session, _keep_translatable(session, keys))

    def _select(self, session: PostgresSession, keys: Sequence[str]) -> RowBuffer:
        """Return the rows of `keys`.

        Locks the table, so that its columns cannot change between their check and the query.
        """
        if not keys:
            return RowBuffer()
        table = self._table
        names = ", ".join(quote(column.name) for column in self._columns)
        query = f"{select_rows(table)} WHERE ({names}) IN ({', '.join(keys)})"
        with session.transaction():
            lock = _LOCK.format(table=identifier(table.name), text_form=SET_TEXT_FORM)
            session.execute(lock)
            present = find_columns(session, table)
            if changed := [c.name for c in table.columns if present.get(c.name) != c.type_number]:
                raise ConfigError(
                    f"lookup_join: column {changed[0]!r} of table {format_name(table.name)} was"
                    " dropped or has another type than when the job was started, or the table was"
                    " created anew: start the job again, which reads the columns anew"
                )
            return read_all_rows(session.copy_out(f"COPY ({query}) TO STDOUT (FORMAT binary)"))

    @override
    def close(self) -> None:
        self._session.close()


def _keep_translatable(session: PostgresSession, keys: Sequence[str]) -> Sequence[str]:
    """Return the keys whose characters the encoding of the database has."""
    try:
        session.query(f"SELECT FROM (VALUES {', '.join(keys)}) AS k LIMIT 0")
    except SqlError as error:
        if error.code != _UNTRANSLATABLE:
            raise
        if len(keys) == 1:
            return []
        half = len(keys) // 2
        return [
            key for part in (keys[:half], keys[half:]) for key in _keep_translatable(session, part)
        ]
    return keys
