"""State types that change between two starts: what is kept, and what is refused by name.

Over every backend, from its own checkpoints and from savepoints that another backend restores; for
dataclasses, Structs and typed dicts alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, make_dataclass
from typing import Any, TypedDict, cast

import msgspec
import pytest
from tests.conformance.state_job import BACKENDS, Job
from typing_extensions import NotRequired

from onceflow.core.errors import StateIncompatible
from onceflow.core.state import (
    HeapBackend,
    KeyedStates,
    KeyedStateStore,
    ListStateDescriptor,
    MapStateDescriptor,
    RocksDBBackend,
    StateBackend,
    StateHandle,
    StateTtlConfig,
    ValueStateDescriptor,
)
from onceflow.core.state.clock import StateClock

REQUIRED = object()
Fields = dict[str, tuple[Any, Any]]
"""Name to type and default."""
Form = Callable[[Fields], Any]
"""Makes a type called Account of its fields."""


def as_dataclass(fields: Fields) -> Any:
    return make_dataclass(
        "Account",
        [
            (name, kind) if default is REQUIRED else (name, kind, field(default=default))
            for name, (kind, default) in fields.items()
        ],
    )


def as_struct(fields: Fields) -> Any:
    return msgspec.defstruct(
        "Account",
        [
            (name, kind) if default is REQUIRED else (name, kind, default)
            for name, (kind, default) in fields.items()
        ],
    )


def as_typed_dict(fields: Fields) -> Any:
    made: Any = TypedDict  # type checkers know it as a form that is written out
    return made(
        "Account",
        {
            name: kind if default is REQUIRED else NotRequired[kind]
            for name, (kind, default) in fields.items()
        },
    )


@pytest.fixture(params=[as_dataclass, as_struct, as_typed_dict])
def form(request: pytest.FixtureRequest) -> Form:
    made: Form = request.param
    return made


@pytest.fixture(params=["heap", "rocksdb-incremental"])
def backend(request: pytest.FixtureRequest) -> StateBackend:
    return BACKENDS[request.param]


@dataclass
class Kept:
    """What a store is restored from, and where."""

    job: Job
    handles: tuple[StateHandle, ...]
    backend: StateBackend

    def open(self) -> KeyedStateStore:
        return self.job.open(self.handles, backend=self.backend)


Keep = Callable[[KeyedStateStore], Kept]


@pytest.fixture(params=["checkpoint", "savepoint"])
def keep(request: pytest.FixtureRequest, job: Job) -> Keep:
    def checkpoint(store: KeyedStateStore) -> Kept:
        return Kept(job, job.snapshot(store), job.backend)

    def savepoint(store: KeyedStateStore) -> Kept:
        other = RocksDBBackend() if isinstance(job.backend, HeapBackend) else HeapBackend()
        taken = store.savepoint(job.next_checkpoint())
        return Kept(job, taken.upload(job.storage), other)

    return checkpoint if request.param == "checkpoint" else savepoint


class Accounts:
    """One account as a value, an element and an entry of each key."""

    def __init__(self, store: KeyedStateStore, kind: Any) -> None:
        self._store = store
        self._value = store.value_state(ValueStateDescriptor[Any]("value", kind))
        self._list = store.list_state(ListStateDescriptor[Any]("list", kind))
        self._map = store.map_state(MapStateDescriptor[str, Any]("map", str, kind))

    def put(self, key: str, account: Any) -> None:
        self._store.set_current_key(key)
        self._value.set(account)
        self._list.update([account])
        self._map.put("it", account)

    def get(self, key: str) -> Any:
        self._store.set_current_key(key)
        found = [self._value.get(), *self._list.get(), self._map.get("it")]
        assert found == [found[0]] * 3
        return found[0]


def fields_of(account: Any) -> dict[str, Any]:
    if isinstance(account, dict):
        return cast("dict[str, Any]", account)
    if isinstance(account, msgspec.Struct):
        return msgspec.structs.asdict(account)
    return asdict(account)


def written(job: Job, kind: Any, **fields: Any) -> KeyedStateStore:
    """Return a store with an account under "old"."""
    store = job.open()
    Accounts(store, kind).put("old", kind(**fields))
    return store


def test_a_field_is_added_with_a_default(job: Job, form: Form, keep: Keep) -> None:
    old = form({"total": (int, REQUIRED)})
    new = form({"total": (int, REQUIRED), "currency": (str, "EUR")})
    store = keep(written(job, old, total=7)).open()
    accounts = Accounts(store, new)
    store.opened()
    read = {"total": 7} if form is as_typed_dict else {"total": 7, "currency": "EUR"}
    assert fields_of(accounts.get("old")) == read
    accounts.put("new", new(total=8, currency="CHF"))
    again = keep(store).open()
    accounts = Accounts(again, new)
    assert fields_of(accounts.get("old")) == read
    assert fields_of(accounts.get("new")) == {"total": 8, "currency": "CHF"}


def test_a_field_is_removed_and_the_others_stay(job: Job, form: Form, keep: Keep) -> None:
    old = form({"total": (int, REQUIRED), "n": (int, REQUIRED)})
    new = form({"total": (int, REQUIRED)})
    accounts = Accounts(keep(written(job, old, total=7, n=2)).open(), new)
    assert fields_of(accounts.get("old")) == {"total": 7}


def test_a_fields_type_is_widened(job: Job, form: Form, keep: Keep) -> None:
    old = form({"total": (int, REQUIRED), "n": (int, REQUIRED)})
    new = form({"total": (float, REQUIRED), "n": (int | None, REQUIRED)})
    accounts = Accounts(keep(written(job, old, total=7, n=2)).open(), new)
    found = fields_of(accounts.get("old"))
    assert found == {"total": 7.0, "n": 2}
    assert type(found["total"]) is float


UNFIT: Sequence[tuple[Fields, str]] = [
    ({"total": (int, REQUIRED), "n": (int, REQUIRED)}, "field `n`"),
    ({"total": (str, REQUIRED)}, "Expected `str`, got `int`"),
    ({"sum": (int, REQUIRED)}, "field `sum`"),
]


def test_a_type_that_old_values_do_not_fit_is_refused_by_name_when_the_store_opens(
    job: Job, keep: Keep
) -> None:
    kept = keep(written(job, as_dataclass({"total": (int, REQUIRED)}), total=7))
    for fields, said in UNFIT:
        new = as_dataclass(fields)
        with pytest.raises(StateIncompatible, match=f"'value' does not read as .*Account.*{said}"):
            kept.open().value_state(ValueStateDescriptor[Any]("value", new))
        with pytest.raises(StateIncompatible, match=f"'list' does not read as .*Account.*{said}"):
            kept.open().list_state(ListStateDescriptor[Any]("list", new))
        with pytest.raises(StateIncompatible, match=f"'map' does not read as .*Account.*{said}"):
            kept.open().map_state(MapStateDescriptor[str, Any]("map", str, new))


WIDER: Sequence[tuple[Any, Any, Any]] = [
    (int, float, 7),
    (int, float, 2**90),
    (int, int | None, 7),
    (int, float | str, 7),
    (list[int], list[float], [1, 2]),
    (dict[str, int], dict[str, float | None], {"a": 1}),
    (tuple[int, str], tuple[float, str], (1, "a")),
]
OTHERS: Sequence[tuple[Any, Any, Any]] = [
    (float, int, 7.0),
    (int | None, int, 7),
    (int, str, 7),
    (list[float], list[int], [1.0]),
    (dict[int, int], dict[float, int], {1: 1}),
]


def of_types(job: Job, types: Sequence[tuple[Any, Any, Any]]) -> KeyedStateStore:
    """Return a store with a value of each old type, in states called 0, 1, …."""
    store = job.open()
    store.set_current_key("old")
    for number, (old, _, value) in enumerate(types):
        store.value_state(ValueStateDescriptor[Any](str(number), old)).set(value)
    return store


def test_numbers_and_what_is_made_of_them_are_widened(job: Job, keep: Keep) -> None:
    kept = keep(of_types(job, WIDER))
    for _ in range(2):
        store = kept.open()
        store.set_current_key("old")
        for number, (_, new, value) in enumerate(WIDER):
            found = store.value_state(ValueStateDescriptor[Any](str(number), new)).get()
            assert found == value
            assert new is not float or type(found) is float
        store.opened()
        kept = keep(store)


def test_a_type_that_is_no_wider_is_refused_by_both_names(job: Job, keep: Keep) -> None:
    kept = keep(of_types(job, OTHERS))
    for number, (_, new, _) in enumerate(OTHERS):
        with pytest.raises(
            StateIncompatible, match=rf"state '{number}' .*written as .*is now asked for as"
        ):
            kept.open().value_state(ValueStateDescriptor[Any](str(number), new))


def test_a_wider_type_is_given_a_time_to_live_at_once(job: Job) -> None:
    now_s = 1_000.0
    store = job.open()
    store.set_current_key("old")
    store.value_state(ValueStateDescriptor[int]("value", int)).set(7)
    restored = job.open(job.snapshot(store))
    states = KeyedStates(restored, StateClock(lambda: now_s))
    hour = StateTtlConfig("1 h")
    value = states.value_state(ValueStateDescriptor[float]("value", float, ttl=hour))
    restored.set_current_key("old")
    assert value.get() == 7.0
    now_s += 3601
    assert value.get() is None
