"""Columns of Arrow whose types and values Hypothesis draws, nested to a given depth.

A test that draws prints its seed, and takes the one in `ONCEFLOW_TEST_SEED`.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable
from typing import Any, TypeVar
from unittest.mock import patch

import pyarrow as pa
from hypothesis import HealthCheck, seed, settings
from hypothesis import strategies as st
from hypothesis.internal.conjecture import engine

_arrays: Any = pa
_Test = TypeVar("_Test", bound=Callable[..., None])
_SEED = int(os.environ.get("ONCEFLOW_TEST_SEED", random.randrange(2**32)))
_SHRINK_S = 20.0
"""The time in which Hypothesis looks for a simpler example that fails. One may ask a database."""
_LENGTH_MAX = 3
"""The most values of one list, and the most entries of one map."""


def run_drawn(check: Callable[..., None], examples: int) -> None:
    """Run `check`, a function under `given`, for so many examples, and print the seed.

    Raises:
        AssertionError: What `check` raises for the simplest example that fails.
    """
    sys.stdout.write(f"seed {_SEED}; ONCEFLOW_TEST_SEED sets it\n")
    limits = settings(
        deadline=None,
        max_examples=examples,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    # No setting of Hypothesis has this limit, which is five minutes otherwise.
    with patch.object(engine, "MAX_SHRINKING_SECONDS", _SHRINK_S):
        seed(_SEED)(limits(check))()


_TICKS = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
"""The parts of a second that each unit counts."""


def _make_decimal(digits: int, scale: int) -> pa.DataType:
    make = pa.decimal128 if digits <= 38 else pa.decimal256
    return make(digits, min(scale, digits))


SCALAR_TYPES: st.SearchStrategy[pa.DataType] = st.one_of(
    st.sampled_from(
        [
            *(pa.int8(), pa.int16(), pa.int32(), pa.int64()),
            *(pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()),
            *(pa.float16(), pa.float32(), pa.float64(), pa.bool_()),
            *(pa.string(), pa.large_string(), pa.binary(), pa.binary(3), pa.date32(), pa.date64()),
            *(pa.time32("s"), pa.time32("ms"), pa.time64("us"), pa.time64("ns")),
            *(pa.timestamp(unit, zone) for unit in _TICKS for zone in (None, "UTC", "Asia/Tokyo")),
            *(pa.duration(unit) for unit in _TICKS),
        ]
    ),
    st.builds(_make_decimal, st.integers(1, 76), st.integers(0, 76)),
)
_KEY_TYPES = st.sampled_from([pa.string(), pa.int64(), pa.date32()])


def nested_types(depth: int) -> st.SearchStrategy[pa.DataType]:
    """Return the types that have up to `depth` levels around a scalar."""
    if not depth:
        return SCALAR_TYPES
    inner = nested_types(depth - 1)
    names = st.lists(st.sampled_from(["a", "B b", "é", "c.d"]), min_size=1, max_size=2, unique=True)
    structs = names.flatmap(
        lambda given: st.tuples(*(inner for _ in given)).map(
            lambda kinds: pa.struct(list(zip(given, kinds, strict=True)))
        )
    )
    return st.one_of(
        SCALAR_TYPES,
        inner.map(pa.list_),
        inner.map(pa.large_list),
        inner.map(lambda kind: pa.list_(kind, 2)),
        structs,
        st.tuples(_KEY_TYPES, inner).map(lambda kinds: pa.map_(*kinds)),
    )


@st.composite
def columns(draw: st.DrawFn, kind: pa.DataType, count: int) -> pa.Array:
    """Draw `count` values of `kind`, null among them at each level."""
    return _draw_column(draw, kind, count)


def _draw_column(draw: st.DrawFn, kind: pa.DataType, count: int) -> pa.Array:
    if pa.types.is_struct(kind):
        parts = [_draw_column(draw, field.type, count) for field in kind]
        mask = pa.array(draw(_lists(st.booleans(), count)), pa.bool_())
        return pa.StructArray.from_arrays(parts, fields=list(kind), mask=mask)
    if pa.types.is_fixed_size_list(kind):
        inner = _draw_column(draw, kind.value_type, count * kind.list_size)
        mask = pa.array(draw(_lists(st.booleans(), count)), pa.bool_())
        fixed: pa.Array = _arrays.FixedSizeListArray.from_arrays(inner, type=kind, mask=mask)
        return fixed
    if pa.types.is_map(kind):
        return _draw_maps(draw, kind, count)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        lengths = draw(_lists(st.none() | st.integers(0, _LENGTH_MAX), count))
        large = pa.types.is_large_list(kind)
        offsets = _to_offsets(lengths, pa.int64() if large else pa.int32())
        inner = _draw_column(draw, kind.value_type, sum(length or 0 for length in lengths))
        make = pa.LargeListArray if large else pa.ListArray
        return make.from_arrays(offsets, inner)
    return _draw_scalars(draw, kind, count)


def _lists(values: st.SearchStrategy[Any], count: int) -> st.SearchStrategy[list[Any]]:
    return st.lists(values, min_size=count, max_size=count)


def _to_offsets(lengths: list[int | None], width: pa.DataType) -> pa.Array:
    """Return where each list begins, and the end of the last one; a null begins at a null."""
    offsets: list[int | None] = []
    end = 0
    for length in lengths:
        offsets.append(None if length is None else end)
        end += length or 0
    return pa.array([*offsets, end], width)


def _draw_maps(draw: st.DrawFn, kind: pa.DataType, count: int) -> pa.Array:
    entries: list[list[Any] | None] = []
    for _ in range(count):
        keys = st.lists(_words(kind.key_type), max_size=_LENGTH_MAX, unique=True)
        entries.append(draw(st.none() | keys))
    lengths = [None if keys is None else len(keys) for keys in entries]
    flat = [key for keys in entries for key in keys or ()]
    items = _draw_column(draw, kind.item_type, len(flat))
    offsets = _to_offsets(lengths, pa.int32())
    maps: pa.Array = _arrays.MapArray.from_arrays(offsets, _from_words(flat, kind.key_type), items)
    return maps


def _draw_scalars(draw: st.DrawFn, kind: pa.DataType, count: int) -> pa.Array:
    return _from_words(draw(_lists(st.none() | _words(kind), count)), kind)


def _words(kind: pa.DataType) -> st.SearchStrategy[Any]:
    """Return what values of `kind` are made from: whole numbers for times, dates and decimals."""
    if pa.types.is_boolean(kind):
        return st.booleans()
    if pa.types.is_floating(kind):
        return st.floats(width=kind.bit_width)  # type: ignore[arg-type]
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return st.text(max_size=20)
    if pa.types.is_fixed_size_binary(kind) and not pa.types.is_decimal(kind):
        return st.binary(min_size=kind.byte_width, max_size=kind.byte_width)
    if pa.types.is_binary(kind):
        return st.binary(max_size=20)
    if pa.types.is_decimal(kind):
        return st.integers(1 - 10**kind.precision, 10**kind.precision - 1)
    if pa.types.is_date32(kind):
        return st.integers(-800_000, 3_000_000)
    if pa.types.is_date64(kind):
        return st.integers(-800_000, 3_000_000).map(lambda days: days * 86_400_000)
    if pa.types.is_time(kind):
        return st.integers(0, 86_400 * _TICKS[kind.unit] - 1)
    if pa.types.is_timestamp(kind) or pa.types.is_duration(kind):
        return st.integers(-(2**63), 2**63 - 1) | st.integers(-(10**9), 3 * 10**9).map(
            lambda seconds: seconds * _TICKS[kind.unit]
        )
    low, high = (0, 2**kind.bit_width - 1)
    if pa.types.is_signed_integer(kind):
        low, high = -(2 ** (kind.bit_width - 1)), 2 ** (kind.bit_width - 1) - 1
    return st.integers(low, high)


def _from_words(words: list[Any], kind: pa.DataType) -> pa.Array:
    if pa.types.is_decimal(kind):
        size = kind.bit_width // 8
        octets = b"".join((word or 0).to_bytes(size, "little", signed=True) for word in words)
        valid = pa.array([word is not None for word in words], pa.bool_()).buffers()[1]
        return pa.Array.from_buffers(kind, len(words), [valid, pa.py_buffer(octets)])
    if pa.types.is_float16(kind):
        return pa.array(words, pa.float64()).cast(kind, safe=False)
    if pa.types.is_temporal(kind):
        return pa.array(words, pa.int32() if kind.bit_width == 32 else pa.int64()).view(kind)
    return pa.array(words, kind)
