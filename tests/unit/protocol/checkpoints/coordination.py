"""A coordinator of four subtasks with its decisions collected, for tests that read like S50-S61."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

from onceflow.core.protocol.checkpoints.coordinator import CheckpointCoordinator, CheckpointSettings
from onceflow.core.protocol.checkpoints.decisions import (
    AppendDecision,
    Barrier,
    Decision,
    DiscardState,
    NotifyComplete,
)
from onceflow.core.protocol.checkpoints.snapshots import (
    CompletedCheckpoint,
    OperatorSnapshot,
    StateHandle,
    SubtaskSnapshot,
)
from onceflow.core.protocol.ids import AttemptId, CheckpointId, SubtaskRef

ATTEMPT = AttemptId(3)
START_S = 1000.0
WALL_S = 1_700_000_000.0
SOURCES = tuple(SubtaskRef("source", index) for index in range(2))
SINKS = tuple(SubtaskRef("sink", index) for index in range(2))
SUBTASKS = (*SOURCES, *SINKS)

_D = TypeVar("_D")


def private(path: str) -> StateHandle:
    return StateHandle(name=path, path=path, size_bytes=1, checksum="x")


def shared(path: str) -> StateHandle:
    return StateHandle(name=path, path=path, size_bytes=1, checksum="x", shared=True)


def snapshot(subtask: SubtaskRef, *handles: StateHandle) -> SubtaskSnapshot:
    return SubtaskSnapshot(subtask, (OperatorSnapshot("op", keyed=handles),))


def completed(
    number: int, *handles: StateHandle, attempt: int = 2, parallelism: int = 2
) -> CompletedCheckpoint:
    return CompletedCheckpoint(
        checkpoint=CheckpointId(number),
        attempt=AttemptId(attempt),
        parallelism=parallelism,
        max_parallelism=128,
        snapshots=(snapshot(SINKS[0], *handles),),
        triggered_at_ms=0,
        completed_at_ms=0,
    )


class Coordination:
    """Feeds facts to a coordinator at `now_s` and keeps every decision and every deleted path."""

    def __init__(
        self,
        settings: CheckpointSettings,
        retained: Sequence[CompletedCheckpoint] = (),
        committers: frozenset[SubtaskRef] = frozenset(),
        *,
        makes_last_rows: bool = False,
    ) -> None:
        last = retained[-1].checkpoint if retained else 0
        self.now_s = START_S
        self.wall_s = WALL_S
        self.coordinator = CheckpointCoordinator(
            settings,
            attempt=ATTEMPT,
            subtasks=frozenset(SUBTASKS),
            sources=frozenset(SOURCES),
            parallelism=2,
            max_parallelism=128,
            retained=retained,
            next_checkpoint=CheckpointId(last + 1),
            now_s=self.now_s,
            wall_ms=lambda: int(self.wall_s * 1000),
            committers=committers,
            makes_last_rows=makes_last_rows,
        )
        self.decisions: list[Decision] = []
        self.deleted: list[str] = []

    def _noted(self, decisions: Iterable[Decision]) -> list[Decision]:
        noted = list(decisions)
        self.decisions += noted
        for decision in of_type(DiscardState, noted):
            self.deleted += [handle.path for handle in decision.handles]
        return noted

    def tick(self, after_s: float = 0.0) -> list[Decision]:
        self.now_s += after_s
        return self._noted(self.coordinator.tick(self.now_s))

    def trigger(self) -> int:
        """Let time pass until the next checkpoint is triggered; return its number."""
        wake_s = self.coordinator.next_wake_s()
        assert wake_s is not None
        self.now_s = max(self.now_s, wake_s)
        (trigger,) = of_type(Barrier, self.tick())
        return trigger.checkpoint

    def ack(
        self,
        number: int,
        subtask: SubtaskRef,
        *handles: StateHandle,
        attempt: int = ATTEMPT,
        in_target: bool = False,
    ) -> list[Decision]:
        return self._noted(
            self.coordinator.on_ack(
                AttemptId(attempt),
                CheckpointId(number),
                snapshot(subtask, *handles),
                self.now_s,
                in_target=in_target,
            )
        )

    def ack_all(self, number: int, *handles: StateHandle) -> list[Decision]:
        """Every subtask acks; the last sink names `handles`."""
        decisions: list[Decision] = []
        for subtask in SUBTASKS:
            decisions += self.ack(number, subtask, *(handles if subtask is SUBTASKS[-1] else ()))
        return decisions

    def decline(
        self, number: int, subtask: SubtaskRef = SINKS[0], attempt: int = ATTEMPT
    ) -> list[Decision]:
        return self._noted(
            self.coordinator.on_decline(
                AttemptId(attempt), CheckpointId(number), subtask, "full", self.now_s
            )
        )

    def logged(self, number: int) -> list[Decision]:
        return self._noted(self.coordinator.on_logged(CheckpointId(number), self.now_s))

    def append_failed(self, number: int) -> list[Decision]:
        return self._noted(
            self.coordinator.on_append_failure(CheckpointId(number), "no space", self.now_s)
        )

    def committed(self, number: int, subtasks: Sequence[SubtaskRef] = SUBTASKS) -> list[Decision]:
        decisions: list[Decision] = []
        for subtask in subtasks:
            decisions += self._noted(
                self.coordinator.on_committed(subtask, CheckpointId(number), self.now_s)
            )
        return decisions

    def complete(self, number: int, *handles: StateHandle) -> list[Decision]:
        """All ack, the log takes it, all commit."""
        self.ack_all(number, *handles)
        decisions = self.logged(number)
        self.committed(number)
        return decisions

    @property
    def notified(self) -> list[int]:
        return [decision.checkpoint for decision in of_type(NotifyComplete, self.decisions)]

    @property
    def appending(self) -> int | None:
        """Return the decision that is to be appended and is not finished."""
        ends = [d for d in self.decisions if isinstance(d, AppendDecision)]
        number = ends[-1].completed.checkpoint if ends else None
        return number if number in self.pending else None

    @property
    def pending(self) -> list[int]:
        return list(self.coordinator.pending)

    @property
    def retained(self) -> list[int]:
        return [kept.checkpoint for kept in self.coordinator.completed]


def of_type(wanted: type[_D], decisions: Iterable[object]) -> list[_D]:
    return [decision for decision in decisions if isinstance(decision, wanted)]
