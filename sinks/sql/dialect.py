"""The seam between the SQL sink and a kind of server: what a dialect must give, and nothing else.

A dialect is data and small methods, and holds no state: one object serves all sinks. To add one, a
folder beside sinks/postgres:

    connection.py   its `Session`: the only module that imports the driver. Also its `SqlEndpoint`
                    and `endpoint_of`, unless they are long (mysql/endpoint.py)
    catalog.py      how the server describes a table: `find_table`
    types.py        Arrow types and the server's: `fit`
    column_types.py the types of columns that are created: `column_type`; imports SQLAlchemy
    dml.py          how rows go in: `executor`
    dialect.py      its `Dialect`, which refers to these
    sink.py         the user's class: a `SqlSink` with its options and its URL
    two_phase.py    its `TwoPhase`, only where transactions can be prepared
    server.py       its `ServerDiagnosis`: what a server is asked for preflight and doctor, and how
                    the answers are judged
    connector.py    its `CONNECTOR`: what `onceflow txn` and `onceflow doctor` need; SQLite has it
                    in sink.py, and resource_manager.py beside it

Without `two_phase` every sink of the dialect is in ledger mode.

Outside of the folder, needed by every dialect:

    pyproject.toml  an entry point in `onceflow.sinks` for each scheme of a URL; an extra with the
                    driver, named in `all` too; the folder in the S608 exception of ruff;
                    the driver in the contract "Only a dialect's connection knows its driver"
    sinks/__init__.py           the sink's public name, three times
    core/imports/extras.py      which extra installs the driver
    sinks/sql/ddl.py            a variant of `listed` if TEXT is short there
    cli/txn/where.py, cli/doctor/command.py     the URL in the help texts
    deploy/conda/recipe.yaml    the driver: conda knows no extras
    docs/sinks/                 its page, and a line in README.md

For its Spark format besides:

    src/pyspark_onceflow_NAME.py    by which Spark finds it; listed in pyproject.toml for the wheel
    connectors/spark/formats.py     its class, and its line in `FORMATS`
    connectors/spark/options/sql.py       the options of writing
    connectors/spark/options/sql_reads.py and connectors/spark/readers/NAME_rows.py, if it is read
    connectors/python_daemon.py           the modules that its workers import
    docs/spark-formats.md                 its table of options

For its tests:

    integration/servers, integration/judges    a server, and a judge of what runs have written
    tests/integration/sql/databases.py         what tests of all databases ask of one
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

from onceflow.core.protocol.ids import TransactionId
from onceflow.core.spi import CommitterContext, WriterContext
from onceflow.core.spi.connector import Area, Finding
from onceflow.sinks.sql.session import Session, SqlEndpoint, session_name
from onceflow.sinks.sql.tables import (
    ColumnFacts,
    ColumnFit,
    Table,
    TableColumn,
    TableName,
    Target,
)
from onceflow.sinks.sql.transactions import PreparedTransactions
from onceflow.sinks.sql.write_mode import ChangeRules, WriteMode

if TYPE_CHECKING:
    from sqlalchemy.engine import Dialect as Compiler
    from sqlalchemy.types import TypeEngine


class InsertStream(ABC):
    """Inserts into one table that go to the server as they come. Errors of it are `SqlError`s.

    The server may tell of a refused row one or more calls later, at `finish` at the latest.
    """

    @abstractmethod
    def write(self, begin: Callable[[], Session], rows: pa.RecordBatch) -> None:
        """Take `rows`, which are converted, and send what is due now.

        `begin` returns the session with the transaction open, and is called only to send: the
        server need not keep a transaction open for rows that wait here.
        """

    @abstractmethod
    def finish(self, session: Session) -> None:
        """Wait until the server has taken all rows since the last call as they are."""

    @abstractmethod
    def give_up(self) -> None:
        """Send and await nothing more. Raises nothing; safe to call twice."""


class DmlExecutor(ABC):
    """Puts converted rows by the write mode, and deletes keys. Errors are `SqlError`s."""

    def __init__(self, mode: WriteMode, key: Sequence[str]) -> None:
        """Prepare nothing; `key` may be empty for inserts."""
        self.mode = mode
        self.key = tuple(key)

    @abstractmethod
    def inserts(self, target: Target) -> InsertStream:
        """Return what inserts rows into `target`."""

    @abstractmethod
    def change(self, session: Session, target: Target, rows: pa.RecordBatch) -> None:
        """Put `rows` by their key, of which each comes once, as the write mode says."""

    @abstractmethod
    def delete(self, session: Session, target: Target, rows: pa.RecordBatch) -> None:
        """Delete the rows of the keys of `rows`, which may have further columns."""

    def put(self, session: Session, target: Target, batches: Iterable[pa.RecordBatch]) -> None:
        """Insert `batches`, or put them by key; the server has taken all when it returns."""
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


DATABASE = Area("database")
CONNECTIONS_A_SUBTASK = 2
"""The writer's and the committer's."""
CONNECTIONS_OF_DRIVER = 2
"""Connections of the driver, besides those of subtasks."""


class Dialect(ABC):
    """One kind of server. Methods that take a session raise `SqlError`s."""

    log: ClassVar[logging.Logger]
    product: ClassVar[str]
    """What messages call a type of the server: Postgres type, type."""
    user: ClassVar[str] = "user"
    """What it calls who connects: role, user."""
    lists_locks: ClassVar[str]
    """Where the server tells who holds which locks."""
    lists_prepared: ClassVar[str] = ""
    """Where it tells what is prepared."""
    absence: ClassVar[str] = "does not exist"
    """What is known of a table that is not found."""
    folds_names: ClassVar[bool] = False
    """Whether columns are the same that differ only in upper and lower case."""
    deletes_by_index: ClassVar[bool] = False
    """Whether keys can be deleted only where a unique index is over them."""

    unless_there: ClassVar[str] = ""
    """What makes an INSERT do nothing where a row of the key is; empty if it is refused then."""
    before_pruning: ClassVar[Sequence[str]] = ()
    """Statements of a transaction that only prunes: it need not be durable."""
    locks_row: ClassVar[str] = " FOR UPDATE"
    """What keeps the rows of a SELECT as they are until the transaction ends."""
    locks_what_is_pruned: ClassVar[str] = ""
    """What passes over the rows that another session is pruning."""

    adds_columns_one_by_one: ClassVar[bool] = False
    """Whether an ALTER TABLE adds no more than one."""
    creates_index_if_missing: ClassVar[bool] = True
    """Whether there is a CREATE INDEX IF NOT EXISTS."""
    options_of_tables: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    options_of_bookkeeping: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    """SQLAlchemy's options of the tables that are created: engine, character set."""

    # -- text --------------------------------------------------------------------------------------

    @abstractmethod
    def quote(self, name: str) -> str:
        """Return `name` as an identifier."""

    def check_name(self, name: str) -> None:  # noqa: B027 - where the server refuses by itself
        """Raise ConfigError if the server would take another name for `name`, without an error."""

    @abstractmethod
    def literal(self, value: str) -> str:
        """Return `value` as SQL, whatever is in it."""

    def identifier(self, name: TableName) -> str:
        """Return a table's name, quoted."""
        return ".".join(map(self.quote, ([name.schema] if name.schema else []) + [name.name]))

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
        Writers ask at each barrier, so a dialect answers by one query.
        """
        table = self.find_table(session, name)
        if table is None or table.unfit is not None:
            return {}
        return {
            column.name: ColumnFacts(column.type.shown, column.needs_value, column.key_fault)
            for column in table.columns
        }

    def describe_altered_keys(self, session: Session, table: Table) -> str:
        """Return what has changed by which `table` tells keys apart since it was read; or empty.

        Writers of changes by key ask at each barrier. A dialect whose server refuses statements
        that such a change makes wrong always returns an empty text.
        """
        return ""

    @abstractmethod
    def resolve_table(self, endpoint: SqlEndpoint, name: TableName) -> TableName:
        """Return the name that all spellings of a table share; asks the server where only it knows.

        The usual schema is left out: public, or the url's database. A table that is missing has
        the name under which it would be created.

        Raises:
            ConfigError, SinkError: The server refuses the connection.
            SqlError: It does not answer.
        """

    @abstractmethod
    def fit(self, column: TableColumn, given: pa.DataType, *, is_key: bool) -> ColumnFit | None:
        """Return how values of `given` go into `column`; None when they cannot unchanged."""

    @abstractmethod
    def column_type(self, field: pa.Field, *, is_key: bool) -> TypeEngine[Any] | None:
        """Return the type of a column that is created for `field`; None when there is none."""

    no_type_advice: ClassVar[str] = "nested data to JSON text"
    """What can be made of columns for which there is no type."""

    def columns_to_assign(
        self, table: Table, others: Sequence[TableColumn], rules: ChangeRules
    ) -> Sequence[TableColumn]:
        """Return the columns to which changes by key assign; `others` are those outside the key."""
        del table
        return () if rules.mode is WriteMode.IGNORE else others

    @abstractmethod
    def one_at_a_time(self, session: Session) -> AbstractContextManager[None]:
        """Let nobody else create or alter anything in the block; what is done in it holds after.

        Waits no longer than the settings allow.
        """

    @abstractmethod
    def has_schema(self, session: Session, schema: str | None) -> bool:
        """Return whether `schema`, or the one that the server takes by itself, is there."""

    # -- rows --------------------------------------------------------------------------------------

    @abstractmethod
    def executor(self, session: Session, mode: WriteMode, key: Sequence[str]) -> DmlExecutor:
        """Return what puts and deletes rows on `session`; `key` may be empty for inserts."""

    def writer_name(self, context: WriterContext) -> str:
        """Return the name of a writer's session, by which its attempt is known."""
        return session_name(context.sink_id, context.attempt, f"subtask {context.subtask} writer")

    def lock_holders(
        self, session: Session, table: TableName, context: WriterContext, most: int
    ) -> Sequence[str]:
        """Describe who may hold what a writer on `table` waited for, at most `most`.

        Never has a value of theirs: of a statement at most its first word. Empty where the server
        does not tell.
        """
        del session, table, context, most
        return ()

    def list_blockers(
        self, session: Session, ledger_schema: str, context: CommitterContext, most: int
    ) -> Sequence[str]:
        """Describe whom writers of the attempt wait for now, at most `most`; see `lock_holders`."""
        del session, ledger_schema, context, most
        return ()

    # -- before a job writes -----------------------------------------------------------------------

    def guard_of_record(self, transaction: TransactionId) -> str:
        """Return what else must hold when a ledger row is written, from AND on; or nothing.

        For servers where the row of a prepared transaction of the same name would be waited for.
        """
        del transaction
        return ""

    def two_phase(self, schema: str) -> TwoPhase | None:
        """Return how transactions are prepared under the ledger in `schema`; None if not at all."""
        del schema
        return None

    @abstractmethod
    def look_at_server(self, session: Session) -> ServerDiagnosis:
        """Return what the server is, as of now."""

    def end_older_writers(  # noqa: B027 - where nothing is open between statements
        self, session: Session, schema: str, context: CommitterContext
    ) -> None:
        """End the sessions of older attempts' writers: what they hold is rolled back."""

    def cascades_of(self, session: Session, name: TableName) -> Sequence[str]:
        """Return the foreign keys by which other rows change when rows of a table are deleted."""
        del session, name
        return ()

    def require_delete(  # noqa: B027 - where the catalogs tell
        self, session: Session, table: Table
    ) -> None:
        """Check that the user may delete rows, where `Table.deletable` cannot tell.

        Raises:
            ConfigError: The user may not.
        """


class ServerDiagnosis(ABC):
    """What a server said of itself, judged: once, for a job's start and for `onceflow doctor`."""

    user: str
    """Who is connected, as GRANT takes it."""

    @abstractmethod
    def fitness(self, where: SqlEndpoint) -> Sequence[Finding]:
        """Return whether it can be written to, and keeps what it has said is committed."""

    @abstractmethod
    def two_phase_support(self, session: Session, parallelism: int) -> TwoPhaseSupport:
        """Return whether so many subtasks can prepare transactions, and whether that is wise."""

    @abstractmethod
    def bookkeeping(self, session: Session, schema: str, tables: Sequence[str]) -> Finding:
        """Return whether the user may create our tables in `schema`, or write those there are.

        `tables` may name more than a job needs: one that is not there is nobody's lack.
        """

    def absent(self, session: Session, name: TableName, area: Area) -> Finding:
        """Return why a table is not found."""
        del session, name
        return area.problem("it does not exist", "the table", "create it, or pass create=True")

    def room(self, session: Session, parallelism: int) -> Sequence[Finding]:
        """Return whether a job of `parallelism` finds free connections and the like now."""
        del session, parallelism
        return ()

    def clock_s(self, session: Session) -> float | None:
        """Return the time by the server's clock; None where it is ours."""
        del session
        return None

    def list_left_over(self, session: Session, schema: str) -> Sequence[Finding]:
        """Return what is prepared: ours under the ledger in `schema`, and that of others."""
        del session, schema
        return ()


@dataclass(frozen=True, slots=True)
class TwoPhaseSupport:
    """Whether two_phase is possible in a server as it is reached, and whether it is wise."""

    merit: str
    """Why it is both, when nothing below says otherwise."""
    obstacles: tuple[Finding, ...] = ()
    """Why it is impossible."""
    drawbacks: tuple[Finding, ...] = ()
    """Why ledger is better, though it is possible."""


def connections(total: int, free: int, parallelism: int, raise_to: str) -> Finding:
    """Return whether a job finds enough of them; `raise_to` is the statement for `{total}`."""
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
    """How transactions are prepared under one ledger, and ended by their names from any session."""

    commit_words: ClassVar[str]
    """What commits a prepared transaction, as messages call it; its name follows."""
    roll_back_words: ClassVar[str]
    holder_leaves_s: ClassVar[float] = 0.0
    """How long a session that holds a prepared transaction may take to release it."""

    def __init__(self, schema: str) -> None:
        """Ask nothing; `schema` is the ledger's."""
        self.schema = schema

    @abstractmethod
    def transactions(self, endpoint: SqlEndpoint, context: WriterContext) -> PreparedTransactions:
        """Return the connected transactions of one writer.

        Raises:
            ConfigError: The server cannot hold what all writers prepare.
            SinkError: The server cannot be reached or asked now.
        """

    @abstractmethod
    def list_prepared(self, session: Session, sink_id: str) -> tuple[TransactionId, ...]:
        """Return what is prepared under exactly this sink id with this ledger, by anybody."""

    def may_list(self, session: Session) -> bool:
        """Return whether the user may ask what is prepared."""
        del session
        return True

    def is_prepared(self, session: Session, transaction: TransactionId) -> bool:
        """Return whether the server knows the name."""
        return transaction in self.list_prepared(session, transaction.sink_id)

    @abstractmethod
    def find_prepare_time(self, session: Session, transaction: TransactionId) -> datetime | None:
        """Return the time, by the server's clock, when it was prepared; None when it is not."""

    def is_held(self, session: Session, transaction: TransactionId) -> bool:
        """Return whether the session that prepared it is to be waited for before it is ended."""
        del session, transaction
        return False

    @abstractmethod
    def commit(self, session: Session, transaction: TransactionId) -> None:
        """Commit what is prepared.

        Raises:
            NameUnknown: Nothing is prepared under the name, or a session holds it.
        """

    @abstractmethod
    def roll_back(self, session: Session, transaction: TransactionId) -> None:
        """Roll back what is prepared.

        Raises:
            NameUnknown: Nothing is prepared under the name, or a session holds it.
        """

    def commit_is_proof(self, session: Session) -> bool:
        """Return whether the answer to a commit proves it; else the ledger is looked at."""
        del session
        return True

    @abstractmethod
    def end_holding_session(self, session: Session, transaction: TransactionId) -> str:
        """Say who holds the transaction after all; end that session if nobody needs it."""

    @abstractmethod
    def endings(self, transaction: TransactionId) -> str:
        """Return the statements by which an operator ends a prepared transaction."""
