"""Whole jobs whose checkpoints are in a bucket of a real S3 server, or in the driver's memory."""

from __future__ import annotations

import os
import signal
import uuid
from pathlib import Path

import pytest
from tests.support.clusters import AnyCluster
from tests.support.counting_source import CountingSource
from tests.support.ledger import assert_exactly_once, ledger
from tests.support.servers.s3 import S3Factory
from tests.support.staged_sink import StagedSink

from onceflow import (
    Checkpointing,
    HeapBackend,
    JobState,
    MemoryStorage,
    NoRestart,
    ObjectStorage,
    Pipeline,
    RocksDBBackend,
)
from onceflow.core.api.pipeline import Job
from onceflow.core.errors import CheckpointCorrupt, ConfigError, SlotLost, StorageError
from onceflow.core.protocol.checkpoints.snapshots import paths_of
from onceflow.core.state import StateBackend
from onceflow.core.storage import CheckpointStorage
from onceflow.core.storage.filesystems.bucket import BucketFiles
from onceflow.core.storage.filesystems.bucket_settings import BucketSettings

ROCKSDB = RocksDBBackend(incremental=True)
SMALL = 100
"""Bytes of state that are held inline: everything of interest becomes an object."""


def _source(tmp_path: Path, *, accounts: int = 100) -> CountingSource:
    """Records that are read until `_finished` says that all are."""
    return CountingSource(
        20_000, pause_s=0.001, accounts=accounts, ends_with=str(tmp_path / "read all")
    )


def _finished(job: Job, tmp_path: Path) -> JobState:
    (tmp_path / "read all").touch()
    return job.wait(60).state


def _kill_a_slot(job: Job) -> None:
    os.kill(job.status().slots[0].pid, signal.SIGKILL)


def _state_objects(url: str, job: str) -> set[str]:
    """Return every object of the job that holds state, relative to its directory."""
    files = BucketFiles(BucketSettings(url))
    paths = (path.removeprefix(f"{job}/") for path in files.visible_files())
    return {path for path in paths if path.startswith(("chk-", "shared/"))}


@pytest.mark.parametrize("backend", [HeapBackend(), ROCKSDB], ids=["heap", "rocksdb"])
def test_a_job_with_its_state_in_a_bucket_survives_kills_and_leaves_no_object_behind(
    cluster: AnyCluster, tmp_path: Path, s3_bucket: str, backend: StateBackend
) -> None:
    source = _source(tmp_path, accounts=3_000)
    storage = ObjectStorage(f"{s3_bucket}/checkpoints", inline_threshold_bytes=SMALL)
    pipeline, sink = ledger(cluster, tmp_path, source, storage=storage, backend=backend)
    job = pipeline.start()
    for completed in (2, 5):
        job.wait_for(checkpoints=completed)
        _kill_a_slot(job)
    job.wait_for(checkpoints=9)
    assert _finished(job, tmp_path) is JobState.FINISHED
    assert job.status().restores == 2
    assert_exactly_once(sink, source)
    # What incremental checkpoints share is there as long as one names it, and no longer.
    view = storage.open("ledger").log.read()
    named = paths_of(s for completed in view.completed for s in completed.snapshots)
    assert _state_objects(storage.url, "ledger") == named
    assert named, "the last checkpoint holds state"


def test_a_job_outlives_an_s3_server_that_is_killed_and_comes_back(
    cluster: AnyCluster, tmp_path: Path, s3_server: S3Factory, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = s3_server()
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    source = _source(tmp_path)
    storage = ObjectStorage(
        f"s3://{server.create_bucket('own')}/x", inline_threshold_bytes=SMALL, retry_timeout=20
    )
    pipeline, sink = ledger(cluster, tmp_path, source, storage=storage)
    job = pipeline.start()
    job.wait_for(checkpoints=2)
    server.kill()
    completed = job.status().checkpoints_completed
    server.start()
    job.wait_for(checkpoints=completed + 3)
    assert _finished(job, tmp_path) is JobState.FINISHED
    assert_exactly_once(sink, source)


def _moved(bucket: str, place: str, prefix: str) -> str:
    """Move the savepoint at `place` to another prefix, object by object; return where it is."""
    source, target = BucketFiles(BucketSettings(place)), f"{bucket}/{prefix}"
    for path in ("_metadata", *(f"state/{name}" for name in source.list("state"))):
        data = source.read(path)
        assert data is not None
        BucketFiles(BucketSettings(target)).write(path, (data,))
    source.delete_tree("")
    return target


def test_a_savepoint_in_a_bucket_that_was_moved_restores_another_backend_in_other_storage(
    cluster: AnyCluster, tmp_path: Path, s3_bucket: str
) -> None:
    """Bucket to bucket by prefix, and from there into a directory: every row once."""
    source = _source(tmp_path, accounts=3_000)
    storage = ObjectStorage(f"{s3_bucket}/first", inline_threshold_bytes=SMALL)
    pipeline, sink = ledger(
        cluster, tmp_path, source, storage=storage, backend=ROCKSDB, max_parallelism=8
    )
    job = pipeline.start()
    job.wait_for(checkpoints=2)
    place = job.stop(60, savepoint=f"{s3_bucket}/kept").savepoints[-1].place
    assert place.startswith(f"{s3_bucket}/kept/savepoint-")
    moved = _moved(s3_bucket, place, "archive/renamed")
    BucketFiles(BucketSettings(storage.url)).delete_tree("")
    second = ObjectStorage(f"{s3_bucket}/second", inline_threshold_bytes=SMALL)
    pipeline, _ = ledger(
        cluster, tmp_path, source, sink=sink, storage=second, backend=HeapBackend(), parallelism=3
    )
    job = pipeline.start(from_savepoint=moved)
    job.wait_for(checkpoints=2)
    status = job.stop(60, savepoint=f"{s3_bucket}/kept")
    assert status.restored_savepoint == moved
    # Into a directory of this machine, whose storage knows nothing of buckets.
    place = status.savepoints[-1].place
    (tmp_path / "read all").touch()
    pipeline, _ = ledger(cluster, tmp_path, source, sink=sink, backend=ROCKSDB, parallelism=1)
    status = pipeline.start(from_savepoint=place, claim=True).wait(60)
    assert (status.state, status.restored_savepoint) == (JobState.FINISHED, place)
    assert BucketFiles(BucketSettings(place)).list("") == (), "claimed"
    assert "_metadata" in BucketFiles(BucketSettings(moved)).list(""), "not claimed"
    assert_exactly_once(sink, source)


def test_objects_of_a_checkpoint_that_somebody_deletes_are_named_at_the_restore(
    cluster: AnyCluster, tmp_path: Path, s3_bucket: str
) -> None:
    source = _source(tmp_path)
    storage = ObjectStorage(s3_bucket, inline_threshold_bytes=SMALL)
    pipeline, sink = ledger(
        cluster, tmp_path, source, storage=storage, interval=None, restart=NoRestart()
    )
    job = pipeline.start()
    job.checkpoint()
    job.wait_for(checkpoints=1)
    files = BucketFiles(BucketSettings(s3_bucket))
    for name in files.list("ledger"):
        if name.startswith("chk-"):
            files.delete_tree(f"ledger/{name}")
    _kill_a_slot(job)
    with pytest.raises(SlotLost):
        job.wait(60)
    again, _ = ledger(cluster, tmp_path, source, storage=storage, sink=sink, restart=NoRestart())
    with pytest.raises(CheckpointCorrupt, match=rf"state file {s3_bucket}/ledger/chk-.* is gone"):
        again.run(60)


def test_rows_are_staged_in_the_bucket_and_applied_once(
    cluster: AnyCluster, tmp_path: Path, s3_bucket: str
) -> None:
    source = _source(tmp_path)
    sink = StagedSink(str(tmp_path / "target.db"))
    pipeline = Pipeline(
        cluster,
        name="staged",
        parallelism=2,
        checkpointing=Checkpointing(storage=f"{s3_bucket}/checkpoints", interval=0.2),
    )
    pipeline.read(source, uid="records").write(sink, uid="target")
    job = pipeline.start()
    job.wait_for(checkpoints=2)
    _kill_a_slot(job)
    job.wait_for(checkpoints=4)
    assert _finished(job, tmp_path) is JobState.FINISHED
    assert sink.ids() == list(range(source.records))
    files = BucketFiles(BucketSettings(f"{s3_bucket}/checkpoints"))
    assert files.list("staged/staged/staged.target") == ()


@pytest.mark.parametrize("backend", [HeapBackend(), ROCKSDB], ids=["heap", "rocksdb"])
def test_a_job_with_its_state_in_the_drivers_memory_survives_a_killed_slot(
    cluster: AnyCluster, tmp_path: Path, backend: StateBackend
) -> None:
    source = _source(tmp_path)
    storage = MemoryStorage()
    pipeline, sink = ledger(cluster, tmp_path, source, storage=storage, backend=backend)
    job = pipeline.start()
    job.wait_for(checkpoints=2)
    _kill_a_slot(job)
    job.wait_for(checkpoints=4)
    assert _finished(job, tmp_path) is JobState.FINISHED
    assert_exactly_once(sink, source)
    assert not (tmp_path / "checkpoints").exists()


def test_state_that_is_too_large_for_the_drivers_memory_says_so(
    cluster: AnyCluster, tmp_path: Path
) -> None:
    source = CountingSource(20_000, accounts=5_000)
    pipeline, _ = ledger(
        cluster,
        tmp_path,
        source,
        storage=MemoryStorage(state_bytes_max=10_000),
        restart=NoRestart(),
    )
    with pytest.raises(
        Exception,
        match=r"state .* has \d+ bytes, but storage in the driver's memory accepts at most 9999",
    ):
        pipeline.run(60)


def test_rows_cannot_be_staged_in_the_drivers_memory(cluster: AnyCluster, tmp_path: Path) -> None:
    pipeline = Pipeline(
        cluster, name="staged", checkpointing=Checkpointing("memory://"), restart=NoRestart()
    )
    sink = StagedSink(str(tmp_path / "target.db"))
    pipeline.read(CountingSource(100), uid="records").write(sink, uid="target")
    with pytest.raises(ConfigError, match="stages rows, which every process of the job must see"):
        pipeline.run(60)


def test_a_checkpoint_directory_that_is_deleted_under_the_job_is_named(
    cluster: AnyCluster, tmp_path: Path
) -> None:
    source = _source(tmp_path)
    pipeline, _ = ledger(cluster, tmp_path, source, restart=NoRestart(), interval=None)
    job = pipeline.start()
    job.checkpoint()
    job.wait_for(checkpoints=1)
    (tmp_path / "checkpoints" / "ledger").rename(tmp_path / "deleted")
    job.checkpoint()
    with pytest.raises(
        CheckpointCorrupt, match=rf"{tmp_path}/checkpoints/.*deleted.* under the running job"
    ):
        job.wait(60)


def test_a_storage_that_is_not_there_is_refused_before_the_job_runs(
    cluster: AnyCluster, tmp_path: Path, s3_bucket: str
) -> None:
    del s3_bucket
    storage: CheckpointStorage = ObjectStorage(f"s3://missing-{uuid.uuid4().hex}/x")
    pipeline, _ = ledger(cluster, tmp_path, CountingSource(10), storage=storage)
    with pytest.raises(StorageError, match="create the bucket first"):
        pipeline.run(60)


def test_a_checkpoint_says_how_many_bytes_went_to_the_bucket_and_how_fast(
    cluster: AnyCluster, tmp_path: Path, s3_bucket: str
) -> None:
    source = _source(tmp_path, accounts=3_000)
    storage = ObjectStorage(s3_bucket, inline_threshold_bytes=SMALL)
    pipeline, _ = ledger(cluster, tmp_path, source, storage=storage, backend=ROCKSDB)
    job = pipeline.start()
    job.wait_for(checkpoints=4)
    assert _finished(job, tmp_path) is JobState.FINISHED
    done = job.status().history
    assert any(0 < one.uploaded_bytes < one.size_bytes for one in done), "shared files stay"
    assert all((one.upload_bytes_per_s > 0) == (one.uploaded_bytes > 0) for one in done)
