"""Conversions of Python values and Arrow columns to columns of a type, exactly or not at all.

pyarrow silently truncates values that do not fit: 99.99 becomes 99 in a column of integers, and a
column of milliseconds loses microseconds, or a time zone. Here a value is accepted only if the type
holds it exactly. The exceptions are documented (docs/operators.md, "What a function may return"):
numbers are rounded to the nearest value of a floating type, and text and bytes are converted to
each other as UTF-8.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from functools import lru_cache
from itertools import chain
from numbers import Real
from operator import countOf, ne
from operator import index as to_index
from typing import Any, TypeAlias, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from onceflow.core.arrow import exact_decimals
from onceflow.core.arrow.instants import BEYOND_PYTHON, rows_beyond_python
from onceflow.core.arrow.kinds import cast_rows, holds

REFUSALS = (TypeError, ValueError, LookupError, ArithmeticError, pa.ArrowException)
"""The exceptions that pyarrow raises for a value that does not fit a type."""

_NONE = type(None)
_FLOAT16_MAX = 65_504
_UNIT_MICROSECONDS = {"s": 1_000_000, "ms": 1_000, "us": 1, "ns": 1}
_DAY = {"s": 86_400, "ms": 86_400_000, "us": 86_400_000_000, "ns": 86_400_000_000_000}


class InexactValue(ValueError):
    """Raised for a value that a type does not hold exactly."""

    def __init__(self, reason: str, row: int = -1) -> None:
        """Store the reason and the value's row in the column, or -1 if the row is not known."""
        super().__init__(reason, row)
        self.reason = reason
        self.row = row

    def __str__(self) -> str:
        return self.reason


Check: TypeAlias = Callable[[Sequence[Any]], None]
"""A function that raises InexactValue unless pyarrow converts all values to a type exactly."""


def exact_array(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """Return `values` as an array of type `kind`; None becomes null.

    Raises:
        InexactValue: `kind` does not hold a value exactly; gives the row and the reason.
    """
    try:
        return _exact_array(values, kind)
    except REFUSALS as error:
        raise _first_refusal(values, kind, error) from error


def array_of(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """Return checked `values` as pyarrow converts them, but decimals exactly.

    Raises:
        ArrowInvalid, InexactValue: `kind` does not hold a value. Other exceptions of pyarrow are
            raised,
            too.
    """
    if pa.types.is_decimal(kind):
        return exact_decimals.decimals_from_python(values, kind)
    if pa.types.is_run_end_encoded(kind):
        return _encode_runs(_exact_array(values, kind.value_type), kind)
    if pa.types.is_nested(kind) and holds(kind, pa.types.is_decimal):
        return exact_array(values, kind)
    return pa.array(values, kind)


def cast_exactly(column: pa.Array, kind: pa.DataType) -> pa.Array:
    """Return `column` cast to `kind`.

    Raises:
        InexactValue: `kind` does not hold a value exactly; gives the row and the reason.
    """
    if column.type == kind:
        return column
    try:
        return _cast_exactly(column, kind)
    except REFUSALS as error:
        # The row is searched only after a failure, so an exact cast costs nothing more.
        for row in range(len(column)):
            try:
                _cast_exactly(column.slice(row, 1), kind)
            except REFUSALS as reason:
                raise InexactValue(str(reason), row) from error
        raise InexactValue(str(error)) from error


def exact_array_of_pandas(series: Any, kind: pa.DataType) -> pa.Array:
    """Return a Series of pandas as an array of type `kind`; values missing in pandas become null.

    Raises:
        InexactValue: `kind` does not hold a value exactly; gives the reason.
    """
    if pa.types.is_run_end_encoded(kind):
        return _encode_runs(exact_array_of_pandas(series, kind.value_type), kind)
    if series.dtype == object:
        missing = series.isna()
        values = [None if gone else value for value, gone in zip(series, missing, strict=True)]
        return exact_array(values, kind)
    try:
        given = pa.Array.from_pandas(series)
        if exact_decimals.is_cast_here(given.type, kind):
            return exact_decimals.cast_decimals(given, kind)
        made = pa.Array.from_pandas(series, type=kind)
        _check_range(made)
        _check_lost(given, made)
        exact_decimals.check_decimals(given, made)
    except REFUSALS as error:
        raise InexactValue(str(error)) from error
    return made


# --- Python values --------------------------------------------------------------------------------


def _exact_array(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    if pa.types.is_int64(kind) and countOf(map(type, values), int) == len(values):
        # As fast as pyarrow's own conversion together with the check of the types.
        return pa.array(np.fromiter(values, np.int64, len(values)))
    if pa.types.is_decimal(kind):
        return exact_decimals.decimals_from_python(values, kind)
    check = _find_check(kind)
    if check is not None:
        check(values)
    made = pa.array(values, kind)
    # A number too large for a narrow float silently becomes infinity.
    if _is_narrow(kind) and _has_infinities(made):
        for value, inside in zip(values, made.to_pylist(), strict=True):
            if inside is not None and inside != float(value) and abs(inside) == float("inf"):
                raise InexactValue(f"{value!r} is beyond what {kind} holds")
    _check_range(made)
    return made


def _encode_runs(column: pa.Array, kind: pa.DataType) -> pa.Array:
    # pyarrow itself makes no runs of most values.
    runs: pa.Array = pc.run_end_encode(column, cast("Any", kind).run_end_type)
    return runs


def _first_refusal(values: Sequence[Any], kind: pa.DataType, error: BaseException) -> InexactValue:
    for row, value in enumerate(values):
        try:
            _exact_array([value], kind)
        except REFUSALS as reason:
            return InexactValue(str(reason), row)
    return InexactValue(str(error))


@lru_cache(maxsize=1024)
def _find_check(kind: pa.DataType) -> Check | None:
    """Return the check to run before pyarrow converts values to `kind`, or None."""
    return _compound_check(kind) if pa.types.is_nested(kind) else _flat_check(kind)


def _flat_check(kind: pa.DataType) -> Check | None:
    types = pa.types
    check: Check | None = None
    if types.is_integer(kind):
        check = _unless_all(int, lambda value: _check_integer(value, kind))
    elif types.is_float16(kind):
        check = _unless_all(float, lambda value: _check_float16(value, kind))
    elif types.is_decimal(kind):
        check = _each(lambda value: exact_decimals.check_python_decimal(value, kind))
    elif types.is_date(kind):
        check = _unless_all(date, lambda value: _check_date(value, kind))
    elif types.is_timestamp(kind):
        check = _timestamp_check(kind)
    elif types.is_time(kind):
        check = _each(lambda value: _check_time(value, kind))
    elif types.is_duration(kind):
        check = _each(lambda value: _check_duration(value, kind))
    elif types.is_dictionary(kind):
        check = _find_check(kind.value_type)
    return check


def _compound_check(kind: pa.DataType) -> Check | None:
    if pa.types.is_map(kind):
        return _map_check(kind)
    if pa.types.is_struct(kind):
        return _struct_check(kind)
    return _list_check(kind) if _is_list(kind) else None


def _unless_all(expected: type, check: Callable[[Any], None]) -> Check:
    """Return a check of each value, skipped if all values have a class that is always exact."""
    exact = {expected, _NONE}

    def check_values(values: Sequence[Any]) -> None:
        if not exact.issuperset(map(type, values)):
            _each(check)(values)

    return check_values


def _each(check: Callable[[Any], None]) -> Check:
    def check_values(values: Sequence[Any]) -> None:
        for value in values:
            if value is not None:
                check(value)

    return check_values


def _check_integer(value: Any, kind: pa.DataType) -> None:
    if isinstance(value, (bool, np.bool_, np.datetime64, np.timedelta64)):
        raise InexactValue(
            f"{value!r} is a {cast('object', value).__class__.__name__}, not a number; convert it"
            " with int(…) if it counts"
        )
    # Python treats a value with this method as an integer: its own, numpy's and other classes. A
    # numpy array without dimensions has the method, too, so the call must decide.
    if hasattr(value, "__index__"):
        _require_index(value, kind)
        return
    if not isinstance(value, (Real, Decimal)):
        raise InexactValue(f"{value!r} is a {type(value).__name__}, and the column is {kind}")
    # int() itself refuses NaN and infinity.
    if int(cast("Any", value)) != value:
        raise InexactValue(f"{value!r} has a fraction, which {kind} does not hold; round it first")


def _require_index(value: Any, kind: pa.DataType) -> None:
    """Raise InexactValue unless Python accepts `value` as an integer."""
    try:
        to_index(value)
    except TypeError as error:
        raise InexactValue(
            f"{value!r} is a {type(value).__name__}, and the column is {kind}: {error}"
        ) from error


def _check_float16(value: Any, kind: pa.DataType) -> None:
    # pyarrow refuses such integers for the wider floating types, but rounds them for float16.
    if not isinstance(value, (int, np.integer)):
        return
    number = int(cast("Any", value))
    if abs(number) > _FLOAT16_MAX or float(np.float16(number)) != number:
        raise InexactValue(f"{value!r} is an integer that {kind} does not hold; round it first")


def _check_date(value: Any, kind: pa.DataType) -> None:
    # `isinstance` would take a datetime for a date, and True for an integer.
    if type(value) in (date, int):
        return
    if isinstance(value, datetime):
        if value.tzinfo is not None:
            raise InexactValue(
                f"{value!r} has a time zone, which {kind} does not hold: which date it is depends"
                " on the zone; call .date()"
            )
        _require_midnight(value, kind)
    elif isinstance(value, np.datetime64):
        if value.astype("datetime64[D]") != value:
            raise InexactValue(f"{value!r} has a time of day, which {kind} does not hold")
    elif isinstance(value, bool) or not isinstance(value, (date, np.integer)):
        raise InexactValue(f"{value!r} is a {type(value).__name__}, and the column is {kind}")


def _require_midnight(value: datetime, kind: pa.DataType) -> None:
    """Raise InexactValue unless `value` has no time of day."""
    # pandas' NaT is a datetime, too, and is not equal to itself.
    is_midnight = not ne(value, value) and value.time() == time()
    nanosecond: int = getattr(cast("Any", value), "nanosecond", 0)
    if not is_midnight or nanosecond:
        raise InexactValue(f"{value!r} has a time of day, which {kind} does not hold; say .date()")


def _timestamp_check(kind: pa.DataType) -> Check:
    has_zone = kind.tz is not None
    step = _UNIT_MICROSECONDS[kind.unit]
    plain = {datetime, _NONE}

    def check_values(values: Sequence[Any]) -> None:
        if (
            step == 1
            and plain.issuperset(map(type, values))
            and all((v.tzinfo is not None) is has_zone for v in values if v is not None)
        ):
            return
        _each(lambda value: _check_timestamp(value, kind))(values)

    return check_values


def _check_timestamp(value: Any, kind: pa.DataType) -> None:
    if isinstance(value, datetime):
        # Only NaT, pandas' missing instant, is not equal to itself.
        if ne(value, value):
            raise InexactValue(f"{value!r} is not a point in time; use None for a missing one")
        if value.tzinfo is not None and kind.tz is None:
            raise InexactValue(
                f"{value!r} has a time zone, which {kind} does not hold; convert it to the zone"
                " that the column means, and say .replace(tzinfo=None)"
            )
        if value.tzinfo is None and kind.tz is not None:
            raise InexactValue(
                f"{value!r} has no time zone, and {kind} holds instants: say which one it is in,"
                " such as .replace(tzinfo=timezone.utc)"
            )
        _require_steps(value.microsecond, getattr(value, "nanosecond", 0), value, kind)
    elif isinstance(value, np.datetime64):
        if value.astype(f"datetime64[{kind.unit}]") != value:
            raise InexactValue(f"{value!r} is finer than {kind}; round it first")
    elif _is_boolean(value) or not isinstance(value, (int, np.integer, date)):
        raise InexactValue(f"{value!r} is a {type(value).__name__}, and the column is {kind}")
    elif isinstance(value, date) and kind.tz is not None:
        raise InexactValue(
            f"{value!r} is a date, which begins at another time in each zone, and {kind} holds"
            " points in time: make it a datetime with tzinfo"
        )


def _check_time(value: Any, kind: pa.DataType) -> None:
    if isinstance(value, time):
        if value.tzinfo is not None:
            raise InexactValue(f"{value!r} has a time zone, which {kind} does not hold")
        _require_steps(value.microsecond, 0, value, kind)
    elif _is_boolean(value) or not isinstance(value, (int, np.integer)):
        raise InexactValue(f"{value!r} is a {type(value).__name__}, and the column is {kind}")


def _check_duration(value: Any, kind: pa.DataType) -> None:
    if isinstance(value, timedelta):
        if ne(value, value):
            raise InexactValue(f"{value!r} is not a duration; use None for a missing one")
        _require_steps(value.microseconds, getattr(value, "nanoseconds", 0), value, kind)
    elif isinstance(value, np.timedelta64):
        if value.astype(f"timedelta64[{kind.unit}]") != value:
            raise InexactValue(f"{value!r} is finer than {kind}; round it first")
    elif _is_boolean(value) or not isinstance(value, (int, np.integer)):
        raise InexactValue(f"{value!r} is a {type(value).__name__}, and the column is {kind}")


def _is_boolean(value: Any) -> bool:
    return isinstance(value, (bool, np.bool_))


def _require_steps(microseconds: int, nanoseconds: int, value: Any, kind: pa.DataType) -> None:
    """Raise InexactValue unless a fraction of a second is a multiple of the type's unit."""
    if microseconds % _UNIT_MICROSECONDS[kind.unit] or (nanoseconds and kind.unit != "ns"):
        raise InexactValue(f"{value!r} is finer than {kind}; round it first")


def _list_check(kind: pa.DataType) -> Check | None:
    check = _values_check(kind.value_type)
    if check is None:
        return None

    def check_values(values: Sequence[Any]) -> None:
        check(list(chain.from_iterable(value for value in values if value is not None)))

    return check_values


def _map_check(kind: pa.DataType) -> Check | None:
    parts = _values_check(kind.key_type), _values_check(kind.item_type)
    if parts == (None, None):
        return None

    def check_values(values: Sequence[Any]) -> None:
        entries: list[Any] = []
        for value in values:
            if value is not None:
                entries += value.items() if isinstance(value, dict) else value
        for index, check in enumerate(parts):
            if check is not None:
                check([entry[index] for entry in entries])

    return check_values


def _struct_check(kind: pa.DataType) -> Check:
    fields = _fields(kind)
    names = {field.name for field in fields}
    checks = [(index, field, _values_check(field.type)) for index, field in enumerate(fields)]

    def check_values(values: Sequence[Any]) -> None:
        # pyarrow silently drops keys that are no field.
        dicts: list[dict[str, Any]] = [value for value in values if isinstance(value, dict)]
        for value in dicts:
            if not names.issuperset(value):
                unknown = next(name for name in value if name not in names)
                raise InexactValue(f"a dict has the key {unknown!r}, and {kind} has no such field")
        tuples: list[tuple[Any, ...]] = [value for value in values if isinstance(value, tuple)]
        if len(dicts) + len(tuples) + countOf(values, None) < len(values):
            raise InexactValue(f"a value is neither a dict nor a tuple, and the column is {kind}")
        for index, field, check in checks:
            if check is not None:
                check([value.get(field.name) for value in dicts])
                check([value[index] for value in tuples if index < len(value)])

    return check_values


def _values_check(kind: pa.DataType) -> Check | None:
    """Return the check of values inside other values.

    If a type must be checked on the finished array, a separate array is built for these values.
    """
    check = _find_check(kind)
    if not (_is_narrow(kind) or pa.types.is_temporal(kind)):
        return check
    # For inner values, build a separate array to run the checks of a finished array.
    return lambda values: _discard(_exact_array(values, kind))


def _discard(_: pa.Array) -> None:
    """Discard an array that was built only as a check."""


# --- arrays ---------------------------------------------------------------------------------------


def _is_narrow(kind: pa.DataType) -> bool:
    return pa.types.is_float32(kind) or pa.types.is_float16(kind)


def _is_list(kind: pa.DataType) -> bool:
    types = pa.types
    return (
        types.is_list(kind)
        or types.is_large_list(kind)
        or types.is_fixed_size_list(kind)
        or types.is_list_view(kind)
        or types.is_large_list_view(kind)
    )


def _has_infinities(array: pa.Array) -> bool:
    numbers = array.cast(pa.float32()) if pa.types.is_float16(array.type) else array
    return pc.any(pc.is_inf(numbers)).as_py() is True


def _check_range(array: pa.Array) -> None:
    """Raise InexactValue unless times are within a day, and Python has the dates and instants."""
    kind = array.type
    if pa.types.is_temporal(kind) and not pa.types.is_time(kind) and rows_beyond_python(array):
        raise InexactValue(BEYOND_PYTHON)
    if pa.types.is_time(kind):
        # View the stored integers without a copy: pyarrow does not check the range of times.
        words = array.view(pa.int32() if pa.types.is_time32(kind) else pa.int64())
        ends = pc.min_max(words).as_py()
        if ends["min"] is not None and not 0 <= ends["min"] <= ends["max"] < _DAY[kind.unit]:
            raise InexactValue(
                f"stored times lie between {ends['min']} and {ends['max']}, and a time of day in"
                f" {kind} is between 0 and {_DAY[kind.unit] - 1}"
            )
    elif pa.types.is_date64(kind) and len(array) > array.null_count:
        milliseconds = array.view(pa.int64()).drop_null().to_numpy()
        if (milliseconds % _DAY["ms"]).any():
            raise InexactValue(f"a stored date has a time of day, and {kind} holds whole days only")


def _cast_exactly(column: pa.Array, kind: pa.DataType) -> pa.Array:
    # Check a dictionary's values as plain values: most casts do not support dictionaries.
    column = _decode(column)
    if pa.types.is_nested(column.type):
        # For a slice, pyarrow casts the values of all rows, and refuses values of other rows.
        # Concatenating copies only the slice's rows; `take` does not support nested views.
        column = pa.concat_arrays([column, column.slice(0, 0)])
    _check_zones(column.type, kind)
    made = cast_rows(column, kind)
    _check_range(made)
    _check_lost(column, _decode(made))
    return made


def _decode(column: pa.Array) -> pa.Array:
    is_encoded = pa.types.is_dictionary(column.type)
    return column.cast(column.type.value_type) if is_encoded else column


def _check_zones(given: pa.DataType, kind: pa.DataType) -> None:
    """Raise InexactValue if a cast of instants drops or invents a zone, a date or a time of day."""
    types = pa.types
    if not types.is_timestamp(given):
        return
    if types.is_timestamp(kind) and (given.tz is None) is not (kind.tz is None):
        raise InexactValue(
            f"{given} cannot become {kind}: only one of them has a time zone; convert it first"
        )
    if types.is_date(kind) and given.tz is not None:
        raise InexactValue(f"which date of {kind} it is depends on the zone of {given}")
    if types.is_time(kind):
        raise InexactValue(f"{kind} does not hold the date of {given}")


def _check_lost(column: pa.Array, made: pa.Array) -> None:
    """Raise InexactValue unless `made`, cast from `column`, holds the same values."""
    types = pa.types
    column = _decode(column)
    given, kind = column.type, made.type
    if given == kind or not len(column) or types.is_null(given):
        return
    _check_zones(given, kind)
    if types.is_struct(given) and types.is_struct(kind):
        _check_lost_of_structs(column, made)
    elif types.is_map(given) and types.is_map(kind):
        for part in ("keys", "items"):
            before, after = (_entries(array, part) for array in (column, made))
            _check_lost(before, after)
    elif _is_list(given) and _is_list(kind):
        _check_lost(pc.list_flatten(column), pc.list_flatten(made))
    elif types.is_floating(kind):
        _check_number(column, made)
    elif types.is_date(kind) or types.is_boolean(kind) or _is_decimal_of_floats(given, kind):
        _check_same(column, made)


def _is_decimal_of_floats(given: pa.DataType, kind: pa.DataType) -> bool:
    """Return True if floats were cast to decimals. All other decimals are cast exactly."""
    return bool(pa.types.is_decimal(kind) and pa.types.is_floating(given))


def _check_lost_of_structs(column: pa.Array, made: pa.Array) -> None:
    given, kind = cast("Any", column.type), cast("Any", made.type)
    names, others = (
        {field.name for field in _fields(struct_type)} for struct_type in (given, kind)
    )
    if names != others:
        raise InexactValue(f"a struct with the fields {given} came, and the column is {kind}")
    for name in names:
        before = column.flatten()[given.get_field_index(name)]
        _check_lost(before, made.flatten()[kind.get_field_index(name)])


def _fields(kind: pa.DataType) -> list[pa.Field]:
    return [kind.field(index) for index in range(kind.num_fields)]


def _entries(array: pa.Array, part: str) -> pa.Array:
    """Return all keys or all items of maps."""
    offsets: pa.Array = cast("Any", array).offsets
    first, last = offsets[0].as_py(), offsets[len(offsets) - 1].as_py()
    # For a slice, `keys` and `items` are those of the whole array; the offsets select its own.
    whole: pa.Array = getattr(array, part)
    return whole.slice(first, last - first)


def _check_number(column: pa.Array, made: pa.Array) -> None:
    kind, types = made.type, pa.types
    if types.is_decimal(column.type):
        _check_same(column, made)
    elif _has_infinities(made):
        was_finite = (
            pc.invert(pc.match_substring(column, "inf", ignore_case=True))
            if types.is_string(column.type) or types.is_large_string(column.type)
            else pc.is_finite(column)
        )
        numbers = made.cast(pa.float64())
        if pc.any(pc.and_(pc.is_inf(numbers), was_finite)).as_py():
            raise InexactValue(f"a number is beyond what {kind} holds")
    # pyarrow refuses integers that the wider floating types would round, but rounds them for
    # float16.
    if types.is_integer(column.type) and types.is_float16(kind):
        same = pc.equal(made.cast(pa.float64()), column.cast(pa.float64()))
        if pc.all(same).as_py() is False:
            raise InexactValue(f"{kind} does not hold an integer of {column.type} exactly")


def _check_same(column: pa.Array, made: pa.Array) -> None:
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        return
    back = made.cast(column.type)
    if pc.all(pc.equal(back, column)).as_py() is False:
        raise InexactValue(f"{made.type} does not hold a value of {column.type} exactly")
