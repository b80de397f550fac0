"""Whether two-phase commit is possible in a Postgres server, as it is reached, and wise."""

from __future__ import annotations

import psycopg
from psycopg.rows import TupleRow

from onceflow.sinks.postgres.catalog import ServerFacts
from onceflow.sinks.sql.commit_mode import TwoPhaseProspects


def is_pooled(connection: psycopg.Connection[TupleRow]) -> bool:
    """Return whether something between here and the server hands out its sessions.

    A pooler tells its clients a process id of its own making, by which they cancel queries; the
    server tells its real one. PgBouncer, pgcat, Odyssey and the proxies of managed databases do so.
    One that passes the id on keeps one session a client, and needs no care.

    Source: PgBouncer 1.15 to 1.25, BackendKeyData of a client login.
    """
    row = connection.execute("SELECT pg_catalog.pg_backend_pid()").fetchone()
    return row is not None and int(row[0]) != connection.info.backend_pid


def two_phase_prospects(
    connection: psycopg.Connection[TupleRow], facts: ServerFacts
) -> TwoPhaseProspects:
    """Return what speaks for and against two_phase."""
    maximum = facts.max_prepared_transactions
    obstacle = drawback = ""
    if maximum == 0:
        obstacle = (
            "the server has max_prepared_transactions = 0. Run: ALTER SYSTEM SET "
            "max_prepared_transactions = 64; then restart the server (two for each parallel "
            "subtask of every sink are enough)"
        )
    if is_pooled(connection):
        drawback = (
            "a pooler stands between here and the server's sessions; two_phase holds one server "
            "session a subtask from a checkpoint's first row to its last"
        )
    return TwoPhaseProspects(
        f"the server has max_prepared_transactions = {maximum}, and its sessions are reached "
        "directly",
        obstacle,
        drawback,
    )
