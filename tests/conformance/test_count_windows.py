"""Windows of a number of records over every state backend, compared with lists of records."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pytest
from tests.conformance.keyed_run import KeyedRun
from tests.conformance.state_job import Job
from tests.support.drawn_seeds import draw_random

from onceflow import avg, count, count_distinct, first, last, max_, min_, sum_
from onceflow.core.errors import UserFunctionError
from onceflow.core.plan.windows import make_keyed_schema
from onceflow.core.plan.work import AggregateCounts
from onceflow.core.protocol.checkpoints.snapshots import OperatorSnapshot
from onceflow.core.protocol.watermarks import MAX_WATERMARK
from onceflow.core.runtime.dataflow import count_windows
from onceflow.core.runtime.dataflow.channels import Batch
from onceflow.core.runtime.dataflow.count_windows import CountAggregator

SCHEMA = pa.schema([("account", pa.string()), ("amount", pa.int64()), ("name", pa.string())])
AGGREGATES = {
    "total": sum_("amount"),
    "n": count(),
    "low": min_("amount"),
    "high": max_("amount"),
    "mean": avg("amount"),
    "large": count(where="amount > 3"),
    "large_total": sum_("amount", where="amount > 3"),
    "large_low": min_("amount", where="amount > 3"),
    "distinct": count_distinct("amount"),
    "large_distinct": count_distinct("amount", where="amount > 3"),
    "first": first("amount"),
    "last": last("name"),
    "low_name": min_("name"),
    "high_name": max_("name", where="amount > 3"),
}
Row = tuple[str, int | None]


class Model:
    """Keeps the records of each key's open window."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._open: dict[str, list[int | None]] = defaultdict(list)

    def take(self, rows: Sequence[Row]) -> list[tuple[Any, ...]]:
        made: list[tuple[Any, ...]] = []
        for key, amount in rows:
            self._open[key].append(amount)
            if len(self._open[key]) == self._size:
                made.append((key, *_aggregates(self._open.pop(key))))
        return made

    def end(self) -> list[tuple[Any, ...]]:
        left, self._open = self._open, defaultdict(list)
        return [(key, *_aggregates(amounts)) for key, amounts in left.items()]


def _aggregates(amounts: Sequence[int | None]) -> tuple[Any, ...]:
    known = [amount for amount in amounts if amount is not None]
    mean = sum(known) / len(known) if known else None
    low, high = min(known, default=None), max(known, default=None)
    large = [amount for amount in known if amount > 3]
    of_large = (len(large), sum(large), min(large, default=None))
    distinct = (len(set(known)), len(set(large)))
    names = [name for amount in known if (name := _name(amount))]
    chosen = (
        next(iter(known), None),
        next(reversed(names), None),
        min(names, default=None),
        max(filter(None, map(_name, large)), default=None),
    )
    return (sum(known), len(amounts), low, high, mean, *of_large, *distinct, *chosen)


def _name(amount: int | None) -> str | None:
    return None if amount is None else "zä\0"[amount % 3] * (amount % 4 + 1)


class Running(KeyedRun[CountAggregator]):
    """Operators side by side, whose records are tuples."""

    def __init__(
        self, job: Job, size: int, parallelism: int, restored: Sequence[OperatorSnapshot] = ()
    ) -> None:
        work = AggregateCounts(("account",), size, AGGREGATES)
        results = {name: aggregate.result_type(SCHEMA) for name, aggregate in AGGREGATES.items()}
        schema = make_keyed_schema(SCHEMA, work.key, results)
        super().__init__(
            job,
            lambda store: CountAggregator("op", work, store, SCHEMA, schema),
            SCHEMA,
            key="account",
            parallelism=parallelism,
            restored=restored,
        )

    def take_rows(self, rows: Sequence[Row]) -> list[tuple[Any, ...]]:
        records = [dict(zip(SCHEMA.names, (*row, _name(row[1])), strict=True)) for row in rows]
        return [tuple(record.values()) for record in self.take(records)]

    def emitted(self) -> list[tuple[Any, ...]]:
        return [tuple(record.values()) for record in self.take_emitted()]


@pytest.mark.parametrize("size", [1, 2, 7, 40])
def test_windows_of_a_number_equal_lists_of_records_through_snapshots_and_rescaling(
    job: Job, size: int
) -> None:
    rng = draw_random()
    model, running = Model(size), Running(job, size, 2)
    for step in range(36):
        rows: list[Row] = [
            (f"k{rng.randrange(rng.choice([2, 30]))}", rng.choice([None, rng.randrange(9)]))
            for _ in range(rng.choice([0, 1, 20, 100]))
        ]
        assert Counter(running.take_rows(rows)) == Counter(model.take(rows))
        for operator in running.operators:
            operator.on_watermark(step)
        assert not running.emitted(), "a watermark ends no window of a number of records"
        if step % 9 == 8:
            snapshots = running.snapshot(savepoint=step == 17)
            running = Running(job, size, rng.choice([1, 2, 3]), snapshots)
    for operator in running.operators:
        operator.on_watermark(MAX_WATERMARK)
    assert not running.emitted()
    for _ in range(2):
        # The last rows of an earlier function follow the first end.
        for operator in running.operators:
            operator.flush()
        assert Counter(running.emitted()) == Counter(model.end())
        rows = [("k1", 1), ("k2", 2)]
        assert Counter(running.take_rows(rows)) == Counter(model.take(rows))
    model.end()
    for operator in running.operators:
        operator.flush()
    # No state is left behind.
    assert running.snapshot(savepoint=True)[0].keyed[0].size_bytes < 1_200


@pytest.mark.parametrize("records_count", [7, 8, 9])
def test_windows_that_one_batch_fills_follow_in_the_order_of_their_records(
    job: Job, monkeypatch: pytest.MonkeyPatch, records_count: int
) -> None:
    monkeypatch.setattr(count_windows, "ROWS_A_BATCH", 4)
    running = Running(job, 2, 1)
    # New keys between windows of a known key: the entries are not in the order of the windows.
    assert running.take_rows([("a", 0), ("b", 0)]) == []
    amounts = range(1, 2 * records_count)
    windows = running.take_rows([(key, amount) for amount in amounts for key in "acb"])
    for key, begin in [("a", 0), ("b", 0), ("c", 1)]:
        totals = [total for owner, total, *_ in windows if owner == key]
        starts = range(begin, 2 * records_count - 1, 2)
        assert totals == [start + start + 1 for start in starts]


def test_a_record_without_a_key_is_refused_with_its_row(job: Job) -> None:
    running = Running(job, 3, 1)
    batch = pa.record_batch(
        [pa.array(["a", None]), pa.array([1, 2]), pa.array(["b", "c"])], schema=SCHEMA
    )
    with pytest.raises(UserFunctionError, match="null"):
        running.operators[0].receive(Batch(batch))
