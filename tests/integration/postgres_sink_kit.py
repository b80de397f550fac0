"""Reads a Postgres as an operator sees it."""

from __future__ import annotations

import time
from typing import Any, TypeAlias

import psycopg
from tests.integration import sink_kit

from onceflow.sinks import PostgresSink

Job: TypeAlias = sink_kit.Job[PostgresSink]


def query(url: str, *statements: str) -> list[tuple[Any, ...]]:
    """Return the rows of the last of `statements`, each run alone."""
    found: list[tuple[Any, ...]] = []
    with psycopg.connect(url, autocommit=True) as connection:
        for statement in statements:
            cursor = connection.execute(statement.encode())
            found = cursor.fetchall() if cursor.description else []
    return found


def ids_in(url: str, table: str = "ledger") -> list[int]:
    """Return all ids that are visible in the table, sorted, doubles kept."""
    return [int(row[0]) for row in query(url, f"SELECT id FROM {table} ORDER BY id")]


def prepared(url: str) -> list[str]:
    """Return the names of all transactions prepared in the database, sorted."""
    found = query(url, "SELECT gid FROM pg_prepared_xacts WHERE database = current_database()")
    return sorted(str(row[0]) for row in found)


def ledger_rows(url: str) -> list[str]:
    """Return the transactions that the ledger proves committed, sorted."""
    found = query(url, "SELECT transaction_id FROM onceflow.onceflow_ledger")
    return sorted(str(row[0]) for row in found)


def await_lock_wait(url: str, timeout_s: float = 90.0) -> None:
    """Return once a session of the database waits for another's lock.

    Raises:
        AssertionError: None does in time.
    """
    waiting = (
        "SELECT pid FROM pg_stat_activity "
        "WHERE wait_event_type = 'Lock' AND datname = current_database()"
    )
    deadline = time.monotonic() + timeout_s
    while not query(url, waiting):
        assert time.monotonic() < deadline, "nobody waits for a lock"
        time.sleep(0.01)
