"""Whether a Postgres can take rows exactly once, in which way, and what its role may do."""

from __future__ import annotations

import getpass
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from onceflow.core.connector import Area, Finding, Questions, ServerAccess
from onceflow.core.errors import OnceflowError
from onceflow.core.protocol.ids import TransactionId
from onceflow.sinks.postgres.catalog import identifier, literal, quoted
from onceflow.sinks.postgres.connection import PostgresEndpoint, PostgresSession, endpoint_of
from onceflow.sinks.postgres.server import SERVER_VERSION_MIN, is_pooled
from onceflow.sinks.sql.connector import (
    CLOCK_SKEW_MAX_S,
    CONNECTIONS_A_SUBTASK,
    DatabaseQuestion,
    Remedies,
    question_of,
    refused,
)
from onceflow.sinks.sql.session import SqlError, StatementRefused
from onceflow.sinks.sql.settings import CommitMode
from onceflow.sinks.sql.tables import TableName

OLD_S = 3600.0


def questions_of_postgres(
    access: ServerAccess, tables: Sequence[str], parallelism: int
) -> Questions:
    """Return what a server is asked about itself; see `Diagnosis`."""
    return partial(_ask, question_of(access, tables, parallelism))


def _ask(question: DatabaseQuestion) -> Sequence[Finding]:
    where = endpoint_of(
        question.url,
        user=None,
        password=question.password,
        connect_timeout_s=question.timeout_s / 2,
        reply_timeout_s=question.timeout_s / 2,
        lock_timeout_s=question.timeout_s / 2,
    )
    try:
        connection = where.connect("onceflow doctor")
    except OnceflowError as error:
        return [refused(error, _remedies(where), "listen_addresses, port")]
    with connection:
        return _Examination(question, where, connection).findings()


class _Examination:
    def __init__(
        self, question: DatabaseQuestion, where: PostgresEndpoint, connection: PostgresSession
    ) -> None:
        self._question = question
        self._where = where
        self._connection = connection
        self._area = Area("database")

    def findings(self) -> list[Finding]:
        """Return all findings; a question that the server refuses does not end the others."""
        found: list[Finding] = []
        privileges = _Privileges(self._question, self._connection)
        for look in (
            self._server, self._durability, self._two_phase, self._connections, privileges.ledger,
            privileges.tables, self._pooler, self._clock, self._left_behind,
        ):  # fmt: skip
            try:
                found += look()
            except SqlError as error:
                name = look.__name__.strip("_").replace("_", " ")
                found.append(self._area.problem(f"{name}: {error}", "", ""))
                if not self._connection.is_open:
                    break
        return found

    def _server(self) -> list[Finding]:
        standby, read_only, role = _one_row(
            self._connection,
            "SELECT pg_is_in_recovery(), current_setting('transaction_read_only')::bool, "
            "current_user::text",
        )
        version, found = self._connection.server_version, list[Finding]()
        if version < SERVER_VERSION_MIN:
            text = f"PostgreSQL {version // 10000}"
            needed = f"PostgreSQL {SERVER_VERSION_MIN // 10000} or newer"
            found.append(self._area.problem(text, needed, "upgrade: pg_upgrade"))
        if standby:
            found.append(
                self._area.problem(
                    f"{self._where} is a standby",
                    "the primary: a standby takes no writes",
                    "name the primary, or all hosts with target_session_attrs=read-write",
                )
            )
        elif read_only:
            found.append(
                self._area.problem(
                    "transactions are read-only",
                    "transactions that write",
                    f"ALTER ROLE {quoted(role)} SET default_transaction_read_only = off",
                )
            )
        if not found:
            found.append(self._area.ok(f"PostgreSQL {version // 10000}, {self._where}"))
        return found

    def _durability(self) -> list[Finding]:
        """`synchronous_commit = off` does no harm: sinks turn it on for what they commit."""
        covered = "what is committed outlives the server's process and its machine"
        found = [
            self._area.problem(
                f"{name} = off",
                f"{covered}: this forgets it when its machine loses power or its kernel crashes",
                f"ALTER SYSTEM SET {name} = on; SELECT pg_reload_conf()",
            )
            for name in ("fsync", "full_page_writes")
            if self._setting(name) == "off"
        ]
        return found or [self._area.ok(covered)]

    def _two_phase(self) -> list[Finding]:
        mode, slots = self._question.commit_mode, int(self._setting("max_prepared_transactions"))
        needed = 2 * self._question.parallelism
        if mode is CommitMode.LEDGER:
            return []
        remedy = (
            f"ALTER SYSTEM SET max_prepared_transactions = {max(64, needed)}; then restart the"
            " server"
        )
        if slots == 0 and mode is None:
            return [
                self._area.warning(
                    "max_prepared_transactions = 0: rows are staged and applied (ledger mode)",
                    f"{needed} for two-phase commit, which writes rows once only",
                    remedy,
                )
            ]
        if slots < needed:
            return [
                self._area.problem(
                    f"max_prepared_transactions = {slots}",
                    f"{needed}: two for each parallel subtask of every sink",
                    remedy,
                )
            ]
        (used,) = _one_row(self._connection, "SELECT count(*) FROM pg_catalog.pg_prepared_xacts")
        text = f"max_prepared_transactions = {slots}, {used} in use"
        if slots - used < needed:
            return [self._area.warning(text, f"{needed} free", remedy)]
        return [self._area.ok(text)]

    def _connections(self) -> list[Finding]:
        total, reserved, used = _one_row(
            self._connection,
            "SELECT current_setting('max_connections')::int, "
            "current_setting('superuser_reserved_connections')::int, "
            "(SELECT count(*) FROM pg_catalog.pg_stat_activity WHERE backend_type = "
            "'client backend')",
        )
        free, needed = total - reserved - used, CONNECTIONS_A_SUBTASK * self._question.parallelism
        if free < needed + 2:
            return [
                self._area.warning(
                    f"{free} of {total} connections are free",
                    f"{needed + 2}: {CONNECTIONS_A_SUBTASK} for each parallel subtask, 2 for the"
                    " driver",
                    f"ALTER SYSTEM SET max_connections = {total + needed + 2}; then restart the"
                    " server",
                )
            ]
        return [self._area.ok(f"{free} of {total} connections are free")]

    def _pooler(self) -> list[Finding]:
        if not is_pooled(self._connection):
            return [self._area.ok("no pooler in between")]
        if self._question.commit_mode is CommitMode.LEDGER:
            return [self._area.ok("a connection pooler is in between")]
        says = self._area.warning if self._question.commit_mode is None else self._area.problem
        return [
            says(
                "a connection pooler is in between",
                "a direct connection for two-phase commit; ledger mode works through a pooler",
                "name the server's own address and port, or PostgresSink(commit_mode='ledger')",
            )
        ]

    def _clock(self) -> list[Finding]:
        before = time.time()
        (theirs,) = _one_row(
            self._connection, "SELECT extract(epoch FROM clock_timestamp())::float8"
        )
        after = time.time()
        skew_s = max(before - theirs, theirs - after, 0.0)
        if skew_s <= CLOCK_SKEW_MAX_S:
            return [
                self._area.ok(f"its clock agrees with ours within {skew_s + after - before:.3f} s")
            ]
        return [
            self._area.warning(
                f"its clock is {skew_s:.0f} s off ours",
                f"clocks within {CLOCK_SKEW_MAX_S:g} s; ages are told wrong otherwise",
                "sudo timedatectl set-ntp true, on both machines",
            )
        ]

    def _left_behind(self) -> list[Finding]:
        rows = self._connection.query(
            "SELECT gid, extract(epoch FROM clock_timestamp() - prepared)::float8 "
            "FROM pg_catalog.pg_prepared_xacts WHERE database = current_database() ORDER BY 2 DESC"
        )
        ours = [(gid, age_s) for gid, age_s in rows if TransactionId.parse(str(gid)) is not None]
        others = [(gid, age_s) for gid, age_s in rows if TransactionId.parse(str(gid)) is None]
        found: list[Finding] = []
        if ours:
            text = f"{len(ours)} of ours prepared, the oldest for {ours[0][1]:.0f} s: {ours[0][0]}"
            if ours[0][1] < OLD_S:
                found.append(self._area.ok(text))
            else:
                needed = "none that old: they hold locks and keep VACUUM from cleaning up"
                remedy = "start their job, or: onceflow txn list --url … --storage … --job …"
                found.append(self._area.warning(text, needed, remedy))
        if others:
            statement = f"ROLLBACK PREPARED {literal(str(others[0][0]))}"
            text = f"{len(others)} of others prepared, the oldest for {others[0][1]:.0f} s"
            remedy = f"ask who owns it, then COMMIT PREPARED or {statement}"
            found.append(self._area.warning(text, "that somebody settles them", remedy))
        return found or [self._area.ok("nothing is left prepared")]

    def _setting(self, name: str) -> str:
        (value,) = _one_row(self._connection, "SELECT current_setting(%s)", name)
        return str(value)


class _Privileges:
    """Looks by the connection of a role; changes nothing."""

    def __init__(self, question: DatabaseQuestion, connection: PostgresSession) -> None:
        self._question = question
        self._connection = connection
        self._area = Area("database")

    def ledger(self) -> list[Finding]:
        """Look whether onceflow's own tables may be made and written."""
        schema = self._question.ledger_schema or "onceflow"
        role, there, in_schema, in_database, database = _one_row(
            self._connection,
            "SELECT current_user::text, n.oid IS NOT NULL, "
            "coalesce(has_schema_privilege(n.oid, 'USAGE, CREATE'), false), "
            "has_database_privilege(current_database(), 'CREATE'), current_database()::text "
            "FROM (SELECT 1) AS one LEFT JOIN pg_catalog.pg_namespace AS n ON n.nspname = %s",
            schema,
        )
        name, grantee = quoted(schema), quoted(role)
        missing = self._missing_on_bookkeeping(schema) if there else None
        if missing:
            tables = ", ".join(missing)
            grant = (
                f"GRANT USAGE ON SCHEMA {name} TO {grantee}; "
                f"GRANT SELECT, INSERT, UPDATE, DELETE ON {tables} TO {grantee}"
            )
            text = f"role {role} may not write {tables}"
            return [self._area.problem(text, "onceflow's own tables", grant)]
        if missing is not None or in_schema or (in_database and not there):
            return [self._area.ok(f"role {role} may keep the ledger in schema {schema}")]
        grant = (
            f"GRANT USAGE, CREATE ON SCHEMA {name} TO {grantee}"
            if there
            else f"CREATE SCHEMA {name} AUTHORIZATION {grantee}"
        )
        text = f"role {role} may not keep the ledger in schema {schema} of database {database}"
        return [self._area.problem(text, "a place for two small tables", grant)]

    def _missing_on_bookkeeping(self, schema: str) -> list[str] | None:
        """Return the tables of ours that may not be written; None when they are not there yet."""
        tables = [f"{quoted(schema)}.{name}" for name in ("onceflow_ledger", "onceflow_sinks")]
        rows = [
            (table, *_one_row(self._connection, "SELECT c.oid, coalesce("
            "has_schema_privilege(c.relnamespace, 'USAGE') AND has_table_privilege(c.oid, 'SELECT')"
            " AND has_table_privilege(c.oid, 'INSERT') AND has_table_privilege(c.oid, 'UPDATE')"
            " AND has_table_privilege(c.oid, 'DELETE'), false) FROM (SELECT 1) AS one LEFT JOIN "
            "(pg_catalog.pg_class AS c JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace)"
            " ON n.nspname = %s AND c.relname = %s", schema, table.split(".")[-1]))
            for table in tables
        ]  # fmt: skip
        if any(oid is None for _, oid, _ in rows):
            return None
        return [table for table, _, may in rows if not may]

    def tables(self) -> list[Finding]:
        """Look at the tables that rows are to go to, if any are named."""
        return [self._table(given) for given in self._question.tables]

    def _table(self, given: str) -> Finding:
        area, name = Area(f"table {given}"), identifier(TableName.parse(given))
        refusal = self._hidden_schema(area, given)
        if refusal is not None:
            return refusal
        (oid,) = _one_row(self._connection, "SELECT pg_catalog.to_regclass(%s)::oid", name)
        if oid is None:
            create = f"CREATE TABLE {name} (…), or PostgresSink(…, create=True)"
            return area.problem("it does not exist", "the table", create)
        return self._table_there(area, name, oid)

    def _table_there(self, area: Area, name: str, oid: int) -> Finding:
        role, persistence, kind, insert, *by_key = _one_row(
            self._connection,
            "SELECT current_user::text, relpersistence::text, relkind::text,"
            " has_table_privilege(oid, 'INSERT') OR has_any_column_privilege(oid, 'INSERT'),"
            " has_table_privilege(oid, 'SELECT'), has_table_privilege(oid, 'UPDATE'),"
            " has_table_privilege(oid, 'DELETE') FROM pg_catalog.pg_class WHERE oid = %s",
            str(oid),
        )
        if not insert:
            grant = f"GRANT SELECT, INSERT, UPDATE, DELETE ON {name} TO {quoted(role)}"
            return area.problem(f"role {role} may not insert", "INSERT", grant)
        if persistence == "u":
            needed = "a logged table: a crash of the server empties this one"
            return area.problem("it is unlogged", needed, f"ALTER TABLE {name} SET LOGGED")
        if kind not in "rp":
            return area.problem(f"it is a relation of kind {kind!r}", "a table", "name a table")
        more = [
            what for what, may in zip(("select", "update", "delete"), by_key, strict=True) if may
        ]
        return area.ok(f"role {role} may {', '.join(['insert', *more])}")

    def _hidden_schema(self, area: Area, table: str) -> Finding | None:
        """Return the problem with a schema that has `table` and may not be used."""
        schema, _, bare = table.rpartition(".")
        # Of a name without a schema: the server passes over those that the role may not use.
        searched = "string_to_array(translate(current_setting('search_path'), ' \"', ''), ',')"
        found = self._connection.query(
            "SELECT n.nspname::text, current_user::text FROM pg_catalog.pg_namespace AS n "
            "JOIN pg_catalog.pg_class AS c ON c.relnamespace = n.oid "
            "WHERE NOT has_schema_privilege(n.oid, 'USAGE') "
            f"AND c.relname = {literal(bare)} "
            + (
                f"AND n.nspname = {literal(schema)}"
                if schema
                else f"AND n.nspname = ANY({searched})"
            )
        )
        if not found:
            return None
        schema, role = map(str, found[0])
        grant = f"GRANT USAGE ON SCHEMA {quoted(schema)} TO {quoted(role)}"
        return area.problem(f"role {role} may not look into schema {schema}", "USAGE", grant)


def _one_row(session: PostgresSession, statement: str, *values: str) -> tuple[Any, ...]:
    """Return the one row of `statement`.

    Raises:
        SqlError: The server refuses it.
    """
    for value in values:
        statement = statement.replace("%s", literal(value), 1)
    rows = session.query(statement)
    if not rows:
        raise StatementRefused("the server answered a SELECT of one row with none")
    return rows[0]


def _remedies(where: PostgresEndpoint) -> Remedies:
    """Return the statements, as a superuser connected to another database runs them."""
    given = dict(where.parameters)
    user = given.get("user") or getpass.getuser()
    role, database = quoted(user), quoted(given.get("dbname") or user)
    from_here = (
        f"a line in pg_hba.conf: host {database} {role} <this machine's address>/32 scram-sha-256;"
        " then SELECT pg_reload_conf()"
    )
    return (
        ("permission denied for database", f"GRANT CONNECT ON DATABASE {database} TO {role}"),
        (f'role "{user}" does not exist', f"CREATE ROLE {role} LOGIN PASSWORD '…'"),
        ('" does not exist', f"CREATE DATABASE {database} OWNER {role}"),
        ("not permitted to log in", f"ALTER ROLE {role} LOGIN"),
        ("no pg_hba.conf entry", from_here),
        ("does not support SSL", "sslmode=prefer in the url; or ALTER SYSTEM SET ssl = on"),
        ("certificate", "sslrootcert=, sslcert= and sslkey= in the url"),
        ("translate host name", "its host"),
        ("", f"ALTER ROLE {role} PASSWORD '…'"),
    )
