"""A whole job that copies and follows two tables of one slot, killed again and again."""

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

from onceflow.integration.faults import processes
from onceflow.integration.servers.postgres import EmbeddedPostgres

_ACCOUNTS = 400
_BALANCE = 100
_JOB = "tests.support.two_tables_job_process"
_ORIGINAL = "SELECT 'a', id, v FROM a UNION ALL SELECT 'b', id, v FROM b ORDER BY 1, 2"
_COPY = "SELECT t, id, v FROM copy ORDER BY 1, 2"


class Transfers:
    """A program that moves amounts from table a to table b, each in one transaction."""

    def __init__(self, url: str, seed: int) -> None:
        self._url = url
        self._random = random.Random(seed)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.count = 0
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        with psycopg.connect(self._url) as connection:
            while not self._over.is_set():
                amount = self._random.randrange(1, 50)
                for table, sign in (("a", -1), ("b", 1)):
                    key = self._random.randrange(_ACCOUNTS)
                    statement = f"UPDATE {table} SET v = v + %s WHERE id = %s"
                    connection.execute(statement.encode(), [sign * amount, key])
                if self._random.random() < 0.1:
                    connection.rollback()
                else:
                    connection.commit()
                self.count += 1
                time.sleep(0.002)


def _await(condition: Callable[[], bool], driver: DriverProcess, timeout_s: float = 120) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, driver.log_tail()
        assert driver.exit_status is None, driver.log_tail()
        time.sleep(0.05)


def _is_equal(url: str) -> bool:
    return postgres.query(url, _COPY) == postgres.query(url, _ORIGINAL)


def _read_target(url: str) -> tuple[Any, ...]:
    """Return the number and the sum of the target's rows, as one statement sees them."""
    ((count, total, latest),) = postgres.query(
        url,
        "SELECT count(*), sum(v)::bigint, md5(string_agg(v::text, ',' ORDER BY t, id)) FROM copy",
    )
    return count, total, latest


def _await_change(url: str, driver: DriverProcess) -> None:
    """Wait until the job has committed something since the call. Fails after a time limit."""
    before = _read_target(url)
    _await(lambda: _read_target(url) != before, driver)


@pytest.mark.servers
def test_a_target_never_shows_half_a_transaction_of_two_tables(
    server: EmbeddedPostgres, driver: DriverProcess, tmp_path: Path
) -> None:
    """Kills in the copy of both tables and in the stream; afterwards all rows are equal."""
    url = server.url
    postgres.query(
        url,
        "CREATE TABLE a (id int PRIMARY KEY, v int NOT NULL)",
        "CREATE TABLE b (id int PRIMARY KEY, v int NOT NULL)",
        "CREATE TABLE copy (t text, id int, v int, PRIMARY KEY (t, id))",
        *(
            f"INSERT INTO {table} SELECT i, {_BALANCE} FROM generate_series(0, {_ACCOUNTS - 1}) i"
            for table in ("a", "b")
        ),
    )
    arguments: list[str | Path] = [tmp_path, "--url", url]
    transfers = Transfers(url, 1)
    try:
        for _ in range(2):
            driver.launch(_JOB, arguments, {})
            _await(lambda: _read_target(url)[0] > 0, driver)
            for slot in processes.children_of(driver.pid):
                processes.kill_process(slot)
            _await_change(url, driver)
            driver.kill()
    finally:
        transfers.stop()
    driver.launch(_JOB, arguments, {})
    _await(lambda: _is_equal(url), driver)
    # From here on, every checkpoint shows whole transfers.
    transfers = Transfers(url, 2)
    states: set[tuple[Any, ...]] = set()
    try:
        deadline = time.monotonic() + 120
        while len(states) < 30:
            assert time.monotonic() < deadline, driver.log_tail()
            states.add(_read_target(url))
            if len(states) == 15:
                driver.kill()
                driver.launch(_JOB, arguments, {})
                states.add((0,))
    finally:
        transfers.stop()
    states.discard((0,))
    assert {state[:2] for state in states} == {(2 * _ACCOUNTS, 2 * _ACCOUNTS * _BALANCE)}
    _await(lambda: _is_equal(url), driver)
    assert transfers.count > 100
