"""Running aggregates over every state backend; one suite, run over each of them."""

from __future__ import annotations

import random
from datetime import date, datetime
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from tests.conformance.state_job import (
    COLUMNS,
    Job,
    aggregate,
    table_of,
)

from onceflow.core.errors import StateError
from onceflow.core.state import AccumulatorColumn, StateHandle, hash_keys
from onceflow.core.state.keys.key_columns import read_key_columns


class Expected:
    """Running aggregates, one row after another."""

    def __init__(self) -> None:
        self.keys: dict[str, list[Any]] = {}

    def row(self, key: str, amount: int | None) -> tuple[Any, ...]:
        state = self.keys.setdefault(key, [0, 0.0, 0, None, None])
        state[2] += 1
        if amount is not None:
            state[0] += amount
            state[1] += float(amount)
            state[3] = amount if state[3] is None else min(state[3], amount)
            state[4] = float(amount) if state[4] is None else max(state[4], float(amount))
        return tuple(state)


def assert_running(found: dict[str, Any], expected: list[tuple[Any, ...]]) -> None:
    for index, column in enumerate(COLUMNS):
        assert pa.array(found[column.name]).to_pylist() == [row[index] for row in expected]


@pytest.mark.parametrize("seed", range(4))
def test_running_aggregates_equal_those_of_one_row_after_another(job: Job, seed: int) -> None:
    rng = random.Random(seed)
    store = job.open()
    model = Expected()
    saved: list[tuple[tuple[StateHandle, ...], dict[str, list[Any]]]] = []
    for step in range(12):
        rows = rng.choice([0, 1, 7, 60])
        keys = [f"k{rng.randrange(25)}" * rng.choice([1, 1, 60]) for _ in range(rows)]
        amounts = [rng.choice([None, rng.randrange(-9, 9)]) for _ in range(rows)]
        expected = [model.row(key, amount) for key, amount in zip(keys, amounts, strict=True)]
        assert_running(aggregate(store, keys, amounts), expected)
        if step % 4 == 2:
            pending = store.snapshot(job.next_checkpoint())
            saved_keys = {key: list(state) for key, state in model.keys.items()}
            more = aggregate(store, ["k1"], [3])
            assert_running(more, [model.row("k1", 3)])
            saved.append((pending.upload(job.storage), saved_keys))
        if step == 7:
            store = job.open(job.snapshot(store))
    for handles, keys_then in saved:
        restored = job.open(handles)
        names = sorted(keys_then)
        if names:
            found = aggregate(restored, names, [None] * len(names))
            assert found["total"].tolist() == [keys_then[name][0] for name in names]
            assert found["rows"].tolist() == [keys_then[name][2] + 1 for name in names]


def test_a_sum_that_leaves_64_bits_is_refused_by_key_and_changes_nothing(job: Job) -> None:
    store = job.open()
    top = 2**63 - 1
    aggregate(store, ["a", "b"], [top - 1, 5])
    with pytest.raises(StateError, match=r"'total'.*'running'.*op\[0\].*key 'a'"):
        aggregate(store, ["b", "a", "a"], [1, 1, 1])
    found = aggregate(store, ["b", "a"], [0, 1])
    assert found["total"].tolist() == [5, top]
    assert found["rows"].tolist() == [2, 2]


def test_two_keys_of_one_hash_are_never_mixed(job: Job) -> None:
    store = job.open()
    table = table_of(store)
    keys = [f"key-{number % 37}" for number in range(200)]
    ones = pa.array([1] * 200)
    values = {"total": ones, "mean": ones, "low": ones, "high": ones}
    same = np.zeros(200, np.uint64)
    found = table.update([pa.array(keys)], same, values)
    assert found["rows"].tolist() == [number // 37 + 1 for number in range(200)]
    found = table.update([pa.array(keys[:1])], same[:1], dict.fromkeys(values, ones[:1]))
    assert found["rows"].tolist() == [keys.count(keys[0]) + 1]


@pytest.mark.parametrize(
    "arrays",
    [
        [pa.array([1, 2, 1], pa.int32())],
        [pa.array([b"", b"\x00", b""], pa.large_binary())],
        [pa.array(["a", "", "a"]), pa.array([1, 1, 1]), pa.array(["", "a", ""])],
        [pa.array([True, False, True]), pa.array([date(2024, 1, 1)] * 3)],
        [pa.array([Decimal("1.5"), Decimal("-1.5"), Decimal("1.5")])],
        [pa.array(["x", "y", "x"]).dictionary_encode()],
        [pa.array([datetime(2024, 1, 1), datetime(2025, 1, 1), datetime(2024, 1, 1)])],
    ],
    ids=lambda arrays: "+".join(str(array.type) for array in arrays),
)
def test_key_columns_of_every_type_aggregate_and_restore(job: Job, arrays: list[Any]) -> None:
    types = [array.type for array in arrays]
    columns = [AccumulatorColumn("n", "count", pa.int64())]
    store = job.open()
    first = store.accumulators("n", types, columns)
    assert first.update(arrays, None, {})["n"].tolist() == [1, 1, 2]
    restored = job.open(job.snapshot(store)).accumulators("n", types, columns)
    assert restored.update(arrays, None, {})["n"].tolist() == [3, 2, 4]


def test_last_values_of_text_and_bytes_equal_a_dict_through_removals_and_snapshots(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most values are overwritten or removed, so that the arenas of values are packed."""
    monkeypatch.setattr("onceflow.core.state.aggregates.byte_values.SPARE_VALUES", 8)
    monkeypatch.setattr("onceflow.core.state.aggregates.accumulators.REMOVED_MIN", 8)
    rng = random.Random(5)
    model: dict[tuple[int, str], tuple[int, str | None, bytes | None]] = {}
    columns = [
        AccumulatorColumn("n", "last", pa.int64()),
        AccumulatorColumn("text", "last", pa.string()),
        AccumulatorColumn("raw", "last", pa.binary()),
    ]
    table = job.open().accumulators("kept", [pa.string()], columns, namespaced=True)
    for step in range(60):
        rows = {
            (rng.randrange(-3, 4), f"k{rng.randrange(5)}"): (
                step,
                rng.choice([None, "", "é" * rng.randrange(40)]),
                rng.choice([None, b"", rng.randbytes(rng.randrange(20))]),
            )
            for _ in range(rng.randrange(1, 8))
        }
        model |= rows
        namespaces = np.array([namespace for namespace, _ in rows])
        keys = [pa.array([key for _, key in rows])]
        read, hashes = read_key_columns(keys), hash_keys(keys)
        table.fetch(namespaces, read, hashes)
        entries = table.insert(namespaces, read, hashes)
        for place, values in enumerate(zip(*rows.values(), strict=True)):
            table.put(place, entries, pa.array(values, columns[place].type))
        table.release(entries, np.zeros(0, np.int64))
        if rng.random() < 0.3:
            first = rng.randrange(-3, 4)
            table.remove(table.select(first, first + 2))
            model = {one: row for one, row in model.items() if not first <= one[0] < first + 2}
        if step % 15 == 14:
            handles = job.snapshot(job.stores[-1])
            more = [AccumulatorColumn("new", "last", pa.string()), *columns[::-1]]
            asked = more if step == 59 else columns
            table = job.open(handles).accumulators("kept", [pa.string()], asked, namespaced=True)
        places = [table.shape.columns.index(column) for column in columns]
        every = table.select(-3, 4)
        read_back = [table.values(place, every).to_pylist() for place in places]
        found = zip(*read_back, strict=True)
        (names,) = table.keys_of(every)
        at = zip(table.namespaces_of(every).tolist(), names.to_pylist(), strict=True)
        assert dict(zip(at, found, strict=True)) == model
        # RocksDB may tell of some that were removed since the last snapshot.
        assert {one >> 1 for one, _ in model} <= set(table.namespaces(1).tolist())
    assert model
