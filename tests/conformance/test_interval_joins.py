"""Interval and regular joins over every backend, compared with a join of a few lines."""

from __future__ import annotations

import copy
import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from functools import partial
from operator import itemgetter
from typing import Any, cast

import pyarrow as pa
import pytest
from tests.conformance.state_job import MAX_PARALLELISM, Job
from tests.support.drawn_seeds import draw_random

from onceflow import (
    CoProcessFunction,
    IntervalJoin,
    MapStateDescriptor,
    OutputTag,
    ProcessJoinFunction,
    Record,
    StateAccess,
    ValueStateDescriptor,
)
from onceflow.core.api.joined_streams import mark_outer_sides, regular_join
from onceflow.core.errors import ConfigError, StateIncompatible, UserFunctionError
from onceflow.core.plan.graph import Feed
from onceflow.core.plan.join_functions import (
    STEP_MS,
    JoinKind,
    JoinSide,
    MergedColumns,
    TimedJoin,
)
from onceflow.core.plan.work import JoinConnected
from onceflow.core.protocol.checkpoints.snapshots import StateHandle
from onceflow.core.protocol.watermarks import MAX_WATERMARK, NO_WATERMARK
from onceflow.core.runtime.dataflow.channels import Batch
from onceflow.core.runtime.dataflow.join_operators import JoinOperator
from onceflow.core.runtime.dataflow.restored_event_time import EVENT_TIME, RestoredEventTime
from onceflow.core.state import key_group_of
from onceflow.core.state.api.context import StateClock
from onceflow.core.state.readers.state_columns import columns_of
from onceflow.core.state.snapshots.canonical import read_canonical
from onceflow.core.state.types.serializers import serializer_of

ORDERS = pa.schema([("account", pa.string()), ("at", pa.int64()), ("order", pa.int64())])
PAID = pa.schema([("account", pa.string()), ("at", pa.int64()), ("paid", pa.int64())])
SCHEMAS = (ORDERS, PAID)
KEYS = (("account",), ("account",))
LATE = tuple(OutputTag(f"late-{n}", schema) for n, schema in enumerate(SCHEMAS))
Row = tuple[str, int, int]


@dataclass(eq=False)
class Taken:
    """A record that was not late. Another one may have an equal row."""

    row: Row
    has_partner: bool = False


class Model:
    """Keeps every record that was not late, and whether it has found a partner."""

    def __init__(self, lower: int, upper: int, how: JoinKind = "inner") -> None:
        self._reach = (lower, upper), (-upper, -lower)
        self._outer = how in ("left", "full"), how in ("right", "full")
        self._taken: tuple[list[Taken], list[Taken]] = ([], [])
        self.now = NO_WATERMARK

    def take(self, side: int, row: Row) -> list[tuple[Row, Row]] | None:
        """Return the pairs of a row, in order; None when it is late."""
        if row[1] <= self.now:
            return None
        others = [
            other
            for other in self._taken[1 - side]
            if other.row[0] == row[0]
            and (self.joins(other.row, row) if side else self.joins(row, other.row))
        ]
        for other in others:
            other.has_partner = True
        self._taken[side].append(Taken(row, bool(others)))
        partners = sorted((other.row for other in others), key=itemgetter(1))
        return [(row, partner) if side == 0 else (partner, row) for partner in partners]

    def joins(self, left: Row, right: Row) -> bool:
        return self._reach[0][0] <= right[1] - left[1] and right[1] <= self.limit(0, left)

    def limit(self, side: int, row: Row) -> int:
        """Return the latest time of a partner."""
        return row[1] + self._reach[side][1]

    def alone(self, now: int) -> Counter[tuple[Any, ...]]:
        """Return what comes out without a partner when nothing can come for it since `now`."""
        found: Counter[tuple[Any, ...]] = Counter()
        for side, records in enumerate(self._taken):
            for taken in records if self._outer[side] else ():
                if self.limit(side, taken.row) <= now and not taken.has_partner:
                    account, *rest = taken.row
                    nulls = (None, None)
                    found[(account, *nulls, *rest) if side else (account, *rest, *nulls)] += 1
        return found


class Clock:
    """The time on the slots' clocks, in milliseconds."""

    now_ms = 10_000


class Running:
    """Operators side by side."""

    def __init__(
        self,
        job: Job,
        function: TimedJoin,
        *,
        schemas: tuple[pa.Schema, pa.Schema] = SCHEMAS,
        parallelism: int = 1,
        handles: Sequence[StateHandle] = (),
        event_time: Sequence[bytes] = (),
        clock: Clock | None = None,
    ) -> None:
        self._job = job
        self.event_time: list[bytes] = []
        """How far event time had come in the last snapshot."""
        self._clock = None if clock is None else StateClock(lambda: clock.now_ms / 1000)
        self._schemas = schemas
        self._made: list[Record] = []
        self.late: list[Row] = []
        self.operators: list[tuple[range, JoinOperator]] = []
        schema = function.output_schema()
        for index in range(parallelism):
            mine = copy.deepcopy(function)
            store = job.open(handles, index=index, parallelism=parallelism)
            states = job.without_keys(index, parallelism)
            work = JoinConnected(KEYS, mine)
            groups = job.context(index, parallelism).key_groups
            restored = RestoredEventTime(event_time, groups, MAX_PARALLELISM)
            operator = JoinOperator("op", work, store, states, schema, self._clock, restored)
            operator.outputs.append(lambda batch: self._made.extend(batch.rows.to_pylist()))
            for tag in LATE:
                if tag.name in operator.side_schemas:
                    outlet = operator.outlet(Feed("op", tag.schema, tag.name))
                    outlet.append(lambda batch: self.late.extend(_rows(batch.rows.to_pylist())))
            self.operators.append((groups, operator))

    def take(self, side: int, *rows: Sequence[Any]) -> list[Record]:
        """Return what comes out for the rows, which are one batch for each operator."""
        schema = self._schemas[side]
        for groups, operator in self.operators:
            mine = [row for row in rows if key_group_of(row[0], MAX_PARALLELISM) in groups]
            if mine:
                columns = zip(zip(*mine, strict=True), schema, strict=True)
                arrays = [pa.array(values, field.type) for values, field in columns]
                operator.inputs[side](Batch(pa.record_batch(arrays, schema=schema)))
        return self._emitted()

    def dealt(self, rows: Sequence[Row]) -> list[Row]:
        """Return rows in the order in which operators take them, one after the other."""
        groups = [key_group_of(row[0], MAX_PARALLELISM) for row in rows]
        dealt: list[Row] = []
        for mine, _ in self.operators:
            dealt += [row for row, group in zip(rows, groups, strict=True) if group in mine]
        return dealt

    def _emitted(self) -> list[Record]:
        made, self._made[:] = list(self._made), []
        return made

    def advance(self, now: int) -> list[Record]:
        for _, operator in self.operators:
            operator.on_watermark(now)
        return self._emitted()

    def on_time(self) -> list[Record]:
        for _, operator in self.operators:
            operator.on_time()
        return self._emitted()

    def end(self) -> list[Record]:
        for _, operator in self.operators:
            operator.flush()
        return self._emitted()

    def kept(self) -> int:
        """Return how many records are kept."""
        return sum(len(one.find_due(1 << 62)) for _, join in self.operators for one in join.kept)

    def snapshot(self) -> list[StateHandle]:
        handles: list[StateHandle] = []
        checkpoint = self._job.next_checkpoint()
        for _, operator in self.operators:
            done = operator.snapshot(checkpoint).upload(self._job.storage)
            handles += done.keyed
            self.event_time += done.lists.get(EVENT_TIME, ())
            operator.on_completed(checkpoint)
        return handles


def _rows(records: Iterable[Record]) -> list[Row]:
    return [cast("Row", tuple(record.values())) for record in records]


def sides_of(
    schemas: tuple[pa.Schema, pa.Schema],
    *,
    late: bool = True,
    how: JoinKind = "inner",
    time: str | None = "at",
) -> tuple[JoinSide, JoinSide]:
    tags = LATE if late else (None, None)
    left, right = (
        JoinSide("left", schemas[0], time, tags[0]),
        JoinSide("right", schemas[1], time, tags[1]),
    )
    return mark_outer_sides((left, right), how)


def joining(
    lower: int,
    upper: int,
    *,
    schemas: tuple[pa.Schema, pa.Schema] = SCHEMAS,
    late: bool = True,
    function: ProcessJoinFunction | None = None,
    how: JoinKind = "inner",
    time: str | None = "at",
    column: str | None = None,
) -> TimedJoin:
    sides = sides_of(schemas, late=late, how=how, time=time)
    outer = sides[0].outer, sides[1].outer
    merged = function or MergedColumns(*schemas, KEYS, ("_left", "_right"), outer)
    return TimedJoin(lower, upper, sides, merged, column)


def counted(pairs: Iterable[tuple[Row, Row]]) -> Counter[tuple[Any, ...]]:
    return Counter((*left, *right[1:]) for left, right in pairs)


def pairs_in(made: Iterable[Record]) -> list[tuple[Any, ...]]:
    return [row for record in made if None not in (row := tuple(record.values()))]


def without_pairs(made: Iterable[Record]) -> Counter[tuple[Any, ...]]:
    return Counter(tuple(record.values()) for record in made if None in record.values())


@pytest.mark.parametrize(
    ("lower", "upper", "how"),
    [(-700, 400, "inner"), (0, 0, "right"), (300, 2_500, "full"), (-2_500, -300, "left")],
    ids=str,
)
def test_interval_joins_equal_the_model_through_snapshots_and_rescaling(
    job: Job, lower: int, upper: int, how: JoinKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few keys and times, so that many records have one time and one key, on either side.

    A batch comes to what its records come to one by one, in their order.
    """
    monkeypatch.setattr("onceflow.core.state.states.kept_rows.ROWS_A_CHUNK", 16)
    monkeypatch.setattr("onceflow.core.state.states.kept_rows.FILTER_WORDS_MIN", 2)
    rng = draw_random()
    join, model = joining(lower, upper, how=how), Model(lower, upper, how)
    running = Running(job, join)
    now, late, alone = 10_000, list[Row](), Counter[tuple[Any, ...]]()
    for step in range(64):
        now += rng.choice([0, 100, 200, 400])
        side, count = rng.randrange(2), rng.choice([1, 1, 4, 25])
        rows = [
            (f"k{rng.randrange(4)}", now - 100 * rng.randrange(12), 100 * step + number)
            for number in range(count)
        ]
        expected: list[tuple[Row, Row]] = []
        dealt = running.dealt(rows)
        for row in dealt:
            pairs = model.take(side, row)
            late += [row] if pairs is None else []
            expected += pairs or []
        made = running.take(side, *dealt)
        alone += without_pairs(made)
        assert pairs_in(made) == [(*left, *right[1:]) for left, right in expected]
        assert running.late == late
        if rng.random() < 0.3:
            model.now = max(model.now, now - 100 * rng.randrange(6, 10))
            alone += without_pairs(running.advance(model.now))
            # Records are let go at moments a second apart.
            assert model.alone(model.now - STEP_MS) <= alone <= model.alone(model.now)
        if step % 16 == 15:
            before, handles, parallelism = running, running.snapshot(), rng.choice([1, 2, 3])
            running = Running(
                job, join, parallelism=parallelism, handles=handles, event_time=before.event_time
            )
            running.late += before.late
    # Whatever was drawn: records that are late, and others that have no partner.
    model.now = max(model.now, now - 900)
    alone += without_pairs(running.advance(model.now))
    for side in (0, 1):
        late.append((f"only {side}", model.now, 0))
        lonely = (f"only {side}", now + 1, 0)
        assert (model.take(side, late[-1]), model.take(side, lonely)) == (None, [])
        assert running.take(side, late[-1], lonely) == []
    assert running.late == late
    assert running.kept() > 0
    alone += without_pairs(running.advance(MAX_WATERMARK))
    assert alone == model.alone(MAX_WATERMARK)
    assert (len(alone) > 0) == (how != "inner")
    # A job that goes on after its end may bring partners of what was not to come out alone.
    if how in ("inner", "full"):
        assert (running.kept() > 0) == (how == "inner")


@pytest.mark.parametrize("how", ["inner", "full"])
def test_regular_joins_equal_the_model_through_snapshots_and_rescaling(
    job: Job, how: JoinKind
) -> None:
    """Left records live for 2 s and right ones for 0.7 s; the clock is the time of each."""
    rng = draw_random()
    clock = Clock()
    lower, upper = -699, 1_999
    function, model = (
        joining(lower, upper, how=how, late=False, time=None),
        Model(lower, upper, how),
    )
    running, alone = Running(job, function, clock=clock), Counter[tuple[Any, ...]]()
    names = [f"k{number}" for number in range(6)]
    for step in range(60):
        clock.now_ms += rng.choice([0, 0, 100, 200, 400])
        if rng.random() < 0.4:
            alone += without_pairs(running.on_time())
            assert model.alone(clock.now_ms - STEP_MS) <= alone <= model.alone(clock.now_ms)
        side, count = rng.randrange(2), rng.choice([1, 1, 3, 9])
        dealt = running.dealt(
            [(rng.choice(names), clock.now_ms, 100 * step + number) for number in range(count)]
        )
        expected = [pair for row in dealt for pair in model.take(side, row) or []]
        made = running.take(side, *dealt)
        assert pairs_in(made) == [(*left, *right[1:]) for left, right in expected]
        alone += without_pairs(made)
        if step % 20 == 19:
            parallelism = rng.choice([1, 2, 3])
            handles = running.snapshot()
            running = Running(job, function, parallelism=parallelism, handles=handles, clock=clock)
    lonely = ("lonely", clock.now_ms, 0)
    assert (model.take(0, lonely), running.take(0, lonely)) == ([], [])
    assert running.advance(MAX_WATERMARK) == []
    alone += without_pairs(running.end())
    assert alone == model.alone(MAX_WATERMARK)
    assert (len(alone) > 0) == (how != "inner")
    # A job that goes on after its end may bring partners of what was not to come out alone.
    if how in ("inner", "full"):
        assert (running.kept() > 0) == (how == "inner")


@pytest.mark.parametrize("how", ["inner", "left"])
def test_a_side_without_a_time_to_live_is_kept_for_ever_and_comes_out_alone_at_the_end(
    job: Job, how: JoinKind
) -> None:
    clock = Clock()
    functions: list[CoProcessFunction | TimedJoin] = []

    def take(function: CoProcessFunction | TimedJoin, *, uid: str) -> None:
        functions.append(function)

    sides = sides_of(SCHEMAS, late=False, how=how, time=None)
    regular_join(take, sides, KEYS, (None, "1 s")).merge(uid="pairs")
    (function,) = functions
    assert isinstance(function, TimedJoin)
    running = Running(job, function, clock=clock)
    assert running.take(0, ("a", 0, 1)) == []
    assert running.take(0, ("b", 0, 2)) == []
    clock.now_ms += 1_000_000_000_000
    assert running.on_time() == []
    assert len(running.take(1, ("a", 0, 3))) == 1
    clock.now_ms += 1_000
    assert running.take(0, ("a", 0, 4)) == []
    clock.now_ms += 1_000
    assert running.on_time() == []
    assert running.kept() == 3
    alone = {row["order"]: row["paid"] for row in running.end()}
    assert alone == ({} if how == "inner" else {2: None, 4: None})


def test_bounds_are_inclusive_unless_told_otherwise(job: Job) -> None:
    found: dict[tuple[bool, bool], list[int]] = {}
    for ends in [(True, True), (False, True), (True, False), (False, False)]:
        functions: list[CoProcessFunction | TimedJoin] = []

        def take(
            function: CoProcessFunction | TimedJoin,
            *,
            uid: str,
            to: list[CoProcessFunction | TimedJoin],
        ) -> None:
            to.append(function)

        join = IntervalJoin(partial(take, to=functions), sides_of(SCHEMAS), KEYS)
        lower_inclusive, upper_inclusive = ends
        join.between(
            "-2 ms", 0.003, lower_inclusive=lower_inclusive, upper_inclusive=upper_inclusive
        ).merge(uid="pairs")
        (function,) = functions
        assert isinstance(function, TimedJoin)
        running = Running(job, function)
        for number in range(10):
            assert running.take(1, ("a", 10_000 + number, number)) == []
        found[ends] = [made["paid"] for made in running.take(0, ("a", 10_005, 0))]
    assert found == {
        (True, True): [3, 4, 5, 6, 7, 8],
        (False, True): [4, 5, 6, 7, 8],
        (True, False): [3, 4, 5, 6, 7],
        (False, False): [4, 5, 6, 7],
    }


def test_a_record_is_let_go_when_nothing_can_come_for_it_any_more(job: Job) -> None:
    """Timers are a second apart, so it may be kept for a second more."""
    running = Running(job, joining(-500, 2_000))
    running.take(0, ("a", 10_000, 1))
    running.take(1, ("a", 10_000, 1))
    running.advance(11_000)
    assert running.kept() == 1
    assert len(running.take(1, ("a", 12_000, 2))) == 1
    running.advance(12_000)
    assert running.kept() == 1
    running.advance(13_000)
    assert running.kept() == 0


def test_records_that_are_let_go_a_minute_apart_do_not_take_each_other_along(job: Job) -> None:
    """64 moments apart they share a bit of the filter that says which keys have any."""
    running = Running(job, joining(0, 1_000))
    for second in (10, 10 + 64):
        running.take(0, ("a", 1_000 * second, second))
    running.advance(12_000)
    assert running.kept() == 1
    assert len(running.take(1, ("a", 74_500, 1))) == 1


def test_a_record_that_all_its_partners_are_late_for_is_not_kept(job: Job) -> None:
    running = Running(job, joining(-2_000, -1_000))
    running.advance(10_000)
    assert running.take(0, ("a", 10_500, 1)) == []
    assert running.kept() == 0


def test_late_records_without_a_side_output_are_counted_and_told(
    job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    running = Running(job, joining(-1_000, 1_000, late=False))
    running.take(0, ("a", 11_000, 1))
    running.advance(10_000)
    with caplog.at_level(logging.WARNING, "onceflow.runtime"):
        assert running.take(1, ("a", 10_000, 2)) == []
    assert len(running.take(1, ("a", 10_001, 3))) == 1
    assert running.operators[0][1].rejected == 1
    assert "the right side of an interval join has dropped late records, 1 so far" in caplog.text


class Numbered(ProcessJoinFunction):
    """Numbers the pairs of a key, and passes on those of even orders, twice."""

    def output_schema(self, left: pa.Schema, right: pa.Schema) -> pa.Schema:
        return pa.schema([("order", pa.int64()), ("paid", pa.int64()), ("n", pa.int64())])

    def open(self, state: StateAccess) -> None:
        self._count = state.value_state(ValueStateDescriptor("count", int, default=0))

    def process(self, left: Record, right: Record) -> list[Record] | None:
        self._count.set(self._count.get() + 1)
        if left["order"] % 2:
            return None
        made = {"order": left["order"], "paid": right["paid"], "n": self._count.get()}
        return [made, made]


class Timed(Numbered):
    def open(self, state: StateAccess) -> None:
        state.timers()


def test_a_function_of_pairs_has_no_timers(job: Job) -> None:
    with pytest.raises(ConfigError, match="Timed of join 'op' uses timers"):
        Running(job, joining(0, 1, function=Timed()))


def test_a_function_of_pairs_has_the_state_of_their_key_and_makes_any_number_of_records(
    job: Job,
) -> None:
    running = Running(job, joining(-1_000, 1_000, function=Numbered()))
    for order in range(4):
        assert running.take(0, ("a", 10_000 + order, order)) == []
    made = running.take(1, ("a", 10_000, 7))
    # Of several partners the earlier ones come first.
    pairs = [{"order": 0, "paid": 7, "n": 1}, {"order": 2, "paid": 7, "n": 3}]
    assert made == [pair for pair in pairs for _ in range(2)]


RICH = pa.schema(
    [
        pa.field("account", pa.string()),
        pa.field("at", pa.timestamp("us", "UTC")),
        pa.field("price", pa.decimal128(12, 2)),
        pa.field("day", pa.date32()),
        pa.field("local", pa.timestamp("ms")),
        pa.field("clock", pa.time64("us")),
        pa.field("took", pa.duration("us")),
        pa.field("raw", pa.binary()),
        pa.field("tags", pa.list_(pa.string())),
        pa.field("place", pa.struct([("city", pa.string()), ("fee", pa.decimal128(9, 1))])),
        pa.field("kind", pa.dictionary(pa.int32(), pa.string())),
        pa.field("rate", pa.float64()),
        pa.field("nothing", pa.date32()),
        pa.field("marks", pa.map_(pa.string(), pa.int64())),
        pa.field("big", pa.uint64()),
    ]
)


def test_kept_records_come_back_with_the_types_of_their_columns(job: Job) -> None:
    at = datetime(2024, 2, 29, 12, 30, 1, 250_001, timezone.utc)
    left = (
        *("a", at, Decimal("12.50"), date(2024, 2, 29), datetime(2024, 2, 29, 1, 2, 3, 4_000)),
        *(time(23, 59, 1, 7), timedelta(days=1, microseconds=5), b"\x00\xff", ["x", None]),
        *(
            {"city": "Kyiv", "fee": Decimal("1.5")},
            "card",
            float("inf"),
            None,
            [("x", 1)],
            2**64 - 1,
        ),
    )
    schemas = (RICH, PAID)
    function = joining(0, 1_000, schemas=schemas, late=False)
    first = Running(job, function, schemas=schemas)
    assert first.take(0, left) == []
    again = Running(job, function, schemas=schemas, handles=first.snapshot())
    at_ms = round(at.timestamp() * 1000)
    (made,) = again.take(1, ("a", at_ms + 900, 5))
    expected = dict(zip(RICH.names, left, strict=True))
    expected["at_left"] = expected.pop("at")
    assert made == {**expected, "at_right": at_ms + 900, "paid": 5}


def test_kept_records_are_read_from_savepoints_as_rows(job: Job) -> None:
    named = (pa.schema([*ORDERS, ("note", pa.string()), ("a(b)=c", pa.decimal128(9, 2))]), PAID)
    join = joining(0, 1_000, schemas=named, late=False, how="left")
    running = Running(job, join, schemas=named)
    running.take(0, ("a", 10_001, 1, "é", Decimal("1.50")), ("a", 10_002, 2, None, None))
    running.take(1, ("a", 10_001, 3))
    ((_, operator),) = running.operators
    handles = operator.savepoint(job.next_checkpoint()).upload(job.storage).keyed
    found = [
        row
        for meta, rows in read_canonical(job.storage, handles, job.context())
        if meta.name == "onceflow.left-rows"
        for row in columns_of(meta, None, "typed").batch(rows).to_pylist()
    ]
    first, second = sorted((row["value"] for row in found), key=itemgetter("order"))
    assert {row["key"]["_2"] for row in found} == {"a"}
    assert [one["onceflow.time"] for one in (first, second)] == [10_001, 10_002]
    assert [one["onceflow.count"] for one in (first, second)] == [2, None]
    assert [one["onceflow.alone"] for one in (first, second)] == [False, True]
    assert [one["note"] for one in (first, second)] == ["é", None]
    (price,) = (name for name in first if name.startswith("a%28b%29%3Dc: decimal128"))
    assert serializer_of(Decimal).decode(first[price]) == Decimal("1.50")


def test_a_column_may_be_new_and_its_type_may_not_change(job: Job) -> None:
    first = Running(job, joining(0, 1_000, late=False))
    first.take(0, ("a", 10_000, 1))
    handles = first.snapshot()
    wider = (ORDERS.append(pa.field("note", pa.string())), PAID)
    again = Running(
        job, joining(0, 1_000, schemas=wider, late=False), schemas=wider, handles=handles
    )
    (made,) = again.take(1, ("a", 10_000, 2))
    assert (made["order"], made["note"]) == (1, None)
    other = (ORDERS.set(2, pa.field("order", pa.string())), PAID)
    with pytest.raises(StateIncompatible, match=r"'onceflow\.left-rows'.*aggregate 'order'"):
        Running(job, joining(0, 1_000, schemas=other, late=False), schemas=other, handles=handles)


@pytest.mark.parametrize(
    ("how", "becomes", "side"),
    [("left", "inner", "left"), ("full", "left", "right"), ("right", "inner", "right")],
)
def test_a_side_of_a_join_ceases_to_be_outer_only_if_that_is_allowed_and_keeps_its_records(
    job: Job, monkeypatch: pytest.MonkeyPatch, how: JoinKind, becomes: JoinKind, side: str
) -> None:
    first = Running(job, joining(0, 1_000, how=how))
    first.take(0, ("a", 10_000, 1))
    handles = first.snapshot()
    with pytest.raises(StateIncompatible, match=f"the {side} side of join .* was outer") as refused:
        Running(job, joining(0, 1_000, how=becomes), handles=handles)
    assert "onceflow." not in str(refused.value)
    monkeypatch.setattr(job, "open", partial(job.open, allow_non_restored_state=True))
    again = Running(job, joining(0, 1_000, how=becomes), handles=handles)
    (made,) = again.take(1, ("a", 10_500, 2))
    assert (made["order"], made["paid"]) == (1, 2)


def test_state_of_joins_that_took_one_record_at_a_time_is_refused_by_name(job: Job) -> None:
    store = job.open()
    store.map_state(MapStateDescriptor[int, int]("onceflow.left-records", int, int))
    with pytest.raises(StateIncompatible, match=r"onceflow\.left-records.*does not use it"):
        Running(job, joining(0, 1_000), handles=job.snapshot(store))


def test_columns_that_cannot_be_kept_are_named_before_the_start() -> None:
    schema = ORDERS.append(pa.field("seen", pa.list_(pa.timestamp("ns"))))
    with pytest.raises(ConfigError, match=r"the left side.*'seen'.*no nanoseconds"):
        JoinSide("left", schema, "at", None)


def test_a_time_that_is_thousands_of_years_away_is_named(job: Job) -> None:
    running = Running(job, joining(0, 1))
    for far in (1 << 62, -(1 << 50)):
        with pytest.raises(UserFunctionError, match=rf"'at' is {far} ms since 1970.*'order': 7"):
            running.take(0, ("a", 10_000, 6), ("a", far, 7))


def test_a_record_without_event_time_is_named(job: Job) -> None:
    running = Running(job, joining(0, 1))
    with pytest.raises(UserFunctionError, match=r"'at' is null.*is joined with nothing"):
        running.take(0, ("a", None, 1))
