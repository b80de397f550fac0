"""Running aggregates of money and of times over every state backend."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from datetime import date, datetime, time, timezone
from decimal import ROUND_HALF_UP, Context, Decimal, localcontext
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from tests.conformance.state_job import Job

from onceflow.core.errors import BadStateValue, StateIncompatible
from onceflow.core.plan.aggregates import Aggregate, avg, max_, min_, sum_
from onceflow.core.state import AccumulatorTable, KeyedStateStore, hash_keys
from onceflow.core.state.aggregates.totals import to_typed_array

AGGREGATES = {"total": sum_("v"), "low": min_("v"), "high": max_("v"), "mean": avg("v")}


@pytest.fixture(autouse=True)
def exactly() -> Iterator[None]:
    """Have Python's own decimals round nothing: they have 28 digits otherwise."""
    with localcontext(Context(prec=150)):
        yield


def table_of(
    store: KeyedStateStore,
    kind: pa.DataType,
    aggregates: dict[str, Aggregate] = AGGREGATES,
    *,
    namespaced: bool = False,
) -> AccumulatorTable:
    schema = pa.schema([("v", kind)])
    columns = [aggregate.total(name, schema) for name, aggregate in aggregates.items()]
    return store.accumulators("money", [pa.string()], columns, namespaced=namespaced)


def update(
    table: AccumulatorTable, keys: Sequence[str], values: Sequence[Any], kind: pa.DataType
) -> dict[str, list[Any]]:
    column = pa.array(values, kind)
    given = {one.name: column for one in table.shape.columns}
    found = table.update([pa.array(keys, pa.string())], None, given)
    return {name: pa.array(one).to_pylist() for name, one in found.items()}


def expected_of(values: Sequence[Decimal | None], kind: pa.DataType) -> dict[str, Decimal | None]:
    known = [value for value in values if value is not None]
    total = sum(known, Decimal(0).scaleb(-kind.scale))
    if not known:
        return {"total": total, "low": None, "high": None, "mean": None}
    digits = kind.scale + min(4, 38 - kind.precision)
    mean = (total / len(known)).quantize(Decimal(1).scaleb(-digits), ROUND_HALF_UP)
    return {"total": total, "low": min(known), "high": max(known), "mean": mean}


@pytest.mark.parametrize("kind", [pa.decimal128(12, 2), pa.decimal128(36, 6), pa.decimal128(37, 0)])
@pytest.mark.parametrize("seed", range(2))
def test_aggregates_of_decimals_are_those_of_pythons_through_restores_and_rescaling(
    job: Job, kind: pa.DataType, seed: int
) -> None:
    rng = random.Random(seed)
    most = 10**kind.precision // 50
    tables = [table_of(job.open(), kind)]
    stores = [job.stores[-1]]
    history: dict[str, list[Decimal | None]] = {}
    for step in range(6):
        keys = [f"k{rng.randrange(12)}" for _ in range(rng.choice([0, 1, 9, 30 // (step + 1)]))]
        numbers = [rng.choice([rng.randint(-most, most), rng.randint(-9, 9), None]) for _ in keys]
        values = [None if n is None else Decimal(n).scaleb(-kind.scale) for n in numbers]
        for index, table in enumerate(tables):
            groups = job.context(index, len(tables)).key_groups
            of_rows = table.group_of_hashes(hash_keys([pa.array(keys, pa.string())])).tolist()
            mine = [row for row, group in enumerate(of_rows) if group in groups]
            found = update(table, [keys[r] for r in mine], [values[r] for r in mine], kind)
            for place, row in enumerate(mine):
                seen = history.setdefault(keys[row], [])
                seen.append(values[row])
                assert {name: one[place] for name, one in found.items()} == expected_of(seen, kind)
        if step in (1, 3):
            handles = tuple(one for store in stores for one in job.snapshot(store))
            count = 2 if step == 1 else 1
            stores = [job.open(handles, index=n, parallelism=count) for n in range(count)]
            tables = [table_of(store, kind) for store in stores]


def test_sum_of_39_digits_is_refused_by_column_operator_and_key_and_changes_nothing(
    job: Job,
) -> None:
    kind = pa.decimal128(38, 2)
    nines, cent = Decimal("9" * 36 + ".99"), Decimal("0.01")
    table = table_of(job.open(), kind)
    update(table, ["a", "b"], [nines, -nines], kind)
    for key, value in (("a", cent), ("b", -cent)):
        with pytest.raises(BadStateValue, match=rf"sum 'total' .*38 digits.*'{key}'") as caught:
            update(table, ["c", key], [cent, value], kind)
        assert caught.value.row == 1
    found = update(table, ["a", "b", "c"], [-cent, cent, None], kind)
    assert found["total"] == [nines - cent, cent - nines, Decimal("0.00")]
    only_mean = table_of(job.open(), kind, {"mean": avg("v")})
    with pytest.raises(BadStateValue, match=r"sum of the avg 'mean'.*38 digits at key 'a'"):
        update(only_mean, ["a", "a"], [nines, cent], kind)


def test_panes_of_decimals_are_merged_exactly_or_refused_by_key(job: Job) -> None:
    kind = pa.decimal128(38, 2)
    store = job.open()
    table = table_of(store, kind, namespaced=True)
    big, cent = Decimal("9" * 36 + ".98"), Decimal("0.01")
    rows = [(1, "a", big), (2, "a", cent), (1, "b", None), (2, "b", -big), (3, "a", cent)]

    def fold(rows: Sequence[tuple[int, str, Decimal | None]]) -> None:
        panes, keys, values = zip(*rows, strict=True)
        column = pa.array(values, kind)
        given = {one.name: column for one in table.shape.columns}
        table.finish(table.fold(np.array(panes), [pa.array(keys)], None, given))

    fold(rows)
    table = table_of(job.open(job.snapshot(store)), kind, namespaced=True)
    entries = table.select(1, 3)
    leaders, _, totals = table.merge_by_key(entries, np.zeros(len(entries), np.int64))
    found = zip(
        table.keys_of(entries[leaders])[0].to_pylist(),
        *(t.to_pylist() for t in totals),
        strict=True,
    )
    half = (big + cent) / 2
    assert sorted(found) == [
        ("a", big + cent, cent, big, half.quantize(cent, ROUND_HALF_UP)),
        ("b", -big, -big, -big, -big),
    ]
    fold([(3, "a", cent)])
    with pytest.raises(BadStateValue, match=r"'total'.*38 digits at key 'a'.*windows are merged"):
        entries = table.select(1, 4)
        table.merge_by_key(entries, np.zeros(len(entries), np.int64))


@pytest.mark.parametrize("kind", [pa.int64(), pa.float64()])
def test_averages_of_whole_numbers_and_floats_are_floats(job: Job, kind: pa.DataType) -> None:
    top = 2**63 - 1 if kind == pa.int64() else 1.5
    store = job.open()
    table = table_of(store, kind, {"mean": avg("v")})
    found = update(table, ["a", "b", "b", "c", "c"], [None, top, top, -1, 2], kind)
    assert found["mean"] == [None, float(top), float(top), -1.0, 0.5]
    table = table_of(job.open(job.snapshot(store)), kind, {"mean": avg("v")})
    assert update(table, ["a", "c"], [-3, None], kind)["mean"] == [-3.0, 0.5]


@pytest.mark.parametrize(
    ("kind", "early", "late"),
    [
        (pa.date32(), date(1, 1, 1), date(9999, 12, 31)),
        (pa.date64(), date(1969, 1, 1), date(2024, 1, 1)),
        (pa.timestamp("us"), datetime(1, 1, 1), datetime(9999, 12, 31)),
        (
            pa.timestamp("ms", "Europe/Berlin"),
            datetime(1969, 1, 1, tzinfo=timezone.utc),
            datetime(2024, 10, 27, 1, 30, tzinfo=timezone.utc),
        ),
        (pa.time32("s"), time(1), time(23)),
        (pa.time64("us"), time(0, 0, 0, 1), time(23, 59)),
    ],
    ids=str,
)
def test_first_and_last_of_dates_and_times_keep_their_type(
    job: Job, kind: pa.DataType, early: Any, late: Any
) -> None:
    aggregates = {"first": min_("v"), "last": max_("v")}
    store = job.open()
    table = table_of(store, kind, aggregates)
    for values, expected in (
        ([None, late], ([None, late], [None, late])),
        ([early, None], ([early, early], [late, late])),
    ):
        given = pa.array(values, kind)
        found = table.update([pa.array(["a", "a"])], None, {"first": given, "last": given})
        for name, one in zip(("first", "last"), expected, strict=True):
            assert to_typed_array(found[name], kind).equals(pa.array(one, kind))
        table = table_of(job.open(job.snapshot(store)), kind, aggregates)
        store = job.stores[-1]


def test_another_scale_is_refused_by_name_and_more_digits_are_not(job: Job) -> None:
    store = job.open()
    update(
        table_of(store, pa.decimal128(9, 2), {"total": sum_("v")}),
        ["a"],
        [Decimal(1)],
        pa.decimal128(9, 2),
    )
    handles = job.snapshot(store)
    wider = pa.decimal128(20, 2)
    table = table_of(job.open(handles), wider, {"total": sum_("v")})
    assert update(table, ["a"], [Decimal(10) ** 15], wider)["total"] == [Decimal(10) ** 15 + 1]
    with pytest.raises(StateIncompatible, match=r"decimal128\(38, 2\).*decimal128\(38, 3\)"):
        table_of(job.open(handles), pa.decimal128(9, 3), {"total": sum_("v")})
