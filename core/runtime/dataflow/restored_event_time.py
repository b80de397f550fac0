"""The event time that an operator had reached in the snapshot from which it begins.

Each snapshot contains it as list state, with the key groups that it applies to. So a window fires
only once, and late records stay late, also after a restore with another parallelism.

At the end of the input, open windows and timers fire. Event time advances only to the time at which
the last of them was due. It does not jump to the end of time, because a restored job may have
more input.

Invariants, for a key group g and the watermark w of its subtask since the restore:
    event time of g = max(the snapshot's event time of g, w);  so it never goes back
    least <= the snapshot's event time of g <= most
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from onceflow.core.decoding import msgpack_decoder
from onceflow.core.protocol.watermarks import NO_WATERMARK
from onceflow.core.runtime.dataflow.channels import Batch
from onceflow.core.state import hash_keys
from onceflow.core.state.keys.key_columns import Ints
from onceflow.core.state.keys.key_groups import Hashes, key_group_of, key_groups
from onceflow.core.state.snapshots.canonical import Groups

EVENT_TIME = "event-time"
"""The name of the list state that contains the event time by key groups."""
_PROGRESS = msgpack_decoder(tuple[int, int, int])


class RestoredEventTime:
    """The watermark up to which windows and timers have fired before a restore, by key group."""

    def __init__(self, elements: Iterable[bytes], owned: range, max_parallelism: int = 1) -> None:
        """Decode `elements`. `owned` are the subtask's key groups out of `max_parallelism`.

        Only `watermark_of_key` and `parts_of` use `max_parallelism`.
        """
        self._first = owned.start
        self._max_parallelism = max_parallelism
        self._watermarks = np.full(len(owned), NO_WATERMARK, np.int64)
        for element in elements:
            first, last, watermark = _PROGRESS.decode(element)
            start, stop = max(first, owned.start), min(last + 1, owned.stop)
            if start < stop:
                self._watermarks[start - self._first : stop - self._first] = watermark
        self.least = int(self._watermarks.min()) if len(self._watermarks) else NO_WATERMARK
        """The lowest watermark of all groups."""
        self.most = int(self._watermarks.max()) if len(self._watermarks) else NO_WATERMARK

    def elements(self, watermark: int) -> tuple[bytes, ...]:
        """Return the list state of this object, after event time has reached `watermark`."""
        watermarks = np.maximum(self._watermarks, watermark)
        if not len(watermarks):
            return ()
        edges: list[int] = np.flatnonzero(watermarks[1:] != watermarks[:-1]).tolist()
        starts = [0, *(edge + 1 for edge in edges)]
        return tuple(
            msgspec.msgpack.encode(
                (self._first + start, self._first + stop - 1, int(watermarks[start]))
            )
            for start, stop in zip(starts, [*starts[1:], len(watermarks)], strict=True)
        )

    def watermarks_of(self, groups: Groups) -> Ints:
        """Return the watermark of each group."""
        return self._watermarks[groups.astype(np.int64) - self._first]

    def watermark_of_key(self, key: Any) -> int:
        """Return the watermark of the group of one key.

        Raises:
            BadStateValue: The value cannot be a key.
        """
        return int(self._watermarks[key_group_of(key, self._max_parallelism) - self._first])

    def parts_of(
        self, batch: Batch, key: Sequence[str], watermark: int
    ) -> Iterator[tuple[pa.RecordBatch, Hashes | None, int]]:
        """Yield parts of the batch: rows, hashes of their keys, and their common event time.

        There are several parts if some key groups were ahead of `watermark` in the snapshot.

        Raises:
            BadStateValue: A key is null.
        """
        if watermark >= self.most:
            yield batch.rows, batch.hashes, watermark
            return
        hashes = batch.hashes
        if hashes is None:
            hashes = hash_keys([batch.rows.column(name) for name in key], key)
        watermarks = np.maximum(
            self.watermarks_of(key_groups(hashes, self._max_parallelism)), watermark
        )
        for now in np.unique(watermarks).tolist():
            mine = watermarks == now
            yield batch.rows.filter(pa.array(mine)), hashes[mine], now


NOTHING_RESTORED = RestoredEventTime((), range(0))
"""The event time of an operator that starts without a snapshot of it."""
