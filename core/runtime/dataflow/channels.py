"""Channels between subtasks: batches and barriers travel in them; each subtask reads one gate.

A channel is FIFO and bounded by credits; a `Partitioner` chooses the channel of a row.
`protocol.checkpoints.in_flight` decides which elements wait on either side, and which of them a
barrier overtakes.

Invariants:
    a channel delivers its elements in the order in which they were sent
    batches sent and not yet taken by the reader <= credits, not counting those that a barrier has
    pushed; barriers and ends need no credit
    a sender has no credits before the reader has taken all rows that it replays
    a sender never waits in `send`: elements without credit wait in their channel, and the subtask
    takes no further rows until they are sent
    a blocked channel keeps its elements until it is unblocked
    a barrier to a subtask that absorbs rows pushes the rows before it through, which borrow credits
"""

from __future__ import annotations

import sys
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from onceflow.core.errors import SlotLost
from onceflow.core.protocol.checkpoints import in_flight
from onceflow.core.protocol.checkpoints.alignment import EndOfStream
from onceflow.core.protocol.checkpoints.decisions import Barrier
from onceflow.core.protocol.ids import CheckpointId
from onceflow.core.protocol.messages import SubtaskMail

Hashes: TypeAlias = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch of rows.

    On a keyed edge it also has the 64-bit hash of each row's key, computed once.
    """

    rows: pa.RecordBatch
    hashes: Hashes | None = None
    watermark: int | None = None
    """The watermark, if the batch is sent without rows: it keeps its place in the stream."""


Element: TypeAlias = Batch | Barrier | EndOfStream


def encode_batches(batches: Sequence[Batch]) -> pa.Buffer:
    """Return the rows of `batches`, at least one batch, as an Arrow stream, without hashes."""
    sink = pa.BufferOutputStream()
    schema = batches[0].rows.schema
    with pa.ipc.new_stream(sink, schema) as stream:
        for batch in batches:
            # Batches from other slots may differ in schema metadata.
            stream.write_batch(pa.record_batch(batch.rows.columns, schema=schema))
    return sink.getvalue()


def decode_batches(data: bytes) -> list[pa.RecordBatch]:
    """Return the rows that were passed to `encode_batches`, batch by batch."""
    with pa.ipc.open_stream(data) as stream:
        return list(stream)


def join_batches(batches: Sequence[Batch], rows_max: int) -> list[Batch]:
    """Return the rows of `batches`, in order, in few batches of at most `rows_max` rows."""
    made: list[Batch] = []
    together: list[Batch] = []
    count = 0
    for batch in batches:
        if together and count + batch.rows.num_rows > rows_max:
            made.append(_join_batches(together))
            together, count = [], 0
        together.append(batch)
        count += batch.rows.num_rows
    return [*made, _join_batches(together)] if together else made


def _join_batches(batches: Sequence[Batch]) -> Batch:
    if len(batches) == 1:
        return batches[0]
    # Batches are joined only on keyed edges, where each batch has hashes.
    hashes = [batch.hashes for batch in batches if batch.hashes is not None]
    rows = pa.concat_batches([batch.rows for batch in batches])
    return Batch(rows, np.concatenate(hashes))


class OutputChannel(ABC):
    """The sending end of a channel.

    Only the chain's thread uses it, unless a method says otherwise.
    """

    def __init__(self) -> None:
        self._queue = in_flight.OutputQueue[Batch]()
        self._lock = threading.Lock()
        self._refusal: str | None = None
        self._on_credit: Callable[[], None] = lambda: None

    def attach(self, on_credit: Callable[[], None]) -> None:
        """Set the callback for new credits and for the closing of the channel."""
        self._on_credit = on_credit

    def send(self, element: Element) -> bool:
        """Append `element` to the channel; return True if it has to wait for credit.

        Raises:
            SlotLost: The channel is closed or its peer is gone.
        """
        with self._lock:
            self._check_open()
            if not self._queue.offer(element):
                return True
        # Write without the lock, which `release` and `refuse` take on other threads: a peer that
        # takes nothing may block this write. Only the chain's thread writes, so the order is kept.
        self._write(element)
        return False

    def flush(self) -> bool:
        """Send the elements that have credit; return True if some elements still wait.

        Raises:
            SlotLost: The channel is closed or its peer is gone.
        """
        while True:
            with self._lock:
                self._check_open()
                element = self._queue.next()
                if element is None:
                    return self._queue.waits
            self._write(element)

    def overtake(self, barrier: Barrier) -> tuple[Batch, ...]:
        """Send `barrier` ahead of all elements that wait for credit; return the batches among them.

        These batches go on waiting. The snapshot for this barrier must persist them.

        Raises:
            SlotLost: The channel is closed or its peer is gone.
        """
        with self._lock:
            self._check_open()
            overtaken = self._queue.overtaken_by(barrier.checkpoint)
        # Without the lock, as in `send`. The overtaken batches stay in the queue and are sent
        # later, with their own credits.
        self._write(barrier)
        return overtaken

    def push(self, barrier: Barrier) -> bool:
        """Send all waiting elements and `barrier`; return True if no more rows may be made.

        Raises:
            SlotLost: The channel is closed or its peer is gone.
        """
        with self._lock:
            self._check_open()
            elements = self._queue.push(barrier)
            waits = self._queue.waits
        # Without the lock, as in `send`.
        for element in elements:
            self._write(element)
        return waits

    def release(self, count: int) -> None:
        """Add `count` credits from the reader. Any thread."""
        with self._lock:
            waited = self._queue.waits
            self._queue.release(count)
        if waited:
            self._on_credit()

    def refuse(self, reason: str) -> None:
        """Make all further sends fail with `reason`, and wake the sender. Any thread."""
        with self._lock:
            # Keep the first reason, which is nearest to the cause.
            self._refusal = self._refusal or reason
        self._on_credit()

    def _check_open(self) -> None:
        if self._refusal is not None:
            raise SlotLost(self._refusal)

    @abstractmethod
    def _write(self, element: Element) -> None:
        """Send `element` now."""

    @abstractmethod
    def close(self, reason: str) -> None:
        """Close the channel: refuse and wake senders. Any thread; idempotent."""


class InputGate:
    """The receiving ends of one subtask's channels, and its mailbox.

    Any thread may call `put`, `post` and `wake`. Only the subtask's own thread calls the other
    methods. Mail is always taken first, then announced barriers, then elements.
    """

    def __init__(
        self,
        ends: Sequence[in_flight.ChannelEnd],
        credit_count: int,
        schemas: Mapping[int, pa.Schema],
    ) -> None:
        """Create the gate.

        At most `credit_count` batches wait in each channel, and those that a barrier has pushed.
        `schemas` are the schemas of the rows, by input.
        """
        self.ends = ends
        self._schemas = schemas
        self._credit_count = credit_count
        self._queues = in_flight.InputQueues[Batch](ends)
        self._release: list[Callable[[int], None]] = [lambda _: None] * len(ends)
        self._owed = [0] * len(ends)
        """The credits of batches that were taken although the subtask had no room for them."""
        self._mail: deque[SubtaskMail] = deque()
        self._ready = threading.Condition()
        self._woken = False

    def attach(self, channel: int, release: Callable[[int], None]) -> None:
        """Set the callback that gives credits to the sender of `channel`.

        The gate first calls `release` when it is open, which may be now, and later after each
        batch.
        """
        with self._ready:
            self._release[channel] = release
            # Read under the lock after the callback is set: if `attach` and `open` run on two
            # threads, exactly one of them gives the first credits.
            is_open = self._queues.is_open
        # Outside the lock: for a sender in another slot, `release` writes to the network, and
        # threads that put elements into this gate must not wait for that.
        if is_open:
            release(self._credit_count)

    @property
    def is_open(self) -> bool:
        """True if senders have been given credits. The subtask's own thread."""
        return self._queues.is_open

    def open(self) -> None:
        """Send the first credits to all senders, unless rows are still to be replayed."""
        with self._ready:
            if not self._queues.open():
                return
            # A channel that attaches from here on sees the open gate, and gives the credits itself.
            attached = list(self._release)
        for release in attached:
            release(self._credit_count)

    def replay(self, batches: Iterable[Batch], into: int) -> None:
        """Make input `into` take `batches` before any element of the channels.

        Called before the subtask begins.
        """
        with self._ready:
            self._queues.replay(batches, into)

    def put(self, channel: int, element: Element) -> None:
        """Append `element` to `channel`. Never waits: the sender's credits bound the queue."""
        with self._ready:
            if self._queues.put(channel, element):
                self._ready.notify()

    def post(self, mail: SubtaskMail) -> None:
        """Append `mail` for the subtask's own thread."""
        with self._ready:
            self._mail.append(mail)
            self._ready.notify()

    def wake(self) -> None:
        """Make `take` return, now or at its next call, because there is other work."""
        with self._ready:
            self._woken = True
            self._ready.notify()

    def take_mail(self) -> SubtaskMail | None:
        """Return the next mail, or None at once."""
        with self._ready:
            return self._mail.popleft() if self._mail else None

    def take(
        self, timeout_s: float, *, elements: bool = True, up_to_barriers: bool = False
    ) -> SubtaskMail | in_flight.Announced | in_flight.Received[Batch] | None:
        """Return the next item, or None after `timeout_s` or a wake-up.

        If `elements` is False, only mail and announced barriers are returned, and with
        `up_to_barriers` also the elements up to a barrier. The senders of these elements get
        credits only when a call with `elements` shows that there is room for further ones.
        """
        if elements:
            self._give_owed_credits()
        with self._ready:
            item = self._next(elements, up_to_barriers)
            if item is None:
                if not self._woken:
                    self._ready.wait(timeout_s)
                # Clear the flag after the wait, under the lock: an earlier wake-up prevents the
                # wait, and a later wake-up is not lost.
                self._woken = False
                item = self._next(elements, up_to_barriers)
        if (
            isinstance(item, in_flight.Received)
            and isinstance(item.element, Batch)
            and item.channel != in_flight.REPLAYED
        ):
            # Replayed batches came from no channel, and used no credit.
            self._owed[item.channel] += 1
            if elements:
                self._give_owed_credits()
        return item

    def _give_owed_credits(self) -> None:
        # Outside the lock, as in `attach`.
        for channel, count in enumerate(self._owed):
            if count:
                self._owed[channel] = 0
                self._release[channel](count)

    def block(self, channel: int) -> None:
        """Keep elements of `channel` in the channel from now on."""
        with self._ready:
            self._queues.block(channel)

    def unblock(self, channels: Sequence[int]) -> None:
        """Read `channels` again."""
        with self._ready:
            self._queues.unblock(channels)

    def record(self, checkpoint: CheckpointId, passed: Sequence[int]) -> None:
        """Start recording the elements that the barrier of `checkpoint` overtakes.

        See `InputQueues.record`.
        """
        with self._ready:
            self._queues.record(checkpoint, passed)

    def end_recording(self, checkpoint: CheckpointId) -> dict[int, tuple[Batch, ...]]:
        """Return the overtaken batches by input, in the order in which they must be replayed.

        If the barrier has overtaken no batch of an input, but an end of stream, a batch without
        rows stands for the end. Another FINAL checkpoint then follows.
        """
        with self._ready:
            ended = self._queues.overtaken_ends
            batches = self._queues.end_recording(checkpoint)
        for into in ended - batches.keys():
            batches[into] = (Batch(pa.RecordBatch.from_pylist([], schema=self._schemas[into])),)
        return batches

    def forget(self, checkpoint: CheckpointId) -> None:
        """Stop recording for `checkpoint`."""
        with self._ready:
            self._queues.forget(checkpoint)

    def waiting(self) -> int:
        """Return the number of elements that wait in all channels. Any thread."""
        return self._queues.waiting

    def _next(
        self, elements: bool, up_to_barriers: bool
    ) -> SubtaskMail | in_flight.Announced | in_flight.Received[Batch] | None:
        # Mail first: an abort or a shutdown must not wait for rows, and a trigger that waits for
        # rows would delay the checkpoint.
        if self._mail:
            return self._mail.popleft()
        return self._queues.take(elements=elements, up_to_barriers=up_to_barriers)


class LocalChannel(OutputChannel):
    """A channel to a subtask of the same slot, which receives the same objects."""

    def __init__(self, gate: InputGate, channel: int) -> None:
        super().__init__()
        self._gate = gate
        self._channel = channel
        gate.attach(channel, self.release)

    def _write(self, element: Element) -> None:
        self._gate.put(self._channel, element)

    def close(self, reason: str) -> None:
        """Refuse further elements and wake the sender."""
        self.refuse(reason)


class CollectedChannel(OutputChannel):
    """A channel that keeps its batches: those of one owner among the replayed batches."""

    def __init__(self) -> None:
        super().__init__()
        # The channel has no reader while it is filled, so no element may wait for credit.
        self.release(sys.maxsize)
        self.batches: list[Batch] = []

    def _write(self, element: Element) -> None:
        if isinstance(element, Batch):
            self.batches.append(element)

    def close(self, reason: str) -> None:
        """Refuse further elements."""
        self.refuse(reason)
