"""A replayable source of numbered records, for tests that need no broker.

Record n of split s has `id = n * splits + s`, `account = id % accounts` as text, and an amount that
follows from the id; so every test knows what must come out.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa

from onceflow.core.spi import EndOfInput, ReaderContext, Source, SourceReader, Split

SCHEMA = pa.schema([("id", pa.int64()), ("account", pa.string()), ("amount", pa.int64())])

_NEVER = "/nowhere/never"
"""The path of a file that nothing creates."""


def amount_of(record_id: int) -> int:
    return record_id * 7 % 1500 - 500


@dataclass(frozen=True)
class CountingSource(Source):
    """`records` in all over `splits_count` splits; endless when `endless`, `pause_s` a batch.

    Input ends when the file `ends_with` is there, if one is named: a test decides when. Records
    that are left are then read without pauses.
    """

    records: int
    splits_count: int = 2
    accounts: int = 100
    batch_rows: int = 50
    pause_s: float = 0.0
    endless: bool = False
    ends_with: str = ""

    def held_in_the_middle(self) -> CountingSource:
        """Return the first half of the records, after which the input neither ends nor goes on.

        A job that reads it is still running when a test ends it, however long that takes.
        """
        return replace(self, records=self.records // 2, ends_with=_NEVER)

    @property
    def schema(self) -> pa.Schema:
        return SCHEMA

    @property
    def bounded(self) -> bool:
        return not self.endless

    def splits(self) -> Sequence[Split]:
        return [Split(str(number), b"0") for number in range(self.splits_count)]

    def reader(self, splits: Sequence[Split], context: ReaderContext) -> SourceReader:
        return CountingReader(self, splits)


class CountingReader(SourceReader):
    """Reads the records of its splits in turns."""

    def __init__(self, source: CountingSource, splits: Sequence[Split]) -> None:
        self._source = source
        self._next = {int(split.id): int(split.position) for split in splits}
        self._turn = 0
        self._last: list[tuple[str, int]] = []

    def poll(self, timeout_s: float) -> pa.RecordBatch | EndOfInput | None:
        source = self._source
        open_splits = [
            split for split, at in self._next.items() if source.endless or at < self._limit(split)
        ]
        if not open_splits:
            if source.endless or (source.ends_with and not Path(source.ends_with).exists()):
                time.sleep(timeout_s)
                return None
            return EndOfInput()
        if source.pause_s and not (source.ends_with and Path(source.ends_with).exists()):
            time.sleep(source.pause_s)
        split = open_splits[self._turn % len(open_splits)]
        self._turn += 1
        first = self._next[split]
        last = first + source.batch_rows
        if not source.endless:
            last = min(last, self._limit(split))
        self._next[split] = last
        self._last = [(str(split), last - first)]
        ids = np.arange(first, last) * source.splits_count + split
        accounts = [str(record_id % source.accounts) for record_id in ids.tolist()]
        amounts = ids * 7 % 1500 - 500
        return pa.record_batch([ids, accounts, amounts], schema=SCHEMA)

    def rows_by_split(self) -> Sequence[tuple[str, int]]:
        return self._last

    def snapshot(self) -> Sequence[Split]:
        return [Split(str(split), str(at).encode()) for split, at in self._next.items()]

    def close(self) -> None:
        pass

    def _limit(self, split: int) -> int:
        source = self._source
        return (source.records - split + source.splits_count - 1) // source.splits_count
