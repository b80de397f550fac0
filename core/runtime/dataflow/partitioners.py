"""The sending ends of edges, which choose the subtask of the next chain for each row."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar

import numpy as np
import pyarrow as pa

from onceflow.core.errors import BadRecord
from onceflow.core.protocol.checkpoints.alignment import EndOfStream
from onceflow.core.protocol.checkpoints.decisions import Barrier
from onceflow.core.runtime.dataflow.channels import Batch, Element, OutputChannel
from onceflow.core.spi.bad_rows import quote_row
from onceflow.core.state import hash_keys, key_groups


class Partitioner(ABC):
    """The sending end of an edge: a channel to each subtask that may get rows."""

    keeps_order: ClassVar[bool] = True
    """True if barriers wait for their turn behind rows; see `ChannelEnd`."""

    pushes: bool = False
    """True if barriers push the rows before them through, because the receiver absorbs rows."""

    def __init__(self, channels: Sequence[OutputChannel], schema: pa.Schema) -> None:
        self._schema = schema
        self._channels = channels
        self._waits = True

    def attach(self, on_credit: Callable[[], None]) -> None:
        """Set the callback that is called when `flush` may send waiting elements. Any thread."""
        for channel in self._channels:
            channel.attach(on_credit)

    @abstractmethod
    def receive(self, batch: Batch) -> None:
        """Send the rows of `batch` to their receivers, in order.

        Never waits: `flush` sends elements that have no credit now.
        """

    def flush(self) -> bool:
        """Send the elements that have credit; return True if the subtask must produce no more rows.

        That is the case while elements wait, or while a reader has not given its first credits.

        Raises:
            SlotLost: A channel is closed.
        """
        if self._waits:
            # A list and a sum: `any` would stop at the first waiting channel and not flush the
            # others.
            self._waits = sum([channel.flush() for channel in self._channels]) > 0
        return self._waits

    def tell(self, watermark: int) -> None:
        """Send a watermark on every channel, after all rows sent before."""
        # A watermark travels as a batch without rows, so that it needs credit and keeps its turn.
        none = pa.RecordBatch.from_pylist([], schema=self._schema)
        batch = Batch(none, np.zeros(0, np.uint64), watermark)
        for channel in range(len(self._channels)):
            self._send(channel, batch)

    def end(self) -> None:
        """Send the end of the stream on every channel, after all rows sent before."""
        for channel in range(len(self._channels)):
            self._send(channel, EndOfStream())

    def forward(self, barrier: Barrier) -> tuple[Batch, ...]:
        """Send `barrier` on every channel; return the batches that it overtakes here.

        A barrier that may not overtake on this edge is sent after all rows sent before.
        """
        if self.pushes:
            self._waits = sum([channel.push(barrier) for channel in self._channels]) > 0
            return ()
        if barrier.overtakes_after_s is None or self.keeps_order:
            for number in range(len(self._channels)):
                self._send(number, barrier)
            return ()
        return tuple(batch for channel in self._channels for batch in channel.overtake(barrier))

    def _send(self, channel: int, element: Element) -> None:
        self._waits = self._channels[channel].send(element) or self._waits


class ForwardPartitioner(Partitioner):
    """A partitioner with one channel, to the subtask of the same number."""

    def receive(self, batch: Batch) -> None:
        """Send `batch` unchanged."""
        self._send(0, batch)


class BroadcastPartitioner(Partitioner):
    """A partitioner that sends all rows to every subtask."""

    def receive(self, batch: Batch) -> None:
        """Send `batch` on every channel."""
        # The wire format has a column of hashes for every batch; the receiver ignores these.
        unkeyed = Batch(batch.rows, np.zeros(batch.rows.num_rows, np.uint64))
        for channel in range(len(self._channels)):
            self._send(channel, unkeyed)


class KeyGroupPartitioner(Partitioner):
    """A partitioner that splits batches by key group and sends each part to its owner."""

    keeps_order = False

    def __init__(
        self,
        key: tuple[str, ...],
        max_parallelism: int,
        channels: Sequence[OutputChannel],
        schema: pa.Schema,
    ) -> None:
        super().__init__(channels, schema)
        self._key = key
        self._max_parallelism = max_parallelism

    def receive(self, batch: Batch) -> None:
        """Send every row of `batch` to the channel of its key group's owner, in order."""
        rows = self._with_keys(batch.rows)
        hashes = hash_keys([rows.column(name) for name in self._key])
        parallelism = len(self._channels)
        if parallelism == 1:
            self._send(0, Batch(rows, hashes))
            return
        groups = key_groups(hashes, self._max_parallelism).astype(np.int64)
        # Compute the owner of each key group. As int64, because uint16 would overflow.
        owners = groups * parallelism // self._max_parallelism
        for owner in range(parallelism):
            chosen = np.flatnonzero(owners == owner)
            if len(chosen):
                self._send(owner, Batch(rows.take(pa.array(chosen)), hashes[chosen]))

    def _with_keys(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Return `rows`, all of which must have a key.

        Raises:
            BadRecord: A row has a null in its key.
        """
        for name in self._key:
            column = rows.column(name)
            if column.null_count:
                first = column.is_null().index(True).as_py()
                raise BadRecord(
                    f"key_by({name!r}): a record has {name} = null, so it belongs to no key:"
                    f" {quote_row(rows, first)[:300]}; drop such records with"
                    f" .filter(lambda r: r[{name!r}] is not None) before key_by"
                )
        return rows


class SinkPartitioner(KeyGroupPartitioner):
    """The partitioner before a sink that changes rows by key."""

    def _with_keys(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Return the rows that have a key, and send the others to the first subtask.

        The sink's writer decides what to do with a row without a key: it is a bad row.
        """
        null = np.zeros(rows.num_rows, bool)
        for name in self._key:
            if rows.column(name).null_count:
                null |= rows.column(name).is_null().to_numpy(zero_copy_only=False)
        if not null.any():
            return rows
        keyless = rows.filter(pa.array(null))
        self._send(0, Batch(keyless, np.zeros(keyless.num_rows, np.uint64)))
        return rows.filter(pa.array(~null))
