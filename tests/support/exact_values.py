"""Values of Arrow in one exact form, and their comparison.

Python's own dates and times end at the year 9999 and at microseconds, and `==` takes 0.0 for -0.0,
1 for True and no NaN for another. So a date is a `Day`, a time of day a `Clock`, a timestamp a
`Local` or, with a zone, an `Instant`, and a duration a `Span`, each with its whole number. A struct
and a map are a dict, a list is a list, and every other value is as Python has it.

A test reads back with a client of its own, and compares with what it wrote:

    assert same(rows_of_the_client, exact_values(column))
"""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, TypeAlias, cast

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types as arrow

_NANOSECONDS = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}
_EPOCH = dt.datetime(1970, 1, 1)
_DAY_MS = 86_400_000


@dataclass(frozen=True, slots=True)
class Day:
    """A date, as days since 1970-01-01."""

    days: int


@dataclass(frozen=True, slots=True)
class Clock:
    """A time of day, as nanoseconds since midnight."""

    nanoseconds: int


@dataclass(frozen=True, slots=True)
class Local:
    """A timestamp without a zone, as nanoseconds since 1970-01-01 00:00 on the same clock."""

    nanoseconds: int


@dataclass(frozen=True, slots=True)
class Instant:
    """A timestamp with a zone, as nanoseconds since 1970-01-01 00:00 UTC."""

    nanoseconds: int


@dataclass(frozen=True, slots=True)
class Span:
    """A duration in nanoseconds."""

    nanoseconds: int


@dataclass(frozen=True, slots=True)
class Interval:
    """An interval of the calendar, whose three parts do not convert into each other."""

    months: int
    days: int
    nanoseconds: int


def same(read: object, written: object) -> bool:
    """Return whether both are the same value to the last bit; a Decimal's trailing zeros are none.

    0.0 is not -0.0, True is not 1, 1 is not 1.0, and NaN is NaN. Python's dates and times equal
    their exact form, and tuples equal lists.
    """
    return _agree(exact_value(read), exact_value(written), _equal_numbers)


def same_digits(read: object, written: object) -> bool:
    """Return whether both are the same value, with the same digits after a Decimal's point."""
    return _agree(exact_value(read), exact_value(written), _equal_digits)


def exact_values(column: pa.Array | pa.ChunkedArray) -> list[object]:
    """Return the values of `column` in their exact form."""
    if isinstance(column, pa.ChunkedArray):
        return [value for chunk in column.chunks for value in exact_values(chunk)]
    plain = _plain(column)
    reader = next((read for is_kind, read in _READERS if is_kind(plain.type)), _python_values)
    values = reader(plain)
    return [
        value if valid else None
        for value, valid in zip(values, plain.is_valid().to_pylist(), strict=True)
    ]


def exact_value(value: object) -> object:
    """Return a value that a client read in its exact form."""
    match value:
        case dt.datetime():
            naive = value.replace(tzinfo=None) - (value.utcoffset() or dt.timedelta())
            made = Local if value.tzinfo is None else Instant
            return made(_microseconds(naive - _EPOCH) * 1_000)
        case dt.date():
            return Day(value.toordinal() - _EPOCH.toordinal())
        case dt.time():
            return Clock(_microseconds(dt.datetime.combine(_EPOCH, value) - _EPOCH) * 1_000)
        case dt.timedelta():
            return Span(_microseconds(value) * 1_000)
        case bytearray():
            return bytes(value)
        case Mapping():
            entries = cast("Mapping[object, object]", value).items()
            return {exact_value(key): exact_value(item) for key, item in entries}
        case list() | tuple():
            return [exact_value(item) for item in cast("Sequence[object]", value)]
        case _:
            return value


_AreEqual: TypeAlias = Callable[[Decimal, Decimal], bool]


def _agree(read: object, written: object, decimals: _AreEqual) -> bool:
    if type(read) is not type(written):
        return False
    match read, written:
        case float(), float():
            return _equal_floats(read, written)
        case Decimal(), Decimal():
            return decimals(read, written)
        case list(), list():
            return _agree_in_order(
                cast("list[object]", read), cast("list[object]", written), decimals
            )
        case dict(), dict():
            left, right = cast("dict[object, object]", read), cast("dict[object, object]", written)
            return left.keys() == right.keys() and all(
                _agree(left[key], right[key], decimals) for key in left
            )
        case _:
            return read == written


def _agree_in_order(read: list[object], written: list[object], decimals: _AreEqual) -> bool:
    return len(read) == len(written) and all(
        _agree(left, right, decimals) for left, right in zip(read, written, strict=True)
    )


def _equal_floats(read: float, written: float) -> bool:
    if math.isnan(read) or math.isnan(written):
        return math.isnan(read) and math.isnan(written)
    return read == written and math.copysign(1, read) == math.copysign(1, written)


def _equal_numbers(read: Decimal, written: Decimal) -> bool:
    return read == written


def _equal_digits(read: Decimal, written: Decimal) -> bool:
    return read.as_tuple() == written.as_tuple()


def _microseconds(span: dt.timedelta) -> int:
    return (span.days * 86_400 + span.seconds) * 1_000_000 + span.microseconds


def _plain(column: pa.Array) -> pa.Array:
    """Return the values without dictionary, run ends, view or extension."""
    kind = column.type
    if isinstance(kind, pa.BaseExtensionType):
        return _plain(column.storage)
    if arrow.is_dictionary(kind):
        return _plain(column.dictionary_decode())
    return _plain(pc.run_end_decode(column)) if arrow.is_run_end_encoded(kind) else column


def _words(column: pa.Array) -> list[int]:
    """Return the whole numbers of a column of dates, times or durations; 0 for null."""
    width = pa.int32() if column.type.bit_width == 32 else pa.int64()
    return [word or 0 for word in column.view(width).to_pylist()]


def _days(column: pa.Array) -> list[object]:
    if arrow.is_date32(column.type):
        return [Day(word) for word in _words(column)]
    days: list[object] = []
    for word in _words(column):
        whole, part = divmod(word, _DAY_MS)
        days.append(Local(word * 10**6) if part else Day(whole))
    return days


def _clocks(column: pa.Array) -> list[object]:
    return [Clock(word * _NANOSECONDS[column.type.unit]) for word in _words(column)]


def _timestamps(column: pa.Array) -> list[object]:
    made = Instant if column.type.tz else Local
    return [made(word * _NANOSECONDS[column.type.unit]) for word in _words(column)]


def _spans(column: pa.Array) -> list[object]:
    return [Span(word * _NANOSECONDS[column.type.unit]) for word in _words(column)]


def _intervals(column: pa.Array) -> list[object]:
    return [Interval(*(value or (0, 0, 0))) for value in column.to_pylist()]


def _floats(column: pa.Array) -> list[object]:
    # float16 is numpy's in older versions of pyarrow.
    return [0.0 if value is None else float(value) for value in column.to_pylist()]


def _lists(column: pa.Array) -> list[object]:
    scalars: Any = column
    return [exact_values(value.values) if value.is_valid else [] for value in scalars]


def _structs(column: pa.Array) -> list[object]:
    names = [field.name for field in column.type]
    structs: Any = column
    if not names:
        return [{} for _ in range(len(column))]
    inner = [exact_values(structs.field(at)) for at in range(len(names))]
    return [dict(zip(names, values, strict=True)) for values in zip(*inner, strict=True)]


def _maps(column: pa.Array) -> list[object]:
    maps: list[object] = []
    scalars: Any = column
    for value in scalars:
        if not value.is_valid:
            maps.append({})
            continue
        keys, items = exact_values(value.values.field(0)), exact_values(value.values.field(1))
        if len(set(keys)) != len(keys):
            raise ValueError(f"a map holds a key twice: {keys}")
        maps.append(dict(zip(keys, items, strict=True)))
    return maps


def _python_values(column: pa.Array) -> list[object]:
    values: list[object] = column.to_pylist()
    return values


def _is_list(kind: pa.DataType) -> bool:
    return bool(
        arrow.is_list(kind)
        or arrow.is_large_list(kind)
        or arrow.is_fixed_size_list(kind)
        or arrow.is_list_view(kind)
        or arrow.is_large_list_view(kind)
    )


_READERS: tuple[tuple[Callable[[pa.DataType], bool], Callable[[pa.Array], list[object]]], ...] = (
    (arrow.is_date, _days),
    (arrow.is_time, _clocks),
    (arrow.is_timestamp, _timestamps),
    (arrow.is_duration, _spans),
    (arrow.is_interval, _intervals),
    (arrow.is_floating, _floats),
    (arrow.is_map, _maps),
    (arrow.is_struct, _structs),
    (_is_list, _lists),
)
