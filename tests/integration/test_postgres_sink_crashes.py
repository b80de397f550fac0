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
from tests.integration.postgres_sink_kit import ids_in, ledger_rows, prepared

from onceflow.core.crash_points import VARIABLE
from onceflow.integration.servers import EmbeddedPostgres

_PROGRAM = Path(__file__).with_name("postgres_sink_job.py")
_ROOT = _PROGRAM.parents[2]
_ROWS = 200
_MANY_ROWS = 10_000
_KILLS = 4


def _start(
    url: str, log: Path, *crash: str, delivery: str = "exactly_once", rows: int = _ROWS
) -> subprocess.Popen[bytes]:
    points = log.parent / "crash-points"
    points.mkdir(exist_ok=True)
    log.mkdir(exist_ok=True)
    return subprocess.Popen(
        [sys.executable, str(_PROGRAM), url, str(log), str(rows), delivery, *crash],
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


def _assert_exactly_once(url: str, rows: int = _ROWS) -> None:
    assert ids_in(url) == list(range(rows))
    assert prepared(url) == []
    # Pruned as it goes: two rows of the last checkpoint.
    assert len(ledger_rows(url)) == 2


@pytest.mark.parametrize("checkpoint", [1, 3])
@pytest.mark.parametrize("point", ["write", "flushed", "prepared", "logged", "commit", "committed"])
def test_job_killed_at_a_step_writes_each_row_once(
    postgres_database: str, tmp_path: Path, point: str, checkpoint: int
) -> None:
    log = tmp_path / "log"
    assert _finish(_start(postgres_database, log, f"{point}@{checkpoint}")) == -signal.SIGKILL
    decided = len(list(log.glob("decision-*")))
    assert decided == checkpoint - (point in ("write", "flushed", "prepared"))
    seen = ids_in(postgres_database)
    assert len(seen) == len(set(seen)), "nothing doubled while it was down"
    assert set(seen) <= set(range(decided * 40)), "nothing undecided is seen"
    assert _finish(_start(postgres_database, log)) == 0
    _assert_exactly_once(postgres_database)


def test_at_least_once_job_killed_before_its_decision_doubles_rows(
    postgres_database: str, tmp_path: Path
) -> None:
    """The same kill that exactly-once survives: what the two guarantees differ in."""
    log = tmp_path / "log"
    crash = _start(postgres_database, log, "prepared@3", delivery="at_least_once")
    assert _finish(crash) == -signal.SIGKILL
    assert _finish(_start(postgres_database, log, delivery="at_least_once")) == 0
    seen = ids_in(postgres_database)
    assert set(seen) == set(range(_ROWS))
    assert len(seen) > _ROWS


@pytest.mark.parametrize("seed", [1, 2])
def test_job_and_server_killed_at_any_moment_write_each_row_once(tmp_path: Path, seed: int) -> None:
    """Set ONCEFLOW_TEST_SEED to run another schedule."""
    seed = int(os.environ.get("ONCEFLOW_TEST_SEED", seed))
    sys.stdout.write(f"seed {seed}\n")
    schedule = random.Random(seed)
    log = tmp_path / "log"
    with EmbeddedPostgres() as server:
        for attempt in range(1, _KILLS + 1):
            process = _start(server.url, log, rows=_MANY_ROWS)
            _wait_for(log / f"attempt-{attempt:06d}")
            time.sleep(schedule.uniform(0.0, 0.5))
            assert process.poll() is None, f"done before kill {attempt}, seed {seed}"
            if schedule.random() < 0.4:
                server.kill()
                process.kill()
                server.start()
            else:
                process.kill()
            _finish(process)
        assert _finish(_start(server.url, log, rows=_MANY_ROWS)) == 0
        _assert_exactly_once(server.url, _MANY_ROWS)


def _wait_for(path: Path) -> None:
    deadline = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
