"""What a user says about a piece of keyed state: its name, its type and its default."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeAlias, TypeVar

import pyarrow as pa

from onceflow.core.errors import ConfigError
from onceflow.core.state.serializers import Serializer, serializer_of

# Descriptors have no slots: typing assigns to what `ValueStateDescriptor[int](…)` makes, and a
# frozen dataclass with slots refuses with a TypeError that typing does not expect (CPython 3.11).
T = TypeVar("T")
K = TypeVar("K")
V = TypeVar("V")
IN = TypeVar("IN")
ACC = TypeVar("ACC")
OUT = TypeVar("OUT")

TypeSpec: TypeAlias = "type[Any] | pa.DataType | Serializer[Any] | Any"
"""A Python type (`int`, `list[str]`, a dataclass or Struct), an Arrow type or a serializer."""

STATE_NAME_BYTES_MAX = 200


@dataclass(frozen=True)
class ValueStateDescriptor(Generic[T]):
    """One value a key: `ValueStateDescriptor("balance", int, default=0)`."""

    name: str
    type: TypeSpec = Any
    default: T | None = None

    def __post_init__(self) -> None:
        check_state_name(self.name)
        serializer_of(self.type)


@dataclass(frozen=True)
class ListStateDescriptor(Generic[T]):
    """A list a key: `ListStateDescriptor("recent", float)`; the type is that of an element."""

    name: str
    type: TypeSpec = Any

    def __post_init__(self) -> None:
        check_state_name(self.name)
        serializer_of(self.type)


@dataclass(frozen=True)
class MapStateDescriptor(Generic[K, V]):
    """A mapping a key: `MapStateDescriptor("by_day", date, int)`.

    The mapping's own keys may be whatever a stream can be keyed by: str, bytes, int, bool, date,
    datetime, Decimal, or a tuple of them.
    """

    name: str
    key_type: TypeSpec = Any
    type: TypeSpec = Any

    def __post_init__(self) -> None:
        check_state_name(self.name)
        serializer_of(self.type)


@dataclass(frozen=True)
class ReducingStateDescriptor(Generic[T]):
    """What a function makes of all values of a key: `ReducingStateDescriptor("high", max, int)`.

    `function(so far, value)` is not called for the first value, which is kept as it is.
    """

    name: str
    function: Callable[[T, T], T]
    type: TypeSpec = Any

    def __post_init__(self) -> None:
        check_state_name(self.name)
        serializer_of(self.type)


class AggregateFunction(ABC, Generic[IN, ACC, OUT]):
    """How values become an accumulator, and an accumulator a result. Holds no state of its own."""

    @abstractmethod
    def create_accumulator(self) -> ACC:
        """Return the accumulator of no values."""

    @abstractmethod
    def add(self, value: IN, accumulator: ACC) -> ACC:
        """Return `accumulator` with `value`, which may be the same object."""

    @abstractmethod
    def get_result(self, accumulator: ACC) -> OUT:
        """Return what the accumulator comes to; changes nothing."""


@dataclass(frozen=True)
class AggregatingStateDescriptor(Generic[IN, ACC, OUT]):
    """An accumulator a key: `AggregatingStateDescriptor("mean", Mean(), tuple[int, float])`.

    The type is that of the accumulator.
    """

    name: str
    function: AggregateFunction[IN, ACC, OUT]
    type: TypeSpec = Any

    def __post_init__(self) -> None:
        check_state_name(self.name)
        serializer_of(self.type)


AggregateOp: TypeAlias = Literal["sum", "count", "min", "max"]


@dataclass(frozen=True, slots=True)
class AccumulatorColumn:
    """One running aggregate: `AccumulatorColumn("balance", "sum", pa.int64())`.

    `name` is also the name under which `AccumulatorTable.update` takes the column's values. `type`
    is `int64` or `float64`, and for min and max also a timestamp or a date.
    """

    name: str
    op: AggregateOp
    type: pa.DataType


def check_state_name(name: str) -> None:
    """Return when `name` can name a state.

    Raises:
        ConfigError: It is empty or too long.
    """
    if not 0 < len(name.encode()) <= STATE_NAME_BYTES_MAX:
        raise ConfigError(
            f"state name {name!r} must have 1 to {STATE_NAME_BYTES_MAX} bytes; choose another"
        )
