"""Tests the deletions beside an attempt."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast

from tests.unit.runtime.storage_faults import mounted, remount
from tests.unit.storage.storage_samples import decision

from onceflow.core.errors import SinkError
from onceflow.core.protocol.checkpoints.snapshots import CompletedCheckpoint, StateHandle
from onceflow.core.protocol.ids import GENESIS, AttemptId, CheckpointId
from onceflow.core.runtime.driver.attempt_context import AttemptContext
from onceflow.core.runtime.driver.background import Background, CheckpointsCleaner
from onceflow.core.runtime.events.job_events import JobEvent, RecoveredSink
from onceflow.core.storage import FileSystemStorage, JobStorage


def test_state_that_could_not_be_deleted_goes_with_the_next_completed_checkpoint(
    tmp_path: Path,
) -> None:
    with mounted(tmp_path / "checkpoints") as disk:
        storage = FileSystemStorage(str(disk)).open("ledger")
        log = storage.log.claim("test")
        log.append(decision(0, log.attempt))
        dead = storage.writer(log.attempt, CheckpointId(1), "balance", 0)
        handle = dead.write("keyed", bytes(200_000))
        context = SimpleNamespace(storage=storage, log=log, plan=SimpleNamespace(job="ledger"))
        background = Background("clean-up")
        cleaner = CheckpointsCleaner(cast("AttemptContext", context), background)
        remount(disk, "ro")
        cleaner.discard((handle,))
        assert background.finish(10.0)
        assert (disk / "ledger" / handle.path).exists()
        remount(disk, "rw")
        cleaner.clean_after(GENESIS, GENESIS, decision(0, log.attempt))
        assert background.finish(10.0)
        assert not (disk / "ledger" / handle.path).exists()
        assert background.end(lambda: None, 10.0)


def test_a_file_of_the_restored_checkpoint_outlives_the_sweep_of_an_attempt(tmp_path: Path) -> None:
    """The first new checkpoint does not name it; the next one, pending, may do so again."""
    storage = FileSystemStorage(str(tmp_path / "checkpoints")).open("ledger")
    older = storage.log.claim("older")
    shared, stray = (
        _shared(storage, older.attempt, tmp_path / name) for name in ("1.sst", "2.sst")
    )
    older.append(decision(0, older.attempt))
    older.append(decision(1, older.attempt, handles=(shared,)))
    log = storage.log.claim("newer")
    plan = SimpleNamespace(job="ledger", attempt=log.attempt)
    recovery = SimpleNamespace(sweep=_find_nothing)
    context = SimpleNamespace(
        storage=storage, log=log, plan=plan, recovery=recovery, publish=_ignore
    )
    background = Background("clean-up")
    cleaner = CheckpointsCleaner(cast("AttemptContext", context), background)
    done = decision(2, log.attempt)
    log.append(done)
    cleaner.clean_after(done.checkpoint, done.checkpoint, done)
    assert background.finish(10.0)
    assert [kept.checkpoint for kept in log.view.completed] == [2]
    files = tmp_path / "checkpoints" / "ledger"
    assert (files / shared.path).exists()
    assert not (files / stray.path).exists()
    cleaner.discard((shared,))
    assert background.end(lambda: None, 10.0)


def test_a_sweep_that_failed_at_the_last_checkpoint_is_tried_again_at_the_end(
    tmp_path: Path,
) -> None:
    """No later checkpoint would try it, and no later start, as the job is finished."""
    storage = FileSystemStorage(str(tmp_path / "checkpoints")).open("ledger")
    log = storage.log.claim("test")
    done = decision(1, log.attempt)
    log.append(decision(0, log.attempt))
    log.append(done)
    sweeps: list[CompletedCheckpoint] = []

    def sweep(newest: CompletedCheckpoint) -> tuple[RecoveredSink, ...]:
        sweeps.append(newest)
        if len(sweeps) == 1:
            raise SinkError("the target does not list what is in doubt")
        return ()

    plan = SimpleNamespace(job="ledger", attempt=log.attempt)
    context = SimpleNamespace(
        storage=storage, log=log, plan=plan, recovery=SimpleNamespace(sweep=sweep), publish=_ignore
    )
    background = Background("clean-up")
    cleaner = CheckpointsCleaner(cast("AttemptContext", context), background)
    cleaner.clean_after(done.checkpoint, done.checkpoint, done)
    cleaner.clean_at_end(done)
    cleaner.clean_at_end(done)
    assert background.finish(10.0)
    assert sweeps == [done, done]
    assert background.end(lambda: None, 10.0)


def _shared(storage: JobStorage, attempt: AttemptId, source: Path) -> StateHandle:
    source.write_bytes(bytes(30_000))
    writer = storage.writer(attempt, CheckpointId(1), "balance", 0)
    return writer.write_file(source.name, source, shared=True)


def _find_nothing(newest: CompletedCheckpoint) -> tuple[RecoveredSink, ...]:
    del newest
    return ()


def _ignore(event: JobEvent) -> None:
    del event
