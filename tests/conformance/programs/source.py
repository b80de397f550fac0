"""A source whose rows a program has written down, split by split."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pyarrow as pa

from onceflow.core.spi import EndOfInput, ReaderContext, Source, SourceReader, Split


@dataclass(frozen=True)
class WrittenSource(Source):
    """Reads `splits`: batches, each always read as a whole. The position is the next batch."""

    parts: tuple[tuple[pa.RecordBatch, ...], ...]
    columns: pa.Schema
    number: int
    readable: dict[tuple[int, int], int] = field(compare=False)
    """By `number` and split, how many batches can be read; changed by the test."""
    ends_alone: bool
    """Whether a reader ends as soon as it has read its splits, whatever others do."""
    end: list[bool] = field(default_factory=lambda: [False], compare=False)
    """Whether input may end, changed by the test."""

    @property
    def schema(self) -> pa.Schema:
        return self.columns

    @property
    def bounded(self) -> bool:
        return True

    def splits(self) -> Sequence[Split]:
        return [Split(str(number), b"0") for number in range(len(self.parts))]

    def __deepcopy__(self, memo: object) -> WrittenSource:
        return self

    def reader(self, splits: Sequence[Split], context: ReaderContext) -> SourceReader:
        return _Reader(self, splits)


class _Reader(SourceReader):
    def __init__(self, source: WrittenSource, splits: Sequence[Split]) -> None:
        self._source = source
        self._next = {int(split.id): int(split.position) for split in splits}
        self._turn = 0
        self._last: list[tuple[str, int]] = []

    def poll(self, timeout_s: float) -> pa.RecordBatch | EndOfInput | None:
        parts = self._source.parts
        limits = {split: self._source.readable[self._source.number, split] for split in self._next}
        left = [split for split, at in sorted(self._next.items()) if at < limits[split]]
        if not left:
            is_read = all(at == len(parts[split]) for split, at in self._next.items())
            ends = self._source.end[0] or (self._source.ends_alone and is_read)
            return EndOfInput() if ends else None
        split = left[self._turn % len(left)]
        self._turn += 1
        batch = parts[split][self._next[split]]
        self._next[split] += 1
        self._last = [(str(split), batch.num_rows)]
        return batch

    def rows_by_split(self) -> Sequence[tuple[str, int]]:
        return self._last

    def snapshot(self) -> Sequence[Split]:
        return [Split(str(split), str(at).encode()) for split, at in sorted(self._next.items())]

    def close(self) -> None:
        pass
