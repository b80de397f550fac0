"""What is checked, created and claimed on the driver before an attempt writes anything."""

from __future__ import annotations

import logging
from functools import partial

import pyarrow as pa
from pymysql.err import MySQLError

from onceflow.core.errors import ConfigError
from onceflow.core.protocol.ids import TransactionId
from onceflow.core.spi import CommitterContext
from onceflow.sinks.mysql.catalog import (
    ServerFacts,
    TargetTable,
    may_recover,
    server_facts,
    target_table,
)
from onceflow.sinks.mysql.commit_mode import two_phase_prospects
from onceflow.sinks.mysql.connection import Session
from onceflow.sinks.mysql.database import MySQLDatabase
from onceflow.sinks.mysql.ddl import bookkeeping_statements, create_database
from onceflow.sinks.mysql.durability import Crash, weaknesses
from onceflow.sinks.mysql.failures import DENIED, NO_SUCH_SESSION, code, described
from onceflow.sinks.mysql.names import identifier, literal, quoted
from onceflow.sinks.mysql.refusals import FAILURES
from onceflow.sinks.mysql.settings import SinkSettings
from onceflow.sinks.mysql.tables import ddl_lock
from onceflow.sinks.sql import CommitMode, TableName, session_name
from onceflow.sinks.sql.bookkeeping import LEDGER, SINKS
from onceflow.sinks.sql.commit_mode import chosen_mode
from onceflow.sinks.sql.preflight import claim, required_table

_logger = logging.getLogger("onceflow.sinks.mysql")
# Rows of values in MySQL; XA that outlives its session in MariaDB.
_MYSQL_VERSION_MIN, _MARIADB_VERSION_MIN = (8, 0, 20), (10, 6, 0)
_DUPLICATE_INDEX = 1061
# Of every subtask that a job may have on one server, which has fewer connections.
_HELD_LOCKS = """
    SELECT IS_USED_LOCK(CONCAT({prefix}, subtask)) AS session FROM (
        SELECT a.n + 10 * b.n + 100 * c.n + 1000 * d.n AS subtask
        FROM {ten} AS a, {ten} AS b, {ten} AS c, {ten} AS d
    ) AS every_subtask HAVING session IS NOT NULL
"""
_TEN = "(SELECT 0 AS n" + "".join(f" UNION ALL SELECT {n}" for n in range(1, 10)) + ")"


class Preflight:
    """One run of the checks, on one session."""

    def __init__(self, settings: SinkSettings, context: CommitterContext, session: Session) -> None:
        self._settings = settings
        self._database = MySQLDatabase(settings)
        self._context = context
        self._session = session

    def require_server(self) -> ServerFacts:
        """Return what the server is, when it can be written to.

        Raises:
            ConfigError: It is too old, read-only, or forgets what it committed when it is killed.
        """
        endpoint = self._settings.endpoint
        facts = server_facts(self._session)
        minimum = _MARIADB_VERSION_MIN if facts.mariadb else _MYSQL_VERSION_MIN
        if facts.version < minimum:
            raise ConfigError(
                f"{endpoint} runs {facts.shown}; onceflow needs "
                f"{'.'.join(map(str, minimum))} or newer"
            )
        if facts.read_only:
            raise ConfigError(
                f"{endpoint} is read-only, as replicas are; name the primary in the url, or run: "
                "SET GLOBAL read_only = OFF"
            )
        for weakness in weaknesses(facts):
            if weakness.forgets_when is Crash.PROCESS:
                raise ConfigError(
                    f"sink {self._context.sink_id}: {endpoint} has {weakness}. Run:"
                    f" {weakness.remedy} (on a managed server it is set in the provider's parameter"
                    " group; a server on which it cannot be changed cannot be written to exactly"
                    " once)"
                )
            _logger.warning(
                "sink %s: %s has %s. Run: %s",
                self._context.sink_id,
                endpoint,
                weakness,
                weakness.remedy,
            )
        if not facts.local_infile:
            _logger.info(
                "sink %s: %s has local_infile = OFF, so rows go by INSERT, which takes about twice "
                "as long as LOAD DATA. To allow it, run: SET GLOBAL local_infile = ON",
                self._context.sink_id,
                endpoint,
            )
        return facts

    def ensure_bookkeeping(self, facts: ServerFacts) -> None:
        """Return when ledger and fence exist; creates what is missing, whoever else does the same.

        Raises:
            ConfigError: They do not, and the user may not create them.
        """
        database = self._settings.ledger.database
        names = [TableName(database, name) for name in (LEDGER, SINKS)]
        session = self._session
        if all(_is_whole(target_table(session, name)) for name in names):
            return
        statements = bookkeeping_statements(database)
        try:
            with ddl_lock(session):
                if database != self._settings.endpoint.database:
                    session.execute(create_database(database))
                for statement in statements:
                    self._create(statement)
        except MySQLError as error:
            if code(error) not in DENIED:
                raise
            raise ConfigError(
                f"{facts.user} may not create onceflow's tables in {self._settings.endpoint}: "
                f"{described(error)}. Run as its owner: {create_database(database)}; GRANT CREATE, "
                f"INDEX, SELECT, INSERT, UPDATE, DELETE ON {quoted(database)}.* TO {facts.user}; "
                "or name a database where it may: MySQLSink(ledger_schema=…)"
            ) from error

    def claim(self, mode: CommitMode) -> None:
        """Return when this attempt, and no older one, may write under the sink id in `mode`.

        Also ends the sessions of older attempts' writers: what they hold is rolled back, and they
        prepare nothing more.

        Raises:
            ConfigError: Another job owns the sink id.
            Fenced: This attempt or a newer one has claimed it.
        """
        claim(self._database, self._session, self._context, mode)
        self._end_older_writers()

    def require_table(self, schema: pa.Schema) -> None:
        """Return when the target table takes rows of `schema`; made or altered when asked for.

        Raises:
            ConfigError: There is none, or it does not take the rows.
        """
        settings = self._settings
        table = required_table(self._database, self._session, self._context, schema, self._prepared)
        if settings.rules.tombstones or settings.rules.operation_column:
            self._require_delete(table)

    def _create(self, statement: str) -> None:
        try:
            self._session.execute(statement)
        except MySQLError as error:
            # There is no CREATE INDEX IF NOT EXISTS, and a crash may have come before it.
            if code(error) != _DUPLICATE_INDEX:
                raise

    def _require_delete(self, table: TargetTable) -> None:
        try:
            self._session.query(f"EXPLAIN DELETE FROM {identifier(table.name)} WHERE FALSE")
        except MySQLError as error:
            if code(error) not in DENIED:
                raise
            raise ConfigError(
                f"rows cannot be deleted from table {table.name}: {described(error)}. Run: GRANT "
                f"DELETE ON {identifier(table.name)} TO {table.grantee}"
            ) from error

    def _prepared(self) -> tuple[TransactionId, ...]:
        """Return what is prepared under the sink id; nothing where the user may not ask."""
        if not may_recover(self._session):
            return ()
        return self._database.prepared(self._session, self._context.sink_id)

    def _end_older_writers(self) -> None:
        prefix = literal(self._settings.names.writers_lock(self._context.sink_id))
        for (holder,) in self._session.query(_HELD_LOCKS.format(prefix=prefix, ten=_TEN)):
            _logger.info(
                "sink %s: ending the session %s of an older attempt's writer, attempt %s took over",
                self._context.sink_id,
                holder,
                self._context.attempt,
            )
            try:
                self._session.execute(f"KILL {int(holder)}")
            except MySQLError as error:
                if code(error) != NO_SUCH_SESSION:
                    raise


def run_preflight(
    settings: SinkSettings, context: CommitterContext, schema: pa.Schema, *, exactly_once: bool
) -> None:
    """Return when rows of `schema` can be written, with everything created and claimed.

    Raises:
        ConfigError: They cannot; the text has what mends it.
        Fenced: A newer attempt owns the sink id.
        SinkError: The server cannot be reached or asked now.
    """
    try:
        TransactionId(context.sink_id, context.attempt, checkpoint=0, subtask=0)
    except ValueError as error:
        raise ConfigError(f"sink id {context.sink_id!r}: {error}") from None
    name = session_name(context.sink_id, context.attempt, "check")
    with settings.endpoint.connect(name) as session:
        preflight = Preflight(settings, context, session)
        try:
            facts = preflight.require_server()
            if exactly_once:
                look = partial(two_phase_prospects, session, facts)
                mode = chosen_mode(settings, context, look, _logger)
                preflight.ensure_bookkeeping(facts)
                preflight.claim(mode)
            preflight.require_table(schema)
        except MySQLError as error:
            text = f"sink {context.sink_id}: {settings.endpoint}"
            if code(error) in DENIED:
                raise ConfigError(f"{text}: {described(error)}") from error
            raise FAILURES.refusal(error, text) from error


def _is_whole(table: TargetTable | None) -> bool:
    return table is not None and bool(table.unique_keys)
