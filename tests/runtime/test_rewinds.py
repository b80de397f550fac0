"""A job goes back to a savepoint in its own storage, once its targets were put back to it.

Each test follows docs/checkpoints.md. A target that was put back has every record once in the end.
"""

from __future__ import annotations

import shutil
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from tests.support.counting_source import CountingSource
from tests.support.ledger import SETTINGS
from tests.support.staged_sink import StagedSink

from onceflow import Checkpointing, FixedDelay, Job, LocalProcesses, Pipeline
from onceflow.core.spi import Sink
from onceflow.core.storage.filesystems.filesystem import CreateOutcome, CreationUnknown
from onceflow.core.storage.filesystems.local import LocalFileSystem
from onceflow.core.storage.log.decision_log import UNKNOWN_TRIES_MAX
from onceflow.sinks import SQLiteSink

TARGET = "target"
SILENT = "silent"
"""A target that does not tell what it has committed."""


@dataclass(frozen=True)
class RewoundJob:
    """A job without end. It takes checkpoints when told to; its targets are files to be copied."""

    directory: Path
    targets: tuple[str, ...] = (TARGET,)

    def start(
        self,
        savepoint: str | None = None,
        *,
        storage: str = "storage",
        parallelism: int = 1,
        retained: int = 1,
        allow_rewind: bool = True,
    ) -> Job:
        """Start the job; a rewind is allowed where a savepoint is named."""
        pipeline = Pipeline(
            LocalProcesses(),
            name="rewound",
            parallelism=parallelism,
            checkpointing=Checkpointing(
                storage=str(self.directory / storage), interval=None, retained=retained
            ),
            restart=FixedDelay(attempts=2, delay_s=0.01),
            settings=replace(SETTINGS, heartbeat_interval_s=0.05),
        )
        source = CountingSource(0, endless=True, batch_rows=5, pause_s=0.005)
        records = pipeline.read(source, uid="records")
        for target in self.targets:
            records.write(self.sink(target), uid=target, sink_id=target)
        return pipeline.start(
            from_savepoint=savepoint, allow_rewind=allow_rewind and savepoint is not None
        )

    def sink(self, target: str) -> Sink:
        path = str(self.directory / target)
        if target == SILENT:
            return StagedSink(path)
        return SQLiteSink(path, table="rows", create=True, lock_timeout_s=0.5)

    def commit(self, job: Job, *targets: str) -> None:
        """Take a checkpoint, and wait until each target has more rows than before."""
        before = {target: len(self.ids(target)) for target in targets or self.targets}
        self.read_more(job)
        job.checkpoint()
        self._wait_until(job, lambda: all(len(self.ids(t)) > n for t, n in before.items()))

    def read_more(self, job: Job) -> None:
        """Wait until the job has read rows that no checkpoint has."""
        # The first report may count rows that were read before the last checkpoint.
        for _ in range(2):
            read = job.status().records_in
            self._wait_until(job, lambda read=read: job.status().records_in > read)  # type: ignore[misc]

    def stop_with_savepoint(self, job: Job) -> str:
        return job.stop(60, savepoint=True).savepoints[-1].place

    def back_up(self, name: str = "backup") -> None:
        for target in self.targets:
            with closing(sqlite3.connect(self.directory / target, timeout=30)) as db:
                db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            shutil.copy(self.directory / target, self.directory / f"{target}.{name}")

    def put_back(self, name: str = "backup", target: str = TARGET) -> None:
        for suffix in ("-wal", "-shm"):
            (self.directory / f"{target}{suffix}").unlink(missing_ok=True)
        shutil.copy(self.directory / f"{target}.{name}", self.directory / target)

    def ids(self, target: str = TARGET) -> list[int]:
        """Return the id of every row that a reader sees, sorted, doubles kept."""
        if not (self.directory / target).exists():
            return []
        with closing(sqlite3.connect(self.directory / target, timeout=30)) as db:
            try:
                return [one for (one,) in db.execute("SELECT id FROM rows ORDER BY id")]
            except sqlite3.OperationalError:
                return []

    def require_all_once(self) -> None:
        """Raise unless the records of each split are there from the first one on."""
        ids = self.ids()
        assert ids
        for split in (0, 1):
            mine = [one for one in ids if one % 2 == split]
            assert mine == list(range(split, split + 2 * len(mine), 2))

    @staticmethod
    def _wait_until(job: Job, is_so: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 60
        while not is_so():
            status = job.status()
            assert not status.state.ended, status.last_error
            assert time.monotonic() < deadline, status
            time.sleep(0.005)


@pytest.fixture
def rewound(tmp_path: Path) -> RewoundJob:
    return RewoundJob(tmp_path)


def test_a_job_goes_back_again_right_after_it_has_gone_back_at_another_parallelism(
    rewound: RewoundJob,
) -> None:
    """It ends before it knows that its last checkpoint is committed; then the target goes back."""
    job = rewound.start()
    rewound.commit(job)
    savepoint = rewound.stop_with_savepoint(job)
    rewound.back_up()
    job = rewound.start()
    rewound.commit(job)
    job.cancel(60)
    for parallelism in (2, 1):
        rewound.put_back()
        job = rewound.start(savepoint, parallelism=parallelism)
        rewound.commit(job)
        rewound.require_all_once()
        assert job.cancel(60).restored_savepoint == savepoint
    # The same start again, as a supervisor repeats it: the target is not put back.
    job = rewound.start(savepoint)
    rewound.commit(job)
    assert job.cancel(60).restored_savepoint == ""
    rewound.require_all_once()


def test_rows_that_a_stop_savepoint_holds_come_out_of_it_where_the_target_lacks_them(
    rewound: RewoundJob,
) -> None:
    """The copy of the target is from before the stop, whose rows are in the savepoint alone."""
    job = rewound.start()
    rewound.commit(job)
    rewound.back_up()
    rewound.read_more(job)
    savepoint = rewound.stop_with_savepoint(job)
    for _ in range(2):
        rewound.put_back()
        job = rewound.start(savepoint)
        job.wait_for(checkpoints=0)
        assert job.cancel(60).restored_savepoint == savepoint
    job = rewound.start()
    rewound.commit(job)
    job.cancel(60)
    rewound.require_all_once()


@pytest.mark.parametrize("storage", ["storage", "elsewhere"])
def test_a_job_goes_back_to_a_retained_checkpoint_with_its_target(
    rewound: RewoundJob, storage: str
) -> None:
    job = rewound.start(retained=3)
    rewound.commit(job)
    rewound.commit(job)
    rewound.back_up()
    rewound.commit(job)
    job.cancel(60)
    rewound.put_back()
    checkpoint = str(rewound.directory / "storage" / "rewound" / "chk-2")
    job = rewound.start(checkpoint, storage=storage)
    rewound.commit(job)
    job.cancel(60)
    rewound.require_all_once()


def test_a_job_goes_back_and_forth_between_two_savepoints(rewound: RewoundJob) -> None:
    """The second one is of a run that the log has forgotten by then."""
    savepoints: dict[str, str] = {}
    for name in ("first", "second"):
        job = rewound.start()
        rewound.commit(job)
        savepoints[name] = rewound.stop_with_savepoint(job)
        rewound.back_up(name)
    for name in ("first", "second", "first"):
        rewound.put_back(name)
        job = rewound.start(savepoints[name])
        rewound.commit(job)
        rewound.require_all_once()
        job.cancel(60)


def test_a_savepoint_of_a_job_that_has_gone_back_starts_it_elsewhere(rewound: RewoundJob) -> None:
    job = rewound.start()
    rewound.commit(job)
    savepoint = rewound.stop_with_savepoint(job)
    rewound.back_up()
    job = rewound.start()
    rewound.commit(job)
    job.cancel(60)
    rewound.put_back()
    job = rewound.start(savepoint)
    rewound.commit(job)
    moved = str(rewound.directory / "moved")
    shutil.copytree(rewound.stop_with_savepoint(job), moved)
    shutil.rmtree(rewound.directory / "storage")
    job = rewound.start(moved, storage="elsewhere", allow_rewind=False)
    rewound.commit(job)
    job.cancel(60)
    rewound.require_all_once()


def test_what_was_decided_before_a_rewind_is_rolled_back_beside_a_target_that_does_not_tell(
    rewound: RewoundJob,
) -> None:
    """The one holds rows in doubt that are sent again; the other has committed that decision."""
    both = RewoundJob(rewound.directory, (TARGET, SILENT))
    job = both.start()
    both.commit(job)
    savepoint = both.stop_with_savepoint(job)
    both.back_up()
    job = both.start()
    both.commit(job)
    with closing(sqlite3.connect(both.directory / TARGET, timeout=30)) as db:
        db.execute("BEGIN IMMEDIATE")
        both.commit(job, SILENT)
        job.cancel(60)
    both.put_back()
    job = both.start(savepoint)
    both.commit(job)
    job.cancel(60)
    both.require_all_once()


def test_what_a_target_has_committed_before_a_rewind_is_known_after_another_one(
    rewound: RewoundJob,
) -> None:
    """The first time the target is not put back, and keeps proofs of what was decided until then.

    The second savepoint is taken in between, and knows that.
    """
    job = rewound.start(retained=20)
    rewound.commit(job)
    savepoint = job.savepoint()
    rewound.commit(job)
    job.cancel(60)
    job = rewound.start(savepoint, retained=20)
    rewound.commit(job)
    savepoint = rewound.stop_with_savepoint(job)
    rewound.back_up()
    job = rewound.start(retained=20)
    rewound.commit(job)
    job.cancel(60)
    rewound.put_back()
    job = rewound.start(savepoint, retained=20)
    rewound.commit(job)
    job.cancel(60)
    # Those that were sent before the first one are there twice; none is missing.
    ids = set(rewound.ids())
    for split in (0, 1):
        mine = sorted(one for one in ids if one % 2 == split)
        assert mine == list(range(split, split + 2 * len(mine), 2))


def test_a_driver_whose_claim_got_no_answer_begins_from_the_savepoint_all_the_same(
    rewound: RewoundJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own claim has rolled back nothing of what the savepoint counts on."""
    job = rewound.start()
    rewound.commit(job)
    savepoint = job.savepoint()
    job.cancel(60)
    create, lost = LocalFileSystem.create_if_absent, [0]

    def lose_answers(self: LocalFileSystem, path: str, data: bytes) -> CreateOutcome:
        outcome = create(self, path, data)
        if "/log/" in path and lost[0] < UNKNOWN_TRIES_MAX:
            lost[0] += 1
            raise CreationUnknown("the answer is lost")
        return outcome

    monkeypatch.setattr(LocalFileSystem, "create_if_absent", lose_answers)
    job = rewound.start(savepoint)
    rewound.commit(job)
    status = job.cancel(60)
    assert (lost[0], status.restored_savepoint) == (UNKNOWN_TRIES_MAX, savepoint)
    rewound.require_all_once()
