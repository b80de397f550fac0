"""The interface between the SQL sink and a kind of server: all that a dialect must implement.

A dialect is data and small methods, and holds no state: one object serves all sinks. To add a
dialect, add a folder next to sinks/postgres:

    connection.py   its `Session`: the only module that imports the driver. Also its `SqlEndpoint`
                    and `endpoint_of`, unless they are long (mysql/endpoint.py)
    catalog.py      reads the server's description of a table: `find_table`
    types.py        Arrow types and the server's: `fit`
    column_types.py the types of columns that are created: `column_type`; imports SQLAlchemy
    dml.py          sends rows to the server: `executor`
    row_check.py    its `RowCheck`, only where the server refuses values that the fits accept
    dialect.py      its `Dialect`, which refers to these
    sink.py         the user's class: a `SqlSink` with its options and its URL
    two_phase.py    its `TwoPhase`, only where transactions can be prepared
    server.py       its `ServerDiagnosis`: the queries of preflight and doctor to the server, and
                    the rules that judge the answers
    connector.py    its `CONNECTOR`: what `onceflow txn` and `onceflow doctor` need

Without `two_phase` every sink of the dialect is in ledger mode.

Files outside of the folder that every dialect needs:

    pyproject.toml  an entry point in `onceflow.sinks` for each scheme of a URL; an extra with the
                    driver, named in `all` too; the folder in the S608 exception of ruff;
                    the driver in the contract "Only a dialect's connection knows its driver"
    sinks/__init__.py           the sink's public name, three times
    core/imports.py      which extra installs the driver
    sinks/sql/ddl.py            a variant of `listed` if TEXT is short there
    cli/txn/where.py, cli/doctor/command.py     the URL in the help texts
    deploy/conda/recipe.yaml    the driver: conda knows no extras
    docs/sinks/                 its page, and a line in README.md

Files for its Spark format:

    src/pyspark_onceflow_NAME.py    the module that Spark finds; listed in pyproject.toml for the
                                    wheel
    connectors/spark/formats.py     its class, and its line in `FORMATS`
    connectors/spark/options/sql_reads.py       the options of writing
    connectors/spark/options/sql_reads.py and connectors/spark/readers/NAME_rows.py, if it is read
    connectors/python_daemon.py           the modules that its workers import
    docs/spark-formats.md                 its table of options

Files for its tests:

    integration/servers, integration/judges    a server, and a judge of what runs have written
    tests/integration/sql/databases.py         what tests of all databases ask of a database
    tests/conformance/sink_targets.py, test_sinks_conform.py and conftest.py    the suite of sinks
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

import pyarrow as pa

from onceflow.clients.sql.session import RowRefused, Session, SqlEndpoint, session_name
from onceflow.clients.sql.tables import (
    CheckConstraint,
    ColumnFacts,
    ColumnFit,
    Table,
    TableColumn,
    TableName,
    Target,
)
from onceflow.core.protocol.ids import TransactionId
from onceflow.core.spi import CommitterContext, WriterContext
from onceflow.core.spi.connector import Area, Finding
from onceflow.sinks.sql.transactions import PreparedTransactions
from onceflow.sinks.sql.write_mode import ChangeRules, WriteMode

if TYPE_CHECKING:
    from sqlalchemy.engine import Dialect as Compiler
    from sqlalchemy.types import TypeEngine


class InsertStream(ABC):
    """A stream of inserts into one table, sent to the server as rows arrive. Raises `SqlError`.

    The server may report a refused row one or more calls later, at `finish` at the latest.
    """

    @abstractmethod
    def write(self, begin: Callable[[], Session], rows: pa.RecordBatch) -> None:
        """Take `rows`, which are converted, and send the rows that are due now.

        `begin` returns the session with the transaction open, and is called only to send. So the
        server keeps no transaction open for rows that are only buffered here.
        """

    @abstractmethod
    def finish(self, session: Session) -> None:
        """Wait until the server has accepted all rows since the last call."""

    @abstractmethod
    def give_up(self) -> None:
        """Stop sending and do not wait for replies. Raises nothing, and may be called twice."""


class DmlExecutor(ABC):
    """An executor that writes converted rows by the write mode, and deletes keys.

    Raises `SqlError`.
    """

    def __init__(self, mode: WriteMode, key: Sequence[str]) -> None:
        """Send nothing yet; `key` may be empty for inserts."""
        self.mode = mode
        self.key = tuple(key)

    @abstractmethod
    def inserts(self, target: Target) -> InsertStream:
        """Return a stream that inserts rows into `target`."""

    @abstractmethod
    def change(self, session: Session, target: Target, rows: pa.RecordBatch) -> None:
        """Apply `rows` by their key as the write mode says; no key occurs twice in `rows`."""

    @abstractmethod
    def delete(self, session: Session, target: Target, rows: pa.RecordBatch) -> None:
        """Delete the table's rows that have the keys of `rows`. `rows` may have further columns."""

    @abstractmethod
    def update(self, session: Session, target: Target, rows: pa.RecordBatch) -> int:
        """Set the columns of `target` in the table's rows that have the keys of `rows`.

        `target` may lack columns of the table, which stay as they are. Returns the number of rows
        that the table has.
        """

    def update_existing(self, session: Session, target: Target, rows: pa.RecordBatch) -> None:
        """Set the columns of `target` in the table's rows that have the keys of `rows`.

        Raises:
            RowRefused: The mode inserts rows, and the table has no row with a key: the values of
                its other columns are not known.
        """
        if self.update(session, target, rows) == rows.num_rows or self.mode is WriteMode.UPDATE:
            return
        if rows.num_rows > 1:
            # Find a missing row for the message. An update that is repeated changes nothing more.
            half = rows.num_rows // 2
            self.update_existing(session, target, rows.slice(0, half))
            self.update_existing(session, target, rows.slice(half))
            return
        key = {name: rows.column(name)[0].as_py() for name in self.key}
        raise RowRefused(
            f"table {target.name} has no row with the key {key!r}, and the change of this row left"
            " columns as they were, so their values are not known here. Insert the row with the"
            " values that it has in the source"
        )

    def put(self, session: Session, target: Target, batches: Iterable[pa.RecordBatch]) -> None:
        """Insert `batches`, or write them by key. On return the server has accepted all rows."""
        if self.mode is not WriteMode.INSERT:
            for rows in batches:
                self.change(session, target, rows)
            return
        stream = self.inserts(target)
        try:
            for rows in batches:
                stream.write(lambda: session, rows)
            stream.finish(session)
        except BaseException:
            stream.give_up()
            raise


class RowCheck(ABC):
    """A check of rows on the server before they are staged. It changes and locks nothing."""

    @abstractmethod
    def __call__(self, session: Session, rows: pa.RecordBatch) -> None:
        """Raise RowRefused unless the server accepts `rows`.

        The rows are converted, and may have further columns.

        Raises:
            RowRefused: The server refuses one of the rows, or more.
            SqlError: The server cannot be asked.
        """


DATABASE = Area("database")
CONNECTIONS_A_SUBTASK = 2
"""The connections of one subtask: one for its writer and one for its committer."""
CONNECTIONS_OF_DRIVER = 2
"""The connections of the driver, in addition to those of the subtasks."""


class Dialect(ABC):
    """A kind of server. Methods that take a session raise `SqlError`."""

    log: ClassVar[logging.Logger]
    product: ClassVar[str]
    """The word before "type" in messages: "Postgres type", or only "type"."""
    user: ClassVar[str] = "user"
    """The server's word for an account: role, user."""
    lists_locks: ClassVar[str]
    """The view or statement by which the server lists the holders of locks."""
    lists_prepared: ClassVar[str] = ""
    """The view or statement by which the server lists prepared transactions."""
    absence: ClassVar[str] = "does not exist"
    """The words of messages about a table that is not found."""
    folds_names: ClassVar[bool] = False
    """True if the server does not distinguish columns that differ only in upper and lower case."""
    deletes_by_index: ClassVar[bool] = False
    """True if keys can be deleted only where a unique index covers them."""

    unless_there: ClassVar[str] = ""
    """The clause by which an INSERT does nothing if a row with its key exists; empty if the server
    has no such clause and refuses the row."""
    before_pruning: ClassVar[Sequence[str]] = ()
    """The statements that begin a transaction that only prunes. It need not be durable."""
    locks_row: ClassVar[str] = " FOR UPDATE"
    """The clause by which a SELECT locks its rows until the transaction ends."""
    locks_what_is_pruned: ClassVar[str] = ""
    """The clause by which a SELECT skips rows that another session is pruning."""

    alters_in_transaction: ClassVar[bool] = False
    """True if tables are created and altered in the transaction that writes rows, because another
    session would wait for that transaction."""
    adds_columns_one_by_one: ClassVar[bool] = False
    """True if an ALTER TABLE can add only one column."""
    creates_index_if_missing: ClassVar[bool] = True
    """True if the server has CREATE INDEX IF NOT EXISTS."""
    options_of_tables: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    options_of_bookkeeping: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    """SQLAlchemy's options of the tables that are created: engine, character set."""

    # -- text --------------------------------------------------------------------------------------

    @abstractmethod
    def quote(self, name: str) -> str:
        """Return `name` as an identifier."""

    def check_name(self, name: str) -> None:  # noqa: B027 - where the server refuses by itself
        """Raise ConfigError if the server would silently change `name`."""

    @abstractmethod
    def literal(self, value: str) -> str:
        """Return `value` as a SQL literal, for any characters in it."""

    def identifier(self, name: TableName) -> str:
        """Return a table's name, quoted."""
        return ".".join(map(self.quote, ([name.schema] if name.schema else []) + [name.name]))

    def unique_key_creation(self, table: TableName, columns: Sequence[str]) -> str:
        """Return the statement that makes `columns` unique, also in a table with a primary key."""
        names = ", ".join(map(self.quote, columns))
        return f"ALTER TABLE {self.identifier(table)} ADD UNIQUE ({names})"

    @abstractmethod
    def compiler(self) -> Compiler:
        """Return SQLAlchemy's dialect, for the text of CREATE and ALTER; imports it."""

    # -- tables ------------------------------------------------------------------------------------

    @abstractmethod
    def find_table(self, session: Session, name: TableName) -> Table | None:
        """Return the table called `name` as the session finds it, or None."""

    def read_column_facts(self, session: Session, name: TableName) -> Mapping[str, ColumnFacts]:
        """Return the facts of each column of the table called `name`.

        Empty if there is no such table, or if a transaction does not keep what it writes there.
        Writers call this at each barrier, so a dialect uses a single query.
        """
        table = self.find_table(session, name)
        if table is None or table.unfit is not None:
            return {}
        return {
            column.name: ColumnFacts(column.type.shown, column.needs_value, column.key_fault)
            for column in table.columns
        }

    def list_referenced_tables(self, session: Session, name: TableName) -> frozenset[TableName]:
        """Return the tables to which foreign keys of the table called `name` refer.

        Empty if the server does not enforce foreign keys.
        """
        del session, name
        return frozenset()

    def describe_altered_keys(self, session: Session, table: Table) -> str:
        """Describe how the comparison of keys has changed since `table` was read.

        Empty if it has not.

        Writers of changes by key call this at each barrier. If the server itself refuses statements
        that such a change makes wrong, the dialect always returns an empty text.
        """
        return ""

    @abstractmethod
    def resolve_table(self, endpoint: SqlEndpoint, name: TableName) -> TableName:
        """Return the canonical name of a table; ask the server if only the server knows it.

        The default schema is left out: public, or the url's database. A table that is missing has
        the name under which it would be created.

        Raises:
            ConfigError, SinkError: The server refuses the connection.
            SqlError: The server does not answer.
        """

    @abstractmethod
    def fit(self, column: TableColumn, given: pa.DataType, *, is_key: bool) -> ColumnFit | None:
        """Return the fit of Arrow type `given` into `column`, or None if values would change."""

    @abstractmethod
    def column_type(self, field: pa.Field, *, is_key: bool) -> TypeEngine[Any] | None:
        """Return the column type to create for `field`, or None if there is none."""

    no_type_advice: ClassVar[str] = "nested data to JSON text"
    """The advice in errors about columns for which there is no type."""

    def columns_to_assign(
        self, table: Table, others: Sequence[TableColumn], rules: ChangeRules
    ) -> Sequence[TableColumn]:
        """Return the columns of `others`, which are outside the key, that changes by key assign."""
        del table
        return () if rules.mode is WriteMode.IGNORE else others

    @abstractmethod
    def one_at_a_time(self, session: Session) -> AbstractContextManager[None]:
        """Exclude all other sessions that create or alter tables while the block runs.

        The effects of the block are kept after it. Waits no longer than the settings allow.
        """

    @abstractmethod
    def has_schema(self, session: Session, schema: str | None) -> bool:
        """Return True if `schema` exists. None and empty stand for the server's default schema."""

    def list_namesakes(self, session: Session, name: TableName) -> Sequence[TableName]:
        """Return a few tables whose names differ from `name` only in the schema or in case."""
        del session, name
        return ()

    # -- rows --------------------------------------------------------------------------------------

    @abstractmethod
    def executor(self, session: Session, mode: WriteMode, key: Sequence[str]) -> DmlExecutor:
        """Return an executor for rows on `session`; `key` may be empty for inserts."""

    def find_row_check(
        self, target: Target, names: Sequence[str], constraints: Sequence[CheckConstraint]
    ) -> RowCheck | None:
        """Return a check that the server makes of the columns `names` before rows are staged.

        Returns None if there is nothing to ask: the fits find every value that a column does not
        accept, and there are no constraints. Each of `constraints` is over columns in `names`.
        """
        del target, names, constraints
        return None

    def writer_name(self, context: WriterContext) -> str:
        """Return the name of a writer's session, which identifies its attempt to the server."""
        return session_name(context.sink_id, context.attempt, f"subtask {context.subtask} writer")

    def lock_holders(
        self, session: Session, table: TableName, context: WriterContext, most: int
    ) -> Sequence[str]:
        """Describe up to `most` sessions that may hold the lock a writer on `table` waited for.

        The text never contains values of those sessions: at most the first word of a statement.
        Empty if the server does not tell.
        """
        del session, table, context, most
        return ()

    def list_blockers(
        self, session: Session, ledger_schema: str, context: CommitterContext, most: int
    ) -> Sequence[str]:
        """Describe up to `most` sessions that block the attempt's writers now.

        See `lock_holders`.
        """
        del session, ledger_schema, context, most
        return ()

    # -- before a job writes -----------------------------------------------------------------------

    def guard_of_record(self, transaction: TransactionId) -> str:
        """Return a further condition for writing a ledger row, from AND on; or an empty text.

        It is needed if the server would wait for the ledger row of a prepared transaction of the
        same name.
        """
        del transaction
        return ""

    def two_phase(self, schema: str) -> TwoPhase | None:
        """Return the two-phase operations under the ledger in `schema`, or None."""
        del schema
        return None

    @abstractmethod
    def look_at_server(self, session: Session) -> ServerDiagnosis:
        """Return the current diagnosis of the server."""

    def end_older_writers(  # noqa: B027 - where nothing is open between statements
        self, session: Session, schema: str, context: CommitterContext
    ) -> None:
        """End the sessions of older attempts' writers. The server rolls back their transactions."""

    def cascades_of(self, session: Session, name: TableName) -> Sequence[str]:
        """Return the foreign keys by which deletes from a table change rows of other tables."""
        del session, name
        return ()

    def require_delete(  # noqa: B027 - where the catalogs tell
        self, session: Session, table: Table
    ) -> None:
        """Raise ConfigError if the user may not delete rows, where `Table.deletable` cannot tell.

        Raises:
            ConfigError: The user may not.
        """


class ServerDiagnosis(ABC):
    """An assessment of a server's own answers, used by a job's start and by `onceflow doctor`."""

    user: str
    """The connected user, in the form that GRANT accepts."""

    @abstractmethod
    def fitness(self, where: SqlEndpoint) -> Sequence[Finding]:
        """Judge whether the server accepts writes and keeps committed transactions."""

    @abstractmethod
    def two_phase_support(self, session: Session, parallelism: int) -> TwoPhaseSupport:
        """Judge whether `parallelism` subtasks can and should prepare transactions."""

    @abstractmethod
    def bookkeeping(self, session: Session, schema: str, tables: Sequence[str]) -> Finding:
        """Judge whether the user may create or write onceflow's tables in `schema`.

        `tables` may name more tables than a job needs. A missing table is not a problem by itself.
        """

    def absent(self, session: Session, name: TableName, area: Area) -> Finding:
        """Return the reason why a table is not found."""
        del session, name
        return area.problem("it does not exist", "the table", "create it, or pass create=True")

    def room(self, session: Session, parallelism: int) -> Sequence[Finding]:
        """Return findings about the free connections and other resources that the job needs."""
        del session, parallelism
        return ()

    def clock_s(self, session: Session) -> float | None:
        """Return the time of the server's clock, or None if it is the clock of this machine."""
        del session
        return None

    def list_left_over(self, session: Session, schema: str) -> Sequence[Finding]:
        """Return the prepared transactions: those of the ledger in `schema`, and all others."""
        del session, schema
        return ()


@dataclass(frozen=True, slots=True)
class TwoPhaseSupport:
    """An assessment whether two_phase is possible and advisable on a server."""

    merit: str
    """The reason why two_phase is possible and advisable, if there are no obstacles and
    drawbacks."""
    obstacles: tuple[Finding, ...] = ()
    """The reasons why two_phase is impossible."""
    drawbacks: tuple[Finding, ...] = ()
    """The reasons why ledger is better although two_phase is possible."""


def connections(total: int, free: int, parallelism: int, raise_to: str) -> Finding:
    """Judge whether a job finds enough free connections.

    `raise_to` is the statement that raises the limit to `{total}`.
    """
    needed = CONNECTIONS_A_SUBTASK * parallelism + CONNECTIONS_OF_DRIVER
    text = f"{free} of {total} connections are free"
    if free >= needed:
        return DATABASE.ok(text)
    return DATABASE.warning(
        text,
        f"{needed}: {CONNECTIONS_A_SUBTASK} for each parallel subtask, {CONNECTIONS_OF_DRIVER} for"
        " the driver",
        raise_to.format(total=total + needed),
    )


class TwoPhase(ABC):
    """The operations that prepare transactions under one ledger, and end them from any session."""

    commit_words: ClassVar[str]
    """The statement that commits a prepared transaction, as messages name it; its name follows."""
    roll_back_words: ClassVar[str]
    holder_leaves_s: ClassVar[float] = 0.0
    """The time that a session which holds a prepared transaction may take to release it."""

    def __init__(self, schema: str) -> None:
        """Send no query; `schema` is the ledger's schema."""
        self.schema = schema

    @abstractmethod
    def transactions(self, endpoint: SqlEndpoint, context: WriterContext) -> PreparedTransactions:
        """Return the connected transactions of one writer.

        Raises:
            ConfigError: The server does not allow as many prepared transactions as all writers
                need.
            SinkError: The server cannot be reached or asked now.
        """

    @abstractmethod
    def list_prepared(self, session: Session, sink_id: str) -> tuple[TransactionId, ...]:
        """Return all transactions that are prepared under exactly this sink id with this ledger.

        They may be from any session and any user.
        """

    def may_list(self, session: Session) -> bool:
        """Return True if the user may list prepared transactions."""
        del session
        return True

    def is_prepared(self, session: Session, transaction: TransactionId) -> bool:
        """Return True if the server lists the transaction as prepared."""
        return transaction in self.list_prepared(session, transaction.sink_id)

    @abstractmethod
    def find_prepare_time(self, session: Session, transaction: TransactionId) -> datetime | None:
        """Return the server's time at which it was prepared, or None if it is not prepared."""

    def is_held(self, session: Session, transaction: TransactionId) -> bool:
        """Return True if the session that prepared the transaction still holds it.

        The caller then waits before it ends the transaction.
        """
        del session, transaction
        return False

    @abstractmethod
    def commit(self, session: Session, transaction: TransactionId) -> None:
        """Commit a prepared transaction.

        Raises:
            NameUnknown: Nothing is prepared under the name, or a session holds it.
        """

    @abstractmethod
    def roll_back(self, session: Session, transaction: TransactionId) -> None:
        """Roll back a prepared transaction.

        Raises:
            NameUnknown: Nothing is prepared under the name, or a session holds it.
        """

    def commit_is_proof(self, session: Session) -> bool:
        """Return True if the reply to a commit proves it. Otherwise the caller reads the ledger."""
        del session
        return True

    @abstractmethod
    def end_holding_session(self, session: Session, transaction: TransactionId) -> str:
        """End the session that holds the transaction if the session prepared it.

        Return a description of the session and of the outcome, for the error text.
        """

    @abstractmethod
    def endings(self, transaction: TransactionId) -> str:
        """Return the statements by which an operator ends a prepared transaction."""
