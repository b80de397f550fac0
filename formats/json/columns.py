"""The conversion of decoded JSON records to Arrow columns, and the type that checks a record.

While a record is decoded, the msgspec type checks it against the Arrow schema. Fields are called
c0, c1, … in Python and by their own names in JSON, so any column name is possible. msgspec checks
ranges where it can, because at that point the offset of a bad record is known without extra cost.
`has_late_checks` says whether values can still be refused when they are converted to Arrow.

`struct.pack` converts numbers to Arrow. It checks each number's range and costs 4 ns a value, a
quarter of `pa.array`. It does not support null, so a column with nulls takes the slower way.

Instants finer than microseconds are read exactly, and decoding would round them.

They become nanoseconds in a column of nanoseconds. A coarser column holds such an instant if the
digits beyond its unit are zeros. Otherwise the record is bad.
"""

from __future__ import annotations

import datetime as dt
import decimal
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, TypeAlias, TypedDict, cast

import msgspec
import numpy as np
import pyarrow as pa
from pyarrow import types
from typing_extensions import NotRequired

from onceflow.core.arrow.exact_arrays import array_of, exact_array
from onceflow.core.arrow.instants import BEYOND_PYTHON, rows_beyond_python
from onceflow.core.arrow.kinds import cast_rows, holds
from onceflow.core.errors import ConfigError
from onceflow.formats.registry_schemas import TOMBSTONE

FINER = re.compile(rb":\d\d:\d\d\.\d{7}")
"""A pattern found in every text that contains an instant finer than microseconds."""

_MANY_DIGITS = re.compile(rb"\.\d{7}")
"""A pattern that matches wherever `FINER` does, and in other numbers of many digits.

It is several times as fast.
"""
_INSTANT = re.compile(r"(.+:\d\d:\d\d)\.(\d{7,})(.*)", re.DOTALL)
_EPOCH = dt.datetime(1970, 1, 1)


def any_finer(texts: Sequence[bytes | None]) -> bool:
    """Return True if one of `texts` contains an instant finer than microseconds."""
    try:
        whole = b"\n".join(cast("Sequence[bytes]", texts))
    except TypeError:
        whole = b"\n".join(text for text in texts if text is not None)
    return _MANY_DIGITS.search(whole) is not None and FINER.search(whole) is not None


def holds_instants(kind: pa.DataType) -> bool:
    """Return True if values of the type are instants, or may contain instants."""
    if types.is_dictionary(kind):
        return holds_instants(kind.value_type)
    inner = (kind.field(index).type for index in range(kind.num_fields))
    return types.is_timestamp(kind) or any(map(holds_instants, inner))


def make_exact(record: Any, written: object, columns: pa.Schema) -> None:
    """Set the instants of `record`, which was decoded from `written`, to their exact values.

    Raises:
        ValueError: A column cannot hold an instant. The message names the column.
    """
    if not isinstance(written, dict):
        return
    fields = cast("dict[str, Any]", written)
    for index, column in enumerate(columns):
        if holds_instants(column.type):
            value = getattr(record, f"c{index}")
            try:
                exact = _exact(value, fields.get(column.name), column.type)
            except ValueError as error:
                raise ValueError(f"column {column.name!r} ({column.type}): {error}") from None
            setattr(record, f"c{index}", exact)


def _exact(value: Any, written: Any, kind: pa.DataType) -> Any:
    """Return the exact value of `written` if `value` was rounded, else `value`."""
    if types.is_dictionary(kind):
        return _exact(value, written, kind.value_type)
    if isinstance(value, dt.datetime):
        finer = _INSTANT.fullmatch(written) if isinstance(written, str) else None
        return value if finer is None else _read_instant(finer, written, kind)
    if types.is_list(kind) or types.is_large_list(kind):
        pairs = zip(value or (), written or (), strict=True)
        return value and [_exact(item, text, kind.value_type) for item, text in pairs]
    if types.is_map(kind) and value:
        return {key: _exact(entry, written[key], kind.item_type) for key, entry in value.items()}
    return _exact_struct(value, written, kind) if types.is_struct(kind) else value


def _exact_struct(value: Any, written: Any, kind: pa.DataType) -> Any:
    if isinstance(value, msgspec.Struct):
        make_exact(value, written, pa.schema(list(kind)))
    if not isinstance(value, Mapping):
        return value
    mapping = cast("Mapping[str, Any]", value)
    fields = {field.name: field.type for field in map(kind.field, range(kind.num_fields))}
    return {
        name: _exact(member, written.get(name), fields[name]) for name, member in mapping.items()
    }


def _read_instant(finer: re.Match[str], written: str, kind: pa.DataType) -> dt.datetime | int:
    moment, digits, zone = finer.groups()
    whole = msgspec.convert(f"{moment}.{digits[:6]}{zone}", dt.datetime)
    finer_digits = digits[6:].rstrip("0")
    if not finer_digits:
        return whole
    if kind.unit != "ns" or len(finer_digits) > 3:
        raise ValueError(f"{written} is finer than the column's unit, {kind.unit}")
    if whole.tzinfo is not None:
        whole = whole.astimezone(dt.timezone.utc).replace(tzinfo=None)
    since = whole - _EPOCH
    microseconds = (since.days * 86_400 + since.seconds) * 1_000_000 + since.microseconds
    return microseconds * 1_000 + int(finer_digits.ljust(3, "0"))


DECODE_ERRORS = (msgspec.MsgspecError, TypeError, ValueError, RecursionError)
"""The errors of decoding a value that is not a record of the expected type."""

_PATH = re.compile(r" - at `\$\.(.+)`$", re.DOTALL)
_VALUE_LENGTH_MAX = 40
"""The maximum length of a bad value in an error."""


def fault_of(error: Exception, value: bytes | None, columns: pa.Schema) -> str:
    """Describe why `value` could not be decoded, with the column and its value."""
    if value is None:
        return f"{TOMBSTONE}, and its format needs one"
    reason = str(error)
    path = _PATH.search(reason)
    if path is None:
        return reason
    name = next(
        (
            column.name
            for column in columns
            if path[1] == column.name or path[1].startswith((f"{column.name}.", f"{column.name}["))
        ),
        None,
    )
    if name is None:
        return reason
    kind = columns.field(name).type
    return f"column {name!r} ({kind}): {reason}, found {_describe_value(value, name)}"


def late_fault_of(
    values: Sequence[Any], columns: pa.Schema, converters: Sequence[Convert]
) -> str | None:
    """Describe which of a record's `values` does not fit its column, or return None if all do."""
    for value, column, convert in zip(values, columns, converters, strict=True):
        try:
            convert([value])
        except CONVERSION_ERRORS as error:
            return f"column {column.name!r} ({column.type}) cannot hold {_short(value)}: {error}"
    return None


def _describe_value(value: bytes, name: str) -> str:
    try:
        decoded = cast("object", msgspec.json.decode(value))
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return "it unreadable"
    if isinstance(decoded, dict):
        return _short(cast("dict[str, object]", decoded).get(name))
    return _short(decoded)


def _short(value: object) -> str:
    value = _to_dictionaries(value)
    shown = str(value) if not isinstance(value, str) else repr(value)
    return f"{shown[:_VALUE_LENGTH_MAX]}…" if len(shown) > _VALUE_LENGTH_MAX else shown


def _to_dictionaries(value: object) -> object:
    """Return the value of a struct as a dictionary, and any other value as it is."""
    if not isinstance(value, msgspec.Struct):
        return value
    members = msgspec.structs.fields(value)
    return {member.encode_name: _to_dictionaries(getattr(value, member.name)) for member in members}


def column_reader(count: int) -> Callable[[list[Any]], tuple[list[Any], ...]]:
    """Return a function from records to the lists of their fields c0, c1 and so on.

    Its source code is generated and compiled, as in dataclasses: an attribute with a literal name
    costs 9 ns, `operator.attrgetter` 18 ns.
    """
    lists = "".join(f"[record.c{index} for record in records]," for index in range(count))
    return cast(
        "Callable[[list[Any]], tuple[list[Any], ...]]",
        eval(f"lambda records: ({lists})"),  # noqa: S307 - holds nothing but the count
    )


_FLOAT32_MAX = 3.4028235677973362e38
"""The largest double that rounds to a finite float32. The next double is halfway to 2**128."""

_DICTIONARY_BITS = 32
"""The minimum width of dictionary indices.

A dictionary with shorter indices may overflow in a batch.
"""


def record_type(columns: pa.Schema) -> type[msgspec.Struct]:
    """Return the type of one record with `columns`. Values of structs are dictionaries.

    A column that is not nullable must be present and not null. A nullable column may be missing.
    Fields that are not columns are ignored.

    Raises:
        ConfigError: JSON records cannot fill a column's type. The message names the column.
    """
    return _define_record(columns, [_python_type(column.type, column.name) for column in columns])


def record_type_of_members(columns: pa.Schema) -> type[msgspec.Struct]:
    """Return the type of one record with `columns`, like `record_type`. Structs are objects.

    A struct is a msgspec object with the fields c0, c1, …, as a record is, also within a struct.
    Within lists and maps, structs are dictionaries. `converter_of_members` takes such values.

    Raises:
        ConfigError: JSON records cannot fill a column's type. The message names the column.
    """
    return _define_record(
        columns, [_type_of_members(column.type, column.name) for column in columns]
    )


def _type_of_members(kind: pa.DataType, column: str) -> Any:
    # A struct without members is a dictionary: `converter_of_members` has no member to read.
    if not types.is_struct(kind) or not kind.num_fields:
        return _python_type(kind, column)
    _require_distinct(kind, column)
    members = pa.schema(list(kind))
    inner = [_type_of_members(field.type, f"{column}.{field.name}") for field in members]
    return _define_record(members, inner)


def _define_record(columns: pa.Schema, kinds: Sequence[Any]) -> type[msgspec.Struct]:
    fields: list[Any] = []
    for index, (column, kind) in enumerate(zip(columns, kinds, strict=True)):
        if column.nullable:
            fields.append((f"c{index}", kind | None, None))
        else:
            fields.append((f"c{index}", kind))
    return msgspec.defstruct(
        "Record",
        fields,
        rename={f"c{index}": column.name for index, column in enumerate(columns)},
        kw_only=True,
        # Records contain no reference cycles. Without this flag the garbage collector tracks each
        # record.
        gc=False,
    )


def has_late_checks(columns: pa.Schema) -> bool:
    """Return True if a decoded record can still be refused when its columns become Arrow."""
    return any(_is_checked_late(column.type) for column in columns)


def _is_checked_late(kind: pa.DataType) -> bool:
    return bool(
        types.is_decimal(kind)
        or types.is_timestamp(kind)
        or types.is_date(kind)
        or types.is_nested(kind)
        or types.is_uint64(kind)
        or types.is_dictionary(kind)
    )


def _python_type(kind: pa.DataType, column: str) -> Any:
    if types.is_nested(kind):
        return _compound_type(kind, column)
    if types.is_integer(kind):
        return _integer_type(kind)
    if types.is_timestamp(kind):
        zoned = Annotated[dt.datetime, msgspec.Meta(tz=kind.tz is not None)]
        return Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)] | zoned
    if types.is_dictionary(kind) and _can_fill_dictionary(kind):
        return _python_type(kind.value_type, column)
    for is_kind, python_type in _SCALARS:
        if is_kind(kind):
            return python_type
    raise _refusal(kind, column)


def _can_fill_dictionary(kind: pa.DataType) -> bool:
    """Return True if pyarrow can create arrays of `kind`, even if all values of a batch differ."""
    try:
        pa.array([], kind)
    except pa.ArrowNotImplementedError:
        return False
    return bool(kind.index_type.bit_width >= _DICTIONARY_BITS)


def _compound_type(kind: pa.DataType, column: str) -> Any:
    if types.is_list(kind) or types.is_large_list(kind):
        return list[_member_type(kind.value_field, column)]  # type: ignore[misc]
    if types.is_struct(kind):
        return _struct_type(kind, column)
    if types.is_map(kind):
        if not types.is_string(kind.key_type):
            raise _refusal(kind, column)
        return dict[str, _member_type(kind.item_field, column)]  # type: ignore[misc]
    raise _refusal(kind, column)


_SCALARS: tuple[tuple[Any, Any], ...] = (
    (types.is_boolean, bool),
    (types.is_float64, float),
    (types.is_float32, Annotated[float, msgspec.Meta(ge=-_FLOAT32_MAX, le=_FLOAT32_MAX)]),
    (types.is_string, str),
    (types.is_large_string, str),
    (types.is_string_view, str),
    (types.is_binary, bytes),
    (types.is_large_binary, bytes),
    (types.is_decimal, decimal.Decimal),
    # Dates are text, or days since 1970 as Debezium writes them.
    (types.is_date32, dt.date | Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]),
)


def _integer_type(kind: pa.DataType) -> Any:
    if types.is_signed_integer(kind):
        bound = 2 ** (kind.bit_width - 1)
        return Annotated[int, msgspec.Meta(ge=-bound, le=bound - 1)]
    if kind.bit_width == 64:
        # msgspec supports no bound above int64. The column's conversion checks the upper bound.
        return Annotated[int, msgspec.Meta(ge=0)]
    return Annotated[int, msgspec.Meta(ge=0, le=2**kind.bit_width - 1)]


def _member_type(member: pa.Field, column: str) -> Any:
    """Return the type of the items of a list or a map."""
    kind = _python_type(member.type, column)
    return kind | None if member.nullable else kind


def _struct_type(kind: pa.DataType, column: str) -> Any:
    _require_distinct(kind, column)
    members: dict[str, Any] = {}
    for member in (kind.field(index) for index in range(kind.num_fields)):
        member_type = _python_type(member.type, f"{column}.{member.name}")
        members[member.name] = NotRequired[member_type | None] if member.nullable else member_type
    return TypedDict("Nested", members)  # type: ignore[operator]


def _require_distinct(kind: pa.DataType, column: str) -> None:
    """Raise ConfigError if two members of a struct have the same name."""
    names = [member.name for member in kind]
    if doubled := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(
            f"column {column!r} is {kind}, which has member {doubled[0]!r} more than once, and a"
            " JSON object has one value for each name. Give each member another name"
        )


def _refusal(kind: pa.DataType, column: str) -> ConfigError:
    return ConfigError(
        f"column {column!r} is {kind}, which JSON records cannot fill here. Use integers, float,"
        " double, bool, string, binary, decimal, date32, timestamp, list, struct or map of strings"
    )


Convert: TypeAlias = Callable[[Sequence[Any]], pa.Array]

CONVERSION_ERRORS = (pa.ArrowException, ArithmeticError, ValueError, TypeError, struct.error)
"""The errors of a conversion if a value does not fit its column."""

_EPOCH_UTC = dt.datetime(1970, 1, 1, tzinfo=dt.timezone.utc)
_PER_MICROSECOND = {"s": (1, 1_000_000), "ms": (1, 1000), "us": (1, 1), "ns": (1000, 1)}
"""The number of units in a microsecond, as a fraction."""


def converter_of(kind: pa.DataType) -> Convert:
    """Return a function from values to an array of `kind`. It raises if a value does not fit."""
    if types.is_timestamp(kind):
        return _within_python(_timestamp_converter(kind))
    code = _pack_code(kind)
    if code is not None:
        return _packing_converter(kind, code)

    if types.is_nested(kind) and holds(kind, _is_coarser_than_python):
        # Otherwise pyarrow cuts off the digits that the unit of an inner timestamp cannot hold.
        return lambda values: exact_array(values, kind)

    def convert(values: Sequence[Any]) -> pa.Array:
        return array_of(values, kind)

    return _within_python(convert) if types.is_nested(kind) or types.is_date(kind) else convert


def converter_of_members(kind: pa.DataType) -> Convert:
    """Return a function from values of `record_type_of_members` to an array of `kind`.

    It raises if a value does not fit.
    """
    if not types.is_struct(kind) or not kind.num_fields:
        return converter_of(kind)
    read = column_reader(kind.num_fields)
    converters = [converter_of_members(field.type) for field in kind]

    def convert(values: Sequence[Any]) -> pa.Array:
        is_present = np.array([value is not None for value in values], np.bool_)
        present = [value for value in values if value is not None]
        if not present:
            return pa.nulls(len(values), kind)
        members = [
            convert_member(column)
            for convert_member, column in zip(converters, read(present), strict=True)
        ]
        rows = pa.StructArray.from_arrays(members, fields=list(kind))
        if len(present) == len(values):
            return rows
        return rows.take(pa.array(np.cumsum(is_present) - 1, mask=~is_present))

    return convert


def _is_coarser_than_python(kind: pa.DataType) -> bool:
    return bool(types.is_timestamp(kind) and kind.unit in ("s", "ms"))


def _within_python(convert: Convert) -> Convert:
    """Return `convert` with a check that refuses instants which Python cannot represent."""

    def convert_within(values: Sequence[Any]) -> pa.Array:
        made = convert(values)
        if rows_beyond_python(made):
            raise ValueError(BEYOND_PYTHON)
        return made

    return convert_within


def _pack_code(kind: pa.DataType) -> str | None:
    if types.is_signed_integer(kind):
        return {8: "b", 16: "h", 32: "i", 64: "q"}[kind.bit_width]
    if types.is_unsigned_integer(kind):
        return {8: "B", 16: "H", 32: "I", 64: "Q"}[kind.bit_width]
    if types.is_float64(kind):
        return "d"
    return None


def _packing_converter(kind: pa.DataType, code: str) -> Convert:
    def convert(values: Sequence[Any]) -> pa.Array:
        count = len(values)
        # One call packs a column without nulls into the bytes that Arrow needs. `pack` refuses
        # other columns, which `pa.array` converts more slowly.
        try:
            packed = struct.pack(f"={count}{code}", *values)
        except struct.error:
            return pa.array(values, type=kind)
        return pa.Array.from_buffers(kind, count, [None, pa.py_buffer(packed)], 0)

    return convert


def _timestamp_converter(kind: pa.DataType) -> Convert:
    numbers = _packing_converter(pa.int64(), "q")

    def convert(values: Sequence[Any]) -> pa.Array:
        kinds = set(map(type, values))
        kinds.discard(type(None))
        if kinds == {dt.datetime}:
            # Convert through microseconds: the cast refuses values that a coarser unit would cut
            # off.
            exact = pa.array(values, type=pa.timestamp("us", kind.tz))
            return cast_rows(exact, kind)
        if dt.datetime in kinds:
            values = [_in_unit(value, kind.unit) for value in values]
        return numbers(values).view(kind)

    return convert


def _in_unit(value: int | dt.datetime | None, unit: str) -> int | None:
    if not isinstance(value, dt.datetime):
        return value
    since = value - (_EPOCH if value.tzinfo is None else _EPOCH_UTC)
    microseconds = (since.days * 86_400 + since.seconds) * 1_000_000 + since.microseconds
    many, divisor = _PER_MICROSECOND[unit]
    count, remainder = divmod(microseconds * many, divisor)
    if remainder:
        raise ValueError(f"{value.isoformat()} is finer than the column's unit, {unit}")
    return count
