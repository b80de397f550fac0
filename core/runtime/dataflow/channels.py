"""What travels between subtasks: batches and barriers, in channels, read through one gate each.

A channel is FIFO and bounded by credits; a `Partitioner` says which one a row takes. What waits on
either side, and what a barrier overtakes there, is decided by `protocol.checkpoints.in_flight`.

Invariants:
    a channel delivers its elements in the order in which they were sent
    batches sent and not yet taken by the reader <= credits; barriers and ends need no credit
    a sender has no credits before the reader has taken all that it replays
    a sender never waits in `send`: what has no credit waits in its channel, and the subtask takes
    no further rows until that is sent
    a blocked channel keeps what it holds until it is unblocked
"""

from __future__ import annotations

import sys
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from onceflow.core.errors import SlotLost
from onceflow.core.protocol.checkpoints.alignment import Barrier, EndOfStream
from onceflow.core.protocol.checkpoints.in_flight import (
    REPLAYED,
    Announced,
    ChannelEnd,
    InputQueues,
    OutputQueue,
    Received,
)
from onceflow.core.protocol.ids import CheckpointId
from onceflow.core.protocol.messages import SubtaskMail

Hashes: TypeAlias = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows, and on a keyed edge the 64-bit hash of each row's key, so that it is computed once."""

    rows: pa.RecordBatch
    hashes: Hashes | None = None
    watermark: int | None = None
    """What a batch without rows is sent for: it keeps its place among the others."""


Element: TypeAlias = Batch | Barrier | EndOfStream


def encode_batches(batches: Sequence[Batch]) -> pa.Buffer:
    """Return the rows of `batches`, at least one, as an Arrow stream. Hashes are left out."""
    sink = pa.BufferOutputStream()
    schema = batches[0].rows.schema
    with pa.ipc.new_stream(sink, schema) as stream:
        for batch in batches:
            # Those that came from other slots may differ in metadata.
            stream.write_batch(pa.record_batch(batch.rows.columns, schema=schema))
    return sink.getvalue()


def decode_batches(data: bytes) -> list[pa.RecordBatch]:
    """Return the rows that `encode_batches` was given, batch by batch."""
    with pa.ipc.open_stream(data) as stream:
        return list(stream)


def join_batches(batches: Sequence[Batch], rows_max: int) -> list[Batch]:
    """Return the rows of `batches`, in order, in few batches: of `rows_max` rows at the most."""
    made: list[Batch] = []
    together: list[Batch] = []
    count = 0
    for batch in batches:
        if together and count + batch.rows.num_rows > rows_max:
            made.append(_one_of(together))
            together, count = [], 0
        together.append(batch)
        count += batch.rows.num_rows
    return [*made, _one_of(together)] if together else made


def _one_of(batches: Sequence[Batch]) -> Batch:
    if len(batches) == 1:
        return batches[0]
    # Batches are joined on keyed edges alone, where each has its hashes.
    hashes = [batch.hashes for batch in batches if batch.hashes is not None]
    rows = pa.concat_batches([batch.rows for batch in batches])
    return Batch(rows, np.concatenate(hashes))


class OutputChannel(ABC):
    """The sending end of one channel; used by the chain's thread alone, except where said."""

    def __init__(self) -> None:
        self._queue = OutputQueue[Batch]()
        self._lock = threading.Lock()
        self._refusal: str | None = None
        self._on_credit: Callable[[], None] = lambda: None

    def attach(self, on_credit: Callable[[], None]) -> None:
        """Call `on_credit` when `flush` may send what waits, and when the channel is closed."""
        self._on_credit = on_credit

    def send(self, element: Element) -> bool:
        """Put `element` behind everything sent before; return whether it waits for credit.

        Raises:
            SlotLost: The channel is closed or its peer is gone.
        """
        with self._lock:
            self._check_open()
            if not self._queue.offer(element):
                return True
        # Without the lock, which `release` and `refuse` take on other threads: a peer that takes
        # nothing may hold up this write. The chain's thread alone writes, so the order is kept.
        self._write(element)
        return False

    def flush(self) -> bool:
        """Send what there is credit for; return whether something still waits.

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
        """Send `barrier` ahead of all that waits for credit; return the batches among it.

        They go on waiting. Whoever takes the snapshot for this barrier persists them.

        Raises:
            SlotLost: The channel is closed or its peer is gone.
        """
        with self._lock:
            self._check_open()
            overtaken = self._queue.overtaken_by(barrier.checkpoint)
        # Without the lock, as in `send`. What is overtaken stays in the queue and is sent later,
        # with its own credits.
        self._write(barrier)
        return overtaken

    def release(self, count: int) -> None:
        """Take in that the reader has room for `count` batches more, if any. Any thread."""
        with self._lock:
            waited = self._queue.waits
            self._queue.release(count)
        if waited:
            self._on_credit()

    def refuse(self, reason: str) -> None:
        """Refuse and wake the sender from now on. Any thread; the first reason stays."""
        with self._lock:
            # The first reason is nearest to the cause; what comes after it follows from it.
            self._refusal = self._refusal or reason
        self._on_credit()

    def _check_open(self) -> None:
        if self._refusal is not None:
            raise SlotLost(self._refusal)

    @abstractmethod
    def _write(self, element: Element) -> None:
        """Put `element` on its way, now."""

    @abstractmethod
    def close(self, reason: str) -> None:
        """Refuse and wake senders. Any thread; safe to call twice."""


class InputGate:
    """The receiving ends of one subtask's channels, and its mailbox.

    `put`, `post` and `wake` may be called by any thread, all else by the subtask's own. Mail is
    always taken first, then announced barriers, then elements.
    """

    def __init__(self, ends: Sequence[ChannelEnd], credit_count: int) -> None:
        """`credit_count` batches may wait in each channel."""
        self.ends = ends
        self._credit_count = credit_count
        self._queues = InputQueues[Batch](ends)
        self._release: list[Callable[[int], None]] = [lambda _: None] * len(ends)
        self._mail: deque[SubtaskMail] = deque()
        self._ready = threading.Condition()
        self._woken = False

    def attach(self, channel: int, release: Callable[[int], None]) -> None:
        """Call `release` with how many batches more the sender of `channel` may send.

        First when the gate is open, which may be now, then whenever a batch was taken.
        """
        with self._ready:
            self._release[channel] = release
            # Read under the lock, with the callback set: of `attach` and `open` on two threads
            # exactly one gives the first credits.
            is_open = self._queues.is_open
        # Outside the lock: to a sender in another slot this writes to the network, and whoever puts
        # elements into this gate must not wait for that.
        if is_open:
            release(self._credit_count)

    @property
    def is_open(self) -> bool:
        """Whether senders have been given credits. The subtask's own thread."""
        return self._queues.is_open

    def open(self) -> None:
        """Give all senders their first credits, unless something is still to be replayed."""
        with self._ready:
            if not self._queues.open():
                return
            # Those that attach from here on see that the gate is open, and give the credits
            # themselves.
            attached = list(self._release)
        for release in attached:
            release(self._credit_count)

    def replay(self, batches: Iterable[Batch], into: int) -> None:
        """Have input `into` take `batches` before anything of the channels.

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
        """Have `take` return, now or when it is called next: there is something else to do."""
        with self._ready:
            self._woken = True
            self._ready.notify()

    def take_mail(self) -> SubtaskMail | None:
        """Return the next mail, or None at once."""
        with self._ready:
            return self._mail.popleft() if self._mail else None

    def take(
        self, timeout_s: float, *, elements: bool = True
    ) -> SubtaskMail | Announced | Received[Batch] | None:
        """Return what is next; None after `timeout_s`, or when it was woken.

        Without `elements` it is mail and announced barriers alone.
        """
        with self._ready:
            item = self._next(elements)
            if item is None:
                if not self._woken:
                    self._ready.wait(timeout_s)
                # Cleared after the wait, under the lock: a wake that came before is not waited for,
                # and one that comes later is not lost.
                self._woken = False
                item = self._next(elements)
        if (
            isinstance(item, Received)
            and isinstance(item.element, Batch)
            and item.channel != REPLAYED
        ):
            # Outside the lock, as in `attach`. What is replayed was sent by no channel, and took no
            # credit.
            self._release[item.channel](1)
        return item

    def block(self, channel: int) -> None:
        """Leave what comes on `channel` in it from now on."""
        with self._ready:
            self._queues.block(channel)

    def unblock(self, channels: Sequence[int]) -> None:
        """Read `channels` again."""
        with self._ready:
            self._queues.unblock(channels)

    def record(self, checkpoint: CheckpointId, passed: Sequence[int]) -> None:
        """Begin to note what the barrier of `checkpoint` overtakes; see `InputQueues.record`."""
        with self._ready:
            self._queues.record(checkpoint, passed)

    def end_recording(self, checkpoint: CheckpointId) -> dict[int, tuple[Batch, ...]]:
        """Return all that it has overtaken, by input, in the order to replay it in."""
        with self._ready:
            return self._queues.end_recording(checkpoint)

    def forget(self, checkpoint: CheckpointId) -> None:
        """Record nothing more for `checkpoint`."""
        with self._ready:
            self._queues.forget(checkpoint)

    def waiting(self) -> int:
        """Return how many elements wait in all channels. Any thread."""
        return self._queues.waiting

    def _next(self, elements: bool) -> SubtaskMail | Announced | Received[Batch] | None:
        # Mail first: an abort or a shutdown must not wait behind rows, and a trigger that does
        # would delay the checkpoint by all of them.
        return self._mail.popleft() if self._mail else self._queues.take(elements=elements)


class LocalChannel(OutputChannel):
    """A channel to a subtask of the same slot: elements are passed on as they are."""

    def __init__(self, gate: InputGate, channel: int) -> None:
        super().__init__()
        self._gate = gate
        self._channel = channel
        gate.attach(channel, self.release)

    def _write(self, element: Element) -> None:
        self._gate.put(self._channel, element)

    def close(self, reason: str) -> None:
        """Refuse and wake the sender."""
        self.refuse(reason)


class CollectedChannel(OutputChannel):
    """Keeps what is sent: the batches of one owner among those that are replayed."""

    def __init__(self) -> None:
        super().__init__()
        # Nobody reads it while it is filled, so nothing in it may wait for credit.
        self.release(sys.maxsize)
        self.batches: list[Batch] = []

    def _write(self, element: Element) -> None:
        if isinstance(element, Batch):
            self.batches.append(element)

    def close(self, reason: str) -> None:
        """Refuse more."""
        self.refuse(reason)
