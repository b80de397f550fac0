"""Windows over every state backend, compared with windows that keep each of their records."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import pyarrow as pa
import pytest
from tests.conformance.state_job import BACKENDS, MAX_PARALLELISM, SUITE_BACKENDS, Job

from onceflow import (
    OutputTag,
    SlidingEventTimeWindows,
    TumblingEventTimeWindows,
    count,
    max_,
    min_,
    sum_,
)
from onceflow.core.errors import UserFunctionError
from onceflow.core.graph import AggregateWindows, Feed
from onceflow.core.protocol.snapshots import OperatorSnapshot
from onceflow.core.protocol.watermarks import MAX_WATERMARK, NO_WATERMARK
from onceflow.core.runtime.dataflow.channels import Batch
from onceflow.core.runtime.dataflow.window_operators import EVENT_TIME, WindowAggregator
from onceflow.core.state import StateBackend, hash_keys, key_group_of
from onceflow.core.windows import PaneAssigner, window_schema

SCHEMA = pa.schema([("account", pa.string()), ("at", pa.int64()), ("amount", pa.int64())])
AGGREGATES = {
    "total": sum_("amount"),
    "n": count(),
    "low": min_("amount"),
    "high": max_("amount"),
}
Row = tuple[str, int, int | None]


class Model:
    """Keeps every record of every window, and what the watermark is for each key group."""

    def __init__(self, windows: PaneAssigner, lateness: int) -> None:
        self._windows = windows
        self._lateness = lateness
        self._rows: dict[tuple[str, int, int], list[int | None]] = defaultdict(list)
        self.told = [NO_WATERMARK] * MAX_PARALLELISM
        self.late = 0

    def take(self, rows: Sequence[Row]) -> list[tuple[Any, ...]]:
        again: set[tuple[str, int, int]] = set()
        for key, at, amount in rows:
            told = self._told(key)
            windows = [(s, e) for s, e in self._of(at) if e - 1 + self._lateness > told]
            self.late += not windows
            for start, end in windows:
                self._rows[key, start, end].append(amount)
                if end - 1 <= told:
                    again.add((key, start, end))
        return [self._row(window) for window in again]

    def advance(self, groups: range, watermark: int) -> list[tuple[Any, ...]]:
        mine = [w for w in self._rows if key_group_of(w[0], MAX_PARALLELISM) in groups]
        due = [w for w in mine if self._told(w[0]) < w[2] - 1 <= watermark]
        rows = [self._row(window) for window in due]
        for group in groups:
            self.told[group] = max(self.told[group], watermark)
        for window in mine:
            if window[2] - 1 + self._lateness <= watermark:
                del self._rows[window]
        return rows

    def _told(self, key: str) -> int:
        return self.told[key_group_of(key, MAX_PARALLELISM)]

    def _of(self, at: int) -> list[tuple[int, int]]:
        size = round(float(self._windows.size) * 1000)
        slide = size
        if isinstance(self._windows, SlidingEventTimeWindows):
            slide = round(float(self._windows.slide) * 1000)
        last = at - (at - round(float(self._windows.offset) * 1000)) % slide
        return [(start, start + size) for start in range(last, at - size, -slide)]

    def _row(self, window: tuple[str, int, int]) -> tuple[Any, ...]:
        amounts = self._rows[window]
        known = [amount for amount in amounts if amount is not None]
        low, high = min(known, default=None), max(known, default=None)
        return (*window, sum(known), len(amounts), low, high)


class Running:
    """Operators side by side, and what they have emitted since it was asked for last."""

    def __init__(
        self,
        job: Job,
        windows: PaneAssigner,
        lateness: int,
        parallelism: int,
        restored: Sequence[OperatorSnapshot] = (),
        backend: StateBackend | None = None,
        late: OutputTag | None = None,
    ) -> None:
        work = AggregateWindows(("account",), windows, "at", lateness, AGGREGATES, late)
        results = {name: one.result_type(SCHEMA) for name, one in AGGREGATES.items()}
        schema = window_schema(SCHEMA, work.key, work.time, results)
        told = [element for one in restored for element in one.lists.get(EVENT_TIME, ())]
        handles = [handle for one in restored for handle in one.keyed]
        self._job = job
        self.groups: list[range] = []
        self.operators: list[WindowAggregator] = []
        self._made: list[pa.RecordBatch] = []
        for index in range(parallelism):
            groups = job.context(index, parallelism).key_groups
            store = job.open(handles, index=index, parallelism=parallelism, backend=backend)
            operator = WindowAggregator("op", work, store, SCHEMA, schema, groups, told)
            operator.outputs.append(lambda batch: self._made.append(batch.rows))
            self.groups.append(groups)
            self.operators.append(operator)

    def take(self, rows: Sequence[Row]) -> list[tuple[Any, ...]]:
        for groups, operator in zip(self.groups, self.operators, strict=True):
            mine = [row for row in rows if key_group_of(row[0], MAX_PARALLELISM) in groups]
            columns = [list(column) for column in zip(*mine, strict=True)] or [[], [], []]
            batch = pa.record_batch(
                [pa.array(c, f.type) for c, f in zip(columns, SCHEMA, strict=True)], schema=SCHEMA
            )
            operator.receive(Batch(batch, hash_keys([batch.column("account")])))
        return self.emitted()

    def emitted(self) -> list[tuple[Any, ...]]:
        made, self._made[:] = list(self._made), []
        rows = [row for batch in made for row in batch.to_pylist()]
        as_ms = [
            {**row, **{name: _ms(row[name]) for name in ("window_start", "window_end")}}
            for row in rows
        ]
        return [tuple(row.values()) for row in as_ms]

    def snapshot(self, *, savepoint: bool = False) -> list[OperatorSnapshot]:
        taken: list[OperatorSnapshot] = []
        checkpoint = self._job.next_checkpoint()
        for operator in self.operators:
            take = operator.savepoint if savepoint else operator.snapshot
            pending = take(checkpoint)
            taken.append(pending.upload(self._job.storage))
            operator.completed(checkpoint)
        return taken

    @property
    def late(self) -> int:
        return sum(operator.rejected for operator in self.operators)


def _ms(moment: datetime) -> int:
    return round(moment.timestamp() * 1000)


KINDS: list[tuple[PaneAssigner, int]] = [
    (TumblingEventTimeWindows(0.010, 0.003), 0),
    (TumblingEventTimeWindows(0.010), 12),
    (SlidingEventTimeWindows(0.012, 0.004), 0),
    (SlidingEventTimeWindows(0.010, 0.004, 0.001), 9),
]


@pytest.mark.parametrize(("windows", "lateness"), KINDS, ids=str)
def test_windows_equal_those_that_keep_every_record_through_snapshots_and_rescaling(
    job: Job, windows: PaneAssigner, lateness: int
) -> None:
    rng = random.Random(lateness)
    model = Model(windows, lateness)
    running = Running(job, windows, lateness, 2)
    late = 0
    now = 1_000
    for step in range(30):
        now += rng.choice([0, 1, 3, 25])
        rows: list[Row] = [
            (f"k{rng.randrange(30)}", now - rng.randrange(30), rng.choice([None, rng.randrange(9)]))
            for _ in range(rng.choice([0, 1, 20]))
        ]
        assert Counter(running.take(rows)) == Counter(model.take(rows))
        assert late + running.late == model.late
        # Subtasks hear of event time one after the other; some have not when a barrier comes.
        for groups, operator in zip(running.groups, running.operators, strict=True):
            if rng.random() < 0.7:
                operator.on_watermark(now - 8)
                assert Counter(running.emitted()) == Counter(model.advance(groups, now - 8))
        if step % 12 == 11:
            snapshots = running.snapshot()
            late += running.late
            running = Running(job, windows, lateness, rng.choice([1, 2, 3]), snapshots)
    for groups, operator in zip(running.groups, running.operators, strict=True):
        operator.on_watermark(MAX_WATERMARK)
        assert Counter(running.emitted()) == Counter(model.advance(groups, MAX_WATERMARK))
    assert model.late
    # What is over is gone.
    assert running.snapshot(savepoint=True)[0].keyed[0].size_bytes < 1_200


@pytest.mark.parametrize("target", SUITE_BACKENDS)
def test_a_savepoint_brings_windows_to_any_backend(job: Job, target: str) -> None:
    windows = SlidingEventTimeWindows(0.010, 0.005)
    running = Running(job, windows, 0, 2)
    running.take([("a", 1, 5), ("b", 7, 6), ("a", 12, 7)])
    for operator in running.operators:
        operator.on_watermark(4)
    assert running.emitted() == [("a", -5, 5, 5, 1, 5, 5)]
    snapshots = running.snapshot(savepoint=True)
    moved = Running(job, windows, 0, 1, snapshots, BACKENDS[target])
    moved.operators[0].on_watermark(4)
    assert moved.emitted() == []
    assert moved.take([("a", -3, 9)]) == []
    assert moved.late == 1
    moved.operators[0].on_watermark(9)
    assert sorted(moved.emitted()) == [("a", 0, 10, 5, 1, 5, 5), ("b", 0, 10, 6, 1, 6, 6)]


@pytest.mark.parametrize("backend", ["heap", "rocksdb-incremental"], indirect=True)
def test_windows_that_end_give_their_memory_back(job: Job) -> None:
    running = Running(job, TumblingEventTimeWindows(0.001), 0, 1)
    for moment in range(40):
        running.take([(f"k{number}", moment, 1) for number in range(500)])
        running.operators[0].on_watermark(moment)
        assert len(running.emitted()) == 500
        if moment % 20 == 5:
            running.snapshot()
    assert len(running.operators[0]._table) < 10_000  # pyright: ignore[reportPrivateUsage]


def test_records_without_event_time_and_sums_that_overflow_are_named(job: Job) -> None:
    running = Running(job, TumblingEventTimeWindows(0.010), 0, 1)
    with pytest.raises(UserFunctionError, match=r"'op'.*'at' is null.*'account': 'b'"):
        running.take([("a", 1, 1), ("b", None, 1)])  # type: ignore[list-item]
    with pytest.raises(UserFunctionError, match=r"'total'.*leaves 64 bits at key 'b'"):
        running.take([("a", 1, 1), ("b", 2, 2**63 - 1), ("b", 3, 1)])


def test_late_records_go_to_a_side_output_whole_and_are_not_counted(job: Job) -> None:
    tag = OutputTag("late", SCHEMA)
    running = Running(job, TumblingEventTimeWindows(0.010), 0, 1, late=tag)
    late: list[pa.RecordBatch] = []
    (operator,) = running.operators
    operator.outlet(Feed("op", SCHEMA, tag.name)).append(lambda batch: late.append(batch.rows))
    running.take([("a", 5, 1)])
    operator.on_watermark(20)
    assert running.emitted() == [("a", 0, 10, 1, 1, 1, 1)]
    assert running.take([("a", 9, 2), ("b", 25, 3)]) == []
    assert [row for batch in late for row in batch.to_pylist()] == [
        {"account": "a", "at": 9, "amount": 2}
    ]
    assert running.late == 0
