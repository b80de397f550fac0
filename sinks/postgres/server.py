"""The queries to a Postgres server for preflight and doctor, with judgements and remedies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from typing_extensions import override

from onceflow.clients.postgres.catalog import identifier, literal, quote
from onceflow.clients.postgres.connection import own
from onceflow.clients.sql.session import Session, SqlEndpoint, StatementRefused
from onceflow.clients.sql.tables import TableName
from onceflow.core.protocol.ids import TransactionId
from onceflow.core.spi.connector import Area, Finding
from onceflow.sinks.sql.dialect import DATABASE, ServerDiagnosis, TwoPhaseSupport, connections
from onceflow.sinks.sql.ledger import LEDGER, SINKS

SERVER_VERSION_MIN = 120000
"""PostgreSQL 12, the oldest version whose catalogs have generated columns."""
OLD_S = 3600.0
_DURABLE = "committed rows survive a crash of the server and of its machine"


def is_pooled(session: Session) -> bool:
    """Return True if a pooler between this client and the server shares server sessions.

    A pooler tells its clients a process id of its own, by which they cancel queries; the server
    tells the real one. PgBouncer, pgcat, Odyssey and the proxies of managed databases do so. A
    pooler that passes the id on keeps one server session per client, and needs no special
    treatment.

    Source: PgBouncer 1.15 to 1.25, BackendKeyData of a client login.
    """
    ((pid,),) = session.query("SELECT pg_catalog.pg_backend_pid()")
    return int(pid) != own(session).backend_pid


def check_prepared_room(slots: int, parallelism: int, *, at_once: int = 2) -> Finding:
    """Judge whether `slots`, the value of `max_prepared_transactions`, is enough for one sink.

    A subtask of a job has two transactions `at_once`: one waits for its commit while the next one
    is prepared. A task of a batch has one.
    """
    text = f"max_prepared_transactions = {slots}"
    needed = at_once * parallelism
    if slots >= needed:
        return DATABASE.ok(text)
    return DATABASE.problem(
        text,
        f"{needed}: two for each parallel subtask of every sink"
        if at_once > 1
        else "one for each partition that is written at the same time",
        f"ALTER SYSTEM SET max_prepared_transactions = {max(64, 2 * needed)}; then restart the"
        " server",
    )


class PostgresDiagnosis(ServerDiagnosis):
    """A server's current settings and the user's rights."""

    def __init__(self, session: Session) -> None:
        """Query the server."""
        self.version = own(session).server_version
        """The version as a number: 160004 is 16.4."""
        (
            self.slots, self.standby, self.read_only, self.user, self.fsync, self.full_page_writes,
        ) = _one_row(
            session,
            "SELECT current_setting('max_prepared_transactions')::int, pg_is_in_recovery(), "
            "current_setting('transaction_read_only')::bool, "
            "pg_catalog.quote_ident(current_user), current_setting('fsync'), "
            "current_setting('full_page_writes')",
        )  # fmt: skip

    @override
    def fitness(self, where: SqlEndpoint) -> Sequence[Finding]:
        shown, findings = f"PostgreSQL {self.version // 10000}", list[Finding]()
        if self.version < SERVER_VERSION_MIN:
            needed = f"PostgreSQL {SERVER_VERSION_MIN // 10000} or newer"
            findings.append(DATABASE.problem(shown, needed, "upgrade: pg_upgrade"))
        if self.standby:
            findings.append(
                DATABASE.problem(
                    "it is a standby",
                    "the primary: a standby takes no writes",
                    "name the primary in the url, or all hosts with"
                    " target_session_attrs=read-write",
                )
            )
        elif self.read_only:
            findings.append(
                DATABASE.problem(
                    "transactions are read-only",
                    "transactions that write",
                    f"ALTER ROLE {self.user} SET default_transaction_read_only = off",
                )
            )
        return [*(findings or [DATABASE.ok(f"{shown}, {where}")]), *self._durability()]

    def _durability(self) -> Sequence[Finding]:
        """Judge fsync and full_page_writes.

        Sinks themselves turn synchronous_commit on for commits.
        """
        settings = {"fsync": self.fsync, "full_page_writes": self.full_page_writes}
        findings = [
            DATABASE.warning(
                f"{name} = off",
                f"{_DURABLE}: with this setting they are lost when the machine loses power or"
                " its kernel crashes",
                f"ALTER SYSTEM SET {name} = on; SELECT pg_reload_conf()",
            )
            for name, value in settings.items()
            if value == "off"
        ]
        return findings or [DATABASE.ok(_DURABLE)]

    @override
    def two_phase_support(self, session: Session, parallelism: int) -> TwoPhaseSupport:
        room = check_prepared_room(self.slots, parallelism)
        pooled = DATABASE.warning(
            "the connection goes through a connection pooler",
            "a direct connection: two_phase holds one of the server's sessions a subtask from a"
            " checkpoint's first row to its last; ledger mode works through a pooler",
            "name the server's own address and port, or PostgresSink(commit_mode='ledger')",
        )
        return TwoPhaseSupport(
            f"{room.found}, and the connection is direct",
            (room,) if room.remedy else (),
            (pooled,) if is_pooled(session) else (),
        )

    @override
    def bookkeeping(self, session: Session, schema: str, tables: Sequence[str]) -> Finding:
        there, in_schema, in_database, database = _one_row(
            session,
            "SELECT n.oid IS NOT NULL, "
            "coalesce(has_schema_privilege(n.oid, 'USAGE, CREATE'), false), "
            "has_database_privilege(current_database(), 'CREATE'), current_database()::text "
            "FROM (SELECT 1) AS one LEFT JOIN pg_catalog.pg_namespace AS n ON n.nspname = %s",
            schema,
        )
        name = quote(schema)
        missing = _not_writable(session, schema, tables) if there else None
        if missing:
            tables = ", ".join(missing)
            grant = (
                f"GRANT USAGE ON SCHEMA {name} TO {self.user}; "
                f"GRANT SELECT, INSERT, UPDATE, DELETE ON {tables} TO {self.user}"
            )
            text = f"role {self.user} may not write {tables}"
            return DATABASE.problem(text, "onceflow's own tables", grant)
        if missing is not None or in_schema or (in_database and not there):
            return DATABASE.ok(f"role {self.user} may keep the ledger in schema {schema}")
        grant = (
            f"GRANT USAGE, CREATE ON SCHEMA {name} TO {self.user}"
            if there
            else f"CREATE SCHEMA {name} AUTHORIZATION {self.user}"
        )
        text = f"role {self.user} may not keep the ledger in schema {schema} of database {database}"
        return DATABASE.problem(text, "a schema for two small tables", grant)

    @override
    def absent(self, session: Session, name: TableName, area: Area) -> Finding:
        # For a name without a schema: the server skips schemas that the role may not use.
        searched = "ANY(string_to_array(translate(current_setting('search_path'), ' \"', ''), ','))"
        rows = session.query(
            "SELECT pg_catalog.quote_ident(n.nspname) FROM pg_catalog.pg_namespace AS n "
            "JOIN pg_catalog.pg_class AS c ON c.relnamespace = n.oid "
            "WHERE NOT has_schema_privilege(n.oid, 'USAGE') "
            f"AND c.relname = {literal(name.name)} "
            f"AND n.nspname = {literal(name.schema) if name.schema else searched}"
        )
        if not rows:
            create = f"CREATE TABLE {identifier(name)} (…), or PostgresSink(…, create=True)"
            return area.problem("it does not exist", "the table", create)
        schema = str(rows[0][0])
        grant = f"GRANT USAGE ON SCHEMA {schema} TO {self.user}"
        return area.problem(f"role {self.user} may not look into schema {schema}", "USAGE", grant)

    @override
    def room(self, session: Session, parallelism: int) -> Sequence[Finding]:
        total, reserved, used, prepared = _one_row(
            session,
            "SELECT current_setting('max_connections')::int, "
            "current_setting('superuser_reserved_connections')::int, "
            "(SELECT count(*) FROM pg_catalog.pg_stat_activity WHERE backend_type = "
            "'client backend'), (SELECT count(*) FROM pg_catalog.pg_prepared_xacts)",
        )
        raised = "ALTER SYSTEM SET max_connections = {total}; then restart the server"
        findings = [connections(total, total - reserved - used, parallelism, raised)]
        lacking = check_prepared_room(self.slots - prepared, parallelism)
        if lacking.remedy and not check_prepared_room(self.slots, parallelism).remedy:
            text = f"{prepared} of {self.slots} max_prepared_transactions are in use"
            findings.append(DATABASE.warning(text, f"{2 * parallelism} free", lacking.remedy))
        return findings

    @override
    def clock_s(self, session: Session) -> float:
        return float(_one_row(session, "SELECT extract(epoch FROM clock_timestamp())::float8")[0])

    @override
    def list_left_over(self, session: Session, schema: str) -> Sequence[Finding]:
        rows = session.query(
            "SELECT gid, extract(epoch FROM clock_timestamp() - prepared)::float8 "
            "FROM pg_catalog.pg_prepared_xacts WHERE database = current_database() ORDER BY 2 DESC"
        )
        ours = [(gid, age_s) for gid, age_s in rows if TransactionId.parse(str(gid)) is not None]
        others = [(gid, age_s) for gid, age_s in rows if TransactionId.parse(str(gid)) is None]
        findings: list[Finding] = []
        if ours:
            text = f"{len(ours)} of ours prepared, the oldest for {ours[0][1]:.0f} s: {ours[0][0]}"
            if ours[0][1] < OLD_S:
                findings.append(DATABASE.ok(text))
            else:
                needed = (
                    "no prepared transactions of that age: they hold locks and keep VACUUM from"
                    " cleaning up"
                )
                remedy = "start their job, or: onceflow txn list --url … --storage … --job …"
                findings.append(DATABASE.warning(text, needed, remedy))
        if others:
            statement = f"ROLLBACK PREPARED {literal(str(others[0][0]))}"
            text = f"{len(others)} of others prepared, the oldest for {others[0][1]:.0f} s"
            remedy = f"ask who owns it, then COMMIT PREPARED or {statement}"
            findings.append(DATABASE.warning(text, "that somebody settles them", remedy))
        return findings or [DATABASE.ok("nothing is left prepared")]


def _not_writable(session: Session, schema: str, tables: Sequence[str]) -> list[str] | None:
    """Return onceflow's tables that may not be written, or None if they do not exist yet."""
    rows = [
        (table, *_one_row(session, "SELECT c.oid, coalesce("
        "has_schema_privilege(c.relnamespace, 'USAGE') AND has_table_privilege(c.oid, 'SELECT')"
        " AND has_table_privilege(c.oid, 'INSERT') AND has_table_privilege(c.oid, 'UPDATE')"
        " AND has_table_privilege(c.oid, 'DELETE'), false) FROM (SELECT 1) AS one LEFT JOIN "
        "(pg_catalog.pg_class AS c JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace)"
        " ON n.nspname = %s AND c.relname = %s", schema, table))
        for table in tables
    ]  # fmt: skip
    if any(oid is None for table, oid, _ in rows if table in (LEDGER, SINKS)):
        return None
    return [identifier(TableName(schema, table)) for table, oid, may in rows if oid and not may]


def _one_row(session: Session, statement: str, *values: str) -> tuple[Any, ...]:
    """Return the single row of `statement`.

    Raises:
        SqlError: The server refuses the statement.
    """
    for value in values:
        statement = statement.replace("%s", literal(value), 1)
    rows = session.query(statement)
    if not rows:
        raise StatementRefused("the server answered a SELECT of one row with none")
    return rows[0]
