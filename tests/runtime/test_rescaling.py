"""Any checkpoint or savepoint goes on at any parallelism, with a slot killed on the way."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
from tests.support.clusters import AnyCluster
from tests.support.held_up import (
    assert_each_once,
    await_rows_in_flight,
    held_up,
    kill_a_slot,
)
from tests.support.waiting import await_status

from onceflow import HeapBackend, JobState, RocksDBBackend
from onceflow.core.api.pipeline import Job
from onceflow.core.state import StateBackend

Through = Literal["checkpoint", "unaligned checkpoint", "savepoint"]
HEAP, ROCKSDB = HeapBackend(), RocksDBBackend()
WALKS: list[tuple[StateBackend, Through, list[int]]] = [
    (HEAP, "unaligned checkpoint", [1, 2, 4, 1]),
    (ROCKSDB, "checkpoint", [1, 2, 4, 1]),
]
LONGER: list[tuple[StateBackend, Through, list[int]]] = [
    (HEAP, "savepoint", [3, 5]),
    (ROCKSDB, "unaligned checkpoint", [1, 2, 4, 1]),
    (HEAP, "checkpoint", [1, 2, 4, 1]),
    (HEAP, "savepoint", [1, 2, 4, 1]),
    (ROCKSDB, "savepoint", [1, 2, 4, 1]),
    (HEAP, "checkpoint", [3, 5]),
    (ROCKSDB, "checkpoint", [3, 5]),
    (HEAP, "unaligned checkpoint", [3, 5]),
    (ROCKSDB, "savepoint", [3, 5]),
]


def _name(walk: tuple[StateBackend, Through, list[int]]) -> str:
    backend, through, parallelisms = walk
    steps = "-".join(map(str, parallelisms))
    return f"{type(backend).__name__}-{through.replace(' ', '-')}-{steps}"


def _await_state(job: Job, through: Through) -> None:
    """Wait until the attempt that runs has completed a checkpoint of the kind."""
    if through == "unaligned checkpoint":
        await_rows_in_flight(job)
    else:
        await_status(job, lambda s: any(one.attempt == s.attempt for one in s.history))


@pytest.mark.parametrize(
    "walk",
    [
        *(pytest.param(walk, id=_name(walk)) for walk in WALKS),
        *(pytest.param(walk, id=_name(walk), marks=pytest.mark.slow) for walk in LONGER),
    ],
)
@pytest.mark.only_proof
def test_a_job_walks_through_parallelisms_with_every_record_once(
    cluster: AnyCluster, tmp_path: Path, walk: tuple[StateBackend, Through, list[int]]
) -> None:
    """Splits, sums, committables and rows in flight move; each step kills a slot, too."""
    backend, through, parallelisms = walk
    unaligned = through == "unaligned checkpoint"
    savepoint: str | None = None
    sink = held_up(cluster, tmp_path)[1]  # the same for every pipeline
    for step, parallelism in enumerate(parallelisms, start=1):
        pipeline, _ = held_up(
            cluster, tmp_path, parallelism=parallelism, backend=backend, unaligned=unaligned
        )
        job = pipeline.start(from_savepoint=savepoint) if savepoint else pipeline.start()
        _await_state(job, through)
        kill_a_slot(job, step)
        if step == len(parallelisms):
            sink.release()
            assert job.wait(60).state is JobState.FINISHED
        elif through == "savepoint":
            savepoint = job.stop(60, savepoint=str(tmp_path / f"kept-{step}")).savepoints[-1].place
        else:
            _await_state(job, through)
            job.cancel(60)
    assert_each_once(sink)
