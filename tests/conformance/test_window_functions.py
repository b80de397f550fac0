"""Windows of one record at a time, sessions and those of two streams among them, and a model."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import date, datetime
from decimal import Decimal
from functools import partial
from typing import Any, cast

import pyarrow as pa
import pytest
from tests.conformance.state_job import MAX_PARALLELISM, Job
from tests.support.drawn_seeds import draw_random

from onceflow import (
    AggregateFunction,
    CoGroupFunction,
    EventTimeSessionWindows,
    OutputTag,
    ProcessWindowFunction,
    Record,
    SlidingEventTimeWindows,
    StateAccess,
    TimeWindow,
    TumblingEventTimeWindows,
    TumblingProcessingTimeWindows,
    ValueStateDescriptor,
    count,
    max_,
    min_,
    sum_,
)
from onceflow.core.errors import StateIncompatible, UserFunctionError
from onceflow.core.plan import window_functions
from onceflow.core.plan.graph import Feed
from onceflow.core.plan.join_functions import MergedColumns, WindowPairs
from onceflow.core.plan.window_functions import KeptRecords, WindowInput
from onceflow.core.plan.windows import WindowAssigner, window_schema
from onceflow.core.plan.work import AggregateWindows, ProcessConnected, ProcessKeyed
from onceflow.core.protocol.checkpoints.snapshots import StateHandle
from onceflow.core.protocol.watermarks import MAX_WATERMARK, NO_WATERMARK
from onceflow.core.runtime.dataflow.channels import Batch
from onceflow.core.runtime.dataflow.function_operators import (
    KeyedProcessor,
    SnapshottedOperator,
)
from onceflow.core.runtime.dataflow.restored_event_time import EVENT_TIME, RestoredEventTime
from onceflow.core.runtime.dataflow.session_operators import SessionAggregator
from onceflow.core.runtime.dataflow.window_joins import connect_streams
from onceflow.core.state import key_group_of
from onceflow.core.state.api.context import StateClock
from onceflow.core.state.states import keyed_states

SCHEMA = pa.schema([("account", pa.string()), ("at", pa.int64()), ("amount", pa.int64())])
AGGREGATES = {"total": sum_("amount"), "n": count(), "low": min_("amount"), "high": max_("amount")}
RESULTS = {name: one.result_type(SCHEMA) for name, one in AGGREGATES.items()}
OUT = window_schema(SCHEMA, ["account"], "at", RESULTS)
Row = tuple[str, int, int | None]


class Several(ProcessWindowFunction):
    """The aggregates, from all records, and how many windows of the key there were before."""

    def output_schema(self, input_schema: pa.Schema) -> pa.Schema:
        return OUT

    def open(self, state: StateAccess) -> None:
        self._windows = state.value_state(ValueStateDescriptor("seen", int, default=0))

    def process(self, key: Any, window: TimeWindow, records: list[Record]) -> Iterable[Record]:
        self._windows.set(self._windows.get() + 1)
        amounts = [record["amount"] for record in records]
        yield _record(key, window.start_ms, window.end_ms, amounts)


def side_of(amount: int | None) -> int:
    """Return which of two streams a record belongs to."""
    return (amount or 0) % 2


class OfBoth(CoGroupFunction):
    """The same of two streams."""

    def output_schema(self, left: pa.Schema, right: pa.Schema) -> pa.Schema:
        return OUT

    def process(
        self, key: Any, window: TimeWindow, left: list[Record], right: list[Record]
    ) -> Record:
        for side, records in enumerate((left, right)):
            assert all(side_of(record["amount"]) == side for record in records)
        amounts = [record["amount"] for record in left + right]
        return _record(key, window.start_ms, window.end_ms, amounts)


def _record(key: str, start: int, end: int, amounts: Sequence[int | None]) -> Record:
    known = [amount for amount in amounts if amount is not None]
    low, high = min(known, default=None), max(known, default=None)
    values = (key, start, end, sum(known), len(amounts), low, high)
    return dict(zip(OUT.names, values, strict=True))


class SeveralAggregates(AggregateFunction[Record, list[int | None], Record]):
    """The aggregates, by an accumulator of what they are."""

    def create_accumulator(self) -> list[int | None]:
        return [0, 0, None, None]

    def add(self, value: Record, accumulator: list[int | None]) -> list[int | None]:
        amount = value["amount"]
        return self.merge(accumulator, [amount or 0, 1, amount, amount])

    def merge(self, one: list[int | None], other: list[int | None]) -> list[int | None]:
        (total, n, low, high), (more, rows, lowest, highest) = one, other
        lows = [value for value in (low, lowest) if value is not None]
        highs = [value for value in (high, highest) if value is not None]
        sums = [(total or 0) + (more or 0), (n or 0) + (rows or 0)]
        return [*sums, min(lows, default=None), max(highs, default=None)]

    def get_result(self, accumulator: list[int | None]) -> Record:
        return dict(zip(AGGREGATES, accumulator, strict=True))


class Model:
    """Keeps every window with its amounts."""

    def __init__(self, windows: WindowAssigner, lateness: int) -> None:
        self._windows = windows
        self._lateness = lateness
        self._held: dict[str, list[tuple[int, int, list[int | None]]]] = {}
        self.late: list[Row] = []
        self.now = NO_WATERMARK

    def take(self, row: Row) -> list[Record]:
        key, at, amount = row
        held = self._held.setdefault(key, [])
        mine = self._session(held, at) if self._sessions else self._fixed(held, at)
        if not mine:
            self.late.append(row)
        for _, _, amounts in mine:
            amounts.append(amount)
        return [_record(key, *window) for window in mine if window[1] - 1 <= self.now]

    def advance(self, now: int) -> list[Record]:
        made: list[Record] = []
        for key, held in self._held.items():
            made += [_record(key, *one) for one in held if self.now < one[1] - 1 <= now]
            held[:] = [one for one in held if one[1] - 1 + self._lateness > now]
        self.now = now
        return made

    @property
    def _sessions(self) -> bool:
        return isinstance(self._windows, EventTimeSessionWindows)

    def _session(self, held: list[Any], at: int) -> list[Any]:
        assert isinstance(self._windows, EventTimeSessionWindows)
        start, end = at, at + self._windows.gap_ms
        joined = [one for one in held if one[0] <= end and start <= one[1]]
        start = min([start, *(one[0] for one in joined)])
        end = max([end, *(one[1] for one in joined)])
        if end - 1 + self._lateness <= self.now:
            return []
        session = (start, end, [amount for one in joined for amount in one[2]])
        held[:] = [one for one in held if one not in joined] + [session]
        return [session]

    def _fixed(self, held: list[Any], at: int) -> list[Any]:
        assert not isinstance(self._windows, EventTimeSessionWindows)
        size = round(float(self._windows.size) * 1000)
        slide = size
        if isinstance(self._windows, SlidingEventTimeWindows):
            slide = round(float(self._windows.slide) * 1000)
        mine: list[Any] = []
        for start in range(at - at % slide, at - size, -slide):
            if start + size - 1 + self._lateness > self.now:
                known = [one for one in held if one[0] == start]
                window: Any = known[0] if known else (start, start + size, [])
                held += [] if known else [window]
                mine.append(window)
        return mine


class Running:
    """Operators side by side."""

    def __init__(
        self,
        job: Job,
        windows: WindowAssigner,
        lateness: int,
        content: window_functions.WindowContent,
        parallelism: int = 1,
        handles: Sequence[StateHandle] = (),
        event_time: Sequence[bytes] = (),
    ) -> None:
        self._job = job
        self.event_time: list[bytes] = []
        """How far event time had come in the last snapshot."""
        self._made: list[pa.RecordBatch] = []
        self.late: list[Row] = []
        self.operators: list[tuple[range, SnapshottedOperator]] = []
        for index in range(parallelism):
            # Each slot has an instance of its own.
            mine = copy.deepcopy(content)
            store = job.open(handles, index=index, parallelism=parallelism)
            states = job.without_keys(index, parallelism)
            groups = job.context(index, parallelism).key_groups
            restored = RestoredEventTime(event_time, groups, MAX_PARALLELISM)
            operator: SnapshottedOperator
            if content is CONTENTS["records of two streams"]:
                of_both = cast("KeptRecords[CoGroupFunction]", mine)
                both = window_functions.CoWindowedFunction(windows, lateness, of_both, *INPUTS)
                connected = ProcessConnected((INPUTS[0].key, INPUTS[1].key), both)
                operator = connect_streams("op", connected, store, states, OUT, restored)
            else:
                one = window_functions.WindowedFunction(windows, lateness, mine, INPUTS[0])
                keyed = ProcessKeyed(INPUTS[0].key, one)
                schema = content.output_schema(SCHEMA)
                operator = KeyedProcessor("op", keyed, store, states, schema, restored)
            operator.outputs.append(lambda batch: self._made.append(batch.rows))
            for side in range(len(operator.inputs)):
                outlet = operator.outlet(Feed("op", SCHEMA, LATE[side].name))
                outlet.append(partial(self._take_late, len(operator.inputs) > 1, side))
            self.operators.append((groups, operator))

    def take(self, row: Row) -> list[Record]:
        batch = pa.record_batch([pa.array([v], f.type) for v, f in zip(row, SCHEMA, strict=True)],
                                schema=SCHEMA)  # fmt: skip
        group = key_group_of(row[0], MAX_PARALLELISM)
        (operator,) = [operator for groups, operator in self.operators if group in groups]
        operator.inputs[side_of(row[2]) % len(operator.inputs)](Batch(batch))
        return self.emitted()

    def _take_late(self, of_two: bool, side: int, batch: Batch) -> None:
        for row in batch.rows.to_pylist():
            assert not of_two or side == side_of(row["amount"])
            self.late.append(cast("Row", tuple(row.values())))

    def advance(self, now: int) -> list[Record]:
        for _, operator in self.operators:
            operator.on_watermark(now)
        return self.emitted()

    def emitted(self) -> list[Record]:
        rows = [row for batch in self._made for row in batch.to_pylist()]
        self._made.clear()
        for row in rows:
            for name in ("window_start", "window_end"):
                row[name] = round(row[name].timestamp() * 1000)
        return rows

    def snapshot(self) -> list[StateHandle]:
        handles: list[StateHandle] = []
        checkpoint = self._job.next_checkpoint()
        for _, operator in self.operators:
            done = operator.snapshot(checkpoint).upload(self._job.storage)
            handles += done.keyed
            self.event_time += done.lists[EVENT_TIME]
            operator.on_completed(checkpoint)
        return handles


def counted(records: Iterable[Record]) -> Counter[tuple[Any, ...]]:
    return Counter(tuple(record.values()) for record in records)


LATE = tuple(OutputTag(f"late-{side}", SCHEMA) for side in range(2))
INPUTS = tuple(window_functions.WindowInput(("account",), "at", tag) for tag in LATE)
CONTENTS: dict[str, window_functions.WindowContent] = {
    "records of two streams": KeptRecords(OfBoth(), SCHEMA, SCHEMA),
    "records": KeptRecords(Several(), SCHEMA),
    "accumulators": window_functions.KeptAccumulators(SeveralAggregates(), ["account"], OUT),
}
KINDS: list[tuple[WindowAssigner, int]] = [
    (TumblingEventTimeWindows(0.010), 6),
    (SlidingEventTimeWindows(0.012, 0.004), 0),
    (EventTimeSessionWindows(0.004), 0),
    (EventTimeSessionWindows(0.003), 9),
]


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize(("windows", "lateness"), KINDS, ids=str)
def test_windows_of_records_equal_the_model_through_snapshots_and_rescaling(
    job: Job, windows: WindowAssigner, lateness: int, content: str
) -> None:
    rng = draw_random()
    model = Model(windows, lateness)
    running = Running(job, windows, lateness, CONTENTS[content])
    now = 1_000
    for step in range(60):
        now += rng.choice([0, 1, 2, 9])
        row = (f"k{rng.randrange(4)}", now - rng.randrange(15), rng.choice([None, step]))
        assert counted(running.take(row)) == counted(model.take(row))
        if rng.random() < 0.3:
            assert counted(running.advance(now - 5)) == counted(model.advance(now - 5))
        if step % 30 == 29:
            handles = running.snapshot()
            parallelism, late = rng.choice([1, 2]), running.late
            running = Running(
                job, windows, lateness, CONTENTS[content], parallelism, handles, running.event_time
            )
            running.late += late
    assert counted(running.advance(MAX_WATERMARK)) == counted(model.advance(MAX_WATERMARK))
    assert running.late == model.late


@pytest.mark.parametrize("content", CONTENTS)
def test_a_record_within_the_lateness_comes_out_at_once_after_a_restore_at_any_parallelism(
    job: Job, content: str
) -> None:
    windows = TumblingEventTimeWindows(0.010)
    keys = [f"k{number}" for number in range(8)]
    ahead = Running(job, windows, 20, CONTENTS[content], 2)
    for key in keys:
        ahead.take((key, 3, 2))
    # Of two subtasks only one has heard that event time has come to 15.
    groups, first = ahead.operators[0]
    first.on_watermark(15)
    fired = [key for key in keys if key_group_of(key, MAX_PARALLELISM) in groups]
    assert 0 < len(fired) < len(keys)
    assert {record["account"] for record in ahead.emitted()} == set(fired)
    handles = ahead.snapshot()
    again = Running(job, windows, 20, CONTENTS[content], 1, handles, ahead.event_time)
    for key in keys:
        made = [(record["account"], record["n"]) for record in again.take((key, 4, 4))]
        assert made == ([(key, 2)] if key in fired else [])
    made = [(record["account"], record["n"]) for record in again.advance(15)]
    assert sorted(made) == [(key, 2) for key in keys if key not in fired]
    # What was over stays over: it is late, and begins no window anew.
    again.advance(29)
    last = Running(job, windows, 20, CONTENTS[content], 3, again.snapshot(), again.event_time)
    assert [last.take((key, 5, 2)) for key in keys] == [[]] * len(keys)
    assert last.late == [(key, 5, 2) for key in keys]


def test_a_session_that_grows_by_the_lateness_comes_out_at_its_new_end(job: Job) -> None:
    running = Running(job, EventTimeSessionWindows(0.010), 5, CONTENTS["records"])
    running.take(("a", 0, 2))
    # The old end and the lateness are together the new end.
    running.take(("a", 5, 2))
    made = running.advance(14)
    assert [(record["window_start"], record["window_end"], record["n"]) for record in made] == [
        (0, 15, 2)
    ]


@pytest.mark.parametrize("how", [(False, False), (True, False), (False, True), (True, True)])
def test_a_window_join_has_all_pairs_of_a_window_or_those_alone_where_it_is_outer(
    how: tuple[bool, bool],
) -> None:
    keys = (("account",), ("account",))
    join = WindowPairs(how, MergedColumns(SCHEMA, SCHEMA, keys, ("_left", "_right"), how))
    left = [_row("a", 1, 10), _row("a", 2, 20)]
    right = [_row("a", 3, 30)]

    def amounts(*sides: list[Record]) -> list[tuple[str, int | None, int | None]]:
        made = join.process("a", TimeWindow(0, 10), *sides)
        return [(row["account"], row["amount_left"], row["amount_right"]) for row in made]

    assert amounts(left, right) == [("a", 10, 30), ("a", 20, 30)]
    assert amounts(left, []) == ([("a", 10, None), ("a", 20, None)] if how[0] else [])
    assert amounts([], right) == ([("a", None, 30)] if how[1] else [])


def _row(*values: Any) -> Record:
    return dict(zip(SCHEMA.names, values, strict=True))


class Seen(ProcessWindowFunction):
    """Notes the records that it is given."""

    def __init__(self, records: list[Record]) -> None:
        self._records = records

    def output_schema(self, input_schema: pa.Schema) -> pa.Schema:
        return input_schema

    def process(self, key: Any, window: TimeWindow, records: list[Record]) -> Iterable[Record]:
        self._records += records
        return []


RICH = pa.schema(
    [
        pa.field("account", pa.string()),
        pa.field("at", pa.int64()),
        pa.field("price", pa.decimal128(12, 2)),
        pa.field("day", pa.date32()),
        pa.field("local", pa.timestamp("ms")),
        pa.field("place", pa.struct([("city", pa.string()), ("fee", pa.decimal128(9, 1))])),
    ]
)


def test_a_record_in_the_last_millisecond_by_the_clock_is_in_its_window(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 10.0
    monkeypatch.setattr(keyed_states, "StateClock", lambda: StateClock(lambda: now_s))
    clocked = WindowInput(INPUTS[0].key, None)
    function = window_functions.WindowedFunction(
        TumblingProcessingTimeWindows(1.0), 0, KeptRecords(Several(), SCHEMA), clocked
    )
    work = ProcessKeyed(clocked.key, function)
    operator = KeyedProcessor("op", work, job.open(()), job.without_keys(0, 1), OUT)
    made: list[Record] = []
    operator.outputs.append(lambda batch: made.extend(batch.rows.to_pylist()))

    def take(amount: int) -> None:
        record = {"account": "a", "at": None, "amount": amount}
        operator.receive(Batch(pa.RecordBatch.from_pylist([record], schema=SCHEMA)))

    take(5)
    now_s = 10.999
    operator.on_time()
    take(6)
    assert made == []
    now_s = 11.0
    assert operator.due_in_s == 0
    operator.on_time()
    assert [(row["window_start"].timestamp(), row["n"], row["total"]) for row in made] == [
        (10.0, 2, 11)
    ]
    assert operator.rejected == 0


def test_records_of_a_window_come_back_with_the_types_of_their_columns(job: Job) -> None:
    seen: list[Record] = []

    def opened(schema: pa.Schema, handles: Sequence[StateHandle] = ()) -> KeyedProcessor:
        content = KeptRecords(Seen(seen), schema)
        function = window_functions.WindowedFunction(
            TumblingEventTimeWindows(0.010), 0, content, INPUTS[0]
        )
        work = ProcessKeyed(("account",), function)
        return KeyedProcessor("op", work, job.open(handles), job.without_keys(0, 1), schema)

    record: Record = {
        "account": "a",
        "at": 5,
        "price": Decimal("12.50"),
        "day": date(2024, 2, 29),
        "local": datetime(2024, 2, 29, 1, 2, 3, 4_000),
        "place": {"city": "Kyiv", "fee": Decimal("1.5")},
    }
    first = opened(RICH)
    first.receive(Batch(pa.RecordBatch.from_pylist([record], schema=RICH)))
    handles = list(first.snapshot(job.next_checkpoint()).upload(job.storage).keyed)
    again = opened(RICH.append(pa.field("note", pa.string())), handles)
    again.on_watermark(100)
    assert seen == [record | {"note": None}]


class Prices(AggregateFunction[Record, Decimal, Record]):
    """The sum of decimals."""

    def create_accumulator(self) -> Decimal:
        return Decimal(0)

    def add(self, value: Record, accumulator: Decimal) -> Decimal:
        return accumulator + Decimal(value["amount"]) / 10

    def get_result(self, accumulator: Decimal) -> Record:
        return {"price": accumulator}


def test_accumulator_of_a_window_comes_back_with_the_type_that_it_was_given(job: Job) -> None:
    prices = window_schema(SCHEMA, ["account"], "at", {"price": pa.decimal128(12, 2)})
    content = window_functions.KeptAccumulators(Prices(), ["account"], prices, Decimal)
    windows = TumblingEventTimeWindows(0.010)
    first = Running(job, windows, 0, content)
    first.take(("a", 5, 12))
    again = Running(job, windows, 0, content, 1, first.snapshot())
    again.take(("a", 6, 13))
    (made,) = again.advance(100)
    assert made["price"] == Decimal("2.50")


class NoMerge(AggregateFunction[Record, int, Record]):
    """Counts, and cannot merge."""

    def create_accumulator(self) -> int:
        return 0

    def add(self, value: Record, accumulator: int) -> int:
        return accumulator + 1

    def get_result(self, accumulator: int) -> Record:
        return {"total": accumulator, "n": accumulator, "low": None, "high": None}


def test_sessions_that_become_one_need_a_merge_and_say_so(job: Job) -> None:
    content = window_functions.KeptAccumulators(NoMerge(), ["account"], OUT)
    running = Running(job, EventTimeSessionWindows(0.004), 0, content)
    running.take(("a", 1, 1))
    running.take(("a", 9, 1))
    running.take(("a", 5, 1))
    with pytest.raises(UserFunctionError, match=r"NoMerge has no merge\(\)"):
        running.advance(100)


def test_a_record_without_event_time_is_named(job: Job) -> None:
    running = Running(job, TumblingEventTimeWindows(1), 0, CONTENTS["records"])
    with pytest.raises(UserFunctionError, match=r"'at' is null"):
        running.take(("a", None, 1))  # type: ignore[arg-type]


def test_sessions_kept_by_a_function_are_refused_by_name_where_aggregates_are_vectorised(
    job: Job,
) -> None:
    windows = EventTimeSessionWindows(0.004)
    running = Running(job, windows, 0, CONTENTS["accumulators"])
    running.take(("a", 1, 1))
    store = job.open(running.snapshot())
    work = AggregateWindows(("account",), windows, "at", 0, AGGREGATES)
    with pytest.raises(StateIncompatible, match="onceflow.windows"):
        SessionAggregator("op", work, store, SCHEMA, OUT, range(MAX_PARALLELISM))
