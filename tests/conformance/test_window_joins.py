"""Window joins and `co_group` of whole batches, beside a model that takes one record at a time."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any, TypeAlias

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from tests.conformance.state_job import MAX_PARALLELISM, Job
from tests.support.drawn_seeds import draw_random

from onceflow import (
    CoGroupBatch,
    CoGroupBatchFunction,
    CoGroupFunction,
    ListStateDescriptor,
    OperatorAccess,
    OutputTag,
    ProcessJoinFunction,
    Record,
    SlidingEventTimeWindows,
    StateAccess,
    TimeWindow,
    TumblingEventTimeWindows,
    ValueStateDescriptor,
    WindowRows,
)
from onceflow.core.errors import ConfigError, UserFunctionError
from onceflow.core.plan.graph import Feed
from onceflow.core.plan.join_functions import MergedColumns, WindowPairs
from onceflow.core.plan.window_batches import WindowBatches
from onceflow.core.plan.window_functions import CoWindowedFunction, KeptRecords, WindowInput
from onceflow.core.plan.windows import WindowAssigner, pane_windows
from onceflow.core.plan.work import ProcessConnected
from onceflow.core.protocol.checkpoints.snapshots import StateHandle
from onceflow.core.protocol.watermarks import MAX_WATERMARK, NO_WATERMARK
from onceflow.core.runtime.dataflow import window_joins
from onceflow.core.runtime.dataflow.channels import Batch
from onceflow.core.runtime.dataflow.function_operators import CoProcessor
from onceflow.core.runtime.dataflow.restored_event_time import EVENT_TIME, RestoredEventTime
from onceflow.core.runtime.dataflow.window_joins import (
    WindowJoinOperator,
    connect_streams,
    number_bits_of,
)
from onceflow.core.state import hash_keys, key_groups
from onceflow.core.state.keys.key_columns import KeyColumn
from onceflow.core.state.keys.key_groups import Hashes

Row: TypeAlias = tuple[str, int, int, int]
LEFT, RIGHT = (
    pa.schema([("account", pa.string()), ("part", pa.int32()), ("at", pa.int64()), (name, kind)])
    for name, kind in (("ordered", pa.int64()), ("paid", pa.int64()))
)
KEY = ("account", "part")
OUTER = {
    "inner": (False, False), "left": (True, False), "right": (False, True), "full": (True, True),
}  # fmt: skip
SCHEMA = pa.schema(
    [
        ("account", pa.string()), ("n", pa.int64()), ("start", pa.int64()),
        ("ordered", pa.list_(pa.int64())), ("paid", pa.list_(pa.int64())),
    ]
)  # fmt: skip


class Numbered(CoGroupFunction):
    """All records of a window in their order, and how many windows of its key were before it."""

    def output_schema(self, left: pa.Schema, right: pa.Schema) -> pa.Schema:
        return SCHEMA

    def open(self, state: StateAccess) -> None:
        self._n = state.value_state(ValueStateDescriptor("n", int, default=0))

    def process(
        self, key: Any, window: TimeWindow, left: list[Record], right: list[Record]
    ) -> Iterable[Record]:
        self._n.set(self._n.get() + 1)
        yield {
            "account": f"{key[0]}/{key[1]}",
            "n": self._n.get(),
            "start": window.start_ms,
            "ordered": [one["ordered"] for one in left],
            "paid": [one["paid"] for one in right],
        }


class Unnumbered(Numbered):
    """The same without a state."""

    def open(self, state: StateAccess) -> None:
        pass

    def process(
        self, key: Any, window: TimeWindow, left: list[Record], right: list[Record]
    ) -> Iterable[Record]:
        yield {
            "account": f"{key[0]}/{key[1]}",
            "n": None,
            "start": window.start_ms,
            "ordered": [one["ordered"] for one in left],
            "paid": [one["paid"] for one in right],
        }


class InBatches(CoGroupBatchFunction):
    """All records of each window of a batch in their order; numbered by nobody."""

    def output_schema(self, left: pa.Schema, right: pa.Schema) -> pa.Schema:
        return SCHEMA

    def process(self, windows: CoGroupBatch) -> pa.RecordBatch:
        check_batch(windows)
        keys = windows.keys.to_pylist()
        columns = [
            [f"{key['account']}/{key['part']}" for key in keys],
            [None] * windows.window_count,
            windows.starts_ms,
            values_of_windows(windows.left, "ordered"),
            values_of_windows(windows.right, "paid"),
        ]
        return pa.record_batch(columns, SCHEMA.names)


def values_of_windows(side: WindowRows, column: str) -> pa.Array:
    """Return a list of each window's values."""
    ends = [*side.firsts.tolist(), side.rows.num_rows]
    return pa.ListArray.from_arrays(pa.array(ends, pa.int32()), side.rows.column(column))


def check_batch(windows: CoGroupBatch) -> None:
    """Raise AssertionError unless a batch of windows is as it is described."""
    keys = [tuple(key.values()) for key in windows.keys.to_pylist()]
    starts_ms = windows.starts_ms.tolist()
    assert windows.window_count == len(keys) == len(set(zip(keys, starts_ms, strict=True)))
    assert (windows.left.counts + windows.right.counts > 0).all()
    for side in (windows.left, windows.right):
        every = np.arange(windows.window_count)
        assert side.windows.tolist() == np.repeat(every, side.counts).tolist()
        assert side.firsts.tolist() == (np.cumsum(side.counts) - side.counts).tolist()
        assert len(side.windows) == side.rows.num_rows
        rows = side.rows.to_pylist()
        assert [(row["account"], row["part"]) for row in rows] == [
            keys[window] for window in side.windows.tolist()
        ]
        times = side.rows.column("at").to_numpy()
        assert (side.spread(windows.starts_ms) <= times).all()
        assert (times < side.spread(windows.ends_ms)).all()


class NumberedPairs(ProcessJoinFunction):
    """Pairs, and how many pairs of their key there were before."""

    def output_schema(self, left: pa.Schema, right: pa.Schema) -> pa.Schema:
        return SCHEMA

    def open(self, state: StateAccess) -> None:
        self._n = state.value_state(ValueStateDescriptor("n", int, default=0))

    def process(self, left: Record, right: Record) -> Record:
        return self._number(left, [left["ordered"]], [right["paid"]])

    def process_left(self, left: Record) -> Record:
        return self._number(left, [left["ordered"]], [])

    def process_right(self, right: Record) -> Record:
        return self._number(right, [], [right["paid"]])

    def _number(self, record: Record, ordered: list[int], paid: list[int]) -> Record:
        self._n.set(self._n.get() + 1)
        account = f"{record['account']}/{record['part']}"
        return {
            "account": account, "n": self._n.get(), "start": 0, "ordered": ordered, "paid": paid,
        }  # fmt: skip


def merged(outer: tuple[bool, bool]) -> MergedColumns:
    return MergedColumns(LEFT, RIGHT, (KEY, KEY), ("_left", "_right"), outer)


@dataclass
class Model:
    """Takes one record at a time, as the documents say."""

    windows: Any
    outer: tuple[bool, bool] | None
    """None: all records of a window are one result."""
    now: int = NO_WATERMARK
    held: dict[tuple[str, int, int], tuple[list[int], list[int]]] = field(
        default_factory=lambda: defaultdict(lambda: ([], []))
    )
    made: dict[str, list[tuple[Any, ...]]] = field(default_factory=lambda: defaultdict(list))
    late: list[int] = field(default_factory=list[int])

    def take(self, side: int, rows: Sequence[Row]) -> None:
        for account, part, at, value in rows:
            pane = (at - self.windows.offset_ms) // self.windows.pane_ms
            ends = [
                end
                for end in self.windows.ends_of(pane)
                if end - 1 + self.windows.lateness_ms > self.now
            ]
            if not ends:
                self.late.append(value)
            for end in ends:
                self.held[account, part, end][side].append(value)
                if end - 1 <= self.now:
                    self._emit(account, part, end)

    def advance(self, now: int) -> None:
        before, self.now = self.now, max(self.now, now)
        for account, part, end in sorted(self.held, key=lambda one: one[2]):
            if before < end - 1 <= self.now:
                self._emit(account, part, end)
            if end - 1 + self.windows.lateness_ms <= self.now:
                del self.held[account, part, end]

    def _emit(self, account: str, part: int, end: int) -> None:
        ordered, paid = self.held[account, part, end]
        results: list[tuple[Any, ...]] = []
        if self.outer is None:
            results = [(end - self.windows.size_ms, tuple(ordered), tuple(paid))]
        elif ordered and paid:
            results = [(0, (one,), (other,)) for one in ordered for other in paid]
        else:
            results += [(0, (one,), ()) for one in ordered if self.outer[0]]
            results += [(0, (), (one,)) for one in paid if self.outer[1]]
        # A key whose windows have no pairs has no entry.
        if results:
            self.made[f"{account}/{part}"] += results


class Running:
    """Operators side by side, of which each has the rows of its key groups."""

    def __init__(
        self,
        job: Job,
        windows: WindowAssigner,
        lateness_ms: int,
        function: CoGroupFunction,
        parallelism: int = 1,
        handles: Sequence[StateHandle] = (),
        event_time: Sequence[bytes] = (),
    ) -> None:
        self._job = job
        self.made: list[Record] = []
        self.late: list[int] = []
        self.event_time: list[bytes] = []
        tags = [OutputTag(f"late-{side}", schema) for side, schema in enumerate((LEFT, RIGHT))]
        left, right = (WindowInput(KEY, "at", tag) for tag in tags)
        self.operators: list[tuple[range, WindowJoinOperator | CoProcessor]] = []
        for index in range(parallelism):
            groups = job.context(index, parallelism).key_groups
            store = job.open(handles, index=index, parallelism=parallelism)
            # Each slot has an instance of its own.
            content = KeptRecords(copy.deepcopy(function), LEFT, RIGHT)
            of_windows = CoWindowedFunction(windows, lateness_ms, content, left, right)
            work = ProcessConnected((KEY, KEY), of_windows)
            operator = connect_streams(
                "op",
                work,
                store,
                job.without_keys(index, parallelism),
                function.output_schema(LEFT, RIGHT),
                RestoredEventTime(event_time, groups, MAX_PARALLELISM),
            )
            operator.outputs.append(lambda batch: self.made.extend(batch.rows.to_pylist()))
            for side, tag in enumerate(tags):
                outlet = operator.outlet(Feed("op", tag.schema, tag.name))
                outlet.append(partial(self._take_late, side))
            self.operators.append((groups, operator))

    def _take_late(self, side: int, batch: Batch) -> None:
        self.late += batch.rows.column(("ordered", "paid")[side]).to_pylist()

    def take(self, side: int, rows: Sequence[Row]) -> None:
        schema = (LEFT, RIGHT)[side]
        columns = zip(*rows, strict=True)
        batch = pa.record_batch(
            [pa.array(one, of.type) for one, of in zip(columns, schema, strict=True)], schema=schema
        )
        hashes = hash_keys([batch.column(name) for name in KEY])
        groups = key_groups(hashes, MAX_PARALLELISM)
        for of_operator, operator in self.operators:
            mine = (groups >= of_operator.start) & (groups < of_operator.stop)
            if mine.any():
                operator.inputs[side](Batch(batch.filter(pa.array(mine)), hashes[mine]))

    def advance(self, now: int) -> None:
        for _, operator in self.operators:
            operator.on_watermark(now)

    def snapshot(self) -> list[StateHandle]:
        handles: list[StateHandle] = []
        checkpoint = self._job.next_checkpoint()
        for _, operator in self.operators:
            done = operator.snapshot(checkpoint).upload(self._job.storage)
            handles += done.keyed
            self.event_time += done.lists[EVENT_TIME]
            operator.on_completed(checkpoint)
        return handles


def by_key(made: Iterable[Record]) -> dict[str, list[tuple[Any, ...]]]:
    """Return results by key, in order, without their numbers, which count them if there are any."""
    results: dict[str, list[tuple[Any, ...]]] = defaultdict(list)
    for one in made:
        of_key = results[one["account"]]
        of_key.append((one["start"], tuple(one["ordered"]), tuple(one["paid"])))
        assert one["n"] in (None, len(of_key))
    return results


TUMBLING, SHIFTED = TumblingEventTimeWindows(0.010), TumblingEventTimeWindows(0.010, -0.003)
SLIDING, UNEVEN = SlidingEventTimeWindows(0.012, 0.004), SlidingEventTimeWindows(0.010, 0.004)


@pytest.mark.parametrize(
    ("windows", "lateness_ms", "how"),
    [
        (TUMBLING, 0, None),
        (TUMBLING, 0, "batches"),
        (TUMBLING, 0, "inner"),
        (SHIFTED, 12, None),
        (SHIFTED, 12, "batches"),
        (SHIFTED, 12, "left"),
        (SLIDING, 0, "right"),
        (UNEVEN, 9, None),
        (UNEVEN, 9, "batches"),
        (UNEVEN, 9, "full"),
    ],
    ids=str,
)
def test_windows_of_two_streams_equal_a_model_of_records_batch_by_batch_through_rescaling(
    job: Job, windows: Any, lateness_ms: int, how: str | None
) -> None:
    rng = draw_random()
    outer = OUTER.get(how or "")
    function: CoGroupFunction = Numbered()
    if outer is not None:
        function = WindowPairs(outer, NumberedPairs())
    elif how == "batches":
        function = WindowBatches(InBatches())
    model = Model(pane_windows(windows, lateness_ms), outer)
    running = Running(job, windows, lateness_ms, function)
    values, now = count(), 1_000
    for step in range(30):
        now += rng.choice([0, 2, 9])
        rows = [
            (f"k{rng.randrange(3)}", rng.randrange(2), now - rng.randrange(25), next(values))
            for _ in range(rng.randint(1, 8))
        ]
        side = rng.randrange(2)
        running.take(side, rows)
        model.take(side, rows)
        if rng.random() < 0.3:
            running.advance(now - 5)
            model.advance(now - 5)
        if step % 10 == 9:
            handles, before = running.snapshot(), running
            running = Running(
                job, windows, lateness_ms, function, rng.choice([1, 2, 3]), handles,
                before.event_time,
            )  # fmt: skip
            running.made, running.late = before.made, before.late
    # A record that is late, whatever was drawn before.
    late: Row = ("k1", 0, now - 1_000, next(values))
    running.advance(now)
    running.take(0, [late])
    model.advance(now)
    model.take(0, [late])
    running.advance(MAX_WATERMARK)
    model.advance(MAX_WATERMARK)
    assert by_key(running.made) == model.made
    assert sorted(running.late) == sorted(model.late)
    assert model.late


def test_a_window_that_had_fired_before_a_restore_comes_with_late_records_alone(job: Job) -> None:
    """At another parallelism, the key groups of one subtask may have had other event times."""
    half = MAX_PARALLELISM // 2
    event_time = [(0, half - 1, 9), (half, MAX_PARALLELISM - 1, 0)]
    elements = list(map(msgspec.msgpack.encode, event_time))
    running = Running(job, TUMBLING, 50, Numbered(), event_time=elements)
    rows = [(f"k{number}", 0, 5, number) for number in range(20)]
    running.take(0, rows)
    assert 0 < len(running.made) < len(rows), "of the key groups that were ahead"
    running.advance(9)
    assert sorted(one["account"] for one in running.made) == sorted(f"k{n}/0" for n in range(20))


def test_a_window_is_twice_in_no_batch_though_it_comes_with_each_late_record(job: Job) -> None:
    running = Running(job, TUMBLING, 50, WindowBatches(InBatches()))
    sizes: list[int] = []
    running.operators[0][1].outputs.append(lambda batch: sizes.append(batch.rows.num_rows))
    running.take(1, [("a", 1, 3, 1), ("b", 1, 3, 2)])
    running.advance(40)
    assert sizes == [2]
    # The third record is in the window of the first, and begins another batch.
    running.take(0, [("a", 1, at, value) for value, at in enumerate((5, 12, 7, 8), 3)])
    assert sizes == [2, 2, 1, 1]
    assert by_key(running.made)["a/1"] == [
        (0, (), (1,)), (0, (3,), (1,)), (10, (4,), ()), (0, (3, 5), (1,)), (0, (3, 5, 6), (1,)),
    ]  # fmt: skip


def test_many_windows_come_in_several_batches_each_of_whole_windows(job: Job) -> None:
    running = Running(job, TUMBLING, 0, WindowBatches(InBatches()))
    sizes: list[int] = []
    running.operators[0][1].outputs.append(lambda batch: sizes.append(batch.rows.num_rows))
    for side in range(2):
        running.take(side, [(f"k{n % 5_000}", 1, n % 2, n) for n in range(30_000)])
    running.advance(MAX_WATERMARK)
    assert sum(sizes) == len(running.made) == 5_000
    # With all rows in memory there are two batches of 32,768 rows at most.
    assert len(sizes) >= 2
    (one,) = (row for row in running.made if row["account"] == "k7/1")
    assert one["ordered"] == one["paid"] == list(range(7, 30_000, 5_000))


class CountedWindows(CoGroupBatchFunction):
    """Says in a side output after each batch how many windows there were, and returns nothing."""

    def output_schema(self, left: pa.Schema, right: pa.Schema) -> pa.Schema:
        return SCHEMA

    def open(self, state: OperatorAccess) -> None:
        self._sizes = state.side_output(SIZES)
        self._total = state.list_state(ListStateDescriptor("total", int))

    def process(self, windows: CoGroupBatch) -> None:
        self._total.update([sum(self._total.get()) + windows.window_count])
        self._sizes.emit({"windows": sum(self._total.get())})


SIZES = OutputTag("sizes", pa.schema([("windows", pa.int64())]))


def test_a_function_of_batches_has_side_outputs_and_states_without_a_key(job: Job) -> None:
    running = Running(job, TUMBLING, 0, WindowBatches(CountedWindows()))
    sizes: list[int] = []
    outlet = running.operators[0][1].outlet(Feed("op", SIZES.schema, SIZES.name))
    outlet.append(lambda batch: sizes.extend(batch.rows.column("windows").to_pylist()))
    for at in (5, 15):
        running.take(0, [("a", 1, at, 1), ("b", 1, at, 2)])
        running.advance(at + 5)
    assert sizes == [2, 4]
    assert running.made == []


@pytest.mark.parametrize("is_first", [True, False])
def test_co_group_and_co_group_batches_go_on_with_each_others_state(
    job: Job, is_first: bool
) -> None:
    functions = [Unnumbered(), WindowBatches(InBatches())]
    first, second = functions if is_first else functions[::-1]
    running = Running(job, TUMBLING, 0, first)
    running.take(0, [("a", 1, 5, 1)])
    handles = running.snapshot()
    again = Running(job, TUMBLING, 0, second, 1, handles, running.event_time)
    again.take(1, [("a", 1, 6, 2)])
    again.take(0, [("b", 1, 25, 3), ("b", 1, 15, 4)])
    again.advance(MAX_WATERMARK)
    assert by_key(again.made) == {
        "a/1": [(0, (1,), (2,))],
        "b/1": [(10, (4,), ()), (20, (3,), ())],
    }


def _return_a_table(rows: pa.RecordBatch) -> Any:
    return pa.table(rows)


def _leave_out_a_column(rows: pa.RecordBatch) -> Any:
    return rows.drop_columns(["paid"])


def _make_text_of_numbers(rows: pa.RecordBatch) -> Any:
    return rows.set_column(2, "start", pa.array(["x"] * rows.num_rows))


def _raise_an_error(rows: pa.RecordBatch) -> Any:
    raise ValueError("it is Monday")


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (_return_a_table, "'op' returned Table, but it must return a pyarrow.RecordBatch"),
        (_leave_out_a_column, r"'op' returned \['account', 'n', 'start', 'ordered'\], but its"),
        (_make_text_of_numbers, "'op' returned column 'start' as string, which does not cast"),
        (_raise_an_error, "'op' failed: ValueError: it is Monday"),
    ],
)
def test_what_a_function_of_batches_must_not_return_is_named(
    job: Job, spoil: Callable[[pa.RecordBatch], Any], says: str
) -> None:
    class Spoiled(InBatches):
        def process(self, windows: CoGroupBatch) -> Any:
            return spoil(super().process(windows))

    running = Running(job, TUMBLING, 0, WindowBatches(Spoiled()))
    running.take(0, [("a", 1, 5, 1)])
    with pytest.raises(UserFunctionError, match=says):
        running.advance(20)


@pytest.mark.parametrize("windows", [TUMBLING, SLIDING], ids=str)
def test_windows_of_keys_with_one_hash_stay_apart(
    job: Job, windows: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are brought together by the hash of their key, which other keys may have, too."""

    def hash_all_alike(columns: Sequence[KeyColumn]) -> Hashes:
        return np.zeros(len(columns[0]), np.uint64)

    monkeypatch.setattr(window_joins, "hash_key_columns", hash_all_alike)
    model = Model(pane_windows(windows, 0), None)
    running = Running(job, windows, 0, Numbered())
    rng = draw_random()
    for side in (0, 1, 1, 0):
        rows = [
            (rng.choice(["", "a", "b" * 9, "b" * 8 + "c"]), rng.randrange(2), rng.randrange(30), n)
            for n in range(20)
        ]
        running.take(side, rows)
        model.take(side, rows)
    running.advance(MAX_WATERMARK)
    model.advance(MAX_WATERMARK)
    assert by_key(running.made) == model.made


@pytest.mark.parametrize("how", OUTER)
def test_merged_columns_are_those_of_each_pair_and_of_records_alone(job: Job, how: str) -> None:
    outer = OUTER[how]
    running = Running(job, TumblingEventTimeWindows(1), 0, WindowPairs(outer, merged(outer)))
    both = [("a", 1, 10, 1), ("a", 1, 20, 2), ("b", 1, 30, 3)]
    running.take(0, [*both, ("only", 1, 40, 4), ("a", 1, 1_500, 5)])
    running.take(1, [*both, ("other", 2, 40, 6)])
    running.advance(999)
    rows = {(row["account"], row["ordered"], row["paid"]) for row in running.made}
    pairs = {("a", one, other) for one in (1, 2) for other in (1, 2)} | {("b", 3, 3)}
    assert rows == (
        pairs
        | ({("only", 4, None)} if outer[0] else set())
        | ({("other", None, 6)} if outer[1] else set())
    )
    assert len(running.made) == len(rows)
    assert {row["part"] for row in running.made if row["account"] == "other"} <= {2}


def test_windows_with_more_pairs_than_a_batch_come_out_in_several(job: Job) -> None:
    outer = OUTER["inner"]
    running = Running(job, TumblingEventTimeWindows(1), 0, WindowPairs(outer, merged(outer)))
    sizes: list[int] = []
    running.operators[0][1].outputs.append(lambda batch: sizes.append(batch.rows.num_rows))
    for side in range(2):
        running.take(side, [("a", 1, 10, number) for number in range(300)])
        running.take(side, [("b", 1, 10, number) for number in range(5)])
    running.advance(MAX_WATERMARK)
    assert sum(sizes) == 300 * 300 + 25
    assert max(sizes) <= 32_768
    assert len({(row["account"], row["ordered"], row["paid"]) for row in running.made}) == sum(
        sizes
    )


def test_a_function_of_windows_that_asks_for_timers_is_refused(job: Job) -> None:
    class WithTimers(Numbered):
        def open(self, state: StateAccess) -> None:
            state.timers()

    with pytest.raises(ConfigError, match="WithTimers of 'op' uses timers"):
        Running(job, TumblingEventTimeWindows(1), 0, WithTimers())


def test_a_time_that_is_too_far_away_is_named(job: Job) -> None:
    running = Running(job, TumblingEventTimeWindows(0.001), 0, Numbered())
    with pytest.raises(UserFunctionError, match="too far from now"):
        running.take(0, [("a", 1, 1 << 61, 1)])


@pytest.mark.parametrize("slide_ms", [1, 2, 100, 1_000, 86_400_000])
def test_every_window_of_the_years_1_to_9999_has_a_number(slide_ms: int) -> None:
    year_9999_ms = 253_402_300_799_999
    assert year_9999_ms // slide_ms < 1 << (62 - number_bits_of(slide_ms))
