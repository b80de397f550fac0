"""The catalogue of the round-trip matrix: every column type of Arrow, with the edges of its values.

    SCALARS   one column of each type that is not nested
    NESTED    every shape of one and of two levels around each of them, with null at every level

A test of a sink or of a source runs one cell for each column, usually with one batch:

    @pytest.mark.parametrize("edge", parameters(SCALARS))
    def test_…(edge: EdgeColumn) -> None:
        write(edge.values)
        assert same(read_back(), exact_values(edge.values))

The default run has the columns of the short form; all others are marked `slow`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import chain
from typing import Any

import pyarrow as pa
import pytest

from onceflow.core.arrow.kinds import to_plain_type

_arrays: Any = pa
"""The module, for classes that have no types."""


@dataclass(frozen=True)
class EdgeColumn:
    """A column of one type that holds each edge of its values, and null as the last one."""

    name: str
    """The type in words, which is the test's id."""
    build: Callable[[], pa.Array] = field(repr=False)
    is_short: bool = True
    """True if the default run has it."""

    @cached_property
    def values(self) -> pa.Array:
        """The column."""
        return self.build()

    @property
    def type(self) -> pa.DataType:
        """The type of the column."""
        return self.values.type


def parameters(columns: Iterable[EdgeColumn]) -> list[Any]:
    """Return one parameter of pytest for each column; those beyond the short form are slow."""
    return [
        pytest.param(column, id=column.name, marks=() if column.is_short else pytest.mark.slow)
        for column in columns
    ]


def rows_one_by_one(values: pa.Array) -> list[pa.Array]:
    """Return each row of `values` as a column of its own, for a sink that refuses some of them."""
    return [values.slice(row, 1) for row in range(len(values))]


# --- numbers ------------------------------------------------------------------------------------

# Beyond 2**53 a double skips whole numbers, which is what JSON readers and JavaScript take.
_DOUBLE_GAP = (2**53 - 1, 2**53, 2**53 + 1)
_FLOAT_EDGES: Sequence[float] = (
    *(0.0, -0.0, 1.0, -1.5, 0.1, 1 / 3),
    *(float("nan"), float("inf"), float("-inf")),
)
_FLOATS: dict[pa.DataType, Sequence[float]] = {
    # Smallest subnormal, smallest normal, largest.
    pa.float16(): (2.0**-24, 2.0**-14, 65504.0, -65504.0),
    pa.float32(): (2.0**-149, -(2.0**-149), 2.0**-126, 3.4028234663852886e38, 16777217.0),
    pa.float64(): (
        *(5e-324, -5e-324, 2.2250738585072014e-308, 1.7976931348623157e308),
        *(1e22, 1e23, 123456789.12345679, float(2**53 + 2)),
    ),
}
_DECIMALS = (
    *((pa.decimal32, 9, 2), (pa.decimal64, 18, 6)),
    *((pa.decimal128, 1, 0), (pa.decimal128, 5, 2), (pa.decimal128, 20, 4)),
    *((pa.decimal128, 38, 0), (pa.decimal128, 38, 10), (pa.decimal128, 38, 38)),
    *((pa.decimal128, 5, -2), (pa.decimal128, 3, 5)),
    *((pa.decimal256, 39, 0), (pa.decimal256, 50, 4), (pa.decimal256, 65, 30)),
    *((pa.decimal256, 76, 38), (pa.decimal256, 76, 76), (pa.decimal256, 50, -3)),
)


def _integers(kind: pa.DataType) -> pa.Array:
    bits, signed = kind.bit_width, pa.types.is_signed_integer(kind)
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)
    edges = {low, low + 1, 0, 1, high - 1, high, high // 2, high // 2 + 1}
    edges |= {-1, -7} if signed else set()
    if bits == 64:
        edges |= {*_DOUBLE_GAP, *((-gap for gap in _DOUBLE_GAP) if signed else ())}
    return pa.array([*sorted(edges), None], kind)


def _floats(kind: pa.DataType) -> pa.Array:
    # By way of numpy's own rounding, so that 0.1 of float16 is the nearest one.
    wide = pa.array([*_FLOAT_EDGES, *_FLOATS[kind], None], pa.float64())
    return wide.cast(kind, safe=False)


def _decimals(kind: pa.DataType) -> pa.Array:
    """Return all digits, none, the last one alone, and trailing zeros, with both signs."""
    digits, size = kind.precision, kind.bit_width // 8
    # 12345… with as many digits as there are, and a round number.
    unscaled = {10**digits - 1, int(("1234567890" * 8)[:digits]), 1, 10 ** (digits - 1)}
    edges = [0, *chain.from_iterable((number, -number) for number in sorted(unscaled)), None]
    words = b"".join((edge or 0).to_bytes(size, "little", signed=True) for edge in edges)
    valid = pa.array([edge is not None for edge in edges])
    bitmap = valid.buffers()[1]
    return pa.Array.from_buffers(kind, len(edges), [bitmap, pa.py_buffer(words)])


# --- text and bytes -----------------------------------------------------------------------------

TEXTS: Sequence[str] = (
    *("", " ", "  ", "a", "a ", " a", "a  ", "A", "a\n", "\r\n", "\t", "a\tb\\n"),
    *("\0", "a\0", "a\0b", "\x01\x1a\x1b[31m\x7f\x85"),
    *("é", "e\u0301", "ß", "İ", "ı", "\ufeffa", "\u200b", "\u2028", "\ufffd", "\uffff"),
    *("\ud7ff", "\ue000", "x" * 15 + "\ud7ff", "😀", "x" * 15 + "\U0010ffff", "\U00010000"),
    *("'", '"', "`", "\\", "\\\\", "\\N", "%s", "%%", ";--", "{}", "[]", '"a"', ","),
    *("NULL", "null", "None", "true", "t", "007", "-0", "1e5", "0x1F", " 1", "1.50", "NaN"),
    *("Infinity", "2024-02-29", "=1+1", "__HIVE_DEFAULT_PARTITION__", "a/b", "..", "a=b", "%2F"),
)
"""Texts that something between here and a target might trim, quote, fold, parse or cut."""
LONG_TEXTS: Sequence[str] = ("x" * 255, "é" * 256, "😀" * 1_000, "y" * 65_535, "z" * 65_536)
LONE_SURROGATES: Sequence[str] = ("\ud800", "a\udfff", "\udc00\ud800")
"""Texts of Python that UTF-8 has no bytes for: a column of Arrow refuses them."""
BYTES: Sequence[bytes] = (
    *(b"", b"\0", b"a\0\0", b"\0a", b" ", b"a ", b"a", b"A", b"\x80", b"\xff", b"\xed\xa0\x80"),
    *(bytes(range(256)), b"\\x41", b"'\"\\\n", b"b" * 65_536),
)
_WIDTHS = (1, 3, 16)


def _texts(kind: pa.DataType) -> pa.Array:
    return pa.array([*TEXTS, *LONG_TEXTS, None], pa.large_string()).cast(kind)


def _bytes(kind: pa.DataType) -> pa.Array:
    return pa.array([*BYTES, None], pa.large_binary()).cast(kind)


def _fixed_bytes(kind: pa.DataType) -> pa.Array:
    width = kind.byte_width
    edges = [b"\0" * width, b"\xff" * width, b" " * width, (b"a" + b"\0" * width)[:width]]
    return pa.array([*edges, (b"abcdefghijklmnop")[:width], None], kind)


def invalid_text() -> pa.Array:
    """Return a column of text whose second row is not UTF-8, as a careless library makes it."""
    octets, offsets = b"ok\xed\xa0\x80", pa.array([0, 2, 5], pa.int32())
    buffers = [None, offsets.buffers()[1], pa.py_buffer(octets)]
    return pa.Array.from_buffers(pa.string(), 2, buffers)


# --- dates and times ----------------------------------------------------------------------------

# The first day of the year 1, the last of 9999, and their neighbours; the first of the Gregorian
# calendar and its neighbour; the leap day; days around 1970. Days since 1970-01-01.
_DAYS: Sequence[int] = (
    *(-719_163, -719_162, -141_428, -141_427, -25_567, -1, 0, 1, 19_782, 24_855),
    *(2_932_896, 2_932_897),
)
_DAY_S = 86_400
_UNITS = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
_INT64 = (-(2**63), 2**63 - 1)
# Seconds: ends of the years 1 and 9999, of 32 bits, of nanoseconds in 64 bits, of pandas; the hour
# that New York has twice in 2024, and the one that it lacks.
_SECONDS: Sequence[int] = (
    *(-62_135_596_801, -62_135_596_800, 253_402_300_799, 253_402_300_800),
    *(-(2**31), 2**31 - 1, 2**31, -9_223_372_036, 9_223_372_036),
    *(1_730_611_800, 1_730_615_400, 1_710_054_000, -1, 0, 1),
)
_ZONES = (None, "UTC", "America/New_York", "+05:30")


def _of_words(kind: pa.DataType, words: Iterable[int]) -> pa.Array:
    """Return a column of dates, times or durations by their whole numbers, and null."""
    width = pa.int32() if kind.bit_width == 32 else pa.int64()
    return pa.array([*dict.fromkeys(words), None], width).view(kind)


def _dates(kind: pa.DataType) -> pa.Array:
    if pa.types.is_date32(kind):
        return _of_words(kind, (*_DAYS, -(2**31), 2**31 - 1))
    return _of_words(kind, [day * _DAY_S * 1_000 for day in (*_DAYS, -(2**31), 2**31 - 1)])


def _fractions(unit: str) -> Sequence[int]:
    """Return parts of a second in `unit`: the smallest, the largest, and what each digit leaves."""
    a_second = _UNITS[unit]
    return [part for part in (0, 1, 999, 1_000, 500_000, a_second // 2, a_second - 1)
            if part < a_second]  # fmt: skip


def _clocks(kind: pa.DataType) -> pa.Array:
    a_second = _UNITS[kind.unit]
    return _of_words(kind, [second * a_second + part for second in (0, 3_723, _DAY_S - 1)
                            for part in _fractions(kind.unit)])  # fmt: skip


def times_beyond_a_day(kind: pa.DataType) -> pa.Array:
    """Return times that no day has, though a careless library makes them: 24:00 and before 0:00."""
    return _of_words(kind, [_DAY_S * _UNITS[kind.unit], -1])


def _timestamps(kind: pa.DataType) -> pa.Array:
    low, high = _INT64
    ticks = [second * _UNITS[kind.unit] + part for second in _SECONDS
             for part in _fractions(kind.unit)]  # fmt: skip
    # The lowest word is a missing value of numpy and pandas.
    return _of_words(kind, [tick for tick in (low, low + 1, *ticks, high) if low <= tick <= high])


def _spans(kind: pa.DataType) -> pa.Array:
    a_day = _DAY_S * _UNITS[kind.unit]
    return _of_words(kind, [*_INT64, *(_INT64[0] + 1, -a_day - 1, -1, 0, 1, a_day, 40 * a_day + 1)])


def _intervals() -> pa.Array:
    edges = [(0, 0, 0), (1, 2, 3), (-1, -2, -3), (0, 31, 0), (0, 0, 86_400 * 10**9)]
    return pa.array([*map(pa.MonthDayNano, edges), None], pa.month_day_nano_interval())


# --- encodings ----------------------------------------------------------------------------------


def _in_dictionary(edge: Callable[[], pa.Array], index: pa.DataType) -> pa.Array:
    """Return the values of `edge` by a dictionary that holds null, too, and a value of no row."""
    values = edge().slice(0, 20)
    dictionary = pa.concat_arrays([values, edge().slice(20, 1), pa.nulls(1, values.type)])
    indices = pa.array([*range(len(values)), len(dictionary) - 1, None], index)
    encoded: pa.Array = _arrays.DictionaryArray.from_arrays(indices, dictionary)
    return encoded


def _in_runs() -> pa.Array:
    ends, values = pa.array([2, 3, 5], pa.int32()), pa.array(["a", "", None])
    encoded: pa.Array = _arrays.RunEndEncodedArray.from_arrays(ends, values)
    return encoded


def _uuids() -> pa.Array:
    storage = _fixed_bytes(pa.binary(16))
    extended: pa.Array = _arrays.ExtensionArray.from_storage(pa.uuid(), storage)
    return extended


# --- shapes -------------------------------------------------------------------------------------


def as_lists(values: pa.Array) -> pa.Array:
    """Return a list of each value, one of all, an empty one, and null."""
    count = len(values)
    every = pa.concat_arrays([values, values])
    ends = [*range(count + 1), 2 * count, 2 * count, None]
    # The offset before a null is where the null begins; the last one is an end alone.
    offsets = pa.array([*ends, 2 * count], pa.int32())
    return pa.ListArray.from_arrays(offsets, every)


def _as_large_lists(values: pa.Array) -> pa.Array:
    lists = as_lists(values)
    return lists.cast(pa.large_list(lists.type.value_type))


def _as_pairs(values: pa.Array) -> pa.Array:
    """Return lists of exactly two values: each one twice, and null over two values."""
    twice = pa.array([at for row in range(len(values)) for at in (row, row)] + [0, 0])
    mask = pa.array([False] * len(values) + [True])
    pairs: pa.Array = _arrays.FixedSizeListArray.from_arrays(_take(values, twice), 2, mask=mask)
    return pairs


def _as_structs(values: pa.Array) -> pa.Array:
    """Return a struct of each value, and a null struct above a value that nobody may see."""
    count = len(values)
    inner = pa.concat_arrays([values, values.slice(0, 1)])
    numbers = pa.array([*range(count), 0], pa.int32())
    mask = pa.array([False] * count + [True])
    fields = [pa.field("a", values.type), pa.field("B b", pa.int32())]
    return pa.StructArray.from_arrays([inner, numbers], fields=fields, mask=mask)


def _as_required_structs(values: pa.Array) -> pa.Array:
    """Return structs whose fields take no null, and a null struct."""
    given = [row for row, is_valid in enumerate(values.is_valid().to_pylist()) if is_valid]
    inner = _take(values, pa.array([*given, given[0]]))
    mask = pa.array([False] * len(given) + [True])
    fields = [pa.field("a", values.type, nullable=False)]
    return pa.StructArray.from_arrays([inner], fields=fields, mask=mask)


def _as_maps(values: pa.Array) -> pa.Array:
    """Return a map to each value, one to all, an empty one, and null."""
    count = len(values)
    names = pa.array([*("é" for _ in range(count)), *(f"k{at}" for at in range(count))])
    offsets = pa.array([*range(count + 1), 2 * count, 2 * count, None, 2 * count], pa.int32())
    items = pa.concat_arrays([values, values])
    maps: pa.Array = _arrays.MapArray.from_arrays(offsets, names, items)
    return maps


def _take(values: pa.Array, rows: pa.Array) -> pa.Array:
    """Return the rows of `values`; types that no kernel takes are put together one by one."""
    try:
        return values.take(rows)
    except pa.ArrowNotImplementedError:
        return pa.concat_arrays([values.slice(row, 1) for row in rows.to_pylist()])


SHAPES: dict[str, tuple[Callable[[pa.Array], pa.Array], ...]] = {
    "list": (as_lists,),
    "large list": (_as_large_lists,),
    "list of two": (_as_pairs,),
    "struct": (_as_structs,),
    "required struct": (_as_required_structs,),
    "map": (_as_maps,),
    "list of list": (as_lists, as_lists),
    "list of struct": (_as_structs, as_lists),
    "list of map": (_as_maps, as_lists),
    "struct of list": (as_lists, _as_structs),
    "struct of struct": (_as_structs, _as_structs),
    "struct of required struct": (_as_required_structs, _as_structs),
    "struct of map": (_as_maps, _as_structs),
    "map to list": (as_lists, _as_maps),
    "map to struct": (_as_structs, _as_maps),
    "map to map": (_as_maps, _as_maps),
}
"""Each shape, as what is put around the values, the inner one first."""


def apply_shape(shape: str, edge: EdgeColumn) -> pa.Array:
    """Return the values of `edge` inside of `shape`."""
    values = edge.values
    for put_around in SHAPES[shape]:
        values = put_around(values)
    return values


# --- the catalogue ------------------------------------------------------------------------------


def _edges(build: Callable[[pa.DataType], pa.Array], *kinds: pa.DataType) -> list[EdgeColumn]:
    return [EdgeColumn(str(kind), partial(build, kind)) for kind in kinds]


SCALARS: tuple[EdgeColumn, ...] = (
    *_edges(_integers, pa.int8(), pa.int16(), pa.int32(), pa.int64()),
    *_edges(_integers, pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()),
    *_edges(_floats, *_FLOATS),
    *_edges(_decimals, *(make(precision, scale) for make, precision, scale in _DECIMALS)),
    EdgeColumn("bool", partial(pa.array, [True, False, None])),
    *_edges(_texts, pa.string(), pa.large_string(), pa.string_view()),
    *_edges(_bytes, pa.binary(), pa.large_binary(), pa.binary_view()),
    *_edges(_fixed_bytes, *map(pa.binary, _WIDTHS)),
    *_edges(_dates, pa.date32(), pa.date64()),
    *_edges(_clocks, pa.time32("s"), pa.time32("ms"), pa.time64("us"), pa.time64("ns")),
    *_edges(_timestamps, *(pa.timestamp(unit, zone) for unit in _UNITS for zone in _ZONES)),
    *_edges(_spans, *map(pa.duration, _UNITS)),
    EdgeColumn("month_day_nano_interval", _intervals),
    EdgeColumn("null", partial(pa.nulls, 2)),
    EdgeColumn(
        "dictionary of string", partial(_in_dictionary, partial(_texts, pa.string()), pa.int8())
    ),
    EdgeColumn(
        "dictionary of int64", partial(_in_dictionary, partial(_integers, pa.int64()), pa.int32())
    ),
    EdgeColumn("run ends of string", _in_runs),
    EdgeColumn("uuid", _uuids),
)

_NESTED_IN_SHORT = frozenset(
    {"int64", "double", "string", "decimal128(38, 10)", "timestamp[us, tz=UTC]", "date32[day]"}
)
# Two levels around each would be no other code than around these.
_TWO_LEVELS_IN_SHORT = frozenset({"int64", "string"})


def _nested() -> Iterable[EdgeColumn]:
    for shape, levels in SHAPES.items():
        for edge in SCALARS:
            if _as_required_structs in levels and edge.name == "null":
                continue
            short = _TWO_LEVELS_IN_SHORT if len(levels) > 1 else _NESTED_IN_SHORT
            name = f"{shape} of {edge.name}"
            yield EdgeColumn(name, partial(apply_shape, shape, edge), edge.name in short)


NESTED: tuple[EdgeColumn, ...] = tuple(_nested())


def is_nested(kind: pa.DataType) -> bool:
    """Return whether `kind` has other values inside."""
    return bool(pa.types.is_nested(to_plain_type(kind)))
