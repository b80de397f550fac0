"""What a user says about a piece of keyed state: its name, its type and its default."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeAlias, TypeVar, get_args

import pyarrow as pa

from onceflow.core.errors import ConfigError
from onceflow.core.setting_values import seconds_of
from onceflow.core.state.keys.key_codec import check_map_key_type
from onceflow.core.state.types.serializers import Serializer, python_type_of, serializer_of

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
DIGITS_MAX = 38
"""The digits of a decimal128."""
AVERAGE_DIGITS = 4
"""An average has so many more digits after the point than its values, as in Spark."""


TtlUpdate: TypeAlias = Literal["on_create_and_write", "on_read_and_write"]
TtlVisibility: TypeAlias = Literal["never_return_expired", "return_expired_if_not_cleaned_up"]


@dataclass(frozen=True)
class StateTtlConfig:
    """How long what a state holds lives, by the clock of the slot: `StateTtlConfig("1 h")`.

    `update` says what counts as a use, from which `ttl` runs; `visibility` whether what has expired
    and is still there is handed out. It is deleted as full snapshots are written (there, not in
    memory) with `cleanup_full_snapshot`, and while records come: `cleanup_incrementally` entries
    are looked at for each.
    """

    ttl: float | str
    update: TtlUpdate = "on_create_and_write"
    visibility: TtlVisibility = "never_return_expired"
    cleanup_full_snapshot: bool = True
    cleanup_incrementally: int = 2

    def __post_init__(self) -> None:
        if self.ttl_ms < 1:
            raise ConfigError(f"ttl={self.ttl!r} must be 1 ms or more")
        if self.cleanup_incrementally < 0:
            raise ConfigError(f"cleanup_incrementally={self.cleanup_incrementally} is negative")
        for name, allowed in (("update", TtlUpdate), ("visibility", TtlVisibility)):
            if getattr(self, name) not in get_args(allowed):
                choices = ", ".join(get_args(allowed))
                raise ConfigError(f"{name}={getattr(self, name)!r}: choose one of {choices}")

    @property
    def ttl_ms(self) -> int:
        """How long a value lives after its last use, in milliseconds."""
        return round(seconds_of(self.ttl, setting="ttl") * 1000)

    @property
    def updates_on_read(self) -> bool:
        """Whether a read is a use."""
        return self.update == "on_read_and_write"

    @property
    def never_returns_expired(self) -> bool:
        """Whether what has expired is as good as gone."""
        return self.visibility == "never_return_expired"


@dataclass(frozen=True)
class ValueStateDescriptor(Generic[T]):
    """One value a key: `ValueStateDescriptor("balance", int, default=0)`."""

    name: str
    type: TypeSpec = Any
    default: T | None = None
    ttl: StateTtlConfig | None = None

    def __post_init__(self) -> None:
        check_state_name(self.name)
        serializer_of(self.type)


@dataclass(frozen=True)
class ListStateDescriptor(Generic[T]):
    """A list a key: `ListStateDescriptor("recent", float)`; the type is that of an element."""

    name: str
    type: TypeSpec = Any
    ttl: StateTtlConfig | None = None

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
    ttl: StateTtlConfig | None = None

    def __post_init__(self) -> None:
        check_state_name(self.name)
        serializer_of(self.type)
        key_type: Any = self.key_type
        if isinstance(key_type, pa.DataType):
            key_type = python_type_of(key_type)
        check_map_key_type(key_type, f"map state {self.name!r}")


@dataclass(frozen=True)
class ReducingStateDescriptor(Generic[T]):
    """What a function makes of all values of a key: `ReducingStateDescriptor("high", max, int)`.

    `function(so far, value)` is not called for the first value, which is kept as it is.
    """

    name: str
    function: Callable[[T, T], T]
    type: TypeSpec = Any
    ttl: StateTtlConfig | None = None

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

    def merge(self, one: ACC, other: ACC) -> ACC:
        """Return the accumulator of what both have taken. Needed for session windows alone."""
        raise NotImplementedError(
            f"{type(self).__name__} has no merge(), and two sessions have become one"
        )


@dataclass(frozen=True)
class AggregatingStateDescriptor(Generic[IN, ACC, OUT]):
    """An accumulator a key: `AggregatingStateDescriptor("mean", Mean(), tuple[int, float])`.

    The type is that of the accumulator.
    """

    name: str
    function: AggregateFunction[IN, ACC, OUT]
    type: TypeSpec = Any
    ttl: StateTtlConfig | None = None

    def __post_init__(self) -> None:
        check_state_name(self.name)
        serializer_of(self.type)


AggregateOp: TypeAlias = Literal["sum", "count", "min", "max", "avg", "last"]


@dataclass(frozen=True, slots=True)
class AccumulatorColumn:
    """One running aggregate: `AccumulatorColumn("balance", "sum", pa.int64())`.

    `name` is also the name under which `AccumulatorTable.update` takes the column's values, as
    `type`: `int64`, `float64` or `decimal128`, for min, max and last also a time, for last a
    boolean, text or bytes, but no decimal.
    """

    name: str
    op: AggregateOp
    type: pa.DataType

    @property
    def result_type(self) -> pa.DataType:
        """The type of its results; of an average of decimals no digit before the point is lost."""
        if self.op != "avg":
            return self.type
        if not pa.types.is_decimal(self.type):
            return pa.float64()
        more = min(AVERAGE_DIGITS, DIGITS_MAX - self.type.precision)
        return pa.decimal128(self.type.precision + more, self.type.scale + more)

    @property
    def words_of_total(self) -> int:
        """How many words of 64 bits a total has."""
        return words_of_total(self.op, str(self.type))


def words_of_total(op: str, type_name: str) -> int:
    """Return how many words of 64 bits a total has, by what a snapshot says of it."""
    words = 2 if type_name.startswith("decimal") else 1
    if op == "avg":
        return 2 if type_name == str(pa.float64()) else 3
    return words


USED = AccumulatorColumn("onceflow.used", "last", pa.int64())
"""The last column of a table that expires: when each key was last used, in ms since 1970."""
ALONE = "onceflow.alone"
"""The column of an outer join's kept rows that says whether a row has had no partner so far."""


def check_state_name(name: str) -> None:
    """Raise ConfigError if `name` is empty, or too long for the name of a state."""
    if not 0 < len(name.encode()) <= STATE_NAME_BYTES_MAX:
        raise ConfigError(
            f"state name {name!r} must have 1 to {STATE_NAME_BYTES_MAX} bytes; choose another"
        )
