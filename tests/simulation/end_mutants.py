"""Broken variants of the end of the input, where functions make last rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.simulation.variant import Variant

from onceflow.core.protocol.checkpoints.coordinator import CheckpointCoordinator
from onceflow.core.protocol.checkpoints.decisions import (
    Barrier,
    CheckpointKind,
    Decision,
    WriteSavepoint,
)
from onceflow.core.protocol.checkpoints.schedule import TriggerSchedule
from onceflow.core.protocol.checkpoints.snapshots import SubtaskSnapshot
from onceflow.core.protocol.ids import AttemptId, CheckpointId


class _EndsWithoutLastRows(CheckpointCoordinator):
    """Ends the job with the checkpoint that decides all that was read."""

    def __init__(self, *settings: Any, **named: Any) -> None:
        super().__init__(*settings, **(named | {"makes_last_rows": False}))


class _ForgetsItsEnd(CheckpointCoordinator):
    """A job that is started again at its end makes its last rows again."""

    def __init__(self, *settings: Any, **named: Any) -> None:
        super().__init__(*settings, **named)
        self._ended_at = None


class _ForgetsThatItDrained(CheckpointCoordinator):
    """Does not record after a draining savepoint that the last rows were emitted."""

    def on_ack(
        self,
        attempt: AttemptId,
        checkpoint: CheckpointId,
        snapshot: SubtaskSnapshot,
        now_s: float,
        *,
        in_target: bool = False,
    ) -> tuple[Decision, ...]:
        ended_at = self._ended_at
        decisions = super().on_ack(attempt, checkpoint, snapshot, now_s, in_target=in_target)
        if any(isinstance(decision, WriteSavepoint) for decision in decisions):
            self._ended_at = ended_at
        return decisions


class _FinalFirst(TriggerSchedule):
    """A source that has ended comes before the stop that follows a savepoint."""

    def _kind_at_once(self, newest_pending: CheckpointId) -> CheckpointKind | None:
        if self._bounded and not self._reading:
            return CheckpointKind.FINAL
        return super()._kind_at_once(newest_pending)


class _MakesLastRowsBehindASavepoint(CheckpointCoordinator):
    """Last rows are made after a savepoint with which the job stops."""

    def __init__(self, *settings: Any, **named: Any) -> None:
        super().__init__(*settings, **named)
        self._schedule = _FinalFirst(self._settings, named["sources"], named["now_s"])


class _EndOvertakes(CheckpointCoordinator):
    """The barrier that follows last rows goes ahead of them."""

    def _trigger(self, kind: CheckpointKind, now_s: float) -> Barrier:
        trigger = super()._trigger(kind, now_s)
        overtakes = kind is CheckpointKind.END and self._settings.overtakes_after_s is not None
        return replace(trigger, overtakes_after_s=0.0) if overtakes else trigger


END_MUTANTS: tuple[Variant, ...] = (
    Variant("ends without last rows", coordinator=_EndsWithoutLastRows),
    Variant("makes last rows at every start", coordinator=_ForgetsItsEnd),
    Variant("forgets that last rows were made by a drain", coordinator=_ForgetsThatItDrained),
    Variant("makes last rows behind a savepoint", coordinator=_MakesLastRowsBehindASavepoint),
    Variant("the end overtakes last rows", coordinator=_EndOvertakes),
)
