"""Descriptors and serializers: names that last, and values that come back."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Generic, Literal, NamedTuple, TypedDict, TypeVar

import msgspec
import pyarrow as pa
import pytest
from typing_extensions import NotRequired

from onceflow.core.errors import ConfigError, StateIncompatible
from onceflow.core.state import (
    HeapBackend,
    ListStateDescriptor,
    MapStateDescriptor,
    RocksDBBackend,
    ValueStateDescriptor,
)
from onceflow.core.state.stores.entries import Cells
from onceflow.core.state.types.exact_numbers import make_integers_check
from onceflow.core.state.types.serializers import serializer_of
from onceflow.core.state.types.type_names import reads_as

T = TypeVar("T")


@dataclass
class Account:
    owner: str
    cents: int = 0


class Point(msgspec.Struct):
    x: int
    y: int = 0


class Box(msgspec.Struct, Generic[T]):
    of: T


@dataclass
class Tree:
    value: Box[int]
    left: Tree | None = None
    right: Tree | None = None


class Row(NamedTuple):
    at: int
    name: str


Columns = TypedDict("Columns", {"a -> b|{": int, "c": NotRequired[list[Any]]})


@pytest.mark.parametrize(
    ("declared", "signature"),
    [
        (int, "msgpack/1:int"),
        (Any, "msgpack/1:any"),
        (list[int], "msgpack/1:list[int]"),
        (dict[str, tuple[int, ...]], "msgpack/1:dict[str,tuple[int,...]]"),
        (int | None, "msgpack/1:int|none"),
        (None | int, "msgpack/1:int|none"),
        (Literal["b", "a"], "msgpack/1:literal['a','b']"),
        (Account, "msgpack/1:Account{owner:str,cents?:int}"),
        (list[Point], "msgpack/1:list[Point{x:int,y?:int}]"),
        (tuple[Point, Point], "msgpack/1:tuple[Point{x:int,y?:int},Point{...1}]"),
        (Tree, "msgpack/1:Tree{value:Box{of:int},left?:Tree{...1}|none,right?:Tree{...1}|none}"),
        (Row, "msgpack/1:Row{*at:int,name:str}"),
        (Columns, "msgpack/1:Columns{a%20->%20b%7c%7b:int,c?:list}"),
        (Literal["a] | int"], "msgpack/1:literal['a%5d%20%7c%20int']"),
        (datetime, "msgpack/1:datetime"),
        (pa.int16(), "msgpack/1:int"),
        (pa.list_(pa.float32()), "msgpack/1:list[float|none]"),
        (pa.map_(pa.string(), pa.bool_()), "msgpack/1:dict[str,bool|none]"),
    ],
)  # fmt: skip
def test_a_type_has_one_name_in_every_process(declared: Any, signature: str) -> None:
    assert serializer_of(declared).signature == signature


@pytest.mark.parametrize("value", [Account("a", 3), [Point(1, 2)], {"k": (1, "a")}], ids=repr)
def test_structured_values_come_back_equal_and_not_the_same_object(value: Any) -> None:
    declared = {
        Account: Account, list: list[Point], dict: dict[str, tuple[int, str]],
    }[type(value)]  # fmt: skip
    cells = Cells(serializer_of(declared), "s")
    stored = cells.freeze(value)
    again = cells.thaw(cells.from_bytes(cells.to_bytes(stored)))
    assert again == value
    assert again is not value


def test_a_field_with_a_default_may_be_added_to_a_type_and_one_without_may_not() -> None:
    old = msgspec.defstruct("Reading", [("at", int)])
    wider = msgspec.defstruct("Reading", [("at", int), ("unit", str, "C")])
    stricter = msgspec.defstruct("Reading", [("at", int), ("unit", str)])
    data = serializer_of(old).encode(old(at=5))
    assert reads_as(serializer_of(old).signature, serializer_of(wider).signature)
    assert not reads_as(serializer_of(old).signature, serializer_of(stricter).signature)
    assert serializer_of(wider).decode(data) == wider(at=5, unit="C")
    with pytest.raises(StateIncompatible, match="'reading' can no longer be read"):
        Cells(serializer_of(stricter), "reading").from_bytes(data)


def test_descriptors_and_backends_pickle() -> None:
    described: list[Any] = [
        ValueStateDescriptor("v", list[int], default=[1]),
        ListStateDescriptor("l", Account),
        MapStateDescriptor("m", str, pa.int64()),
        HeapBackend(),
        RocksDBBackend(incremental=False, cache_entries=7),
    ]
    for made in described:
        again = pickle.loads(pickle.dumps(made))
        assert again == made
    serializer = pickle.loads(pickle.dumps(ValueStateDescriptor("s", serializer_of(int)))).type
    assert serializer.signature == "msgpack/1:int"
    assert serializer.decode(serializer.encode(5)) == 5


@pytest.mark.parametrize("name", ["", "x" * 201, "ä" * 101])
def test_an_impossible_state_name_is_refused(name: str) -> None:
    for descriptor in (ValueStateDescriptor, ListStateDescriptor, MapStateDescriptor):
        with pytest.raises(ConfigError, match="state name"):
            descriptor(name)


def test_a_type_without_bytes_is_refused_when_the_state_is_described() -> None:
    with pytest.raises(ConfigError, match="no MessagePack form"):
        ValueStateDescriptor("v", dict[list[int], int] | dict[str, int])
    with pytest.raises(ConfigError, match="not supported"):
        ValueStateDescriptor("v", pa.struct([("a", pa.int8())]))


@pytest.mark.parametrize(
    "settings", [{"cache_entries": 0}, {"block_cache_bytes": 5}, {"write_buffer_bytes": 0}]
)
def test_impossible_rocksdb_settings_are_refused(settings: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        RocksDBBackend(**settings)  # type: ignore[arg-type]


class Circle(msgspec.Struct, tag=True):
    size: float


class Pair(msgspec.Struct, tag=True, array_like=True):
    size: float
    number: int


class Serial(msgspec.Struct, tag=True):
    size: int


def make_check(python_type: Any) -> Callable[[bytes], None]:
    check = make_integers_check(python_type)
    assert check is not None
    return check


def test_of_several_classes_the_one_that_a_value_names_says_which_integers_are_rounded() -> None:
    large = 2**53 + 1
    check = make_check(list[Circle | Serial] | None)
    check(msgspec.msgpack.encode([{"type": "Serial", "size": large}]))
    with pytest.raises(ValueError, match="cannot be a float exactly"):
        check(
            msgspec.msgpack.encode(
                [{"type": "Serial", "size": 1}, {"type": "Circle", "size": large}]
            )
        )
    check = make_check(Pair | int)
    check(msgspec.msgpack.encode(["Pair", 1, large]))
    check(msgspec.msgpack.encode(large))
    with pytest.raises(ValueError, match="cannot be a float exactly"):
        check(msgspec.msgpack.encode(["Pair", large, 1]))
    with pytest.raises(ValueError, match="cannot be a float exactly"):
        make_check(float | str)(msgspec.msgpack.encode(large))
