"""A job into a Delta Lake table, killed in the middle: each row once, one version a checkpoint."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from examples.delta_sink import DeltaSink
from tests.support.clusters import AnyCluster
from tests.support.counting_source import CountingSource
from tests.support.moving_job import MovingJob, refuse_an_older_copy, refuse_an_older_savepoint

from onceflow import Checkpointing, FixedDelay, HeapBackend, JobState, Pipeline
from onceflow.core.api.pipeline import Job


@dataclass(frozen=True)
class TableTarget:
    """A table, as its readers see it."""

    path: Path

    def sink(self) -> DeltaSink:
        return DeltaSink(str(self.path))

    def ids(self) -> list[int]:
        if not DeltaTable.is_deltatable(str(self.path)):
            return []
        rows: pa.Table = cast("Any", DeltaTable(self.path)).to_pyarrow_table()
        return sorted(rows["id"].to_pylist())


@pytest.mark.servers
def test_a_table_of_whole_checkpoints_tells_that_the_storage_is_an_older_copy(
    cluster: AnyCluster, tmp_path: Path
) -> None:
    refuse_an_older_copy(MovingJob(cluster, tmp_path, TableTarget(tmp_path / "table")), tries=2)


@pytest.mark.servers
def test_a_table_of_whole_checkpoints_tells_what_later_attempts_committed_than_a_savepoint(
    cluster: AnyCluster, tmp_path: Path
) -> None:
    """The number of the checkpoint alone may be one that the savepoint's own job went on to."""
    refuse_an_older_savepoint(MovingJob(cluster, tmp_path, TableTarget(tmp_path / "table")))


def started(cluster: AnyCluster, directory: Path, source: CountingSource) -> Job:
    pipeline = Pipeline(
        cluster,
        name="lake",
        parallelism=2,
        checkpointing=Checkpointing(storage=str(directory / "checkpoints"), interval=0.1),
        state_backend=HeapBackend(),
        restart=FixedDelay(attempts=20, delay_s=0.01),
    )
    records = pipeline.read(source, uid="records")
    records.write(DeltaSink(str(directory / "table")), uid="lake")
    return pipeline.start()


def await_checkpoint(job: Job, number: int) -> None:
    deadline = time.monotonic() + 60
    while job.status().checkpoints_completed < number:
        assert not job.state.ended, job.status().last_error
        assert time.monotonic() < deadline, job.status()
        time.sleep(0.02)


@pytest.mark.servers
def test_job_that_is_killed_makes_one_version_a_checkpoint(
    cluster: AnyCluster, tmp_path: Path
) -> None:
    source = CountingSource(6_000, pause_s=0.05, ends_with=str(tmp_path / "end"))
    job = started(cluster, tmp_path, source)
    await_checkpoint(job, 3)
    os.kill(job.status().slots[1].pid, signal.SIGKILL)
    await_checkpoint(job, 6)
    job.stop()
    job = started(cluster, tmp_path, source)
    await_checkpoint(job, 2)
    (tmp_path / "end").touch()
    ended = job.wait(60)
    assert ended.state is JobState.FINISHED, ended.last_error
    assert_one_version_a_checkpoint(DeltaTable(tmp_path / "table"), source)
    (sink,) = ended.sinks
    assert sink.prepared == 0, sink
    assert sink.committed > 0, sink
    # Told by the driver's committer alone, long after the slots have heard of the decision.
    assert all(one.committed_ms is not None for one in ended.history)


def assert_one_version_a_checkpoint(table: DeltaTable, source: CountingSource) -> None:
    rows: pa.Table = cast("Any", table).to_pyarrow_table()
    seen = Counter(rows["id"].to_pylist())
    assert [record for record, times in seen.items() if times > 1] == []
    assert sorted(seen) == list(range(source.records))
    proofs: list[int] = []
    for version in range(1, table.version() + 1):
        table.load_as_version(version)
        proofs.append(table.transaction_version("lake.lake") or 0)
    assert proofs == sorted(set(proofs)), "each version is another checkpoint's, and they rise"
    assert len(proofs) > 5
