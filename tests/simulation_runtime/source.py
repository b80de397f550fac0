"""A source with several splits, whose records appear one after the other, and splits, too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa
from tests.simulation_runtime.scheduler import scheduler
from tests.simulation_runtime.shared import Shared
from tests.simulation_runtime.threads import Condition

from onceflow.core.spi import EndOfInput, ReaderContext, Source, SourceReader, Split

RECORDS = pa.schema([(name, pa.int64()) for name in ("id", "key", "at", "bit")])
"""`bit` is 1 << `id`: the sum of several names each of them."""


@dataclass(frozen=True, slots=True)
class Record:
    """One record; `at` is its event time in milliseconds, if it has any."""

    id: int
    key: int
    at: int | None
    appears_s: float
    may_be_late: bool
    """True if it is older than the watermarks of its split allow."""


@dataclass(slots=True)
class SplitRecords:
    """The records of one split, in order."""

    appears_s: float
    records: list[Record]


class SimulatedSource(Shared, Source):
    """Reads splits; ends when all are read, or never."""

    def __init__(self, splits: dict[str, SplitRecords], *, discovery_s: float | None) -> None:
        """`discovery_s` is how often it is asked for new splits; None: it is bounded."""
        self.all_splits = splits
        self._is_bounded = discovery_s is None
        self._discovery_s = discovery_s

    @property
    def schema(self) -> pa.Schema:
        return RECORDS

    @property
    def bounded(self) -> bool:
        return self._is_bounded

    @property
    def discovery_interval_s(self) -> float | None:
        return self._discovery_s

    def splits(self) -> Sequence[Split]:
        return self.discover(())

    def discover(self, known: Sequence[Split]) -> Sequence[Split]:
        run = scheduler()
        run.pause()
        ids = {split.id for split in known}
        new = [
            Split(name, b"0")
            for name, split in self.all_splits.items()
            if name not in ids and (self._is_bounded or split.appears_s <= run.now_s)
        ]
        return [*known, *new]

    def reader(self, splits: Sequence[Split], context: ReaderContext) -> SourceReader:
        del context
        return _Reader(self, splits)


class _Reader(SourceReader):
    def __init__(self, source: SimulatedSource, splits: Sequence[Split]) -> None:
        self._source = source
        self._next = {split.id: int(split.position) for split in splits}
        self._runs: list[tuple[str, int]] = []
        self._changed = Condition()
        self._is_woken = False

    def poll(self, timeout_s: float) -> pa.RecordBatch | EndOfInput | None:
        run = scheduler()
        run.maybe_pause()
        ready = {name: rows for name in self._next if (rows := self._find_ready(name))}
        if not ready:
            if self._source.bounded and not any(map(self._find_left, self._next)):
                return EndOfInput()
            with self._changed:
                self._changed.wait_for(lambda: self._is_woken, timeout_s)
                self._is_woken = False
            return None
        taken: list[Record] = []
        self._runs = []
        for name in run.rng.sample(sorted(ready), run.rng.randint(1, min(2, len(ready)))):
            rows = ready[name][: run.rng.randint(1, 4)]
            self._runs.append((name, len(rows)))
            self._next[name] += len(rows)
            taken += rows
        cells = [(row.id, row.key, row.at, 1 << row.id) for row in taken]
        columns = [pa.array(column, pa.int64()) for column in zip(*cells, strict=True)]
        return pa.record_batch(columns, schema=RECORDS)

    def snapshot(self) -> Sequence[Split]:
        return [Split(name, b"%d" % position) for name, position in self._next.items()]

    def wake(self) -> None:
        with self._changed:
            self._is_woken = True
            self._changed.notify_all()

    def rows_by_split(self) -> Sequence[tuple[str, int]]:
        return self._runs

    def list_ended_splits(self) -> Sequence[str]:
        if not self._source.bounded:
            return ()
        return [name for name in self._next if not self._find_left(name)]

    def add_splits(self, splits: Sequence[Split]) -> None:
        for split in splits:
            self._next[split.id] = int(split.position)

    def close(self) -> None:
        pass

    def _find_left(self, name: str) -> list[Record]:
        return self._source.all_splits[name].records[self._next[name] :]

    def _find_ready(self, name: str) -> list[Record]:
        now_s = scheduler().now_s
        return [record for record in self._find_left(name) if record.appears_s <= now_s]
