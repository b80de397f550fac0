"""What travels between subtasks: batches and barriers, in channels, read through one gate each.

A channel is FIFO and bounded by credits; `KeyGroupPartitioner` says which one a row takes.

Invariants:
    a channel delivers its elements in the order in which they were sent
    batches sent and not yet taken by the reader <= credits; barriers and ends need no credit
    a blocked channel keeps what it holds until it is unblocked
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from onceflow.core.errors import BadRecord, SlotLost
from onceflow.core.protocol.alignment import Barrier
from onceflow.core.runtime.messages import SubtaskMail
from onceflow.core.state import hash_keys, key_groups

Hashes: TypeAlias = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows, and on a keyed edge the 64-bit hash of each row's key, so that it is computed once."""

    rows: pa.RecordBatch
    hashes: Hashes | None = None


@dataclass(frozen=True, slots=True)
class EndOfStream:
    """No more rows come on this channel.

    Barriers still do: a finished source stays in checkpoints.
    """


Element: TypeAlias = Batch | Barrier | EndOfStream


@dataclass(frozen=True, slots=True)
class Received:
    """An element and the channel on which it came."""

    channel: int
    element: Element


class Credits:
    """Counts the batches that a sender may still send; waiting for one is backpressure."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._condition = threading.Condition()
        self._closed: str | None = None
        self.waited_s = 0.0

    def acquire(self) -> None:
        """Take one credit, waiting as long as the reader is slow.

        The wait has no deadline of its own: a slow reader is no fault. It ends when the channel is
        closed, which a lost peer, a lost driver and the end of the attempt all do.

        Raises:
            SlotLost: The channel was closed.
        """
        with self._condition:
            if self._count == 0 and self._closed is None:
                began = time.monotonic()
                while self._count == 0 and self._closed is None:
                    self._condition.wait(1.0)
                self.waited_s += time.monotonic() - began
            if self._closed is not None:
                raise SlotLost(self._closed)
            self._count -= 1

    def release(self, count: int = 1) -> None:
        """Give back `count` credits. Any thread."""
        with self._condition:
            self._count += count
            self._condition.notify()

    def close(self, reason: str) -> None:
        """Wake and refuse every sender from now on. Any thread; the first reason stays."""
        with self._condition:
            self._closed = self._closed or reason
            self._condition.notify_all()


class OutputChannel(ABC):
    """The sending end of one channel; used by the chain's thread alone, except `close`."""

    @abstractmethod
    def send(self, element: Element) -> None:
        """Put `element` behind everything sent before.

        Raises:
            SlotLost: The channel is closed or its peer is gone.
        """

    @property
    @abstractmethod
    def waited_s(self) -> float:
        """Seconds spent waiting for credit since the channel was opened."""

    @abstractmethod
    def close(self, reason: str) -> None:
        """Refuse and wake senders. Any thread; safe to call twice."""


class InputGate:
    """The receiving ends of one subtask's channels, and its mailbox.

    `take` belongs to the subtask's own thread; `put` and `post` to any thread. Mail is always taken
    before elements; channels are served in turn.
    """

    def __init__(self, channels: int) -> None:
        self._queues: list[deque[Element]] = [deque() for _ in range(channels)]
        self._blocked = [False] * channels
        self._release: list[Callable[[], None]] = [lambda: None] * channels
        self._mail: deque[SubtaskMail] = deque()
        self._ready = threading.Condition()
        self._turn = 0

    @property
    def channels(self) -> int:
        """How many channels end here."""
        return len(self._queues)

    def attach(self, channel: int, release: Callable[[], None]) -> None:
        """Call `release` whenever a batch of `channel` was taken.

        It returns the sender's credit.
        """
        self._release[channel] = release

    def put(self, channel: int, element: Element) -> None:
        """Append `element` to `channel`. Never waits: the sender's credits bound the queue."""
        with self._ready:
            self._queues[channel].append(element)
            if not self._blocked[channel]:
                self._ready.notify()

    def post(self, mail: SubtaskMail) -> None:
        """Append `mail` for the subtask's own thread."""
        with self._ready:
            self._mail.append(mail)
            self._ready.notify()

    def take_mail(self) -> SubtaskMail | None:
        """Return the next mail, or None at once."""
        with self._ready:
            return self._mail.popleft() if self._mail else None

    def take(self, timeout_s: float) -> SubtaskMail | Received | None:
        """Return the next mail, else the next element, else None after `timeout_s`."""
        with self._ready:
            item = self._next()
            if item is None:
                self._ready.wait(timeout_s)
                item = self._next()
        if isinstance(item, Received) and isinstance(item.element, Batch):
            self._release[item.channel]()
        return item

    def block(self, channel: int) -> None:
        """Leave what comes on `channel` in it from now on."""
        with self._ready:
            self._blocked[channel] = True

    def unblock(self, channels: Sequence[int]) -> None:
        """Read `channels` again."""
        with self._ready:
            for channel in channels:
                self._blocked[channel] = False

    def waiting(self) -> int:
        """Return how many elements wait in all channels."""
        return sum(map(len, self._queues))

    def _next(self) -> SubtaskMail | Received | None:
        if self._mail:
            return self._mail.popleft()
        count = len(self._queues)
        for step in range(count):
            channel = (self._turn + step) % count
            if self._queues[channel] and not self._blocked[channel]:
                self._turn = (channel + 1) % count
                return Received(channel, self._queues[channel].popleft())
        return None


class LocalChannel(OutputChannel):
    """A channel to a subtask of the same slot: elements are handed over as they are."""

    def __init__(self, gate: InputGate, channel: int, credits_count: int) -> None:
        self._gate = gate
        self._channel = channel
        self._credits = Credits(credits_count)
        gate.attach(channel, self._credits.release)

    def send(self, element: Element) -> None:
        """Put `element` into the gate, waiting for credit if it is a batch."""
        if isinstance(element, Batch):
            self._credits.acquire()
        self._gate.put(self._channel, element)

    @property
    def waited_s(self) -> float:
        """Seconds spent waiting for credit."""
        return self._credits.waited_s

    def close(self, reason: str) -> None:
        """Refuse and wake the sender."""
        self._credits.close(reason)


class KeyGroupPartitioner:
    """Splits batches by key group and sends each part to the subtask that owns it."""

    def __init__(
        self,
        key: tuple[str, ...],
        max_parallelism: int,
        channels: Sequence[OutputChannel],
    ) -> None:
        self._key = key
        self._max_parallelism = max_parallelism
        self._channels = channels

    def receive(self, batch: Batch) -> None:
        """Send every row of `batch` to the channel of its key group's owner, in order."""
        rows = self._with_keys(batch.rows)
        hashes = hash_keys([rows.column(name) for name in self._key])
        parallelism = len(self._channels)
        if parallelism == 1:
            self._channels[0].send(Batch(rows, hashes))
            return
        groups = key_groups(hashes, self._max_parallelism).astype(np.int64)
        owners = groups * parallelism // self._max_parallelism
        for owner, channel in enumerate(self._channels):
            chosen = np.flatnonzero(owners == owner)
            if len(chosen):
                channel.send(Batch(rows.take(pa.array(chosen)), hashes[chosen]))

    def _with_keys(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Return the rows that have a key, which all must."""
        for name in self._key:
            column = rows.column(name)
            if column.null_count:
                first = column.is_null().index(True).as_py()
                raise BadRecord(
                    f"key_by({name!r}): a record has no {name} (null), so it belongs to no key:"
                    f" {str(rows.slice(first, 1).to_pylist()[0])[:300]}; drop such records with"
                    f" .filter(lambda r: r[{name!r}] is not None) before key_by"
                )
        return rows

    def broadcast(self, element: Barrier | EndOfStream) -> None:
        """Send a barrier or an end on every channel, behind all rows sent before."""
        for channel in self._channels:
            channel.send(element)

    @property
    def waited_s(self) -> float:
        """Seconds spent waiting for credit, over all channels."""
        return sum(channel.waited_s for channel in self._channels)


class SinkPartitioner(KeyGroupPartitioner):
    """The exchange before a sink that changes rows by key."""

    def _with_keys(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Return the rows that have a key, and send the others to the first subtask.

        What becomes of a row without a key is the writer's to say: it is a bad row.
        """
        null = np.zeros(rows.num_rows, bool)
        for name in self._key:
            if rows.column(name).null_count:
                null |= rows.column(name).is_null().to_numpy(zero_copy_only=False)
        if not null.any():
            return rows
        keyless = rows.filter(pa.array(null))
        self._channels[0].send(Batch(keyless, np.zeros(keyless.num_rows, np.uint64)))
        return rows.filter(pa.array(~null))
