"""Tests that plans are carried out in order, and repeated or given up for a typed reason."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onceflow.core import errors, spi
from onceflow.core.commit import loop
from onceflow.core.commit.loop import open_global_committer
from onceflow.core.commit.queue import (
    CommitRetryPolicy,
    Done,
    RetryAt,
    StepFailed,
    WaitUntil,
    recovery_retries,
)
from onceflow.core.commit.steps import CommitWhole, PlannedSteps, Step, to_aborts, to_commits
from onceflow.core.commit.whole_checkpoints import GlobalCommit
from onceflow.core.errors import InvariantViolation
from onceflow.core.protocol.committables import (
    Aborted,
    AbortOutcome,
    AlreadyCommitted,
    CommitOutcome,
    Committable,
    Committed,
    Lost,
    RetryLater,
    Unknown,
)
from onceflow.core.protocol.ids import AttemptId, CheckpointId, TransactionId

CONTEXT = spi.CommitterContext(job="j", uid="out", sink_id="j.out", attempt=AttemptId(2))


def tx(checkpoint: int, subtask: int = 0) -> Committable:
    return Committable(TransactionId("j.out", 1, checkpoint, subtask), rows=3)


class _Target(spi.GlobalCommitter):
    """Answers from a script, and with what is asked when that is over."""

    def __init__(self, *script: CommitOutcome | AbortOutcome) -> None:
        self.script = list(script)
        self.asked: list[str] = []

    def commit(self, committable: Committable) -> CommitOutcome:
        return cast("CommitOutcome", self._answer(f"commit {committable.transaction}", Committed()))

    def commit_checkpoint(
        self, checkpoint: CheckpointId, committables: Sequence[Committable]
    ) -> CommitOutcome:
        asked = f"commit {len(committables)} of {checkpoint}"
        return cast("CommitOutcome", self._answer(asked, Committed()))

    def abort(self, committable: Committable) -> AbortOutcome:
        return cast("AbortOutcome", self._answer(f"abort {committable.transaction}", Aborted()))

    def read_committed_through(self) -> CheckpointId:
        return CheckpointId(0)

    def in_doubt(self) -> Sequence[Committable]:
        return ()

    def close(self) -> None:
        pass

    def _answer(self, asked: str, otherwise: object) -> object:
        self.asked.append(asked)
        return self.script.pop(0) if self.script else otherwise


def _settled(target: spi.Committer, steps: Sequence[Step], deadline_s: float = 5.0) -> list[Any]:
    source = loop.TimedSteps(PlannedSteps(steps, recovery_retries(deadline_s)))
    return [ended for _, ended in loop.settle(source, lambda step: loop.carry_out(target, step))]


def test_steps_are_carried_out_in_order_and_each_until_it_is_done() -> None:
    target = _Target(Committed(), RetryLater("restarting"), Unknown("no reply"), AlreadyCommitted())
    whole = CommitWhole(GlobalCommit(CheckpointId(3), (tx(2), tx(3))))
    ended = _settled(target, [*to_commits([tx(1)]), whole, *to_aborts([tx(4)])])
    assert [type(one) for one in ended] == [Done, RetryAt, RetryAt, Done, Done]
    assert ended[3] == Done(already=True)
    assert target.asked == [
        "commit j.out/1/1/0/0",
        *["commit 2 of 3"] * 3,
        "abort j.out/1/4/0/0",
    ]


class _CountedSteps(PlannedSteps):
    asked = 0

    def next_commit(self, now_s: float) -> Step | WaitUntil | None:
        self.asked += 1
        return super().next_commit(now_s)


def test_a_refused_commit_is_not_tried_in_a_tight_loop() -> None:
    """A loop that does not sleep would ask thousands of times in 0.1 s, on a core of its own."""
    target = _Target(RetryLater("restarting"))
    policy = CommitRetryPolicy(initial_delay_s=0.1, deadline_s=60.0)
    steps = _CountedSteps(to_commits([tx(1)]), policy)
    ended = list(loop.settle(loop.TimedSteps(steps), lambda step: loop.carry_out(target, step)))
    assert [type(end) for _, end in ended] == [RetryAt, Done]
    # The first try, the pause, a wake-up that was a little early, the second try, and the end.
    assert steps.asked <= 10


def test_a_whole_checkpoint_is_never_given_to_a_committer_of_single_transactions() -> None:
    whole = CommitWhole(GlobalCommit(CheckpointId(3), (tx(2), tx(3))))
    with pytest.raises(InvariantViolation, match="commits no checkpoints"):
        loop.carry_out(_Single(), whole)


def test_a_refused_commit_names_the_transaction_its_tries_and_the_command_that_tells_more() -> None:
    for tries, text in ((1, "1 try: locked"), (3, "3 tries: locked")):
        described = loop.describe_refusal(tx(1), RetryAt(0.0, "locked", tries))
        assert f"which checkpoint 1 decided, is not committed after {text}" in described
        assert "`onceflow txn show j.out/1/1/0/0`" in described


@pytest.mark.parametrize(
    ("outcome", "kind", "error"),
    [
        (Lost("gone"), "lost", errors.PreparedTransactionLost),
        (Unknown("no reply"), "unknown", errors.CommitOutcomeUnknown),
        (RetryLater("locked"), "failed", errors.CommitFailed),
    ],
)
def test_a_commit_is_given_up_for_a_reason_with_a_type_and_nothing_follows_it(
    outcome: CommitOutcome, kind: str, error: type[Exception]
) -> None:
    target = _Target(outcome)
    *_, last = _settled(target, to_commits([tx(1), tx(2)]), deadline_s=0.0)
    assert isinstance(last, StepFailed)
    assert (last.kind, last.outcome) == (kind, outcome)
    assert loop.error_class(last) is error
    assert target.asked == ["commit j.out/1/1/0/0"]


def test_an_abort_of_what_is_committed_is_given_up_at_once() -> None:
    target = _Target(AlreadyCommitted())
    (failed,) = _settled(target, to_aborts([tx(1), tx(2)]))
    assert isinstance(failed, StepFailed)
    assert (failed.kind, loop.error_class(failed)) == ("committed", errors.CommitFailed)
    assert target.asked == ["abort j.out/1/1/0/0"]


def test_what_a_person_must_fix_is_asked_again_only_where_somebody_waits_for_it() -> None:
    refused = RetryLater("a row breaks a constraint", until_fixed=True)
    for waits, ends in ((True, RetryAt), (False, StepFailed)):
        steps = PlannedSteps(to_commits([tx(1)]), recovery_retries(9.0, waits_for_people=waits))
        step = steps.next_commit(0.0)
        assert step is not None
        assert not isinstance(step, WaitUntil)
        assert isinstance(steps.outcome(step, refused, 0.0), ends)


class DriverError(Exception):
    """An error that the driver of a database has defined."""


@pytest.mark.parametrize(
    ("error", "waits"),
    [
        (DriverError("no such table"), True),
        (ValueError("no such month"), True),
        (errors.BadRow("id 7"), True),
        (errors.TargetRefused("a column is gone"), True),
        (ConnectionResetError("reset by peer"), False),
        (TimeoutError("no answer"), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_error_that_a_committer_lets_through_is_an_unknown_outcome(
    error: Exception, waits: bool
) -> None:
    def fail() -> CommitOutcome:
        raise error

    outcome = loop.ask_committer(fail)
    assert isinstance(outcome, Unknown)
    assert outcome.until_fixed is waits
    assert f"the sink raised {type(error).__name__}: {error} (raised at " in outcome.reason


@pytest.mark.parametrize("error", [errors.SinkError("no answer"), InvariantViolation("order")])
def test_what_onceflow_raises_in_a_committer_is_raised(error: Exception) -> None:
    def fail() -> CommitOutcome:
        raise error

    with pytest.raises(type(error)):
        loop.ask_committer(fail)


@given(
    delays=st.lists(st.floats(0.0, 3.0), min_size=1, max_size=30),
    deadline_s=st.floats(0.0, 8.0),
)
def test_a_step_is_tried_until_its_deadline_and_never_begun_after_it(
    delays: list[float], deadline_s: float
) -> None:
    """By the time at which its first try began: a try that takes long counts, too."""
    steps = PlannedSteps(to_commits([tx(1)]), CommitRetryPolicy(0.02, 2.0, 1.0, deadline_s))
    now_s = 100.0
    for delay_s in delays:
        step = steps.next_commit(now_s)
        if isinstance(step, WaitUntil):
            now_s = step.at_s
            step = steps.next_commit(now_s)
        assert step is not None
        assert not isinstance(step, WaitUntil)
        assert now_s - 100.0 <= deadline_s or now_s == 100.0
        now_s += delay_s
        ended = steps.outcome(step, RetryLater("later"), now_s)
        if isinstance(ended, StepFailed):
            break


def test_an_outcome_of_another_step_than_the_next_is_our_bug() -> None:
    steps = PlannedSteps(to_commits([tx(1), tx(2)]), recovery_retries(1.0))
    with pytest.raises(InvariantViolation, match="was not to be carried out"):
        steps.outcome(to_commits([tx(2)])[0], Committed(), 0.0)
    with pytest.raises(InvariantViolation, match="was to be committed"):
        steps.outcome(to_commits([tx(1)])[0], Aborted(), 0.0)


class _Single(spi.Committer):
    closed = False

    def commit(self, committable: Committable) -> CommitOutcome:
        return Committed()

    def abort(self, committable: Committable) -> AbortOutcome:
        return Aborted()

    def in_doubt(self) -> Sequence[Committable]:
        return ()

    def close(self) -> None:
        _Single.closed = True


class _Mistaken(spi.Sink):
    @property
    def committed_by(self) -> spi.CommittedBy:
        return spi.CommittedBy.DRIVER

    def writer(self, context: spi.WriterContext) -> spi.SinkWriter:
        raise NotImplementedError

    def committer(self, context: spi.CommitterContext) -> spi.Committer:
        return _Single()


def test_a_sink_whose_driver_commits_and_whose_committer_cannot_is_refused_by_name() -> None:
    with pytest.raises(
        errors.ConfigError, match="committer is a _Single. Derive the committer from GlobalComm"
    ):
        open_global_committer(_Mistaken(), CONTEXT)
    assert _Single.closed
