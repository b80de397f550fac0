"""Whole jobs that copy a table and follow it, killed again and again: both tables are equal."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest
from tests.integration import postgres_sink_kit as postgres
from tests.support.driver_process import DriverProcess
from typer.testing import CliRunner

from onceflow.cli.main import app
from onceflow.integration.conformance.processes import eventually
from onceflow.integration.faults import processes
from onceflow.integration.servers.postgres import EmbeddedPostgres

_ROWS = 600


class Load:
    """A program that changes the table `original` in random transactions."""

    def __init__(self, url: str, seed: int) -> None:
        self._url = url
        self._random = random.Random(seed)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.transactions = 0
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        with psycopg.connect(self._url) as first, psycopg.connect(self._url) as second:
            # The second has a transaction open while the first one commits some.
            while not self._over.is_set():
                self._change(second, range(_ROWS, 2 * _ROWS))
                for _ in range(self._random.randrange(4)):
                    self._change(first, range(_ROWS))
                    self._end(first)
                self._end(second)
                time.sleep(0.002)

    def _end(self, connection: psycopg.Connection[Any]) -> None:
        if self._random.random() < 0.1:
            connection.rollback()
        else:
            connection.commit()
        self.transactions += 1

    def _change(self, connection: psycopg.Connection[Any], keys: range) -> None:
        for _ in range(self._random.randrange(1, 6)):
            key, other = self._random.choice(keys), self._random.choice(keys)
            roll = self._random.random()
            connection.execute("SAVEPOINT s")
            if roll < 0.4:
                connection.execute(
                    "INSERT INTO original VALUES (%s, %s) ON CONFLICT (id) DO UPDATE SET v ="
                    " excluded.v",
                    [key, f"{self.transactions}"],
                )
            elif roll < 0.6:
                connection.execute("DELETE FROM original WHERE id = %s", [key])
            elif roll < 0.8:
                connection.execute(
                    "UPDATE original SET id = %s WHERE id = %s"
                    " AND NOT EXISTS (SELECT FROM original WHERE id = %s)",
                    [other, key, other],
                )
            else:
                connection.execute("UPDATE original SET v = v || '.' WHERE id = %s", [key])
            if self._random.random() < 0.2:
                connection.execute("ROLLBACK TO SAVEPOINT s")


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
    """Wait until the job has read and decided something since the call. Fails after 90 s."""
    count, decided = _count(url), _decided(url)
    _await(lambda: _count(url) != count or (count > 0 and _decided(url) != decided), driver)


def _count(url: str) -> int:
    return int(postgres.query(url, "SELECT count(*) FROM copy")[0][0])


@pytest.mark.only_proof
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_both_tables_are_equal_after_kills_in_the_copy_and_in_the_stream(
    server: EmbeddedPostgres, driver: DriverProcess, tmp_path: Path, seed: int
) -> None:
    url = server.url
    postgres.query(
        url,
        "CREATE TABLE original (id bigint PRIMARY KEY, v text)",
        "CREATE TABLE copy (id bigint PRIMARY KEY, v text)",
        f"INSERT INTO original SELECT 2 * i, 'copied' FROM generate_series(0, {_ROWS - 1}) i",
    )
    draw = random.Random(seed)
    load = Load(url, seed)
    try:
        for kill in range(4):
            driver.launch("tests.support.changes_job_process", [tmp_path, "--url", url], {})
            _await_rows(url, driver)
            time.sleep(draw.uniform(0.0, 0.5))
            if kill % 2:
                # The job restarts the slots by itself.
                for slot in processes.children_of(driver.pid):
                    processes.kill_process(slot)
                _await_rows(url, driver)
            driver.kill()
    finally:
        load.stop()
    driver.launch("tests.support.changes_job_process", [tmp_path, "--url", url], {})
    expected = _rows(url, "original")
    _await(lambda: _rows(url, "copy") == expected, driver)
    assert load.transactions > 100


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
    streamed = "SELECT 1 FROM copy WHERE _op = 'c' LIMIT 1"
    try:
        for _ in range(3):
            driver.launch("tests.support.changes_job_process", arguments, {})
            _await_rows(url, driver)
            driver.kill()
        driver.launch("tests.support.changes_job_process", arguments, {})
        _await(lambda: bool(postgres.query(url, streamed)), driver)
        driver.kill()
        driver.launch("tests.support.changes_job_process", arguments, {})
        _await_rows(url, driver)
    finally:
        over.set()
        thread.join()
    expected = _rows(url, "original")
    _await(lambda: _count(url) >= len(expected), driver)
    assert _rows(url, "copy") == expected
    _drop_left_slot(url, driver, str(tmp_path / "checkpoints"))


def _drop_left_slot(url: str, driver: DriverProcess, storage: str) -> None:
    """End the job, and remove what it leaves behind: its slot and its publication."""
    driver.kill()
    where = ["--url", url, "--storage", storage]

    def invoke(*arguments: str) -> tuple[int, str]:
        outcome = CliRunner().invoke(app, ["slots", *arguments, *where])
        return outcome.exit_code, outcome.output

    name = "onceflow_changes_original"
    active = "SELECT FROM pg_replication_slots WHERE active"
    assert eventually(lambda: not postgres.query(url, active), 60)
    status, output = invoke("list")
    assert (status, output.splitlines()[1].split()[:4]) == (0, [name, "changes", "original", "no"])
    status, output = invoke("drop", name, "--yes")
    assert status == 1
    assert f"job changes in --storage continues from slot {name}, for its source" in output
    status, output = invoke("drop", name, "--yes", "--force")
    assert (status, output) == (0, f"dropped slot {name} and publication {name}\n")
    assert not postgres.query(url, "SELECT FROM pg_replication_slots")
    assert not postgres.query(url, "SELECT FROM pg_publication")
