"""The loop that commits or aborts transactions, and the opening of its committers.

It serves slots, recovery, batches and people.

A queue chooses the next step, when it is retried, and when it is given up. A committer carries it
out. The loop connects the two and decides nothing. Its caller reports the meaning of a given-up
step.
"""

from __future__ import annotations

import logging
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from functools import partial
from typing import Generic, TypeVar

from onceflow.core import errors
from onceflow.core.commit.queue import Commit, RetryAt, StepEnd, StepFailed, WaitUntil
from onceflow.core.commit.steps import AbortOne, CommitOne, CommitWhole, PlannedSteps, Step
from onceflow.core.errors import ConfigError, InvariantViolation, require
from onceflow.core.protocol.committables import AbortOutcome, CommitOutcome, Unknown
from onceflow.core.protocol.ids import TransactionId
from onceflow.core.protocol.log.target_records import TargetRecord
from onceflow.core.spi import CommittedBy, Committer, CommitterContext, GlobalCommitter, Sink
from onceflow.core.spi.bad_rows import may_pass


def open_global_committer(sink: Sink, context: CommitterContext) -> GlobalCommitter:
    """Return the committer of whole checkpoints of `sink`, whose `committed_by` is the driver.

    Raises:
        ConfigError: The sink returns a committer of single transactions.
    """
    committer = sink.committer(context)
    if isinstance(committer, GlobalCommitter):
        return committer
    committer.close()
    raise ConfigError(
        f"sink {context.uid}: {sink!r} sets `committed_by` to the driver, but its committer is a"
        f" {type(committer).__name__}. Derive the committer from GlobalCommitter, or do not set"
        " `committed_by`"
    )


def read_target_record(sink: Sink, context: CommitterContext) -> TargetRecord | None:
    """Return the target's record of the sink id, or None if the target keeps none.

    If the driver commits the sink's checkpoints, the record contains how far they are committed.
    Changes nothing.

    Raises:
        ConfigError: Another job owns the sink id.
        SinkError: The target cannot be asked now.
    """
    record = sink.target_record(context)
    if record is not None or sink.committed_by is CommittedBy.SLOTS:
        return record
    committer = open_global_committer(sink, context)
    try:
        return TargetRecord(context.sink_id, through=committer.read_committed_through())
    finally:
        committer.close()


_logger = logging.getLogger("onceflow.commit")

S = TypeVar("S")
OutcomeT = TypeVar("OutcomeT", bound=CommitOutcome | AbortOutcome)


class StepSource(ABC, Generic[S, OutcomeT]):
    """A queue with a clock, which waits until it is time for the next step."""

    @abstractmethod
    def take(self) -> S | None:
        """Return the next step when it is time for it, or None when none is left."""

    @abstractmethod
    def end(self, step: S, outcome: OutcomeT) -> StepEnd:
        """Record the outcome of a try of `step` and return what follows."""


def settle(
    source: StepSource[S, OutcomeT], carry_out: Callable[[S], OutcomeT]
) -> Iterator[tuple[S, StepEnd]]:
    """Carry out all steps of `source` in order; yield each try with what follows it.

    Ends when no step is left, or after the first step that is given up.
    """
    while (step := source.take()) is not None:
        ended = source.end(step, carry_out(step))
        yield step, ended
        # The step stays at the head of its queue. Continuing would commit later steps before it and
        # change the order in which rows become visible.
        if isinstance(ended, StepFailed):
            return


class TimedSteps(StepSource[Step, CommitOutcome | AbortOutcome]):
    """Planned steps, timed by the monotonic clock, on the caller's thread."""

    def __init__(self, steps: PlannedSteps) -> None:
        self._steps = steps

    def take(self) -> Step | None:
        """Return the next step once it is time for it, or None when all are done."""
        while isinstance(step := self._steps.next_commit(time.monotonic()), WaitUntil):
            # The clock is read twice, so the time may have passed in between, and sleep() refuses
            # negative values.
            time.sleep(max(0.0, step.at_s - time.monotonic()))
        return step

    def end(self, step: Step, outcome: CommitOutcome | AbortOutcome) -> StepEnd:
        """Record the outcome of a try of `step` and return what follows."""
        return self._steps.outcome(step, outcome, time.monotonic())


def carry_out(committer: Committer, step: Step) -> CommitOutcome | AbortOutcome:
    """Ask `committer` to do `step`, once, and return the outcome."""
    match step:
        case CommitOne(committable):
            return ask_committer(partial(committer.commit, committable))
        case AbortOne(committable):
            return ask_committer(partial(committer.abort, committable))
        case CommitWhole(commit):
            # Check twice on purpose: `require` also runs under -O and names the mistake, and the
            # assertion is for type checkers.
            require(isinstance(committer, GlobalCommitter), f"{committer} commits no checkpoints")
            assert isinstance(committer, GlobalCommitter)
            whole = partial(committer.commit_checkpoint, commit.checkpoint, commit.committables)
            return ask_committer(whole)


def ask_committer(call: Callable[[], OutcomeT]) -> OutcomeT | Unknown:
    """Return the outcome of `call` of a committer, or `Unknown` if it raises a foreign error.

    A committer should return an outcome. If it raises an error of its driver instead, this must not
    end a job whose rows are decided: the call may be repeated like any other commit.
    """
    try:
        return call()
    except (errors.BadRow, errors.TargetRefused) as error:
        return Unknown(_describe_error(error), until_fixed=True)
    except (errors.OnceflowError, InvariantViolation):
        raise
    except Exception as error:
        _logger.debug("a committer raised an error of its own", exc_info=True)
        return Unknown(_describe_error(error), until_fixed=not may_pass(error))


def _describe_error(error: Exception) -> str:
    """Return the class and the text of `error`, and the line that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    raised_at = f" (raised at {frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"the sink raised {type(error).__name__}: {error}{raised_at}"


def describe_refusal(commit: Commit, retry: RetryAt) -> str:
    """Return the text for people about a commit that is retried."""
    tries = "1 try" if retry.tries == 1 else f"{retry.tries} tries"
    return (
        f"{commit}, which checkpoint {commit.checkpoint} decided, is not committed after {tries}:"
        f" {retry.reason}. {advise(commit.transaction)}"
    )


def advise(transaction: TransactionId) -> str:
    """Return the advice for people about a commit that does not succeed."""
    return (
        f"`onceflow txn show {transaction}` prints the details; docs/operations.md says what to do"
    )


def error_class(failed: StepFailed) -> type[errors.SinkError]:
    """Return the class of the error that ends an attempt because of `failed`."""
    match failed.kind:
        case "lost":
            return errors.PreparedTransactionLost
        case "unknown":
            return errors.CommitOutcomeUnknown
        case "failed" | "committed":
            return errors.CommitFailed
