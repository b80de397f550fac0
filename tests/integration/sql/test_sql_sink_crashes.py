"""A job killed with SIGKILL at every step, and started again, leaves each row there once."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from tests.integration.killed_jobs import Attempt, KilledJob, finished
from tests.integration.sql import sql_sink_job
from tests.integration.sql.databases import DATABASES, Database, MariaDB, MySQL, Postgres
from tests.integration.sql.sql_sink_job import KEYS

_ROWS = 200
_MANY_ROWS = 8_000
_KILLS = 4


class Runs(KilledJob):
    """The attempts of one job that writes to a database."""

    def __init__(self, database: Database, directory: Path) -> None:
        super().__init__(sql_sink_job.main, directory)
        self.database = database

    def start(self, mode: str, *crash: str, rows: int = _ROWS) -> Attempt:
        return self.start_with(self.database.url, self.log.path, rows, mode, *crash)

    def run(self, mode: str, *crash: str, rows: int = _ROWS) -> int:
        """Return how the attempt ended: 0, or minus SIGKILL."""
        return finished(self.start(mode, *crash, rows=rows))

    def changed(self) -> dict[int, int]:
        return dict(self.database.query("SELECT id, amount FROM ledger"))

    def assert_exactly_once(self, mode: str, rows: int = _ROWS) -> None:
        if "upsert" in mode:
            assert self.changed() == _as_of(rows)
        else:
            assert self.database.ids_in() == list(range(rows))
        assert self.database.prepared() == []
        assert list(self.log.path.rglob("*.arrow")) == [], "nothing staged is left behind"
        # Pruned as it goes: two rows of the last checkpoint.
        assert len(self.database.ledger_rows()) == 2


@pytest.fixture
def runs(database: Database, tmp_path: Path) -> Iterator[Runs]:
    with Runs(database, tmp_path) as made:
        yield made


_POINTS = ["write", "flushed", "prepared", "logged", "commit", "committed"]
_STEPS = [
    ("exactly_once", "prepared", 1),
    *(("exactly_once", point, 3) for point in _POINTS),
    # Killed at `replied`, ledger mode has committed rows that are staged still.
    *(("ledger", point, 3) for point in ("flushed", "prepared", "commit", "replied")),
    *(("upsert", point, 3) for point in ("flushed", "prepared", "commit")),
    *(("ledger_upsert", point, 3) for point in ("commit", "replied")),
]
# Each step on Postgres in one mode; where the others differ: how what is prepared outlives its
# session, and is ended.
_TELLING: dict[type[Database], set[tuple[str, str, int]]] = {
    Postgres: {
        *(("exactly_once", "prepared", 1), *(("exactly_once", point, 3) for point in _POINTS)),
        *(("ledger", point, 3) for point in ("prepared", "commit", "replied")),
        *(("upsert", "prepared", 3), ("ledger_upsert", "commit", 3)),
    },
    MySQL: {
        *(("exactly_once", "prepared", 3), ("exactly_once", "committed", 3)),
        *(("ledger", "commit", 3), ("upsert", "prepared", 3)),
    },
    MariaDB: {("exactly_once", point, 3) for point in ("prepared", "committed")},
}
_OWN_OF_MYSQL = ("exactly_once", "prepared", 3)
"""Of its steps the one that is not the common code's: a session that has prepared dies."""


def _tier(kind: type[Database], step: tuple[str, str, int]) -> Sequence[pytest.MarkDecorator]:
    if step not in _TELLING[kind]:
        return (pytest.mark.slow,)
    return () if kind is Postgres or step == _OWN_OF_MYSQL else (pytest.mark.servers,)


_CASES = [
    pytest.param(
        kind,
        *step,
        id="-".join(map(str, (kind.name, *step))),
        marks=_tier(kind, step),
    )
    for kind in DATABASES
    for step in _STEPS
]


@pytest.mark.parametrize(("kind", "mode", "point", "checkpoint"), _CASES, indirect=["kind"])
def test_job_killed_at_a_step_writes_each_row_once(
    runs: Runs, database: Database, mode: str, point: str, checkpoint: int
) -> None:
    _kill_and_repeat(runs, database, mode, point, checkpoint)


@pytest.mark.servers
@pytest.mark.parametrize("kind", [MySQL], indirect=True)
@pytest.mark.parametrize("point", ["flushed", "prepared", "commit"])
def test_job_killed_with_changes_sent_column_by_column_makes_each_once(
    runs: Runs, database: Database, point: str
) -> None:
    _kill_and_repeat(runs, database, "upsert_columns", point, 3)


def _kill_and_repeat(
    runs: Runs, database: Database, mode: str, point: str, checkpoint: int
) -> None:
    assert runs.run(mode, f"{point}@{checkpoint}") == -signal.SIGKILL
    decided = runs.log.decided()
    assert decided == checkpoint - (point in ("write", "flushed", "prepared"))
    if "upsert" in mode:
        states = [_as_of_subtasks(decided, first) for first in (0, 1, 2)]
        assert runs.changed() in states, "whole checkpoints, and none undecided"
    else:
        seen = database.ids_in()
        assert len(seen) == len(set(seen)), "nothing doubled while it was down"
        assert set(seen) <= set(range(decided * 40)), "nothing undecided is seen"
    assert runs.run(mode) == 0
    runs.assert_exactly_once(mode)


def test_at_least_once_job_killed_before_its_decision_doubles_rows(
    runs: Runs, database: Database
) -> None:
    """The same kill that exactly-once survives: what the two guarantees differ in."""
    assert runs.run("at_least_once", "prepared@3") == -signal.SIGKILL
    assert runs.run("at_least_once") == 0
    seen = database.ids_in()
    assert set(seen) == set(range(_ROWS))
    assert len(seen) > _ROWS


@pytest.mark.parametrize(
    ("kind", "mode", "seed"),
    [
        pytest.param(
            kind,
            mode,
            seed,
            id=f"{kind.name}-{mode}-{seed}",
            # The servers of the others are killed by the kit, and their jobs at steps.
            marks=() if seed == 1 and kind is Postgres else pytest.mark.slow,
        )
        for kind in DATABASES
        for mode, seed in (("exactly_once", 1), ("exactly_once", 2), ("ledger", 3), ("upsert", 4))
    ],
    indirect=["kind"],
)
@pytest.mark.only_proof
def test_job_and_server_killed_at_random_moments_write_each_row_once(
    kind: type[Database], tmp_path: Path, mode: str, seed: int
) -> None:
    """Set ONCEFLOW_TEST_SEED to run another schedule.

    Each attempt decides something before it is struck: all of them settle what the last one left.
    """
    seed = int(os.environ.get("ONCEFLOW_TEST_SEED", seed))
    sys.stdout.write(f"seed {seed}\n")
    schedule = random.Random(seed)
    with kind.server() as server, Runs(kind.create(server, "soak"), tmp_path) as runs:
        for attempt in range(1, _KILLS + 1):
            process = runs.start(mode, rows=_MANY_ROWS)
            _wait_for_decision(runs, process)
            time.sleep(schedule.uniform(0.0, 0.2))
            assert process.poll() is None, f"done before kill {attempt}, seed {seed}"
            if schedule.random() < 0.4:
                server.kill()
                process.kill()
                server.start()
            else:
                process.kill()
            process.wait()  # it may have met its dead server before
        assert runs.run(mode, rows=_MANY_ROWS) == 0
        runs.assert_exactly_once(mode, _MANY_ROWS)


def _as_of(rows: int) -> dict[int, int]:
    """Return the table after the first `rows` changes, one by one."""
    table: dict[int, int] = {}
    for number in range(rows):
        if number % 3 == 0:
            table.pop(number % KEYS, None)
        else:
            table[number % KEYS] = number
    return table


def _as_of_subtasks(decided: int, committed: int) -> dict[int, int]:
    """Return the table when so many subtasks have committed the last decided checkpoint."""
    before, after = _as_of((decided - 1) * 40), _as_of(decided * 40)
    return {
        key: state[key]
        for key in range(KEYS)
        if key in (state := after if key % 2 < committed else before)
    }


def _wait_for_decision(runs: Runs, process: Attempt) -> None:
    before, deadline = runs.log.decided(), time.monotonic() + 60
    while runs.log.decided() <= before:
        assert process.poll() is None, process.errors
        assert time.monotonic() < deadline
        time.sleep(0.005)
