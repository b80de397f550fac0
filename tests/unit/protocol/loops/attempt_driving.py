"""The loop of an attempt with two slots, driven as its shell drives it, its decisions collected."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from tests.unit.protocol.checkpoints import coordination

from onceflow.core.errors import SlotLost
from onceflow.core.protocol import messages
from onceflow.core.protocol.checkpoints.coordinator import CheckpointCoordinator, CheckpointSettings
from onceflow.core.protocol.checkpoints.decisions import (
    AppendDecision,
    Barrier,
    SavepointRequest,
    WriteSavepoint,
)
from onceflow.core.protocol.ids import CheckpointId
from onceflow.core.protocol.loops import attempt_facts
from onceflow.core.protocol.loops.attempt import AttemptLoop
from onceflow.core.protocol.loops.slots import AttemptSettings
from onceflow.core.protocol.splits import SplitOffers

VERSIONS = {"onceflow": "1"}
SETTINGS = AttemptSettings(
    job="ledger",
    attempt=coordination.ATTEMPT,
    parallelism=2,
    versions=VERSIONS,
    storage="file:/checkpoints",
    storage_token="seen",
    one_machine=False,
    start_timeout_s=60.0,
    heartbeat_interval_s=1.0,
    heartbeat_timeout_s=30.0,
    commit_deadline_s=10.0,
    cancel_timeout_s=10.0,
)
HELLO = messages.Hello(coordination.ATTEMPT, 0, 100, 1, "here", "nowhere", VERSIONS, "seen")
LOST = SlotLost("channel balance[0] from 1 broke")

_D = TypeVar("_D")


class Driving:
    """Feeds facts to a loop at `now_s`, answers what it asks, and keeps every decision."""

    def __init__(
        self,
        settings: AttemptSettings = SETTINGS,
        checkpoints: CheckpointSettings | None = None,
        loop: type[AttemptLoop] = AttemptLoop,
    ) -> None:
        self.coordination = coordination.Coordination(
            checkpoints or CheckpointSettings(interval_s=None), [coordination.completed(1)]
        )
        self.loop = loop(settings, self._coordinator, {"source": SplitOffers((), 2)})
        self.now_s = self.coordination.now_s
        self.decisions: list[attempt_facts.AttemptDecision] = []
        self.stands = True
        """Whether requests for savepoints stand when the loop begins them."""
        self.waiting_s: dict[int, float] = {}
        self.step = attempt_facts.RecoveryStep("sink ledger", self.now_s)

    def _coordinator(self, now_s: float) -> CheckpointCoordinator:
        return self.coordination.coordinator

    def on(self, *facts: attempt_facts.AttemptFact) -> None:
        for fact in facts:
            self._take(self.loop.on(fact, self.now_s))
            self._take(self.loop.tick(self.now_s))

    def tick(self, after_s: float = 0.0) -> None:
        self.now_s += after_s
        self._take(self.loop.tick(self.now_s))

    def say(self, message: messages.SlotMessage, slot: int = 0) -> None:
        self.on(attempt_facts.SlotMessageReceived(coordination.ATTEMPT, slot, message))

    def _take(self, decisions: tuple[attempt_facts.AttemptDecision, ...]) -> None:
        for decision in decisions:
            self.decisions.append(decision)
            match decision:
                case attempt_facts.SendHeartbeats():
                    self._take(
                        self.loop.on(attempt_facts.OutboxesMeasured(self.waiting_s), self.now_s)
                    )
                case attempt_facts.LookAtRecovery():
                    self._take(self.loop.on(self.step, self.now_s))
                case SavepointRequest():
                    self._take(
                        self.loop.on(
                            attempt_facts.SavepointBegun(decision, self.stands), self.now_s
                        )
                    )
                case _:
                    continue

    def of_type(self, wanted: type[_D]) -> list[_D]:
        return [decision for decision in self.decisions if isinstance(decision, wanted)]

    @property
    def error(self) -> str:
        """Why the attempt has ended; empty while it has not."""
        return str(ended[0].error) if (ended := self.of_type(attempt_facts.EndAttempt)) else ""

    @property
    def is_over(self) -> bool:
        return bool(
            self.of_type(attempt_facts.EndAttempt) or self.of_type(attempt_facts.CloseAttempt)
        )

    # --- the life of an attempt ------------------------------------------------------------------

    def join(self, *slots: int) -> None:
        for slot in slots:
            self.on(replace(HELLO, slot=slot))

    def recover(self) -> None:
        self.on(attempt_facts.RecoveryEnded(coordination.ATTEMPT))

    def run(self) -> None:
        """Bring every slot up."""
        self.join(0, 1)
        self.recover()
        self.say(messages.Running(), 0)
        self.say(messages.Running(), 1)

    @property
    def triggered(self) -> list[CheckpointId]:
        return [trigger.checkpoint for trigger in self.of_type(Barrier)]

    def ack_all(self, checkpoint: int) -> None:
        for subtask in coordination.SUBTASKS:
            self.say(messages.Acked(CheckpointId(checkpoint), coordination.snapshot(subtask)))

    def end_append(self, error: BaseException | None = None) -> None:
        last = self.of_type(AppendDecision)[-1].completed
        self.on(attempt_facts.AppendEnded(coordination.ATTEMPT, last, 1.0, error))

    def commit_all(self, checkpoint: int) -> None:
        for subtask in coordination.SUBTASKS:
            self.say(messages.CommittedThrough(subtask, CheckpointId(checkpoint)))

    def finish_savepoint(self, error: str = "") -> None:
        write = self.of_type(WriteSavepoint)[-1]
        checkpoint = write.completed.checkpoint
        self.on(
            attempt_facts.SavepointWritten(
                coordination.ATTEMPT, checkpoint, write.request, 7, error
            )
        )
