"""Results of windows before they are due, over every state backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pytest
from tests.conformance.keyed_run import KeyedRun
from tests.conformance.state_job import MAX_PARALLELISM, Job

from onceflow import (
    SlidingEventTimeWindows,
    TumblingEventTimeWindows,
    TumblingProcessingTimeWindows,
    count,
    count_distinct,
    sum_,
)
from onceflow.core.plan.windows import EarlyResults, PaneAssigner, window_schema
from onceflow.core.plan.work import AggregateWindows
from onceflow.core.protocol.checkpoints.snapshots import OperatorSnapshot
from onceflow.core.protocol.watermarks import MAX_WATERMARK
from onceflow.core.runtime.dataflow.early_windows import EarlyWindowAggregator
from onceflow.core.runtime.dataflow.restored_event_time import EVENT_TIME
from onceflow.core.state import key_group_of
from onceflow.core.state.api.context import StateClock

SCHEMA = pa.schema([("key", pa.string()), ("at", pa.int64()), ("v", pa.int64())])
AGGREGATES = {"n": count(), "total": sum_("v"), "distinct": count_distinct("v")}
TUMBLING = TumblingEventTimeWindows(0.01)
Result = tuple[str, int, int, int, int]


class Windows:
    """Subtasks of early windows. `operator` is the first one."""

    def __init__(
        self,
        job: Job,
        windows: PaneAssigner,
        early: EarlyResults,
        restored: Sequence[OperatorSnapshot] = (),
        *,
        lateness_ms: int = 0,
        parallelism: int = 1,
    ) -> None:
        time = None if windows.by_clock else "at"
        work = AggregateWindows(("key",), windows, time, lateness_ms, AGGREGATES, early=early)
        results = {name: aggregate.result_type(SCHEMA) for name, aggregate in AGGREGATES.items()}
        schema = window_schema(SCHEMA, ("key",), time, results)
        key_groups = (job.context(index, parallelism).key_groups for index in range(parallelism))
        times = [e for snapshot in restored for e in snapshot.lists.get(EVENT_TIME, ())]
        self._run = KeyedRun(
            job,
            lambda store: EarlyWindowAggregator(
                "op", work, store, SCHEMA, schema, next(key_groups), times
            ),
            SCHEMA,
            key="key",
            parallelism=parallelism,
            restored=restored,
        )
        self.operator = self._run.operators[0]

    def take(self, *rows: tuple[str, int, int]) -> list[Result]:
        """Take a batch of (key, time, value)."""
        return _results(self._run.take([dict(zip(SCHEMA.names, r, strict=True)) for r in rows]))

    def on_time(self) -> list[Result]:
        self.operator.on_time()
        return _results(self._run.take_emitted())

    def on_watermark(self, watermark: int) -> list[Result]:
        self.operator.on_watermark(watermark)
        return _results(self._run.take_emitted())

    def snapshot(self) -> list[OperatorSnapshot]:
        return self._run.snapshot(savepoint=False)


def _results(rows: Sequence[dict[str, Any]]) -> list[Result]:
    """Return (key, start in ms, n, total, distinct) of each row, sorted."""
    return sorted(
        (r["key"], round(r["window_start"].timestamp() * 1000), r["n"], r["total"], r["distinct"])
        for r in rows
    )


@pytest.fixture
def now_ms(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    now_ms = [1_000_000]

    def read_clock(_: StateClock) -> int:
        return now_ms[0]

    monkeypatch.setattr(StateClock, "now_ms", read_clock)
    return now_ms


def test_a_window_is_emitted_after_each_number_of_its_records_also_after_a_restore(
    job: Job,
) -> None:
    windows = Windows(job, TUMBLING, early := EarlyResults(2, None))
    assert windows.take(("a", 1, 5), ("b", 1, 1)) == []
    assert windows.take(("a", 2, 5), ("a", 12, 7)) == [("a", 0, 2, 10, 1)]
    windows = Windows(job, TUMBLING, early, windows.snapshot())
    assert windows.operator.due_in_s is None
    # Three records more: the number passes 4, once for the batch.
    assert windows.take(("a", 3, 1), ("a", 3, 2), ("a", 3, 3)) == [("a", 0, 5, 16, 4)]
    assert windows.take(("b", 2, 2)) == [("b", 0, 2, 3, 2)]
    assert windows.on_watermark(9) == [("a", 0, 5, 16, 4), ("b", 0, 2, 3, 2)]
    assert windows.on_watermark(MAX_WATERMARK) == [("a", 10, 1, 7, 1)]


def test_changed_windows_are_emitted_when_the_interval_has_passed(
    job: Job, now_ms: list[int]
) -> None:
    windows = Windows(job, TUMBLING, early := EarlyResults(None, 500))
    assert windows.operator.due_in_s is None
    assert windows.take(("a", 1, 5), ("b", 1, 1), ("c", 1, 1)) == []
    now_ms[0] += 499
    assert windows.on_time() == []
    assert windows.take(("a", 2, 5), ("a", 11, 1)) == []
    assert windows.operator.due_in_s == 0.001
    now_ms[0] += 1
    first = [("a", 0, 2, 10, 1), ("a", 10, 1, 1, 1), ("b", 0, 1, 1, 1), ("c", 0, 1, 1, 1)]
    assert windows.on_time() == first
    assert windows.operator.due_in_s is None
    assert windows.take(("b", 2, 1)) == []
    # Which windows have changed is not in the snapshot, so all open ones come again.
    windows = Windows(job, TUMBLING, early, windows.snapshot())
    assert windows.operator.due_in_s == 0.5
    now_ms[0] += 500
    assert windows.on_time() == [*first[:2], ("b", 0, 2, 2, 1), first[3]]
    assert windows.take(("c", 2, 4)) == []
    now_ms[0] += 500
    assert windows.on_time() == [("c", 0, 2, 5, 2)]
    assert windows.take(("c", 2, 4), ("a", 12, 1)) == []
    assert windows.on_watermark(9) == [first[0], ("b", 0, 2, 2, 1), ("c", 0, 3, 9, 2)]
    now_ms[0] += 500
    # The window of "c" has been emitted as a whole.
    assert windows.on_time() == [("a", 10, 2, 2, 1)]


def test_each_open_window_of_a_changed_key_is_emitted_if_windows_overlap(
    job: Job, now_ms: list[int]
) -> None:
    windows = Windows(job, SlidingEventTimeWindows(0.01, 0.005), EarlyResults(None, 500))
    assert windows.take(("a", 7, 5), ("b", 12, 1)) == []
    assert windows.on_watermark(9) == [("a", 0, 1, 5, 1)]
    now_ms[0] += 500
    assert windows.on_time() == [("a", 5, 1, 5, 1), ("b", 5, 1, 1, 1), ("b", 10, 1, 1, 1)]
    assert windows.take(("b", 13, 1)) == []
    now_ms[0] += 500
    assert windows.on_time() == [("b", 5, 2, 2, 1), ("b", 10, 2, 2, 1)]


def test_a_window_is_emitted_once_for_a_batch_if_number_and_interval_are_given(
    job: Job, now_ms: list[int]
) -> None:
    windows = Windows(job, TUMBLING, EarlyResults(2, 500))
    assert windows.take(("a", 1, 5), ("a", 2, 5), ("b", 1, 1)) == [("a", 0, 2, 10, 1)]
    now_ms[0] += 500
    assert windows.on_time() == [("b", 0, 1, 1, 1)]


def test_a_window_that_was_due_has_no_early_results(job: Job, now_ms: list[int]) -> None:
    windows = Windows(job, TUMBLING, EarlyResults(2, 500), lateness_ms=100)
    assert windows.take(("a", 1, 5)) == []
    assert windows.on_watermark(9) == [("a", 0, 1, 5, 1)]
    # Records within the allowed lateness replace the result at once.
    assert windows.take(("a", 2, 5)) == [("a", 0, 2, 10, 1)]
    assert windows.take(("a", 3, 5)) == [("a", 0, 3, 15, 1)]
    now_ms[0] += 500
    assert windows.on_time() == []


@pytest.mark.parametrize("windows", [TUMBLING, SlidingEventTimeWindows(0.01, 0.005)], ids=repr)
def test_a_window_that_was_due_in_another_subtask_has_no_early_results_after_a_restore(
    job: Job, now_ms: list[int], windows: PaneAssigner
) -> None:
    first, second = sorted("ab", key=lambda key: key_group_of(key, MAX_PARALLELISM))
    early = EarlyResults(None, 500)
    before = Windows(job, windows, early, lateness_ms=100, parallelism=2)
    assert before.take((first, 7, 5), (second, 7, 5)) == []
    assert (first, 0, 1, 5, 1) in before.on_watermark(14)
    after = Windows(job, windows, early, before.snapshot(), lateness_ms=100)
    now_ms[0] += 500
    emitted = after.on_time()
    assert {row[0] for row in emitted} == {second}


def test_early_results_of_windows_by_the_clock_are_due_before_the_windows(
    job: Job, now_ms: list[int]
) -> None:
    windows = Windows(job, TumblingProcessingTimeWindows(10), EarlyResults(None, 500))
    assert windows.take(("a", 1, 5)) == []
    assert windows.operator.due_in_s == 0.5
    now_ms[0] += 500
    assert windows.on_time() == [("a", 1_000_000, 1, 5, 1)]
    assert windows.operator.due_in_s == 9.5
    assert windows.take(("a", 1, 5)) == []
    now_ms[0] += 9_500
    assert windows.on_time() == [("a", 1_000_000, 2, 10, 1)]
    assert windows.operator.due_in_s is None


def test_changed_windows_are_emitted_if_memory_does_not_hold_all_of_them(
    job: Job, now_ms: list[int]
) -> None:
    windows = Windows(job, TUMBLING, EarlyResults(None, 500))
    keys = [f"k{number}" for number in range(10, 60)]
    for at in range(0, len(keys), 10):
        assert windows.take(*((key, 1, 5) for key in keys[at : at + 10])) == []
    now_ms[0] += 500
    assert windows.on_time() == [(key, 0, 1, 5, 1) for key in keys]
