"""Windows over every state backend, compared with windows that keep each of their records."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from tests.conformance.state_job import BACKENDS, MAX_PARALLELISM, SUITE_BACKENDS, Job
from tests.support.drawn_seeds import draw_random

from onceflow import (
    EventTimeSessionWindows,
    OutputTag,
    SlidingEventTimeWindows,
    TumblingEventTimeWindows,
    count,
    count_distinct,
    first,
    last,
    max_,
    min_,
    sum_,
)
from onceflow.core.errors import UserFunctionError
from onceflow.core.plan.graph import Feed
from onceflow.core.plan.windows import WINDOW_COLUMNS, PaneAssigner, WindowAssigner, window_schema
from onceflow.core.plan.work import AggregateWindows
from onceflow.core.protocol.checkpoints.snapshots import OperatorSnapshot
from onceflow.core.protocol.watermarks import MAX_WATERMARK, NO_WATERMARK
from onceflow.core.runtime.dataflow.channels import Batch
from onceflow.core.runtime.dataflow.restored_event_time import EVENT_TIME
from onceflow.core.runtime.dataflow.session_operators import SessionAggregator, Sessions
from onceflow.core.runtime.dataflow.window_operators import WindowAggregator
from onceflow.core.state import StateBackend, hash_keys, key_group_of

SCHEMA = pa.schema(
    [("account", pa.string()), ("at", pa.int64()), ("amount", pa.int64()), ("text", pa.string())]
)
AGGREGATES = {
    "total": sum_("amount"),
    "n": count(),
    "low": min_("amount"),
    "high": max_("amount"),
    "distinct": count_distinct("amount"),
    "even_distinct": count_distinct("amount", where="amount % 2 = 0"),
    "first": first("amount"),
    "last": last("amount", where="amount % 2 = 0"),
    "low_text": min_("text"),
    "high_text": max_("text"),
}
Row = tuple[str, int, int | None]


class Model:
    """Keeps every record of every window, and what the watermark is for each key group."""

    def __init__(self, windows: PaneAssigner, lateness: int) -> None:
        self._windows = windows
        self._lateness = lateness
        self._rows: dict[tuple[str, int, int], list[tuple[int, int | None]]] = defaultdict(list)
        self.told = [NO_WATERMARK] * MAX_PARALLELISM
        self.late = 0

    def take(self, rows: Sequence[Row]) -> list[tuple[Any, ...]]:
        again: set[tuple[str, int, int]] = set()
        for key, at, amount in rows:
            told = self._told(key)
            windows = [(s, e) for s, e in self._of(at) if e - 1 + self._lateness > told]
            self.late += not windows
            for start, end in windows:
                self._rows[key, start, end].append((at, amount))
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
        return (*window, *_aggregates(self._rows[window]))


def _aggregates(rows: Sequence[tuple[int, int | None]]) -> tuple[Any, ...]:
    """Return the aggregates of (time, amount), in the order of arrival."""
    known = [amount for _, amount in sorted(rows, key=lambda row: row[0]) if amount is not None]
    even = [amount for amount in known if amount % 2 == 0]
    texts = list(map(str, known))
    return (
        *(sum(known), len(rows), min(known, default=None), max(known, default=None)),
        *(len(set(known)), len(set(even))),
        *(next(iter(known), None), next(reversed(even), None)),
        *(min(texts, default=None), max(texts, default=None)),
    )


@dataclass(eq=False)
class Session:
    """One of the sessions of a key, and whether a record came when it was due already."""

    start: int
    end: int
    amounts: list[tuple[int, int | None]]
    again: bool = False


class SessionModel:
    """Takes one record after the other, and keeps all of each session."""

    def __init__(self, gap: int, lateness: int) -> None:
        self._gap = gap
        self._lateness = lateness
        self._held: dict[str, list[Session]] = defaultdict(list)
        self.told = [NO_WATERMARK] * MAX_PARALLELISM
        self.late = 0

    def take(self, rows: Sequence[Row]) -> list[tuple[Any, ...]]:
        for key, at, amount in rows:
            told, held = self.told[key_group_of(key, MAX_PARALLELISM)], self._held[key]
            joined = [one for one in held if one.start <= at + self._gap and at <= one.end]
            start = min([at, *(one.start for one in joined)])
            end = max([at + self._gap, *(one.end for one in joined)])
            if end - 1 + self._lateness <= told:
                self.late += 1
                continue
            amounts = [*(row for one in joined for row in one.amounts), (at, amount)]
            again = at + self._gap - 1 <= told or any(one.again for one in joined)
            held[:] = [one for one in held if one not in joined]
            held.append(Session(start, end, amounts, again))
        made: list[tuple[Any, ...]] = []
        for key, held in self._held.items():
            told = self.told[key_group_of(key, MAX_PARALLELISM)]
            made += [self._row(key, one) for one in held if one.again and one.end - 1 <= told]
            for one in held:
                one.again = False
        return made

    def advance(self, groups: range, watermark: int) -> list[tuple[Any, ...]]:
        made: list[tuple[Any, ...]] = []
        for key, held in self._held.items():
            group = key_group_of(key, MAX_PARALLELISM)
            if group in groups:
                told = self.told[group]
                due = [one for one in held if told < one.end - 1 <= watermark]
                made += [self._row(key, one) for one in due]
                held[:] = [one for one in held if one.end - 1 + self._lateness > watermark]
        for group in groups:
            self.told[group] = max(self.told[group], watermark)
        return made

    @property
    def held(self) -> int:
        return sum(map(len, self._held.values()))

    def _row(self, key: str, one: Session) -> tuple[Any, ...]:
        return (key, one.start, one.end, *_aggregates(one.amounts))


class Running:
    """Operators side by side, and what they have emitted since it was asked for last."""

    def __init__(
        self,
        job: Job,
        windows: WindowAssigner,
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
        self.operators: list[WindowAggregator | SessionAggregator] = []
        sessions = isinstance(windows, EventTimeSessionWindows)
        aggregator = SessionAggregator if sessions else WindowAggregator
        self._made: list[pa.RecordBatch] = []
        for index in range(parallelism):
            groups = job.context(index, parallelism).key_groups
            store = job.open(handles, index=index, parallelism=parallelism, backend=backend)
            operator = aggregator("op", work, store, SCHEMA, schema, groups, told)
            operator.outputs.append(lambda batch: self._made.append(batch.rows))
            self.groups.append(groups)
            self.operators.append(operator)

    def take(self, rows: Sequence[Row]) -> list[tuple[Any, ...]]:
        for groups, operator in zip(self.groups, self.operators, strict=True):
            mine = [row for row in rows if key_group_of(row[0], MAX_PARALLELISM) in groups]
            columns = [list(column) for column in zip(*mine, strict=True)] or [[], [], []]
            columns.append([None if amount is None else str(amount) for amount in columns[2]])
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
            operator.on_completed(checkpoint)
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
    rng = draw_random()
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
    take_late(running, model, now)
    assert late + running.late == model.late
    for groups, operator in zip(running.groups, running.operators, strict=True):
        operator.on_watermark(MAX_WATERMARK)
        assert Counter(running.emitted()) == Counter(model.advance(groups, MAX_WATERMARK))
        # Windows stay for the allowed lateness, in case the job goes on, and come out once.
        operator.on_watermark(now + 1_000)
        assert not running.emitted()
    # What is over is gone.
    assert running.snapshot(savepoint=True)[0].keyed[0].size_bytes < 1_200


def take_late(running: Running, model: Model | SessionModel, now: int) -> None:
    """Have event time come to `now`, and take a record that is late, whatever was drawn before."""
    for groups, operator in zip(running.groups, running.operators, strict=True):
        operator.on_watermark(now)
        assert Counter(running.emitted()) == Counter(model.advance(groups, now))
    late, row = model.late, ("k1", now - 1_000, 1)
    assert running.take([row]) == model.take([row]) == []
    assert model.late == late + 1


@pytest.mark.parametrize(("gap", "lateness"), [(4, 0), (3, 9)])
def test_sessions_equal_those_of_one_record_after_the_other_through_snapshots_and_rescaling(
    job: Job, gap: int, lateness: int
) -> None:
    rng = draw_random()
    windows = EventTimeSessionWindows(gap / 1000)
    model = SessionModel(gap, lateness)
    running = Running(job, windows, lateness, 2)
    late, now = 0, 1_000
    # One key has several sessions at once, whatever is drawn.
    apart: list[Row] = [("k1", now + 20 * number, number) for number in range(9)]
    assert running.take(apart) == model.take(apart) == []
    assert model.held == 9
    for step in range(48):
        now += rng.choice([0, 1, 3, 25])
        rows: list[Row] = [
            (f"k{rng.randrange(8)}", now - rng.randrange(30), rng.choice([None, rng.randrange(9)]))
            for _ in range(rng.choice([0, 1, 6, 30]))
        ]
        assert Counter(running.take(rows)) == Counter(model.take(rows))
        assert late + running.late == model.late
        for groups, operator in zip(running.groups, running.operators, strict=True):
            if rng.random() < 0.7:
                watermark = now - rng.choice([8, 20])
                operator.on_watermark(watermark)
                assert Counter(running.emitted()) == Counter(model.advance(groups, watermark))
        if step % 12 == 11:
            snapshots = running.snapshot(savepoint=step == 23)
            late += running.late
            running = Running(job, windows, lateness, rng.choice([1, 2, 3]), snapshots)
    take_late(running, model, now)
    assert late + running.late == model.late
    for groups, operator in zip(running.groups, running.operators, strict=True):
        operator.on_watermark(MAX_WATERMARK)
        assert Counter(running.emitted()) == Counter(model.advance(groups, MAX_WATERMARK))
        # Windows stay for the allowed lateness, in case the job goes on, and come out once.
        operator.on_watermark(now + 1_000)
        assert not running.emitted()
    # What is over is gone.
    assert running.snapshot(savepoint=True)[0].keyed[0].size_bytes < 1_200


DAYS: list[PaneAssigner | EventTimeSessionWindows] = [
    TumblingEventTimeWindows("1 d", "3 h"),
    SlidingEventTimeWindows("1 d", "5 h"),
    EventTimeSessionWindows("1 d"),
]


@pytest.mark.parametrize("windows", DAYS, ids=str)
@pytest.mark.parametrize("at", [-(2**63), -(2**62) - 1, 2**62 + 1, 2**63 - 1])
def test_a_time_whose_windows_would_leave_64_bits_is_refused_and_not_lost(
    job: Job, windows: Any, at: int
) -> None:
    running = Running(job, windows, 0, 1)
    with pytest.raises(UserFunctionError, match="'at' is .* too far from 1970"):
        running.take([("a", at, 5)])


@pytest.mark.parametrize("windows", DAYS, ids=str)
@pytest.mark.parametrize("at", [-(2**62), -1, 2**62])
def test_windows_of_the_farthest_times_come_out_whole(job: Job, windows: Any, at: int) -> None:
    running = Running(job, windows, 0, 1)
    running.take([("a", at, 5), ("b", at, 6), ("a", at, 7)])
    restored = Running(job, windows, 0, 1, running.snapshot())
    made: list[pa.RecordBatch] = []
    restored.operators[0].outputs.append(lambda batch: made.append(batch.rows))
    restored.operators[0].on_watermark(MAX_WATERMARK)
    rows = pa.Table.from_batches(made)
    starts, ends = (rows[name].cast(pa.int64()).to_pylist() for name in WINDOW_COLUMNS)
    assert all(start <= at < end for start, end in zip(starts, ends, strict=True))
    totals = set(zip(rows["account"].to_pylist(), rows["total"].to_pylist(), strict=True))
    assert totals == {("a", 12), ("b", 6)}
    assert len(starts) == len(set(zip(rows["account"].to_pylist(), starts, strict=True)))


@pytest.mark.parametrize("target", SUITE_BACKENDS)
def test_a_savepoint_brings_windows_to_any_backend(job: Job, target: str) -> None:
    windows = SlidingEventTimeWindows(0.010, 0.005)
    running = Running(job, windows, 0, 2)
    running.take([("a", 1, 5), ("b", 7, 6), ("a", 12, 7)])
    for operator in running.operators:
        operator.on_watermark(4)
    assert running.emitted() == [("a", -5, 5, *_aggregates([(1, 5)]))]
    snapshots = running.snapshot(savepoint=True)
    moved = Running(job, windows, 0, 1, snapshots, BACKENDS[target])
    moved.operators[0].on_watermark(4)
    assert moved.emitted() == []
    assert moved.take([("a", -3, 9)]) == []
    assert moved.late == 1
    moved.operators[0].on_watermark(9)
    assert sorted(moved.emitted()) == [
        ("a", 0, 10, *_aggregates([(1, 5)])),
        ("b", 0, 10, *_aggregates([(7, 6)])),
    ]


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
    assert running.emitted() == [("a", 0, 10, *_aggregates([(1, 1)]))]
    assert running.take([("a", 9, 2), ("b", 25, 3)]) == []
    assert [row for batch in late for row in batch.to_pylist()] == [
        {"account": "a", "at": 9, "amount": 2, "text": "2"}
    ]
    assert running.late == 0


def test_sessions_of_intervals_at_any_times_equal_those_of_one_after_the_other() -> None:
    rng = draw_random()
    spans = [20, 2**33, 2**62]
    for span, keys in [(span, keys) for span in spans for keys in (1, 3, 2**20)] * 20:
        size = rng.choice([1, 2, 40])
        places = [rng.randrange(keys) for _ in range(size)]
        starts = [rng.randrange(-span, span) for _ in range(size)]
        ends = [start + rng.randrange(1, max(2, span // 10)) for start in starts]
        found = Sessions.of(np.array(places), np.array(starts), np.array(ends))
        expected: list[tuple[int, int, int]] = []
        for place, start, end in sorted(zip(places, starts, ends, strict=True)):
            if expected and expected[-1][0] == place and start <= expected[-1][2]:
                first = expected.pop()
                expected.append((place, first[1], max(first[2], end)))
            else:
                expected.append((place, start, end))
        assert found.key_numbers.tolist() == [place for place, _, _ in expected]
        assert found.ends.tolist() == [end for _, _, end in expected]
        ids: list[int] = found.ids.tolist()
        for index, session in enumerate(ids):
            place, start, end = expected[session]
            assert place == places[index]
            assert start <= starts[index] < ends[index] <= end


def test_late_records_of_sessions_go_aside_and_bad_ones_are_named(job: Job) -> None:
    tag = OutputTag("late", SCHEMA)
    running = Running(job, EventTimeSessionWindows(0.010), 0, 1, late=tag)
    late: list[pa.RecordBatch] = []
    (operator,) = running.operators
    operator.outlet(Feed("op", SCHEMA, tag.name)).append(lambda batch: late.append(batch.rows))
    running.take([("a", 5, 1), ("b", 12, 1)])
    operator.on_watermark(20)
    assert running.emitted() == [("a", 5, 15, *_aggregates([(5, 1)]))]
    # One is alone; one joins what is held; one would join a record that comes after it.
    assert running.take([("a", 6, 2), ("b", 3, 3), ("c", 9, 4), ("c", 15, 5)]) == []
    assert [row["amount"] for batch in late for row in batch.to_pylist()] == [2, 4]
    operator.on_watermark(30)
    assert sorted(running.emitted()) == [
        ("b", 3, 22, *_aggregates([(12, 1), (3, 3)])),
        ("c", 15, 25, *_aggregates([(15, 5)])),
    ]
    with pytest.raises(UserFunctionError, match=r"'op'.*'at' is null.*'account': 'b'"):
        running.take([("a", 41, 1), ("b", None, 1)])  # type: ignore[list-item]
    with pytest.raises(UserFunctionError, match=r"'total'.*leaves 64 bits at key 'b'"):
        running.take([("a", 41, 1), ("b", 42, 2**63 - 1), ("b", 43, 1)])
    with pytest.raises(
        UserFunctionError, match=r"'at' is 9223372036854775807 ms.*too far from 1970"
    ):
        running.take([("a", 2**63 - 1, 1)])
