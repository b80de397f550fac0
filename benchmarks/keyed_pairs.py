"""Keyed operators beside `running`, in pairs: the same batches through both, one after the other.

A ratio is that of processor time a row, `running`'s by the other's: above 1 the other is faster.
Pairs, because on a shared machine both halves of a pair meet the same load.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from benchmarks.keyed_balance import BatchBalance, KeyedBalance
from onceflow import (
    BatchStates,
    CoGroupBatch,
    CoGroupBatchFunction,
    EventTimeSessionWindows,
    KeyedBatch,
    KeyedBatchFunction,
    Record,
    StateAccess,
    StateTtlConfig,
    TumblingEventTimeWindows,
    ValueStateDescriptor,
    count,
    sum_,
)
from onceflow.core.plan import graph, join_functions, window_functions
from onceflow.core.plan.functions import running_schema
from onceflow.core.plan.process_functions import CoProcessFunction
from onceflow.core.plan.window_batches import WindowBatches
from onceflow.core.plan.windows import window_schema
from onceflow.core.runtime.dataflow.channels import Batch
from onceflow.core.runtime.dataflow.function_operators import (
    KeyedBatchProcessor,
    KeyedProcessor,
)
from onceflow.core.runtime.dataflow.join_operators import JoinOperator
from onceflow.core.runtime.dataflow.keyed_operators import AggregateRunner
from onceflow.core.runtime.dataflow.operators import RunningOperator
from onceflow.core.runtime.dataflow.session_operators import SessionAggregator
from onceflow.core.runtime.dataflow.window_joins import WindowJoinOperator
from onceflow.core.runtime.dataflow.window_operators import WindowAggregator
from onceflow.core.state import KeyedStateStore, hash_keys
from onceflow.core.state.api.clock import StateClock
from onceflow.core.state.states.operator_state import OperatorStateStore

BATCH_ROWS = 10_000
BATCHES = 40
KEYS = 100_000
WINDOW_MS = 60_000
FAR_MS = 1 << 60
SCHEMA = pa.schema([("account", pa.string()), ("ts", pa.int64()), ("amount", pa.int64())])
KEY = ("account",)
AGGREGATES = {"balance": sum_("amount"), "n": count()}

Open = Callable[[], KeyedStateStore]


@dataclass(frozen=True, slots=True)
class Half:
    """One half of a pair: an operator, and what a pass of all batches through it is."""

    operator: RunningOperator
    work: Callable[[], None]

    def cpu_s(self) -> float:
        """Return the processor time of one pass."""
        began = time.thread_time()
        self.work()
        return time.thread_time() - began


def batches() -> list[pa.RecordBatch]:
    """Return rows of uniform keys; a batch is 100 ms of event time, a pass less than a window."""
    rng = np.random.default_rng(11)
    made: list[pa.RecordBatch] = []
    for number in range(BATCHES):
        keys = [f"acct-{key:06d}" for key in rng.integers(0, KEYS, BATCH_ROWS).tolist()]
        times = number * 100 + rng.integers(0, 100, BATCH_ROWS)
        amounts = rng.integers(-500, 1000, BATCH_ROWS)
        made.append(pa.record_batch([keys, times, amounts], schema=SCHEMA))
    return made


def hashed(rows: Sequence[pa.RecordBatch]) -> list[Batch]:
    """Return the batches as they come from an exchange."""
    return [Batch(one, hash_keys([one.column("account")])) for one in rows]


def running(
    store: KeyedStateStore, rows: Sequence[Batch], ttl: StateTtlConfig | None = None
) -> Half:
    """The built-in running sum and count."""
    schema = running_schema(SCHEMA, AGGREGATES)
    work = graph.RunAggregates(KEY, AGGREGATES, ttl)
    operator = AggregateRunner("running", work, store, SCHEMA, schema)
    return Half(operator, lambda: _pass(operator, rows))


def running_that_expires(store: KeyedStateStore, rows: Sequence[Batch]) -> Half:
    """The same, of which a key begins anew after an hour without a record."""
    return running(store, rows, StateTtlConfig("1 h"))


def by_function(store: KeyedStateStore, rows: Sequence[Batch]) -> Half:
    """The same by a function of whole batches."""
    function = BatchBalance()
    work = graph.ProcessBatches(KEY, function)
    schema = function.output_schema(SCHEMA)
    operator = KeyedBatchProcessor("function", work, store, _states("function"), SCHEMA, schema)
    return Half(operator, lambda: _pass(operator, rows))


def _states(uid: str) -> OperatorStateStore:
    return OperatorStateStore(
        uid,
        subtask=0,
        parallelism=1,
        key_groups=range(1),
        max_parallelism=1,
        is_restored=False,
    )


def windowed(store: KeyedStateStore, rows: Sequence[Batch]) -> Half:
    """Sum and count of tumbling windows, each pass one of them, its results included."""
    windows = TumblingEventTimeWindows(WINDOW_MS / 1000)
    work = graph.AggregateWindows(KEY, windows, "ts", 0, AGGREGATES)
    results = {name: one.result_type(SCHEMA) for name, one in AGGREGATES.items()}
    schema = window_schema(SCHEMA, KEY, "ts", results)
    operator = WindowAggregator("windows", work, store, SCHEMA, schema, range(128))
    passes = 0

    def work_of_pass() -> None:
        nonlocal passes
        shift = passes * WINDOW_MS
        for batch in rows:
            operator.receive(_moved(batch, shift))
        passes += 1
        operator.on_watermark(passes * WINDOW_MS)

    return Half(operator, work_of_pass)


def in_sessions(store: KeyedStateStore, rows: Sequence[Batch]) -> Half:
    """Sum and count of sessions, of which each pass ends those of the one before."""
    windows = EventTimeSessionWindows(WINDOW_MS / 1000)
    work = graph.AggregateWindows(KEY, windows, "ts", 0, AGGREGATES)
    results = {name: one.result_type(SCHEMA) for name, one in AGGREGATES.items()}
    schema = window_schema(SCHEMA, KEY, "ts", results)
    operator = SessionAggregator("sessions", work, store, SCHEMA, schema, range(128))
    passes = 0

    def work_of_pass() -> None:
        nonlocal passes
        shift = passes * 3 * WINDOW_MS
        for batch in rows:
            operator.receive(_moved(batch, shift))
        passes += 1
        operator.on_watermark(shift + 2 * WINDOW_MS)

    return Half(operator, work_of_pass)


def _moved(batch: Batch, by_ms: int) -> Batch:
    times = pa.array(batch.rows.column("ts").to_numpy() + by_ms)
    return Batch(batch.rows.set_column(1, SCHEMA.field("ts"), times), batch.hashes)


def joined(kind: str) -> Callable[[KeyedStateStore, Sequence[Batch]], Half]:
    """Return what makes a join of two streams: the batches go to its inputs in turns.

    A record is kept for a second, in which a key has half a record on the other side on average.
    The clock goes with event time.
    """

    def made(store: KeyedStateStore, rows: Sequence[Batch]) -> Half:
        passes, now_ms = 0, 0
        operator = _operator_of_join(kind, store, StateClock(lambda: now_ms / 1000))

        def work_of_pass() -> None:
            nonlocal passes, now_ms
            for number, batch in enumerate(rows):
                now_ms = passes * WINDOW_MS + 100 * number
                operator.inputs[number % 2](_moved(batch, passes * WINDOW_MS))
                operator.on_watermark(now_ms - 1)
                operator.on_time()
            passes += 1
            now_ms = passes * WINDOW_MS
            operator.on_watermark(now_ms - 1)
            operator.on_time()

        return Half(operator, work_of_pass)

    return made


def _sides(time: str | None) -> tuple[join_functions.JoinSide, join_functions.JoinSide]:
    return join_functions.JoinSide("left", SCHEMA, time, None), join_functions.JoinSide(
        "right", SCHEMA, time, None
    )


def _merged() -> join_functions.MergedColumns:
    return join_functions.MergedColumns(SCHEMA, SCHEMA, (KEY, KEY), ("_left", "_right"))


def _of_windows(function: window_functions.CoGroupFunction) -> window_functions.CoWindowedFunction:
    side = window_functions.WindowInput(KEY, "ts")
    windows, content = (
        TumblingEventTimeWindows(1),
        window_functions.KeptRecords(function, SCHEMA, SCHEMA),
    )
    return window_functions.CoWindowedFunction(windows, 0, content, side, side)


class Balance(window_functions.CoGroupFunction):
    """What the left records of a key and window come to, less the right ones."""

    def output_schema(self, left: pa.Schema, right: pa.Schema) -> pa.Schema:
        return pa.schema([("account", pa.string()), ("balance", pa.int64())])

    def process(
        self, key: Any, window: window_functions.TimeWindow, left: list[Record], right: list[Record]
    ) -> Record:
        paid = sum(record["amount"] for record in right)
        return {"account": key, "balance": sum(record["amount"] for record in left) - paid}


class BatchBalances(CoGroupBatchFunction):
    """The same for many windows at once."""

    def output_schema(self, left: pa.Schema, right: pa.Schema) -> pa.Schema:
        return pa.schema([("account", pa.string()), ("balance", pa.int64())])

    def process(self, windows: CoGroupBatch) -> pa.RecordBatch:
        left, right = windows.left, windows.right
        balances = np.zeros(windows.window_count, np.int64)
        np.add.at(balances, left.windows, left.rows.column("amount").to_numpy())
        np.subtract.at(balances, right.windows, right.rows.column("amount").to_numpy())
        return pa.record_batch(
            [windows.keys.column("account"), pa.array(balances)], ["account", "balance"]
        )


JOINS: dict[str, Callable[[], join_functions.TimedJoin | CoProcessFunction]] = {
    "interval join": lambda: join_functions.TimedJoin(-1_000, 1_000, _sides("ts"), _merged()),
    "regular join": lambda: join_functions.TimedJoin(-999, 999, _sides(None), _merged()),
    "window join": lambda: _of_windows(join_functions.WindowPairs((False, False), _merged())),
    "co_group": lambda: _of_windows(Balance()),
    "co_group_batches": lambda: _of_windows(WindowBatches(BatchBalances())),
}


def _operator_of_join(kind: str, store: KeyedStateStore, clock: StateClock) -> RunningOperator:
    joining, states = JOINS[kind](), _states(kind)
    if isinstance(joining, join_functions.TimedJoin):
        work = graph.JoinConnected((KEY, KEY), joining)
        return JoinOperator(kind, work, store, states, joining.output_schema(), clock)
    schema = joining.output_schema(SCHEMA, SCHEMA)
    return WindowJoinOperator(
        kind, graph.ProcessConnected((KEY, KEY), joining), store, states, schema
    )


def _pass(operator: RunningOperator, rows: Sequence[Batch]) -> None:
    for batch in rows:
        operator.receive(batch)


def ratio(first: Half, second: Half, runs: int) -> float:
    """Return the median of `first`'s time by `second`'s, over pairs, after one to warm up."""
    found = [first.cpu_s() / second.cpu_s() for _ in range(runs + 1)]
    return statistics.median(found[1:])


class BalanceWithTimers(KeyedBalance):
    """While `registers` says so, registers a far timer for each record, and does nothing else."""

    registers = False

    def open(self, state: StateAccess) -> None:
        super().open(state)
        self._timers = state.timers()

    def process(self, record: Record) -> Record:
        if self.registers:
            self._timers.register_event_time_timer(FAR_MS + record["ts"])
            return record | {"balance": 0, "n": 0}
        return super().process(record)


def with_timers(store: KeyedStateStore, rows: Sequence[Batch], pending: int) -> Half:
    """A function of one record; `pending` keys that have no records have a timer each."""
    function = BalanceWithTimers()
    schema = function.output_schema(SCHEMA)
    operator = KeyedProcessor(
        "timers", graph.ProcessKeyed(KEY, function), store, _states("timers"), schema
    )
    function.registers = True
    for start in range(0, pending, BATCH_ROWS):
        numbers = range(start, min(start + BATCH_ROWS, pending))
        keys = [f"waits-{number:07d}" for number in numbers]
        columns = [keys, list(numbers), [1] * len(keys)]
        operator.receive(hashed([pa.record_batch(columns, schema=SCHEMA)])[0])
    function.registers = False
    return Half(operator, lambda: _pass(operator, rows))


class QuietKeys(KeyedBatchFunction):
    """Emits each key that had no record for a second of event time, by a timer that moves."""

    began_ms = 0
    """What is added to the records' times: each pass goes on in event time."""

    def output_schema(self, input_schema: pa.Schema) -> pa.Schema:
        return pa.schema([SCHEMA.field("account"), pa.field("quiet_since", pa.int64())])

    def open(self, state: BatchStates) -> None:
        self._last = state.value_state(ValueStateDescriptor("last", int))
        self._timers = state.timers()

    def process(self, batch: KeyedBatch) -> None:
        last = batch.lasts(batch.sort_by_key("ts")) + self.began_ms
        self._timers.delete_event_time_timers(pc.add(self._last.get_many(), 1_000))
        self._timers.register_event_time_timers(last + 1_000)
        self._last.put_many(last)

    def on_timers(self, timers: KeyedBatch, domain: str) -> pa.RecordBatch:
        quiet = timers.lasts(timers.sort_by_key("timer_ms")) - 1_000
        self._last.put_many(pa.nulls(timers.key_count, pa.int64()))
        return pa.record_batch(
            [timers.keys.column("account"), pa.array(quiet)], ["account", "quiet_since"]
        )


def with_timers_of_batches(store: KeyedStateStore, rows: Sequence[Batch]) -> Half:
    """A time-out of each key by a function of batches: a timer deleted and one set a record."""
    function = QuietKeys()
    schema = function.output_schema(SCHEMA)
    work = graph.ProcessBatches(KEY, function)
    operator = KeyedBatchProcessor("timers", work, store, _states("timers"), SCHEMA, schema)

    def run() -> None:
        for number, batch in enumerate(rows):
            operator.receive(batch)
            operator.on_watermark(function.began_ms + number * 100)
        function.began_ms += len(rows) * 100

    return Half(operator, run)


def pair_figures(open_store: Open, timers: int, runs: int) -> dict[str, float]:
    """Return the ratios of one backend."""
    rows = hashed(batches())
    figures: dict[str, float] = {}
    for name, other, some in (
        ("function of batches / running, rate", by_function, rows),
        ("timers of batches / running, rate", with_timers_of_batches, rows),
        ("windowed sums / running, rate", windowed, rows),
        ("sums of sessions / running, rate", in_sessions, rows),
        ("running with ttl / running, rate", running_that_expires, rows),
        ("interval join / running, rate", joined("interval join"), rows),
        ("regular join / running, rate", joined("regular join"), rows),
        ("window join / running, rate", joined("window join"), rows),
        ("co_group / running, rate", joined("co_group"), rows),
        ("co_group_batches / running, rate", joined("co_group_batches"), rows),
    ):
        stores = open_store(), open_store()
        figures[name] = ratio(running(stores[0], some), other(stores[1], some), runs)
        for store in stores:
            store.close()
    stores = open_store(), open_store()
    few = rows[: BATCHES // 4]
    none, many = with_timers(stores[0], few, 0), with_timers(stores[1], few, timers)
    # A pass is short: more pairs of them.
    figures[f"{timers:,} timers pending / none, rate"] = ratio(none, many, 4 * runs)
    for store in stores:
        store.close()
    return figures
