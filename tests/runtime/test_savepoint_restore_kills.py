"""A driver that dies while it starts a job from a savepoint, and is started again."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.moved_job import assert_all_once, copy_job, ids_in, sqlite_sink

from onceflow.core.crash_points import CrashPoint
from onceflow.core.runtime.cluster.local_processes import fork_own_host
from onceflow.core.runtime.cluster.process_host import Link, ProcessKilled
from onceflow.integration.conformance.processes import Processes


def start_and_die(link: Link, directory: str, savepoint: str, claim: bool) -> None:
    """Start the job in new storage, in a process that is armed to die before it runs."""
    del link
    fork_own_host()
    pipeline = copy_job(Path(directory) / "new", sqlite_sink(Path(directory)))
    pipeline.start(from_savepoint=savepoint, claim=claim, allow_rewind=True).wait(60)


@pytest.mark.parametrize(
    ("point", "claim"),
    [("imported", False), ("copied", True), ("restored", False), ("restored", True)],
)
def test_a_driver_that_dies_at_a_step_of_a_restore_starts_again_with_each_row_once(
    tmp_path: Path, onceflow_processes: Processes, point: CrashPoint, claim: bool
) -> None:
    """The savepoint has rows that nothing else has: they were staged, and no commit came after."""
    job = copy_job(tmp_path / "old", sqlite_sink(tmp_path), interval=None).start()
    for number in (1, 2, 3):
        job.checkpoint()
        job.wait_for(checkpoints=number)
    savepoint = job.savepoint(str(tmp_path / "kept"))
    job.cancel(60)
    committed = len(ids_in(tmp_path))
    onceflow_processes.arm(point)
    driver = onceflow_processes.start(start_and_die, str(tmp_path), savepoint, claim)
    with pytest.raises(ProcessKilled):
        driver.result()
    assert len(ids_in(tmp_path)) == committed
    job = copy_job(tmp_path / "new", sqlite_sink(tmp_path)).start(
        from_savepoint=savepoint, claim=claim, allow_rewind=True
    )
    job.wait_for(checkpoints=2)
    job.stop(60)
    assert len(ids_in(tmp_path)) > committed
    assert_all_once(ids_in(tmp_path))
    assert Path(savepoint).exists() is not claim
