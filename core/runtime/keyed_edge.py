"""The exchange: rows of one key meet in one subtask."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from onceflow.core.errors import BadRecord
from onceflow.core.protocol.alignment import Barrier
from onceflow.core.runtime.channels import OutputChannel
from onceflow.core.runtime.elements import Batch, EndOfStream
from onceflow.core.state import hash_keys, key_groups


class KeyedEdge:
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
        rows = batch.rows
        self._refuse_null_keys(rows)
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

    def _refuse_null_keys(self, rows: pa.RecordBatch) -> None:
        for name in self._key:
            column = rows.column(name)
            if column.null_count:
                first = column.is_null().index(True).as_py()
                raise BadRecord(
                    f"key_by({name!r}): a record has no {name} (null), so it belongs to no key:"
                    f" {str(rows.slice(first, 1).to_pylist()[0])[:300]}; drop such records with"
                    f" .filter(lambda r: r[{name!r}] is not None) before key_by"
                )

    def broadcast(self, element: Barrier | EndOfStream) -> None:
        """Send a barrier or an end on every channel, behind all rows sent before."""
        for channel in self._channels:
            channel.send(element)

    @property
    def waited_s(self) -> float:
        """Seconds spent waiting for credit, over all channels."""
        return sum(channel.waited_s for channel in self._channels)
