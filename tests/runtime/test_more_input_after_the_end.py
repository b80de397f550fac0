"""A bounded job that has ended goes on with more input: what came out at its end is over."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pytest
from tests.runtime.test_event_time_restored import (
    Counted,
    CountedOfBoth,
    Number,
    WatermarkOfEach,
    fired,
    is_even,
    is_odd,
    pass_event_time,
    started,
)
from tests.runtime.test_recovery import BACKENDS
from tests.support.clusters import AnyCluster
from tests.support.directory_sink import DirectorySink
from tests.support.scripted_source import ScriptedSource

from onceflow import (
    EventTimeSessionWindows,
    HeapBackend,
    JobState,
    JobStatus,
    SlidingEventTimeWindows,
    StateBackend,
    Stream,
    TumblingEventTimeWindows,
    count,
)
from onceflow.core.plan.windows import WindowAssigner

Work = Callable[[Stream, float], Stream]

TEN_MS = TumblingEventTimeWindows(0.010)


def aggregate(records: Stream, lateness: float, windows: WindowAssigner = TEN_MS) -> Stream:
    cut = records.key_by("account").window(windows, allowed_lateness=lateness)
    return cut.aggregate(n=count(), uid="windows")


def sliding(records: Stream, lateness: float) -> Stream:
    return aggregate(records, lateness, SlidingEventTimeWindows(0.010, 0.005))


def sessions(records: Stream, lateness: float) -> Stream:
    return aggregate(records, lateness, EventTimeSessionWindows(0.005))


def process(records: Stream, lateness: float, windows: WindowAssigner = TEN_MS) -> Stream:
    cut = records.key_by("account").window(windows, allowed_lateness=lateness)
    return cut.process(Counted(), uid="windows")


def process_sessions(records: Stream, lateness: float) -> Stream:
    return process(records, lateness, EventTimeSessionWindows(0.005))


def aggregate_by(records: Stream, lateness: float) -> Stream:
    cut = records.key_by("account").window(TEN_MS, allowed_lateness=lateness)
    schema = pa.schema([("n", pa.int64())])
    return cut.aggregate_by(Number(), schema=schema, uid="windows", accumulator_type=int)


def co_group(records: Stream, lateness: float) -> Stream:
    both = records.filter(is_even).connect(records.filter(is_odd)).key_by("account", "account")
    return both.window(TEN_MS, allowed_lateness=lateness).co_group(CountedOfBoth(), uid="windows")


def window_join(records: Stream, lateness: float) -> Stream:
    both = records.filter(is_even).connect(records.filter(is_odd)).key_by("account", "account")
    return both.window(TEN_MS, allowed_lateness=lateness).join("full").merge(uid="windows")


def run_to_the_end(
    cluster: AnyCluster, directory: Path, work: Callable[[Stream], Stream], *settings: Any
) -> tuple[JobStatus, list[dict[str, Any]]]:
    """Run the job on what is written; return how it ended, and the rows that it added."""
    committed = DirectorySink(str(directory / "out"))
    (directory / "out" / "committed").mkdir(parents=True, exist_ok=True)
    before = committed.rows()
    pipeline, source, sink = started(cluster, directory, work, *settings)
    source.end()
    status = pipeline.start().wait(60)
    assert status.state is JobState.FINISHED
    added = sink.rows()
    for row in before:
        added.remove(row)
    return status, added


def counts_of(rows: list[dict[str, Any]]) -> list[tuple[str, int, int]]:
    """Return each window's key, start and count."""

    def start_of(row: dict[str, Any]) -> int:
        if "start" in row:
            return int(row["start"])
        start: int = round(row["window_start"].timestamp() * 1000)
        return start

    return sorted((row["account"], start_of(row), row["n"]) for row in rows)


def write_two_windows(directory: Path) -> ScriptedSource:
    source = ScriptedSource(str(directory / "records"))
    source.write(0, ("a", 1, 0), ("a", 4, 1), ("a", 12, 2))
    source.write(1, ("b", 11, 3))
    return source


SESSIONS = [sessions, process_sessions]
IN_EVERY_RUN = [aggregate, process, sessions]
OTHERS = [
    pytest.param(work, marks=pytest.mark.slow)
    for work in (aggregate_by, co_group, process_sessions, sliding, window_join)
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("work", [*IN_EVERY_RUN, *OTHERS[:3]])
def test_windows_that_came_out_at_the_end_come_out_once_though_the_job_goes_on(
    cluster: AnyCluster, tmp_path: Path, work: Work, backend: StateBackend
) -> None:
    def windows(records: Stream) -> Stream:
        return work(records, 0)

    source = write_two_windows(tmp_path)
    _, first = run_to_the_end(cluster, tmp_path, windows, backend, 2)
    if work in SESSIONS:
        assert counts_of(first) == [("a", 1, 2), ("a", 12, 1), ("b", 11, 1)]
    else:
        assert counts_of(first) == [("a", 0, 2), ("a", 10, 1), ("b", 10, 1)]
    # Two are of windows that came out; by sessions, they would be over before 16 ms.
    source.write(0, ("a", 6, 4), ("a", 11, 5), ("a", 25, 6), ("b", 27, 7))
    status, second = run_to_the_end(cluster, tmp_path, windows, backend, 3)
    if work in SESSIONS:
        assert counts_of(second) == [("a", 25, 1), ("b", 27, 1)]
    else:
        assert counts_of(second) == [("a", 20, 1), ("b", 20, 1)]
    assert status.rejected == 2


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("work", [*IN_EVERY_RUN, *OTHERS])
def test_windows_that_came_out_at_the_end_are_whole_again_within_the_allowed_lateness(
    cluster: AnyCluster, tmp_path: Path, work: Work, backend: StateBackend
) -> None:
    def windows(records: Stream) -> Stream:
        return work(records, 60)

    source = write_two_windows(tmp_path)
    run_to_the_end(cluster, tmp_path, windows, backend, 2)
    source.write(0, ("a", 6, 4), ("a", 25, 5))
    status, second = run_to_the_end(cluster, tmp_path, windows, backend, 3)
    assert status.rejected == 0
    if work is sliding:
        assert counts_of(second) == [("a", 0, 3), ("a", 5, 2), ("a", 20, 1), ("a", 25, 1)]
    elif work in SESSIONS:
        assert counts_of(second) == [("a", 1, 3), ("a", 25, 1)]
    elif work is window_join:
        pairs = [(row["at_left"], row["at_right"]) for row in second]
        assert sorted(pairs, key=str) == [(1, 4), (6, 4), (None, 25)]
    else:
        assert counts_of(second) == [("a", 0, 3), ("a", 20, 1)]


@pytest.mark.parametrize("work", [aggregate, sessions, co_group])
def test_windows_that_came_out_at_the_end_come_out_once_though_fewer_subtasks_go_on(
    cluster: AnyCluster, tmp_path: Path, work: Work
) -> None:
    """One subtask goes on for two, of which one had come further."""

    def windows(records: Stream) -> Stream:
        return work(records, 60)

    source = ScriptedSource(str(tmp_path / "records"))
    source.write(0, ("a", 1, 0), ("a", 12, 1))
    source.write(1, ("b", 3, 2))
    run_to_the_end(cluster, tmp_path, windows, HeapBackend(), 2)
    source.write(0, ("a", 25, 3))
    _, second = run_to_the_end(cluster, tmp_path, windows, HeapBackend(), 1)
    assert counts_of(second) == [("a", 25 if work in SESSIONS else 20, 1)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_windows_that_a_drain_has_brought_out_come_out_once_though_the_job_goes_on(
    cluster: AnyCluster, tmp_path: Path, backend: StateBackend
) -> None:
    def windows(records: Stream) -> Stream:
        return aggregate(records, 0)

    pipeline, source, sink = started(cluster, tmp_path, windows, backend)
    source.write(0, ("a", 1, 0))
    job = pipeline.start()
    pass_event_time(source, sink, lambda: len(sink.rows()) > 0)
    job.stop(60, savepoint=True, drain=True)
    ((_, start, drained),) = (one for one in counts_of(sink.rows()) if one[0] == "b")
    assert start == 2_500
    source.write(0, ("b", 2_501, 5), ("b", 2_515, 6))
    status, second = run_to_the_end(cluster, tmp_path, windows, backend, 2)
    assert counts_of(second) == [("b", 2_510, 1)]
    # Some of what was written the drained job may not have read.
    lines = (tmp_path / "records" / "0.jsonl").read_text().splitlines()
    assert drained + status.rejected + 1 == len(lines) - 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_timers_that_fired_at_the_end_are_over_though_the_job_goes_on(
    cluster: AnyCluster, tmp_path: Path, backend: StateBackend
) -> None:
    def timers(records: Stream) -> Stream:
        return records.key_by("account").process(WatermarkOfEach(), uid="timers")

    source = ScriptedSource(str(tmp_path / "records"))
    source.write(0, ("a", 5, 0), ("a", 20, 1))
    run_to_the_end(cluster, tmp_path, timers, backend, 2)
    source.write(0, ("a", 30, 2))
    _, second = run_to_the_end(cluster, tmp_path, timers, backend, 3)
    # Event time is where the last timer fired, no further: the new one fires at its own time.
    assert [(row["start"], row["n"]) for row in second] == [(20, 0), (30, 1)]
    assert fired(DirectorySink(str(tmp_path / "out"))) == [("a", 5), ("a", 20), ("a", 30)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("how", ["inner", "left"])
def test_records_that_a_join_keeps_find_partners_that_come_after_the_end(
    cluster: AnyCluster, tmp_path: Path, backend: StateBackend, how: Literal["inner", "left"]
) -> None:
    def pairs(records: Stream) -> Stream:
        left, right = (records.filter(one).key_by("account") for one in (is_even, is_odd))
        return left.interval_join(right, how=how).between(-0.010, 0.010).merge(uid="pairs")

    source = ScriptedSource(str(tmp_path / "records"))
    source.write(0, ("a", 100, 1), ("b", 101, 2))
    _, first = run_to_the_end(cluster, tmp_path, pairs, backend, 2)
    source.write(0, ("a", 105, 4), ("b", 106, 5))
    _, second = run_to_the_end(cluster, tmp_path, pairs, backend, 3)
    made = sorted(((row["at_left"], row["at_right"]) for row in (*first, *second)), key=str)
    # What was told to have no partner gets none.
    assert made == ([(101, 106), (105, 100)] if how == "inner" else [(101, None), (105, 100)])
