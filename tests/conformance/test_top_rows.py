"""The first n records of each key over every state backend, compared with sorted lists."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pytest
from tests.conformance.keyed_run import KeyedRun
from tests.conformance.state_job import Job

from onceflow import desc
from onceflow.core.errors import UserFunctionError
from onceflow.core.plan.work import KeepTop, Order
from onceflow.core.protocol.checkpoints.snapshots import OperatorSnapshot
from onceflow.core.runtime.dataflow import top_rows
from onceflow.core.runtime.dataflow.top_rows import TopKeeper

Row = dict[str, Any]
SCHEMA = pa.schema(
    [
        ("key", pa.string()),
        ("price", pa.float64()),
        ("at", pa.timestamp("ms")),
        ("id", pa.int64()),
        ("note", pa.string()),
        ("tags", pa.list_(pa.string())),
        ("kind", pa.dictionary(pa.int32(), pa.string())),
    ]
)
WITH_RANK = SCHEMA.append(pa.field("rank", pa.int64()))


def run(
    job: Job, work: KeepTop, parallelism: int, restored: Sequence[OperatorSnapshot] = ()
) -> KeyedRun[TopKeeper]:
    return KeyedRun(
        job,
        lambda store: TopKeeper("op", work, store, SCHEMA, WITH_RANK),
        SCHEMA,
        key="key",
        parallelism=parallelism,
        restored=restored,
    )


def rank(rows: Sequence[Row], n: int) -> dict[tuple[str, int], Row]:
    """Return the first n records of each key: the highest price first, then the earliest time."""
    of_keys: dict[str, list[Row]] = {}
    for row in rows:
        of_keys.setdefault(row["key"], []).append(row)
    return {
        (key, number): record | {"rank": number}
        for key, records in of_keys.items()
        for number, record in enumerate(
            sorted(records, key=lambda record: (-record["price"], record["at"]))[:n], 1
        )
    }


def draw(rng: random.Random, number: int) -> Row:
    # Times without a time zone come back from Arrow as they were given, in milliseconds.
    at = pa.scalar(rng.randrange(3), pa.timestamp("ms")).as_py()
    return {
        "key": f"k{rng.randrange(rng.choice([2, 40]))}",
        "price": rng.choice([1.0, 2.5, 1e9, float("inf"), -3.0]),
        "at": at,
        "id": number,
        "note": rng.choice([None, "", "ä" * rng.randrange(30)]),
        "tags": rng.choice([None, [], ["a", None]]),
        "kind": rng.choice([None, "x", "y"]),
    }


@pytest.mark.parametrize("n", [1, 3, 10])
@pytest.mark.parametrize("entries_at_once", [7, top_rows.ENTRIES_AT_ONCE])
def test_the_table_has_the_ranks_of_the_model_through_snapshots_and_rescaling(
    job: Job, n: int, entries_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(top_rows, "ENTRIES_AT_ONCE", entries_at_once)
    rng = random.Random(n)
    work = KeepTop(("key",), n, (desc("price"), Order("at")))
    running, every = run(job, work, 2), list[Row]()
    table: dict[tuple[str, int], Row] = {}
    for step in range(20):
        rows = [draw(rng, len(every) + number) for number in range(rng.choice([0, 1, 20, 60]))]
        every += rows
        for row in running.take(rows):
            before = table.get((row["key"], row["rank"]))
            assert row != before, "a record is emitted only if the rank is new to it"
            table[row["key"], row["rank"]] = row
        assert table == rank(every, n)
        if step % 5 == 4:
            snapshots = running.snapshot(savepoint=step == 9)
            running = run(job, work, rng.choice([1, 2, 3]), snapshots)


def test_a_record_without_a_place_in_the_order_fails_by_name(job: Job) -> None:
    running = run(job, KeepTop(("key",), 2, (desc("price"),)), 1)
    record = draw(random.Random(0), 7)
    with pytest.raises(UserFunctionError, match=r"top_n\(by='price'\).*no value in this column"):
        running.take([record, record | {"price": None}])
