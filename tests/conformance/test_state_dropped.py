"""State that a snapshot holds and an operator does not take: refused by name, or dropped alone."""

from __future__ import annotations

from dataclasses import make_dataclass
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pytest
from tests.conformance import state_job

from onceflow.core import state
from onceflow.core.errors import ConfigError, StateIncompatible

TOTAL = state.AccumulatorColumn("total", "sum", pa.int64())
MEAN = state.AccumulatorColumn("mean", "sum", pa.float64())
ROWS = state.AccumulatorColumn("rows", "count", pa.int64())
LOW = state.AccumulatorColumn("low", "min", pa.int64())
FIRST = state.AccumulatorColumn("first", "min", pa.timestamp("us", "UTC"))
KEYS = state_job.keys_named(300)


@pytest.fixture
def three_states(job: state_job.Job) -> tuple[state.StateHandle, ...]:
    states = state_job.States(job.open())
    states.fill(KEYS, "x", 7)
    return job.snapshot(states.store)


def table_of(
    store: state.KeyedStateStore, *columns: state.AccumulatorColumn
) -> state.AccumulatorTable:
    return store.accumulators("running", [pa.string()], columns)


def add_to_each(table: state.AccumulatorTable, amount: int) -> dict[str, list[float]]:
    """Add `amount` to each key's aggregates and return the distinct results of each."""
    amounts = pa.array([amount] * len(KEYS), pa.int64())
    given = {
        "total": amounts,
        "sum": amounts,
        "mean": amounts.cast(pa.float64()),
        "low": amounts,
        "first": pa.array([amount] * len(KEYS), pa.timestamp("us", "UTC")),
    }
    names = [column.name for column in table.shape.columns]
    values = {name: given[name] for name in names if name in given}
    results = table.update([pa.array(KEYS, pa.string())], None, values)
    return {name: sorted({_plain(v) for v in results[name]}) for name in names}


def _plain(value: np.generic) -> float:
    number = value.astype(np.int64) if isinstance(value, np.datetime64) else value
    return cast("float", number.item())


def test_a_state_that_is_not_asked_for_is_refused_by_name(
    job: state_job.Job, three_states: tuple[state.StateHandle, ...]
) -> None:
    store = job.open(three_states)
    store.list_state(state_job.RECENT)
    store.map_state(state_job.BY_DAY)
    store.value_state(state.ValueStateDescriptor[int]("saldo", int, default=0))
    said = r"'balance' \(value msgpack/1:int\) of op\[0\].*uses 'by day', 'recent', 'saldo'"
    with pytest.raises(StateIncompatible, match=said) as refused:
        store.finish_open()
    assert "allow_non_restored_state" in str(refused.value)


def test_only_what_is_not_asked_for_is_dropped_where_that_is_allowed(
    job: state_job.Job, three_states: tuple[state.StateHandle, ...]
) -> None:
    store = job.open(three_states, allow_non_restored_state=True)
    recent, by_day = store.list_state(state_job.RECENT), store.map_state(state_job.BY_DAY)
    saldo = store.value_state(state.ValueStateDescriptor[int]("saldo", int, default=0))
    assert store.finish_open() == ("state 'balance' of op",)
    store.set_current_key(KEYS[7])
    assert (recent.get(), by_day.get("x"), saldo.get()) == ([f"x-{KEYS[7]}"], 7, 0)
    # It is gone from the next snapshot, too: asked for again, it is new.
    again = job.open(job.snapshot(store), allow_non_restored_state=True)
    assert state_job.States(again).read(KEYS[7]) == (0, [f"x-{KEYS[7]}"], {"x": 7})
    assert again.finish_open() == ("state 'saldo' of op",)


def test_a_state_of_another_type_begins_anew_where_that_is_allowed(
    job: state_job.Job, three_states: tuple[state.StateHandle, ...]
) -> None:
    store = job.open(three_states, allow_non_restored_state=True)
    balance = store.value_state(state.ValueStateDescriptor[str]("balance", str, default="none"))
    recent = store.list_state(state_job.RECENT)
    store.map_state(state_job.BY_DAY)
    assert store.finish_open() == ("state 'balance' of op",)
    for key in (KEYS[0], KEYS[-1]):
        store.set_current_key(key)
        assert (balance.get(), recent.get()) == ("none", [f"x-{key}"])
    balance.set("all of it")
    restored = job.open(job.snapshot(store))
    balance = restored.value_state(state.ValueStateDescriptor[str]("balance", str, default="none"))
    restored.set_current_key(KEYS[-1])
    assert balance.get() == "all of it"


def test_a_class_that_was_only_renamed_keeps_its_state(job: state_job.Job) -> None:
    old = make_dataclass("Average", [("total", int)])
    store = job.open()
    store.set_current_key("a")
    store.value_state(state.ValueStateDescriptor[Any]("mean", old)).set(old(7))
    handles = job.snapshot(store)
    new = make_dataclass("Mean", [("total", int)])
    with pytest.raises(StateIncompatible, match=r"Average.*Mean.*__qualname__ = 'Old'"):
        job.open(handles).value_state(state.ValueStateDescriptor[Any]("mean", new))
    renamed = make_dataclass("Mean", [("total", int)])
    renamed.__qualname__ = "Average"
    store = job.open(handles)
    store.set_current_key("a")
    assert store.value_state(state.ValueStateDescriptor[Any]("mean", renamed)).get() == renamed(7)


@pytest.mark.parametrize(
    ("columns", "gone", "after"),
    [
        pytest.param((TOTAL, ROWS, LOW), (), {"total": 12, "rows": 2, "low": 5}, id="added"),
        pytest.param((ROWS,), ("total",), {"rows": 2}, id="removed"),
        pytest.param(
            (state.AccumulatorColumn("sum", "sum", pa.int64()), ROWS),
            ("total",),
            {"sum": 5, "rows": 2},
            id="renamed",
        ),
        pytest.param(
            (FIRST, ROWS, MEAN, TOTAL),
            (),
            {"first": 5, "rows": 2, "mean": 5.0, "total": 12},
            id="among others",
        ),
    ],
)
def test_one_aggregate_comes_or_goes_and_the_others_stay(
    job: state_job.Job,
    columns: tuple[state.AccumulatorColumn, ...],
    gone: tuple[str, ...],
    after: dict[str, float],
) -> None:
    store = job.open()
    add_to_each(table_of(store, TOTAL, ROWS), 7)
    handles = job.snapshot(store)
    with pytest.raises(StateIncompatible, match=r"'running'.*allow_non_restored_state"):
        table_of(job.open(handles), *columns)
    store = job.open(handles, allow_non_restored_state=True)
    table = table_of(store, *columns)
    assert store.finish_open() == tuple(f"aggregate {name!r} of op" for name in gone)
    assert add_to_each(table, 5) == {name: [value] for name, value in after.items()}
    # What is taken over is whole in the next snapshot, for which nothing needs to be allowed.
    store = job.open(job.snapshot(store))
    table = table_of(store, *columns)
    assert store.finish_open() == ()
    assert len(add_to_each(table, 0)["rows"]) == 1


def test_aggregates_in_another_order_are_the_same(job: state_job.Job) -> None:
    store = job.open()
    add_to_each(table_of(store, TOTAL, MEAN, ROWS), 7)
    store = job.open(job.snapshot(store))
    table = table_of(store, ROWS, TOTAL, MEAN)
    assert store.finish_open() == ()
    assert add_to_each(table, 1) == {"rows": [2], "total": [8], "mean": [8.0]}


def test_aggregates_of_another_key_are_dropped_as_a_whole(job: state_job.Job) -> None:
    store = job.open()
    add_to_each(table_of(store, TOTAL), 7)
    store = job.open(job.snapshot(store), allow_non_restored_state=True)
    store.accumulators("running", [pa.string(), pa.int64()], [TOTAL])
    assert store.finish_open() == ("state 'running' of op",)


def test_a_state_that_is_asked_for_late_is_refused_from_the_first_run_on(
    job: state_job.Job,
) -> None:
    store = job.open()
    early = store.value_state(state_job.BALANCE)
    assert store.finish_open() == ()
    assert store.value_state(state_job.BALANCE) is early
    with pytest.raises(ConfigError, match=r"'recent' of op\[0\].*Declare every state in open\(\)"):
        store.list_state(state_job.RECENT)
