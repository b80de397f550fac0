"""Whole jobs that end with an error, and users who do what the error says: nothing is lost."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.integration import postgres_sink_kit as postgres
from tests.support.driver_process import DriverProcess

from onceflow.integration.faults import processes
from onceflow.integration.servers.postgres import EmbeddedPostgres

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

_PROGRAM = "tests.support.changes_job_process"
_TIMEOUT_S = 90
_MANY_ROWS = 40_000


def _await(condition: Callable[[], bool], driver: DriverProcess) -> None:
    deadline = time.monotonic() + _TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, driver.log_tail()
        time.sleep(0.1)


def _rows(url: str, table: str) -> list[tuple[Any, ...]]:
    return postgres.query(url, f"SELECT id, v FROM {table} ORDER BY id")


def _create(url: str, rows: int) -> None:
    postgres.query(
        url,
        "CREATE TABLE original (id bigint PRIMARY KEY, v text)",
        "CREATE TABLE copy (id bigint PRIMARY KEY, v text)",
        f"INSERT INTO original SELECT i, 'copied' FROM generate_series(1, {rows}) i",
    )


_DROP = re.compile(
    r"Drop the slot \((SELECT pg_drop_replication_slot\('\w+'\))\), empty the target, and start the"
    " job under another name and with first_copy='all'"
)
_LOST = "To copy the table again, empty the target, and start the job under another name"


@pytest.mark.parametrize("cause", ["truncated", "slot lost"])
def test_a_table_is_copied_anew_as_the_error_says(
    server: EmbeddedPostgres, driver: DriverProcess, tmp_path: Path, cause: str
) -> None:
    url = server.url
    _create(url, 50)
    driver.launch(_PROGRAM, [tmp_path, "--url", url], {})
    _await(lambda: _rows(url, "copy") == _rows(url, "original"), driver)
    if cause == "truncated":
        postgres.query(url, "TRUNCATE original")
    else:
        slots = processes.children_of(driver.pid)
        driver.kill()
        # A slot that outlives its driver for a moment may open the stream once more.
        for slot in slots:
            processes.kill_process(slot)
        active = "SELECT FROM pg_replication_slots WHERE active"
        _await(lambda: not postgres.query(url, active), driver)
        postgres.query(url, "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots")
        driver.launch(_PROGRAM, [tmp_path, "--url", url], {})
    postgres.query(
        url,
        "INSERT INTO original SELECT i, 'anew' FROM generate_series(40, 90) i"
        " ON CONFLICT DO NOTHING",
    )
    _await(lambda: driver.exit_status is not None, driver)
    log = driver.log_path.read_text()
    advice = _DROP.search(log)
    if cause == "truncated":
        assert advice is not None, driver.log_tail()
        postgres.query(url, advice[1])
    else:
        assert _LOST in log, driver.log_tail()
    postgres.query(url, "DELETE FROM copy")
    driver.launch(_PROGRAM, [tmp_path, "--url", url, "--name", "other"], {})
    _await(lambda: _rows(url, "copy") == _rows(url, "original"), driver)
    postgres.query(url, "UPDATE original SET v = 'followed' WHERE id % 2 = 0")
    _await(lambda: _rows(url, "copy") == _rows(url, "original"), driver)


def test_a_copy_alone_that_was_killed_ends_by_name_and_is_copied_anew_as_the_error_says(
    server: EmbeddedPostgres, driver: DriverProcess, tmp_path: Path
) -> None:
    """The other rows would be of another moment, unless nothing was written in between."""
    url = server.url
    _create(url, _MANY_ROWS)
    arguments: list[str | Path] = [tmp_path, "--url", url, "--first-copy", "only"]
    driver.launch(_PROGRAM, arguments, {})
    _await(lambda: postgres.query(url, "SELECT count(*) FROM copy")[0][0] > 0, driver)
    for slot in processes.children_of(driver.pid):
        processes.kill_process(slot)
    driver.kill()
    copied = postgres.query(url, "SELECT count(*) FROM copy")[0][0]
    postgres.query(url, "UPDATE original SET v = 'later'")
    driver.launch(_PROGRAM, arguments, {})
    _await(lambda: driver.exit_status is not None, driver)
    assert 0 < copied < _MANY_ROWS
    assert driver.exit_status != 0
    log = driver.log_path.read_text()
    assert "Empty the target, and start the job under another name" in log
    postgres.query(url, "DELETE FROM copy")
    driver.launch(_PROGRAM, [*arguments, "--name", "other"], {})
    _await(lambda: driver.exit_status is not None, driver)
    assert driver.exit_status == 0, driver.log_tail()
    assert _rows(url, "copy") == _rows(url, "original")
