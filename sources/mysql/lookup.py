"""A table of MySQL or MariaDB that a job looks up by key, while the table changes."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pyarrow as pa
from typing_extensions import override

from onceflow.clients.mysql import catalog
from onceflow.clients.mysql.catalog import MySQLType, identifier, literal, quote
from onceflow.clients.mysql.connection import MySQLSession
from onceflow.clients.mysql.endpoint import MySQLEndpoint, endpoint_of
from onceflow.clients.mysql.rows import (
    is_boolean,
    is_whole_number,
    parse_rows,
    plan_column,
    select_rows,
)
from onceflow.clients.sql.lookups import ReopenedSession
from onceflow.clients.sql.session import (
    AccessDenied,
    ConnectionLost,
    DatabaseAccess,
    LockTimeout,
    RowRefused,
    SqlError,
    StatementInvalid,
    TableMissing,
)
from onceflow.clients.sql.tables import Table, TableName
from onceflow.core.argument_types import check_fields
from onceflow.core.arrow.kinds import cast_batch, cast_rows
from onceflow.core.arrow.schema_text import SchemaLike, schema_of
from onceflow.core.errors import (
    BadRecord,
    ConfigError,
    InvariantViolation,
    OnceflowError,
    SinkError,
    SourceUnavailable,
)
from onceflow.core.protocol.failures import make_fingerprint
from onceflow.core.setting_values import accept_durations
from onceflow.core.spi.lookups import LookupReader, LookupSource
from onceflow.core.spi.options import document_options, option

logger = logging.getLogger("onceflow.sources.mysql")
_SESSION_NAME = "onceflow lookups"
_CHUNK_BYTES = 4 * 1024 * 1024
_LAST_OF_UTF8MB3 = "\uffff"


@dataclass(frozen=True, slots=True)
class _Column:
    """A column that is read."""

    name: str
    kind: MySQLType
    expression: str


@dataclass(frozen=True, slots=True)
class _Described:
    """The table as it was when the job was started."""

    name: TableName
    columns: tuple[_Column, ...]
    sent: pa.Schema
    """The types in which the server's texts are read."""
    schema: pa.Schema
    """The types of the rows."""


@document_options
@accept_durations
@check_fields
@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class MySQLTable(DatabaseAccess, LookupSource):
    """A table of MySQL or MariaDB for `Stream.lookup_join`.

    Values are read as by the Spark format `onceflow-mysql`, each exactly or refused. Rows are
    looked up by columns of integers, booleans or text, which should have an index. Texts are equal
    if all of their characters are. Creating the object opens no connection.

    Raises:
        ConfigError: A setting is wrong. The message names it and the value to give instead.
    """

    table: str = field(
        metadata=option(
            "Name of the table: `table` or `database.table`; upper and lower case are kept"
        )
    )
    schema: SchemaLike | None = field(
        default=None,
        metadata=option(
            "Columns to read, with their types: DDL as in `id BIGINT, name STRING`, an Arrow"
            " schema, or a mapping from name to type. Default: all columns of the table"
        ),
    )
    _described: _Described | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        try:
            TableName.parse(self.table)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        if self.schema is not None:
            object.__setattr__(self, "schema", schema_of(self.schema))
        assert self.endpoint

    def __repr__(self) -> str:
        return f"MySQLTable(table={self.table!r}, {self.endpoint})"

    @property
    def endpoint(self) -> MySQLEndpoint:
        """The address of the database and the settings of its connections."""
        return endpoint_of(self, lock_timeout_s=self.statement_timeout_s)

    @override
    def describe(self, on: Sequence[str]) -> pa.Schema:
        endpoint = self.endpoint
        requested = None if self.schema is None else schema_of(self.schema)
        try:
            with endpoint.connect(_SESSION_NAME) as session:
                described = _describe(session, TableName.parse(self.table), requested, on, endpoint)
        except SqlError as error:
            raise _to_error(error, str(endpoint)) from error
        except SinkError as error:
            raise SourceUnavailable(str(error)) from None
        object.__setattr__(self, "_described", described)
        return described.schema

    @override
    def open(self, on: Sequence[str], name: str) -> LookupReader:
        if self._described is None:
            raise InvariantViolation(f"{self} is opened, and describe() was not called")
        return _Reader(self.endpoint, self._described, on, name)


def _describe(
    session: MySQLSession,
    name: TableName,
    requested: pa.Schema | None,
    on: Sequence[str],
    endpoint: MySQLEndpoint,
) -> _Described:
    table = catalog.find_table(session, name)
    if table is None:
        raise catalog.explain_missing_table(session, name, str(endpoint))
    columns = tuple(_read_columns(table, requested))
    sent: dict[str, pa.DataType] = {}
    for column in columns:
        is_key = column.name in on
        if is_key:
            _check_key(column, table.name)
        sent[column.name] = plan_column(column.name, column.kind).arrow
        if is_key and column.kind.name == "bigint" and column.kind.unsigned:
            # Streams have their keys as integers, and this type holds each of them.
            sent[column.name] = pa.uint64()
    as_sent = pa.schema(list(sent.items()))
    described = _Described(table.name, columns, as_sent, requested or as_sent)
    _check_types(described)
    keys = [column for column in on if column in sent]
    if keys and not catalog.has_index(session, table.name, keys):
        logger.warning(
            "lookup_join: table %s has no index that begins with %s, so each question reads the"
            " whole table. Create one: CREATE INDEX onceflow_lookups ON %s (%s)",
            table.name,
            ", ".join(keys),
            identifier(table.name),
            ", ".join(map(quote, keys)),
        )
    return described


def _read_columns(table: Table, requested: pa.Schema | None) -> Iterator[_Column]:
    """Yield the columns that are read, in the order of `requested`.

    Raises:
        ConfigError: A column does not exist, or the user may not read it.
    """
    by_name = {column.name: column for column in table.columns}
    for name in by_name if requested is None else requested.names:
        if name not in by_name:
            raise ConfigError(
                f"table {table.name} has no column {name!r}; there are {', '.join(by_name)}"
            )
        column = by_name[name]
        if not column.readable:
            raise ConfigError(
                f"the user may not read column {name!r} of table {table.name}: omit it by schema=,"
                f" or run as the table's owner: GRANT SELECT ({quote(name)}) ON"
                f" {identifier(table.name)} TO {table.grantee}"
            )
        assert isinstance(column.type, MySQLType), column.type
        yield _Column(name, column.type, plan_column(name, column.type).expression)


def _check_key(column: _Column, table: TableName) -> None:
    """Raise ConfigError unless rows are looked up by columns of this type."""
    kind = column.kind
    if is_whole_number(kind) or is_boolean(kind):
        return
    if kind.name not in catalog.TEXTS:
        raise ConfigError(
            f"lookup_join(on={column.name!r}): column {column.name!r} of table {table} has type"
            f" {kind.shown}. Rows are looked up by integers, booleans and text: name another column"
        )
    if kind.charset not in ("utf8mb4", "utf8mb3", "utf8", "ascii"):
        raise ConfigError(
            f"lookup_join(on={column.name!r}): column {column.name!r} of table {table} has"
            f" character set {kind.charset}, which does not have each text. Run ALTER TABLE"
            f" {identifier(table)} MODIFY {quote(column.name)} {kind.shown} CHARACTER SET utf8mb4,"
            " and repeat its NOT NULL and other attributes there; or name another column"
        )


def _check_types(described: _Described) -> None:
    """Raise ConfigError if a column cannot be read as the type that the user wants."""
    for have, want in zip(described.sent, described.schema, strict=True):
        try:
            cast_rows(pa.nulls(0, have.type), want.type)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise ConfigError(
                f"column {want.name!r} of table {described.name} is read as {have.type}, which does"
                f" not become {want.type}: give another type in schema="
            ) from error


class _Reader(LookupReader):
    """A reader of the table's rows by keys, on a session of its own."""

    def __init__(
        self, endpoint: MySQLEndpoint, table: _Described, on: Sequence[str], name: str
    ) -> None:
        self._where, self._table = str(endpoint), table
        self._keys = [column for column in table.columns if column.name in on]
        self._session = ReopenedSession(lambda: endpoint.connect(name))

    @override
    def read(self, keys: pa.RecordBatch) -> pa.RecordBatch:
        columns = [keys.column(column.name).to_pylist() for column in self._keys]
        literals = [
            row
            for values in zip(*columns, strict=True)
            if (row := self._write_key(values)) is not None
        ]
        try:
            chunks = self._session.ask(lambda session: self._read(session, literals))
        except SqlError as error:
            raise _to_error(error, self._where) from error
        try:
            parts = [parse_rows(chunk, self._table.sent) for chunk in chunks]
            rows = pa.Table.from_batches(parts, self._table.sent).combine_chunks()
            batch = rows.to_batches()[0] if rows.num_rows else _no_rows(self._table.sent)
            return cast_batch(batch, self._table.schema)
        except (pa.ArrowException, ValueError) as error:
            listed = ", ".join(f"{column.name}: {column.type}" for column in self._table.schema)
            raise BadRecord(
                f"table {self._table.name}: a value does not fit the type as which its column is"
                f" read ({listed}): {error}. Give a schema without this column, or with a wider"
                " type"
            ) from error

    def _write_key(self, values: Sequence[object]) -> str | None:
        """Return the key as SQL, or None if no row can have it."""
        texts: list[str] = []
        for column, value in zip(self._keys, values, strict=True):
            if isinstance(value, int):
                texts.append(str(int(value)))
                continue
            assert isinstance(value, str), value
            charset = column.kind.charset
            if charset == "ascii" and not value.isascii():
                return None
            if charset != "utf8mb4" and max(value, default="") > _LAST_OF_UTF8MB3:
                return None
            texts.append(literal(value))
        return f"({', '.join(texts)})"

    def _read(self, session: MySQLSession, keys: Sequence[str]) -> list[bytes]:
        """Return the rows of `keys` as texts. The table keeps its columns in between."""
        if not keys:
            return []
        with session.transaction():
            chunks = list(self._select(session, keys))
            # The transaction holds the table's metadata lock since its first row was read.
            present = catalog.read_column_types(session, self._table.name)
        changed = [
            column.name
            for column in self._table.columns
            if present.get(column.name) != (column.kind.shown, column.kind.charset)
        ]
        if changed:
            raise ConfigError(
                f"lookup_join: column {changed[0]!r} of table {self._table.name} was dropped or has"
                " another type than when the job was started: start the job again, which reads the"
                " columns anew"
            )
        return chunks

    def _select(self, session: MySQLSession, keys: Sequence[str]) -> Iterator[bytes]:
        names = ", ".join(quote(column.name) for column in self._keys)
        columns = ", ".join(f"{c.expression} AS {quote(c.name)}" for c in self._table.columns)
        rows = (
            f"SELECT {columns} FROM {identifier(self._table.name)}"
            f" WHERE ({names}) IN ({', '.join(keys)})"
        )
        statement = select_rows(rows, self._table.sent)
        if len(keys) > 1 and len(statement.encode()) > session.statement_bytes_max:
            half = len(keys) // 2
            yield from self._select(session, keys[:half])
            yield from self._select(session, keys[half:])
            return
        yield from session.single_texts(statement, _CHUNK_BYTES)

    @override
    def close(self) -> None:
        self._session.close()


def _no_rows(schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([], schema)


def _to_error(error: SqlError, where: str) -> OnceflowError:
    """Return the error of a source whose question the server refuses."""
    match error:
        case ConnectionLost() | LockTimeout():
            return SourceUnavailable(f"{where}: {error}")
        case AccessDenied() | TableMissing() | StatementInvalid():
            return ConfigError(f"{where}: {error}. Start the job again when this is changed")
        case RowRefused():
            return BadRecord(f"{where} cannot read a value of the table: {error}")
        case _:
            fingerprint = make_fingerprint("", error.code, "")
            return SourceUnavailable(f"{where}: {error}", fingerprint=fingerprint)
