"""Keys and values of every type, over every state backend; one suite, run over each of them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from typing import Any, TypedDict
from zoneinfo import ZoneInfo

import msgspec
import pyarrow as pa
import pytest
from tests.conformance.state_job import BALANCE, Job

from onceflow.core.errors import BadStateValue, StateError, StateIncompatible
from onceflow.core.state import (
    KeyedStateStore,
    ListStateDescriptor,
    MapStateDescriptor,
    Serializer,
    StateTtlConfig,
    ValueStateDescriptor,
)

NEW_YORK = ZoneInfo("America/New_York")


@dataclass
class _Reading:
    """The types that a state declares."""

    value: float = 0.0


@dataclass
class _Labelled(_Reading):
    """The values of a wrong type that a state may get by mistake."""

    label: str = ""


class _Row(msgspec.Struct, array_like=True):
    value: float = 0.0


class _LabelledRow(_Row, array_like=True):
    label: str = ""


class _Counts(TypedDict, total=False):
    count: int


class _Opaque:
    """Nothing that a state can hold."""

    def __repr__(self) -> str:
        return "Opaque()"


@pytest.mark.parametrize(
    "key",
    [
        "", "käse", "x" * 500, b"", b"\x00\xff", 0, -1, 2**63 - 1, -(2**63), 2**64 - 1, True,
        date(1969, 12, 31), datetime(2024, 2, 29, 12, 30, 1, 5), Decimal("-12.340"),
        datetime(1, 1, 1, tzinfo=timezone.utc), ("a", 1), ("", b"", ("nested", -5)),
    ],
    ids=repr,
)  # fmt: skip
def test_keys_of_every_type_are_restored_as_what_they_were(job: Job, key: Any) -> None:
    store = job.open()
    store.set_current_key(key)
    value = store.value_state(BALANCE)
    mapped = store.map_state(MapStateDescriptor[Any, int]("m", Any, int))
    value.set(6)
    mapped.put(key if not isinstance(key, Decimal | date) else str(key), 3)
    restored = job.open(job.snapshot(store))
    again = restored.map_state(MapStateDescriptor[Any, int]("m", Any, int))
    restored.set_current_key(key)
    assert restored.value_state(BALANCE).get() == 6
    (found,) = again.keys()
    assert found == (key if not isinstance(key, Decimal | date) else str(key))
    assert type(found) is type(key) or isinstance(key, Decimal | date)


@pytest.mark.parametrize("key", [None, 1.5, [], _Opaque()], ids=repr)
def test_a_key_that_no_column_has_is_refused_not_stored_in_a_snapshot(job: Job, key: Any) -> None:
    store = job.open()
    value = store.value_state(BALANCE)
    try:
        store.set_current_key(key)
        value.set(1)
        with pytest.raises(StateError, match="key of type"):
            job.snapshot(store)
    except TypeError as error:
        assert "unhashable" in str(error)  # noqa: PT017


@pytest.mark.parametrize(
    ("declared", "value"),
    [
        (int, "text"),
        (int, 1.5),
        (str, 3),
        (list[int], ["a"]),
        (Any, _Opaque()),
        (dict[str, int], []),
    ],
    ids=repr,
)
def test_a_value_that_could_not_be_restored_is_refused_when_it_is_set(
    job: Job, declared: Any, value: Any
) -> None:
    store = job.open()
    store.set_current_key("a")
    state = store.value_state(ValueStateDescriptor[Any]("v", declared))
    with pytest.raises(StateError, match="state 'v' holds msgpack/1"):
        state.set(value)
    elements = store.list_state(ListStateDescriptor[Any]("l", declared))
    with pytest.raises(StateError, match="state 'l'"):
        elements.add_all([value])
    assert state.get() is None
    assert elements.get() == []


HALF_A_PAIR = "\ud83d"


@pytest.mark.parametrize("declared", [str, Any, str | None, list[str]], ids=str)
def test_text_without_bytes_is_refused_when_it_is_set(job: Job, declared: Any) -> None:
    store = job.open()
    store.set_current_key("a")
    state = store.value_state(ValueStateDescriptor[Any]("v", declared))
    elements = store.list_state(ListStateDescriptor[Any]("l", declared))
    mapped = store.map_state(MapStateDescriptor[str, Any]("m", str, declared))
    text = [HALF_A_PAIR] if declared == list[str] else HALF_A_PAIR
    with pytest.raises(BadStateValue, match="state 'v' holds .* surrogates not allowed"):
        state.set(text)
    with pytest.raises(BadStateValue, match="state 'l' holds .* surrogates not allowed"):
        elements.add(text)
    with pytest.raises(BadStateValue, match="state 'm' holds .* surrogates not allowed"):
        mapped.put("k", text)
    with pytest.raises(BadStateValue, match="state 'm' holds .* surrogates not allowed"):
        mapped.put(HALF_A_PAIR, None if declared == list[str] else "käse")
    job.snapshot(store)


@pytest.mark.parametrize(
    ("declared", "value", "lost"),
    [
        (_Reading, _Labelled(1.0, "x"), "_Reading has no field 'label'"),
        (_Reading | None, _Labelled(1.0, "x"), "_Reading has no field 'label'"),
        (list[_Reading], [_Reading(), _Labelled(1.0, "x")], "_Reading has no field 'label'"),
        (dict[str, _Reading], {"a": _Labelled()}, "_Reading has no field 'label'"),
        (_Reading, {"value": 1.0, "unit": "m"}, "_Reading has no field 'unit'"),
        (_Counts, {"count": 1, "sum": 2}, "_Counts has no field 'sum'"),
        (_Row, _LabelledRow(1.0, "x"), "_Row has no field number 2"),
        (Any, msgspec.msgpack.Ext(1, b"\x05"), "extension code 1"),
    ],
    ids=lambda one: repr(one).partition(" object at ")[0],
)
def test_a_value_with_fields_that_its_type_would_lose_is_refused(
    job: Job, declared: Any, value: Any, lost: str
) -> None:
    store = job.open()
    store.set_current_key("a")
    state = store.value_state(ValueStateDescriptor[Any]("v", declared))
    with pytest.raises(BadStateValue, match=f"state 'v' holds .*{lost}"):
        state.set(value)
    assert state.get() is None


@pytest.mark.parametrize(
    ("declared", "value"),
    [
        (_Reading | None, _Reading(2**53 + 1)),
        (_Reading | int, _Reading(2**53 + 1)),
        (dict[str, float] | None, {"a": 2**53 + 1}),
        (list[_Reading | None], [None, _Reading(2**53 + 1)]),
    ],
    ids=repr,
)
def test_an_integer_in_one_of_several_alternatives_is_not_rounded(
    job: Job, declared: Any, value: Any
) -> None:
    store = job.open()
    store.set_current_key("a")
    state = store.value_state(ValueStateDescriptor[Any]("v", declared))
    with pytest.raises(BadStateValue, match=f"{2**53 + 1} cannot be a float exactly"):
        state.set(value)


@pytest.mark.parametrize(
    ("declared", "value"),
    [
        (int, 2**200), (int, -(2**90)), (int, 2**63), (float, 0.1), (str, "ü"), (bytes, b"\x00"),
        (bool, False), (date, date(2024, 1, 1)), (datetime, datetime(2024, 1, 1, 1, 2, 3, 4)),
        (Decimal, Decimal("1.50")), (tuple[int, str], (1, "a")), (int | None, 3),
        (pa.int32(), 5), (pa.list_(pa.string()), ["a", None]), (Any, {"a": [1, None]}),
        (Any, 2**70),
    ],
    ids=repr,
)  # fmt: skip
def test_values_are_restored_as_they_were_set(job: Job, declared: Any, value: Any) -> None:
    store = job.open()
    descriptor = ValueStateDescriptor[Any]("v", declared)
    store.set_current_key("a")
    store.value_state(descriptor).set(value)
    restored = job.open(job.snapshot(store))
    restored.set_current_key("a")
    again = restored.value_state(descriptor).get()
    assert again == value
    assert type(again) is type(value)


@pytest.mark.parametrize(
    ("declared", "value"),
    [
        (datetime, datetime(2024, 11, 3, 1, 30, fold=1, tzinfo=NEW_YORK)),
        (datetime, datetime(1800, 1, 1, tzinfo=NEW_YORK)),
        (datetime, datetime(2024, 1, 1, tzinfo=timezone(timedelta(hours=5, minutes=30)))),
        (datetime, datetime(2024, 1, 1, 1, 30, fold=1)),
        (datetime | None, datetime(2024, 1, 1, tzinfo=NEW_YORK)),
        (list[datetime], [datetime(2024, 1, 1, tzinfo=NEW_YORK)]),
        (time, time(1, 30, fold=1)),
    ],
    ids=repr,
)  # fmt: skip
def test_a_time_is_after_a_restore_what_it_was_before(job: Job, declared: Any, value: Any) -> None:
    """Zone and `fold` count: days and differences of two values depend on them."""
    store = job.open()
    store.set_current_key("a")
    expiring = StateTtlConfig("1 h")
    descriptors = [ValueStateDescriptor[Any]("v", declared, default=value)]
    descriptors.append(ValueStateDescriptor[Any]("ttl", declared, ttl=expiring))
    elements = ListStateDescriptor[Any]("l", declared)
    entries = MapStateDescriptor[str, Any]("m", str, declared)

    def read(store: KeyedStateStore) -> str:
        store.set_current_key("a")
        values = [store.value_state(descriptor).get() for descriptor in descriptors]
        listed, mapped = store.list_state(elements).get(), store.map_state(entries).get("k")
        return repr((values, listed, mapped))

    default = repr(store.value_state(descriptors[0]).get())
    for descriptor in descriptors:
        store.value_state(descriptor).set(value)
    store.list_state(elements).add(value)
    store.map_state(entries).put("k", value)
    before = read(store)
    assert repr(store.value_state(descriptors[0]).get()) == default
    assert read(job.open(job.snapshot(store))) == before
    assert store.value_state(descriptors[0]).get() == (
        value if not isinstance(value, datetime) or value.tzinfo is None
        else value.astimezone(timezone.utc)
    )  # fmt: skip


class Rates(msgspec.Struct):
    """A class with a float inside of a list inside of a dict."""

    by_day: dict[str, list[float]]
    last: float | None = None


@pytest.mark.parametrize(
    ("declared", "value"),
    [
        (list[float], [2**53 + 1]),
        (float | None, 2**53 + 1),
        (tuple[int, float], (1, -(2**60) - 1)),
        (dict[str, float], {"a": 2**53 + 1}),
        (dict[float, int], {2**53 + 1: 1}),
        (dict[str, list[float] | None], {"a": [0.5, 2**53 + 1]}),
        (Rates, Rates({"monday": [2**53 + 1]})),
        (Rates, Rates({}, 2**53 + 1)),
    ],
    ids=repr,
)
def test_an_integer_that_no_float_equals_is_refused_inside_of_a_value_too(
    job: Job, declared: Any, value: Any
) -> None:
    store = job.open()
    store.set_current_key("a")
    state = store.value_state(ValueStateDescriptor[Any]("v", declared))
    with pytest.raises(BadStateValue, match="cannot be a float exactly"):
        state.set(value)
    elements = store.list_state(ListStateDescriptor[Any]("l", declared))
    with pytest.raises(BadStateValue, match="cannot be a float exactly"):
        elements.add(value)
    assert (state.get(), elements.get()) == (None, [])


@pytest.mark.parametrize(
    ("declared", "value"),
    [
        (list[float], [1, 2**53, 2**60, 0.1, -0.0]),
        (tuple[float, int], (0, 2**53 + 1)),
        (list[float | int], [2**53 + 1, 0.5]),
        (dict[str, float], {"a": float("inf")}),
        (dict[int, float], {2**53 + 1: 1.5}),
        (Rates, Rates({"monday": [2**54]}, 3)),
    ],
    ids=repr,
)
def test_integers_that_stay_what_they_are_are_taken(job: Job, declared: Any, value: Any) -> None:
    store = job.open()
    descriptor = ValueStateDescriptor[Any]("v", declared)
    store.set_current_key("a")
    store.value_state(descriptor).set(value)
    restored = job.open(job.snapshot(store))
    restored.set_current_key("a")
    assert store.value_state(descriptor).get() == value
    assert restored.value_state(descriptor).get() == value


class _Refusing(Serializer[Any]):
    """A user's serializer that raises what it likes."""

    @property
    def signature(self) -> str:
        return "refusing/1"

    def encode(self, value: Any) -> bytes:
        raise LookupError(f"no code for {value}")

    def decode(self, data: bytes) -> Any:
        return data


def test_a_serializer_that_raises_is_told_with_the_state_and_changes_nothing(job: Job) -> None:
    store = job.open()
    value = store.value_state(ValueStateDescriptor[Any]("refused", _Refusing()))
    elements = store.list_state(ListStateDescriptor[Any]("refused list", _Refusing()))
    store.set_current_key("a")
    with pytest.raises(BadStateValue, match=r"'refused' holds refusing/1 .* 7 .*LookupError: no"):
        value.set(7)
    with pytest.raises(BadStateValue, match=r"'refused list' .*LookupError"):
        elements.update([7])
    assert (value.get(), elements.get()) == (None, [])


class _Moody(Serializer[int]):
    """Says that it takes every number, and takes those below 10; below `reads` it reads them."""

    def __init__(self, reads: int = 10) -> None:
        self._reads = reads

    @property
    def signature(self) -> str:
        return "moody/1"

    @property
    def direct_types(self) -> tuple[type[Any], ...]:
        return (int,)

    def encode(self, value: int) -> bytes:
        if value >= 10:
            raise LookupError(f"no code for {value}")
        return bytes([value])

    def decode(self, data: bytes) -> int:
        if data[0] >= self._reads:
            raise LookupError(f"{data[0]} is gone")
        return data[0]


def test_a_serializer_that_raises_at_a_snapshot_or_a_restore_is_told_with_the_state(
    job: Job,
) -> None:
    store = job.open()
    value = store.value_state(ValueStateDescriptor[int]("moody", _Moody()))
    store.set_current_key("a")
    value.set(7)
    handles = job.snapshot(store)
    with pytest.raises(
        StateIncompatible, match="'moody' can no longer be read as moody/1.*7 is gone"
    ):
        restored = job.open(handles)
        again = restored.value_state(ValueStateDescriptor[int]("moody", _Moody(reads=5)))
        restored.set_current_key("a")
        again.get()
    value.set(11)
    with pytest.raises(BadStateValue, match="of state 'moody' cannot encode .*no code for 11"):
        job.snapshot(store)
