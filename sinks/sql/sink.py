"""What a user writes to have rows in a SQL database, as far as every dialect has it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from typing import ClassVar, Literal

import pyarrow as pa
from typing_extensions import override

from onceflow.core.errors import ConfigError
from onceflow.core.protocol.log.target_records import TargetRecord
from onceflow.core.setting_values import choice_of
from onceflow.core.settings.pipeline_settings import Delivery
from onceflow.core.spi import Committer, CommitterContext, Sink, SinkWriter, WriterContext
from onceflow.core.spi.options import BOOLEAN, COUNT, DURATION, NAMES, choice, option
from onceflow.sinks.sql.access import DatabaseAccess
from onceflow.sinks.sql.committer import SqlCommitter
from onceflow.sinks.sql.dialect import Dialect
from onceflow.sinks.sql.preflight import read_record, run_preflight, validate_rows
from onceflow.sinks.sql.session import SqlEndpoint, SqlError, refusal, session_name
from onceflow.sinks.sql.settings import CommitMode, SqlSettings, mode_of_writer
from onceflow.sinks.sql.tables import TableName
from onceflow.sinks.sql.transactions import PlainTransactions
from onceflow.sinks.sql.write_mode import ChangeRules, WriteMode
from onceflow.sinks.sql.writer import AtLeastOnceWriter, SqlStagedWriter, TwoPhaseWriter

_BLOCKERS_MAX = 4
"""The number of blockers that an error can name and still be read."""


class _Overflow(Enum):
    ERROR = "error"
    NULL = "null"


@dataclass(frozen=True, kw_only=True, repr=False)
class SqlSink(DatabaseAccess, Sink):
    """Writes every row to its table; each takes effect exactly once, through any crash.

    Columns go by name; further columns of the table get their defaults. In `ledger_schema` onceflow
    keeps two small tables, onceflow_ledger and onceflow_sinks.

    Pickles with its password, prints without it.

    Raises:
        ConfigError: A setting is wrong by itself; what needs the server is found by `open`.
    """

    dialect: ClassVar[Dialect]

    table: str = field(
        metadata=option(
            "The table, `schema.table` or `table`, with upper and lower case exactly as in the"
            " database",
            spark="dbtable",
            aliases=("table",),
        )
    )
    write_mode: Literal["insert", "upsert", "ignore", "update"] = field(
        default="insert",
        metadata=option(
            "`insert` adds rows. `upsert` inserts a row, or updates the row with the same key."
            " `ignore` inserts a row unless its key exists. `update` updates existing rows and"
            " never inserts. All but `insert` need primary_key, send the rows of a key to one"
            " subtask, and apply the changes of a checkpoint at its end",
            choice(WriteMode),
            spark="writeMode",
        ),
    )
    primary_key: tuple[str, ...] = field(
        default=(),
        metadata=option(
            "Columns that identify a row. A unique index over exactly these columns must exist."
            " They become the primary key of a table that is created",
            NAMES,
            spark="primaryKey",
        ),
    )
    create: bool = field(
        default=False,
        metadata=option(
            "Whether to create the table from the rows' columns if it is missing",
            BOOLEAN,
            spark="createTable",
        ),
    )
    evolve: bool = field(
        default=False,
        metadata=option(
            "Whether to add columns that the rows have and the table lacks. They are nullable",
            BOOLEAN,
            spark="evolveTable",
        ),
    )
    tombstones: bool = field(
        default=False,
        metadata=option(
            "Whether a row that is null in all columns outside the key deletes the row of its key",
            BOOLEAN,
            spark="tombstones",
        ),
    )
    operation_column: str | None = field(
        default=None,
        metadata=option(
            "Text column with the operation of each row. `insert`, `create`, `c`, `r`, `i`,"
            " `upsert`, `update`, `u`: write it as the write mode says. `delete`, `d`: delete the"
            " row of its key. The column is not written",
            spark="operationColumn",
        ),
    )
    table_column: str | None = field(
        default=None,
        metadata=option(
            "Text column with the table of each row. Null: the table of the sink. All tables are"
            " written in one transaction. The column is not written",
            spark="tableColumn",
        ),
    )
    overflow: Literal["error", "null"] = field(
        default="error",
        metadata=option(
            "What happens to a value that does not fit its column. `error`: the row is a bad row."
            " `null`: null is written",
            choice(_Overflow),
            spark="overflow",
        ),
    )
    delivery: Literal["exactly_once", "at_least_once"] = field(
        default="exactly_once",
        metadata=option(
            "`at_least_once` commits rows at once, before their checkpoint; after a failure, rows"
            " may be written twice",
            choice(Delivery),
        ),
    )
    commit_mode: Literal["auto", "two_phase", "ledger"] = field(
        default="auto",
        metadata=option(
            "How rows wait for the decision. `two_phase`: in prepared transactions of the server."
            " `ledger`: staged in checkpoint storage and written after the decision, for servers,"
            " users and poolers that cannot prepare. `auto` takes two_phase if it is possible, and"
            " logs its choice and the reason. Each mode writes every row exactly once; they differ"
            " in what a reader sees while a commit is under way",
            choice("auto", CommitMode),
            spark="commitMode",
        ),
    )
    ledger_schema: str | None = field(
        default=None,
        metadata=option(
            "Schema of onceflow's own tables, created if it is missing", spark="ledgerSchema"
        ),
    )
    lock_timeout_s: float = field(
        default=60.0,
        metadata=option(
            "How long to wait for the locks of other transactions", DURATION, spark="lockTimeout"
        ),
    )
    flush_rows: int = field(
        default=50_000,
        metadata=option(
            "Only with `at_least_once`: number of rows of a commit; it may be larger by one batch",
            COUNT,
        ),
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "primary_key", tuple(self.primary_key))
        for name in ("connect_timeout_s", "statement_timeout_s", "lock_timeout_s", "flush_rows"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}={getattr(self, name)} must be over 0")
        if self.ledger_schema == "":
            raise ConfigError("ledger_schema is empty; name a schema, or leave it out")
        self._delivery()
        # Resolved once now, for its errors: what is wrong by itself is refused where it is written.
        _ = self.settings

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.endpoint}, table={self.table!r}, "
            f"delivery={self.delivery!r}, commit_mode={self.commit_mode!r}, "
            f"write_mode={self.write_mode!r})"
        )

    @override
    def routing_key(self) -> tuple[str, ...]:
        """Return the primary key where rows are found by it: one key, one writer."""
        return self.primary_key if self.settings.rules.uses_key else ()

    @override
    def validate(self, context: CommitterContext, schema: pa.Schema) -> None:
        """Check that server and table, where it is there, take such rows; change nothing.

        Raises:
            ConfigError: They do not: settings, server, table, columns or types.
            SinkError: The server cannot be reached now.
        """
        validate_rows(self.settings, context, schema)

    @override
    def open(self, context: CommitterContext, schema: pa.Schema) -> None:
        """Prepare the target for rows of `schema`: create what is missing, fence the sink id.

        Repeated in the same attempt it is refused, as the SPI says. A crash in it leaves at most
        the tables created and the sink id claimed, which the next attempt claims in turn.

        Raises:
            ConfigError: They cannot: settings, server, privileges, table, columns or types.
            Fenced: This attempt or a newer one has claimed the sink id.
            SinkError: The server cannot be reached now.
        """
        exactly_once = self._delivery() is Delivery.EXACTLY_ONCE
        run_preflight(self.settings, context, schema, exactly_once=exactly_once)

    @override
    def describe_target(self) -> str:
        """Return the database and its server."""
        return str(self.settings.endpoint)

    @override
    def target_record(self, context: CommitterContext) -> TargetRecord | None:
        """Return what the ledger says; None at least once, which leaves no proofs."""
        if self._delivery() is Delivery.AT_LEAST_ONCE:
            return None
        return read_record(self.settings, context)

    def resolve_table(self) -> TableName:
        """Return the name of the table that all its spellings share; runs on the driver.

        A table that is missing has the name under which it would be created. Changes nothing.

        Raises:
            ConfigError: The table's name is none, or the server refuses the connection for good.
            SinkError: The server cannot be asked now.
        """
        settings = self.settings
        try:
            return settings.dialect.resolve_table(settings.endpoint, settings.table)
        except SqlError as error:
            raise refusal(error, f"table {settings.table} cannot be looked for") from error

    def has_table(self) -> bool:
        """Return whether the table is there, as far as the user may see it. Changes nothing.

        Raises:
            ConfigError: The server refuses the connection for good.
            SinkError: The server cannot be asked now.
        """
        settings = self.settings
        try:
            with settings.endpoint.connect("onceflow looks for a table") as session:
                return settings.dialect.find_table(session, settings.table) is not None
        except SqlError as error:
            raise refusal(error, f"table {settings.table} cannot be looked for") from error

    @override
    def list_blockers(self, context: CommitterContext) -> Sequence[str]:
        """Describe whom the attempt's sessions wait for, as far as the user may see it.

        Raises:
            SinkError: The server cannot be asked now.
        """
        settings = self.settings
        name = session_name(context.sink_id, context.attempt, "looks for locks")
        try:
            with settings.endpoint.connect(name) as session:
                # Asked beside a running job: the answer must come soon, or not at all.
                session.hasten()
                return settings.dialect.list_blockers(
                    session, settings.ledger_schema, context, _BLOCKERS_MAX
                )
        except SqlError as error:
            raise refusal(error, f"sink {context.sink_id}: locks cannot be listed") from error

    @override
    def to_staging(self) -> Sink | None:
        """Return the sink in ledger mode: what is prepared holds its rows' locks."""
        return replace(self, commit_mode=CommitMode.LEDGER.value)

    @override
    def writer(self, context: WriterContext) -> SinkWriter:
        """Return a connected writer.

        Raises:
            ConfigError: The table does not take the rows, or the server too few prepared ones.
            SinkError: The server cannot be reached now.
        """
        settings = self.settings
        if self._delivery() is Delivery.AT_LEAST_ONCE:
            name = self.dialect.writer_name(context)
            transactions = PlainTransactions(partial(settings.endpoint.connect, name))
            return AtLeastOnceWriter(settings, context, transactions)
        two_phase = settings.two_phase
        if two_phase is None or mode_of_writer(settings, context) is CommitMode.LEDGER:
            return SqlStagedWriter(settings, context)
        prepared = two_phase.transactions(settings.endpoint, context)
        return TwoPhaseWriter(settings, context, prepared)

    @override
    def committer(self, context: CommitterContext) -> Committer:
        """Return a committer, which connects when it is first asked.

        At least once it has nothing to commit, but finds what the job left in doubt when it was
        still exactly once.
        """
        return SqlCommitter(self.settings, context)

    @property
    def settings(self) -> SqlSettings:
        """What the arguments say, resolved; holds the password, and prints without it."""
        try:
            table = TableName.parse(self.table)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        mode = None
        if self.commit_mode != "auto":
            mode = choice_of(CommitMode, self.commit_mode, setting="commit_mode", besides=("auto",))
        return SqlSettings(
            dialect=self.dialect,
            endpoint=self.endpoint,
            table=table,
            ledger_schema=self._ledger_schema(),
            lock_timeout_s=self.lock_timeout_s,
            flush_rows=self.flush_rows,
            rules=ChangeRules(
                mode=choice_of(WriteMode, self.write_mode, setting="write_mode"),
                primary_key=self.primary_key,
                tombstones=self.tombstones,
                operation_column=self.operation_column,
                table_column=self.table_column,
            ),
            create=self.create,
            evolve=self.evolve,
            null_overflow=choice_of(_Overflow, self.overflow, setting="overflow") is _Overflow.NULL,
            commit_mode=mode,
        )

    @property
    @abstractmethod
    def endpoint(self) -> SqlEndpoint:
        """Return what the url says, with user and password over it.

        Raises:
            ConfigError: It cannot be read. The text never repeats it: it may hold a password.
        """

    def _ledger_schema(self) -> str:
        """Return where onceflow's own tables are; empty for the schema that the server takes."""
        return self.ledger_schema or ""

    def _delivery(self) -> Delivery:
        return choice_of(Delivery, self.delivery, setting="delivery")
