"""Broken variants of savepoints; each must be caught, as those of `mutants`."""

from __future__ import annotations

from typing import Any

from tests.simulation.variant import Variant

from onceflow.core.protocol.coordinator import CheckpointCoordinator
from onceflow.core.protocol.decisions import (
    Decision,
    DiscardState,
    NotifyComplete,
    WriteSavepoint,
)
from onceflow.core.protocol.ids import AttemptId, CheckpointId
from onceflow.core.protocol.log import LogView
from onceflow.core.protocol.savepoints import Savepoint, check_savepoint
from onceflow.core.protocol.snapshots import SubtaskSnapshot, handles_of


class _SavepointIsTold(CheckpointCoordinator):
    """Tells the sinks that a savepoint is complete, as if it had been decided."""

    def savepoint_ended(
        self, checkpoint: CheckpointId, now_s: float, *, error: str = ""
    ) -> tuple[Decision, ...]:
        decisions = super().savepoint_ended(checkpoint, now_s, error=error)
        return (NotifyComplete(checkpoint, checkpoint), *decisions)


class _SavepointLosesFiles(CheckpointCoordinator):
    """Deletes the state of a savepoint before it is written."""

    def acked(
        self, attempt: AttemptId, checkpoint: CheckpointId, snapshot: SubtaskSnapshot, now_s: float
    ) -> tuple[Decision, ...]:
        decisions = super().acked(attempt, checkpoint, snapshot, now_s)
        lost = [
            DiscardState(handles_of(decision.completed.snapshots))
            for decision in decisions
            if isinstance(decision, WriteSavepoint)
        ]
        return (*decisions, *lost)


class _SavepointKeepsFiles(CheckpointCoordinator):
    """Never deletes what was uploaded for a savepoint."""

    def savepoint_ended(
        self, checkpoint: CheckpointId, now_s: float, *, error: str = ""
    ) -> tuple[Decision, ...]:
        decisions = super().savepoint_ended(checkpoint, now_s, error=error)
        return tuple(d for d in decisions if not isinstance(d, DiscardState))


def _any_savepoint(savepoint: Savepoint, view: LogView, **told: Any) -> None:
    """Lets a job begin from a savepoint whatever was decided since."""
    told["allow_rewind"] = True
    check_savepoint(savepoint, view, **told)


def _newer_by_number(savepoint: Savepoint, view: LogView, **told: Any) -> None:
    """Forgets that a later attempt numbers anew what an earlier one has not decided."""
    number = savepoint.completed.checkpoint
    told["allow_rewind"] = view.decided and view.completed[-1].checkpoint <= number
    check_savepoint(savepoint, view, **told)


SAVEPOINT_MUTANTS: tuple[Variant, ...] = (
    Variant("tells sinks to commit at a savepoint", coordinator=_SavepointIsTold),
    Variant("deletes a savepoint's files before it is written", coordinator=_SavepointLosesFiles),
    Variant("never deletes what was uploaded for a savepoint", coordinator=_SavepointKeepsFiles),
    Variant("begins from any savepoint", check_savepoint=_any_savepoint),
    Variant("tells by numbers what came after a savepoint", check_savepoint=_newer_by_number),
)
