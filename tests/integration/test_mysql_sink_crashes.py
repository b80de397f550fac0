"""A job killed with SIGKILL at every step, and started again, leaves each row there once."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.integration.mysql_sink_kit import FLAVORS, ids_in, ledger_rows, prepared, query
from tests.integration.sql_sink_job import KEYS

from onceflow.core.crash_points import VARIABLE
from onceflow.integration.servers import EmbeddedMariaDB, EmbeddedMySQL

_PROGRAM = Path(__file__).with_name("sql_sink_job.py")
_ROOT = _PROGRAM.parents[2]
_ROWS = 200
_MANY_ROWS = 8_000
_KILLS = 4


def _start(
    url: str, log: Path, *crash: str, kind: str = "exactly_once", rows: int = _ROWS
) -> subprocess.Popen[bytes]:
    points = log.parent / "crash-points"
    points.mkdir(exist_ok=True)
    log.mkdir(exist_ok=True)
    return subprocess.Popen(
        [sys.executable, str(_PROGRAM), url, str(log), str(rows), kind, *crash],
        env={
            **os.environ,
            VARIABLE: str(points),
            "PYTHONPATH": os.pathsep.join([str(_ROOT / "src"), str(_ROOT)]),
        },
        stderr=subprocess.PIPE,
    )


def _finish(process: subprocess.Popen[bytes]) -> int:
    _, errors = process.communicate(timeout=90)
    assert process.returncode in (0, -signal.SIGKILL), errors.decode()
    return process.returncode


def _assert_exactly_once(url: str, log: Path, kind: str, rows: int = _ROWS) -> None:
    if "upsert" in kind:
        assert _changed(url) == _as_of(rows)
    else:
        assert ids_in(url) == list(range(rows))
    assert prepared(url) == []
    assert list(log.rglob("*.arrow")) == [], "nothing staged is left behind"
    # Pruned as it goes: two rows of the last checkpoint.
    assert len(ledger_rows(url)) == 2


def _changed(url: str) -> dict[int, int]:
    return dict(query(url, "SELECT id, amount FROM ledger"))


def _as_of(rows: int) -> dict[int, int]:
    """Return the table after the first `rows` changes, one by one."""
    table: dict[int, int] = {}
    for number in range(rows):
        if number % 3 == 0:
            table.pop(number % KEYS, None)
        else:
            table[number % KEYS] = number
    return table


_POINTS = ["write", "flushed", "prepared", "logged", "commit", "committed"]
_STEPS = [
    ("exactly_once", "prepared", 1),
    *(("exactly_once", point, 3) for point in _POINTS),
    # Killed at `replied`, ledger mode has committed rows that are staged still.
    *(("ledger", point, 3) for point in ("flushed", "prepared", "commit", "replied")),
    *(("upsert", point, 3) for point in ("flushed", "prepared", "commit")),
    *(("ledger_upsert", point, 3) for point in ("commit", "replied")),
]


_CASES = [
    pytest.param(
        flavor,
        *step,
        # What the servers differ in is how prepared transactions outlive their session.
        marks=pytest.mark.slow if flavor == "mariadb" and step[0] != "exactly_once" else (),
    )
    for flavor in FLAVORS
    for step in _STEPS
]


@pytest.fixture(params=FLAVORS)
def url(request: pytest.FixtureRequest) -> str:
    """URL of a new database, of both servers in turn."""
    found: str = request.getfixturevalue(f"{request.param}_database")
    return found


@pytest.mark.parametrize(("url", "kind", "point", "checkpoint"), _CASES, indirect=["url"])
def test_job_killed_at_a_step_writes_each_row_once(
    url: str, tmp_path: Path, kind: str, point: str, checkpoint: int
) -> None:
    log = tmp_path / "log"
    crash = f"{point}@{checkpoint}"
    assert _finish(_start(url, log, crash, kind=kind)) == -signal.SIGKILL
    decided = len(list(log.glob("decision-*")))
    assert decided == checkpoint - (point in ("write", "flushed", "prepared"))
    if "upsert" in kind:
        states = [_as_of_subtasks(decided, first) for first in (0, 1, 2)]
        assert _changed(url) in states, "whole checkpoints, and none undecided"
    else:
        seen = ids_in(url)
        assert len(seen) == len(set(seen)), "nothing doubled while it was down"
        assert set(seen) <= set(range(decided * 40)), "nothing undecided is seen"
    assert _finish(_start(url, log, kind=kind)) == 0
    _assert_exactly_once(url, log, kind)


def _as_of_subtasks(decided: int, committed: int) -> dict[int, int]:
    """Return the table when so many subtasks have committed the last decided checkpoint."""
    before, after = _as_of((decided - 1) * 40), _as_of(decided * 40)
    return {
        key: state[key]
        for key in range(KEYS)
        if key in (state := after if key % 2 < committed else before)
    }


def test_at_least_once_job_killed_before_its_decision_doubles_rows(
    url: str, tmp_path: Path
) -> None:
    """The same kill that exactly-once survives: what the two guarantees differ in."""
    log = tmp_path / "log"
    crash = _start(url, log, "prepared@3", kind="at_least_once")
    assert _finish(crash) == -signal.SIGKILL
    assert _finish(_start(url, log, kind="at_least_once")) == 0
    seen = ids_in(url)
    assert set(seen) == set(range(_ROWS))
    assert len(seen) > _ROWS


@pytest.mark.parametrize(
    ("kind", "seed"),
    [
        ("exactly_once", 1),
        pytest.param("ledger", 2, marks=pytest.mark.slow),
        pytest.param("upsert", 3, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("embedded", [EmbeddedMySQL, EmbeddedMariaDB])
def test_job_and_server_killed_at_any_moment_write_each_row_once(
    tmp_path: Path, embedded: type[EmbeddedMySQL] | type[EmbeddedMariaDB], kind: str, seed: int
) -> None:
    """Set ONCEFLOW_TEST_SEED to run another schedule.

    Each attempt decides something before it is struck: all of them settle what the last one left.
    """
    seed = int(os.environ.get("ONCEFLOW_TEST_SEED", seed))
    sys.stdout.write(f"seed {seed}\n")
    schedule = random.Random(seed)
    log = tmp_path / "log"
    with embedded() as server:
        query(server.url, "CREATE DATABASE soak")
        url = server.database_url("soak")
        for attempt in range(1, _KILLS + 1):
            process = _start(url, log, kind=kind, rows=_MANY_ROWS)
            _wait_for_decision(log, process)
            time.sleep(schedule.uniform(0.0, 0.2))
            assert process.poll() is None, f"done before kill {attempt}, seed {seed}"
            if schedule.random() < 0.4:
                server.kill()
                process.kill()
                server.start()
            else:
                process.kill()
            _finish(process)
        assert _finish(_start(url, log, kind=kind, rows=_MANY_ROWS)) == 0
        _assert_exactly_once(url, log, kind, _MANY_ROWS)


def _decided(log: Path) -> int:
    return len(list(log.glob("decision-*")))


def _wait_for_decision(log: Path, process: subprocess.Popen[bytes]) -> None:
    before, deadline = _decided(log), time.monotonic() + 60
    while _decided(log) <= before:
        assert process.poll() is None, process.communicate()[1].decode()
        assert time.monotonic() < deadline
        time.sleep(0.005)
