"""State types that change between two starts: what is kept, and what is refused by name.

Over every backend, from its own checkpoints and from savepoints that another backend restores; for
dataclasses, Structs and typed dicts alike.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, make_dataclass
from datetime import date
from decimal import Decimal
from functools import partial
from types import GenericAlias, ModuleType
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
from onceflow.core.state.api.context import StateClock

REQUIRED = object()
KEYS = 300
"""More than RocksDB reads where any value will do."""
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
    """The snapshot that a store is restored from, and its location."""

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
    store.finish_open()
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
    (
        {"total": (int, REQUIRED), "n": (int, REQUIRED)},
        "ield `Account.n` is new and has no default",
    ),
    ({"total": (str, REQUIRED)}, "ield `Account.total` was int and is str"),
    ({"sum": (int, REQUIRED)}, "ield `Account.sum` is new and has no default"),
]


def test_a_type_that_old_values_do_not_fit_is_refused_by_name_when_the_store_opens(
    job: Job, keep: Keep
) -> None:
    kept = keep(written(job, as_dataclass({"total": (int, REQUIRED)}), total=7))
    for fields, said in UNFIT:
        new = as_dataclass(fields)
        with pytest.raises(StateIncompatible, match=f"'value' .*written as .*Account.*{said}"):
            kept.open().value_state(ValueStateDescriptor[Any]("value", new))
        with pytest.raises(StateIncompatible, match=f"'list' .*written as .*Account.*{said}"):
            kept.open().list_state(ListStateDescriptor[Any]("list", new))
        with pytest.raises(StateIncompatible, match=f"'map' .*written as .*Account.*{said}"):
            kept.open().map_state(MapStateDescriptor[str, Any]("map", str, new))


@dataclass
class Place:
    x: int
    y: int = 0


@dataclass
class Node:
    """Holds itself, and is one of two that hold each other."""

    number: int
    next: Node | None = None
    edges: list[Edge] = field(default_factory=list["Edge"])


@dataclass
class Edge:
    to: Node
    weight: int = 1


def with_float_weights() -> Any:
    """Return `Node` with edges that weigh floats; they hold each other, too."""
    edge = make_dataclass("Edge", [("to", "Node"), ("weight", float, 1.0)])
    node = make_dataclass(
        "Node",
        [
            ("number", int),
            ("next", "Node | None", None),
            ("edges", GenericAlias(list, (edge,)), ()),
        ],
    )
    names = ModuleType("of_nodes")
    vars(names).update(Node=node, Edge=edge)
    sys.modules[names.__name__] = names
    edge.__module__ = node.__module__ = names.__name__
    return node


OF_ANOTHER_KIND: Sequence[tuple[Any, Any, Any, str]] = [
    (list[int], set[int], [1, 1], r"list\[int\] and is set\[int\]"),
    (dict[str, int], Place, {"x": 1}, r"dict\[str,int\] and is Place"),
    (Place, dict[str, int], Place(1), r"Place and is dict\[str,int\]"),
    (dict[str, list[int]], dict[str, set[int]], {"a": [1, 1]}, r"dict.* and is dict.*set"),
    (float, int, 1.0, "float and is int"),
    (int | None, int, 1, r"int\|none and is int"),
    (str, bytes, "", "str and is bytes"),
    (str, date, "2020-01-01", "str and is date"),
    (str, Decimal, "1", "str and is Decimal"),
]


def test_a_field_that_becomes_of_another_kind_is_refused_by_both_types(
    job: Job, form: Form, keep: Keep
) -> None:
    fields = {f"f{n}": (old, REQUIRED) for n, (old, *_) in enumerate(OF_ANOTHER_KIND)}
    values = {f"f{n}": value for n, (_, _, value, _) in enumerate(OF_ANOTHER_KIND)}
    kept = keep(written(job, form(fields), **values))
    for number, (_, new, _, said) in enumerate(OF_ANOTHER_KIND):
        other = form(fields | {f"f{number}": (new, REQUIRED)})
        with pytest.raises(StateIncompatible, match=rf"ield `Account.f{number}` was {said}"):
            Accounts(kept.open(), other)
    assert fields_of(Accounts(kept.open(), form(fields)).get("old"))["f0"] == [1, 1]


def test_a_class_inside_of_a_field_is_compared_field_by_field(
    job: Job, form: Form, keep: Keep
) -> None:
    def account(*places: Any) -> Any:
        inner = make_dataclass("Place", places)
        lists = GenericAlias(list, (inner,))
        return form({"places": (GenericAlias(dict, (str, lists)), REQUIRED)})

    old = account(("x", int), ("y", list[int]))
    kept = keep(written(job, old, places={"a": []}))
    with pytest.raises(
        StateIncompatible, match=r"ield `Place.y` was list\[int\] and is set\[int\]"
    ):
        Accounts(kept.open(), account(("x", int), ("y", set[int])))
    wider = account(("y", list[float]), ("z", str, "new"))
    assert fields_of(Accounts(kept.open(), wider).get("old")) == {"places": {"a": []}}


def test_classes_that_hold_each_other_are_compared_and_end(job: Job, keep: Keep) -> None:
    store = job.open()
    store.set_current_key("old")
    node = Node(1, Node(2), [Edge(Node(3), 4)])
    store.value_state(ValueStateDescriptor[Any]("node", Node)).set(node)
    kept = keep(store)
    for kind in (Node, with_float_weights()):
        store = kept.open()
        store.set_current_key("old")
        found = store.value_state(ValueStateDescriptor[Any]("node", kind)).get()
        assert asdict(found) == asdict(node)
    assert type(found.edges[0].weight) is float
    other = msgspec.defstruct("Node", [("number", str)])
    with pytest.raises(StateIncompatible, match="ield `Node.number` was int and is str"):
        kept.open().value_state(ValueStateDescriptor[Any]("node", other))


def test_fields_by_position_that_changed_places_are_refused(job: Job, keep: Keep) -> None:
    def struct(*fields: Any, array_like: bool = True) -> Any:
        return msgspec.defstruct("Point", fields, array_like=array_like)

    old = struct(("x", int), ("y", int))
    store = job.open()
    store.set_current_key("old")
    store.value_state(ValueStateDescriptor[Any]("point", old)).set(old(1, 2))
    kept = keep(store)
    for new, said in (
        (struct(("y", int), ("x", int)), "ield 1 of Point was `x` and is now `y`"),
        (struct(("x", int), ("y", int), array_like=False), "stored by position"),
    ):
        with pytest.raises(StateIncompatible, match=said):
            kept.open().value_state(ValueStateDescriptor[Any]("point", new))
    store = kept.open()
    store.set_current_key("old")
    new = struct(("x", int), ("y", float), ("z", int, 3))
    assert store.value_state(ValueStateDescriptor[Any]("point", new)).get() == new(1, 2.0, 3)


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
    (list[int], set[int], [1, 1]),
    (dict[str, int], Place, {"x": 1}),
]
ROUNDED: Sequence[tuple[Any, Any, Callable[[int], Any]]] = [
    (list[int], list[float], lambda number: [1, number]),
    (set[int], set[float], lambda number: {1, number}),
    (tuple[str, int], tuple[str, float | None], lambda number: ("a", number)),
    (dict[str, int], dict[str, float], lambda number: {"a": 1, "b": number}),
    (dict[str, list[int | None]], dict[str, list[float | None]], lambda number: {"a": [number]}),
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
        store.finish_open()
        kept = keep(store)


@pytest.mark.parametrize("number", [2**53 + 1, -(2**63) + 1, 2**90 + 1])
def test_an_integer_that_no_float_equals_is_refused_by_name_and_never_rounded(
    job: Job, keep: Keep, number: int
) -> None:
    kept = keep(of_types(job, [(int, float, number)]))
    with pytest.raises(
        StateIncompatible, match=rf"'0' can no longer be read as .*{number} cannot be a float"
    ):
        kept.open().value_state(ValueStateDescriptor[Any]("0", float))


@pytest.mark.parametrize(("old", "new", "value_of"), ROUNDED)
def test_an_integer_inside_of_a_value_is_never_rounded_whichever_key_has_it(
    job: Job, keep: Keep, old: Any, new: Any, value_of: Callable[[int], Any]
) -> None:
    def held(number: int) -> Kept:
        store = job.open()
        states = states_of(store, old)
        for key in range(KEYS):
            store.set_current_key(f"key {key}")
            value = value_of(number if key == KEYS - 1 else key)
            for put in states:
                put(value)
        return keep(store)

    kept = held(2**53 + 1)
    for name in ("value", "list", "map"):
        with pytest.raises(
            StateIncompatible, match=f"'{name}' can no longer be read.*{2**53 + 1} cannot be a fl"
        ):
            states_of(kept.open(), new, only=name)
    store = held(2**60).open()
    state = store.value_state(ValueStateDescriptor[Any]("value", new))
    store.set_current_key(f"key {KEYS - 1}")
    assert state.get() == value_of(2**60)


def states_of(store: KeyedStateStore, kind: Any, only: str = "") -> Sequence[Callable[[Any], None]]:
    """Return what sets a value, an only element, and an entry; of the state called `only`."""
    makers: dict[str, Callable[[], Callable[[Any], None]]] = {
        "value": lambda: store.value_state(ValueStateDescriptor[Any]("value", kind)).set,
        "list": lambda: store.list_state(ListStateDescriptor[Any]("list", kind)).add,
        "map": lambda: partial(
            store.map_state(MapStateDescriptor[str, Any]("map", str, kind)).put, "it"
        ),
    }
    return [make() for name, make in makers.items() if only in ("", name)]


def test_an_integer_in_a_field_is_never_rounded_and_others_stay_integers(
    job: Job, form: Form, keep: Keep
) -> None:
    old = form({"number": (int, REQUIRED), "n": (int, REQUIRED), "sizes": (list[int], REQUIRED)})
    new = form(
        {"number": (int, REQUIRED), "n": (float, REQUIRED), "sizes": (list[float], REQUIRED)}
    )
    kept = keep(written(job, old, number=2**53 + 1, n=2**53, sizes=[2**60]))
    read = fields_of(Accounts(kept.open(), new).get("old"))
    assert read == {"number": 2**53 + 1, "n": 2.0**53, "sizes": [2.0**60]}
    assert (type(read["number"]), type(read["n"])) == (int, float)
    for changed in ({"n": 2**53 + 1}, {"sizes": [2**53 + 1]}):
        fields = {"number": 1, "n": 1, "sizes": [1], **changed}
        store = job.open()
        Accounts(store, old).put("old", old(**fields))
        with pytest.raises(StateIncompatible, match=f"{2**53 + 1} cannot be a float"):
            Accounts(keep(store).open(), new)


def test_an_integer_in_a_value_that_expires_is_never_rounded(job: Job) -> None:
    hour = StateTtlConfig("1 h")

    def opened(store: KeyedStateStore, kind: Any, ttl: StateTtlConfig | None) -> Any:
        states = KeyedStates(store, StateClock(lambda: 1_000.0))
        return states.value_state(ValueStateDescriptor[Any]("value", kind, ttl=ttl))

    for before in (hour, None):
        store = job.open()
        value = opened(store, list[int], before)
        store.set_current_key("old")
        value.set([2**53 + 1])
        with pytest.raises(StateIncompatible, match=f"{2**53 + 1} cannot be a float"):
            opened(job.open(job.snapshot(store)), list[float], hour)


def test_a_type_that_is_no_wider_is_refused_by_both_names(job: Job, keep: Keep) -> None:
    kept = keep(of_types(job, OTHERS))
    for number, (_, new, _) in enumerate(OTHERS):
        with pytest.raises(
            StateIncompatible, match=rf"state '{number}' .*written as .*is now declared as"
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
