"""Windows without a key, and results of windows by their window, in whole jobs with kills."""

from __future__ import annotations

import os
import signal
from collections import Counter, defaultdict
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from tests.runtime.test_recovery import BACKENDS
from tests.support.clusters import AnyCluster
from tests.support.counting_source import CountingSource, amount_of
from tests.support.directory_sink import DirectorySink
from tests.support.held_up import await_checkpoint
from tests.support.ledger import SETTINGS

from onceflow import (
    Checkpointing,
    EventTimeSessionWindows,
    FixedDelay,
    JobState,
    OutputTag,
    Pipeline,
    SlidingEventTimeWindows,
    StateBackend,
    Stream,
    TumblingEventTimeWindows,
    TumblingProcessingTimeWindows,
    WatermarkStrategy,
    count,
    count_distinct,
    max_,
    sum_,
)
from onceflow.core.errors import ConfigError
from onceflow.core.plan.windows import WindowAssigner

STRATEGY = WatermarkStrategy("id", max_out_of_orderness=0.05)
SLIDING = SlidingEventTimeWindows(0.6, 0.2)


def reading(
    cluster: AnyCluster,
    directory: Path,
    source: CountingSource,
    *,
    backend: StateBackend | None = None,
    parallelism: int = 2,
    unaligned: bool = False,
) -> tuple[Pipeline, Stream]:
    pipeline = Pipeline(
        cluster,
        name="all",
        parallelism=parallelism,
        checkpointing=Checkpointing(
            storage=str(directory / "checkpoints"), interval=0.1, unaligned=unaligned
        ),
        state_backend=backend,
        restart=FixedDelay(attempts=20, delay_s=0.01),
        settings=SETTINGS,
    )
    return pipeline, pipeline.read(source, uid="records", watermarks=STRATEGY)


def starts_of(record: int, size: int, slide: int) -> range:
    return range(record - record % slide, record - size, -slide)


def expected_all(source: CountingSource, size: int, slide: int) -> dict[int, tuple[int, int]]:
    """Return by the start of each window the total and the number of its records."""
    totals, numbers = Counter[int](), Counter[int]()
    for record in range(source.records):
        for start in starts_of(record, size, slide):
            totals[start] += amount_of(record)
            numbers[start] += 1
    return {start: (totals[start], numbers[start]) for start in numbers}


def expected_most(source: CountingSource, size: int, slide: int) -> dict[int, dict[str, int]]:
    """Return by the start of each window the accounts with the greatest total, and the total."""
    totals: dict[int, Counter[str]] = defaultdict(Counter)
    for record in range(source.records):
        for start in starts_of(record, size, slide):
            totals[start][str(record % source.accounts)] += amount_of(record)
    return {
        start: {account: total for account, total in of.items() if total == max(of.values())}
        for start, of in totals.items()
    }


def start_ms(row: dict[str, Any], name: str = "window_start") -> int:
    moment: datetime = row[name]
    return round(moment.timestamp() * 1000)


def assert_all(sink: DirectorySink, expected: dict[int, tuple[int, int]]) -> None:
    rows = sink.rows()
    found = {start_ms(row): (row["total"], row["n"]) for row in rows}
    assert len(found) == len(rows)
    assert found == expected


@pytest.mark.parametrize("backend", BACKENDS, ids=["heap", "rocksdb"])
def test_windows_without_a_key_count_each_record_once_through_kills_and_rescaling(
    cluster: AnyCluster, tmp_path: Path, backend: StateBackend
) -> None:
    source = CountingSource(6_000, splits_count=3, pause_s=0.002, ends_with=str(tmp_path / "ends"))

    def begin(parallelism: int) -> tuple[Pipeline, DirectorySink]:
        sink = DirectorySink(str(tmp_path / "out"))
        pipeline, records = reading(
            cluster, tmp_path, source, backend=backend, parallelism=parallelism, unaligned=True
        )
        windows = records.window_all(SLIDING)
        windows.aggregate(total=sum_("amount"), n=count(), uid="sums").write(sink, uid="out")
        return pipeline, sink

    pipeline, _ = begin(2)
    job = pipeline.start()
    await_checkpoint(job)
    os.kill(job.status().slots[0].pid, signal.SIGKILL)
    job.wait_for(checkpoints=job.status().checkpoints_completed + 2)
    assert job.stop(60).state is JobState.STOPPED
    pipeline, sink = begin(3)
    job = pipeline.start()
    await_checkpoint(job)
    (tmp_path / "ends").touch()
    assert job.wait(60).state is JobState.FINISHED
    assert_all(sink, expected_all(source, 600, 200))


@pytest.mark.parametrize("backend", BACKENDS, ids=["heap", "rocksdb"])
def test_the_keys_with_the_greatest_result_of_each_window_survive_kills(
    cluster: AnyCluster, tmp_path: Path, backend: StateBackend
) -> None:
    source = CountingSource(6_000, accounts=7, pause_s=0.002, ends_with=str(tmp_path / "ends"))
    sink = DirectorySink(str(tmp_path / "out"))
    pipeline, records = reading(cluster, tmp_path, source, backend=backend)
    totals = records.key_by("account").window(SLIDING).aggregate(total=sum_("amount"), uid="totals")
    most = totals.per_window().aggregate(most=max_("total"), uid="most")
    both = totals.connect(most).key_by("total", "most").per_window()
    both.join().merge(uid="both").write(sink, uid="out")
    job = pipeline.start()
    await_checkpoint(job)
    os.kill(job.status().slots[1].pid, signal.SIGKILL)
    job.wait_for(checkpoints=job.status().checkpoints_completed + 2)
    (tmp_path / "ends").touch()
    assert job.wait(60).state is JobState.FINISHED
    found: dict[int, dict[str, int]] = defaultdict(dict)
    for row in sink.rows():
        assert row["account"] not in found[start_ms(row)]
        assert row["total"] == row["most"]
        assert start_ms(row, "window_end") == start_ms(row) + 600
        found[start_ms(row)][row["account"]] = row["most"]
    assert found == expected_most(source, 600, 200)


def test_sessions_and_late_records_without_a_key(cluster: AnyCluster, tmp_path: Path) -> None:
    source = CountingSource(1_000, batch_rows=10)
    pipeline, records = reading(cluster, tmp_path, source)
    # Record 950 belongs to the first session, which has ended long before.
    one_late = records.map(lambda r: r | {"id": 5} if r["id"] == 950 else r)
    spaced = one_late.filter(lambda record: record["id"] % 500 < 300)
    sessions, late = DirectorySink(str(tmp_path / "out")), DirectorySink(str(tmp_path / "late"))
    tag = OutputTag("late", records.schema)
    windows = spaced.window_all(EventTimeSessionWindows(0.1), late=tag, names=("start", "end"))
    distinct = count_distinct("account", where="account < '5'")
    made = windows.aggregate(total=sum_("amount"), n=count(), distinct=distinct, uid="sessions")
    made.write(sessions, uid="out")
    made.side_output(tag).write(late, uid="late-out")
    pipeline.start().wait(60)
    rows = sorted(sessions.rows(), key=lambda row: row["start"])
    assert [(start_ms(row, "start"), start_ms(row, "end")) for row in rows] == [
        (0, 399), (500, 899),
    ]  # fmt: skip
    assert [row["n"] for row in rows] == [300, 300]
    of_digits = sum(str(account) < "5" for account in range(100))
    assert [row["distinct"] for row in rows] == [of_digits, of_digits]
    assert rows[0]["total"] == sum(amount_of(record) for record in range(300))
    assert [(row["id"], row["amount"]) for row in late.rows()] == [(5, amount_of(950))]


def test_results_of_windows_are_grouped_again_by_sessions_and_by_another_key(
    cluster: AnyCluster, tmp_path: Path
) -> None:
    source = CountingSource(1_000, accounts=5)
    sink = DirectorySink(str(tmp_path / "out"))
    pipeline, records = reading(cluster, tmp_path, source)
    counts = records.key_by("account").window(TumblingEventTimeWindows(0.1), names=("a", "b"))
    of_accounts = counts.aggregate(n=count(), uid="counts")
    again = of_accounts.key_by("n").per_window(names=("a", "b"))
    again.aggregate(accounts=count(), uid="again").write(sink, uid="out")
    pipeline.start().wait(60)
    rows = sink.rows()
    found = sorted(
        (row["n"], start_ms(row, "a"), start_ms(row, "b"), row["accounts"]) for row in rows
    )
    assert found == [(20, start, start + 100, 5) for start in range(0, 1_000, 100)]


@pytest.mark.parametrize("windows", [TumblingEventTimeWindows(0.1), EventTimeSessionWindows(0.001)])
def test_semi_and_anti_joins_emit_each_left_record_at_most_once(
    cluster: AnyCluster, tmp_path: Path, windows: WindowAssigner
) -> None:
    source = CountingSource(600, accounts=4)
    with_partner, without = (DirectorySink(str(tmp_path / name)) for name in ("with", "without"))
    pipeline, records = reading(cluster, tmp_path, source)
    # Each account of 100 to 199 ms has many records to the right.
    right = records.filter(lambda record: 100 <= record["id"] < 200 and record["account"] < "2")
    joined = records.connect(right).key_by("account", "account").window(windows)
    joined.semi_join(uid="semi").write(with_partner, uid="with-out")
    joined.anti_join(uid="anti").write(without, uid="without-out")
    pipeline.start().wait(60)
    chosen = [n for n in range(600) if 100 <= n < 200 and str(n % 4) < "2"]
    assert sorted(row["id"] for row in with_partner.rows()) == chosen
    assert sorted(row["id"] for row in without.rows()) == sorted(set(range(600)) - set(chosen))
    assert with_partner.rows()[0].keys() == set(records.schema.names)


def test_a_timestamp_is_the_key_of_windows(cluster: AnyCluster, tmp_path: Path) -> None:
    source = CountingSource(1_000, accounts=5)
    sink = DirectorySink(str(tmp_path / "out"))
    pipeline, records = reading(cluster, tmp_path, source)
    counts = records.key_by("account").window(TumblingEventTimeWindows(0.1))
    of_accounts = counts.aggregate(n=count(), uid="counts")
    keyed = of_accounts.key_by("window_start")
    later = keyed.window(TumblingEventTimeWindows(0.5), time="window_end", names=("a", "b"))
    later.aggregate(n=sum_("n"), uid="again").write(sink, uid="out")
    pipeline.start().wait(60)
    assert sorted((start_ms(row), row["n"]) for row in sink.rows()) == [
        (start, 100) for start in range(0, 1_000, 100)
    ]


def test_results_that_may_change_are_not_grouped_by_their_window(
    cluster: AnyCluster, tmp_path: Path
) -> None:
    _, records = reading(cluster, tmp_path, CountingSource(1))
    keyed = records.key_by("account")
    late = keyed.window(SLIDING, allowed_lateness=1).aggregate(n=count(), uid="late")
    with pytest.raises(ConfigError, match="have an allowed lateness"):
        late.per_window()
    clock = keyed.window(TumblingProcessingTimeWindows(1)).aggregate(n=count(), uid="clock")
    with pytest.raises(ConfigError, match="are in processing time"):
        clock.key_by("account").per_window()
    early = keyed.window(SLIDING, early_interval=1).aggregate(n=count(), uid="early")
    with pytest.raises(ConfigError, match="have early results"):
        early.per_window()
    for verb in ("semi_join", "anti_join"):
        both = keyed.connect(keyed).window(SLIDING, allowed_lateness="20 ms")
        with pytest.raises(ConfigError, match=rf"{verb}\(\) .*lateness of 20 ms: .*a second time"):
            getattr(both, verb)(uid=verb)
    with pytest.raises(ConfigError, match=r"no timestamp 'window_start'; there are id"):
        records.per_window()
    with pytest.raises(ConfigError, match="start and the end"):
        records.window_all(SLIDING, names=("a",))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("windows", "options", "words"),
    [
        (EventTimeSessionWindows(1), {"early_interval": 1}, "sessions have no early results"),
        (SLIDING, {"early_records": 2}, "early_records= is not for sliding windows"),
        (TumblingEventTimeWindows(1), {"early_records": 0}, "early_records=0: give 1 or more"),
        (SLIDING, {"early_interval": 0}, "early_interval=0 must be 1 ms or more"),
    ],
    ids=["sessions", "sliding", "records", "interval"],
)
def test_early_results_that_windows_cannot_have_are_refused_by_name(
    cluster: AnyCluster, tmp_path: Path, windows: Any, options: dict[str, Any], words: str
) -> None:
    _, records = reading(cluster, tmp_path, CountingSource(1))
    with pytest.raises(ConfigError, match=words):
        records.key_by("account").window(windows, **options)


def test_rows_that_come_from_no_window_are_not_grouped_by_it(
    cluster: AnyCluster, tmp_path: Path
) -> None:
    _, records = reading(cluster, tmp_path, CountingSource(1))
    windows = records.key_by("account").window(SLIDING).aggregate(n=count(), uid="windows")
    of_windows = windows.project("account", "window_start", "window_end")
    of_windows.per_window()
    plain = records.map_batches(lambda rows: rows, schema=of_windows.schema)
    for stream in (plain, of_windows.union(plain)):
        with pytest.raises(ConfigError, match=r"per_window\(\): the stream does not come from win"):
            stream.per_window()
    pair = of_windows.connect(plain).key_by("account", "account")
    with pytest.raises(ConfigError, match=r"per_window\(\): the stream does not come from windows"):
        pair.per_window()
