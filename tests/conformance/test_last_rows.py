"""Aggregates over the last records of each key over every state backend, compared with lists."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable, Sequence
from decimal import ROUND_HALF_UP, Decimal
from typing import Any

import pyarrow as pa
import pytest
from tests.conformance.keyed_run import KeyedRun
from tests.conformance.state_job import Job

from onceflow import StateTtlConfig, avg, count, count_distinct, desc, first, last, max_, min_, sum_
from onceflow.core.errors import UserFunctionError
from onceflow.core.plan.aggregates import running_schema
from onceflow.core.plan.work import AggregateLastRows, Emission, Order
from onceflow.core.protocol.checkpoints.snapshots import OperatorSnapshot
from onceflow.core.runtime.dataflow import last_rows
from onceflow.core.runtime.dataflow.last_rows import LastRowsAggregator
from onceflow.core.state.api.context import StateClock

Row = dict[str, Any]
SEED = int(os.environ.get("ONCEFLOW_TEST_SEED", "1"))
SCHEMA = pa.schema(
    [
        ("key", pa.string()),
        ("id", pa.int64()),
        ("at", pa.int32()),
        ("v", pa.int16()),
        ("f", pa.float64()),
        ("d", pa.decimal128(10, 2)),
        ("text", pa.string()),
        ("kind", pa.dictionary(pa.int32(), pa.string())),
        ("span", pa.duration("us")),
    ]
)
AGGREGATES = {
    "n": count(),
    "positive": count(where="v > 0"),
    "total": sum_("v"),
    "floats": sum_("f"),
    "money": sum_("d", where="v > 0"),
    "mean": avg("d"),
    "low": min_("f"),
    "high": max_("text"),
    "distinct": count_distinct("f"),
    "oldest": first("kind"),
    "newest": last("span"),
}


def operator_of(
    n: int,
    by: Sequence[Order] = (),
    *,
    emit: Emission = Emission.RECORD,
    ttl: StateTtlConfig | None = None,
    aggregates: dict[str, Any] = AGGREGATES,
) -> Callable[[Any], LastRowsAggregator]:
    work = AggregateLastRows(("key",), n, tuple(by), aggregates, ttl, emit)
    schema = running_schema(SCHEMA, aggregates, "over")
    return lambda store: LastRowsAggregator("op", work, store, SCHEMA, schema)


def run(
    job: Job,
    make: Callable[[Any], LastRowsAggregator],
    parallelism: int,
    restored: Sequence[OperatorSnapshot] = (),
) -> KeyedRun[LastRowsAggregator]:
    return KeyedRun(job, make, SCHEMA, key="key", parallelism=parallelism, restored=restored)


def draw(rng: random.Random, number: int) -> Row:
    return {
        "key": f"k{rng.randrange(rng.choice([2, 30]))}",
        "id": number,
        "at": rng.randrange(12),
        "v": rng.choice([None, *range(-3, 4)]),
        "f": rng.choice([None, math.nan, 0.0, -0.0, 0.1, 1e300, -1e300, -2.5]),
        "d": rng.choice([None, Decimal("0.01"), Decimal("-99999999.99"), Decimal("2.50")]),
        "text": rng.choice([None, "", "z", "ä" * rng.randrange(9)]),
        "kind": rng.choice([None, "x", "y"]),
        "span": rng.choice([None, pa.scalar(rng.randrange(9), pa.duration("us")).as_py()]),
    }


def result(row: Row, frame: Sequence[Row]) -> Row:
    """Return the record with the aggregates of a frame, each computed from its definition."""

    def values(column: str, chosen: Sequence[Row] = frame) -> list[Any]:
        return [one[column] for one in chosen if one[column] is not None]

    positive = [one for one in frame if (one["v"] or 0) > 0]
    mean = values("d")
    exact = sum(mean, Decimal(0)) / len(mean) if mean else None
    floats = 0.0
    for value in values("f"):
        floats += value
    return row | {
        "n": len(frame),
        "positive": len(positive),
        "total": sum(values("v")),
        "floats": floats,
        "money": sum(values("d", positive), Decimal("0.00")),
        "mean": exact if exact is None else exact.quantize(Decimal("1E-6"), ROUND_HALF_UP),
        "low": min(values("f"), key=place, default=None),
        "high": max(values("text"), default=None),
        "distinct": len({"NaN" if math.isnan(f) else f + 0.0 for f in values("f")}),
        "oldest": next(iter(values("kind")), None),
        "newest": next(iter(reversed(values("span"))), None),
    }


def place(value: float) -> tuple[bool, float, float]:
    """Return the place of a float in the order of all: NaN is the greatest, and -0.0 below 0.0."""
    return math.isnan(value), 0.0 if math.isnan(value) else value, math.copysign(1.0, value)


def frame_of(rows: Sequence[Row], n: int, by: Sequence[Order]) -> list[Row]:
    """Return the last n of the rows of one key, which are in the order of arrival."""
    ordered = list(rows)
    for order in reversed(by):
        ordered.sort(key=lambda row: (-1 if order.descending else 1) * row[order.column])
    return ordered[-n:]


@pytest.mark.parametrize(
    ("n", "by"),
    [(4, ()), (2, (Order("at"),)), (4, (desc("at"), Order("id")))],
    ids=["4", "2-by-time", "4-by-two"],
)
def test_frames_are_those_of_the_model_through_snapshots_and_rescaling(
    job: Job, n: int, by: Sequence[Order], monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(f"{SEED} {n} {by}")
    monkeypatch.setattr(last_rows, "PAIRS_AT_ONCE", rng.choice([40, 1 << 18]))
    make = operator_of(n, by)
    running, every = run(job, make, 2), list[Row]()
    of_keys: dict[str, list[Row]] = {}
    for step in range(10):
        rows = [draw(rng, len(every) + number) for number in range(rng.choice([0, 1, 20, 60]))]
        every += rows
        expected: list[Row] = []
        for row in rows:
            of_keys.setdefault(row["key"], []).append(row)
            expected.append(result(row, frame_of(of_keys[row["key"]], n, by)))
        emitted = running.take(rows)
        # Compared as text: NaN equals NaN, and -0.0 is not 0.0.
        assert repr(sorted(emitted, key=lambda row: row["id"])) == repr(expected)
        if step % 3 == 2:
            snapshots = running.snapshot(savepoint=step == 5)
            running = run(job, make, rng.choice([1, 2, 3]), snapshots)


@pytest.mark.parametrize("by", [(), (Order("at"),)], ids=["arrival", "by-time"])
def test_the_last_record_of_each_key_and_batch_has_the_frame_of_all_its_records(
    job: Job, by: Sequence[Order]
) -> None:
    rng = random.Random(SEED)
    running, of_keys = run(job, operator_of(3, by, emit=Emission.BATCH), 1), dict[str, list[Row]]()
    for step in range(4):
        rows = [draw(rng, 40 * step + number) for number in range(40)]
        for row in rows:
            of_keys.setdefault(row["key"], []).append(row)
        last_of_keys = {row["key"]: row for row in rows}
        expected = [result(row, frame_of(of_keys[key], 3, by)) for key, row in last_of_keys.items()]
        expected.sort(key=lambda row: row["id"])
        assert repr(running.take(rows)) == repr(expected)


def test_a_key_without_records_for_its_time_to_live_starts_again(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_ms = [1_000_000]

    def read_clock(_: StateClock) -> int:
        return now_ms[0]

    monkeypatch.setattr(StateClock, "now_ms", read_clock)
    make = operator_of(3, ttl=StateTtlConfig(10), aggregates={"n": count(), "total": sum_("v")})
    running, record = run(job, make, 1), draw(random.Random(0), 1) | {"v": 5}

    def counts(*keys: str) -> list[tuple[int, int]]:
        emitted = running.take([record | {"key": key} for key in keys])
        return [(row["n"], row["total"]) for row in emitted]

    assert counts("a", "b") == [(1, 5), (1, 5)]
    now_ms[0] += 9_999
    assert counts("a") == [(2, 10)]
    now_ms[0] += 1
    # The last record of "b" came 10 s ago, and that of "a" just before.
    running = run(job, make, 2, running.snapshot(savepoint=True))
    assert sorted(counts("a", "b")) == [(1, 5), (3, 15)]


def test_a_sum_that_leaves_64_bits_fails_by_name_and_not_before(job: Job) -> None:
    wide = pa.schema([SCHEMA.field("key"), ("id", pa.int64())])
    work = AggregateLastRows(("key",), 2, (), {"total": sum_("id")})
    schema = running_schema(wide, work.aggregates)
    running = KeyedRun(
        job,
        lambda store: LastRowsAggregator("op", work, store, wide, schema),
        wide,
        key="key",
        parallelism=1,
    )
    most = 2**63 - 1
    # The sum over all records does not fit, but those of two records do.
    ids = [most, 0, most, -most, 0]
    totals = [row["total"] for row in running.take([{"key": "k", "id": number} for number in ids])]
    assert totals == [most, most, most, 0, -most]
    words = r"sum 'total' in state 'onceflow.over'.*leaves 64 bits at key 'k'"
    with pytest.raises(UserFunctionError, match=words):
        running.take([{"key": "k", "id": most}, {"key": "k", "id": 1}])


def test_a_record_without_a_place_in_the_order_fails_by_name(job: Job) -> None:
    running = run(job, operator_of(2, [Order("v")]), 1)
    record = draw(random.Random(0), 7) | {"v": 1}
    with pytest.raises(UserFunctionError, match=r"over\(by='v'\).*no value in this column"):
        running.take([record, record | {"v": None}])
