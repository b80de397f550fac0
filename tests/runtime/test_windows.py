"""Windows come out once and whole, whatever happens to slots and however many there are."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.runtime.test_recovery import BACKENDS
from tests.runtime.test_timers import await_rows
from tests.spark_formats.state_rows import state
from tests.support.clusters import AnyCluster
from tests.support.counting_source import SCHEMA, CountingReader, CountingSource, amount_of
from tests.support.directory_sink import DirectorySink
from tests.support.ledger import SETTINGS

from onceflow import (
    Checkpointing,
    EventTimeSessionWindows,
    FixedDelay,
    HeapBackend,
    JobState,
    OutputTag,
    Pipeline,
    ProcessWindowFunction,
    Record,
    RocksDBBackend,
    SlidingEventTimeWindows,
    StateBackend,
    TimeWindow,
    TumblingEventTimeWindows,
    TumblingProcessingTimeWindows,
    WatermarkStrategy,
    count,
    sum_,
)
from onceflow.core.arrow.schema_text import schema_of
from onceflow.core.errors import ConfigError
from onceflow.core.plan.windows import PaneAssigner, WindowAssigner, pane_windows
from onceflow.core.spi import EndOfInput, ReaderContext, SourceReader, Split


def windowed(
    cluster: AnyCluster,
    directory: Path,
    source: CountingSource,
    windows: PaneAssigner,
    *,
    backend: StateBackend | None = None,
    parallelism: int = 2,
    watermarks: WatermarkStrategy | None = None,
    unaligned: bool = False,
) -> tuple[Pipeline, DirectorySink]:
    sink = DirectorySink(str(directory / "out"))
    pipeline = Pipeline(
        cluster,
        name="windows",
        parallelism=parallelism,
        checkpointing=Checkpointing(
            storage=str(directory / "checkpoints"), interval=0.1, unaligned=unaligned
        ),
        state_backend=backend,
        restart=FixedDelay(attempts=20, delay_s=0.01),
        settings=SETTINGS,
    )
    records = pipeline.read(source, uid="records", watermarks=watermarks)
    sums = records.key_by("account").window(windows)
    sums.aggregate(total=sum_("amount"), n=count(), uid="sums").write(sink, uid="out")
    return pipeline, sink


def expected(
    source: CountingSource, size: int, slide: int, offset: int = 0
) -> dict[tuple[str, int], tuple[int, int]]:
    """By account and start, total and count; a record's time is its id, in milliseconds."""
    found: dict[tuple[str, int], tuple[int, int]] = defaultdict(lambda: (0, 0))
    for record in range(source.records):
        for start in range(record - (record - offset) % slide, record - size, -slide):
            key = str(record % source.accounts), start
            total, n = found[key]
            found[key] = total + amount_of(record), n + 1
    return dict(found)


def assert_windows(
    sink: DirectorySink, source: CountingSource, size: int, slide: int, offset: int = 0
) -> None:
    rows = sink.rows()
    keys = [(row["account"], round(row["window_start"].timestamp() * 1000)) for row in rows]
    assert [key for key, times in Counter(keys).items() if times > 1] == []
    found = {key: (row["total"], row["n"]) for key, row in zip(keys, rows, strict=True)}
    assert found == expected(source, size, slide, offset)
    lengths = {(row["window_end"] - row["window_start"]).total_seconds() for row in rows}
    assert lengths == {size / 1000}
    assert sink.prepared() == []


STRATEGY = WatermarkStrategy("id", max_out_of_orderness=0.002)


@pytest.mark.parametrize(
    ("windows", "size", "slide"),
    [
        (TumblingEventTimeWindows("500 ms", offset="-200 ms"), 500, 500),
        (SlidingEventTimeWindows(0.6, 0.3, offset=-0.2), 600, 300),
    ],
)
def test_windows_with_a_negative_offset_begin_before_whole_multiples_of_their_size(
    cluster: AnyCluster, tmp_path: Path, windows: PaneAssigner, size: int, slide: int
) -> None:
    source = CountingSource(3_000, accounts=4)
    pipeline, sink = windowed(cluster, tmp_path, source, windows, watermarks=STRATEGY)
    assert pipeline.run(60).state is JobState.FINISHED
    assert_windows(sink, source, size, slide, -200)


PAST = pa.schema([*SCHEMA, ("at", pa.timestamp("us", "UTC"))])


@dataclass(frozen=True)
class PastSource(CountingSource):
    """Records of 1969, each 10 microseconds after the one before it, in one split."""

    splits_count: int = 1

    @property
    def schema(self) -> pa.Schema:
        return PAST

    def reader(self, splits: Sequence[Split], context: ReaderContext) -> SourceReader:
        return _PastReader(self, splits)


class _PastReader(CountingReader):
    def poll(self, timeout_s: float) -> pa.RecordBatch | EndOfInput | None:
        rows = super().poll(timeout_s)
        if not isinstance(rows, pa.RecordBatch):
            return rows
        at = rows.column("id").to_numpy() * 10 - 10**12 - 5
        columns = [*rows.columns, pa.array(at).view(PAST.field("at").type)]
        return pa.record_batch(columns, schema=PAST)


def test_records_in_order_from_before_1970_are_all_in_their_windows(
    cluster: AnyCluster, tmp_path: Path
) -> None:
    """A batch ends within a millisecond, as which its watermark counts for the next one, too."""
    source = PastSource(2_000, accounts=4)
    windows = TumblingEventTimeWindows(0.001)
    at = WatermarkStrategy("at")
    pipeline, sink = windowed(cluster, tmp_path, source, windows, watermarks=at)
    status = pipeline.run(60)
    assert status.state is JobState.FINISHED
    rows = sink.rows()
    assert sum(row["n"] for row in rows) == source.records
    assert len({(row["account"], row["window_start"]) for row in rows}) == len(rows)
    assert sum(row["total"] for row in rows) == sum(map(amount_of, range(source.records)))


ZONED = pa.timestamp("us", "America/New_York")
NESTED_ZONE = pa.struct([("all", pa.list_(ZONED)), ("named", pa.map_(pa.string(), ZONED))])
LOCAL = "id BIGINT, day STRING, nested STRING"


def with_local_times(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Add evenings in New York, when it is the next day in UTC."""
    at = pa.array(rows.column("id").to_numpy() * 10**6 + 26 * 3600 * 10**6).view(ZONED)
    nested = [{"all": [one, None], "named": [("a", one)]} for one in at.to_pylist()]
    columns = [*rows.columns, at, pa.array(nested, NESTED_ZONE)]
    return pa.record_batch(columns, names=[*rows.schema.names, "at", "nested"])


def local_times(record: Record) -> Record:
    nested = record["nested"]
    inside = [nested["all"][0], nested["named"][0][1]]
    return {
        "id": record["id"],
        "day": str(record["at"].date()),
        "nested": " ".join(str(one.date()) for one in inside),
    }


class LocalTimes(ProcessWindowFunction):
    def output_schema(self, input_schema: pa.Schema) -> pa.Schema:
        return schema_of(LOCAL)

    def process(self, key: Any, window: TimeWindow, records: list[Record]) -> list[Record]:
        return [local_times(record) for record in records]


class Listing(ProcessWindowFunction):
    def output_schema(self, input_schema: pa.Schema) -> pa.Schema:
        return pa.schema([("ids", pa.list_(pa.int64()))])

    def process(self, key: Any, window: TimeWindow, records: list[Record]) -> Record:
        return {"ids": [record["id"] for record in records]}


@pytest.mark.parametrize(
    "windows",
    [TumblingEventTimeWindows(0.1), EventTimeSessionWindows(0.1)],
    ids=["tumbling", "sessions"],
)
def test_a_function_of_windows_sees_times_in_the_zone_of_their_column(
    cluster: AnyCluster, tmp_path: Path, windows: WindowAssigner
) -> None:
    """As a function of single records does, beside it."""
    source = CountingSource(300, accounts=4)
    sinks = [DirectorySink(str(tmp_path / name)) for name in ("windows", "records")]
    pipeline = Pipeline(
        cluster,
        name="zones",
        parallelism=2,
        checkpointing=Checkpointing(storage=str(tmp_path / "checkpoints"), interval=0.1),
        settings=SETTINGS,
    )
    fields = [*SCHEMA, ("at", ZONED), ("nested", NESTED_ZONE)]
    records = pipeline.read(source, uid="records", watermarks=WatermarkStrategy("id"))
    timed = records.map_batches(with_local_times, schema=pa.schema(fields))
    in_windows = timed.key_by("account").window(windows).process(LocalTimes(), uid="windows")
    in_windows.write(sinks[0], uid="out")
    timed.map(local_times, schema=LOCAL).write(sinks[1], uid="control")
    assert pipeline.run(60).state is JobState.FINISHED
    found, control = (sorted(sink.rows(), key=lambda row: row["id"]) for sink in sinks)
    assert found == control
    assert {(row["day"], row["nested"]) for row in found} == {
        ("1970-01-01", "1970-01-01 1970-01-01")
    }


def test_days_of_china_begin_at_flinks_offset_of_eight_hours_less() -> None:
    """`TumblingEventTimeWindows.of(Time.days(1), Time.hours(-8))` is Flink's own example."""
    panes = pane_windows(TumblingEventTimeWindows("1 d", "-8 h"), 0)
    midnight_in_shanghai = datetime(2026, 5, 4, tzinfo=timezone(timedelta(hours=8)))
    start_ms = round(midnight_in_shanghai.timestamp() * 1000)
    assert (start_ms - panes.offset_ms) % panes.slide_ms == 0
    assert panes == pane_windows(TumblingEventTimeWindows("1 d", -8 * 3600), 0)
    with pytest.raises(ConfigError, match="offset='8 ours' is not a duration"):
        TumblingEventTimeWindows("1 d", "-8 ours")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("windows", "size", "slide", "unaligned"),
    [
        pytest.param(TumblingEventTimeWindows(0.5), 500, 500, False, id="tumbling"),
        pytest.param(SlidingEventTimeWindows(0.6, 0.2), 600, 200, True, id="sliding, unaligned"),
    ],
)
@pytest.mark.only_proof
def test_windows_come_out_once_through_kills_and_rescaling(
    cluster: AnyCluster,
    tmp_path: Path,
    backend: StateBackend,
    windows: PaneAssigner,
    size: int,
    slide: int,
    unaligned: bool,
) -> None:
    source = CountingSource(12_000, splits_count=3, pause_s=0.01, ends_with=str(tmp_path / "ends"))
    for parallelism in (2, 3):
        pipeline, sink = windowed(
            cluster,
            tmp_path,
            source,
            windows,
            backend=backend,
            parallelism=parallelism,
            watermarks=STRATEGY,
            unaligned=unaligned,
        )
        job = pipeline.start()
        job.wait_for(checkpoints=job.status().checkpoints_completed + 2)
        os.kill(job.status().slots[0].pid, signal.SIGKILL)
        if parallelism == 2:
            await_rows(sink, 100, 60)
            assert job.stop(60).state is JobState.STOPPED
        else:
            job.wait_for(checkpoints=job.status().checkpoints_completed + 2)
            (tmp_path / "ends").touch()
            assert job.wait(60).state is JobState.FINISHED
    assert_windows(sink, source, size, slide)


def test_a_savepoint_moves_open_windows_from_rocksdb_to_the_heap(
    cluster: AnyCluster, tmp_path: Path
) -> None:
    source = CountingSource(4_000, splits_count=3, pause_s=0.005, ends_with=str(tmp_path / "ends"))
    windows = TumblingEventTimeWindows(0.5)
    pipeline, sink = windowed(
        cluster, tmp_path, source, windows, backend=RocksDBBackend(), watermarks=STRATEGY
    )
    job = pipeline.start()
    job.wait_for(checkpoints=1)
    await_rows(sink, 100, 60)
    status = job.stop(60, savepoint=True)
    assert status.state is JobState.STOPPED
    pipeline, sink = windowed(
        cluster, tmp_path, source, windows, backend=HeapBackend(), watermarks=STRATEGY
    )
    (tmp_path / "ends").touch()
    job = pipeline.start(from_savepoint=status.savepoints[-1].place)
    assert job.wait(60).state is JobState.FINISHED
    assert_windows(sink, source, 500, 500)


def test_a_savepoint_shows_open_sessions_and_moves_them_from_rocksdb_to_the_heap(
    cluster: AnyCluster, tmp_path: Path
) -> None:
    """Bursts of 500 ms after as long a pause; in each an account has five records, 100 ms apart."""
    source = CountingSource(4_000, splits_count=3, ends_with=str(tmp_path / "ends"))
    sink = DirectorySink(str(tmp_path / "out"))
    expected: dict[tuple[str, int], tuple[int, int]] = {}
    for first in range(500, source.records, 1000):
        for account in range(source.accounts):
            ids = range(first + account, first + 500, source.accounts)
            expected[str(account), ids[0]] = sum(map(amount_of, ids)), len(ids)

    def sessions(backend: StateBackend, parallelism: int) -> Pipeline:
        pipeline = Pipeline(
            cluster,
            name="sessions",
            parallelism=parallelism,
            checkpointing=Checkpointing(storage=str(tmp_path / "checkpoints"), interval=0.1),
            state_backend=backend,
            settings=SETTINGS,
        )
        records = pipeline.read(source, uid="records", watermarks=STRATEGY)
        bursts = records.filter(lambda record: record["id"] % 1000 >= 500)
        cut = bursts.key_by("account").window(EventTimeSessionWindows(0.2))
        cut.aggregate(total=sum_("amount"), n=count(), uid="sums").write(sink, uid="out")
        return pipeline

    job = sessions(RocksDBBackend(), 2).start()
    job.wait_for(checkpoints=1)
    await_rows(sink, 300, 60)  # of three bursts; nothing comes after the fourth
    with pytest.raises(ConfigError, match=r"'onceflow.sessions-200' .* several rows a key"):
        job.look_up("sums", "7", state="onceflow.sessions-200")
    status = job.stop(60, savepoint=True)
    assert status.state is JobState.STOPPED
    place = status.savepoints[-1].place
    held = {
        (row["key"]["_2"], row["value"]["onceflow.start"]): (
            row["value"]["total"],
            row["value"]["n"],
        )
        for row in state(place, uid="sums", state="onceflow.sessions-200").to_pylist()
    }
    assert held == {key: totals for key, totals in expected.items() if key[1] >= 3500}

    (tmp_path / "ends").touch()
    job = sessions(HeapBackend(), 3).start(from_savepoint=place)
    assert job.wait(60).state is JobState.FINISHED
    rows = sink.rows()
    found = {
        (row["account"], round(row["window_start"].timestamp() * 1000)): (row["total"], row["n"])
        for row in rows
    }
    assert found == expected
    assert len(rows) == len(found), "a session came out twice"


def test_windows_in_processing_time_hold_each_record_once(
    cluster: AnyCluster, tmp_path: Path
) -> None:
    source = CountingSource(2_000, accounts=10, ends_with=str(tmp_path / "ends"))
    windows = TumblingProcessingTimeWindows(0.2)
    pipeline, sink = windowed(cluster, tmp_path, source, windows)
    job = pipeline.start()
    job.wait_for(checkpoints=1)
    deadline = time.monotonic() + 90
    while (held := sum(row["n"] for row in sink.rows())) < source.records:
        assert time.monotonic() < deadline, (
            f"{held} of {source.records} records are in windows: {job.status()}"
        )
        time.sleep(0.05)
    (tmp_path / "ends").touch()
    assert job.wait(60).state is JobState.FINISHED
    totals: Counter[str] = Counter()
    for row in sink.rows():
        totals[row["account"]] += row["n"]
    assert totals == dict.fromkeys(map(str, range(10)), 200)


def test_windows_in_processing_time_are_emitted_at_the_end_of_the_input(
    cluster: AnyCluster, tmp_path: Path
) -> None:
    source = CountingSource(200, accounts=10)
    year = TumblingProcessingTimeWindows("365 d")
    pipeline, sink = windowed(cluster, tmp_path, source, year)
    records = pipeline.read(source, uid="more")
    lists, groups = DirectorySink(str(tmp_path / "lists")), DirectorySink(str(tmp_path / "groups"))
    listed = records.key_by("account").window(year).process(Listing(), uid="lists")
    listed.write(lists, uid="lists-out")
    pairs = records.connect(records).key_by("id", "id").window(year).join()
    pairs.merge(uid="pairs").write(groups, uid="pairs-out")
    assert pipeline.start().wait(60).state is JobState.FINISHED
    assert {row["account"]: row["n"] for row in sink.rows()} == dict.fromkeys(
        map(str, range(10)), 20
    )
    assert sorted(number for row in lists.rows() for number in row["ids"]) == [*range(200)]
    assert sorted(row["id"] for row in groups.rows()) == [*range(200)]


def test_mistakes_with_windows_are_refused_before_the_start(
    cluster: AnyCluster, tmp_path: Path
) -> None:
    pipeline = Pipeline(
        cluster, name="w", checkpointing=Checkpointing(storage=str(tmp_path / "checkpoints"))
    )
    plain = pipeline.read(CountingSource(1), uid="plain").key_by("account")
    timed = pipeline.read(CountingSource(1), uid="timed", watermarks=STRATEGY)
    minute = TumblingEventTimeWindows("1 min")
    with pytest.raises(ConfigError, match="need watermarks"):
        plain.window(minute)
    with pytest.raises(ConfigError, match=r"window\(time='at'\): no such column"):
        timed.key_by("account").window(minute, time="at")
    with pytest.raises(ConfigError, match=r"window\(time='account'\): the column is string"):
        timed.key_by("account").window(minute, time="account")
    with pytest.raises(ConfigError, match="omit time="):
        plain.window(TumblingProcessingTimeWindows(1), allowed_lateness=1)
    with pytest.raises(ConfigError, match="needs at least one"):
        timed.key_by("account").window(minute).aggregate(uid="w")
    with pytest.raises(ConfigError, match="two columns 'window_end'"):
        timed.key_by("account").window(minute).aggregate(window_end=count(), uid="w")
    with pytest.raises(ConfigError, match="slide=2 is more than size=1"):
        SlidingEventTimeWindows(1, 2)
    with pytest.raises(ConfigError, match="size=0 must be 1 ms or more"):
        TumblingEventTimeWindows(0)


@pytest.mark.parametrize(
    "windows",
    [
        pytest.param(TumblingEventTimeWindows(0.1), id="tumbling"),
        pytest.param(EventTimeSessionWindows(0.1), id="sessions"),
    ],
)
def test_every_record_is_in_a_window_or_comes_late_and_never_both(
    cluster: AnyCluster, tmp_path: Path, windows: WindowAssigner
) -> None:
    """Most are late: event time follows the ids, and a record's own time is its amount."""
    source = CountingSource(4_000, pause_s=0.01, ends_with=str(tmp_path / "killed"))
    on_time, late = DirectorySink(str(tmp_path / "on time")), DirectorySink(str(tmp_path / "late"))
    pipeline = Pipeline(
        cluster,
        name="late",
        parallelism=2,
        checkpointing=Checkpointing(storage=str(tmp_path / "checkpoints"), interval=0.1),
        restart=FixedDelay(attempts=20, delay_s=0.01),
        settings=SETTINGS,
    )
    tag = OutputTag("late", source.schema)
    records = pipeline.read(source, uid="records", watermarks=WatermarkStrategy("id"))
    cut = records.key_by("account").window(windows, time="amount", late=tag)
    counts = cut.aggregate(n=count(), uid="counts")
    counts.write(on_time, uid="on-time")
    counts.side_output(tag).write(late, uid="late")
    job = pipeline.start()
    job.wait_for(checkpoints=2)
    os.kill(job.status().slots[0].pid, signal.SIGKILL)
    (tmp_path / "killed").touch()
    assert job.wait(120).restores >= 1
    ids = [row["id"] for row in late.rows()]
    assert len(set(ids)) == len(ids) > 0
    assert sum(row["n"] for row in on_time.rows()) + len(ids) == source.records
