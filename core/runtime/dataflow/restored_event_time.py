"""How far event time had come in the snapshot that an operator begins from.

It is in each snapshot as list state, with the key groups that it was true of. So at another
parallelism, too, a window fires once, and what was late stays late.

The end of the input is no time: a job may go on with more. What is open comes out then, and event
time comes to where the last of it was due, and no further.

Invariants, for a key group g and what its subtask is told since, w:
    event time of g = max(what the snapshot says of g, w);  so it never goes back
    least <= what the snapshot says of g <= most
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from onceflow.core.msgspec_decoders import msgpack_decoder
from onceflow.core.protocol.watermarks import NO_WATERMARK
from onceflow.core.runtime.dataflow.channels import Batch
from onceflow.core.state import hash_keys
from onceflow.core.state.keys.key_columns import Ints
from onceflow.core.state.keys.key_groups import Hashes, key_group_of, key_groups
from onceflow.core.state.snapshots.canonical import Groups

EVENT_TIME = "event-time"
"""The name of the list state that says how far event time had come, by key groups."""
_PROGRESS = msgpack_decoder(tuple[int, int, int])


class RestoredEventTime:
    """The watermark up to which windows and timers have fired before a restore, by key group."""

    def __init__(
        self, elements: Iterable[bytes], owned: range, max_parallelism: int | None = None
    ) -> None:
        """`owned` are the subtask's key groups, of `max_parallelism`; None: these are all."""
        self._first = owned.start
        self._max_parallelism = max_parallelism or max(len(owned), 1)
        self._watermarks = np.full(len(owned), NO_WATERMARK, np.int64)
        for element in elements:
            first, last, watermark = _PROGRESS.decode(element)
            start, stop = max(first, owned.start), min(last + 1, owned.stop)
            if start < stop:
                self._watermarks[start - self._first : stop - self._first] = watermark
        self.least = int(self._watermarks.min()) if len(self._watermarks) else NO_WATERMARK
        """What is true of all groups."""
        self.most = int(self._watermarks.max()) if len(self._watermarks) else NO_WATERMARK

    def elements(self, watermark: int) -> tuple[bytes, ...]:
        """Return the list state that says so, event time having come to `watermark` since."""
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
            BadStateValue: It is none.
        """
        return int(self._watermarks[key_group_of(key, self._max_parallelism) - self._first])

    def parts_of(
        self, batch: Batch, key: Sequence[str], watermark: int
    ) -> Iterator[tuple[pa.RecordBatch, Hashes | None, int]]:
        """Yield the batch's rows, the hashes of their keys and their event time, one time a part.

        There are several where some key groups were ahead of `watermark`, which all have come to.

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
"""That of an operator which begins anew, and whose event time is in no snapshot."""
