"""Broken variants of savepoints; each must be caught, as those of `mutants`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tests.simulation.slots import SPLITS
from tests.simulation.variant import Variant

from onceflow.core.protocol.checkpoints.alignment import BarrierAlignment
from onceflow.core.protocol.checkpoints.coordinator import CheckpointCoordinator
from onceflow.core.protocol.checkpoints.decisions import (
    Decision,
    DiscardState,
    NotifyComplete,
    WriteSavepoint,
)
from onceflow.core.protocol.checkpoints.snapshots import (
    CompletedCheckpoint,
    SubtaskSnapshot,
    handles_of,
)
from onceflow.core.protocol.ids import AttemptId, CheckpointId
from onceflow.core.protocol.log.memory import LogMemory
from onceflow.core.protocol.log.rules import LogView
from onceflow.core.protocol.savepoints.savepoint import (
    Savepoint,
    build_first_decision,
    check_savepoint,
)
from onceflow.core.protocol.savepoints.savepoint import (
    _positions as _read_by,  # pyright: ignore[reportPrivateUsage]
)


class _SavepointIsTold(CheckpointCoordinator):
    """Tells the sinks that a savepoint is complete, as if it had been decided."""

    def on_savepoint_end(
        self, checkpoint: CheckpointId, now_s: float, *, error: str = ""
    ) -> tuple[Decision, ...]:
        decisions = super().on_savepoint_end(checkpoint, now_s, error=error)
        return (NotifyComplete(checkpoint, checkpoint), *decisions)


class _SavepointLosesFiles(CheckpointCoordinator):
    """Deletes the state of a savepoint before it is written."""

    def on_ack(
        self,
        attempt: AttemptId,
        checkpoint: CheckpointId,
        snapshot: SubtaskSnapshot,
        now_s: float,
        *,
        in_target: bool = False,
    ) -> tuple[Decision, ...]:
        decisions = super().on_ack(attempt, checkpoint, snapshot, now_s, in_target=in_target)
        lost = [
            DiscardState(handles_of(decision.completed.snapshots))
            for decision in decisions
            if isinstance(decision, WriteSavepoint)
        ]
        return (*decisions, *lost)


class _SavepointKeepsFiles(CheckpointCoordinator):
    """Keeps the files that were uploaded for a savepoint."""

    def on_savepoint_end(
        self, checkpoint: CheckpointId, now_s: float, *, error: str = ""
    ) -> tuple[Decision, ...]:
        decisions = super().on_savepoint_end(checkpoint, now_s, error=error)
        return tuple(d for d in decisions if not isinstance(d, DiscardState))


class _TakesFilesForTheJobs(CheckpointCoordinator):
    """Takes files in a savepoint's directory for files in the job's storage."""

    def on_ack(
        self,
        attempt: AttemptId,
        checkpoint: CheckpointId,
        snapshot: SubtaskSnapshot,
        now_s: float,
        *,
        in_target: bool = False,
    ) -> tuple[Decision, ...]:
        return super().on_ack(attempt, checkpoint, snapshot, now_s)


def _any_savepoint(savepoint: Savepoint, view: LogView, **told: Any) -> None:
    """Lets a job begin from a savepoint whatever was decided since."""
    told["allow_rewind"] = True
    check_savepoint(savepoint, view, **told)


def _newer_by_number(savepoint: Savepoint, view: LogView, **told: Any) -> None:
    """Forgets that a later attempt numbers anew what an earlier one has not decided."""
    number = savepoint.completed.checkpoint
    told["allow_rewind"] = view.decided and view.completed[-1].checkpoint <= number
    check_savepoint(savepoint, view, **told)


def _same_cut_by_positions(savepoint: Savepoint, view: LogView, **told: Any) -> None:
    """Takes a savepoint for the last decision where the sources stand as they stood."""
    last = view.completed[-1] if view.decided else savepoint.completed
    told["allow_rewind"] = told["allow_rewind"] or _positions(last) == _positions(
        savepoint.completed
    )
    check_savepoint(savepoint, view, **told)


def _positions(completed: CompletedCheckpoint) -> list[bytes]:
    operators = [operator for snapshot in completed.snapshots for operator in snapshot.operators]
    return sorted(e for operator in operators for e in operator.lists.get(SPLITS, ()))


class _EmitsAfterStopSavepoint(BarrierAlignment):
    """Goes on firing timers between a savepoint with which the job stops and its end."""

    @property
    def may_emit(self) -> bool:
        return not self.all_ended


def _same_if_less_was_read(savepoint: Savepoint, view: LogView, **told: Any) -> None:
    """Takes a decision that holds more for the same cut, if it holds all that a savepoint does."""
    if view.decided and _read_by(savepoint.completed) <= _read_by(view.completed[-1]):
        told["allow_rewind"] = True
    check_savepoint(savepoint, view, **told)


def _counts_on_what_is_gone(savepoint: Savepoint, view: LogView, **told: Any) -> None:
    """Forgets that an attempt after the savepoint's has rolled back what it lists."""
    told["last_attempt"] = savepoint.completed.attempt
    check_savepoint(savepoint, view, **told)


def _begins_with(**changes: Any) -> Callable[..., CompletedCheckpoint]:
    def begin(*arguments: Any, **named: Any) -> CompletedCheckpoint:
        return replace(build_first_decision(*arguments, **named), **changes)

    return begin


def _begins_without_prepared(
    savepoint: Savepoint, view: LogView, **named: Any
) -> CompletedCheckpoint:
    """Lists what the last decision lists, and not what the savepoint's attempt has prepared."""
    stated = tuple(
        replace(s, operators=tuple(replace(o, committables=()) for o in s.operators))
        for s in savepoint.completed.snapshots
    )
    without = replace(savepoint, completed=replace(savepoint.completed, snapshots=stated))
    return build_first_decision(without, view, **named)


def _numbers_go_on(savepoint: Savepoint, view: LogView, **named: Any) -> CompletedCheckpoint:
    """In new storage, numbers go on right after the savepoint's: its last checkpoint has them."""
    decision = build_first_decision(savepoint, view, **named)
    number = savepoint.completed.checkpoint + 1
    return decision if view.decided else replace(decision, checkpoint=CheckpointId(number))


def _remembers_too_much(view: LogView, taken: CompletedCheckpoint) -> LogMemory:
    """Takes what its job decides while a savepoint is written for known by it."""
    return view.memory


def _remembers_too_little(view: LogView, taken: CompletedCheckpoint) -> LogMemory:
    """Forgets that what a savepoint lists no more than the last decision did is committed."""
    return view.memory.until(taken.attempt, taken.checkpoint)


SAVEPOINT_MUTANTS: tuple[Variant, ...] = (
    Variant("tells sinks to commit at a savepoint", coordinator=_SavepointIsTold),
    Variant("deletes a savepoint's files before it is written", coordinator=_SavepointLosesFiles),
    Variant("never deletes what was uploaded for a savepoint", coordinator=_SavepointKeepsFiles),
    Variant("takes files of a savepoint for files of the job", coordinator=_TakesFilesForTheJobs),
    Variant(
        "trusts the name of a savepoint's directory",
        trusts_locations=True,
        looks_for_mark_once=True,
    ),
    Variant("looks for a savepoint's mark once", looks_for_mark_once=True),
    Variant("begins from any savepoint", check_savepoint=_any_savepoint),
    Variant(
        "takes a part of what was read for the same cut", check_savepoint=_same_if_less_was_read
    ),
    Variant(
        "counts on what a later attempt has rolled back", check_savepoint=_counts_on_what_is_gone
    ),
    Variant(
        "a restored decision names none undelivered", restored_from=_begins_with(undelivered=())
    ),
    Variant(
        "a restored decision forgets what a savepoint has prepared",
        restored_from=_begins_without_prepared,
    ),
    Variant("numbers go on at once in new storage", restored_from=_numbers_go_on),
    Variant("tells by numbers what came after a savepoint", check_savepoint=_newer_by_number),
    Variant("tells by positions what came after", check_savepoint=_same_cut_by_positions),
    Variant("a savepoint remembers what is decided after it", memory_at=_remembers_too_much),
    Variant("a savepoint forgets the commits before it", memory_at=_remembers_too_little),
    Variant("emits after a stop savepoint", alignment=_EmitsAfterStopSavepoint),
)
