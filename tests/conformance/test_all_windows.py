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

from onceflow import (
    SlidingEventTimeWindows,
    TumblingEventTimeWindows,
    avg,
    count,
    max_,
    min_,
    sum_,
)
from onceflow.core.errors import UserFunctionError
from onceflow.core.plan.all_windows import ALL, make_gathered_schema, make_panes_schema
from onceflow.core.plan.windows import PaneAssigner, window_schema
from onceflow.core.plan.work import AggregateWindows, MergeWindows, PreAggregateWindows
from onceflow.core.protocol.checkpoints.snapshots import OperatorSnapshot
from onceflow.core.runtime.dataflow.all_windows import PreAggregator, RowGatherer, WindowMerger
from onceflow.core.runtime.dataflow.channels import Batch
from onceflow.core.runtime.dataflow.operators import RunningOperator
from onceflow.core.runtime.dataflow.window_operators import WindowAggregator

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
            operator: type[WindowAggregator] = WindowMerger
        else:
            between, self.first = make_gathered_schema(SCHEMA), RowGatherer("op-parts")
            work, operator = AggregateWindows(*settings), WindowAggregator
        self._between: list[pa.RecordBatch] = []
        self.first.outputs.append(lambda batch: self._between.append(batch.rows))
        groups = iter([job.context(at, parallelism).key_groups for at in range(parallelism)])
        elements = [one for s in restored for one in s.lists.get("event-time", ())]
        self.run = KeyedRun(
            job,
            lambda store: operator(
                "op", work, store, make_gathered_schema(SCHEMA), schema, next(groups), elements
            ),
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
    rng = random.Random(7)
    merged = Subtasks(job, windows, lateness_ms, merges=True)
    plain = Subtasks(job, windows, lateness_ms, merges=False)
    last_of: tuple[dict[Any, Record], dict[Any, Record]] = {}, {}
    for step in range(14):
        at = 40 * step
        batches = [
            [_record(rng, at - rng.choice([5, 50, 90, 300])) for _ in range(n)]
            for n in (rng.choice([0, 1, 5]), 20)
        ]
        for subtasks, last in zip((merged, plain), last_of, strict=True):
            for row in [*subtasks.take(batches), *subtasks.advance(at - 40)]:
                last[row["window_end"]] = row
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
    rng = random.Random(3)
    sizes: list[int] = []
    subtasks.first.outputs.append(lambda batch: sizes.append(batch.rows.num_rows))
    subtasks.take([[_record(rng, at) for at in range(1_000, 1_250)]])
    assert sizes == [3]


def test_a_record_without_an_event_time_is_named_by_the_windows(job: Job) -> None:
    subtasks = Subtasks(job, TumblingEventTimeWindows(0.1), 0, merges=True)
    record = _record(random.Random(1), 5) | {"at": None}
    with pytest.raises(UserFunctionError, match=r"operator 'op'.*'at' is null"):
        subtasks.take([[record]])
