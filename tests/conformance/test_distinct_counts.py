"""Distinct counts over every state backend, compared with Python sets."""

from __future__ import annotations

import random
import struct
from collections import defaultdict
from collections.abc import Sequence
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from tests.conformance.keyed_run import KeyedRun
from tests.conformance.state_job import Job
from tests.conformance.test_state_ttl import Wall
from tests.support.drawn_seeds import draw_random

from onceflow import count, count_distinct
from onceflow.core import state
from onceflow.core.errors import ConfigError, StateIncompatible
from onceflow.core.plan.aggregates import Aggregate, running_schema
from onceflow.core.plan.work import RunAggregates
from onceflow.core.protocol.checkpoints.snapshots import OperatorSnapshot
from onceflow.core.runtime.dataflow.channels import Batch
from onceflow.core.runtime.dataflow.keyed_operators import AggregateRunner
from onceflow.core.state.api.context import StateClock
from onceflow.core.state.readers.state_columns import columns_of, shape_of_meta
from onceflow.core.state.snapshots.canonical import read_canonical

SCHEMA = pa.schema([("account", pa.string()), ("name", pa.string()), ("cents", pa.int64())])
AGGREGATES = {
    "names": count_distinct("name"),
    "large_names": count_distinct("name", where="cents >= 5"),
    "cents_seen": count_distinct("cents"),
}
ON_SUITE = pytest.mark.parametrize("backend", ["heap", "rocksdb-small-cache"], indirect=True)
TTL = state.StateTtlConfig(10, cleanup_incrementally=3)


class Counts(KeyedRun[AggregateRunner]):
    """Operators with running distinct counts, side by side."""

    def __init__(
        self,
        job: Job,
        parallelism: int = 1,
        restored: Sequence[OperatorSnapshot] = (),
        *,
        ttl: state.StateTtlConfig | None = None,
        wall: Wall | None = None,
        schema: pa.Schema = SCHEMA,
        aggregates: dict[str, Aggregate] = AGGREGATES,
        allow_non_restored_state: bool = False,
    ) -> None:
        work = RunAggregates(("account",), aggregates, ttl)
        made = running_schema(schema, aggregates)
        super().__init__(
            job,
            lambda store: AggregateRunner("op", work, store, schema, made),
            schema,
            key="account",
            parallelism=parallelism,
            restored=restored,
            allow_non_restored_state=allow_non_restored_state,
        )
        for operator in self.operators:
            if wall is not None:
                expiry = operator._table.expiry  # pyright: ignore[reportPrivateUsage]
                assert expiry is not None
                expiry.clock = StateClock(wall)

    def take_counts(self, records: Sequence[dict[str, Any]]) -> dict[str, list[tuple[int, ...]]]:
        """Return the counts after each record, by key."""
        counts: dict[str, list[tuple[int, ...]]] = defaultdict(list)
        for row in self.take(records):
            counts[row["account"]].append(tuple(row[name] for name in AGGREGATES))
        return counts


class Model:
    """Keeps the sets of each key, and the time of its last record."""

    def __init__(self, ttl_s: float | None = None) -> None:
        self._ttl_s = ttl_s
        self._sets: dict[str, tuple[set[str], set[str], set[int]]] = {}
        self._used_s: dict[str, float] = {}

    def take(
        self, records: Sequence[dict[str, Any]], now_s: float = 0
    ) -> dict[str, list[tuple[int, ...]]]:
        if self._ttl_s is not None:
            for key in [k for k, used in self._used_s.items() if used + self._ttl_s <= now_s]:
                del self._sets[key], self._used_s[key]
        counts: dict[str, list[tuple[int, ...]]] = defaultdict(list)
        for record in records:
            key, name, cents = record["account"], record["name"], record["cents"]
            names, large, seen = self._sets.setdefault(key, (set(), set(), set()))
            if name is not None:
                names.add(name)
                if cents is not None and cents >= 5:
                    large.add(name)
            if cents is not None:
                seen.add(cents)
            self._used_s[key] = now_s
            counts[key].append((len(names), len(large), len(seen)))
        return counts


def draw_records(rng: random.Random, count: int) -> list[dict[str, Any]]:
    return [
        {
            "account": f"k{rng.randrange(rng.choice([2, 30]))}",
            "name": rng.choice([None, "", *(f"name-{rng.randrange(25)}" for _ in range(4))]),
            "cents": rng.choice([None, rng.randrange(9), -(1 << 63)]),
        }
        for _ in range(count)
    ]


@ON_SUITE
def test_running_distinct_counts_equal_sets_through_snapshots_and_rescaling(job: Job) -> None:
    rng = draw_random()
    model, counts = Model(), Counts(job, 2)
    for step in range(12):
        records = draw_records(rng, rng.choice([0, 1, 20, 100]))
        assert counts.take_counts(records) == model.take(records)
        if step % 4 == 3:
            snapshots = counts.snapshot(savepoint=step == 7)
            counts = Counts(job, rng.choice([1, 2, 3]), snapshots)


@ON_SUITE
def test_sets_of_an_expired_key_start_again_empty_through_snapshots_and_rescaling(
    job: Job,
) -> None:
    rng = draw_random()
    wall = Wall()
    model, counts = Model(10), Counts(job, 2, ttl=TTL, wall=wall)
    for step in range(20):
        wall.now_s += rng.choice([0, 1, 4])
        records = draw_records(rng, rng.choice([0, 1, 20]))
        assert counts.take_counts(records) == model.take(records, wall.now_s), f"step {step}"
        if step % 5 == 4:
            snapshots = counts.snapshot(savepoint=step == 9)
            counts = Counts(job, rng.choice([1, 2, 3]), snapshots, ttl=TTL, wall=wall)


def count_rows(job: Job, counts: Counts) -> dict[str, int]:
    """Return the number of rows of each state in a savepoint."""
    handles = [h for s in counts.snapshot(savepoint=True) for h in s.keyed]
    rows: dict[str, int] = defaultdict(int)
    for meta, chunk in read_canonical(job.storage, handles, job.context()):
        rows[meta.name] += len(chunk)
    return rows


@ON_SUITE
def test_a_set_is_deleted_with_its_expired_key(job: Job) -> None:
    wall = Wall()
    counts = Counts(job, ttl=TTL, wall=wall)
    counts.take([{"account": "old", "name": f"n{n}", "cents": n} for n in range(30)])
    wall.now_s += 6
    counts.take([{"account": "new", "name": "n", "cents": 1}])
    wall.now_s += 6
    for _ in range(20):
        counts.take([{"account": "new", "name": "n", "cents": 1}])
    assert count_rows(job, counts) == {
        "running": 1,
        "onceflow.distinct-name:value": 1,
        "onceflow.distinct-cents:value": 1,
    }


@ON_SUITE
def test_an_added_time_to_live_keeps_the_sets_that_are_there(job: Job) -> None:
    counts = Counts(job)
    counts.take([{"account": "a", "name": name, "cents": 7} for name in ("x", "y")])
    wall = Wall()
    later = Counts(job, 1, counts.snapshot(savepoint=False), ttl=TTL, wall=wall)
    known = {"account": "a", "name": "x", "cents": 7}
    wall.now_s = StateClock().now_ms() / 1000 + 1
    assert later.take_counts([known]) == {"a": [(2, 2, 1)]}
    wall.now_s += 10
    assert later.take_counts([known]) == {"a": [(1, 1, 1)]}


def nan(payload: int) -> float:
    (number,) = struct.unpack("<d", struct.pack("<Q", 0x7FF8 << 48 | payload))
    return float(number)


@pytest.mark.parametrize(
    ("kind", "values", "distinct"),
    [
        (pa.float64(), [0.0, -0.0, nan(1), nan(2), float("inf"), 1e-320, None], 4),
        (pa.float32(), [0.5, 0.5, -0.0, 0.0], 2),
        (pa.int8(), [-1, 127, -1], 2),
        (pa.uint64(), [(1 << 64) - 1, 0, (1 << 64) - 1], 2),
        (pa.bool_(), [True, False, True, None], 2),
        (pa.decimal128(10, 2), [Decimal("1.10"), Decimal("1.1"), Decimal("-1.10")], 2),
        (pa.decimal128(38, 0), [Decimal(10**38 - 1), Decimal(1 - 10**38)], 2),
        (pa.binary(), [b"", b"\0", b"\0\0", b""], 3),
        (pa.large_string(), ["a", "a\0", "", "ä", "a" * 300, "a" * 300], 5),
        (pa.dictionary(pa.int8(), pa.string()), ["a", "b", "a", None], 2),
        (pa.date32(), [date(1970, 1, 1), date(1969, 12, 31), date(1970, 1, 1)], 2),
        (pa.time64("us"), [time(1), time(1, 0, 0, 1), time(1)], 2),
        (pa.time32("s"), [time(1), time(2)], 2),
        (pa.duration("ms"), [timedelta(1), timedelta(-1), timedelta(1)], 2),
        (pa.timestamp("us", "UTC"), [datetime(2026, 1, 1, tzinfo=timezone.utc), None], 1),
        (pa.timestamp("ns"), [np.datetime64(5, "ns"), np.datetime64(6, "ns")], 2),
    ],
    ids=str,
)
@pytest.mark.parametrize("backend", ["rocksdb-small-cache"], indirect=True)
def test_values_of_each_type_are_distinct_as_in_sql(
    job: Job, kind: pa.DataType, values: list[Any], distinct: int
) -> None:
    schema = pa.schema([("account", pa.string()), ("value", kind)])
    aggregates = {"n": count_distinct("value")}
    counts = Counts(job, schema=schema, aggregates=aggregates)
    plain = kind.value_type if pa.types.is_dictionary(kind) else kind
    array = pa.array(values, plain)
    array = array.dictionary_encode().cast(kind) if kind != plain else array
    batch = pa.record_batch([pa.array(["a"] * len(values)), array], schema=schema)
    for _ in range(2):
        counts.operators[0].receive(Batch(batch))
        counts = Counts(
            job, 1, counts.snapshot(savepoint=True), schema=schema, aggregates=aggregates
        )
    counts.operators[0].receive(Batch(batch.slice(0, 1)))
    assert counts.take_emitted()[-1]["n"] == distinct


@pytest.mark.parametrize("kind", [pa.list_(pa.int64()), pa.struct([("a", pa.int8())]), pa.null()])
def test_a_column_whose_values_cannot_be_compared_is_refused(kind: pa.DataType) -> None:
    schema = pa.schema([("value", kind)])
    with pytest.raises(ConfigError, match=r"count_distinct\('value'\).*cannot be compared"):
        count_distinct("value").result_type(schema)


@pytest.mark.parametrize("backend", ["heap-layers", "rocksdb-incremental"], indirect=True)
def test_a_batch_writes_the_new_values_and_not_the_whole_set(job: Job) -> None:
    counts = Counts(job)
    every = [{"account": "a", "name": f"name-{n}", "cents": n} for n in range(8_000)]
    counts.take(every)
    first = counts.snapshot(savepoint=False)
    counts.take([*every[:100], {"account": "a", "name": "new", "cents": -1}])
    second = counts.snapshot(savepoint=False)
    known = {handle.name for snapshot in first for handle in snapshot.keyed}
    new = [h for snapshot in second for h in snapshot.keyed if h.name not in known]
    assert sum(handle.size_bytes for handle in new) < 12_000


@ON_SUITE
def test_a_set_in_a_savepoint_is_read_as_rows_of_key_and_value(job: Job) -> None:
    counts = Counts(job)
    counts.take([{"account": "a", "name": name, "cents": 7} for name in ("x", "y", "x")])
    handles = [h for s in counts.snapshot(savepoint=True) for h in s.keyed]
    read = [
        (meta, columns_of(meta, None, "typed").batch(rows))
        for meta, rows in read_canonical(job.storage, handles, job.context())
        if meta.name == "onceflow.distinct-name:value"
    ]
    keys = [row["key"] for _, batch in read for row in batch.to_pylist()]
    assert sorted(key["_3"] for key in keys) == ["x", "y"]
    assert {key["_2"] for key in keys} == {"a"}
    assert shape_of_meta(read[0][0]).member_type == pa.string()


@ON_SUITE
def test_a_count_over_values_of_another_type_begins_anew_with_its_set(job: Job) -> None:
    aggregates = {"n": count_distinct("value"), "rows": count()}

    def restore(
        kind: pa.DataType, snapshots: Sequence[OperatorSnapshot] = (), *, allow: bool = False
    ) -> Counts:
        schema = pa.schema([("account", pa.string()), ("value", kind)])
        return Counts(
            job,
            1,
            snapshots,
            schema=schema,
            aggregates=aggregates,
            allow_non_restored_state=allow,
        )

    counts = restore(pa.int64())
    counts.take([{"account": "a", "value": value} for value in (1, 2, 3)])
    snapshots = counts.snapshot(savepoint=True)
    with pytest.raises(StateIncompatible, match=r"=True\), which deletes aggregate 'n' and"):
        restore(pa.string(), snapshots)
    texts = restore(pa.string(), snapshots, allow=True)
    assert texts.operators[0].dropped == (
        "aggregate 'n' of op", "state 'onceflow.distinct-value:value' of op"
    )  # fmt: skip
    [row] = texts.take([{"account": "a", "value": "1"}])
    assert (row["n"], row["rows"]) == (1, 4)
    # A wider integer is another type for the schema, and has the same members.
    [row] = restore(pa.int16(), snapshots).take([{"account": "a", "value": 3}])
    assert (row["n"], row["rows"]) == (3, 4)


@ON_SUITE
def test_counts_of_columns_whose_names_look_like_labels_stay_apart(job: Job) -> None:
    schema = pa.schema(
        [
            ("account", pa.string()),
            ("x", pa.float64()),
            ("float-x", pa.int64()),
            ("x:float", pa.int64()),
            ("a=b),c]", pa.int64()),
        ]
    )
    aggregates = {f"n{at}": count_distinct(name) for at, name in enumerate(schema.names[1:])}
    counts = Counts(job, schema=schema, aggregates=aggregates)
    names = schema.names[1:]
    counts.take([{"account": "a", **dict.fromkeys(names, 1)}])
    snapshots = counts.snapshot(savepoint=True)
    counts = Counts(job, 1, snapshots, schema=schema, aggregates=aggregates)
    [row] = counts.take([{"account": "a", **{name: at for at, name in enumerate(names)}}])
    assert [row[name] for name in aggregates] == [2, 1, 2, 2]


def test_a_column_whose_set_cannot_be_named_is_refused_in_the_plan() -> None:
    for name, fits in (("x" * 176, True), ("x" * 177, False), ("ä" * 100, False)):
        schema = pa.schema([(name, pa.int64())])
        if fits:
            assert count_distinct(name).result_type(schema) == pa.int64()
            continue
        with pytest.raises(ConfigError, match=r"name of the column is too long.*rename the column"):
            count_distinct(name).result_type(schema)
