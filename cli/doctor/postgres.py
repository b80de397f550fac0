"""Whether a Postgres can take rows exactly once, and in which way."""

from __future__ import annotations

import time
from collections.abc import Sequence

from onceflow.cli.doctor.databases import (
    CLOCK_SKEW_MAX_S,
    CONNECTIONS_A_SUBTASK,
    DatabaseQuestion,
    refused,
)
from onceflow.cli.doctor.findings import Area, Finding
from onceflow.cli.doctor.logins import remedies_of_postgres
from onceflow.cli.doctor.postgres_privileges import Privileges, one_row
from onceflow.core.errors import OnceflowError
from onceflow.core.protocol.ids import TransactionId
from onceflow.sinks.postgres.catalog import literal, quoted
from onceflow.sinks.postgres.connection import PostgresEndpoint, PostgresSession, endpoint_of
from onceflow.sinks.postgres.server import SERVER_VERSION_MIN, is_pooled
from onceflow.sinks.sql.errors import SqlError

OLD_S = 3600.0


def check_postgres(question: DatabaseQuestion) -> Sequence[Finding]:
    """Connect, and ask the server about itself; changes nothing in it."""
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
        return [refused(error, remedies_of_postgres(where), "listen_addresses, port")]
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
        privileges = Privileges(self._question, self._connection)
        for look in (
            self._server, self._durability, self._two_phase, self._connections, privileges.ledger,
            privileges.table, self._pooler, self._clock, self._left_behind,
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
        standby, read_only, role = one_row(
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
        if mode == "ledger":
            return []
        remedy = (
            f"ALTER SYSTEM SET max_prepared_transactions = {max(64, needed)}; then restart the"
            " server"
        )
        if slots == 0 and mode == "auto":
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
        (used,) = one_row(self._connection, "SELECT count(*) FROM pg_catalog.pg_prepared_xacts")
        text = f"max_prepared_transactions = {slots}, {used} in use"
        if slots - used < needed:
            return [self._area.warning(text, f"{needed} free", remedy)]
        return [self._area.ok(text)]

    def _connections(self) -> list[Finding]:
        total, reserved, used = one_row(
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
        if self._question.commit_mode == "ledger":
            return [self._area.ok("a connection pooler is in between")]
        says = self._area.warning if self._question.commit_mode == "auto" else self._area.problem
        return [
            says(
                "a connection pooler is in between",
                "a direct connection for two-phase commit; ledger mode works through a pooler",
                "name the server's own address and port, or PostgresSink(commit_mode='ledger')",
            )
        ]

    def _clock(self) -> list[Finding]:
        before = time.time()
        (theirs,) = one_row(
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
        (value,) = one_row(self._connection, "SELECT current_setting(%s)", name)
        return str(value)
