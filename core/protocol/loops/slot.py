"""The loop of one slot: what it does next, from its hello to its end.

    waiting --deploy--> restoring --restored--> running
       +----------------------+--------------------+--shutdown--> closing --closed--> over

While it restores, a shutdown waits for the end of that, up to the deadline of the close. A slot
leaves in one of two ways:
    EndSlot    everything is closed within the deadline, and the driver was told so
    ExitHard   the driver is gone, or a part hangs: the process ends, for nobody is left to tell

Facts go in by `on`, the time by `tick`; decisions come out, to be carried out in order. What cannot
be carried out is told as `PartFailed`. Nothing here waits before the end, so heartbeats go on and a
shutdown is heard whatever the parts do.

Invariants:
    one failure is reported, the first one, and none once the slot closes
    subtasks are posted nothing before they are there
    after EndSlot and ExitHard nothing is decided any more
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeAlias

from typing_extensions import assert_never

from onceflow.core.errors import MessageCorrupt
from onceflow.core.protocol.checkpoints.decisions import NotifyAbort, TriggerCheckpoint
from onceflow.core.protocol.ids import CheckpointId, SubtaskRef
from onceflow.core.protocol.messages import (
    Acked,
    Complete,
    CompletionHeard,
    Declined,
    Deploy,
    DriverMessage,
    GloballyCommitted,
    Heartbeat,
    OfferSplits,
    PartFailed,
    Shutdown,
    SinkCommitted,
    SourceExhausted,
)

CLOSE_TIMEOUT_S: Final = 5.0
"""How long a slot may take to close before it exits the hard way; below `cancel_timeout_s`."""

# --- facts ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DriverLost:
    """A slot's control stream has ended."""

    reason: str


@dataclass(frozen=True, slots=True)
class RestoreEnded:
    """The subtasks are built and have their state, or `error` says why not."""

    error: BaseException | None = None
    leaves_parts: bool = False
    """Whether some were built, which nobody closes: the process must not live on."""


@dataclass(frozen=True, slots=True)
class SnapshotFrozen:
    """A subtask's part of a checkpoint is taken, and not durable yet; the runtime adds to it."""

    subtask: SubtaskRef
    checkpoint: CheckpointId


@dataclass(frozen=True, slots=True)
class PartsClosed:
    """Answers `CloseParts`: whether all has ended by its deadline."""

    in_time: bool


SlotFact: TypeAlias = (
    DriverMessage
    | DriverLost
    | RestoreEnded
    | SnapshotFrozen
    | Acked
    | Declined
    | SourceExhausted
    | CompletionHeard
    | SinkCommitted
    | PartFailed
    | PartsClosed
)

# --- decisions --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BeginRestore:
    """Build the subtasks and give them their state, then report `RestoreEnded`."""

    deploy: Deploy


@dataclass(frozen=True, slots=True)
class StartSubtasks:
    """Start the subtasks; tell the driver that the slot runs, unless it closes."""


@dataclass(frozen=True, slots=True)
class Post:
    """Post `mail`: a trigger to sources, an offer to its source, all else to every subtask."""

    mail: TriggerCheckpoint | OfferSplits | Complete | NotifyAbort


@dataclass(frozen=True, slots=True)
class BeginUpload:
    """Make a snapshot durable beside the stream, then report `Acked` or `Declined`."""

    frozen: SnapshotFrozen


@dataclass(frozen=True, slots=True)
class Send:
    """Tell the driver."""

    message: Acked | Declined | SourceExhausted


@dataclass(frozen=True, slots=True)
class CommitDecided:
    """Let sinks commit what is decided; tell the driver how far they are."""

    complete: Complete


@dataclass(frozen=True, slots=True)
class NoteProgress:
    """Take in how far a subtask or a sink has come; tell the driver what it does not know yet."""

    report: CompletionHeard | SinkCommitted


@dataclass(frozen=True, slots=True)
class ReportFailure:
    """Tell the driver that the slot cannot go on; a slot that cannot say so must exit."""

    error: BaseException


@dataclass(frozen=True, slots=True)
class SendHeartbeat:
    """Tell the driver that the slot lives, and look whether its peers do."""


@dataclass(frozen=True, slots=True)
class BeginClosing:
    """Let every part know that the slot closes; nothing is restored that has not begun."""


@dataclass(frozen=True, slots=True)
class CloseParts:
    """Close everything by `deadline_s`; then tell what parts have reported, then `PartsClosed`."""

    reason: str
    deadline_s: float


@dataclass(frozen=True, slots=True)
class SayClosed:
    """Tell the driver the last counters and that the slot leaves, and close the stream."""

    deadline_s: float


@dataclass(frozen=True, slots=True)
class EndSlot:
    """Return from the task."""

    reason: str


@dataclass(frozen=True, slots=True)
class ExitHard:
    """End the process now: its connections close, and servers roll back what was open."""

    reason: str


SlotDecision: TypeAlias = (
    BeginRestore
    | StartSubtasks
    | Post
    | BeginUpload
    | Send
    | CommitDecided
    | NoteProgress
    | GloballyCommitted
    | ReportFailure
    | SendHeartbeat
    | BeginClosing
    | CloseParts
    | SayClosed
    | EndSlot
    | ExitHard
)

# --- the loop ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Waiting:
    """Nothing was deployed, or that has failed."""


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
    """Whether `CloseParts` was decided: what is restored after it is not started."""


@dataclass(frozen=True, slots=True)
class _Over:
    pass


class SlotLoop:
    """Decides what a slot does next. Times are of a clock that is never set."""

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
        """Return for how long nothing is due if no fact comes."""
        if isinstance(self._phase, _Closing):
            return max(0.0, self._phase.deadline_s - now_s)
        return max(0.0, self._beat_at_s - now_s)

    def on(self, fact: SlotFact, now_s: float) -> tuple[SlotDecision, ...]:
        """Take in one fact."""
        phase = self._phase
        match phase:
            case _Waiting() | _Restoring() | _Running():
                self._hear(fact, now_s)
            case _Closing():
                self._hear_last(phase, fact)
            case _Over():
                pass  # nobody is left who could do anything
            case _:
                assert_never(phase)
        return self._take_decisions()

    def tick(self, heard_at_s: float, now_s: float) -> tuple[SlotDecision, ...]:
        """Do what is due; `heard_at_s` is when the driver has spoken last."""
        phase = self._phase
        match phase:
            case _Waiting() | _Restoring() | _Running():
                if now_s >= self._beat_at_s:
                    # From now, so that a slot that was stopped for a while sends one beat, not a
                    # burst.
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

    def _hear(self, fact: SlotFact, now_s: float) -> None:  # noqa: C901, PLR0912 - dispatches
        match fact:
            case Deploy():
                self._deploy(fact)
            case TriggerCheckpoint() | OfferSplits() | NotifyAbort():
                self._do_if_running(Post(fact))
            case Complete():
                self._do_if_running(Post(fact), CommitDecided(fact))
            case GloballyCommitted():
                self._do_if_running(fact)
            case Shutdown(reason):
                self._close(reason, now_s)
            case Heartbeat():
                pass  # that it came is known to whoever calls `tick`
            case DriverLost(reason):
                self._exit(reason)
            case RestoreEnded():
                self._on_restored(fact)
            case SnapshotFrozen():
                self._decide(BeginUpload(fact))
            case Acked() | Declined() | SourceExhausted():
                self._decide(Send(fact))
            case CompletionHeard() | SinkCommitted():
                self._do_if_running(NoteProgress(fact))  # before, nothing is decided
            case PartFailed(error):
                self._fail(error)
            case PartsClosed():
                pass  # nothing was to be closed
            case _:
                assert_never(fact)

    def _deploy(self, deploy: Deploy) -> None:
        if isinstance(self._phase, _Waiting):
            self._phase = _Restoring()
            self._decide(BeginRestore(deploy))
        else:
            self._fail(MessageCorrupt("the driver has deployed the slot twice"))

    def _do_if_running(self, *decisions: SlotDecision) -> None:
        if isinstance(self._phase, _Running):
            self._decide(*decisions)

    def _on_restored(self, end: RestoreEnded) -> None:
        if end.error is None:
            self._phase = _Running()
            self._decide(StartSubtasks())
        else:
            # Back to waiting, not over: the driver answers the failure with a shutdown.
            self._phase, self._leaves_parts = _Waiting(), end.leaves_parts
            self._fail(end.error)

    def _beat(self, silent_s: float) -> None:
        # A driver that is silent has given this slot up, or will: another attempt may run already,
        # so the process must go before it writes more.
        if silent_s > self._timeout_s:
            self._exit(f"nothing heard from the driver for {silent_s:.0f} s")
        else:
            self._decide(SendHeartbeat())

    def _fail(self, error: BaseException) -> None:
        """Tell the driver once; it answers with Shutdown, or its silence ends the process."""
        if not self._has_failed:
            self._has_failed = True
            self._decide(ReportFailure(error))

    # --- the end --------------------------------------------------------------------------------

    def _close(self, reason: str, now_s: float) -> None:
        """Close everything within a deadline; a thread that hangs ends the process instead."""
        phase = self._phase = _Closing(
            reason,
            now_s + CLOSE_TIMEOUT_S,
            is_restoring=isinstance(self._phase, _Restoring),
            has_subtasks=isinstance(self._phase, _Running),
        )
        self._decide(BeginClosing())
        # A restore that is under way cannot be interrupted: it holds a database that is half open.
        # `RestoreEnded` or the deadline comes next.
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
            case Acked() | Declined():
                self._decide(Send(fact))  # the files of a late ack are the driver's to delete (I9)
            case CompletionHeard() | SinkCommitted():
                if phase.has_subtasks:
                    self._decide(NoteProgress(fact))
            case PartsClosed(in_time):
                self._end(phase, in_time=in_time)
            case (
                Deploy()
                | TriggerCheckpoint()
                | OfferSplits()
                | Complete()
                | NotifyAbort()
                | GloballyCommitted()
                | Shutdown()
                | Heartbeat()
                | DriverLost()
                | SnapshotFrozen()
                | SourceExhausted()
                | PartFailed()
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
        # Said before exiting, so that the driver does not take a slot that hangs for one that was
        # killed.
        self._decide(SayClosed(phase.deadline_s))
        if not in_time or phase.is_restoring:
            self._exit(f"{phase.reason}; not all has ended within {CLOSE_TIMEOUT_S} s")
        elif self._leaves_parts:
            self._exit(f"{phase.reason}; its state was restored in part")
        else:
            self._decide(EndSlot(phase.reason))
            self._phase = _Over()

    def _exit(self, reason: str) -> None:
        self._decide(ExitHard(reason))
        self._phase = _Over()

    def _decide(self, *decisions: SlotDecision) -> None:
        self._decisions += decisions

    def _take_decisions(self) -> tuple[SlotDecision, ...]:
        decisions, self._decisions = tuple(self._decisions), []
        return decisions
