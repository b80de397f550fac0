"""Joins of two streams: each pair once, whatever happens to slots and however many there are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import product
from operator import eq
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from examples.interval_join import PaidOrder, paid
from tests.runtime.test_union import begin
from tests.support.clusters import AnyCluster
from tests.support.counting_source import SCHEMA, CountingSource, amount_of
from tests.support.directory_sink import DirectorySink
from tests.support.held_up import killed_and_rescaled
from tests.support.scripted_sink import ScriptedSink, throttled_sink
from tests.support.waiting import await_status

from onceflow import (
    CoGroupBatch,
    CoGroupBatchFunction,
    CoGroupFunction,
    EventTimeSessionWindows,
    HeapBackend,
    JobState,
    KeyedStream,
    OutputTag,
    Pipeline,
    Record,
    RocksDBBackend,
    StateBackend,
    Stream,
    TimeWindow,
    TumblingEventTimeWindows,
    WatermarkStrategy,
    count,
)
from onceflow.core.errors import BadRecord, ConfigError

LEFT = CountingSource(1_500, splits_count=3, batch_rows=20)
RIGHT = CountingSource(1_500, splits_count=2, batch_rows=20)
TIME = WatermarkStrategy("id")
"""A record's time is its id, in milliseconds."""
LOWER_S, UPPER_S = -0.25, 0.1


WINDOW_MS = 250
IDS = (("id_left", pa.int64()), ("id_right", pa.int64()))
SLOW = pytest.mark.slow
Pairs = Callable[[KeyedStream, KeyedStream], Stream]
Ids = tuple[int | None, int | None]


def interval(orders: KeyedStream, payments: KeyedStream) -> Stream:
    return orders.interval_join(payments).between(LOWER_S, UPPER_S).merge(uid="pairs")


def until_column(orders: KeyedStream, payments: KeyedStream) -> Stream:
    joined = orders.interval_join(payments, how="full").between(LOWER_S, "amount")
    return joined.merge("id_left", "id_right", "account", uid="pairs")


def in_column(left: int, right: int) -> bool:
    return right - left >= LOWER_S * 1000 and right <= amount_of(left)


def in_interval(left: int, right: int) -> bool:
    return LOWER_S * 1000 <= right - left <= UPPER_S * 1000


def anywhere(left: int, right: int) -> bool:
    return True


def regular(orders: KeyedStream, payments: KeyedStream) -> Stream:
    return orders.join(payments, how="full", ttl=(None, "1 h")).merge(uid="pairs")


def of_windows(orders: KeyedStream, payments: KeyedStream) -> Stream:
    windows = orders.connect(payments).window(TumblingEventTimeWindows(WINDOW_MS / 1000))
    return windows.join("full").merge(uid="pairs")


def in_one_window(left: int, right: int) -> bool:
    return left // WINDOW_MS == right // WINDOW_MS


class AllPairs(CoGroupFunction):
    """A full outer join of a window, by hand."""

    def output_schema(self, left: pa.Schema, right: pa.Schema) -> pa.Schema:
        return pa.schema([*IDS, ("account", pa.string())])

    def process(
        self, key: Any, window: TimeWindow, left: list[Record], right: list[Record]
    ) -> Iterator[Record]:
        for one, other in product(left or [{}], right or [{}]):
            yield {"id_left": one.get("id"), "id_right": other.get("id"), "account": key}


class AllPairsOfBatches(CoGroupBatchFunction):
    """The same for many windows at once."""

    def output_schema(self, left: pa.Schema, right: pa.Schema) -> pa.Schema:
        return pa.schema([*IDS, ("account", pa.string())])

    def process(self, windows: CoGroupBatch) -> pa.RecordBatch:
        left, right = (
            pa.table({"window": side.windows, "id": side.rows.column("id")})
            for side in (windows.left, windows.right)
        )
        pairs = left.join(
            right, "window", join_type="full outer", left_suffix="_left", right_suffix="_right"
        )
        account = windows.keys.column("account").take(pairs["window"].combine_chunks())
        (batch,) = pairs.append_column("account", account).combine_chunks().to_batches()
        return batch.select(["id_left", "id_right", "account"])


def of_window_batches(orders: KeyedStream, payments: KeyedStream) -> Stream:
    windows = orders.connect(payments).window(TumblingEventTimeWindows(WINDOW_MS / 1000))
    return windows.co_group_batches(AllPairsOfBatches(), uid="pairs")


def of_sessions(orders: KeyedStream, payments: KeyedStream) -> Stream:
    windows = orders.connect(payments).window(EventTimeSessionWindows(0.01))
    return windows.co_group(AllPairs(), uid="pairs")


def ids_of(row: Mapping[str, Any]) -> Ids:
    return row["id_left"], row["id_right"]


def takes_part(side: int, record: int) -> bool:
    """True if a source's record is in the stream. So some records of each side have no partner."""
    return record % LEFT.accounts % (3, 7)[side] > 0


def is_there(side: int, record: Record) -> bool:
    return takes_part(side, record["id"])


def expected(holds: Callable[[int, int], bool], *, full: bool) -> Counter[Ids]:
    """Return the ids of each pair of one account for which `holds`, and of those alone."""
    by_account: dict[int, tuple[list[int], list[int]]] = {}
    for side, source in enumerate((LEFT, RIGHT)):
        for one in range(source.records):
            if takes_part(side, one):
                by_account.setdefault(one % source.accounts, ([], []))[side].append(one)
    found: Counter[Ids] = Counter()
    for lefts, rights in by_account.values():
        pairs = [(left, other) for left in lefts for other in rights if holds(left, other)]
        found.update(pairs)
        if full:
            found.update((one, None) for one in set(lefts) - {one for one, _ in pairs})
            found.update((None, one) for one in set(rights) - {one for _, one in pairs})
    return found


def with_ts(stream: Stream, shift_ms: int) -> Stream:
    """Add a time to each record: its id plus `shift_ms`."""

    def timed(rows: pa.RecordBatch) -> pa.RecordBatch:
        return rows.append_column("ts", pc.add(rows["id"], shift_ms))

    return stream.map_batches(timed, schema=SCHEMA.append(pa.field("ts", pa.int64())))


def test_the_example_tells_each_paid_order_once(cluster: AnyCluster, tmp_path: Path) -> None:
    """Each order is paid 20 s later; no other payment of its account has its amount."""
    source = CountingSource(400, accounts=10)
    on_time, late = DirectorySink(str(tmp_path / "on time")), DirectorySink(str(tmp_path / "late"))
    pipeline = begin(cluster, tmp_path)
    orders = pipeline.read(source, uid="orders", watermarks=TIME)
    payments = pipeline.read(source, uid="payments", watermarks=TIME)
    made, too_late = paid(with_ts(orders, 0), with_ts(payments, 20_000))
    made.write(on_time, uid="on-time")
    too_late.write(late, uid="late")
    assert pipeline.run(60).state is JobState.FINISHED
    rows = on_time.rows()
    assert Counter(row["order_id"] for row in rows) == Counter(range(source.records))
    assert {(row["payment_id"] - row["order_id"], row["took_ms"]) for row in rows} == {(0, 20_000)}
    assert late.rows() == []


@pytest.mark.parametrize(
    ("backend", "unaligned", "pairs", "holds"),
    [
        pytest.param(
            HeapBackend(), False, interval, in_interval, id="interval", marks=pytest.mark.servers
        ),
        pytest.param(
            RocksDBBackend(),
            True,
            interval,
            in_interval,
            id="interval-rocksdb-unaligned",
            marks=pytest.mark.servers,
        ),
        pytest.param(RocksDBBackend(), True, regular, anywhere, id="regular-unaligned"),
        pytest.param(
            RocksDBBackend(),
            True,
            until_column,
            in_column,
            id="column-rocksdb-unaligned",
            marks=pytest.mark.servers,
        ),
        pytest.param(HeapBackend(), False, until_column, in_column, id="column", marks=SLOW),
        pytest.param(
            RocksDBBackend(),
            False,
            of_windows,
            in_one_window,
            id="windows",
            marks=pytest.mark.servers,
        ),
        pytest.param(
            RocksDBBackend(),
            False,
            of_window_batches,
            in_one_window,
            id="co-group-batches",
            marks=pytest.mark.servers,
        ),
        pytest.param(HeapBackend(), False, of_sessions, eq, id="co-group", marks=SLOW),
        pytest.param(HeapBackend(), False, regular, anywhere, id="regular", marks=SLOW),
        pytest.param(
            HeapBackend(), True, interval, in_interval, id="interval-heap-unaligned", marks=SLOW
        ),
    ],
)
@pytest.mark.only_proof
def test_each_pair_comes_once_through_kills_and_rescaling(
    cluster: AnyCluster,
    tmp_path: Path,
    backend: StateBackend,
    unaligned: bool,
    pairs: Pairs,
    holds: Callable[[int, int], bool],
) -> None:
    """Joins other than the interval join are full outer ones: what is alone comes once, too."""

    def make(parallelism: int) -> tuple[Pipeline, ScriptedSink]:
        pipeline = begin(
            cluster, tmp_path, backend=backend, parallelism=parallelism, unaligned=unaligned
        )
        # Where no rows need be in flight, the input goes on until the sink hurries.
        ends = "" if unaligned else str(tmp_path / "out" / "released")
        sides = [
            pipeline.read(replace(source, ends_with=ends), uid=uid, watermarks=TIME)
            .filter(partial(is_there, side))
            .key_by("account")
            for side, (source, uid) in enumerate(((LEFT, "orders"), (RIGHT, "payments")))
        ]
        sink = throttled_sink(tmp_path / "out", pause_s=0.1 if unaligned else 0)
        pairs(*sides).write(sink, uid="out")
        return pipeline, sink

    rows = killed_and_rescaled(make, unaligned=unaligned)
    found = Counter(map(ids_of, rows))
    assert found == expected(holds, full=pairs is not interval)
    for row in rows:
        assert row["account"] in {
            str(one % LEFT.accounts) for one in ids_of(row) if one is not None
        }


def test_event_time_goes_on_behind_a_join_of_which_one_side_is_idle(
    cluster: AnyCluster, tmp_path: Path
) -> None:
    """Payments end at 0.1 s without an end of input; windows of pairs at 0.3 s come out."""
    ends = str(tmp_path / "ends")
    left = CountingSource(1_000, accounts=10, ends_with=ends)
    right = CountingSource(100, accounts=10, ends_with=ends)
    sink = DirectorySink(str(tmp_path / "out"))
    pipeline = begin(cluster, tmp_path)
    orders = pipeline.read(left, uid="orders", watermarks=TIME)
    sparse = WatermarkStrategy("id", idle_after=0.3)
    payments = pipeline.read(right, uid="payments", watermarks=sparse)
    pairs = orders.key_by("account").interval_join(payments.key_by("account"))
    windows = pairs.between(-0.25, 0.25).merge(uid="pairs").key_by("account")
    counts = windows.window(TumblingEventTimeWindows(0.1), time="id_left").aggregate(
        n=count(), uid="counts"
    )
    counts.write(sink, uid="out")
    job = pipeline.start()

    def window_came() -> bool:
        return any(round(row["window_start"].timestamp() * 1000) == 300 for row in sink.rows())

    await_status(job, lambda s: s.checkpoints_completed > 0 and window_came())
    Path(ends).touch()
    assert job.wait(60).state is JobState.FINISHED


def test_a_null_key_is_named(cluster: AnyCluster, tmp_path: Path) -> None:
    pipeline = begin(cluster, tmp_path, restart=False)
    orders = pipeline.read(CountingSource(50), uid="orders", watermarks=TIME)
    nobody = orders.map(lambda r: r | {"account": None} if r["id"] == 7 else r, uid="nobody")
    pairs = nobody.key_by("account").interval_join(orders.key_by("account"))
    pairs.between(0, 1).merge(uid="pairs").write(DirectorySink(str(tmp_path / "out")), uid="out")
    with pytest.raises(BadRecord, match=r"a record has account = null.*'id': 7"):
        pipeline.run(60)


class PaidOrderOrNone(PaidOrder):
    def process_left(self, left: Record) -> None:
        return None


def test_joins_that_cannot_be_are_refused_by_name(cluster: AnyCluster, tmp_path: Path) -> None:
    pipeline, other = begin(cluster, tmp_path), begin(cluster, tmp_path)
    source = CountingSource(10)
    left = pipeline.read(source, uid="left", watermarks=TIME).key_by("account")
    right = pipeline.read(source, uid="right", watermarks=TIME).key_by("account")
    timeless = pipeline.read(source, uid="timeless").key_by("account")
    with pytest.raises(ConfigError, match=r"interval_join\(\) of streams of two pipelines"):
        left.interval_join(other.read(source, uid="x", watermarks=TIME).key_by("account"))
    with pytest.raises(ConfigError, match=r"interval_join\(\).*account string.*id int64"):
        left.interval_join(pipeline.read(source, uid="ids", watermarks=TIME).key_by("id"))
    with pytest.raises(ConfigError, match=r"interval_join.*sources need watermarks"):
        left.interval_join(timeless)
    with pytest.raises(ConfigError, match=r"interval_join\(right_time='at'\): no such column"):
        left.interval_join(right, right_time="at")
    with pytest.raises(ConfigError, match=r"interval_join\(left_time='account'\).*string"):
        left.interval_join(right, left_time="account")
    with pytest.raises(ConfigError, match="late_left='late': late records keep their columns"):
        left.interval_join(right, late_left=OutputTag("late", "id BIGINT"))
    with pytest.raises(ConfigError, match="how='outer': choose one of inner, left, right, full"):
        left.interval_join(right, how="outer")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"join\(ttl=0\) must be 1 ms or more"):
        left.join(right, ttl=("1 d", 0))
    with pytest.raises(ConfigError, match=r"PaidOrderOrNone has no process_right\(\)"):
        left.join(right, ttl=1, how="full").process(PaidOrderOrNone(), uid="x")
    join = left.interval_join(right, late_right=OutputTag("late", SCHEMA))
    for lower, upper, options in [
        (1, 0, {}),
        ("10 ms", "-10 ms", {}),
        (1, 1, {"upper_inclusive": False}),
        (1, 1.001, {"lower_inclusive": False, "upper_inclusive": False}),
    ]:
        with pytest.raises(ConfigError, match="no time is between"):
            join.between(lower, upper, **options)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"lower='5 parsecs' is not a duration"):
        join.between("-5 parsecs", 0)
    with pytest.raises(ConfigError, match="two columns would be named 'id'"):
        join.between(0, 0).merge(uid="pairs", suffixes=("", ""))
    made = join.between("-1 min", 0, upper_inclusive=False).merge(uid="pairs")
    assert made.schema.names == [
        *("id_left", "account", "amount_left"),
        *("id_right", "amount_right"),
    ]
    assert made.side_output(OutputTag("late", SCHEMA)).schema == SCHEMA
    tumbling = left.connect(right).window(TumblingEventTimeWindows(1)).join("left")
    assert tumbling.merge(uid="windows").schema.names == made.schema.names
    with pytest.raises(ConfigError, match=r"window\(…\) in event time: its sources need"):
        left.connect(timeless).window(TumblingEventTimeWindows(1))
    with pytest.raises(ConfigError, match=r"window\(right_time='at'\): no such column"):
        left.connect(right).window(TumblingEventTimeWindows(1), right_time="at")
    with pytest.raises(ConfigError, match="late_right='late': late records keep their columns"):
        left.connect(right).window(
            TumblingEventTimeWindows(1), late_right=OutputTag("late", "id BIGINT")
        )
    full = left.join(right, ttl=None, how="full").merge(uid="full")
    assert [field.nullable for field in full.schema] == [True] * 5
