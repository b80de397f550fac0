"""The batches that wait in channels, on both sides, and those that a barrier overtakes.

A channel is FIFO. `OutputQueue` is its sending end; `InputQueues` holds the receiving ends of one
subtask. Batches need a credit; barriers and ends of stream do not. Neither end blocks. A sender
without credits keeps the batches that it has made and makes no more, so they are still in its queue
when a barrier arrives.

A receiver gives its first credits once it has taken all replayed batches and may make rows itself.
So after a restart, sources read nothing before all subtasks below have replayed, and the amount in
flight does not grow with repeated restarts.

A barrier that overtakes goes ahead of all batches. The batches that it overtakes are in flight:

    sender's side     batches that wait for credits when the barrier is sent
    receiver's side   batches that wait in the channel, or that still arrive, before the barrier

An end of stream can be overtaken, too. What the receiver makes of it, such as the last windows, is
behind the barrier. So a FINAL checkpoint is not the last one if its barrier has overtaken an end.
At the sender, an end waits only behind batches, which are in flight.

Only rows with a key can be given to another subtask after a restore. So in channels whose rows have
no key, a barrier overtakes nothing: it waits for its turn on both sides and is never announced.

A receiver may be able to hold rows without processing them. In channels to such a receiver, a
barrier pushes the batches before it through: they borrow credits, and the sender makes no more
rows until the credits are given back. The receiver then has at most the batches of its credits, and
those that a sender had made when it ran out of credits.

Invariants:
    a batch is in flight on one side at the most: the sender's begins where the receiver's ends
    batches sent and not yet taken <= credits, not counting those that a barrier has pushed
    while credits are borrowed, the sender makes no more rows
    while batches are replayed, channels contain only barriers
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar, cast

from onceflow.core.errors import require
from onceflow.core.protocol.checkpoints.alignment import EndOfStream
from onceflow.core.protocol.checkpoints.decisions import Barrier
from onceflow.core.protocol.ids import CheckpointId

B = TypeVar("B")
"""A batch of rows."""

REPLAYED = -1
"""The channel number of batches that an older attempt had in flight."""


@dataclass(frozen=True, slots=True)
class ChannelEnd:
    """The receiving end of one channel."""

    input: int = 0
    """The index of the operator's input that the rows are for."""
    keeps_order: bool = False
    """True if barriers wait behind the rows of this channel, even those that overtake elsewhere."""


@dataclass(frozen=True, slots=True)
class Received(Generic[B]):
    """An element, the channel that it arrived on, and the operator's input that it is for."""

    channel: int
    element: B | Barrier | EndOfStream
    input: int = 0


@dataclass(frozen=True, slots=True)
class Announced:
    """An announcement: `channel` holds a barrier that may overtake the elements before it."""

    channel: int
    barrier: Barrier


class OutputQueue(Generic[B]):
    """The sending end of one channel: its credits and the elements that wait for a credit."""

    def __init__(self) -> None:
        self._credit_count = 0
        self._is_open = False
        self._waiting: deque[B | Barrier | EndOfStream] = deque()

    @property
    def waits(self) -> bool:
        """True if no more rows may be made.

        That is the case while an element waits for credits, while credits are borrowed, and before
        the reader has given its first credits.
        """
        return bool(self._waiting) or not self._is_open or self._credit_count < 0

    def offer(self, element: B | Barrier | EndOfStream) -> bool:
        """Return True if `element` is to be sent now; otherwise queue the element."""
        # Queue behind waiting elements: a channel keeps its order, also for elements without
        # credits.
        if not self._waiting and self._admits(element):
            return True
        self._waiting.append(element)
        return False

    def next(self) -> B | Barrier | EndOfStream | None:
        """Remove and return the next element if it may be sent now, or return None."""
        if self._waiting and self._admits(self._waiting[0]):
            return self._waiting.popleft()
        return None

    def release(self, count: int = 1) -> None:
        """Add `count` credits: the reader has room for that many more batches. `count` may be 0."""
        self._credit_count += count
        self._is_open = self._is_open or count > 0

    def push(self, barrier: Barrier) -> tuple[B | Barrier | EndOfStream, ...]:
        """Return the elements to send now: those that wait, and `barrier` after them.

        The batches among them borrow credits.
        """
        elements = (*self._waiting, barrier)
        self._waiting.clear()
        self._credit_count -= sum(
            not isinstance(element, (Barrier, EndOfStream)) for element in elements
        )
        return elements

    def overtaken_by(self, checkpoint: CheckpointId) -> tuple[B, ...]:
        """Return the batches that the barrier of `checkpoint` overtakes; they stay in the queue.

        The caller must send the barrier now. Older barriers in the queue are dropped: the new
        barrier implies that their checkpoints are over.
        """
        elements, self._waiting = self._waiting, deque()
        for element in elements:
            if isinstance(element, Barrier):
                require(element.checkpoint < checkpoint, f"{element} waits before {checkpoint}")
            else:
                self._waiting.append(element)
        return tuple(e for e in self._waiting if not isinstance(e, (Barrier, EndOfStream)))

    def _admits(self, element: B | Barrier | EndOfStream) -> bool:
        # These elements take no room in the reader, so they need no credit: a barrier must pass
        # where rows cannot.
        if isinstance(element, (Barrier, EndOfStream)):
            return True
        if self._credit_count <= 0:
            return False
        self._credit_count -= 1
        return True


@dataclass(slots=True)
class _Recording(Generic[B]):
    """The batches that a barrier overtakes on a subtask's channels."""

    checkpoint: CheckpointId
    replayed: list[Received[B]]
    """The batches that were still to be replayed."""
    batches: list[list[B]] = field(default_factory=list[list[B]])
    """The overtaken batches, by channel."""
    open: set[int] = field(default_factory=set[int])
    """The channels on which the barrier has not arrived."""
    ended_inputs: set[int] = field(default_factory=set[int])
    """The inputs on which the barrier overtakes an end of stream."""


class InputQueues(Generic[B]):
    """The receiving ends of one subtask's channels.

    Announcements come before elements, and channels take turns.
    """

    def __init__(self, ends: Sequence[ChannelEnd]) -> None:
        self._ends = ends
        self._queues: list[deque[B | Barrier | EndOfStream]] = [deque() for _ in ends]
        self._blocked = [False] * len(ends)
        self._turn = 0
        self._announced: deque[Announced] = deque()
        self._in_order: list[int] = []
        """The channel of each waiting barrier that keeps order here and overtakes elsewhere."""
        self._replayed: deque[Received[B]] = deque()
        self._is_open = False
        self._recording: _Recording[B] | None = None

    @property
    def channels(self) -> int:
        """The number of channels that end here."""
        return len(self._queues)

    @property
    def waiting(self) -> int:
        """The number of elements that wait, including those that are replayed."""
        return len(self._replayed) + sum(map(len, self._queues))

    def replay(self, batches: Iterable[B], into: int = 0) -> None:
        """Queue `batches` for input `into`, to be taken before any element of the channels.

        The caller must call this before it takes the first element.
        """
        self._replayed.extend(Received(REPLAYED, batch, into) for batch in batches)

    @property
    def is_open(self) -> bool:
        """True if all senders have been given credits."""
        return self._is_open

    def open(self) -> bool:
        """Return True if all senders are to be given their first credits now.

        This happens once, when no batch is left to replay. The caller calls this when rows may be
        made.
        """
        # While replayed batches wait, no newer batch may arrive: it would pass rows that were sent
        # before it.
        if self._is_open or self._replayed:
            return False
        self._is_open = True
        return True

    def put(self, channel: int, element: B | Barrier | EndOfStream) -> bool:
        """Queue `element` of `channel`; return True if this gives `take` something to return."""
        recording = self._recording
        if isinstance(element, Barrier):
            announced = (
                element.overtakes_after_s is not None and not self._ends[channel].keeps_order
            )
            if announced:
                self._announced.append(Announced(channel, element))
            elif element.overtakes_after_s is not None:
                self._in_order.append(channel)
            if recording is not None and channel in recording.open:
                # The barrier of an older, aborted checkpoint may still be in the channel.
                if element.checkpoint >= recording.checkpoint:
                    recording.open.discard(channel)
                if element.checkpoint == recording.checkpoint:
                    return True
            self._queues[channel].append(element)
            return announced or not self._blocked[channel]
        if recording is not None and channel in recording.open:
            if isinstance(element, EndOfStream):
                recording.ended_inputs.add(self._ends[channel].input)
            else:
                recording.batches[channel].append(element)
        self._queues[channel].append(element)
        return not self._blocked[channel]

    def take(
        self, *, elements: bool = True, up_to_barriers: bool = False
    ) -> Announced | Received[B] | None:
        """Return the next announcement, else the next element, or None if there is neither.

        If `elements` is False, return only announcements, and barriers of order-keeping channels
        while no row can precede them. With `up_to_barriers`, also return each barrier and the
        elements before it.
        """
        if self._announced:
            return self._announced.popleft()
        if elements or not self._is_open:
            # No barrier overtakes before these barriers are read.
            for channel in self._in_order:
                if not self._blocked[channel]:
                    taken = self._take_first(channel)
                    is_row = not isinstance(taken.element, (Barrier, EndOfStream))
                    require(self._is_open or not is_row, f"rows in {channel} without a credit")
                    return taken
        if not elements:
            return self._take_up_to_barrier() if up_to_barriers else None
        if self._replayed:
            return self._replayed.popleft()
        # Take channels in turn, starting after the last one, so that a busy channel cannot starve
        # others.
        count = len(self._queues)
        for step in range(count):
            channel = (self._turn + step) % count
            if self._queues[channel] and not self._blocked[channel]:
                self._turn = (channel + 1) % count
                return self._take_first(channel)
        return None

    def _take_up_to_barrier(self) -> Received[B] | None:
        for channel, queue in enumerate(self._queues):
            if self._blocked[channel]:
                continue
            if any(isinstance(element, Barrier) for element in queue):
                return self._replayed.popleft() if self._replayed else self._take_first(channel)
        return None

    def _take_first(self, channel: int) -> Received[B]:
        element = self._queues[channel].popleft()
        overtakes = isinstance(element, Barrier) and element.overtakes_after_s is not None
        if overtakes and self._ends[channel].keeps_order:
            self._in_order.remove(channel)
        return Received(channel, element, self._ends[channel].input)

    def block(self, channel: int) -> None:
        """Leave the elements of `channel` in the channel from now on."""
        self._blocked[channel] = True

    def unblock(self, channels: Sequence[int]) -> None:
        """Read `channels` again."""
        for channel in channels:
            self._blocked[channel] = False

    def record(self, checkpoint: CheckpointId, passed: Sequence[int]) -> None:
        """Begin to record the batches that the barrier of `checkpoint` overtakes.

        The subtask takes its snapshot now. The channels in `passed` have been read up to the
        barrier; they include all channels that keep order. From the other channels, a waiting
        barrier is removed. A barrier that arrives later is not returned as an element.
        """
        recording = _Recording[B](checkpoint, list(self._replayed))
        for channel, queue in enumerate(self._queues):
            overtaken: list[B] = []
            recording.batches.append(overtaken)
            if channel in passed:
                continue
            require(not self._ends[channel].keeps_order, f"channel {channel} keeps order")
            recording.open.add(channel)
            for position, element in enumerate(queue):
                if isinstance(element, Barrier):
                    if element.checkpoint == checkpoint:
                        recording.open.discard(channel)
                        del queue[position]
                        break
                elif isinstance(element, EndOfStream):
                    recording.ended_inputs.add(self._ends[channel].input)
                else:
                    overtaken.append(element)
        self._recording = recording

    @property
    def overtaken_ends(self) -> frozenset[int]:
        """The inputs on which the recorded barrier has overtaken an end of stream so far."""
        return frozenset() if self._recording is None else frozenset(self._recording.ended_inputs)

    def end_recording(self, checkpoint: CheckpointId) -> dict[int, tuple[B, ...]]:
        """Return the batches that the barrier of `checkpoint` overtook, by input, in replay order.

        The barrier must have arrived on all channels. Ends the recording that `record` began.
        """
        recording, self._recording = self._recording, None
        if recording is None or recording.checkpoint != checkpoint:
            raise ValueError(f"no rows in flight were recorded for checkpoint {checkpoint}")
        require(not recording.open, f"barrier {checkpoint} is missing on {recording.open}")
        batches_by_input: dict[int, list[B]] = {}
        for replayed in recording.replayed:
            batches_by_input.setdefault(replayed.input, []).append(cast("B", replayed.element))
        for end, batches in zip(self._ends, recording.batches, strict=True):
            batches_by_input.setdefault(end.input, []).extend(batches)
        return {into: tuple(batches) for into, batches in batches_by_input.items() if batches}

    def forget(self, checkpoint: CheckpointId) -> None:
        """Stop recording for `checkpoint` and drop what was recorded."""
        if self._recording is not None and self._recording.checkpoint == checkpoint:
            self._recording = None
