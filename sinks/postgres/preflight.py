"""What is checked, created and claimed on the driver before an attempt writes anything."""

from __future__ import annotations

import logging
from collections.abc import Callable

import psycopg
import pyarrow as pa
from psycopg import sql

from onceflow.core.errors import ConfigError
from onceflow.core.protocol.ids import TransactionId
from onceflow.core.spi import CommitterContext
from onceflow.sinks.postgres.catalog import (
    SERVER_VERSION_MIN,
    ServerFacts,
    TableName,
    TargetTable,
    prepared_transactions,
    server_facts,
    target_table,
)
from onceflow.sinks.postgres.connection import BoundedConnection
from onceflow.sinks.postgres.ddl import bookkeeping_statements, create_statement
from onceflow.sinks.postgres.failures import refusal
from onceflow.sinks.postgres.matching import matched, require_durable_table
from onceflow.sinks.postgres.settings import SinkSettings, attempt_of_writer
from onceflow.sinks.sql import SinkOwner, require_admission

_logger = logging.getLogger("onceflow.sinks.postgres")

# Taken in every transaction that creates something of ours: IF NOT EXISTS alone loses to a
# concurrent creator with a unique violation in the catalogs. The number is "onceflow" in ASCII.
_DDL_LOCK = int.from_bytes(b"onceflow", "big")

CreateTable = Callable[[BoundedConnection, TableName], TargetTable]


class Preflight:
    """One run of the checks, on one connection."""

    def __init__(
        self, settings: SinkSettings, context: CommitterContext, connection: BoundedConnection
    ) -> None:
        self._settings = settings
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

    def require_two_phase(self, facts: ServerFacts) -> None:
        """Return when the server can prepare transactions.

        Raises:
            ConfigError: It cannot; has the statement that mends it.
        """
        if facts.max_prepared_transactions == 0:
            raise ConfigError(
                f"{self._settings.endpoint} has max_prepared_transactions = 0, so it refuses the "
                "two-phase commit that exactly-once needs. Run: ALTER SYSTEM SET "
                "max_prepared_transactions = 64; then restart the server (two for each parallel "
                "subtask of every sink are enough)"
            )

    def ensure_bookkeeping(self, facts: ServerFacts) -> None:
        """Return when ledger and fence exist; creates what is missing, whoever else does the same.

        Raises:
            ConfigError: They do not, and the role may not create them.
        """
        ledger = self._settings.ledger
        if all(self._exists(name) for name in (ledger.ledger, ledger.sinks)):
            return
        schema = sql.Identifier(ledger.schema)
        try:
            with self._connection.transaction():
                self._lock_ddl()
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

    def claim(self) -> None:
        """Return when this attempt, and no older one, may write under the sink id.

        Also ends the sessions of older attempts' writers: what they hold is rolled back, and they
        prepare nothing more.

        Raises:
            ConfigError: Another job owns the sink id.
            Fenced: This attempt or a newer one has claimed it.
        """
        context, ledger = self._context, self._settings.ledger
        claimant = SinkOwner(context.log_id, context.attempt)
        while not ledger.claim(self._connection, context.sink_id, context.job, claimant):
            # Goes on only if the row that stood in the way is gone meanwhile.
            take_over = sql.SQL("DELETE FROM {} WHERE sink_id = {}").format(
                ledger.sinks, sql.Literal(context.sink_id)
            )
            require_admission(
                context.sink_id,
                ledger.owner(self._connection, context.sink_id),
                claimant,
                take_over=take_over.as_string(self._connection),
            )
        self._end_older_writers()

    def require_table(self, schema: pa.Schema, create: CreateTable | None) -> TargetTable:
        """Return the target table, which takes rows of `schema`; `create` makes it when absent.

        Raises:
            ConfigError: There is none, or it does not take the rows.
        """
        settings = self._settings
        table = target_table(self._connection, settings.table)
        if table is None:
            if create is None:
                raise ConfigError(
                    f"table {settings.table} does not exist in {settings.endpoint}. Pass "
                    f"create=True, or run: {create_statement(settings.table, schema, ())}"
                )
            table = create(self._connection, settings.table)
        require_durable_table(table)
        matched(table, schema)
        return table

    def create_table(
        self, facts: ServerFacts, schema: pa.Schema, primary_key: tuple[str, ...]
    ) -> CreateTable:
        """Return what creates the target table from `schema`."""
        name = self._settings.table
        if name.schema is None and facts.schema is None:
            raise ConfigError(
                f"table {name}: the search path of {self._settings.endpoint} names no schema in "
                "which to create it; write table='schema.table'"
            )
        statement = create_statement(name, schema, primary_key)

        def create(connection: BoundedConnection, name: TableName) -> TargetTable:
            self._require_nothing_in_doubt()
            with connection.transaction():
                self._lock_ddl()
                if target_table(connection, name) is None:
                    connection.execute(statement.encode())
            table = target_table(connection, name)
            if table is None:
                raise ConfigError(
                    f"table {name} was created and is not found: its schema is not in the search "
                    "path; write table='schema.table'"
                )
            _logger.info("created table %s", table.name)
            return table

        return create

    def _require_nothing_in_doubt(self) -> None:
        prepared = prepared_transactions(self._connection, self._context.sink_id)
        if prepared:
            raise ConfigError(
                f"table {self._settings.table} is to be created, and {len(prepared)} transactions "
                f"of sink {self._context.sink_id} are in doubt, the first {prepared[0]}: tables "
                "are created only while nothing is prepared. Start the job once with the table it "
                "had before, or finish them by COMMIT PREPARED or ROLLBACK PREPARED"
            )

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

    def _lock_ddl(self) -> None:
        self._connection.execute("SELECT pg_catalog.pg_advisory_xact_lock(%s)", (_DDL_LOCK,))


def run_preflight(
    settings: SinkSettings,
    context: CommitterContext,
    schema: pa.Schema,
    *,
    two_phase: bool,
    create: bool,
    primary_key: tuple[str, ...],
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
            if two_phase:
                preflight.require_two_phase(facts)
                preflight.ensure_bookkeeping(facts)
                preflight.claim()
            creating = preflight.create_table(facts, schema, primary_key) if create else None
            preflight.require_table(schema, creating)
        except psycopg.errors.InsufficientPrivilege as error:
            raise ConfigError(
                f"sink {context.sink_id}: {settings.endpoint}: {refusal(error, 'not permitted')}"
            ) from error
        except psycopg.Error as error:
            raise refusal(error, f"sink {context.sink_id}: {settings.endpoint}") from error
