"""Whole jobs that copy a table and follow it, killed again and again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from tests.integration import postgres_sink_kit as postgres
from tests.support.driver_process import DriverProcess

from onceflow.integration.servers.postgres import EmbeddedPostgres


@pytest.fixture
def server() -> Iterator[EmbeddedPostgres]:
    with EmbeddedPostgres({"wal_level": "logical"}) as running:
        yield running


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[DriverProcess]:
    process = DriverProcess(tmp_path)
    yield process
    process.end()


def _rows(url: str, table: str) -> list[tuple[Any, ...]]:
    return postgres.query(url, f"SELECT id, v FROM {table} ORDER BY id, v")


def _await(condition: Callable[[], bool], driver: DriverProcess, timeout_s: float = 90) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, driver.log_tail()
        assert driver.exit_status is None, driver.log_tail()
        time.sleep(0.1)


def _decided(url: str) -> str:
    """Return where the slot stands, which moves after decisions alone; empty without a slot."""
    slots = postgres.query(url, "SELECT confirmed_flush_lsn::text FROM pg_replication_slots")
    return str(slots[0][0]) if slots else ""


def _await_rows(url: str, driver: DriverProcess) -> None:
    """Return when the job has read and decided something since the call."""
    count, decided = _count(url), _decided(url)
    _await(lambda: _count(url) != count or (count > 0 and _decided(url) != decided), driver)


def _count(url: str) -> int:
    return int(postgres.query(url, "SELECT count(*) FROM copy")[0][0])


@pytest.mark.only_proof
def test_each_inserted_row_is_there_once_after_kills(
    server: EmbeddedPostgres, driver: DriverProcess, tmp_path: Path
) -> None:
    """An appending target would show a row that was copied and streamed, or streamed twice."""
    url = server.url
    postgres.query(
        url,
        "CREATE TABLE original (id bigint PRIMARY KEY, v text)",
        "CREATE TABLE copy (id bigint, v text, _op text)",
        "INSERT INTO original SELECT i, 'copied' FROM generate_series(1, 500) i",
    )
    over = threading.Event()

    def insert() -> None:
        with psycopg.connect(url, autocommit=True) as connection:
            while not over.is_set():
                connection.execute(
                    "INSERT INTO original SELECT coalesce(max(id), 0) + 1 + i, 'new'"
                    " FROM original, generate_series(0, 9) i GROUP BY i"
                )
                time.sleep(0.1)

    thread = threading.Thread(target=insert)
    thread.start()
    arguments: list[str | Path] = [tmp_path, "--url", url, "--append"]
    try:
        for _ in range(4):
            driver.launch("tests.support.changes_job_process", arguments, {})
            _await_rows(url, driver)
            driver.kill()
    finally:
        over.set()
        thread.join()
    driver.launch("tests.support.changes_job_process", arguments, {})
    expected = _rows(url, "original")
    _await(lambda: _count(url) >= len(expected), driver)
    assert _rows(url, "copy") == expected
    operations = postgres.query(url, "SELECT DISTINCT _op FROM copy ORDER BY 1")
    assert operations == [("c",), ("r",)]
