"""What waits in channels, on both of their sides, and what of it a barrier overtakes.

A channel is FIFO: `OutputQueue` is its sending end, `InputQueues` holds the receiving ends of one
subtask. Batches need a credit, barriers and ends do not. Neither end waits: a sender without
credits keeps what it has made and makes no more, so it is still there when a barrier comes.

A receiver gives its first credits when it has taken all that is replayed, and may make rows itself.
So after a restart sources read nothing before everybody below has replayed, and what is in flight
grows by no restart, however often one comes.

A barrier that overtakes goes ahead of all batches. What it overtakes is in flight:

    sender's side     what waits for credits, as of the barrier
    receiver's side   what waits in the channel or is still to come on it, before the barrier

Only what has a key can be given to another subtask after a restore. So a barrier overtakes nothing
in channels whose rows go by no key: there it waits its turn, on both sides, and is never announced.

Invariants:
    a batch is in flight on one side at the most: the sender's begins where the receiver's ends
    batches sent and not yet taken <= credits
    while something is replayed nothing but barriers is in any channel
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar, cast

from onceflow.core.protocol.checkpoints.alignment import Barrier, EndOfStream
from onceflow.core.protocol.ids import CheckpointId
from onceflow.core.protocol.invariant import require

B = TypeVar("B")
"""A batch of rows."""

REPLAYED = -1
"""The channel of what an older attempt had in flight."""


@dataclass(frozen=True, slots=True)
class ChannelEnd:
    """The receiving end of one channel."""

    input: int = 0
    """Which input of the operator its rows are for."""
    keeps_order: bool = False
    """Whether barriers wait their turn behind its rows, also those that overtake elsewhere."""


@dataclass(frozen=True, slots=True)
class Received(Generic[B]):
    """An element, the channel on which it came, and the operator's input that it is for."""

    channel: int
    element: B | Barrier | EndOfStream
    input: int = 0


@dataclass(frozen=True, slots=True)
class Announced:
    """A barrier that may overtake is in `channel`, whatever waits there before it."""

    channel: int
    barrier: Barrier


class OutputQueue(Generic[B]):
    """The sending end of one channel: its credits, and what waits for one."""

    def __init__(self) -> None:
        self._credit_count = 0
        self._is_open = False
        self._waiting: deque[B | Barrier | EndOfStream] = deque()

    @property
    def waits(self) -> bool:
        """Whether something waits for credits, or the reader has not given its first."""
        return bool(self._waiting) or not self._is_open

    def offer(self, element: B | Barrier | EndOfStream) -> bool:
        """Return whether `element` is to be sent now; else it waits its turn here."""
        # Behind what waits already: a channel keeps its order, also for what needs no credit.
        if not self._waiting and self._admits(element):
            return True
        self._waiting.append(element)
        return False

    def next(self) -> B | Barrier | EndOfStream | None:
        """Return what is to be sent next and may be now, once."""
        if self._waiting and self._admits(self._waiting[0]):
            return self._waiting.popleft()
        return None

    def release(self, count: int = 1) -> None:
        """Take in that the reader has room for `count` batches more, if any."""
        self._credit_count += count
        self._is_open = self._is_open or count > 0

    def overtaken_by(self, checkpoint: CheckpointId) -> tuple[B, ...]:
        """Return the batches that the barrier of `checkpoint` overtakes; they go on waiting.

        The barrier is to be sent now. Older barriers that wait are dropped: it says that they are
        over.
        """
        elements, self._waiting = self._waiting, deque()
        for element in elements:
            if isinstance(element, Barrier):
                require(element.checkpoint < checkpoint, f"{element} waits before {checkpoint}")
            else:
                self._waiting.append(element)
        return tuple(e for e in self._waiting if not isinstance(e, (Barrier, EndOfStream)))

    def _admits(self, element: B | Barrier | EndOfStream) -> bool:
        # They take no room in the reader, so no credit: a barrier must pass where rows cannot.
        if isinstance(element, (Barrier, EndOfStream)):
            return True
        if self._credit_count == 0:
            return False
        self._credit_count -= 1
        return True


@dataclass(slots=True)
class _Recording(Generic[B]):
    """What a barrier overtakes on a subtask's channels."""

    checkpoint: CheckpointId
    replayed: list[Received[B]]
    """What was still to be replayed."""
    batches: list[list[B]] = field(default_factory=list[list[B]])
    """By channel."""
    open: set[int] = field(default_factory=set[int])
    """The channels on which the barrier has not come."""


class InputQueues(Generic[B]):
    """The receiving ends of one subtask's channels. Announcements come first, channels in turn."""

    def __init__(self, ends: Sequence[ChannelEnd]) -> None:
        self._ends = ends
        self._queues: list[deque[B | Barrier | EndOfStream]] = [deque() for _ in ends]
        self._blocked = [False] * len(ends)
        self._turn = 0
        self._announced: deque[Announced] = deque()
        self._in_order: list[int] = []
        """The channel of each barrier that waits its turn here and is to overtake elsewhere."""
        self._replayed: deque[Received[B]] = deque()
        self._is_open = False
        self._recording: _Recording[B] | None = None

    @property
    def channels(self) -> int:
        """How many channels end here."""
        return len(self._queues)

    @property
    def waiting(self) -> int:
        """How many elements wait, what is replayed included."""
        return len(self._replayed) + sum(map(len, self._queues))

    def replay(self, batches: Iterable[B], into: int = 0) -> None:
        """Have `batches` taken by input `into` before anything of the channels.

        Called before the first is taken.
        """
        self._replayed.extend(Received(REPLAYED, batch, into) for batch in batches)

    @property
    def is_open(self) -> bool:
        """Whether all senders have been given credits."""
        return self._is_open

    def open(self) -> bool:
        """Return whether all senders are to be given their first credits now.

        That is once, when nothing is left to replay; called when rows may be made.
        """
        # Until all that is replayed has been taken, nothing newer may come: it would pass rows that
        # were sent before it.
        if self._is_open or self._replayed:
            return False
        self._is_open = True
        return True

    def put(self, channel: int, element: B | Barrier | EndOfStream) -> bool:
        """Take in what has come on `channel`; return whether there is something to take for it."""
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
                # An older checkpoint that was given up may still have its barrier under way.
                if element.checkpoint >= recording.checkpoint:
                    recording.open.discard(channel)
                if element.checkpoint == recording.checkpoint:
                    return True
            self._queues[channel].append(element)
            return announced or not self._blocked[channel]
        if (
            recording is not None
            and channel in recording.open
            and not isinstance(element, EndOfStream)
        ):
            recording.batches[channel].append(element)
        self._queues[channel].append(element)
        return not self._blocked[channel]

    def take(self, *, elements: bool = True) -> Announced | Received[B] | None:
        """Return the next announcement, or else the next element; None when there is none.

        Without `elements` it is announcements alone, and barriers in order as long as no row can be
        before them.
        """
        if self._announced:
            return self._announced.popleft()
        if elements or not self._is_open:
            # Nothing is overtaken before these are read.
            for channel in self._in_order:
                if not self._blocked[channel]:
                    taken = self._take_first(channel)
                    is_row = not isinstance(taken.element, (Barrier, EndOfStream))
                    require(self._is_open or not is_row, f"rows in {channel} without a credit")
                    return taken
        if not elements:
            return None
        if self._replayed:
            return self._replayed.popleft()
        # In turn, from the channel after the last one: a busy channel cannot keep out the others.
        count = len(self._queues)
        for step in range(count):
            channel = (self._turn + step) % count
            if self._queues[channel] and not self._blocked[channel]:
                self._turn = (channel + 1) % count
                return self._take_first(channel)
        return None

    def _take_first(self, channel: int) -> Received[B]:
        element = self._queues[channel].popleft()
        overtakes = isinstance(element, Barrier) and element.overtakes_after_s is not None
        if overtakes and self._ends[channel].keeps_order:
            self._in_order.remove(channel)
        return Received(channel, element, self._ends[channel].input)

    def block(self, channel: int) -> None:
        """Leave what comes on `channel` in it from now on."""
        self._blocked[channel] = True

    def unblock(self, channels: Sequence[int]) -> None:
        """Read `channels` again."""
        for channel in channels:
            self._blocked[channel] = False

    def record(self, checkpoint: CheckpointId, passed: Sequence[int]) -> None:
        """Begin to note what the barrier of `checkpoint` overtakes; its snapshot is taken now.

        On the channels `passed` it has been read, those that keep order among them. From the others
        it is removed where it waits; where it is still to come it will not be taken as an element.
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
                elif not isinstance(element, EndOfStream):
                    overtaken.append(element)
        self._recording = recording

    def end_recording(self, checkpoint: CheckpointId) -> dict[int, tuple[B, ...]]:
        """Return what the barrier of `checkpoint` has overtaken, by input, in the order to replay.

        The barrier has come on all channels. Ends what `record` began.
        """
        recording, self._recording = self._recording, None
        if recording is None or recording.checkpoint != checkpoint:
            raise ValueError(f"nothing is recorded for checkpoint {checkpoint}")
        require(not recording.open, f"barrier {checkpoint} is missing on {recording.open}")
        batches_by_input: dict[int, list[B]] = {}
        for one in recording.replayed:
            batches_by_input.setdefault(one.input, []).append(cast("B", one.element))
        for end, batches in zip(self._ends, recording.batches, strict=True):
            batches_by_input.setdefault(end.input, []).extend(batches)
        return {into: tuple(batches) for into, batches in batches_by_input.items() if batches}

    def forget(self, checkpoint: CheckpointId) -> None:
        """Record nothing more for `checkpoint`."""
        if self._recording is not None and self._recording.checkpoint == checkpoint:
            self._recording = None
