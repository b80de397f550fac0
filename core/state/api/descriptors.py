"""The descriptors with which a user declares keyed state: its name, its type and its default."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeAlias, TypeVar, get_args

import pyarrow as pa

from onceflow.core.argument_types import check_fields
from onceflow.core.errors import ConfigError
from onceflow.core.setting_values import seconds_of
from onceflow.core.state.keys.key_codec import check_map_key_type
from onceflow.core.state.types.serializers import Serializer, python_type_of, serializer_of

# Descriptors have no slots: typing assigns to the result of `ValueStateDescriptor[int](…)`. A
# frozen dataclass with slots refuses that with a TypeError that typing does not expect (CPython
# 3.11).
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
"""The maximum number of digits of a decimal128."""
AVERAGE_DIGITS = 4
"""The number of digits that an average has more than its values after the point, as in Spark."""


TtlUpdate: TypeAlias = Literal["on_create_and_write", "on_read_and_write"]
TtlVisibility: TypeAlias = Literal["never_return_expired", "return_expired_if_not_cleaned_up"]


@check_fields
@dataclass(frozen=True)
class StateTtlConfig:
    """The time to live of a state's values, by the slot's clock: `StateTtlConfig("1 h")`.

    `update` says which uses restart `ttl`. `visibility` says whether an expired value that still
    exists is returned. Expired values are deleted from full snapshots (not from memory) if
    `cleanup_full_snapshot` is set, and while records arrive: for each record,
    `cleanup_incrementally` entries are checked.
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
        """The time that a value lives after its last use, in milliseconds."""
        return round(seconds_of(self.ttl, setting="ttl") * 1000)

    @property
    def updates_on_read(self) -> bool:
        """True if a read counts as a use."""
        return self.update == "on_read_and_write"

    @property
    def never_returns_expired(self) -> bool:
        """True if an expired value is never returned."""
        return self.visibility == "never_return_expired"


@check_fields
@dataclass(frozen=True)
class ValueStateDescriptor(Generic[T]):
    """A value for each key: `ValueStateDescriptor("balance", int, default=0)`."""

    name: str
    type: TypeSpec = Any
    default: T | None = None
    ttl: StateTtlConfig | None = None

    def __post_init__(self) -> None:
        check_state_name(self.name)
        serializer_of(self.type)


@check_fields
@dataclass(frozen=True)
class ListStateDescriptor(Generic[T]):
    """A list for each key: `ListStateDescriptor("recent", float)`. The type is an element's."""

    name: str
    type: TypeSpec = Any
    ttl: StateTtlConfig | None = None

    def __post_init__(self) -> None:
        check_state_name(self.name)
        serializer_of(self.type)


@check_fields
@dataclass(frozen=True)
class MapStateDescriptor(Generic[K, V]):
    """A mapping for each key: `MapStateDescriptor("by_day", date, int)`.

    The keys of the mapping may have each type that a stream can be keyed by: str, bytes, int, bool,
    date, datetime, Decimal, or a tuple of them.
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


@check_fields
@dataclass(frozen=True)
class ReducingStateDescriptor(Generic[T]):
    """A value for each key, reduced by a function: `ReducingStateDescriptor("high", max, int)`.

    For each further value, `function(so far, value)` returns the new value. The first value is
    stored unchanged.
    """

    name: str
    function: Callable[[T, T], T]
    type: TypeSpec = Any
    ttl: StateTtlConfig | None = None

    def __post_init__(self) -> None:
        check_state_name(self.name)
        serializer_of(self.type)


class AggregateFunction(ABC, Generic[IN, ACC, OUT]):
    """A function that adds values to an accumulator and computes a result.

    It holds no state itself.
    """

    @abstractmethod
    def create_accumulator(self) -> ACC:
        """Return the accumulator for no values."""

    @abstractmethod
    def add(self, value: IN, accumulator: ACC) -> ACC:
        """Return `accumulator` with `value` added. May return the same object."""

    @abstractmethod
    def get_result(self, accumulator: ACC) -> OUT:
        """Return the result of the accumulator. Must not change it."""

    def merge(self, one: ACC, other: ACC) -> ACC:
        """Return the accumulator of all values of both. Only session windows need this."""
        raise NotImplementedError(
            f"two sessions were merged, but {type(self).__name__} has no merge()"
        )


@check_fields
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


AggregateOp: TypeAlias = Literal[
    "sum", "count", "count_distinct", "min", "max", "avg", "earliest", "latest", "last"
]


@dataclass(frozen=True, slots=True)
class AccumulatorColumn:
    """A running aggregate: `AccumulatorColumn("balance", "sum", pa.int64())`.

    `name` is also the name under which `AccumulatorTable.update` takes the column's values. `type`
    is `int64`, `float64` or `decimal128`; for min, max and last also a time, text or bytes; for
    last also a boolean, but no decimal. An earliest or latest value may have any type of fixed
    width, too. The last value is the one that was put last, and may be null.
    """

    name: str
    op: AggregateOp
    type: pa.DataType
    set_name: str = ""
    """The name of the set whose members are counted, for a distinct count. A restore keeps or drops
    the count and its set together."""

    @property
    def result_type(self) -> pa.DataType:
        """The type of the results. An average of decimals loses no digit before the point."""
        if self.op != "avg":
            return self.type
        if not pa.types.is_decimal(self.type):
            return pa.float64()
        more = min(AVERAGE_DIGITS, DIGITS_MAX - self.type.precision)
        return pa.decimal128(self.type.precision + more, self.type.scale + more)

    @property
    def has_bytes(self) -> bool:
        """True if the totals are bytes of any length, in an arena."""
        return has_bytes(self.op, str(self.type))

    @property
    def words_of_total(self) -> int:
        """The number of 64-bit words of a total."""
        return words_of_total(self.op, str(self.type))


def has_bytes(op: str, type_name: str) -> bool:
    """Return True if totals are bytes of any length, for the operation and type in a snapshot."""
    return op in ("earliest", "latest") or type_name in ("string", "binary")


def words_of_total(op: str, type_name: str) -> int:
    """Return the number of 64-bit words of a total, for the operation and type in a snapshot."""
    if has_bytes(op, type_name):
        return 1
    words = 2 if type_name.startswith("decimal") else 1
    if op == "avg":
        return 2 if type_name == str(pa.float64()) else 3
    return words


USED = AccumulatorColumn("onceflow.used", "last", pa.int64())
"""The last column of a table that expires: the time of each key's last use, in ms since 1970."""
LIFE = AccumulatorColumn("onceflow.life", "last", pa.int64())
"""The column with the time at which a key came to life: its first record, or the first one after
it had expired, in ms since 1970. Members of sets that expire with their key belong to its life."""
ALONE = "onceflow.alone"
"""The column in an outer join's kept rows that tells whether a row has had no partner so far."""


def check_state_name(name: str) -> None:
    """Raise ConfigError if `name` is empty, or too long for the name of a state."""
    if not 0 < len(name.encode()) <= STATE_NAME_BYTES_MAX:
        raise ConfigError(
            f"state name {name!r} must have 1 to {STATE_NAME_BYTES_MAX} bytes; choose another"
        )
