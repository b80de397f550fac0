"""What a Postgres server is, and what that means for a sink."""

from __future__ import annotations

from typing_extensions import override

from onceflow.core.errors import ConfigError
from onceflow.sinks.postgres.connection import own
from onceflow.sinks.sql.dialect import Server, TwoPhaseSupport
from onceflow.sinks.sql.session import Endpoint, Session

SERVER_VERSION_MIN = 120000
"""PostgreSQL 12: the oldest whose catalogs have generated columns."""


def is_pooled(session: Session) -> bool:
    """Return whether something between here and the server hands out its sessions.

    A pooler tells its clients a process id of its own making, by which they cancel queries; the
    server tells its real one. PgBouncer, pgcat, Odyssey and the proxies of managed databases do so.
    One that passes the id on keeps one session a client, and needs no care.

    Source: PgBouncer 1.15 to 1.25, BackendKeyData of a client login.
    """
    ((pid,),) = session.query("SELECT pg_catalog.pg_backend_pid()")
    return int(pid) != own(session).backend_pid


class PostgresServer(Server):
    """As it is now."""

    def __init__(self, session: Session) -> None:
        """Ask it."""
        self.version = own(session).server_version
        """As 160004."""
        ((self.max_prepared_transactions, self.standby, self.read_only, self.user),) = (
            session.query(
                "SELECT current_setting('max_prepared_transactions')::int, pg_is_in_recovery(), "
                "current_setting('transaction_read_only')::bool, current_user::text"
            )
        )

    @override
    def require(self, where: Endpoint, sink_id: str) -> None:
        if self.version < SERVER_VERSION_MIN:
            raise ConfigError(
                f"{where} runs PostgreSQL {self.version // 10000}; onceflow needs "
                f"{SERVER_VERSION_MIN // 10000} or newer"
            )
        if self.standby:
            raise ConfigError(
                f"{where} is a standby, which takes no writes; name the primary in the url, or "
                "all hosts with target_session_attrs=read-write"
            )
        if self.read_only:
            raise ConfigError(
                f"{where} gives read-only transactions; run: ALTER ROLE {self.user} SET "
                "default_transaction_read_only = off"
            )

    @override
    def two_phase_support(self, session: Session) -> TwoPhaseSupport:
        obstacle = drawback = ""
        if self.max_prepared_transactions == 0:
            obstacle = (
                "the server has max_prepared_transactions = 0. Run: ALTER SYSTEM SET "
                "max_prepared_transactions = 64; then restart the server (two for each parallel "
                "subtask of every sink are enough)"
            )
        if is_pooled(session):
            drawback = (
                "a pooler stands between here and the server's sessions; two_phase holds one "
                "server session a subtask from a checkpoint's first row to its last"
            )
        return TwoPhaseSupport(
            f"the server has max_prepared_transactions = {self.max_prepared_transactions}, and its "
            "sessions are reached directly",
            obstacle,
            drawback,
        )

    @override
    def bookkeeping_grants(self, schema: str) -> str:
        return (
            f"CREATE SCHEMA IF NOT EXISTS {schema}; GRANT USAGE, CREATE ON SCHEMA {schema} TO "
            f"{self.user}; or name a schema where it may: PostgresSink(ledger_schema=…)"
        )
