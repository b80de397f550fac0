"""What is checked, created and claimed on the driver before an attempt writes anything."""

from __future__ import annotations

import logging
from functools import partial

import psycopg
import pyarrow as pa
from psycopg import sql

from onceflow.core.errors import ConfigError
from onceflow.core.protocol.ids import TransactionId
from onceflow.core.spi import CommitterContext
from onceflow.sinks.postgres.catalog import (
    SERVER_VERSION_MIN,
    ServerFacts,
    server_facts,
    target_table,
)
from onceflow.sinks.postgres.commit_mode import is_pooled, two_phase_prospects
from onceflow.sinks.postgres.connection import BoundedConnection
from onceflow.sinks.postgres.database import PostgresDatabase
from onceflow.sinks.postgres.ddl import bookkeeping_statements
from onceflow.sinks.postgres.failures import FAILURES, described
from onceflow.sinks.postgres.settings import SinkSettings, attempt_of_writer
from onceflow.sinks.postgres.tables import lock_ddl
from onceflow.sinks.sql import CommitMode, TableName
from onceflow.sinks.sql.bookkeeping import COMMIT_MODE_LENGTH_MAX, SINKS
from onceflow.sinks.sql.commit_mode import chosen_mode
from onceflow.sinks.sql.preflight import claim, required_table

_logger = logging.getLogger("onceflow.sinks.postgres")


class Preflight:
    """One run of the checks, on one connection."""

    def __init__(
        self, settings: SinkSettings, context: CommitterContext, connection: BoundedConnection
    ) -> None:
        self._settings = settings
        self._database = PostgresDatabase(settings)
        self._context = context
        self._connection = connection

    def require_server(self) -> ServerFacts:
        """Return what the server is, when it can be written to.

        Raises:
            ConfigError: It is too old, a standby, or read-only.
        """
        endpoint = self._settings.endpoint
        facts = server_facts(self._connection)
        if facts.version < SERVER_VERSION_MIN:
            raise ConfigError(
                f"{endpoint} runs PostgreSQL {facts.version // 10000}; onceflow needs "
                f"{SERVER_VERSION_MIN // 10000} or newer"
            )
        if facts.standby:
            raise ConfigError(
                f"{endpoint} is a standby, which takes no writes; name the primary in the url, or "
                "all hosts with target_session_attrs=read-write"
            )
        if facts.read_only:
            raise ConfigError(
                f"{endpoint} gives read-only transactions; run: ALTER ROLE {facts.role} SET "
                "default_transaction_read_only = off"
            )
        return facts

    def ensure_bookkeeping(self, facts: ServerFacts) -> None:
        """Return when ledger and fence exist; creates what is missing, whoever else does the same.

        Raises:
            ConfigError: They do not, and the role may not create them.
        """
        ledger = self._settings.ledger
        if all(self._exists(name) for name in (ledger.ledger, ledger.sinks)):
            self._ensure_commit_mode_column()
            return
        schema = sql.Identifier(ledger.schema)
        try:
            with self._connection.transaction():
                lock_ddl(self._connection)
                known = self._connection.execute(
                    "SELECT FROM pg_catalog.pg_namespace WHERE nspname = %s", (ledger.schema,)
                )
                if known.fetchone() is None:
                    self._connection.execute(sql.SQL("CREATE SCHEMA {}").format(schema))
                for statement in bookkeeping_statements(ledger.schema):
                    self._connection.execute(statement.encode())
        except psycopg.errors.InsufficientPrivilege as error:
            raise ConfigError(
                f"role {facts.role} may not create onceflow's tables in {self._settings.endpoint}. "
                f"Run as the owner of the database: CREATE SCHEMA IF NOT EXISTS {ledger.schema}; "
                f"GRANT USAGE, CREATE ON SCHEMA {ledger.schema} TO {facts.role}; or name a schema "
                "where it may: PostgresSink(ledger_schema=…)"
            ) from error

    def _ensure_commit_mode_column(self) -> None:
        """Bring a fence that was created before commit modes up to date."""
        sinks = self._settings.ledger.sinks
        table = target_table(self._connection, TableName(self._settings.ledger.schema, SINKS))
        if table is None or table.column("commit_mode") is not None:
            return
        statement = sql.SQL("ALTER TABLE {} ADD COLUMN IF NOT EXISTS commit_mode varchar({})")
        composed = statement.format(sinks, sql.Literal(COMMIT_MODE_LENGTH_MAX))
        try:
            with self._connection.transaction():
                self._connection.execute("SET LOCAL lock_timeout = '5s'")
                self._connection.execute(composed)
        except (psycopg.errors.InsufficientPrivilege, psycopg.errors.LockNotAvailable) as error:
            raise ConfigError(
                f"{sinks.as_string(self._connection)} in {self._settings.endpoint} is of an older "
                f"onceflow and cannot be altered: {described(error)}. While nothing is prepared "
                f"(see pg_prepared_xacts), run as its owner: {composed.as_string(self._connection)}"
            ) from error

    def claim(self, mode: CommitMode) -> None:
        """Return when this attempt, and no older one, may write under the sink id in `mode`.

        Also ends the sessions of older attempts' writers: what they hold is rolled back, and they
        prepare nothing more.

        Raises:
            ConfigError: Another job owns the sink id.
            Fenced: This attempt or a newer one has claimed it.
        """
        claim(self._database, self._connection, self._context, mode)
        if not is_pooled(self._connection):
            # A pooler's sessions serve whoever comes; in one of them nothing stays open for long.
            self._end_older_writers()

    def require_table(self, schema: pa.Schema) -> None:
        """Return when the target table takes rows of `schema`; made or altered when asked for.

        Raises:
            ConfigError: There is none, or it does not take the rows.
        """
        prepared = partial(self._database.prepared, self._connection, self._context.sink_id)
        required_table(self._database, self._connection, self._context, schema, prepared)

    def _end_older_writers(self) -> None:
        context = self._context
        sessions = self._connection.execute(
            "SELECT pid, application_name FROM pg_catalog.pg_stat_activity "
            "WHERE datname = current_database() AND application_name LIKE 'onceflow %' "
            "AND usename = current_user"
        ).fetchall()
        for pid, name in sessions:
            attempt = attempt_of_writer(str(name), context.sink_id)
            if attempt is not None and attempt < context.attempt:
                _logger.info(
                    "ending the session of %s, attempt %s took over", name, context.attempt
                )
                self._connection.execute("SELECT pg_catalog.pg_terminate_backend(%s)", (pid,))

    def _exists(self, name: sql.Identifier) -> bool:
        row = self._connection.execute(
            "SELECT pg_catalog.to_regclass(%s) IS NOT NULL", (name.as_string(self._connection),)
        ).fetchone()
        return row is not None and bool(row[0])


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
    with settings.endpoint.connect(
        f"onceflow {context.sink_id}/{context.attempt} check"
    ) as connection:
        preflight = Preflight(settings, context, connection)
        try:
            facts = preflight.require_server()
            if exactly_once:
                look = partial(two_phase_prospects, connection, facts)
                mode = chosen_mode(settings, context, look, _logger)
                preflight.ensure_bookkeeping(facts)
                preflight.claim(mode)
            preflight.require_table(schema)
        except psycopg.errors.InsufficientPrivilege as error:
            raise ConfigError(
                f"sink {context.sink_id}: {settings.endpoint}: not permitted: {described(error)}"
            ) from error
        except psycopg.Error as error:
            text = f"sink {context.sink_id}: {settings.endpoint}"
            raise FAILURES.refusal(error, text) from error
