"""A database that comes back as it was before: restored from a copy of its files, or failed over.

What the log knows to be committed is committed again where it is prepared again, and named where it
is gone. It is never rolled back, and never forgotten.
"""

from __future__ import annotations

import itertools
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest
from tests.integration.sink_kit import SCHEMA, committables, rows, until_settled
from tests.integration.sql.databases import Database, SqlServer

from onceflow.core.commit.by_hand import InDoubtTransactions, SinkResourceManager
from onceflow.core.errors import CommitOutcomeUnknown, PreparedTransactionLost
from onceflow.core.plan.graph import Graph, Operator
from onceflow.core.plan.work import WriteTo
from onceflow.core.protocol.checkpoints import snapshots
from onceflow.core.protocol.committables import AlreadyCommitted, Committable, Committed
from onceflow.core.protocol.ids import CheckpointId, SubtaskRef
from onceflow.core.protocol.log.target_records import LoggedDecision, RecoveryAction
from onceflow.core.runtime.driver.sink_recovery import SinkRecovery
from onceflow.core.runtime.events.job_events import RecoveredSink
from onceflow.core.spi import Committer, CommitterContext, Sink, WriterContext
from onceflow.core.storage import ClaimedLog, FileSystemStorage, JobStorage

SINK_ID = "job.out"
_NUMBERS = itertools.count()


@pytest.fixture
def database(kind: type[Database], server: SqlServer) -> Iterator[Database]:
    """A new database on a server of the module's own, as it is when the server is set back too."""
    database = kind.create(server, f"b{next(_NUMBERS)}")
    yield database
    database.drop(server)


@dataclass
class Copy:
    """The files of a server as they were when it was taken."""

    server: SqlServer
    path: Path

    @classmethod
    def taken(cls, server: SqlServer, path: Path) -> Copy:
        server.kill()
        subprocess.run(["cp", "-a", str(server.directory), str(path)], check=True)
        server.start()
        return cls(server, path)

    def restore(self) -> None:
        """Set the server back."""
        self.server.kill()
        for entry in self.server.directory.iterdir():
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        subprocess.run(["cp", "-a", f"{self.path}/.", str(self.server.directory)], check=True)
        self.server.start()


@dataclass
class Job:
    """One attempt after another: the engine's log and its recovery, and one writer."""

    sink: Sink
    storage: JobStorage
    log: ClaimedLog | None = None
    checkpoint: int = 0
    closing: list[Committer] = field(default_factory=list[Committer])

    def start(self) -> RecoveredSink:
        """Claim the job and recover, as a driver does."""
        graph = Graph((Operator("out", WriteTo(self.sink, SINK_ID), (), SCHEMA),))
        self.log = self.storage.log.claim("driver:1", [SINK_ID])
        if not self.log.view.completed:
            self.decide()
        recovery = SinkRecovery(graph, {}, "job", self.log, self.storage, deadline_s=60)
        try:
            recovery.open()
            (counts,) = recovery.recover(self.log.view.completed[-1])
            return counts
        finally:
            recovery.close()

    def prepare(self, ids: Iterable[int]) -> Committable:
        """Pre-commit rows for the next checkpoint."""
        assert self.log is not None
        writer = self.sink.writer(
            WriterContext(
                job="job",
                uid="out",
                sink_id=SINK_ID,
                subtask=0,
                parallelism=1,
                attempt=self.log.attempt,
                first_checkpoint=CheckpointId(self.checkpoint + 1),
                schema=SCHEMA,
                staging=self.storage.staging(SINK_ID),
            )
        )
        writer.write(rows(ids))
        (committable,) = writer.pre_commit(CheckpointId(self.checkpoint + 1))
        writer.close()
        return committable

    def decide(self, *listed: Committable) -> None:
        """Decide the next checkpoint, and prune the log to it."""
        assert self.log is not None
        first = not self.log.view.completed
        self.checkpoint = 0 if first else self.checkpoint + 1
        operators = (snapshots.OperatorSnapshot("out", committables=listed),)
        self.log.append(
            snapshots.CompletedCheckpoint(
                checkpoint=CheckpointId(self.checkpoint),
                attempt=self.log.attempt,
                parallelism=1,
                max_parallelism=128,
                snapshots=(snapshots.SubtaskSnapshot(SubtaskRef("out", 0), operators),),
                triggered_at_ms=0,
                completed_at_ms=0,
            )
        )
        self.log.prune(CheckpointId(self.checkpoint))

    def committer(self) -> Committer:
        assert self.log is not None
        committer = self.sink.committer(
            CommitterContext(
                "job",
                "out",
                SINK_ID,
                self.log.attempt,
                self.storage.log_id,
                self.storage.staging(SINK_ID),
            )
        )
        self.closing.append(committer)
        return committer

    def write(self, ids: Iterable[int]) -> Committable:
        """Take a whole checkpoint with rows."""
        committable = self.prepare(ids)
        self.decide(committable)
        committer = self.committer()
        outcome = until_settled(partial(committer.commit, committable))
        assert isinstance(outcome, (Committed, AlreadyCommitted))
        committer.close()
        return committable


@pytest.fixture
def job(database: Database, mode: str, tmp_path: Path) -> Iterator[Job]:
    sink = database.sink(table="ledger", create=True, commit_mode=mode)
    job = Job(sink, FileSystemStorage(str(tmp_path / "checkpoints")).open("job"))
    yield job
    for committer in job.closing:
        committer.close()


@pytest.mark.parametrize("mode", ["two_phase"])
def test_committed_transaction_that_is_prepared_again_is_committed_again(
    job: Job, database: Database, server: SqlServer, tmp_path: Path
) -> None:
    job.start()
    job.write([1, 2])
    committable = job.prepare([3, 4])
    copy = Copy.taken(server, tmp_path / "copy")
    job.decide(committable)
    committer = job.committer()
    assert isinstance(
        until_settled(partial(committer.commit, committable)), (Committed, AlreadyCommitted)
    )
    committer.close()
    job.decide()
    job.decide()
    copy.restore()
    assert database.ids_in() == [1, 2]
    with InDoubtTransactions([SinkResourceManager(job.sink, SINK_ID)], job.storage) as found:
        (one,) = found.in_doubt()
    status = one.status
    assert (status.decision, status.recovery_action) == (
        LoggedDecision.SETTLED,
        RecoveryAction.COMMIT,
    )
    assert job.start().committed == 1
    assert database.ids_in() == [1, 2, 3, 4]
    committer = job.committer()
    assert committables(committer.in_doubt()) == []


def test_commits_that_an_older_copy_has_lost_are_named_though_the_last_checkpoint_lists_none(
    job: Job, database: Database, server: SqlServer, tmp_path: Path
) -> None:
    job.start()
    job.write([1, 2])
    copy = Copy.taken(server, tmp_path / "copy")
    lost = job.write([3, 4])
    for _ in range(3):
        job.decide()
    assert job.start().aborted == 0, "nothing is missing yet"
    copy.restore()
    assert database.ids_in() == [1, 2]
    for _ in range(2):
        with pytest.raises(PreparedTransactionLost, match=str(lost.transaction)):
            job.start()
    assert database.ids_in() == [1, 2]


def test_running_committer_notices_that_its_server_came_back_as_an_older_copy(
    job: Job, database: Database, server: SqlServer, tmp_path: Path
) -> None:
    job.start()
    committer = job.committer()
    job.write([1])
    copy = Copy.taken(server, tmp_path / "copy")
    lost = job.prepare([2])
    job.decide(lost)
    assert isinstance(until_settled(partial(committer.commit, lost)), (Committed, AlreadyCommitted))
    copy.restore()
    after = job.prepare([3])
    job.decide(after)
    with pytest.raises(CommitOutcomeUnknown, match=str(lost.transaction)):
        until_settled(partial(committer.commit, after))
    with pytest.raises(PreparedTransactionLost, match=str(lost.transaction)):
        job.start()
    assert database.ids_in() == [1, 3]
