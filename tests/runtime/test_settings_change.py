"""Settings under which state means what it does: another one is refused, with both values."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from tests.runtime.test_event_time_restored import (
    Counted,
    CountedOfBoth,
    Number,
    is_even,
    is_odd,
)
from tests.runtime.test_state_changes import SLOWLY, SOURCE, stop_half_way
from tests.support.clusters import AnyCluster
from tests.support.directory_sink import DirectorySink
from tests.support.ledger import SETTINGS

from onceflow import (
    BroadcastProcessFunction,
    Checkpointing,
    EventTimeSessionWindows,
    HeapBackend,
    JobState,
    KeyedFunction,
    MapStateDescriptor,
    NoRestart,
    Pipeline,
    Record,
    RocksDBBackend,
    SlidingEventTimeWindows,
    StateAccess,
    Stream,
    TumblingEventTimeWindows,
    TumblingProcessingTimeWindows,
    ValueStateDescriptor,
    WatermarkStrategy,
    count,
)
from onceflow.core.errors import StateIncompatible
from onceflow.core.plan.graph import Feed, GraphBuilder
from onceflow.core.plan.join_functions import JoinKind
from onceflow.core.plan.windows import WindowAssigner
from onceflow.core.plan.work import ReadFrom
from onceflow.core.runtime.dataflow.operator_descriptions import describe_operator, find_changes
from onceflow.core.state import StateBackend

Work = Callable[[Stream], Stream]
Windowed = Callable[[Stream, WindowAssigner, float], Stream]


def pipeline_of(
    cluster: AnyCluster,
    directory: Path,
    work: Work,
    *,
    backend: StateBackend | None = None,
    allow: bool = False,
    paced: bool = False,
) -> tuple[Pipeline, DirectorySink]:
    pipeline = Pipeline(
        cluster,
        name="settings",
        parallelism=2,
        checkpointing=Checkpointing(storage=str(directory / "checkpoints"), interval=0.1),
        state_backend=backend or HeapBackend(),
        restart=NoRestart(),
        settings=SETTINGS,
        allow_non_restored_state=allow,
    )
    sink = DirectorySink(str(directory / "out"))
    source = SLOWLY if paced else SOURCE
    watermarks = WatermarkStrategy("id", max_out_of_orderness=1)
    work(pipeline.read(source, uid="records", watermarks=watermarks)).write(sink, uid="out")
    return pipeline, sink


def aggregate(records: Stream, windows: WindowAssigner, lateness: float) -> Stream:
    keyed = records.key_by("account").window(windows, allowed_lateness=lateness)
    return keyed.aggregate(n=count(), uid="windows")


def process(records: Stream, windows: WindowAssigner, lateness: float) -> Stream:
    keyed = records.key_by("account").window(windows, allowed_lateness=lateness)
    return keyed.process(Counted(), uid="windows")


def aggregate_by(records: Stream, windows: WindowAssigner, lateness: float) -> Stream:
    keyed = records.key_by("account").window(windows, allowed_lateness=lateness)
    schema = pa.schema([("n", pa.int64())])
    return keyed.aggregate_by(Number(), schema=schema, uid="windows", accumulator_type=int)


def co_group(records: Stream, windows: WindowAssigner, lateness: float) -> Stream:
    both = records.filter(is_even).connect(records.filter(is_odd)).key_by("account", "account")
    keyed = both.window(windows, allowed_lateness=lateness)
    return keyed.co_group(CountedOfBoth(), uid="windows")


def window_join(records: Stream, windows: WindowAssigner, lateness: float) -> Stream:
    both = records.filter(is_even).connect(records.filter(is_odd)).key_by("account", "account")
    return both.window(windows, allowed_lateness=lateness).join().merge(uid="windows")


ALL = [aggregate, process, aggregate_by, co_group, window_join]


def described(work: Work, uid: str = "windows") -> dict[str, str]:
    """Return what checkpoints of a pipeline say of one operator."""
    graph = GraphBuilder("settings")
    source = ReadFrom(SOURCE, {None: WatermarkStrategy("id")})
    graph.add(source, uid="records", schema=SOURCE.schema)
    work(Stream(graph, Feed("records", SOURCE.schema)))
    (operator,) = [operator for operator in graph.graph().operators if operator.uid == uid]
    return describe_operator(operator)


@pytest.mark.parametrize("windowed", ALL)
@pytest.mark.parametrize(
    ("before", "after", "refused"),
    [
        (
            (TumblingEventTimeWindows(4), 0),
            (TumblingEventTimeWindows(2), 0),
            ["size was 4000 ms and is now 2000 ms", "slide was 4000 ms and is now 2000 ms"],
        ),
        (
            (SlidingEventTimeWindows(4, 2), 0),
            (SlidingEventTimeWindows(6, 2), 0),
            ["size was 4000 ms and is now 6000 ms"],
        ),
        (
            (SlidingEventTimeWindows(4, 2), 0),
            (SlidingEventTimeWindows(4, 1), 0),
            ["slide was 2000 ms and is now 1000 ms"],
        ),
        (
            (TumblingEventTimeWindows(4), 0),
            (TumblingEventTimeWindows(4, offset=1), 0),
            ["offset was 0 ms and is now 1000 ms"],
        ),
        (
            (EventTimeSessionWindows(4), 0),
            (EventTimeSessionWindows(5), 0),
            ["gap was 4000 ms and is now 5000 ms"],
        ),
        (
            (TumblingEventTimeWindows(4), 0),
            (TumblingProcessingTimeWindows(4), 0),
            ["time was event time and is now processing time"],
        ),
        (
            (EventTimeSessionWindows(4), 0),
            (TumblingEventTimeWindows(4), 0),
            ["windows was sessions and is now of one size"],
        ),
        (
            (TumblingEventTimeWindows(4), 1),
            (TumblingEventTimeWindows(4), 2),
            ["allowed lateness was 1000 ms and is now 2000 ms"],
        ),
        ((TumblingEventTimeWindows(4), 2), (TumblingEventTimeWindows(4), 1), []),
        ((TumblingEventTimeWindows(4), 2), (TumblingEventTimeWindows("4 s"), 2), []),
    ],
)
def test_what_cuts_time_otherwise_is_told_with_both_values(
    windowed: Windowed,
    before: tuple[WindowAssigner, float],
    after: tuple[WindowAssigner, float],
    refused: list[str],
) -> None:
    old = described(lambda records: windowed(records, *before))
    assert find_changes(old, described(lambda records: windowed(records, *after))) == refused


def test_what_joins_by_time_keep_records_for_is_told_with_both_values() -> None:
    def interval(records: Stream, upper: float) -> Stream:
        left, right = records.filter(is_even), records.filter(is_odd)
        joined = left.key_by("account").interval_join(right.key_by("account"))
        return joined.between(-1, upper).merge(uid="windows")

    def regular(records: Stream, ttl: float) -> Stream:
        left, right = records.filter(is_even), records.filter(is_odd)
        joined = left.key_by("account").join(right.key_by("account"), ttl=ttl)
        return joined.merge(uid="windows")

    old = described(lambda records: interval(records, 1))
    assert find_changes(old, described(lambda records: interval(records, 5))) == [
        "upper was 1000 ms and is now 5000 ms"
    ]
    old = described(lambda records: regular(records, 10))
    assert find_changes(old, described(lambda records: regular(records, 20)))
    assert not find_changes(old, described(lambda records: regular(records, 10)))


def test_a_side_of_a_join_may_cease_to_be_outer_and_not_become_it() -> None:
    """Of kept records of another side it is not known whether they have had a partner."""

    def describe(how: JoinKind) -> dict[str, str]:
        def join(records: Stream) -> Stream:
            left, right = records.filter(is_even), records.filter(is_odd)
            pairs = left.key_by("account").join(right.key_by("account"), ttl=10, how=how)
            return pairs.merge(uid="windows")

        return described(join)

    assert find_changes(describe("inner"), describe("left")) == ["how was inner and is now left"]
    assert find_changes(describe("left"), describe("right")) == ["how was left and is now right"]
    assert find_changes(describe("right"), describe("full")) == ["how was right and is now full"]
    assert not find_changes(describe("full"), describe("left"))
    assert not find_changes(describe("left"), describe("inner"))


class CountOfKey(KeyedFunction):
    def output_schema(self, input_schema: pa.Schema) -> pa.Schema:
        return input_schema.append(pa.field("n", pa.int64()))

    def open(self, state: StateAccess) -> None:
        self._n = state.value_state(ValueStateDescriptor[int]("n", int, default=0))

    def process(self, record: Record) -> Record:
        self._n.set(self._n.get() + 1)
        return record | {"n": self._n.get()}


RULES = MapStateDescriptor[str, int]("rules", str, int)


class CountWithRules(BroadcastProcessFunction):
    def output_schema(self, records: pa.Schema, broadcast: pa.Schema) -> pa.Schema:
        return records

    def process(self, record: Record) -> Record:
        return record

    def process_broadcast(self, record: Record) -> None:
        pass


def with_key_as(kind: pa.DataType) -> Callable[[Stream], Stream]:
    """Return what makes the account a column of another type."""

    def cast(rows: pa.RecordBatch) -> pa.RecordBatch:
        account = pc.cast(rows.column("account").cast(pa.int64()), pa.int64())
        at = rows.schema.get_field_index("account")
        return rows.set_column(at, pa.field("account", kind), account.cast(kind))

    def of(records: Stream) -> Stream:
        schema = records.schema
        at = schema.get_field_index("account")
        return records.map_batches(cast, schema=schema.set(at, pa.field("account", kind)))

    return of


def counted(records: Stream) -> Stream:
    return records.key_by("account").process(CountOfKey(), uid="windows")


def windowed_by_function(records: Stream) -> Stream:
    return process(records, TumblingEventTimeWindows(4), 0)


def running(records: Stream) -> Stream:
    return records.key_by("account").running(n=count(), uid="windows")


def with_rules(records: Stream) -> Stream:
    both = records.key_by("account").connect(records.broadcast(RULES))
    return both.process(CountWithRules(), uid="windows")


@pytest.mark.parametrize("work", [counted, windowed_by_function, running, with_rules])
@pytest.mark.parametrize(
    ("kind", "refused"),
    [
        (pa.int64(), ["key was string and is now integer"]),
        (pa.binary(), ["key was string and is now binary"]),
        (pa.large_string(), []),
    ],
    ids=str,
)
def test_another_type_of_key_is_told_with_both_types(
    work: Work, kind: Any, refused: list[str]
) -> None:
    as_kind = with_key_as(kind)
    assert find_changes(described(work), described(lambda one: work(as_kind(one)))) == refused


@pytest.mark.parametrize("work", [counted, running, with_rules])
def test_a_key_with_a_zone_is_another_type_than_one_without(work: Work) -> None:
    def describe(zone: str | None) -> dict[str, str]:
        as_instant = with_key_as(pa.timestamp("us", zone))
        return described(lambda one: work(as_instant(one)))

    local, instant = "timestamp(us) without a zone", "timestamp(us) with a zone"
    changes = find_changes(describe(None), describe("UTC"))
    assert changes == [f"key was {local} and is now {instant}"]
    changes = find_changes(describe("UTC"), describe(None))
    assert changes == [f"key was {instant} and is now {local}"]
    assert not find_changes(describe("UTC"), describe("America/New_York"))


@pytest.mark.parametrize(
    "backend",
    [pytest.param(HeapBackend(), id="heap"), pytest.param(RocksDBBackend(), id="rocksdb")],
)
def test_a_key_of_another_type_is_refused_at_the_start_and_begins_anew_where_allowed(
    cluster: AnyCluster, tmp_path: Path, backend: StateBackend
) -> None:
    stop_half_way(pipeline_of(cluster, tmp_path, counted, backend=backend, paced=True)[0])

    def by_number(records: Stream) -> Stream:
        return counted(with_key_as(pa.int64())(records))

    with pytest.raises(StateIncompatible, match="'windows': key was string and is now integer"):
        pipeline_of(cluster, tmp_path, by_number, backend=backend)[0].run(60)
    pipeline, sink = pipeline_of(cluster, tmp_path, by_number, backend=backend, allow=True)
    status = pipeline.run(60)
    assert status.state is JobState.FINISHED
    assert status.dropped_state == ("the state of operator 'windows'",)
    later = [row["n"] for row in sink.rows() if row["account"] == 3]
    assert sorted(later) == list(range(1, len(later) + 1))


def test_windows_of_another_size_are_refused_at_the_start_and_a_shorter_lateness_is_taken(
    cluster: AnyCluster, tmp_path: Path
) -> None:
    size = TumblingEventTimeWindows(0.5)

    def with_lateness(lateness: float) -> Work:
        return lambda records: process(records, size, lateness)

    stop_half_way(pipeline_of(cluster, tmp_path, with_lateness(2), paced=True)[0])
    other = TumblingEventTimeWindows(1)
    with pytest.raises(StateIncompatible, match="size was 500 ms and is now 1000 ms"):
        pipeline_of(cluster, tmp_path, lambda one: process(one, other, 2))[0].run(60)
    with pytest.raises(StateIncompatible, match="lateness was 2000 ms and is now 3000 ms"):
        pipeline_of(cluster, tmp_path, with_lateness(3))[0].run(60)
    pipeline, sink = pipeline_of(cluster, tmp_path, with_lateness(0))
    assert pipeline.run(60).state is JobState.FINISHED
    last: dict[tuple[str, int], int] = {}
    for row in sink.rows():
        key = (row["account"], row["start"])
        last[key] = max(last.get(key, 0), row["n"])
    assert sum(last.values()) == SOURCE.records
