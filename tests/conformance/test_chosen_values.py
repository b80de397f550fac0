"""First, last, least and greatest values over every state backend, compared with lists."""

from __future__ import annotations

import random
import struct
from collections import defaultdict
from collections.abc import Sequence
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from tests.conformance.state_job import Job
from tests.conformance.test_distinct_counts import ON_SUITE, Counts
from tests.conformance.test_state_ttl import Wall
from tests.support.drawn_seeds import draw_random

from onceflow import StateTtlConfig, first, last, max_, min_
from onceflow.core.errors import ConfigError
from onceflow.core.plan.aggregates import Aggregate, running_schema
from onceflow.core.plan.work import Deduplicate, Emission, Keep, RunAggregates
from onceflow.core.runtime.dataflow.channels import Batch
from onceflow.core.runtime.dataflow.deduplication import Deduplicator
from onceflow.core.runtime.dataflow.keyed_operators import AggregateRunner
from onceflow.core.state.api.context import StateClock
from onceflow.core.state.snapshots.canonical import read_canonical

SCHEMA = pa.schema([("account", pa.string()), ("name", pa.string()), ("cents", pa.int64())])
AGGREGATES: dict[str, Aggregate] = {
    "first": first("name"),
    "last": last("name"),
    "low": min_("name"),
    "high": max_("name"),
    "last_large": last("cents", where="cents > 5"),
}
TTL = StateTtlConfig(10, cleanup_incrementally=3)


def choose(records: Sequence[dict[str, Any]]) -> tuple[Any, ...]:
    names = [r["name"] for r in records if r["name"] is not None]
    large = [r["cents"] for r in records if r["cents"] is not None and r["cents"] > 5]
    encoded = [name.encode() for name in names]
    low, high = min(encoded, default=None), max(encoded, default=None)
    return (
        names[0] if names else None,
        names[-1] if names else None,
        None if low is None else low.decode(),
        None if high is None else high.decode(),
        large[-1] if large else None,
    )


def draw_records(rng: random.Random, count: int) -> list[dict[str, Any]]:
    names = [None, "", "a", "a\0", "ä", "\U00010000", "\uffff", "b" * 40]
    return [
        {
            "account": f"k{rng.randrange(rng.choice([2, 30]))}",
            "name": rng.choice(names),
            "cents": rng.choice([None, rng.randrange(12)]),
        }
        for _ in range(count)
    ]


@ON_SUITE
@pytest.mark.parametrize("expires", [False, True])
def test_chosen_values_equal_those_of_lists_through_snapshots_and_rescaling(
    job: Job, expires: bool
) -> None:
    rng = draw_random()
    wall = Wall()
    options: dict[str, Any] = {"aggregates": AGGREGATES}
    if expires:
        options |= {"ttl": TTL, "wall": wall}
    running = Counts(job, 2, **options)
    seen: dict[str, list[dict[str, Any]]] = defaultdict(list)
    used_s: dict[str, float] = {}
    for step in range(12):
        wall.now_s += rng.choice([0, 4]) if expires else 0
        for key in [k for k, at in used_s.items() if at + 10 <= wall.now_s]:
            del used_s[key], seen[key]
        records = draw_records(rng, rng.choice([0, 1, 20, 100]))
        expected: dict[str, list[tuple[Any, ...]]] = defaultdict(list)
        for record in records:
            key = record["account"]
            seen[key].append(record)
            used_s[key] = wall.now_s
            expected[key].append(choose(seen[key]))
        made: dict[str, list[tuple[Any, ...]]] = defaultdict(list)
        for row in running.take(records):
            made[row["account"]].append(tuple(row[name] for name in AGGREGATES))
        assert made == expected, f"step {step}"
        if step % 4 == 3:
            snapshots = running.snapshot(savepoint=step == 7)
            running = Counts(job, rng.choice([1, 2, 3]), snapshots, **options)


NAN = struct.unpack("<d", struct.pack("<Q", 0xFFF8_0000_0000_0001))[0]


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (pa.int8(), [-128, 127]),
        (pa.uint64(), [(1 << 64) - 1, 0]),
        (pa.float64(), [-0.0, NAN, float("-inf")]),
        (pa.float32(), [0.1, -0.0]),
        (pa.bool_(), [True, False, None, True]),
        (pa.decimal128(38, 10), [Decimal("-1.0000000001"), Decimal(5)]),
        (pa.date32(), [date(1969, 12, 31), date(9999, 12, 31)]),
        (pa.time64("us"), [time(1, 0, 0, 1), time(2)]),
        (pa.duration("s"), [timedelta(-1), timedelta(1)]),
        (pa.timestamp("ms", "Europe/Berlin"), [datetime(2026, 1, 1, tzinfo=timezone.utc), None]),
        (pa.large_string(), ["", "ä"]),
        (pa.binary(), [b"\0\xff", b""]),
        (pa.binary(2), [b"\0\xff", b"ab"]),
        (pa.dictionary(pa.int8(), pa.string()), ["a", "b", None]),
    ],
    ids=str,
)
@pytest.mark.parametrize("backend", ["rocksdb-small-cache"], indirect=True)
def test_first_and_last_values_of_each_type_are_kept_bit_by_bit(
    job: Job, kind: pa.DataType, values: list[Any]
) -> None:
    schema = pa.schema([("account", pa.string()), ("value", kind)])
    aggregates = {"first": first("value"), "last": last("value")}
    plain = kind.value_type if pa.types.is_dictionary(kind) else kind
    array = pa.array(values, plain)
    if kind != plain:
        array = array.dictionary_encode().cast(kind)
    # A slice, whose buffers begin before its first value.
    array = pa.concat_arrays([array[:1], array])[1:]
    running = Counts(job, schema=schema, aggregates=aggregates)
    batch = pa.record_batch([pa.array(["a"] * len(values)), array], schema=schema)
    running.operators[0].receive(Batch(batch))
    snapshots = running.snapshot(savepoint=True)
    running = Counts(job, 1, snapshots, schema=schema, aggregates=aggregates)
    nothing = pa.record_batch([pa.array(["a"]), pa.nulls(1, kind)], schema=schema)
    running.operators[0].receive(Batch(nothing))
    known = [value for value in pa.array(values, plain).to_pylist() if value is not None]
    (row,) = running.take_emitted()[-1:]
    assert repr((row["first"], row["last"])) == repr((known[0], known[-1]))


@pytest.mark.parametrize("kind", [pa.list_(pa.int64()), pa.struct([("a", pa.int8())]), pa.null()])
def test_a_value_that_cannot_be_kept_is_refused_by_its_name(kind: pa.DataType) -> None:
    with pytest.raises(ConfigError, match=r"last\('value'\): cannot keep a value of type"):
        last("value").result_type(pa.schema([("value", kind)]))


@ON_SUITE
def test_a_batch_emits_the_last_record_of_each_key_with_all_that_came_before(job: Job) -> None:
    rng = draw_random()
    made = running_schema(SCHEMA, AGGREGATES)

    def open_runner(emission: Emission) -> tuple[AggregateRunner, list[pa.RecordBatch]]:
        work = RunAggregates(("account",), AGGREGATES, None, emission)
        runner = AggregateRunner("op", work, job.open(), SCHEMA, made)
        emitted: list[pa.RecordBatch] = []
        runner.outputs.append(lambda batch: emitted.append(batch.rows))
        return runner, emitted

    every, by_batch = (open_runner(emission) for emission in Emission)
    for _ in range(8):
        records = draw_records(rng, rng.choice([0, 1, 50]))
        batch = pa.RecordBatch.from_pylist(records, SCHEMA)
        for runner, emitted in (every, by_batch):
            emitted.clear()
            runner.receive(Batch(batch))
        lasts: dict[str, dict[str, Any]] = {}
        for row in (row for rows in every[1] for row in rows.to_pylist()):
            lasts.pop(row["account"], None)
            lasts[row["account"]] = row
        assert [r for rows in by_batch[1] for r in rows.to_pylist()] == list(lasts.values())


@ON_SUITE
def test_kept_texts_that_expire_are_left_out_of_a_savepoint(job: Job) -> None:
    wall = Wall()
    work = Deduplicate(("account",), Keep.LAST, "name", TTL)
    operator = Deduplicator("op", work, job.open(), SCHEMA)
    assert operator._table.expiry is not None  # pyright: ignore[reportPrivateUsage]
    operator._table.expiry.clock = StateClock(wall)  # pyright: ignore[reportPrivateUsage]
    texts = ["", "a" * 17, "ä"]
    rows = [{"account": f"k{n}", "name": text, "cents": n} for n, text in enumerate(texts)]
    operator.receive(Batch(pa.RecordBatch.from_pylist(rows, SCHEMA)))
    wall.now_s += 6
    operator.receive(Batch(pa.RecordBatch.from_pylist(rows[1:2], SCHEMA)))
    wall.now_s += 6
    snapshot = operator.savepoint(job.next_checkpoint()).upload(job.storage)
    parts = read_canonical(job.storage, snapshot.keyed, job.context())
    assert [key for _, chunk in parts for key in chunk.keys.to_pylist()] == [b"k1"]
