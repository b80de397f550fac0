"""Broken variants of what the log remembers; each must be caught, as those of `mutants`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from tests.simulation.variant import Variant

from onceflow.core.commit.planner import CommitPlan, plan_commits
from onceflow.core.protocol.checkpoints.snapshots import CompletedCheckpoint, commit_order
from onceflow.core.protocol.committables import Committable
from onceflow.core.protocol.log.memory import ATTEMPTS_MAX, Decided, LogMemory
from onceflow.core.protocol.log.rules import CheckpointDecided, LogView, next_decision

Remember = Callable[[LogMemory, LogMemory, CompletedCheckpoint], LogMemory]
"""(what was remembered, what is to be by the rules, the decision) -> what is."""


def _remembering(remember: Remember) -> Callable[..., CheckpointDecided]:
    def decide(view: LogView, completed: CompletedCheckpoint) -> CheckpointDecided:
        record = next_decision(view, completed)
        assert record.memory is not None
        return replace(record, memory=remember(view.memory, record.memory, completed))

    return decide


def _a_mark_a_decision(
    before: LogMemory, memory: LogMemory, completed: CompletedCheckpoint
) -> LogMemory:
    """Each decision takes the place of an attempt: long runs forget the attempt that runs."""
    if not completed.checkpoint:
        return memory
    marks = (*before.decided, Decided(completed.attempt, completed.checkpoint))
    forgotten = marks[:-ATTEMPTS_MAX]
    since = forgotten[-1].attempt + 1 if forgotten else before.since
    return replace(memory, decided=marks[-ATTEMPTS_MAX:], since=since)


def _one_too_far(before: LogMemory, memory: LogMemory, completed: CompletedCheckpoint) -> LogMemory:
    """Counts transactions of the checkpoint after the last decided one as decided."""
    last = tuple(Decided(one.attempt, one.checkpoint + 1) for one in memory.decided[-1:])
    return replace(memory, decided=(*memory.decided[:-1], *last))


def _nothing_committed(
    before: LogMemory, memory: LogMemory, completed: CompletedCheckpoint
) -> LogMemory:
    """Nobody asks for the proof of what was committed last."""
    return replace(memory, committed=())


def _first_committed(
    before: LogMemory, memory: LogMemory, completed: CompletedCheckpoint
) -> LogMemory:
    """The first transactions that were committed are asked for, for ever."""
    known = {one.transaction.sink_id for one in before.committed}
    newly = (one for one in memory.committed if one.transaction.sink_id not in known)
    return replace(memory, committed=(*before.committed, *newly))


def _forgets_sinks(
    before: LogMemory, memory: LogMemory, completed: CompletedCheckpoint
) -> LogMemory:
    """Only the sinks that a decision lists are known to hold something."""
    return replace(memory, sinks=())


def _asks_if_nothing_is_listed(
    decided: Sequence[Committable], in_doubt: Sequence[Committable], **named: Any
) -> CommitPlan:
    """Asks for the proof of what was committed last only where nothing else is to be committed."""
    plan = plan_commits(decided, in_doubt, **named)
    own = {c.transaction for c in decided if c.transaction.sink_id in named["sink_ids"]}
    listed = {c.transaction: c for c in plan.commit if c.transaction in own}
    if not listed:
        return plan
    commit = {c.transaction: c for c in plan.returned} | listed
    return replace(plan, commit=tuple(sorted(commit.values(), key=commit_order)))


def _leaves_what_has_returned(
    decided: Sequence[Committable], in_doubt: Sequence[Committable], **named: Any
) -> CommitPlan:
    """Leaves a committed transaction in doubt when it is in doubt again."""
    plan = plan_commits(decided, in_doubt, **named)
    returned = {c.transaction for c in plan.returned}
    kept = tuple(c for c in plan.commit if c.transaction not in returned)
    return replace(plan, commit=kept, returned=())


LOG_MUTANTS: tuple[Variant, ...] = (
    Variant("remembers decisions, not attempts", next_decision=_remembering(_a_mark_a_decision)),
    Variant("remembers one checkpoint too many", next_decision=_remembering(_one_too_far)),
    Variant("remembers no commit", next_decision=_remembering(_nothing_committed)),
    Variant("remembers the first commit", next_decision=_remembering(_first_committed)),
    Variant("remembers no sink", next_decision=_remembering(_forgets_sinks)),
    Variant("asks for the last proof if nothing is listed", plan=_asks_if_nothing_is_listed),
    Variant("leaves what is in doubt again", plan=_leaves_what_has_returned),
)
