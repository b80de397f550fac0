"""The loop of one slot: it decides the slot's next actions, from its hello to its end.

    waiting --deploy--> restoring --restored--> running
       +----------------------+--------------------+--shutdown--> closing --closed--> over

A shutdown during the restore waits for the end of the restore, up to the deadline of the close. A
slot leaves in one of two ways:

    EndSlot    everything was closed within the deadline, and the driver knows it
    ExitHard   the driver is gone, or a part hangs: the process ends, because a message to the
               driver would not help any more

The caller passes facts to `on` and the time to `tick`. Both return decisions, which the caller
carries out in order. If it cannot carry one out, it reports `PartFailed`. The loop never blocks
before the end, so heartbeats go on, and a shutdown is received no matter what the parts do.

Invariants:
    only the first failure is reported, and none once the slot closes
    subtasks receive no mail before they are started
    after EndSlot and ExitHard nothing is decided any more
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeAlias

from typing_extensions import assert_never

from onceflow.core.errors import MessageCorrupt
from onceflow.core.protocol import messages
from onceflow.core.protocol.checkpoints.decisions import Barrier, NotifyAbort
from onceflow.core.protocol.ids import CheckpointId, SubtaskRef

CLOSE_TIMEOUT_S: Final = 5.0
"""The time that a slot has to close before it exits hard. It is below `cancel_timeout_s`."""

# --- facts ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DriverLost:
    """The fact that the slot's control stream has ended."""

    reason: str


@dataclass(frozen=True, slots=True)
class RestoreEnded:
    """The fact that the subtasks are built and have their state, or `error` says why not."""

    error: BaseException | None = None
    leaves_parts: bool = False
    """True if some subtasks were built, which no code closes: the process must not live on."""


@dataclass(frozen=True, slots=True)
class SnapshotFrozen:
    """The fact that a subtask's part of a checkpoint is taken, and not durable yet.

    The runtime adds fields to it.
    """

    subtask: SubtaskRef
    checkpoint: CheckpointId


@dataclass(frozen=True, slots=True)
class PartsClosed:
    """The answer to `CloseParts`: True if everything has ended by its deadline."""

    in_time: bool


SlotFact: TypeAlias = (
    messages.DriverMessage
    | DriverLost
    | RestoreEnded
    | SnapshotFrozen
    | messages.Acked
    | messages.Declined
    | messages.SourceExhausted
    | messages.CompletionHeard
    | messages.SinkCommitted
    | messages.PartFailed
    | PartsClosed
)

# --- decisions --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StartSubtasks:
    """Start the subtasks. Tell the driver that the slot runs, unless the slot closes."""


@dataclass(frozen=True, slots=True)
class SendHeartbeat:
    """Tell the driver that the slot is alive, and check that its peers are."""


@dataclass(frozen=True, slots=True)
class BeginClosing:
    """Tell every part that the slot closes. A restore that has not begun must not begin."""


@dataclass(frozen=True, slots=True)
class CloseParts:
    """Close everything by `deadline_s`. Then pass the last reports of parts, then `PartsClosed`."""

    reason: str
    deadline_s: float


@dataclass(frozen=True, slots=True)
class SayClosed:
    """Send the driver the last counters and the message that the slot leaves; close the stream."""

    deadline_s: float


@dataclass(frozen=True, slots=True)
class EndSlot:
    """Return from the task."""

    reason: str


@dataclass(frozen=True, slots=True)
class ExitHard:
    """End the process now: its connections close, and servers roll back open transactions."""

    reason: str


SlotDecision: TypeAlias = (
    messages.Deploy
    | StartSubtasks
    | Barrier
    | messages.OfferSplits
    | NotifyAbort
    | messages.Complete
    | messages.GloballyCommitted
    | SnapshotFrozen
    | messages.Acked
    | messages.Declined
    | messages.SourceExhausted
    | messages.CompletionHeard
    | messages.SinkCommitted
    | messages.PartFailed
    | SendHeartbeat
    | BeginClosing
    | CloseParts
    | SayClosed
    | EndSlot
    | ExitHard
)
"""A message or a report as a decision is passed on as it came:

    Deploy             build the subtasks and restore their state, then report `RestoreEnded`
    Barrier            post it to every source
    OfferSplits        post it to its source
    NotifyAbort        post it to every subtask
    Complete           post it to every subtask, then let sinks commit, and tell the driver how far
    GloballyCommitted  drop what is kept for these commits
    SnapshotFrozen     make the snapshot durable in the background, then report `Acked` or
                       `Declined`
    Acked, Declined, SourceExhausted
                       send it to the driver
    CompletionHeard, SinkCommitted
                       record the progress, and tell the driver what is new
    PartFailed         tell the driver that the slot cannot go on. A slot that cannot send this
                       must exit
"""

# --- the loop ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Waiting:
    """The phase in which nothing is deployed, or the deployment has failed."""


@dataclass(frozen=True, slots=True)
class _Restoring:
    pass


@dataclass(frozen=True, slots=True)
class _Running:
    pass


@dataclass(slots=True)
class _Closing:
    reason: str
    deadline_s: float
    is_restoring: bool
    has_subtasks: bool
    closes_parts: bool = False
    """True once `CloseParts` was decided: subtasks that are restored later are not started."""


@dataclass(frozen=True, slots=True)
class _Over:
    pass


class SlotLoop:
    """The loop that decides a slot's next actions. Times are of a monotonic clock."""

    def __init__(
        self, heartbeat_interval_s: float, heartbeat_timeout_s: float, now_s: float
    ) -> None:
        self._interval_s = heartbeat_interval_s
        self._timeout_s = heartbeat_timeout_s
        self._beat_at_s = now_s + heartbeat_interval_s
        self._phase: _Waiting | _Restoring | _Running | _Closing | _Over = _Waiting()
        self._leaves_parts = False
        self._has_failed = False
        self._decisions: list[SlotDecision] = []

    def wait_s(self, now_s: float) -> float:
        """Return the time until the next action is due if no fact arrives."""
        if isinstance(self._phase, _Closing):
            return max(0.0, self._phase.deadline_s - now_s)
        return max(0.0, self._beat_at_s - now_s)

    def on(self, fact: SlotFact, now_s: float) -> tuple[SlotDecision, ...]:
        """Process one fact and return the decisions."""
        phase = self._phase
        match phase:
            case _Waiting() | _Restoring() | _Running():
                self._hear(fact, now_s)
            case _Closing():
                self._hear_last(phase, fact)
            case _Over():
                pass  # the slot has ended
            case _:
                assert_never(phase)
        return self._take_decisions()

    def tick(self, heard_at_s: float, now_s: float) -> tuple[SlotDecision, ...]:
        """Return the decisions that are due; the driver's last message came at `heard_at_s`."""
        phase = self._phase
        match phase:
            case _Waiting() | _Restoring() | _Running():
                if now_s >= self._beat_at_s:
                    # Count from now, so that a slot that was stopped for a while sends one beat,
                    # not a burst.
                    self._beat_at_s = now_s + self._interval_s
                    self._beat(now_s - heard_at_s)
            case _Closing():
                if now_s >= phase.deadline_s:
                    self._close_parts(phase)
            case _Over():
                pass  # nothing is due any more
            case _:
                assert_never(phase)
        return self._take_decisions()

    def _hear(self, fact: SlotFact, now_s: float) -> None:
        match fact:
            case messages.Deploy():
                self._deploy(fact)
            case (
                Barrier()
                | messages.OfferSplits()
                | NotifyAbort()
                | messages.Complete()
                | messages.GloballyCommitted()
                | messages.CompletionHeard()
                | messages.SinkCommitted()
            ):
                # Before the slot runs, no checkpoint is decided, and the driver sends none of this.
                self._do_if_running(fact)
            case messages.Shutdown(reason):
                self._close(reason, now_s)
            case messages.Heartbeat():
                pass  # the caller of `tick` passes its time
            case DriverLost(reason):
                self._exit(reason)
            case RestoreEnded():
                self._on_restored(fact)
            case (
                SnapshotFrozen()
                | messages.Acked()
                | messages.Declined()
                | messages.SourceExhausted()
            ):
                self._decide(fact)
            case messages.PartFailed(error):
                self._fail(error)
            case PartsClosed():
                pass  # no part had to be closed
            case _:
                assert_never(fact)

    def _deploy(self, deploy: messages.Deploy) -> None:
        if isinstance(self._phase, _Waiting):
            self._phase = _Restoring()
            self._decide(deploy)
        else:
            self._fail(MessageCorrupt("the driver has deployed the slot twice"))

    def _do_if_running(self, decision: SlotDecision) -> None:
        if isinstance(self._phase, _Running):
            self._decide(decision)

    def _on_restored(self, end: RestoreEnded) -> None:
        if end.error is None:
            self._phase = _Running()
            self._decide(StartSubtasks())
        else:
            # Go back to waiting, not to over: the driver answers the failure with a shutdown.
            self._phase, self._leaves_parts = _Waiting(), end.leaves_parts
            self._fail(end.error)

    def _beat(self, silent_s: float) -> None:
        # A silent driver has given this slot up, or will. Another attempt may already run, so the
        # process must exit before it writes more.
        if silent_s > self._timeout_s:
            self._exit(f"the driver has sent nothing for {silent_s:.0f} s")
        else:
            self._decide(SendHeartbeat())

    def _fail(self, error: BaseException) -> None:
        """Report the failure to the driver once.

        It answers with Shutdown, or its silence ends the process.
        """
        if not self._has_failed:
            self._has_failed = True
            self._decide(messages.PartFailed(error))

    # --- the end --------------------------------------------------------------------------------

    def _close(self, reason: str, now_s: float) -> None:
        """Close everything within a deadline. If a thread hangs, end the process instead."""
        phase = self._phase = _Closing(
            reason,
            now_s + CLOSE_TIMEOUT_S,
            is_restoring=isinstance(self._phase, _Restoring),
            has_subtasks=isinstance(self._phase, _Running),
        )
        self._decide(BeginClosing())
        # A running restore cannot be interrupted: it holds a half-open database. `RestoreEnded` or
        # the deadline comes next.
        if not phase.is_restoring:
            self._close_parts(phase)

    def _close_parts(self, phase: _Closing) -> None:
        if not phase.closes_parts:
            phase.closes_parts = True
            self._decide(CloseParts(phase.reason, phase.deadline_s))

    def _hear_last(self, phase: _Closing, fact: SlotFact) -> None:
        match fact:
            case RestoreEnded():
                self._on_restored_late(phase, fact)
            case messages.Acked() | messages.Declined():
                self._decide(fact)  # the driver deletes the files of a late ack (I9)
            case messages.CompletionHeard() | messages.SinkCommitted():
                if phase.has_subtasks:
                    self._decide(fact)
            case PartsClosed(in_time):
                self._end(phase, in_time=in_time)
            case (
                messages.Deploy()
                | Barrier()
                | messages.OfferSplits()
                | messages.Complete()
                | NotifyAbort()
                | messages.GloballyCommitted()
                | messages.Shutdown()
                | messages.Heartbeat()
                | DriverLost()
                | SnapshotFrozen()
                | messages.SourceExhausted()
                | messages.PartFailed()
            ):
                pass  # the slot leaves
            case _:
                assert_never(fact)

    def _on_restored_late(self, phase: _Closing, end: RestoreEnded) -> None:
        if phase.closes_parts:
            return
        self._leaves_parts = end.leaves_parts
        phase.is_restoring, phase.has_subtasks = False, end.error is None
        if phase.has_subtasks:
            self._decide(StartSubtasks())  # they close their operators
        self._close_parts(phase)

    def _end(self, phase: _Closing, *, in_time: bool) -> None:
        # Tell the driver before exiting, so that it does not take a slot that hangs for a killed
        # one.
        self._decide(SayClosed(phase.deadline_s))
        if not in_time or phase.is_restoring:
            self._exit(
                f"{phase.reason}; the slot did not finish closing within {CLOSE_TIMEOUT_S} s"
            )
        elif self._leaves_parts:
            self._exit(f"{phase.reason}; only a part of the slot's state was restored")
        else:
            self._decide(EndSlot(phase.reason))
            self._phase = _Over()

    def _exit(self, reason: str) -> None:
        self._decide(ExitHard(reason))
        self._phase = _Over()

    def _decide(self, decision: SlotDecision) -> None:
        self._decisions.append(decision)

    def _take_decisions(self) -> tuple[SlotDecision, ...]:
        decisions, self._decisions = tuple(self._decisions), []
        return decisions
