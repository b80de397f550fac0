"""The exchange: rows of one key meet in one subtask."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from onceflow.core.errors import BadRecord
from onceflow.core.protocol.alignment import Barrier
from onceflow.core.runtime.dataflow.channels import OutputChannel
from onceflow.core.runtime.dataflow.elements import Batch, EndOfStream
from onceflow.core.state import hash_keys, key_groups


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
