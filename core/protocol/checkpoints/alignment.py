"""The rules by which a subtask with several input channels, or a source, joins a checkpoint.

One channel is FIFO and brings barriers in rising order. Across channels there is no order. When
barrier n has arrived on all channels, everything before it has been read. If a channel skipped n
(its source never saw the trigger), it brings a later barrier instead.

A barrier that may overtake is announced as soon as it is in a channel, even if elements wait before
it. If it overtakes, the subtask takes the snapshot at the first announcement. The elements that it
overtakes on each channel are in flight and part of the snapshot, so the snapshot is complete with
the last announcement. Checkpoints that may overtake are taken one at a time: a newer barrier means
that the older checkpoint is over.

A channel may keep order: no barrier overtakes its rows, and no barrier in it is announced. Such a
channel is read up to the barrier, like an aligned one, before the subtask takes its snapshot and
overtakes the rows of the other channels.

Invariants:
    done or too late:  every checkpoint <= floor
    aligned:          a channel that brought the current barrier is not read before the snapshot
    overtaking:       no channel is blocked; the checkpoint is the floor from its snapshot on;
                      every channel that keeps order had brought the barrier
    at least once:    no channel is ever blocked; the snapshot may hold effects of later records
    stopping:         after the snapshot of a savepoint with which the job stops, nothing is
                      emitted: exactly what it holds is committed after it
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TypeAlias

from onceflow.core.errors import require
from onceflow.core.protocol.checkpoints.decisions import Barrier
from onceflow.core.protocol.ids import CheckpointId


@dataclass(frozen=True, slots=True)
class EndOfStream:
    """The mark that no more rows arrive on this channel.

    Barriers still arrive: a finished source stays in checkpoints.
    """


class AlignmentMode(Enum):
    """The treatment of a channel that has brought a barrier while other channels have not."""

    ALIGNED = "aligned"
    """The channel waits: its later elements are not read. Needed for exactly-once."""
    AT_LEAST_ONCE = "at_least_once"
    """The channel is read on. After a restore, records between its barrier and the last channel's
    barrier are in the state twice."""


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
    """The barrier to forward."""
    alignment_ms: float
    """The time from the first channel's barrier to the snapshot. Unless the barrier overtakes, the
    snapshot comes with the last channel's barrier."""
    passed: tuple[int, ...] | None = None
    """None if the barrier is aligned. Otherwise the barrier overtakes, and it has been read on
    these channels only. Record the elements in flight on the other channels until it has arrived on
    all."""


@dataclass(frozen=True, slots=True)
class InFlightComplete:
    """The barrier of `checkpoint` has arrived on all channels: all overtaken elements are known."""

    checkpoint: CheckpointId
    alignment_ms: float
    """The time from the first channel's barrier to the last one's."""


@dataclass(frozen=True, slots=True)
class ForgetInFlight:
    """Drop the snapshot and the recorded elements: `checkpoint` was over before all were known."""

    checkpoint: CheckpointId


@dataclass(frozen=True, slots=True)
class AlignmentAborted:
    """Tell the coordinator that this subtask will never take part in `checkpoint`."""

    checkpoint: CheckpointId
    reason: str


AlignmentAction: TypeAlias = (
    Block | Unblock | TakeSnapshot | InFlightComplete | ForgetInFlight | AlignmentAborted
)


@dataclass(slots=True)
class _Alignment:
    """A checkpoint whose barrier has arrived on some channels but not on all."""

    barrier: Barrier
    first_at_s: float
    arrived: set[int] = field(default_factory=set[int])


@dataclass(slots=True)
class _Announced:
    """A barrier that may overtake and is in some channels, read or not."""

    barrier: Barrier
    first_at_s: float
    overtakes_at_s: float
    channels: set[int] = field(default_factory=set[int])


class SourceBarriers:
    """The barriers that a source subtask is to emit. Owned by the subtask's thread.

    While rows that the subtask has made wait for credits, a barrier waits behind them for as long
    as it may.
    """

    def __init__(self) -> None:
        self._held: list[tuple[Barrier, float | None]] = []
        """The barriers to emit, each with the time at which it overtakes."""
        self._last = CheckpointId(0)

    @property
    def overtakes_at_s(self) -> float | None:
        """The time from which `next` returns a barrier although rows wait.

        None if no barrier that may overtake is held.
        """
        return min((at_s for _, at_s in self._held if at_s is not None), default=None)

    def on_triggered(self, barrier: Barrier, now_s: float) -> None:
        """Record that `barrier` is to be emitted; ignored if it is no newer than the last."""
        if barrier.checkpoint > self._last:
            self._last = barrier.checkpoint
            after_s = barrier.overtakes_after_s
            self._held.append((barrier, None if after_s is None else now_s + after_s))

    def on_abort(self, checkpoint: CheckpointId) -> None:
        """Record that `checkpoint` is over; its barrier is not emitted any more."""
        # The driver sends triggers and aborts from different threads, so the trigger may arrive
        # after the abort. It must not revive the checkpoint.
        self._last = max(self._last, checkpoint)
        self._held = [held for held in self._held if held[0].checkpoint != checkpoint]

    def next(self, now_s: float, *, clear: bool) -> Barrier | None:
        """Remove and return the barrier to emit now, with the waiting time that it has left.

        `clear` says that no rows wait for credits. A barrier that goes ahead of an older one
        replaces it: the older checkpoint is over.
        """
        # Oldest first, so that two barriers that may both go keep their order.
        for position, (barrier, at_s) in enumerate(self._held):
            if clear or (at_s is not None and now_s >= at_s):
                del self._held[: position + 1]
                left_s = None if at_s is None else max(0.0, at_s - now_s)
                return replace(barrier, overtakes_after_s=left_s)
        return None


class BarrierAlignment:
    """The count of the barriers of one subtask. Owned by the subtask's thread.

    The caller carries the actions out in order: `TakeSnapshot` precedes the `Unblock` that ends its
    alignment.
    """

    def __init__(
        self, channels: int, mode: AlignmentMode, keeping_order: Iterable[int] = ()
    ) -> None:
        """Start without barriers; in the channels `keeping_order`, barriers overtake nothing."""
        if channels < 1:
            raise ValueError(f"channels={channels} must be 1 or more")
        self._channels = channels
        self._mode = mode
        self._keeping_order = frozenset(keeping_order)
        self._open: dict[CheckpointId, _Alignment] = {}
        self._aborted: set[CheckpointId] = set()
        self._floor = CheckpointId(0)
        self._ended: set[int] = set()
        self._latest = [CheckpointId(0)] * channels
        self._announced: _Announced | None = None
        """The newest announced barrier, until it is read on all channels or has overtaken."""
        self._overtaking: _Announced | None = None
        """The barrier whose snapshot is taken and which has not arrived on all channels."""
        self._emission_ended = False

    @property
    def may_emit(self) -> bool:
        """True if timers and windows may emit rows now, without an input row.

        False once all input has ended, and after a savepoint with which the job stops.
        """
        return not (self.all_ended or self._emission_ended)

    @property
    def aligning(self) -> tuple[CheckpointId, ...]:
        """The checkpoints whose barrier has arrived on some channels, oldest first."""
        return tuple(sorted(self._open))

    @property
    def aborted(self) -> frozenset[CheckpointId]:
        """The aborted checkpoints whose barrier may still arrive on some channel."""
        return frozenset(self._aborted)

    @property
    def all_ended(self) -> bool:
        """True if every channel has reached its end of input. Barriers still arrive."""
        return len(self._ended) == self._channels

    def is_blocked(self, channel: int) -> bool:
        """Return True if `channel` must not be read now."""
        return self._mode is AlignmentMode.ALIGNED and any(
            channel in alignment.arrived for alignment in self._open.values()
        )

    @property
    def overtakes_at_s(self) -> float | None:
        """The time at which `on_time` has an action; None while no barrier waits for its time."""
        announced = self._announced
        return announced.overtakes_at_s if announced and self._may_overtake(announced) else None

    def on_announced(
        self, channel: int, barrier: Barrier, now_s: float
    ) -> tuple[AlignmentAction, ...]:
        """Record that `barrier`, which may overtake, is in `channel`; it may be read later.

        Called once per barrier and channel, before the channel is read any further.
        """
        require(0 <= channel < self._channels, f"channel {channel} of {self._channels}")
        require(channel not in self._keeping_order, f"channel {channel} keeps order")
        require(self._mode is AlignmentMode.ALIGNED, f"{self._mode} and an overtaking barrier")
        assert barrier.overtakes_after_s is not None
        checkpoint = barrier.checkpoint
        actions = self._end_older(checkpoint)
        if (under_way := self._overtaking) and under_way.barrier.checkpoint == checkpoint:
            under_way.channels.add(channel)
            return (*actions, *self._complete_in_flight(now_s))
        if checkpoint <= self._floor or checkpoint in self._aborted:
            return tuple(actions)
        known = self._announced
        if known is not None and known.barrier.checkpoint > checkpoint:
            return tuple(actions)
        at_s = now_s + barrier.overtakes_after_s
        if known is None or known.barrier.checkpoint < checkpoint:
            self._announced = known = _Announced(barrier, now_s, at_s)
        known.channels.add(channel)
        # Use the earliest time of all channels: the barrier that has waited longest elsewhere has
        # the least time left here.
        known.overtakes_at_s = min(known.overtakes_at_s, at_s)
        return (*actions, *self.on_time(now_s))

    def on_time(self, now_s: float) -> tuple[AlignmentAction, ...]:
        """Forward the waiting barrier before queued rows if its waiting time has ended."""
        announced = self._announced
        if announced is None or now_s < announced.overtakes_at_s:
            return ()
        if not self._may_overtake(announced):
            return ()
        self._announced = None
        checkpoint = announced.barrier.checkpoint
        actions: list[AlignmentAction] = []
        for older in self.aligning:
            if older < checkpoint:
                actions += self._unblock(self._open.pop(older).arrived)
                actions.append(AlignmentAborted(older, f"barrier {checkpoint} has overtaken it"))
        aligned = self._open.pop(checkpoint, None)
        passed: set[int] = set() if aligned is None else aligned.arrived
        # The snapshot is being taken. Barriers of this checkpoint that are read later only mark the
        # end of the elements in flight.
        self._floor = checkpoint
        self._aborted = {aborted for aborted in self._aborted if aborted > checkpoint}
        self._overtaking = announced
        # The barrier has waited here as long as it may, so it overtakes at once downstream.
        barrier = replace(announced.barrier, overtakes_after_s=0.0)
        waited_ms = (now_s - announced.first_at_s) * 1000
        actions.append(TakeSnapshot(barrier, waited_ms, passed=tuple(sorted(passed))))
        return (*actions, *self._unblock(passed), *self._complete_in_flight(now_s))

    def on_barrier(
        self, channel: int, barrier: Barrier, now_s: float
    ) -> tuple[AlignmentAction, ...]:
        """Record that `channel` brought `barrier`; `now_s` is from a monotonic clock.

        Raises:
            InvariantViolation: The channel is blocked, or it brought a barrier twice or an older
                one. The caller read a blocked channel, or the channel is not FIFO.
        """
        checkpoint = barrier.checkpoint
        require(0 <= channel < self._channels, f"channel {channel} of {self._channels}")
        require(not self.is_blocked(channel), f"read from blocked channel {channel}")
        require(
            checkpoint > self._latest[channel],
            f"channel {channel} brought barrier {checkpoint} after {self._latest[channel]}",
        )
        # A barrier that every channel had passed before this one cannot arrive any more.
        passed = max(self._floor, min(self._latest))
        self._aborted = {aborted for aborted in self._aborted if aborted > passed}
        self._latest[channel] = checkpoint
        actions = self._end_older(checkpoint)
        actions += self._give_up_skipped(channel, checkpoint)
        if checkpoint <= self._floor or checkpoint in self._aborted:
            return tuple(actions)
        # A channel that is already ahead has skipped this barrier, so the checkpoint can never
        # complete.
        ahead = [c for c, latest in enumerate(self._latest) if latest > checkpoint]
        if ahead and checkpoint not in self._open:
            self._aborted.add(checkpoint)
            return (*actions, _abort_skipped(checkpoint, ahead[0], self._latest[ahead[0]]))
        alignment = self._open.setdefault(checkpoint, _Alignment(barrier, now_s))
        alignment.arrived.add(channel)
        # Channels that have ended count as well: a finished source goes on emitting barriers.
        if len(alignment.arrived) == self._channels:
            return (*actions, *self._finish(alignment, channel, now_s))
        if self._mode is AlignmentMode.ALIGNED:
            actions.append(Block(channel))
        # This may have been the last channel in order that an overtaking barrier waited for.
        if channel in self._keeping_order:
            actions += self.on_time(now_s)
        return tuple(actions)

    def on_abort(self, checkpoint: CheckpointId) -> tuple[AlignmentAction, ...]:
        """Record that `checkpoint` will never complete; its barriers are ignored from now on.

        Idempotent. May be called after the snapshot was taken.
        """
        if (under_way := self._overtaking) and under_way.barrier.checkpoint == checkpoint:
            self._overtaking = None
            return (ForgetInFlight(checkpoint),)
        if checkpoint <= self._floor:
            return ()
        self._aborted.add(checkpoint)
        if (known := self._announced) and known.barrier.checkpoint == checkpoint:
            self._announced = None
        alignment = self._open.pop(checkpoint, None)
        return () if alignment is None else tuple(self._unblock(alignment.arrived))

    def on_end_of_input(self, channel: int) -> None:
        """Record that `channel` has no more records.

        Changes no alignment: a finished source goes on emitting barriers, so a checkpoint still
        waits for the barrier of this channel.
        """
        require(not self.is_blocked(channel), f"read from blocked channel {channel}")
        self._ended.add(channel)

    def _may_overtake(self, announced: _Announced) -> bool:
        """Return True if every channel that keeps order has been read up to the barrier."""
        alignment = self._open.get(announced.barrier.checkpoint)
        return self._keeping_order <= (set[int]() if alignment is None else alignment.arrived)

    def _give_up_skipped(self, channel: int, checkpoint: CheckpointId) -> list[AlignmentAction]:
        """Abort the open older checkpoints that `channel` skipped by going on to `checkpoint`."""
        actions: list[AlignmentAction] = []
        for older in self.aligning:
            if older < checkpoint and channel not in self._open[older].arrived:
                alignment = self._open.pop(older)
                self._aborted.add(older)
                actions.extend(self._unblock(alignment.arrived))
                actions.append(_abort_skipped(older, channel, checkpoint))
        return actions

    def _finish(self, alignment: _Alignment, channel: int, now_s: float) -> list[AlignmentAction]:
        barrier = alignment.barrier
        require(min(self._open) == barrier.checkpoint, "an older alignment outlived a newer one")
        del self._open[barrier.checkpoint]
        self._floor = barrier.checkpoint
        # The barrier arrived on all channels before its time to overtake. Downstream it has only
        # the remaining time.
        if (known := self._announced) and known.barrier.checkpoint <= barrier.checkpoint:
            self._announced = None
            left_s = max(0.0, known.overtakes_at_s - now_s)
            barrier = replace(barrier, overtakes_after_s=left_s)
        self._emission_ended |= barrier.kind.ends_emission
        snapshot = TakeSnapshot(barrier, alignment_ms=(now_s - alignment.first_at_s) * 1000)
        # The last channel brought its barrier just now and was never blocked.
        return [snapshot, *self._unblock(alignment.arrived - {channel})]

    def _end_older(self, newer: CheckpointId) -> list[AlignmentAction]:
        """End the overtaking checkpoint older than `newer`: it will not arrive on all channels."""
        if (known := self._announced) and known.barrier.checkpoint < newer:
            self._announced = None
        under_way = self._overtaking
        if under_way is None or under_way.barrier.checkpoint >= newer:
            return []
        self._overtaking = None
        return [ForgetInFlight(under_way.barrier.checkpoint)]

    def _complete_in_flight(self, now_s: float) -> list[AlignmentAction]:
        under_way = self._overtaking
        assert under_way is not None
        # Channels that keep order were read up to the barrier before it overtook, so nothing of
        # theirs is in flight.
        if len(under_way.channels | self._keeping_order) < self._channels:
            return []
        self._overtaking = None
        took_ms = (now_s - under_way.first_at_s) * 1000
        return [InFlightComplete(under_way.barrier.checkpoint, took_ms)]

    def _unblock(self, channels: set[int]) -> list[AlignmentAction]:
        if self._mode is AlignmentMode.ALIGNED and channels:
            return [Unblock(tuple(sorted(channels)))]
        return []


def _abort_skipped(checkpoint: CheckpointId, channel: int, later: CheckpointId) -> AlignmentAborted:
    return AlignmentAborted(checkpoint, f"channel {channel} went on to barrier {later} without it")
