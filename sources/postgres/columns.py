"""The conversion of values in Postgres's binary format to Arrow columns, each value unchanged.

The stream of changes and the first copy (`COPY … (FORMAT binary)`) send the same bytes, so both use
these conversions. The default Arrow type of a Postgres type is one that the Postgres sink writes
into that type. A value that the Arrow type cannot hold is refused: `ValueRefused` contains the
index of its row, and the caller adds the name of the column.

A type without an exact Arrow type is read as text: the text that its output function writes under
`TEXT_SETTINGS`, which its input function reads back as the same value. Every type can be read as
text if the user chooses `string` for the column.

Source: the send functions of PostgreSQL 18, src/backend/utils/adt.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types as arrow

from onceflow.clients.postgres.binary_rows import Binary, BinaryColumn
from onceflow.clients.postgres.catalog import PostgresType
from onceflow.clients.postgres.types import DECIMAL_PRECISION_MAX, has_exact_text

Convert: TypeAlias = Callable[[Sequence[Binary]], pa.Array]
"""A function that returns the Arrow values, or raises ValueRefused."""

_DAYS_TO_2000 = 10_957
_MICROSECONDS_TO_2000 = _DAYS_TO_2000 * 86_400_000_000
_DAY_US = 86_400_000_000
_INFINITE_DAYS = (-(2**31), 2**31 - 1)
_INFINITE_TIMES = (-(2**63), 2**63 - 1)
_TIME_MAX = 2**63 - 1 - _MICROSECONDS_TO_2000
"""The last time after 2000 that Arrow can count from 1970."""
_TEXTS = frozenset({"text", "varchar", "bpchar", "citext", "json", "jsonb", "enum"})
_JSONB_VERSION = "\1"
_DEFAULTS: Mapping[str, pa.DataType] = {
    **dict.fromkeys(_TEXTS, pa.string()),
    "int2": pa.int16(),
    "int4": pa.int32(),
    "int8": pa.int64(),
    "float4": pa.float32(),
    "float8": pa.float64(),
    "bool": pa.bool_(),
    "bytea": pa.binary(),
    "uuid": pa.string(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us"),
    "timestamptz": pa.timestamp("us", "UTC"),
    "time": pa.time64("us"),
    "interval": pa.duration("us"),
}
_NUMERIC_GROUPS_MAX = DECIMAL_PRECISION_MAX // 4 + 2
"""The most groups of four digits in which a decimal128 may be sent."""
_NUMERIC_HEADER = struct.Struct("!HhHH")
_NEGATIVE = 0x4000
_SHORT_GROUPS_MAX = 4
_POWERS_OF_TEN = 10 ** np.arange(19, dtype=np.int64)
_GROUP_MASKS = np.array([(1 << 16 * count) - 1 for count in range(5)], np.uint64)
"""The bits of the last groups of digits, by their number."""
_SPECIAL_NUMERICS = {0xC000: "NaN", 0xD000: "Infinity", 0xF000: "-Infinity"}
_INTERVAL = struct.Struct("!qii")
_ARRAY_HEADER = struct.Struct("!iiI")
_ARRAY_DIMENSION = struct.Struct("!ii")
_LENGTH = struct.Struct("!i")
_UUID_TEXT_SIZE = 36
_UUID_GROUPS = ((0, 8), (8, 12), (12, 16), (16, 20), (20, 32))
"""The digits between two hyphens."""
_HEX_PAIRS = np.frombuffer(bytes(range(256)).hex().encode(), np.uint16)
"""The two hexadecimal digits of each byte."""


class ValueRefused(Exception):
    """Raised for a value that the Arrow type cannot hold."""

    def __init__(self, row: int, shown: str, why: str) -> None:
        """Create the error from the index of the value, its text and the reason."""
        super().__init__(row, shown, why)
        self.row, self.shown, self.why = row, shown, why


def default_type(source: PostgresType) -> pa.DataType | None:
    """Return the Arrow type of the values of `source`, or None if they have no exact one."""
    own = _own_type(source)
    if own is None and has_exact_text(source):
        return pa.string()
    return own


def is_text_form(source: PostgresType, given: pa.DataType) -> bool:
    """Return True if values of `source` are read as `given` by their text."""
    return given == pa.string() and source.name not in (*_TEXTS, "uuid")


def _own_type(source: PostgresType) -> pa.DataType | None:
    """Return the Arrow type into which the binary format is converted, or None."""
    if source.element:
        # The sink writes no lists of durations.
        element = None if source.element == "interval" else _own_type(source.element_type)
        return None if element is None else pa.list_(element)
    if source.name == "numeric":
        return _numeric_type(source)
    return _DEFAULTS.get(source.name)


def _numeric_type(source: PostgresType) -> pa.DataType | None:
    if source.precision is None or source.scale is None:
        return None
    # A negative scale rounds digits before the point; a large one has zeros after it.
    scale = max(source.scale, 0)
    precision = max(source.precision - min(source.scale, 0), scale)
    return pa.decimal128(precision, scale) if precision <= DECIMAL_PRECISION_MAX else None


def converter_of(source: PostgresType, given: pa.DataType) -> Convert | None:
    """Return the conversion of values of `source` to `given`, or None if there is no exact one.

    It takes binary values, or the bytes of texts if the column is read by `is_text_form`.
    """
    if is_text_form(source, given):
        return _texts if has_exact_text(source) else None
    return _own_converter(source, given)


def _own_converter(source: PostgresType, given: pa.DataType) -> Convert | None:
    """Return the conversion of binary values of `source` to `given`, or None."""
    if source.element:
        if not arrow.is_list(given):
            return None
        convert = _own_converter(source.element_type, given.value_type)
        return None if convert is None else partial(_lists, convert, given)
    if source.name == "numeric":
        is_fit = arrow.is_decimal128(given) and given.scale >= 0
        return partial(_decimals, given) if is_fit else None
    if given != _DEFAULTS.get(source.name):
        return None
    if source.name in _TEXTS:
        return _text_converter(source)
    return _CONVERTERS.get(source.name)


def _text_converter(source: PostgresType) -> Convert:
    if source.name == "jsonb":
        return _documents
    # Postgres pads char(n) with spaces that it ignores; the text has none.
    return (
        _texts_without_padding if source.name == "bpchar" and source.length is not None else _texts
    )


def _numbers(kind: str, values: Sequence[Binary]) -> tuple[Any, Any]:
    """Return the native numbers of big-endian `values`, and a mask of the nulls."""
    dtype = np.dtype(kind)
    if isinstance(values, BinaryColumn):
        numbers = values.to_numbers(kind)
        if numbers is not None:
            return numbers, values.nulls
        values = list(values)
    zero = bytes(dtype.itemsize)
    joined = b"".join([zero if value is None else value for value in values])
    if len(joined) != dtype.itemsize * len(values):
        wrong = next(at for at, v in enumerate(values) if v is not None and len(v) != len(zero))
        raise ValueRefused(wrong, repr(values[wrong]), f"it does not have {dtype.itemsize} bytes")
    numbers = np.frombuffer(joined, dtype).astype(dtype.newbyteorder("="))
    return numbers, np.fromiter((value is None for value in values), bool, len(values))


def _plain_numbers(kind: str, values: Sequence[Binary]) -> pa.Array:
    numbers, nulls = _numbers(kind, values)
    return pa.array(numbers, mask=nulls)


def _booleans(values: Sequence[Binary]) -> pa.Array:
    if isinstance(values, BinaryColumn) and (bits := values.to_numbers("u1")) is not None:
        return pa.array(bits == 1, mask=values.nulls)
    return pa.array([None if value is None else value == b"\1" for value in values], pa.bool_())


def _bytes(values: Sequence[Binary]) -> pa.Array:
    return values.to_arrow() if isinstance(values, BinaryColumn) else pa.array(values, pa.binary())


def _texts(values: Sequence[Binary]) -> pa.Array:
    return _bytes(values).cast(pa.string())


def _texts_without_padding(values: Sequence[Binary]) -> pa.Array:
    trimmed: pa.Array = pc.ascii_rtrim(_texts(values), " ")
    return trimmed


def _documents(values: Sequence[Binary]) -> pa.Array:
    if isinstance(values, BinaryColumn):
        has_version = values.read_numbers(0, "u1") == ord(_JSONB_VERSION)
        if values.nulls is not None:
            has_version |= values.nulls
        if has_version.all():
            return values.to_arrow(skipped=len(_JSONB_VERSION)).cast(pa.string())
    data = _bytes(values)
    row: int = pc.index(pc.starts_with(data, _JSONB_VERSION), False).as_py()
    if row >= 0:
        shown = repr((values[row] or b"")[:20])
        raise ValueRefused(row, shown, "its first byte, the version of jsonb's format, is not 1")
    texts: pa.Array = pc.utf8_slice_codeunits(data.cast(pa.string()), len(_JSONB_VERSION))
    return texts


def _uuids(values: Sequence[Binary]) -> pa.Array:
    if isinstance(values, BinaryColumn) and (numbers := values.to_numbers("V16")) is not None:
        digits = _HEX_PAIRS[numbers.view(np.uint8)].view(np.uint8).reshape(-1, 32)
        texts = np.full((len(values), _UUID_TEXT_SIZE), ord("-"), np.uint8)
        for group, (start, end) in enumerate(_UUID_GROUPS):
            texts[:, start + group : end + group] = digits[:, start:end]
        offsets = np.arange(len(values) + 1, dtype=np.int32) * np.int32(_UUID_TEXT_SIZE)
        buffers = [values.validity, pa.py_buffer(offsets), pa.py_buffer(texts)]
        return pa.Array.from_buffers(pa.string(), len(values), buffers)
    return pa.array(
        [None if value is None else format_uuid(value) for value in values], pa.string()
    )


def format_uuid(value: bytes) -> str:
    """Return the text of a UUID as Postgres writes it."""
    digits = value.hex()
    return "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))


def _refuse_any(numbers: Any, refused: Sequence[int], why: str) -> None:
    for number in refused:
        rows = np.flatnonzero(numbers == number)
        if len(rows):
            raise ValueRefused(int(rows[0]), "infinity" if number > 0 else "-infinity", why)


def _dates(values: Sequence[Binary]) -> pa.Array:
    days, nulls = _numbers(">i4", values)
    _refuse_any(days, _INFINITE_DAYS, "Arrow has no infinite dates")
    return pa.array(days + np.int32(_DAYS_TO_2000), mask=nulls).view(pa.date32())


def _timestamps(zone: str | None, values: Sequence[Binary]) -> pa.Array:
    times, nulls = _numbers(">i8", values)
    if times.min(initial=0) == _INFINITE_TIMES[0] or times.max(initial=0) > _TIME_MAX:
        _refuse_any(times, _INFINITE_TIMES, "Arrow has no infinite times")
        late = np.flatnonzero(times > _TIME_MAX)
        shown = f"{times[late[0]]} microseconds after 2000"
        raise ValueRefused(int(late[0]), shown, "Arrow's timestamps end before it")
    moved = times + np.int64(_MICROSECONDS_TO_2000)
    return pa.array(moved, mask=nulls).view(pa.timestamp("us", zone))


def _times(values: Sequence[Binary]) -> pa.Array:
    times, nulls = _numbers(">i8", values)
    _refuse_day_end(times)
    return pa.array(times, mask=nulls).view(pa.time64("us"))


def _refuse_day_end(times: Any) -> None:
    rows = np.flatnonzero(times >= _DAY_US)
    if len(rows):
        raise ValueRefused(int(rows[0]), "24:00:00", "Arrow's times end before it")


def _intervals(values: Sequence[Binary]) -> pa.Array:
    if isinstance(values, BinaryColumn) and values.to_numbers("V16") is not None:
        has_days = values.read_numbers(8, ">i8").any()
        if not has_days:
            times = values.read_numbers(0, ">i8")
            return pa.array(times, mask=values.nulls).view(pa.duration("us"))
    durations: list[int | None] = []
    for row, value in enumerate(values):
        if value is None:
            durations.append(None)
            continue
        microseconds, days, months = _INTERVAL.unpack(value)
        if days or months:
            shown = f"{months} months {days} days {microseconds} microseconds"
            raise ValueRefused(row, shown, "a duration has no days and months")
        durations.append(microseconds)
    return pa.array(durations, pa.int64()).view(pa.duration("us"))


def _decimals(given: pa.DataType, values: Sequence[Binary]) -> pa.Array:
    """Return decimals, built from their bytes: an object of Python for each would cost more."""
    if isinstance(values, BinaryColumn) and (short := _short_decimals(given, values)) is not None:
        return short
    limit = 10**given.precision
    zero = bytes(16)
    unscaled: list[bytes] = []
    for row, value in enumerate(values):
        if value is None:
            unscaled.append(zero)
            continue
        number = _unscale(row, value, given.scale)
        if not -limit < number < limit:
            raise ValueRefused(row, f"{number}e-{given.scale}", f"{given} has fewer digits")
        unscaled.append(number.to_bytes(16, "little", signed=True))
    present = np.fromiter((value is not None for value in values), bool, len(values))
    valid = np.packbits(present, bitorder="little")
    buffers = [pa.py_buffer(valid.tobytes()), pa.py_buffer(b"".join(unscaled))]
    return pa.Array.from_buffers(given, len(values), buffers)


def _short_decimals(given: pa.DataType, values: BinaryColumn) -> pa.Array | None:
    """Return decimals that fit in 64 bits, or None if a value is longer or must be refused."""
    heads = values.read_numbers(0, ">u8")
    counts = (heads >> 48).astype(np.int64)
    weights = (heads >> 32).astype(np.int16).astype(np.int64)
    signs = (heads >> 16).astype(np.uint16)
    sizes = _NUMERIC_HEADER.size + 2 * counts
    if values.nulls is not None:
        sizes[values.nulls] = 0
    if (
        counts.max(initial=0) > _SHORT_GROUPS_MAX
        or (values.lengths != sizes).any()
        or not ((signs == 0) | (signs == _NEGATIVE)).all()
    ):
        return None
    # The last eight bytes of a value have all of its groups of digits.
    groups = values.read_ends(">u8") & _GROUP_MASKS[counts]
    numbers = np.zeros(len(values), np.int64)
    for shift in (48, 32, 16, 0):
        numbers = numbers * 10_000 + (groups >> shift & 0xFFFF).astype(np.int64)
    exponents = np.where(numbers == 0, 0, 4 * (weights - counts + 1) + given.scale)
    if (np.abs(exponents) >= len(_POWERS_OF_TEN)).any():
        return None
    numbers, remainders = np.divmod(numbers, _POWERS_OF_TEN[np.maximum(-exponents, 0)])
    factors = _POWERS_OF_TEN[np.maximum(exponents, 0)]
    if remainders.any() or (numbers > _POWERS_OF_TEN[-1] // factors).any():
        return None
    numbers *= factors
    if (numbers >= _POWERS_OF_TEN[min(given.precision, len(_POWERS_OF_TEN) - 1)]).any():
        return None
    numbers = np.where(signs == _NEGATIVE, -numbers, numbers)
    halves = np.stack((numbers, numbers >> 63), axis=-1).astype("<i8")
    return pa.Array.from_buffers(given, len(values), [values.validity, pa.py_buffer(halves)])


def _unscale(row: int, value: bytes, scale: int) -> int:
    """Return the number times 10^scale.

    Raises:
        ValueRefused: It is not finite, or has more digits after the point.
    """
    count, weight, sign, _ = _NUMERIC_HEADER.unpack_from(value)
    if sign in _SPECIAL_NUMERICS:
        raise ValueRefused(row, _SPECIAL_NUMERICS[sign], "Arrow's decimals have no such value")
    if count > _NUMERIC_GROUPS_MAX or weight > _NUMERIC_GROUPS_MAX:
        raise ValueRefused(row, "a number", f"a decimal has {DECIMAL_PRECISION_MAX} digits at most")
    number: int = 0
    for digit in struct.unpack_from(f"!{count}h", value, _NUMERIC_HEADER.size):
        number = number * 10_000 + digit
    exponent = 4 * (weight - count + 1) + scale
    if exponent >= 0:
        number *= int(10**exponent)
    else:
        number, remainder = divmod(number, int(10**-exponent))
        if remainder:
            raise ValueRefused(row, "a number", f"it has more than {scale} digits after the point")
    return -number if sign == _NEGATIVE else number


def _lists(convert: Convert, given: pa.DataType, values: Sequence[Binary]) -> pa.Array:
    """Return lists; their elements are converted together."""
    elements: list[Binary] = []
    rows: list[int] = []
    offsets: list[int | None] = []
    for row, value in enumerate(values):
        if value is None:
            offsets.append(None)
            continue
        offsets.append(len(elements))
        elements += _read_elements(row, value)
        rows += [row] * (len(elements) - len(rows))
    offsets.append(len(elements))
    try:
        converted = convert(elements)
    except ValueRefused as error:
        raise ValueRefused(rows[error.row], error.shown, f"{error.why} (in an array)") from None
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), converted, type=given)


def _read_elements(row: int, value: bytes) -> list[Binary]:
    dimensions, _, _ = _ARRAY_HEADER.unpack_from(value)
    if dimensions == 0:
        return []
    at = _ARRAY_HEADER.size
    length, first = _ARRAY_DIMENSION.unpack_from(value, at)
    if dimensions > 1 or first != 1:
        shown = f"an array of {dimensions} dimensions that begins at index {first}"
        raise ValueRefused(row, shown, "a list has one dimension and begins at 1")
    at += _ARRAY_DIMENSION.size
    elements: list[Binary] = []
    for _ in range(length):
        (size,) = _LENGTH.unpack_from(value, at)
        at += _LENGTH.size
        elements.append(None if size < 0 else value[at : at + size])
        at += max(size, 0)
    return elements


_CONVERTERS: Mapping[str, Convert] = {
    "int2": partial(_plain_numbers, ">i2"),
    "int4": partial(_plain_numbers, ">i4"),
    "int8": partial(_plain_numbers, ">i8"),
    "float4": partial(_plain_numbers, ">f4"),
    "float8": partial(_plain_numbers, ">f8"),
    "bool": _booleans,
    "bytea": _bytes,
    "uuid": _uuids,
    "date": _dates,
    "timestamp": partial(_timestamps, None),
    "timestamptz": partial(_timestamps, "UTC"),
    "time": _times,
    "interval": _intervals,
}
