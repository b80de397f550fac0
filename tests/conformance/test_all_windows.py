"""Windows without a key: totals of parts that are merged equal the totals of all records."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from tests.conformance.keyed_run import KeyedRun
from tests.conformance.state_job import Job
from tests.support.drawn_seeds import draw_random

from onceflow import (
    SlidingEventTimeWindows,
    TumblingEventTimeWindows,
    avg,
    count,
    max_,
    min_,
    sum_,
)
from onceflow.core.errors import BadStateValue, UserFunctionError
from onceflow.core.plan.all_windows import ALL, make_gathered_schema, make_panes_schema
from onceflow.core.plan.windows import PaneAssigner, window_schema
from onceflow.core.plan.work import AggregateWindows, MergeWindows, PreAggregateWindows
from onceflow.core.protocol.checkpoints.snapshots import OperatorSnapshot
from onceflow.core.runtime.dataflow.all_windows import PreAggregator, RowGatherer, WindowMerger
from onceflow.core.runtime.dataflow.channels import Batch
from onceflow.core.runtime.dataflow.operators import RunningOperator
from onceflow.core.runtime.dataflow.window_operators import WindowAggregator
from onceflow.core.state import KeyedStateStore

SCHEMA = pa.schema(
    [
        ("at", pa.int64()),
        ("n", pa.int64()),
        ("price", pa.decimal128(12, 2)),
        ("real", pa.float64()),
        ("day", pa.timestamp("us", "UTC")),
    ]
)
AGGREGATES = {
    "records": count(),
    "known": count(where="n > 2"),
    "total": sum_("n"),
    "low": min_("n"),
    "high": max_("n", where="n < 7"),
    "mean": avg("n"),
    "prices": sum_("price"),
    "price": avg("price"),
    "cheapest": min_("price"),
    "least": min_("real"),
    "most": max_("real"),
    "last_day": max_("day"),
}
REALS = [-0.0, 0.0, math.inf, -math.inf, math.nan, 1.5, None]
Record = dict[str, Any]


class Subtasks:
    """The first steps of some subtasks, and the operator that gets their rows."""

    def __init__(
        self,
        job: Job,
        windows: PaneAssigner,
        lateness_ms: int,
        *,
        merges: bool,
        restored: Sequence[OperatorSnapshot] = (),
        parallelism: int = 1,
    ) -> None:
        settings = ((ALL,), windows, "at", lateness_ms, AGGREGATES)
        results = {name: aggregate.result_type(SCHEMA) for name, aggregate in AGGREGATES.items()}
        schema = window_schema(SCHEMA, (), "at", results)
        if merges:
            between = make_panes_schema(AGGREGATES, SCHEMA)
            first = PreAggregateWindows("op", windows, "at", AGGREGATES)
            self.first: RunningOperator = PreAggregator("op-parts", first, SCHEMA, between)
            work: AggregateWindows = MergeWindows(*settings, records=SCHEMA)
        else:
            between, self.first = make_gathered_schema(SCHEMA), RowGatherer("op-parts")
            work = AggregateWindows(*settings)
        self._between: list[pa.RecordBatch] = []
        self.first.outputs.append(lambda batch: self._between.append(batch.rows))
        groups = iter([job.context(at, parallelism).key_groups for at in range(parallelism)])
        elements = [one for s in restored for one in s.lists.get("event-time", ())]

        def make(store: KeyedStateStore) -> WindowAggregator:
            after = schema, next(groups), elements
            if isinstance(work, MergeWindows):
                return WindowMerger("op", work, store, *after)
            return WindowAggregator("op", work, store, between, *after)

        self.run = KeyedRun(
            job,
            make,
            between,
            key=ALL,
            parallelism=parallelism,
            restored=restored,
        )

    def take(self, batches: Sequence[Sequence[Record]]) -> list[Record]:
        """Take a batch of each subtask."""
        for records in batches:
            self.first.receive(Batch(pa.RecordBatch.from_pylist(list(records), SCHEMA)))
        made: list[Record] = []
        for rows in self._between:
            made += self.run.take(rows.to_pylist())
        self._between.clear()
        return made

    def advance(self, watermark: int) -> list[Record]:
        for operator in self.run.operators:
            operator.on_watermark(watermark)
        return self.run.take_emitted()

    @property
    def rejected(self) -> int:
        return sum(operator.rejected for operator in self.run.operators)


def _record(rng: random.Random, at: int) -> Record:
    return {
        "at": at,
        "n": rng.choice([None, *range(9)]),
        "price": rng.choice([None, Decimal(rng.randrange(-999, 999)) / 100]),
        "real": rng.choice(REALS),
        "day": rng.choice([None, rng.randrange(10**15)]),
    }


@pytest.mark.parametrize(
    ("windows", "lateness_ms"),
    [
        (TumblingEventTimeWindows(0.1), 0),
        (SlidingEventTimeWindows(0.1, 0.04, offset=0.01), 60),
    ],
    ids=["tumbling", "sliding"],
)
def test_merged_totals_equal_those_of_all_records_through_snapshots_and_rescaling(
    job: Job, windows: PaneAssigner, lateness_ms: int
) -> None:
    rng = draw_random()
    merged = Subtasks(job, windows, lateness_ms, merges=True)
    plain = Subtasks(job, windows, lateness_ms, merges=False)
    last_of: tuple[dict[Any, Record], dict[Any, Record]] = {}, {}
    for step in range(14):
        at = 40 * step
        batches = [
            [_record(rng, at - rng.choice([5, 50, 90, 300])) for _ in range(n)]
            for n in (rng.choice([0, 1, 5]), 20)
        ]
        emitted: list[list[list[str]]] = []
        for subtasks, last in zip((merged, plain), last_of, strict=True):
            at_once, when_due = subtasks.take(batches), subtasks.advance(at - 40)
            emitted.append([sorted(map(repr, rows)) for rows in (at_once, when_due)])
            last.update({row["window_end"]: row for row in (*at_once, *when_due)})
        assert emitted[0] == emitted[1], f"at the watermark {at - 40}"
        if step % 5 == 4:
            snapshots = merged.run.snapshot(savepoint=step == 4)
            rejected, parallelism = merged.rejected, rng.choice([1, 2, 3])
            merged = Subtasks(
                job, windows, lateness_ms, merges=True, restored=snapshots, parallelism=parallelism
            )
            merged.run.operators[0].rejected = rejected
    assert repr(last_of[0]) == repr(last_of[1])
    assert len(last_of[0]) > 4
    assert merged.rejected == plain.rejected > 0


def test_a_batch_leaves_its_subtask_as_one_row_for_each_pane(job: Job) -> None:
    subtasks = Subtasks(job, TumblingEventTimeWindows(0.1), 0, merges=True)
    rng = draw_random()
    sizes: list[int] = []
    subtasks.first.outputs.append(lambda batch: sizes.append(batch.rows.num_rows))
    subtasks.take([[_record(rng, at) for at in range(1_000, 1_250)]])
    assert sizes == [3]


def test_a_record_without_an_event_time_is_named_by_the_windows(job: Job) -> None:
    subtasks = Subtasks(job, TumblingEventTimeWindows(0.1), 0, merges=True)
    record = _record(random.Random(1), 5) | {"at": None}
    with pytest.raises(UserFunctionError, match=r"operator 'op'.*'at' is null"):
        subtasks.take([[record]])


def _of_number(n: int, at: int = 5) -> Record:
    return {"at": at, "n": n, "price": None, "real": None, "day": None}


MOST = (1 << 63) - 1


@pytest.mark.parametrize("backend", ["heap", "rocksdb-small-cache"], indirect=True)
@pytest.mark.parametrize("merges", [True, False], ids=["merged", "gathered"])
@pytest.mark.parametrize("batch_rows", [1, 2, 5])
def test_a_sum_that_fits_at_its_end_is_exact_in_any_order(
    job: Job, merges: bool, batch_rows: int
) -> None:
    subtasks = Subtasks(job, SlidingEventTimeWindows(0.1, 0.05), 0, merges=merges)
    numbers = [MOST, MOST, 3, -MOST, -1]
    for first in range(0, 5, batch_rows):
        subtasks.take([[_of_number(n) for n in numbers[first : first + batch_rows]]])
    subtasks.take([[_of_number(-4, at=60)]])
    snapshots = subtasks.run.snapshot(savepoint=True)
    windows = SlidingEventTimeWindows(0.1, 0.05)
    subtasks = Subtasks(job, windows, 0, merges=merges, restored=snapshots)
    message = r"sum 'total' .* is 9223372036854775809 in the window from 1969-12-31T23:59:59\.950"
    with pytest.raises(BadStateValue, match=message):
        subtasks.advance(49)
    subtasks = Subtasks(job, windows, 0, merges=merges, restored=snapshots)
    subtasks.take([[_of_number(-2)]])
    assert {row["total"] for row in subtasks.advance(99)} == {MOST, MOST - 4}


@pytest.mark.parametrize("backend", ["heap", "rocksdb-small-cache"], indirect=True)
@pytest.mark.parametrize("merges", [True, False], ids=["merged", "gathered"])
def test_a_late_record_is_logged_with_its_values(
    job: Job, merges: bool, caplog: pytest.LogCaptureFixture
) -> None:
    subtasks = Subtasks(job, TumblingEventTimeWindows(0.1), 0, merges=merges)
    subtasks.take([[_of_number(n=17)]])
    subtasks.advance(99)
    subtasks.take([[_of_number(n=4711)]])
    assert subtasks.rejected == 1
    [line] = [record.getMessage() for record in caplog.records]
    assert "4711" in line
    assert "onceflow." not in line
    assert "b'" not in line
