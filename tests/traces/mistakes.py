"""Mistakes in the product that the rules must see in the traces of jobs, and old defects put back.

Each mistake replaces attributes of the product in the process that records the trace, before it
forks the host of its slots.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.traces import batch_jobs, jobs

from onceflow.connectors.spark.batch import commits
from onceflow.connectors.spark.batch.commits import BatchCommits
from onceflow.core.commit.planner import CommitPlan
from onceflow.core.protocol import batches
from onceflow.core.protocol.checkpoints.decisions import AppendDecision
from onceflow.core.protocol.log import rules as log_rules
from onceflow.core.protocol.messages import Complete
from onceflow.core.protocol.splits import Split, SplitState
from onceflow.core.runtime.dataflow.source_operator import SourceOperator
from onceflow.core.runtime.driver import attempt_start, log_owner, sink_recovery
from onceflow.core.runtime.driver.attempt import Attempt
from onceflow.core.runtime.driver.background import CheckpointsCleaner
from onceflow.core.runtime.driver.sink_recovery import SinkRecovery
from onceflow.core.runtime.slot import operator_builders
from onceflow.core.runtime.slot.commits import CommitWorker

Replacement = tuple[Any, str, Callable[[Any], Any]]
"""The owner, the name of its attribute, and a function from the right value to the wrong one."""


@dataclass(frozen=True)
class Mistake:
    """A mistake, the job whose trace shows it, and a part of the broken rule."""

    name: str
    job: str
    rule: str
    replacements: Sequence[Replacement]
    since: str = ""
    """The date of the defect in docs/proof.md; empty if the mistake was never in the product."""

    def apply(self) -> None:
        """Break the product in this process."""
        for owner, attribute, break_it in self.replacements:
            setattr(owner, attribute, break_it(owner.__dict__[attribute]))

    @property
    def file(self) -> str:
        """The name of the file with the recorded trace."""
        return self.name.replace(" ", "-") + ".jsonl"


JOBS: dict[str, Callable[[Path], None]] = {
    "one attempt": jobs.run_one_attempt,
    "a slot dies after its ack": jobs.run_to_crash("acked"),
    "a slot dies before its commit": jobs.run_to_crash("commit"),
    "two drivers": jobs.run_two_drivers,
    "a sink is retired": jobs.run_without_a_sink,
    "an older copy of storage": jobs.run_in_an_older_copy,
    "a failed sweep": jobs.run_with_failed_sweeps(1),
    "a target that refuses each sweep": jobs.run_with_failed_sweeps(2),
    "batches": batch_jobs.run_batches,
    "killed batches": batch_jobs.run_killed_batches,
    "two drivers of batches": batch_jobs.run_two_drivers_of_batches,
}


def _discards_alone(_: Any) -> Any:
    def clean_at_end(self: Any, newest: Any) -> None:
        del newest
        self.discard(())

    return clean_at_end


def _asks_first(_: Any) -> Any:
    def recover(self: Any, restored: Any) -> Any:
        self.ask_targets()
        in_doubt = [self._list_left(target) for target in self._targets]
        recovered = tuple(
            self._settle(target, self._plan_recovery(target, restored, left))
            for target, left in zip(self._targets, in_doubt, strict=True)
        )
        self._log.trace.record("recovered")
        return recovered

    return recover


def _forgets_retired(right: Any) -> Any:
    def recover(self: Any, restored: Any) -> Any:
        recovered = right(self, restored)
        self._log.settle(self._retired)
        return recovered

    return recover


def _accepts_any_log(_: Any) -> Any:
    def accept(*_: Any) -> None:
        pass

    return accept


def _completes_first(right: Any) -> Any:
    def do(self: Any, decision: Any) -> None:
        if isinstance(decision, AppendDecision):
            checkpoint = decision.completed.checkpoint
            needed = dict.fromkeys(self._context.log.view.memory.sinks, checkpoint)
            self._trace.record("completed", checkpoint=checkpoint)
            self._slots.send_all(Complete(checkpoint, needed))
        right(self, decision)

    return do


def _commits_when_prepared(right: Any) -> Any:
    def record(self: Any, checkpoint: Any, committables: Any) -> Any:
        listed = right(self, checkpoint, committables)
        with self._condition:
            self._queue.note_decision(checkpoint)
            self._condition.notify_all()
        return listed

    return record


def _rolls_back_what_is_decided(right: Any) -> Any:
    def plan(*given: Any, **others: Any) -> CommitPlan:
        planned: CommitPlan = right(*given, **others)
        return replace(planned, commit=(), abort=(*planned.commit, *planned.abort))

    return plan


def _rolls_nothing_back(right: Any) -> Any:
    def plan(*given: Any, **others: Any) -> CommitPlan:
        planned: CommitPlan = right(*given, **others)
        return replace(planned, abort=())

    return plan


def _any_record_stands(_: Any) -> Any:
    def check(*_: Any, **__: Any) -> Any:
        return log_rules.AppendStands()

    return check


def _acknowledges_what_is_read(right: Any) -> Any:
    def on_completed(self: Any, checkpoint: Any) -> None:
        if checkpoint in self._positions:
            self._positions[checkpoint] = self.reader.snapshot()
        right(self, checkpoint)

    return on_completed


def _oldest_checkpoint(right: Any) -> Any:
    def build(**given: Any) -> Any:
        return right(**{**given, "restored": given["log"].view.completed[0]})

    return build


def _from_the_start(right: Any) -> Any:
    def decode(element: bytes) -> SplitState:
        state: SplitState = right(element)
        return SplitState(Split(state.split.id, b"0"))

    return decode


def _writes_each_batch(_: Any) -> Any:
    def judge(*_: Any, **__: Any) -> Any:
        return batches.WriteBatch()

    return judge


def _decides_each_batch(_: Any) -> Any:
    def check(*_: Any, **__: Any) -> Any:
        return batches.Decide()

    return check


def _commits_batch_first(right: Any) -> Any:
    def decide(self: Any, proposed: Any, beside: Any) -> Any:
        committer, trace = self._committer_for(proposed.attempt), self._trace(proposed.attempt)
        self._carry_out(trace, committer, self._to_commits(proposed.committables))
        return right(self, proposed, beside)

    return decide


def _carries_nothing_out(_: Any) -> Any:
    def carry_out(*_: Any) -> None:
        pass

    return carry_out


MISTAKES: tuple[Mistake, ...] = (
    Mistake(
        "a job ends without the sweep that has failed",
        "a failed sweep",
        "no sweep has looked for",
        ((CheckpointsCleaner, "clean_at_end", _discards_alone),),
        since="2026-11-30",
    ),
    Mistake(
        "recovery asks for commits before it lists",
        "one attempt",
        "a commit in between is in neither answer",
        ((SinkRecovery, "recover", _asks_first),),
        since="2026-11-30",
    ),
    Mistake(
        "the log forgets a sink before the sweep",
        "a sink is retired",
        "the log forgets sink job.gone",
        ((SinkRecovery, "recover", _forgets_retired),),
        since="2026-11-22",
    ),
    Mistake(
        "an older copy of storage is accepted",
        "an older copy of storage",
        "goes on from checkpoint",
        (
            (log_owner, "require_not_behind", _accepts_any_log),
            (sink_recovery, "require_not_behind", _accepts_any_log),
        ),
        since="2026-11-23",
    ),
    Mistake(
        "slots commit before the decision",
        "one attempt",
        "which is not decided",
        ((Attempt, "_do", _completes_first),),
    ),
    Mistake(
        "a slot commits what it has prepared",
        "one attempt",
        "its committer knows no decision of it",
        ((CommitWorker, "record_pre_commit", _commits_when_prepared),),
    ),
    Mistake(
        "recovery rolls back what is decided",
        "a slot dies before its commit",
        "has decided it",
        ((sink_recovery, "plan_commits", _rolls_back_what_is_decided),),
    ),
    Mistake(
        "recovery rolls nothing back",
        "a slot dies after its ack",
        "is in doubt, and stays so",
        ((sink_recovery, "plan_commits", _rolls_nothing_back),),
    ),
    Mistake(
        "a driver that is fenced decides",
        "two drivers",
        "has claimed the log",
        ((log_rules, "check_append", _any_record_stands),),
    ),
    Mistake(
        "a source acknowledges what it has read",
        "one attempt",
        "acknowledges",
        ((SourceOperator, "on_completed", _acknowledges_what_is_read),),
    ),
    Mistake(
        "the oldest checkpoint is restored",
        "a slot dies after its ack",
        "and the last decision is",
        ((attempt_start, "AttemptContext", _oldest_checkpoint),),
    ),
    Mistake(
        "a source begins again from its start",
        "a slot dies after its ack",
        "goes on from 0 of split",
        ((operator_builders, "decode_split", _from_the_start),),
    ),
    Mistake(
        "an older run decides a batch",
        "two drivers of batches",
        "has claimed the log",
        ((batches, "check_decision", _decides_each_batch),),
    ),
    Mistake(
        "a batch is decided twice",
        "batches",
        "have both decided batch 0 of q",
        (
            (batches, "judge_batch", _writes_each_batch),
            (batches, "check_decision", _decides_each_batch),
        ),
    ),
    Mistake(
        "a batch is committed before its decision",
        "batches",
        "its committer knows no decision of it",
        ((BatchCommits, "_decide", _commits_batch_first),),
    ),
    Mistake(
        "a batch is marked before its commits",
        "batches",
        "a batch is marked as committed",
        ((BatchCommits, "_carry_out", _carries_nothing_out),),
    ),
    Mistake(
        "a plan rolls back what is decided",
        "killed batches",
        "has decided it",
        ((commits, "plan_claimed", _rolls_back_what_is_decided),),
    ),
    Mistake(
        "a plan leaves what a killed task has prepared",
        "killed batches",
        "is in doubt, and stays so",
        ((commits, "plan_claimed", _rolls_nothing_back),),
    ),
)
