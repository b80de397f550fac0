"""Value states of whole batches over every state backend, compared with a dict."""

from __future__ import annotations

import random
from collections.abc import Sequence
from datetime import date, datetime, timezone
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from tests.conformance.state_job import BACKENDS, SUITE_BACKENDS, Job

from onceflow import BatchValueState, StateTtlConfig, ValueStateDescriptor
from onceflow.core.errors import BadStateValue, ConfigError, StateIncompatible
from onceflow.core.state import KeyedBatchStates, KeyedStateStore, StateHandle, key_group_of

SCHEMA = pa.schema([("account", pa.string()), ("region", pa.int32()), ("amount", pa.int64())])
BALANCE = ValueStateDescriptor[int]("balance", pa.int64(), default=0)
NAME = ValueStateDescriptor[str]("name", str)
RATE = ValueStateDescriptor[float]("rate", float)


def rows_of(keys: Sequence[tuple[str, int]]) -> pa.RecordBatch:
    accounts, regions = [key for key, _ in keys], [region for _, region in keys]
    return pa.record_batch([accounts, regions, [1] * len(keys)], schema=SCHEMA)


class Opened:
    """The states of a store, and what a dict says that they are."""

    def __init__(self, store: KeyedStateStore, *descriptors: ValueStateDescriptor[Any]) -> None:
        self.states = KeyedBatchStates(store, ["account", "region"], SCHEMA)
        self.by_name: dict[str, BatchValueState] = {
            descriptor.name: self.states.value_state(descriptor) for descriptor in descriptors
        }
        self.states.finish_open()
        self.dropped = store.finish_open()

    def get(self, keys: Sequence[tuple[str, int]]) -> dict[tuple[str, int], dict[str, Any]]:
        return self.change(keys, {})

    def change(
        self, keys: Sequence[tuple[str, int]], put: dict[str, dict[tuple[str, int], Any]]
    ) -> dict[tuple[str, int], dict[str, Any]]:
        """Read all states of the keys, then put; return what was read."""
        batch = self.states.begin(rows_of(keys), None)
        order = [tuple(key.values()) for key in batch.keys.to_pylist()]
        read = {name: state.get_many().to_pylist() for name, state in self.by_name.items()}
        for name, values in put.items():
            mine = [values[key] for key in order]
            self.by_name[name].put_many(pa.array(mine, self.by_name[name].get_many().type))
        self.states.end()
        assert len(order) == batch.key_count == len(set(keys))
        return {
            key: {name: values[place] for name, values in read.items()}
            for place, key in enumerate(order)
        }


def expected(
    model: dict[tuple[str, int], dict[str, Any]], keys: Sequence[tuple[str, int]]
) -> dict[tuple[str, int], dict[str, Any]]:
    nothing = {"balance": 0, "name": None, "rate": None}
    return {key: nothing | model.get(key, {}) for key in keys}


@pytest.mark.parametrize("seed", range(2))
def test_states_of_batches_equal_a_dict_through_snapshots_and_rescaling(
    job: Job, seed: int
) -> None:
    rng = random.Random(seed)
    opened = Opened(job.open(), BALANCE, NAME, RATE)
    store = job.stores[-1]
    model: dict[tuple[str, int], dict[str, Any]] = {}
    for step in range(9):
        keys = [(f"k{rng.randrange(40)}", rng.randrange(2)) for _ in range(rng.choice([1, 9, 80]))]
        put: dict[str, dict[tuple[str, int], Any]] = {
            "balance": {key: rng.choice([None, rng.randrange(99)]) for key in keys},
            "name": {key: rng.choice([None, "x", "y" * 200]) for key in keys},
            "rate": {key: rng.choice([None, 0.5, 0.0]) for key in keys},
        }
        for name in rng.sample(sorted(put), rng.randrange(3)):
            del put[name]
        assert opened.change(keys, put) == expected(model, keys)
        for name, values in put.items():
            for key, value in values.items():
                model.setdefault(key, {}).pop(name, None)
                if value is not None:
                    model[key][name] = value
        if step % 4 == 3:
            handles = job.snapshot(store)
            for index in range(2):
                half = job.open(handles, index=index, parallelism=2)
                groups = job.context(index, 2).key_groups
                mine = [key for key in sorted(model) if key_group_of(key, 128) in groups]
                assert Opened(half, BALANCE, NAME, RATE).get(mine) == expected(model, mine)
            opened = Opened(job.open(handles), BALANCE, NAME, RATE)
            store = job.stores[-1]


@pytest.mark.parametrize("target", SUITE_BACKENDS)
def test_a_savepoint_brings_states_of_batches_to_any_backend(job: Job, target: str) -> None:
    kinds: dict[str, tuple[pa.DataType, list[Any]]] = {
        "flag": (pa.bool_(), [True, False, None]),
        "day": (pa.date32(), [date(2024, 2, 29), None, date(1969, 1, 1)]),
        "at": (pa.timestamp("us", "UTC"), [datetime(2024, 1, 1, tzinfo=timezone.utc), None, None]),
        "small": (pa.int8(), [-7, 0, None]),
        "half": (pa.float32(), [0.5, None, -1.0]),
        "text": (pa.large_string(), ["a", "", None]),
    }
    descriptors = [ValueStateDescriptor[Any](name, kind) for name, (kind, _) in kinds.items()]
    keys = [("a", 1), ("b", 1), ("c", 2)]
    opened = Opened(job.open(), *descriptors)
    put = {name: dict(zip(keys, values, strict=True)) for name, (_, values) in kinds.items()}
    opened.change(keys, put)
    handles = job.stores[-1].savepoint(job.next_checkpoint()).upload(job.storage)
    restored = Opened(job.open(handles, backend=BACKENDS[target]), *descriptors)
    expected = {key: {name: put[name][key] for name in kinds} for key in keys}
    assert restored.get(keys) == expected


def held(job: Job, *descriptors: ValueStateDescriptor[Any]) -> tuple[StateHandle, ...]:
    opened = Opened(job.open(), *descriptors)
    opened.change([("a", 1)], {descriptor.name: {("a", 1): 7} for descriptor in descriptors})
    return job.snapshot(job.stores[-1])


def test_a_new_state_begins_empty_and_one_that_is_gone_is_refused_by_name(job: Job) -> None:
    other = ValueStateDescriptor[int]("other", pa.int64(), default=1)
    handles = held(job, BALANCE)
    assert Opened(job.open(handles), other, BALANCE).get([("a", 1)]) == {
        ("a", 1): {"balance": 7, "other": 1}
    }
    both = held(job, BALANCE, other)
    with pytest.raises(StateIncompatible, match="other"):
        Opened(job.open(both), BALANCE)
    left = Opened(job.open(both, allow_non_restored_state=True), BALANCE)
    assert left.get([("a", 1)]) == {("a", 1): {"balance": 7}}
    assert any("other" in one for one in left.dropped)
    as_float = ValueStateDescriptor[float]("balance", float)
    with pytest.raises(StateIncompatible, match=r"balance=last\(int64\).*balance=last\(double\)"):
        Opened(job.open(handles), as_float)


def test_keys_without_a_value_leave_nothing_behind(job: Job) -> None:
    opened = Opened(job.open(), BALANCE)
    store = job.stores[-1]
    keys = [(f"k{number}", 0) for number in range(9_000)]
    opened.change(keys, {"balance": {key: number for number, key in enumerate(keys)}})
    job.snapshot(store)
    opened.change(keys[:8_990], {"balance": dict.fromkeys(keys[:8_990])})
    opened.get([(f"never put {number}", 0) for number in range(9_000)])
    handles = job.snapshot(store)
    opened.get([("another", 0)])
    assert opened.states.table is not None
    assert len(opened.states.table) < 9_000
    restored = Opened(job.open(handles), BALANCE)
    found = restored.get(keys)
    assert {key: one["balance"] for key, one in found.items() if one["balance"]} == {
        (f"k{number}", 0): number for number in range(8_990, 9_000)
    }
    savepoint = store.savepoint(job.next_checkpoint()).upload(job.storage)
    assert sum(handle.size_bytes for handle in savepoint) < 20_000


def test_what_cannot_be_put_is_refused_by_name_and_changes_nothing(job: Job) -> None:
    opened = Opened(job.open(), BALANCE)
    opened.change([("a", 1), ("b", 1)], {"balance": {("a", 1): 1, ("b", 1): 2}})
    opened.states.begin(rows_of([("a", 1), ("b", 1), ("a", 1)]), None)
    state = opened.by_name["balance"]
    with pytest.raises(BadStateValue, match=r"'balance' was given 3 values.*2 keys"):
        state.put_many(pa.array([1, 2, 3]))
    with pytest.raises(BadStateValue, match="'balance' holds int64"):
        state.put_many(pa.array(["x", "y"]))
    assert sorted(state.get_many().to_pylist()) == [1, 2]
    opened.states.end()
    with pytest.raises(ConfigError, match="outside of process"):
        state.get_many()
    with pytest.raises(ConfigError, match="'late'.*while batches are processed"):
        opened.states.value_state(ValueStateDescriptor("late", int))


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (int, [99.99]),
        (bool, [2]),
        (bool, [0.5]),
        (date, pa.array([1_500], pa.timestamp("us"))),
        (date, pa.array([0], pa.timestamp("us", "America/New_York"))),
        (float, [2**53 + 1]),
        (float, [Decimal(2**53 + 1)]),
        (pa.float32(), [1e300]),
        (pa.int8(), [300]),
        (pa.timestamp("ms"), pa.array([1_500], pa.timestamp("us"))),
        (pa.timestamp("us"), pa.array([0], pa.timestamp("us", "UTC"))),
        (pa.decimal128(5, 2), [1.005]),
    ],
    ids=str,
)
@pytest.mark.parametrize("expires", [False, True], ids=["kept", "expires"])
def test_a_value_that_a_state_does_not_hold_exactly_is_refused(
    job: Job, kind: Any, values: Any, expires: bool
) -> None:
    ttl = StateTtlConfig("1 h") if expires else None
    opened = Opened(job.open(), ValueStateDescriptor[Any]("kept", kind, ttl=ttl))
    opened.states.begin(rows_of([("a", 1)]), None)
    state = opened.by_name["kept"]
    with pytest.raises(BadStateValue, match="'kept' holds .* and cannot hold these values"):
        state.put_many(values if isinstance(values, pa.Array) else pa.array(values))
    assert state.get_many().to_pylist() == [None]
    opened.states.end()


@pytest.mark.parametrize(
    ("kind", "default"),
    [(int, 99.99), (pa.int8(), 300), (date, datetime(2020, 1, 1, 5)), (pa.float16(), 2049)],
    ids=str,
)
def test_a_default_that_a_column_does_not_hold_exactly_is_refused(
    job: Job, kind: Any, default: Any
) -> None:
    states = KeyedBatchStates(job.open(), ["account", "region"], SCHEMA)
    with pytest.raises(ConfigError, match=r"'kept' holds .*, and its default .* does not fit"):
        states.value_state(ValueStateDescriptor[Any]("kept", kind, default=default))


def test_states_without_a_column_are_refused_and_those_that_expire_are_kept_by_key(
    job: Job,
) -> None:
    states = KeyedBatchStates(job.open(), ["account", "region"], SCHEMA)
    with pytest.raises(ConfigError, match=r"'any'.*give an Arrow type"):
        states.value_state(ValueStateDescriptor("any"))
    with pytest.raises(ConfigError, match=r"'a,b'.*are reserved"):
        states.value_state(ValueStateDescriptor("a,b", int))
    expiring = ValueStateDescriptor[int]("last", int, ttl=StateTtlConfig("1 h"))
    opened = Opened(job.open(), expiring, BALANCE)
    opened.change([("a", 1)], {"last": {("a", 1): 5}, "balance": {("a", 1): 6}})
    restored = Opened(job.open(job.snapshot(job.stores[-1])), expiring, BALANCE)
    assert restored.get([("a", 1), ("b", 1)]) == {
        ("a", 1): {"last": 5, "balance": 6},
        ("b", 1): {"last": None, "balance": 0},
    }
