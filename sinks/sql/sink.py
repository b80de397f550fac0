"""The part of a SQL sink's configuration that all dialects have in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from typing import ClassVar, Literal

import pyarrow as pa
from typing_extensions import override

from onceflow.clients.sql.session import (
    DatabaseAccess,
    SqlEndpoint,
    SqlError,
    refusal,
    session_name,
)
from onceflow.clients.sql.tables import TableName
from onceflow.core.errors import ConfigError
from onceflow.core.protocol.log.target_records import TargetRecord
from onceflow.core.setting_values import choice_of
from onceflow.core.settings.pipeline_settings import Delivery
from onceflow.core.spi import Committer, CommitterContext, Sink, SinkWriter, WriterContext
from onceflow.core.spi.options import BOOLEAN, COUNT, DURATION, NAMES, choice, option
from onceflow.sinks.sql.committer import SqlCommitter
from onceflow.sinks.sql.dialect import Dialect
from onceflow.sinks.sql.preflight import read_record, run_preflight, validate_rows
from onceflow.sinks.sql.settings import CommitMode, SqlSettings, mode_of_writer
from onceflow.sinks.sql.transactions import PlainTransactions
from onceflow.sinks.sql.write_mode import ChangeRules, WriteMode
from onceflow.sinks.sql.writer import AtLeastOnceWriter, SqlStagedWriter, TwoPhaseWriter

_BLOCKERS_MAX = 4
"""The largest number of blockers that an error message names, so that it stays readable."""


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
    unchanged_column: str | None = field(
        default=None,
        metadata=option(
            "Column of lists of texts with the names of the columns that a change left as they were"
            " and did not send. With `upsert` and `update` the row of the key keeps their values."
            " With `upsert`, a change of a missing row is a bad row in two-phase commits; in ledger"
            " mode the commit is repeated until the table has the row. The column is not written",
            spark="unchangedColumn",
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
        # Resolve the settings once now, so that a wrong setting raises where the user wrote it.
        _ = self.settings

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.endpoint}, table={self.table!r}, "
            f"delivery={self.delivery!r}, commit_mode={self.commit_mode!r}, "
            f"write_mode={self.write_mode!r})"
        )

    @override
    def routing_key(self) -> tuple[str, ...]:
        """Return the primary key if rows are changed by key, so that each key has one writer."""
        return self.primary_key if self.settings.rules.uses_key else ()

    @override
    def validate(self, context: CommitterContext, schema: pa.Schema) -> None:
        """Check that the server and an existing table accept rows of `schema`. Changes nothing.

        Raises:
            ConfigError: The settings, server, table, columns or types do not accept the rows.
            SinkError: The server cannot be reached now.
        """
        validate_rows(self.settings, context, schema)

    @override
    def open(self, context: CommitterContext, schema: pa.Schema) -> None:
        """Prepare the target for rows of `schema`: create what is missing, fence the sink id.

        A second call in the same attempt is refused, as the SPI requires. A crash in this call
        leaves at most the created tables and the claimed sink id, which the next attempt claims in
        turn.

        Raises:
            ConfigError: The settings, server, privileges, table, columns or types do not accept the
                rows.
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
        """Return the ledger's record of this sink id, or None if `delivery` is at_least_once.

        At-least-once delivery writes no ledger rows.
        """
        if self._delivery() is Delivery.AT_LEAST_ONCE:
            return None
        return read_record(self.settings, context)

    def resolve_table(self) -> TableName:
        """Return the canonical name of the sink's table, the same for all spellings.

        Runs on the driver.

        If the table is missing, return the name under which it would be created. Changes nothing.

        Raises:
            ConfigError: The table name is not valid, or the server refuses the connection for good.
            SinkError: The server cannot be asked now.
        """
        settings = self.settings
        try:
            return settings.dialect.resolve_table(settings.endpoint, settings.table)
        except SqlError as error:
            raise refusal(error, f"table {settings.table} cannot be looked for") from error

    def has_table(self) -> bool:
        """Return True if the table exists and the user may see it. Changes nothing.

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
        """Describe the sessions that block this attempt's sessions, if the user may see them.

        Raises:
            SinkError: The server cannot be asked now.
        """
        settings = self.settings
        name = session_name(context.sink_id, context.attempt, "looks for locks")
        try:
            with settings.endpoint.connect(name) as session:
                # This query runs while the job runs, so it must be answered soon or fail.
                session.hasten()
                return settings.dialect.list_blockers(
                    session, settings.ledger_schema, context, _BLOCKERS_MAX
                )
        except SqlError as error:
            raise refusal(error, f"sink {context.sink_id}: locks cannot be listed") from error

    @override
    def to_staging(self) -> Sink | None:
        """Return this sink in ledger mode.

        Prepared transactions would keep the locks of their rows.
        """
        return replace(self, commit_mode=CommitMode.LEDGER.value)

    @override
    def writer(self, context: WriterContext) -> SinkWriter:
        """Return a connected writer.

        Raises:
            ConfigError: The table does not accept the rows, or the server does not allow enough
                prepared transactions.
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

        With at-least-once delivery it has nothing to commit. It still finds transactions in doubt
        that the job left when it ran with exactly-once delivery.
        """
        return SqlCommitter(self.settings, context)

    @property
    def settings(self) -> SqlSettings:
        """The resolved settings; they contain the password, and their repr does not show it."""
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
                unchanged_column=self.unchanged_column,
            ),
            create=self.create,
            evolve=self.evolve,
            null_overflow=choice_of(_Overflow, self.overflow, setting="overflow") is _Overflow.NULL,
            commit_mode=mode,
        )

    @property
    @abstractmethod
    def endpoint(self) -> SqlEndpoint:
        """Return the endpoint that the url describes; `user` and `password` override the url's.

        Raises:
            ConfigError: The url is not valid. The error text does not repeat it, because it may
                contain a password.
        """

    def _ledger_schema(self) -> str:
        """Return the schema of onceflow's own tables; empty for the server's default schema."""
        return self.ledger_schema or ""

    def _delivery(self) -> Delivery:
        return choice_of(Delivery, self.delivery, setting="delivery")
