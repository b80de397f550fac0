"""Broken variants of commits of whole checkpoints; each must be caught, as those of `mutants`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tests.simulation.targets import Versioned
from tests.simulation.variant import Variant

from onceflow.core.commit.whole_checkpoints import (
    GlobalCommit,
    GlobalCommitQueue,
    GlobalRecoveryPlan,
    PreCommits,
    plan_global_recovery,
)
from onceflow.core.protocol.checkpoints.coordinator import (
    CheckpointCoordinator,
    _Pending,  # pyright: ignore[reportPrivateUsage]
)
from onceflow.core.protocol.checkpoints.snapshots import CompletedCheckpoint
from onceflow.core.protocol.committables import Committable
from onceflow.core.protocol.ids import GENESIS, CheckpointId
from onceflow.core.protocol.log.memory import LogMemory
from onceflow.core.protocol.splits import with_lists

if TYPE_CHECKING:
    from tests.simulation.world import World


class _ListsOwnOnly(PreCommits):
    """Acks list only the checkpoint's own files, not those of aborted ones before it."""

    def pending_through(self, checkpoint: CheckpointId) -> tuple[Committable, ...]:
        return tuple(c for c in super().pending_through(checkpoint) if c.checkpoint == checkpoint)


class _MergesDecisions(GlobalCommitQueue):
    """Makes one version of all decisions that wait."""

    def add_decision(self, completed: CompletedCheckpoint, now_s: float) -> None:
        super().add_decision(completed, now_s)
        if self._waiting and self._tries is None:
            all_waiting = tuple(c for commit in self._waiting for c in commit.committables)
            self._waiting[:] = [GlobalCommit(self._waiting[-1].checkpoint, all_waiting)]


class _NeverEnds(GlobalCommitQueue):
    """Gathers more after the last decision."""

    def add_decision(self, completed: CompletedCheckpoint, now_s: float) -> None:
        super().add_decision(replace(completed, final=False), now_s)


class _ReportsGathered(GlobalCommitQueue):
    """Takes what gathers for committed."""

    def _advance(self) -> None:
        waiting = self._waiting
        if self._interval:
            self._waiting = waiting[-1:]
        super()._advance()
        self._waiting = waiting


class _CommitsListed(GlobalCommitQueue):
    """Commits all that a decision lists, also what an earlier one did."""

    def add_decision(self, completed: CompletedCheckpoint, now_s: float) -> None:
        self._decided_last = CheckpointId(0)
        super().add_decision(completed, now_s)


class _CommitsWholeNewestFirst(GlobalCommitQueue):
    """Commits the newest decision first."""

    def add_decision(self, completed: CompletedCheckpoint, now_s: float) -> None:
        super().add_decision(completed, now_s)
        if self._tries is None:
            self._waiting.sort(key=lambda commit: -commit.checkpoint)


def _as_one(decided: CompletedCheckpoint, *arguments: Any, **named: Any) -> GlobalRecoveryPlan:
    return plan_global_recovery(replace(decided, undelivered=()), *arguments, **named)


def _whole_of_none(*arguments: Any, **named: Any) -> GlobalRecoveryPlan:
    return replace(plan_global_recovery(*arguments, **named), commit=())


def _without_proof(*arguments: Any, **named: Any) -> GlobalRecoveryPlan:
    nothing = dict(named, committed_through=GENESIS, memory=LogMemory())
    plan = plan_global_recovery(*arguments, **nothing)
    return replace(plan, abort=plan_global_recovery(*arguments, **named).abort)


def _sees_no_older_copy(
    decided: CompletedCheckpoint, *arguments: Any, **named: Any
) -> GlobalRecoveryPlan:
    plan = plan_global_recovery(decided, *arguments, **named)
    if not plan.behind:
        return plan
    unknown = replace(decided, delivered_through=GENESIS)
    return plan_global_recovery(unknown, *arguments, **dict(named, memory=LogMemory()))


class _FurthestCommitter(CheckpointCoordinator):
    """Takes for delivered what one committer has committed, and another may not."""

    def _find_delivered_through(self) -> CheckpointId:
        return max((self._delivered[committer] for committer in self._committers), default=GENESIS)


class _NamesNoneUndelivered(CheckpointCoordinator):
    """A decision names none before it."""

    def _complete(self, pending: _Pending) -> CompletedCheckpoint:
        return replace(super()._complete(pending), undelivered=())


class _NamesLaterUndelivered(CheckpointCoordinator):
    """A savepoint names what was decided after its barrier, too."""

    def _complete(self, pending: _Pending) -> CompletedCheckpoint:
        return replace(super()._complete(pending), undelivered=tuple(self._undelivered))


def _regrown_from_last(*arguments: Any, **named: Any) -> CompletedCheckpoint:
    """A decision that takes in what is new names the one before it, and none before that."""
    grown = with_lists(*arguments, **named)
    return replace(grown, undelivered=grown.undelivered[-1:])


def _keeps_no_order(world: World) -> None:
    for target in world.targets.values():
        if isinstance(target, Versioned):
            target.keeps_order = False


GLOBAL_MUTANTS: tuple[Variant, ...] = (
    Variant("forgets files of aborted checkpoints", pre_commits=_ListsOwnOnly),
    Variant("forgets files that are decided and not committed", drops_decided=True),
    Variant("makes one version of several decisions", global_queue=_MergesDecisions),
    Variant("commits again what a decision lists again", global_queue=_CommitsListed),
    Variant("commits the newest decision first", global_queue=_CommitsWholeNewestFirst),
    Variant("commits a whole checkpoint before the decision", whole_before_decision=True),
    Variant("finishes before the last whole commit", waits_for_whole=False),
    Variant("recovery makes one version of several decisions", global_plan=_as_one),
    Variant("recovery commits no whole checkpoint", global_plan=_whole_of_none),
    Variant("recovery does not ask for the ordered proof", global_plan=_without_proof),
    Variant("recovery sees no older copy of a table", global_plan=_sees_no_older_copy),
    Variant("takes the furthest committer for all", coordinator=_FurthestCommitter),
    Variant("a decision names none undelivered", coordinator=_NamesNoneUndelivered),
    Variant("a savepoint names what is decided after it", coordinator=_NamesLaterUndelivered),
    Variant("a source that is added hides what is undelivered", with_lists=_regrown_from_last),
    Variant("the target keeps no ordered proof", prepare=_keeps_no_order),
    Variant("gathers after the last decision", global_queue=_NeverEnds),
    Variant("takes what gathers for committed", global_queue=_ReportsGathered),
)
