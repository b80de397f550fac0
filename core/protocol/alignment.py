"""When a subtask with several input channels takes part in a checkpoint.

One channel is FIFO and brings barriers in rising order; across channels there is no order. When
barrier n has come on all channels, everything before it has been read. A channel that skipped n
(its source never saw the trigger) shows so by bringing a later barrier.

Invariants:
    done or too late:  every checkpoint <= floor
    aligned:          a channel that brought the current barrier is not read before the snapshot
    at least once:    no channel is ever blocked; the snapshot may hold effects of later records
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

from onceflow.core.protocol.decisions import CheckpointKind
from onceflow.core.protocol.ids import CheckpointId
from onceflow.core.protocol.invariant import require


@dataclass(frozen=True, slots=True)
class Barrier:
    """Divides a channel's elements into those before the checkpoint and those after it."""

    checkpoint: CheckpointId
    kind: CheckpointKind
    triggered_at_ms: int
    """By the wall clock of the driver's machine: for people and metrics, never to decide by."""


class AlignmentMode(Enum):
    """What a channel that has brought a barrier does until the others have."""

    ALIGNED = "aligned"
    """It waits: its later elements are not read. Needed for exactly-once."""
    AT_LEAST_ONCE = "at_least_once"
    """It is read on: records between its barrier and the last one are in the state twice over."""


@dataclass(frozen=True, slots=True)
class Block:
    """Stop reading `channel`."""

    channel: int


@dataclass(frozen=True, slots=True)
class Unblock:
    """Read `channels` again."""

    channels: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TakeSnapshot:
    """Take the synchronous part of the snapshot and forward the barrier, before anything else."""

    barrier: Barrier
    alignment_ms: float
    """From the first channel's barrier to the last one's."""


@dataclass(frozen=True, slots=True)
class AlignmentAborted:
    """This subtask will never take part in `checkpoint`: tell the coordinator so."""

    checkpoint: CheckpointId
    reason: str


AlignmentAction: TypeAlias = Block | Unblock | TakeSnapshot | AlignmentAborted


@dataclass(slots=True)
class _Alignment:
    """One checkpoint whose barrier has come on some channels and not on all."""

    barrier: Barrier
    first_at_s: float
    arrived: set[int] = field(default_factory=set[int])


class BarrierAlignment:
    """Counts the barriers of one subtask. Owned by the subtask's thread.

    Carry the actions out in order: `TakeSnapshot` precedes the `Unblock` that ends its alignment.
    """

    def __init__(self, channels: int, mode: AlignmentMode) -> None:
        if channels < 1:
            raise ValueError(f"channels={channels} must be 1 or more")
        self._channels = channels
        self._mode = mode
        self._open: dict[CheckpointId, _Alignment] = {}
        self._aborted: set[CheckpointId] = set()
        self._floor = CheckpointId(0)
        self._ended: set[int] = set()
        self._latest = [CheckpointId(0)] * channels

    @property
    def aligning(self) -> tuple[CheckpointId, ...]:
        """The checkpoints whose barrier has come on some channels, oldest first."""
        return tuple(sorted(self._open))

    @property
    def aborted(self) -> frozenset[CheckpointId]:
        """The checkpoints given up of which some channel may still bring a barrier."""
        return frozenset(self._aborted)

    @property
    def all_ended(self) -> bool:
        """Whether every channel has brought its end of input. Barriers still come."""
        return len(self._ended) == self._channels

    def is_blocked(self, channel: int) -> bool:
        """Return whether `channel` must not be read now."""
        return self._mode is AlignmentMode.ALIGNED and any(
            channel in alignment.arrived for alignment in self._open.values()
        )

    def on_barrier(
        self, channel: int, barrier: Barrier, now_s: float
    ) -> tuple[AlignmentAction, ...]:
        """Take in that `channel` brought `barrier`; `now_s` is of a clock that is never set.

        Raises:
            InvariantViolation: The channel is blocked, or brought a barrier twice or an older one:
                it was read against the rules or is not FIFO.
        """
        checkpoint = barrier.checkpoint
        require(0 <= channel < self._channels, f"channel {channel} of {self._channels}")
        require(not self.is_blocked(channel), f"read from blocked channel {channel}")
        require(
            checkpoint > self._latest[channel],
            f"channel {channel} brought barrier {checkpoint} after {self._latest[channel]}",
        )
        # Whatever every channel had passed before this barrier cannot come any more.
        passed = max(self._floor, min(self._latest))
        self._aborted = {aborted for aborted in self._aborted if aborted > passed}
        self._latest[channel] = checkpoint
        actions = self._give_up_skipped(channel, checkpoint)
        if checkpoint <= self._floor or checkpoint in self._aborted:
            return tuple(actions)
        ahead = [c for c, latest in enumerate(self._latest) if latest > checkpoint]
        if ahead and checkpoint not in self._open:
            self._aborted.add(checkpoint)
            return (*actions, _skipped(checkpoint, ahead[0], self._latest[ahead[0]]))
        alignment = self._open.setdefault(checkpoint, _Alignment(barrier, now_s))
        alignment.arrived.add(channel)
        if len(alignment.arrived) == self._channels:
            return (*actions, *self._finish(alignment, channel, now_s))
        if self._mode is AlignmentMode.ALIGNED:
            actions.append(Block(channel))
        return tuple(actions)

    def on_abort(self, checkpoint: CheckpointId) -> tuple[AlignmentAction, ...]:
        """Take in that `checkpoint` will never complete: its barriers are ignored from now on."""
        if checkpoint <= self._floor:
            return ()
        self._aborted.add(checkpoint)
        alignment = self._open.pop(checkpoint, None)
        return () if alignment is None else tuple(self._unblock(alignment.arrived))

    def on_end_of_input(self, channel: int) -> None:
        """Take in that `channel` has no more records.

        Changes no alignment: a finished source goes on emitting barriers, so a checkpoint still
        waits for this channel's.
        """
        require(not self.is_blocked(channel), f"read from blocked channel {channel}")
        self._ended.add(channel)

    def _give_up_skipped(self, channel: int, checkpoint: CheckpointId) -> list[AlignmentAction]:
        """A channel that goes on to `checkpoint` will never bring the open older ones it lacks."""
        actions: list[AlignmentAction] = []
        for older in self.aligning:
            if older < checkpoint and channel not in self._open[older].arrived:
                alignment = self._open.pop(older)
                self._aborted.add(older)
                actions.extend(self._unblock(alignment.arrived))
                actions.append(_skipped(older, channel, checkpoint))
        return actions

    def _finish(self, alignment: _Alignment, channel: int, now_s: float) -> list[AlignmentAction]:
        barrier = alignment.barrier
        require(min(self._open) == barrier.checkpoint, "an older alignment outlived a newer one")
        del self._open[barrier.checkpoint]
        self._floor = barrier.checkpoint
        snapshot = TakeSnapshot(
            barrier,
            alignment_ms=(now_s - alignment.first_at_s) * 1000,
        )
        # The last channel brought its barrier just now and was never blocked.
        return [snapshot, *self._unblock(alignment.arrived - {channel})]

    def _unblock(self, channels: set[int]) -> list[AlignmentAction]:
        if self._mode is AlignmentMode.ALIGNED and channels:
            return [Unblock(tuple(sorted(channels)))]
        return []


def _skipped(checkpoint: CheckpointId, channel: int, later: CheckpointId) -> AlignmentAborted:
    return AlignmentAborted(checkpoint, f"channel {channel} went on to barrier {later} without it")
