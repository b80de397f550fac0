"""What could not be deleted is deleted at the next checkpoint, and not at the next start."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast

from tests.unit.runtime.storage_faults import mounted, remount
from tests.unit.storage.storage_samples import decision

from onceflow.core.protocol.ids import GENESIS, CheckpointId
from onceflow.core.runtime.driver.attempt_context import AttemptContext
from onceflow.core.runtime.driver.background import Background, CheckpointsCleaner
from onceflow.core.storage import FileSystemStorage


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
        cleaner.completed(GENESIS, GENESIS, decision(0, log.attempt))
        assert background.finish(10.0)
        assert not (disk / "ledger" / handle.path).exists()
        assert background.end(lambda: None, 10.0)
