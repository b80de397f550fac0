"""Savepoints of running jobs: what they hold, what they commit, and how a job begins from one."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.clusters import AnyCluster
from tests.support.counting_source import CountingSource
from tests.support.failing_once import FailingOnceStorage
from tests.support.ledger import assert_exactly_once, ledger

from onceflow import HeapBackend, JobState, RocksDBBackend
from onceflow.core.api.pipeline import Job
from onceflow.core.errors import CheckpointCorrupt, SavepointRefused, StorageError
from onceflow.core.runtime.events.status import JobStatus
from onceflow.core.state import StateBackend


def _await(job: Job, what: Callable[[JobStatus], bool], timeout_s: float = 90.0) -> JobStatus:
    deadline = time.monotonic() + timeout_s
    while not what(status := job.status()):
        assert not status.state.ended, status.last_error
        assert time.monotonic() < deadline, status
        time.sleep(0.01)
    return status


def _source(tmp_path: Path) -> CountingSource:
    return CountingSource(6_000, pause_s=0.002, ends_with=str(tmp_path / "read all"))


@pytest.mark.parametrize(
    ("before", "after", "parallelism"),
    [
        pytest.param(HeapBackend(), RocksDBBackend(), (2, 3), id="heap-to-rocksdb-2-to-3"),
        pytest.param(RocksDBBackend(), HeapBackend(), (2, 1), id="rocksdb-to-heap-2-to-1"),
    ],
)
def test_a_savepoint_that_was_moved_restores_another_backend_at_another_parallelism(
    cluster: AnyCluster,
    tmp_path: Path,
    before: StateBackend,
    after: StateBackend,
    parallelism: tuple[int, int],
) -> None:
    """Stop with savepoint, move it, delete the job's storage, go on from it: every row once."""
    source = _source(tmp_path)
    pipeline, sink = ledger(
        cluster, tmp_path, source, backend=before, parallelism=parallelism[0], max_parallelism=8
    )
    job = pipeline.start()
    _await(job, lambda status: status.checkpoints_completed >= 2)
    status = job.stop(60, savepoint=str(tmp_path / "kept"))
    assert status.state is JobState.STOPPED
    place = status.savepoints[-1].place
    assert sink.prepared() == []
    moved = tmp_path / "elsewhere" / "renamed"
    moved.parent.mkdir()
    shutil.move(place, moved)
    shutil.rmtree(tmp_path / "checkpoints" / "ledger")
    (tmp_path / "read all").touch()
    pipeline, _ = ledger(
        cluster, tmp_path, source, sink=sink, backend=after, parallelism=parallelism[1]
    )
    status = pipeline.start(from_savepoint=str(moved)).wait(60)
    assert (status.state, status.restored_savepoint) == (JobState.FINISHED, str(moved))
    assert_exactly_once(sink, source)
    assert moved.is_dir(), "no claim: the savepoint stays the user's"


def test_a_native_savepoint_restores_on_the_same_backend_and_is_refused_by_another(
    cluster: AnyCluster, tmp_path: Path
) -> None:
    """Taken while the job runs and as it stops; moved; restored at another parallelism."""
    source = _source(tmp_path)
    pipeline, sink = ledger(
        cluster,
        tmp_path,
        source,
        backend=RocksDBBackend(),
        max_parallelism=8,
        inline_threshold_bytes=100,
    )
    job = pipeline.start()
    _await(job, lambda status: status.checkpoints_completed >= 2)
    first = Path(job.savepoint(str(tmp_path / "kept"), form="native"))
    assert list((first / "state").glob("*sst*")), "RocksDB's own files"
    # Checkpoints go on with files of their own, whatever becomes of the savepoint.
    shutil.rmtree(first)
    before = job.status().checkpoints_completed
    _await(job, lambda status: status.checkpoints_completed >= before + 2)
    os.kill(job.status().slots[0].pid, signal.SIGKILL)
    _await(job, lambda status: len(status.attempts) == 2 and status.state is JobState.RUNNING)
    status = job.stop(60, savepoint=str(tmp_path / "kept"), form="native")
    moved = tmp_path / "renamed"
    shutil.move(status.savepoints[-1].place, moved)
    shutil.rmtree(tmp_path / "checkpoints" / "ledger")
    other, _ = ledger(cluster, tmp_path, source, sink=sink, backend=HeapBackend())
    with pytest.raises(SavepointRefused, match=r"native form of state backend 'rocksdb'"):
        other.start(from_savepoint=str(moved)).wait(60)
    assert not (tmp_path / "checkpoints" / "ledger" / "log").exists(), "nothing was decided"
    (tmp_path / "read all").touch()
    again, _ = ledger(cluster, tmp_path, source, sink=sink, backend=RocksDBBackend(), parallelism=3)
    status = again.start(from_savepoint=str(moved)).wait(60)
    assert (status.state, status.restored_savepoint) == (JobState.FINISHED, str(moved))
    assert_exactly_once(sink, source)


def test_a_savepoint_commits_nothing_and_the_job_goes_on(
    cluster: AnyCluster, tmp_path: Path
) -> None:
    source = _source(tmp_path)
    pipeline, sink = ledger(cluster, tmp_path, source, interval=None)
    job = pipeline.start()
    _await(job, lambda status: status.records_in > 500)
    place = job.savepoint()
    assert sink.rows() == []
    assert sink.prepared() != []
    assert job.status().checkpoints_completed == 0
    assert Path(place).parent == tmp_path / "checkpoints" / "ledger" / "savepoints"
    (tmp_path / "read all").touch()
    assert job.wait(60).state is JobState.FINISHED
    assert_exactly_once(sink, source)


def test_a_drained_job_has_finished_with_all_that_it_has_read(
    cluster: AnyCluster, tmp_path: Path
) -> None:
    source = _source(tmp_path)
    pipeline, sink = ledger(cluster, tmp_path, source)
    job = pipeline.start()
    _await(job, lambda status: status.checkpoints_completed >= 1)
    status = job.stop(60, savepoint=True, drain=True)
    assert status.state is JobState.FINISHED
    assert status.savepoints[-1].kind == "savepoint_drain"
    assert sink.prepared() == []
    assert sink.rows()


def test_a_savepoint_older_than_the_last_decision_is_refused_and_says_what_was_committed(
    cluster: AnyCluster, tmp_path: Path
) -> None:
    source = CountingSource(40_000)
    # Most of it is left when the job is stopped.
    pipeline, sink = ledger(cluster, tmp_path, replace(source, pause_s=0.05))
    job = pipeline.start()
    _await(job, lambda status: status.checkpoints_completed >= 1)
    place = job.savepoint()
    before = job.status().checkpoints_completed
    _await(job, lambda status: status.checkpoints_completed >= before + 3)
    job.stop(60)
    pipeline, sink = ledger(cluster, tmp_path, source)
    with pytest.raises(SavepointRefused, match=r"were committed since.*allow_rewind=True"):
        pipeline.start(from_savepoint=place).wait(60)
    assert len(sink.rows()) < 40_000, "a refused start runs nothing"
    status = pipeline.start(from_savepoint=place, claim=True, allow_rewind=True).wait(60)
    assert status.state is JobState.FINISHED
    ids = [row["id"] for row in sink.rows()]
    assert set(ids) == set(range(40_000))
    assert len(ids) > 40_000, "what was committed since came again, as was allowed"
    assert not Path(place).exists(), "claimed"


def test_a_start_from_a_savepoint_that_is_repeated_goes_on_from_the_log(
    cluster: AnyCluster, tmp_path: Path
) -> None:
    """A supervisor repeats the same command after a crash, or after the end."""
    source = _source(tmp_path)
    pipeline, sink = ledger(cluster, tmp_path, source)
    job = pipeline.start()
    _await(job, lambda status: status.checkpoints_completed >= 1)
    place = job.stop(60, savepoint=True).savepoints[-1].place
    job = pipeline.start(from_savepoint=place, claim=True)
    _await(job, lambda status: status.checkpoints_completed >= 2)
    os.kill(job.status().slots[0].pid, signal.SIGKILL)
    _await(job, lambda status: len(status.attempts) == 2 and status.state is JobState.RUNNING)
    job.cancel()
    (tmp_path / "read all").touch()
    status = pipeline.start(from_savepoint=place, claim=True).wait(60)
    assert status.state is JobState.FINISHED
    assert_exactly_once(sink, source)


def test_a_claimed_savepoint_outlives_a_start_whose_first_decision_fails(
    cluster: AnyCluster, tmp_path: Path
) -> None:
    source = _source(tmp_path)
    pipeline, sink = ledger(cluster, tmp_path, source, inline_threshold_bytes=0)
    job = pipeline.start()
    _await(job, lambda status: status.checkpoints_completed >= 1)
    place = job.stop(60, savepoint=str(tmp_path / "kept")).savepoints[-1].place
    (tmp_path / "read all").touch()
    storage = FailingOnceStorage(str(tmp_path / "new"), faults=str(tmp_path / "faults"))
    # The first record is the claim.
    storage.fail("create", r"/log/0*2\.json")
    pipeline, _ = ledger(cluster, tmp_path, source, sink=sink, storage=storage)
    status = pipeline.start(from_savepoint=place, claim=True).wait(60)
    assert (status.state, status.restored_savepoint) == (JobState.FINISHED, place)
    assert storage.list_due() == []
    assert_exactly_once(sink, source)
    assert not Path(place).exists(), "claimed"


def test_savepoints_that_are_asked_for_at_once_are_taken_one_after_the_other(
    cluster: AnyCluster, tmp_path: Path
) -> None:
    source = _source(tmp_path)
    pipeline, sink = ledger(cluster, tmp_path, source)
    job = pipeline.start()
    _await(job, lambda status: status.records_in > 0)
    with ThreadPoolExecutor(3) as users:
        asked = [users.submit(job.savepoint, timeout_s=30) for _ in range(3)]
        places = [one.result() for one in asked]
    taken = job.status().savepoints
    assert sorted(one.place for one in taken) == sorted(places)
    assert sorted(one.checkpoint for one in taken) == [one.checkpoint for one in taken]
    (tmp_path / "read all").touch()
    assert job.wait(60).state is JobState.FINISHED
    assert_exactly_once(sink, source)


def test_a_place_that_cannot_be_written_fails_the_request_and_not_the_job(
    cluster: AnyCluster, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("no directory")
    source = _source(tmp_path)
    pipeline, sink = ledger(cluster, tmp_path, source)
    job = pipeline.start()
    _await(job, lambda status: status.records_in > 0)
    with pytest.raises(StorageError, match="file"):
        job.savepoint(str(tmp_path / "file"))
    with pytest.raises(StorageError, match="file"):
        job.stop(savepoint=str(tmp_path / "file"))
    (tmp_path / "read all").touch()
    status = job.wait(60)
    assert (status.state, status.restores) == (JobState.FINISHED, 0)
    assert_exactly_once(sink, source)


def test_a_savepoint_with_a_damaged_missing_or_foreign_part_is_refused_by_name(
    cluster: AnyCluster, tmp_path: Path
) -> None:
    source = _source(tmp_path)
    pipeline, sink = ledger(cluster, tmp_path, source, inline_threshold_bytes=0)
    job = pipeline.start()
    _await(job, lambda status: status.checkpoints_completed >= 1)
    place = Path(job.stop(60, savepoint=True).savepoints[-1].place)
    state = sorted((place / "state").iterdir())
    whole = state[0].read_bytes()
    state[0].write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(CheckpointCorrupt, match="is damaged"):
        pipeline.start(from_savepoint=str(place)).wait(60)
    state[0].unlink()
    with pytest.raises(CheckpointCorrupt, match="is gone"):
        pipeline.start(from_savepoint=str(place)).wait(60)
    state[0].write_bytes(whole)
    metadata = (place / "_metadata").read_bytes()
    (place / "_metadata").write_bytes(metadata.replace(b'"ledger"', b'"ledges"', 1))
    with pytest.raises(CheckpointCorrupt, match="_metadata is damaged"):
        pipeline.start(from_savepoint=str(place)).wait(60)
    (place / "_metadata").unlink()
    with pytest.raises(SavepointRefused, match="was never finished"):
        pipeline.start(from_savepoint=str(place)).wait(60)
    with pytest.raises(SavepointRefused, match="is not there"):
        pipeline.start(from_savepoint=str(tmp_path / "nowhere")).wait(60)
    (place / "_metadata").write_bytes(metadata)
    other, _ = ledger(cluster, tmp_path, source, name="other")
    with pytest.raises(
        SavepointRefused, match="of job 'ledger' belongs to another job than 'other'"
    ):
        other.start(from_savepoint=str(place)).wait(60)
    (tmp_path / "read all").touch()
    assert pipeline.start(from_savepoint=str(place)).wait(60).state is JobState.FINISHED
    assert_exactly_once(sink, source)
