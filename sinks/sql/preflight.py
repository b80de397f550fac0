"""The checks, creations and the claim that the driver makes before an attempt writes anything."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from functools import partial

import pyarrow as pa

from onceflow.clients.sql.session import (
    AccessDenied,
    BinaryLogRefuses,
    NameTaken,
    Session,
    SqlError,
    refusal,
    session_name,
)
from onceflow.clients.sql.tables import Table, TableName
from onceflow.core.errors import ConfigError, SettingsRefused
from onceflow.core.protocol.ids import TransactionId
from onceflow.core.protocol.log.target_records import TargetRecord
from onceflow.core.spi import CommitterContext
from onceflow.core.spi.connector import require
from onceflow.sinks.base.checks import (
    FenceOwner,
    check_fence,
    check_owner,
    check_sink_id,
    require_any_column,
)
from onceflow.sinks.sql import table_resolver
from onceflow.sinks.sql.dialect import DATABASE, ServerDiagnosis, TwoPhaseSupport
from onceflow.sinks.sql.ledger import LEDGER, SINKS
from onceflow.sinks.sql.settings import CommitMode, SqlSettings, choose_mode
from onceflow.sinks.sql.write_mode import ChangeRules

_NO_TWO_PHASE = TwoPhaseSupport(
    "",
    obstacles=(
        DATABASE.problem("it has no prepared transactions that another session can commit", "", ""),
    ),
)


def run_preflight(
    settings: SqlSettings, context: CommitterContext, schema: pa.Schema, *, exactly_once: bool
) -> None:
    """Prepare the target for rows of `schema`: create what is missing and claim the sink id.

    Raises:
        ConfigError: The rows cannot be written; the text says what to do.
        Fenced: This attempt or a newer one owns the sink id.
        SinkError: The server cannot be reached or asked now.
    """
    with _preflight(settings, context) as preflight:
        preflight.run(schema, exactly_once=exactly_once)


def validate_rows(settings: SqlSettings, context: CommitterContext, schema: pa.Schema) -> None:
    """Check that the server, and the table if it exists, accept rows of `schema`; change nothing.

    Raises:
        ConfigError: They do not accept the rows; the text says what to do.
        SinkError: The server cannot be reached or asked now.
    """
    with _preflight(settings, context) as preflight:
        preflight.validate(schema)


def read_record(settings: SqlSettings, context: CommitterContext) -> TargetRecord | None:
    """Return the database's record of the sink id, or None if the user may not read it.

    Raises:
        ConfigError: Another job owns the sink id.
        SinkError: The server cannot be reached or asked now.
    """
    with _preflight(settings, context) as preflight:
        return preflight.read_record()


@contextmanager
def _preflight(settings: SqlSettings, context: CommitterContext) -> Generator[_Preflight]:
    check_sink_id(context.sink_id)
    text = f"sink {context.sink_id}: {settings.endpoint}"
    name = session_name(context.sink_id, context.attempt, "check")
    with settings.endpoint.connect(name) as session:
        try:
            yield _Preflight(settings, context, session)
        except AccessDenied as error:
            raise SettingsRefused(f"{text}: not permitted: {error}") from error
        except BinaryLogRefuses as error:
            raise SettingsRefused(f"{text}: {error}") from error
        except SqlError as error:
            raise refusal(error, text) from error


class _Preflight:
    """A run of the checks, on one session."""

    def __init__(self, settings: SqlSettings, context: CommitterContext, session: Session) -> None:
        self._settings = settings
        self._dialect = settings.dialect
        self._context = context
        self._session = session

    def run(self, schema: pa.Schema, *, exactly_once: bool) -> None:
        settings, context = self._settings, self._context
        server = self._fit_server()
        if exactly_once:
            look = partial(self._support, server)
            # Choose the mode before anything is created, so that an impossible mode leaves no
            # tables behind.
            mode = choose_mode(settings, context, look, self._dialect.log)
            self._ensure_bookkeeping(server)
            self._claim(mode)
            # End older writers after the claim, so that none can begin again under its old attempt.
            self._dialect.end_older_writers(self._session, settings.ledger_schema, context)
        self._ensure_table(schema)

    def validate(self, schema: pa.Schema) -> None:
        settings, session = self._settings, self._session
        require_any_column(settings.rules.select_table_columns(schema))
        self._fit_server()
        table = self._dialect.find_table(session, settings.table)
        if table is None:
            if not settings.create:
                raise table_resolver.missing(settings, session, settings.table, schema)
            return
        self._check_known_columns(table, schema)

    def _check_known_columns(self, table: Table, schema: pa.Schema) -> None:
        """Raise ConfigError unless `table` accepts the rows' columns that it has already."""
        settings = self._settings
        table_resolver.require_writable(table)
        if settings.evolve:
            table_resolver.check_additions(settings.dialect, table, schema, settings.rules)
            schema = _select_known_columns(table, schema, settings.rules)
        table_resolver.match_columns(self._dialect, table, schema, settings.rules)
        if settings.rules.tombstones or settings.rules.operation_column:
            self._dialect.require_delete(self._session, table)

    def read_record(self) -> TargetRecord | None:
        ledger, session, context = self._settings.ledger, self._session, self._context
        try:
            for name in (LEDGER, SINKS):
                if self._dialect.find_table(session, TableName(ledger.schema, name)) is None:
                    return TargetRecord(context.sink_id)
            # Read the claim first. A process that claims and commits between the two reads has a
            # higher attempt.
            owner = ledger.owner(session, context.sink_id)
            attempt = owner.attempt if owner else 0
            record = ledger.read_record(session, context.sink_id, attempt)
        except AccessDenied:
            return None
        check_owner(
            context.sink_id,
            owner,
            FenceOwner(context.log_id, context.attempt, context.job),
            take_over=ledger.take_over(context.sink_id),
        )
        return record

    def _fit_server(self) -> ServerDiagnosis:
        """Return the server after checking that it accepts writes, and keeps commits if killed."""
        where, server = self._settings.endpoint, self._dialect.look_at_server(self._session)
        about = f"sink {self._context.sink_id}: {where}"
        require(server.fitness(where), about, self._dialect.log)
        return server

    def _support(self, server: ServerDiagnosis) -> TwoPhaseSupport:
        if self._settings.two_phase is None:
            return _NO_TWO_PHASE
        return server.two_phase_support(self._session, parallelism=1)

    def _ensure_bookkeeping(self, server: ServerDiagnosis) -> None:
        """Create the ledger and the fence if they are missing, even if other processes do the same.

        Raises:
            ConfigError: They are missing, and the user may not create them.
        """
        ledger, session = self._settings.ledger, self._session
        tables = [
            self._dialect.find_table(session, TableName(ledger.schema, name))
            for name in (LEDGER, SINKS)
        ]
        # The usual start: it needs no further privileges.
        if all(table is not None and table.unique_keys for table in tables):
            return
        try:
            with self._dialect.one_at_a_time(session):
                if not self._dialect.has_schema(session, ledger.schema):
                    session.execute(f"CREATE SCHEMA {self._dialect.quote(ledger.schema)}")
                from onceflow.sinks.sql.ddl import ledger_creation

                for statement in ledger_creation(self._dialect, ledger.schema):
                    self._create(statement)
        except AccessDenied as error:
            remedy = server.bookkeeping(session, ledger.schema, (LEDGER, SINKS)).remedy
            raise ConfigError(
                f"{self._dialect.user} {server.user} may not create onceflow's tables in "
                f"{self._settings.endpoint}: {error}. Run as the owner of the database: "
                f"{remedy}; or name a place where it "
                "may: ledger_schema=…"
            ) from error

    def _create(self, statement: str) -> None:
        try:
            self._session.execute(statement)
        except NameTaken:
            # The name of an index, on a server without IF NOT EXISTS for indexes. An earlier start
            # may have crashed after creating it.
            if self._dialect.creates_index_if_missing:
                raise

    def _claim(self, mode: CommitMode) -> None:
        """Claim the sink id for this attempt in `mode`. From then on no older attempt may write.

        Raises:
            ConfigError: Another job owns the sink id.
            Fenced: This attempt or a newer one has claimed it.
        """
        context, ledger, session = self._context, self._settings.ledger, self._session
        claimant = FenceOwner(context.log_id, context.attempt, context.job)
        while not ledger.claim(session, context.sink_id, context.job, claimant, mode.value):
            # Continue only if the row that prevented the claim is gone by now, or older.
            check_fence(
                context.sink_id,
                ledger.owner(session, context.sink_id),
                claimant,
                take_over=ledger.take_over(context.sink_id),
            )

    def _ensure_table(self, schema: pa.Schema) -> None:
        """Ensure that the target table accepts rows of `schema`; create or alter it if configured.

        Every check comes before the first change. The table changes only while no transaction is
        prepared: otherwise the writers add the columns, after recovery.

        Raises:
            ConfigError: There is no table, or it does not accept the rows.
        """
        settings, session = self._settings, self._session
        require_any_column(settings.rules.select_table_columns(schema))
        table = self._dialect.find_table(session, settings.table)
        if table is None:
            if not settings.create:
                raise table_resolver.missing(settings, session, settings.table, schema)
            self._require_nothing_prepared()
            table = table_resolver.create_table(
                settings, session, settings.table, schema, settings.rules
            )
        self._check_known_columns(table, schema)
        if not settings.evolve:
            return
        if waiting := self._list_prepared():
            self._dialect.log.info(
                "sink %s: columns are added after recovery: %s transactions are prepared",
                self._context.sink_id,
                len(waiting),
            )
            return
        table = table_resolver.add_columns(settings, session, table, schema, settings.rules)
        table_resolver.match_columns(self._dialect, table, schema, settings.rules)

    def _require_nothing_prepared(self) -> None:
        two_phase, prepared = self._settings.two_phase, self._list_prepared()
        if two_phase is not None and prepared:
            raise ConfigError(
                f"table {self._settings.table} is to be created, and {len(prepared)} transactions "
                f"of sink {self._context.sink_id} are in doubt, the first {prepared[0]}: tables "
                "are created only while nothing is prepared. Start the job once with the table it "
                f"had before, or finish them by {two_phase.endings(prepared[0])}"
            )

    def _list_prepared(self) -> Sequence[TransactionId]:
        """Return the prepared transactions of the sink id; none if the user may not list them."""
        two_phase = self._settings.two_phase
        if two_phase is None or not two_phase.may_list(self._session):
            return ()
        return two_phase.list_prepared(self._session, self._context.sink_id)


def _select_known_columns(table: Table, schema: pa.Schema, rules: ChangeRules) -> pa.Schema:
    control = rules.control_columns
    return pa.schema(
        [field for field in schema if field.name in control or table.column(field.name) is not None]
    )
