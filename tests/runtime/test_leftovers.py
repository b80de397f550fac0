"""Tests that a running job deletes the things that it could not delete at once."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from tests.support import leftovers
from tests.support.clusters import AnyCluster
from tests.support.counting_source import CountingSource
from tests.support.directory_sink import DirectoryCommitter, DirectorySink
from tests.support.failing_once import FailingOnceStorage
from tests.support.ledger import SETTINGS, assert_exactly_once, ledger
from tests.support.leftovers import (
    find_copies,
    find_leftovers,
    find_savepoint_leftovers,
    find_slot_directories,
    watching_copies,
)

from onceflow import (
    Checkpointing,
    HeapBackend,
    JobState,
    LocalProcesses,
    NoRestart,
    Pipeline,
    RocksDBBackend,
    count,
    sum_,
)
from onceflow.core.api.pipeline import Job
from onceflow.core.errors import SinkError
from onceflow.core.protocol.committables import Committable
from onceflow.core.spi import Committer, CommitterContext
from onceflow.integration.conformance.processes import eventually


@dataclass(frozen=True)
class UnlistableOnce(DirectorySink):
    """Fails when it is listed for the second time; after the first, an old slot prepares more."""

    def committer(self, context: CommitterContext) -> Committer:
        return _UnlistableOnce(Path(self.directory), context.sink_id)


class _UnlistableOnce(DirectoryCommitter):
    listed = 0

    def in_doubt(self) -> Sequence[Committable]:
        self.listed += 1
        if self.listed == 2:
            raise SinkError("the directory cannot be listed just now")
        found = super().in_doubt()
        if self.listed == 1:
            (self.prepared / f"{self.sink_id}~1~99~0~0").touch()
        return found


def started(
    cluster: AnyCluster,
    directory: Path,
    source: CountingSource,
    sink: DirectorySink,
    interval_s: float = 0.1,
) -> Job:
    pipeline = Pipeline(
        cluster,
        name="ledger",
        parallelism=2,
        checkpointing=Checkpointing(
            storage=str(directory / "checkpoints"), interval=interval_s, tolerable_failures=1000
        ),
        state_backend=HeapBackend(),
        restart=NoRestart(),
    )
    records = pipeline.read(source, uid="records").key_by("account")
    records.running(balance=sum_("amount"), n=count(), uid="balance").write(sink, uid="ledger")
    return pipeline.start()


def test_sweep_of_a_sink_that_fails_is_tried_again_at_the_next_checkpoint(
    cluster: AnyCluster, tmp_path: Path
) -> None:
    """I3: a transaction that a dead attempt prepared after recovery had looked."""
    first = DirectorySink(str(tmp_path / "out"))
    source = CountingSource(2_000, ends_with=str(tmp_path / "end"))
    job = started(cluster, tmp_path, source, first)
    job.wait_for(checkpoints=job.status().checkpoints_completed + 2)
    job.stop()
    sink = UnlistableOnce(first.directory)
    job = started(cluster, tmp_path, source, sink)
    job.wait_for(checkpoints=job.status().checkpoints_completed + 4)
    prepared = sink.prepared()
    (tmp_path / "end").touch()
    assert job.wait(60).state is JobState.FINISHED
    assert [name for name in prepared if "~99~" in name] == []
    assert_exactly_once(sink, source)


def test_sweep_of_a_sink_that_fails_at_the_last_checkpoint_is_tried_again_at_the_end(
    cluster: AnyCluster, tmp_path: Path
) -> None:
    """No other checkpoint follows, and a finished job is not started again."""
    first = DirectorySink(str(tmp_path / "out"))
    source = CountingSource(2_000, ends_with=str(tmp_path / "end"))
    job = started(cluster, tmp_path, source, first)
    job.wait_for(checkpoints=job.status().checkpoints_completed + 2)
    job.stop()
    (tmp_path / "end").touch()
    sink = UnlistableOnce(first.directory)
    job = started(cluster, tmp_path, source, sink, interval_s=600)
    assert job.wait(60).state is JobState.FINISHED
    assert sink.prepared() == []
    assert_exactly_once(sink, source)


def test_local_files_of_a_slot_that_was_killed_are_deleted_by_the_next_one(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    settings = replace(SETTINGS, scratch_dir=str(scratch))
    pipeline, _ = ledger(
        LocalProcesses(),
        tmp_path,
        CountingSource(0, endless=True, pause_s=0.005),
        settings=settings,
    )
    job = pipeline.start()
    for restores in (1, 2, 3):
        job.wait_for(checkpoints=job.status().checkpoints_completed + 1)
        os.kill(job.status().slots[0].pid, signal.SIGKILL)
        deadline = time.monotonic() + 90
        while job.status().restores < restores:
            assert time.monotonic() < deadline, job.status()
            time.sleep(0.01)
    job.wait_for(checkpoints=job.status().checkpoints_completed + 1)
    directories = [path for path in scratch.iterdir() if path.is_dir()]
    # The last one may have been dying still when its successor looked.
    assert len(directories) <= 3
    assert job.stop(60).state is JobState.STOPPED
    assert len(list(scratch.glob("*/"))) <= 1


def test_a_slot_keeps_no_copy_of_its_state_for_checkpoints_that_were_declined(
    cluster: AnyCluster, tmp_path: Path
) -> None:
    scratch, faults = tmp_path / "scratch", str(tmp_path / "faults")
    storage = FailingOnceStorage(str(tmp_path / "checkpoints"), 0, faults=faults)
    pipeline, _ = ledger(
        cluster,
        tmp_path,
        CountingSource(0, endless=True, pause_s=0.005),
        storage=storage,
        parallelism=1,
        interval=0.1,
        tolerable_failures=1000,
        backend=RocksDBBackend(),
        settings=replace(SETTINGS, scratch_dir=str(scratch)),
    )
    job = pipeline.start()
    job.wait_for(checkpoints=1)
    for _ in range(5):
        storage.fail("write", "balance")
    assert eventually(lambda: not storage.list_due(), 90)
    # Between two checkpoints there is none.
    assert eventually(lambda: find_copies(scratch) == [], 90), find_copies(scratch)
    assert any(scratch.glob("*/rocksdb-*"))
    status = job.stop(90)
    assert (status.state, status.restores) == (JobState.STOPPED, 0)
    assert status.checkpoints_failed >= 2


def test_what_a_job_leaves_behind_is_found(tmp_path: Path) -> None:
    """Holds the check that runs after each test of a job."""
    source = CountingSource(300)
    pipeline, _ = ledger(LocalProcesses(tmp_path / "logs"), tmp_path, source)
    pipeline.run(60)
    assert find_leftovers(tmp_path) == []
    job = tmp_path / "checkpoints" / "ledger"
    undecided = job / "chk-900" / "a1" / "state"
    staged = job / "staged" / "ledger.out" / "rows.arrow"
    for file in (undecided, staged):
        file.parent.mkdir(parents=True)
        file.touch()
    assert find_leftovers(tmp_path) == ["ledger/chk-900/a1", "ledger/staged/ledger.out/rows.arrow"]
    staged.unlink()


def test_what_a_savepoint_does_not_hold_is_found(tmp_path: Path) -> None:
    """Holds the check that runs after each test of a job."""
    pipeline, _ = ledger(
        LocalProcesses(tmp_path / "logs"),
        tmp_path,
        CountingSource(0, endless=True, pause_s=0.005),
        inline_threshold_bytes=0,
    )
    job = pipeline.start()
    job.wait_for(checkpoints=1)
    savepoint = Path(job.savepoint(str(tmp_path / "kept")))
    job.stop(60)
    assert find_savepoint_leftovers(tmp_path) == []
    assert list((savepoint / "state").iterdir())
    planted = [
        savepoint / "_changing",
        savepoint / f"._metadata.{'0' * 32}.tmp",
        savepoint / "state" / "00099-balance@0@more",
        tmp_path / "kept" / "savepoint-0123456789ab" / "state" / "00000-balance@0@keyed",
    ]
    for file in planted:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    whole, half = f"kept/{savepoint.name}", "kept/savepoint-0123456789ab"
    assert sorted(find_savepoint_leftovers(tmp_path)) == sorted(
        [half, *(f"{whole}/{file.relative_to(savepoint)}" for file in planted[:3])]
    )
    for file in planted:
        file.unlink()
    for directory in (planted[3].parent, planted[3].parents[1]):
        directory.rmdir()


def test_a_copy_of_state_that_a_slot_keeps_to_the_end_is_found(
    cluster: AnyCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Holds the check that runs after each test of a job."""
    monkeypatch.setattr(leftovers, "TIDY_S", 0.5)
    # Not where that check looks.
    scratch = tmp_path / "planted"
    pipeline, _ = ledger(
        cluster,
        tmp_path,
        CountingSource(0, endless=True, pause_s=0.005),
        backend=RocksDBBackend(),
        settings=replace(SETTINGS, scratch_dir=str(scratch)),
    )
    with watching_copies(scratch) as left:
        job = pipeline.start()
        job.wait_for(checkpoints=1)
        assert find_slot_directories(scratch) == [path.name for path in sorted(scratch.glob("*/"))]
        database = next(scratch.glob("*/rocksdb-*"))
        (database / "copy-900-planted").mkdir()
        assert job.stop(60).state is JobState.STOPPED
    assert left == ["copy-900-planted"]
    assert find_slot_directories(scratch) == []
    (scratch / "onceflow-ledger-0-0123456789abcdef").mkdir()
    assert find_slot_directories(scratch) == ["onceflow-ledger-0-0123456789abcdef"]
