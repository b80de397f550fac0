"""Reads a MySQL or MariaDB as an operator sees it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, TypeAlias
from urllib.parse import urlsplit

from tests.integration import sink_kit

from onceflow.integration.servers.mysql import connect
from onceflow.sinks import MySQLSink

Job: TypeAlias = sink_kit.Job[MySQLSink]

FLAVORS = ("mysql", "mariadb")


def query(url: str, *statements: str) -> list[tuple[Any, ...]]:
    """Return the rows of the last of `statements`, each run alone."""
    connection = connect(url)
    try:
        with connection.cursor() as cursor:
            for statement in statements:
                cursor.execute(statement)
            found: Sequence[tuple[Any, ...]] = cursor.fetchall()
            return list(found)
    finally:
        connection.close()


def ids_in(url: str, table: str = "ledger") -> list[int]:
    """Return all ids that are visible in the table, sorted, doubles kept."""
    return [int(row[0]) for row in query(url, f"SELECT id FROM {table} ORDER BY id")]


def prepared(url: str) -> list[str]:
    """Return the names of all XA transactions prepared for a ledger in the database, sorted."""
    qualifier = urlsplit(url).path.lstrip("/")
    names: list[str] = []
    for _, length, _, data in query(url, "XA RECOVER"):
        text = data.decode() if isinstance(data, bytes) else str(data)
        if text[length:] == qualifier:
            names.append(text[:length])
    return sorted(names)


def xid(url: str, name: object) -> str:
    """Return the name of a transaction as an operator writes it in XA statements."""
    return f"'{name}','{urlsplit(url).path.lstrip('/')}',1869505381"


def sessions(url: str) -> list[int]:
    """Return the sessions that others have in the database."""
    found = query(
        url,
        "SELECT id FROM information_schema.processlist WHERE db = DATABASE() "
        "AND id <> CONNECTION_ID()",
    )
    return [int(row[0]) for row in found]


def ledger_rows(url: str) -> list[str]:
    """Return the transactions that the ledger proves committed, sorted."""
    return sorted(str(row[0]) for row in query(url, "SELECT transaction_id FROM onceflow_ledger"))


def await_lock_wait(url: str, timeout_s: float = 90.0) -> None:
    """Return once a transaction on the server waits for a lock.

    The server answers from a copy that it renews only when nobody has asked for a tenth of a
    second: who asks more often never sees anything new.

    Raises:
        AssertionError: None does in time.
    """
    deadline = time.monotonic() + timeout_s
    while not query(
        url, "SELECT 1 FROM information_schema.innodb_trx WHERE trx_state = 'LOCK WAIT'"
    ):
        assert time.monotonic() < deadline, "nobody waits for a lock"
        time.sleep(0.15)
