"""The driver commits whole checkpoints in order, tells each commit, and publishes refusals."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.support.counting_source import SCHEMA

from onceflow import RuntimeSettings
from onceflow.core.errors import PreparedTransactionLost
from onceflow.core.plan.graph import Graph, Operator
from onceflow.core.plan.work import WriteTo
from onceflow.core.protocol.checkpoints import snapshots
from onceflow.core.protocol.committables import (
    Aborted,
    AbortOutcome,
    CommitOutcome,
    Committable,
    Committed,
    Lost,
    RetryLater,
)
from onceflow.core.protocol.ids import AttemptId, CheckpointId, SubtaskRef, TransactionId
from onceflow.core.protocol.loops.attempt_facts import GlobalCommitEnded
from onceflow.core.runtime.driver.global_commits import GlobalCommits
from onceflow.core.runtime.events.job_events import CommitRefused
from onceflow.core.spi import CommittedBy, GlobalCommitter, Sink
from onceflow.core.traces import NO_TRACE

_ATTEMPT = AttemptId(3)
_RESTORED = CheckpointId(4)


class _Committer(GlobalCommitter):
    def __init__(self, *outcomes: CommitOutcome) -> None:
        self._outcomes = list(outcomes)
        self.commits: list[tuple[int, int]] = []
        self.may_commit = threading.Event()
        self.may_commit.set()
        self.has_begun = threading.Event()
        self.is_closed = False

    def commit_checkpoint(
        self, checkpoint: CheckpointId, committables: Sequence[Committable]
    ) -> CommitOutcome:
        self.has_begun.set()
        self.may_commit.wait(60)
        self.commits.append((checkpoint, len(committables)))
        return self._outcomes.pop(0) if self._outcomes else Committed(files=2)

    def read_committed_through(self) -> CheckpointId:
        return _RESTORED

    def abort(self, committable: Committable) -> AbortOutcome:
        return Aborted()

    def in_doubt(self) -> Sequence[Committable]:
        return ()

    def close(self) -> None:
        self.is_closed = True


def _sink(by: CommittedBy = CommittedBy.DRIVER) -> Sink:
    return cast("Sink", SimpleNamespace(committed_by=by, gathering=None))


def _decide(checkpoint: int, *sink_ids: str, attempt: int = 3) -> snapshots.CompletedCheckpoint:
    committables = tuple(
        Committable(TransactionId(sink_id, attempt, checkpoint, 0), 5) for sink_id in sink_ids
    )
    snapshot = snapshots.SubtaskSnapshot(
        SubtaskRef("chain", 0), (snapshots.OperatorSnapshot("op", committables=committables),)
    )
    return snapshots.CompletedCheckpoint(
        CheckpointId(checkpoint), AttemptId(attempt), 1, 128, (snapshot,), 1, 2
    )


class _Driver:
    """The global committers of an attempt that has restored checkpoint 4."""

    def __init__(self, **committers: _Committer) -> None:
        self.told: queue.SimpleQueue[GlobalCommitEnded] = queue.SimpleQueue()
        self.refusals: queue.SimpleQueue[CommitRefused] = queue.SimpleQueue()
        sinks = [(f"uid-{sink_id}", sink_id, _sink(), one) for sink_id, one in committers.items()]
        operators = [
            Operator(uid, WriteTo(sink, sink_id), (), SCHEMA) for uid, sink_id, sink, _ in sinks
        ]
        slots = Operator("slots", WriteTo(_sink(CommittedBy.SLOTS), "slots"), (), SCHEMA)
        context: Any = SimpleNamespace(
            graph=Graph((*operators, slots)),
            plan=SimpleNamespace(attempt=_ATTEMPT, settings=RuntimeSettings()),
            restored=_decide(_RESTORED),
            recovery=SimpleNamespace(global_committers=lambda: iter(sinks)),
            publish=self.refusals.put,
            log=SimpleNamespace(trace=NO_TRACE),
        )
        self.commits = GlobalCommits(context, self.told.put)

    def take_by_uid(self, count: int) -> dict[str, GlobalCommitEnded]:
        return {one.uid: one for one in (self.take() for _ in range(count))}

    def take(self) -> GlobalCommitEnded:
        return self.told.get(timeout=60)


def test_each_decision_is_committed_and_told_with_what_it_has_written() -> None:
    a, b = _Committer(), _Committer()
    driver = _Driver(a=a, b=b)
    assert driver.commits.uids == {"uid-a", "uid-b"}
    driver.commits.start()
    driver.commits.commit_decided(_decide(5, "a"))
    ends = driver.take_by_uid(2)
    assert ends["uid-a"] == GlobalCommitEnded(
        _ATTEMPT, "uid-a", "a", CheckpointId(5), versions=1, files=2
    )
    assert ends["uid-b"].versions == ends["uid-b"].files == 0
    driver.commits.commit_decided(_decide(6, "a"))
    ends = driver.take_by_uid(2)
    assert ends["uid-a"] == GlobalCommitEnded(
        _ATTEMPT, "uid-a", "a", CheckpointId(6), versions=1, files=2
    )
    assert a.commits == [(5, 1), (6, 1)]
    assert driver.commits.close(60) == []
    assert a.is_closed
    assert b.is_closed
    assert driver.refusals.empty()


def test_each_refusal_of_a_commit_is_published_and_its_end_once() -> None:
    driver = _Driver(a=_Committer(RetryLater("locked"), RetryLater("locked")))
    driver.commits.start()
    driver.commits.commit_decided(_decide(5, "a"))
    assert driver.take().checkpoint == 5
    driver.commits.commit_decided(_decide(6, "a"))
    assert driver.take().checkpoint == 6
    refused = [driver.refusals.get(timeout=60) for _ in range(3)]
    assert driver.refusals.empty()
    assert {(one.uid, one.is_stuck) for one in refused} == {("uid-a", False)}
    assert ["locked" in one.refusal for one in refused] == [True, True, False]
    assert refused[2].refusal == ""
    driver.commits.close(60)


def test_rows_that_are_lost_end_the_attempt() -> None:
    driver = _Driver(a=_Committer(Lost("the files are gone")))
    driver.commits.start()
    driver.commits.commit_decided(_decide(5, "a"))
    ended = driver.take()
    assert isinstance(ended.error, PreparedTransactionLost)
    assert (ended.uid, ended.sink_id, ended.checkpoint) == ("uid-a", "a", _RESTORED)
    assert ended.attempt == _ATTEMPT
    driver.commits.close(60)


@pytest.mark.timeout(120)
def test_a_committer_that_hangs_is_named_and_stays_open() -> None:
    a, b = _Committer(), _Committer()
    driver = _Driver(a=a, b=b)
    a.may_commit.clear()
    driver.commits.start()
    driver.commits.commit_decided(_decide(5, "a"))
    assert a.has_begun.wait(60)
    # Only then is the other thread idle, and ends within the short time to close.
    assert driver.take().uid == "uid-b"
    assert list(driver.commits.close(0.5)) == ["uid-a"]
    assert (a.is_closed, b.is_closed) == (False, True)
    a.may_commit.set()
    assert driver.commits.close(60) == []
