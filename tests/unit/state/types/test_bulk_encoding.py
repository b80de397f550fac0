"""Scalars that are encoded together have the bytes that each of them has alone."""

from __future__ import annotations

from typing import Any, cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onceflow.core.state.types.serializers import encode_scalars

SCALARS: dict[type[Any], st.SearchStrategy[Any]] = {
    int: st.integers(-(1 << 63), (1 << 63) - 1) | st.integers(-300, 300),
    float: st.floats(),
    bool: st.booleans(),
    str: st.text(max_size=40),
    bytes: st.binary(max_size=300),
}


@given(st.data())
@pytest.mark.parametrize("kind", list(SCALARS))
def test_scalars_encoded_together_have_the_bytes_of_each_alone(
    kind: type[Any], data: st.DataObject
) -> None:
    values = data.draw(st.lists(SCALARS[kind], min_size=1, max_size=40))
    encoded = encode_scalars(values, kind)
    assert encoded is not None
    assert encoded.to_pylist() == [msgspec.msgpack.encode(value) for value in values]


def test_integers_around_every_limit_of_a_size_have_their_own_bytes() -> None:
    near = [
        sign * (1 << bits) + more for bits in range(63) for more in range(-2, 3) for sign in (1, -1)
    ]
    values = [*near, (1 << 63) - 1, -(1 << 63)]
    encoded = encode_scalars(values, int)
    assert encoded is not None
    assert encoded.to_pylist() == [msgspec.msgpack.encode(value) for value in values]


@pytest.mark.parametrize("size", [0, 31, 32, 255, 256, 65_535, 65_536])
@pytest.mark.parametrize("count", [1, 15, 16, 17])
def test_texts_and_bytes_of_every_size_have_their_own_bytes(size: int, count: int) -> None:
    for values in (
        ["x" * size] * count,
        ["\N{EURO SIGN}" * (size // 3)] * count,
        [b"y" * size] * count,
    ):
        encoded = encode_scalars(values, type(values[0]))
        assert encoded is not None
        assert encoded.to_pylist() == [msgspec.msgpack.encode(value) for value in values]


def test_long_lists_are_cut_at_the_right_bytes() -> None:
    encoded = encode_scalars([7] * 65_536, int)
    assert encoded is not None
    assert encoded.to_pylist() == [b"\x07"] * 65_536


@pytest.mark.parametrize(
    "values", [[1, 1 << 63], [-(1 << 63) - 1], ["\ud800"], [], [None, None]], ids=repr
)
def test_what_has_no_plain_encoding_is_left_to_be_encoded_one_by_one(values: list[Any]) -> None:
    kind = cast("type[Any]", type(values[0]) if values else int)
    assert encode_scalars(values, kind) is None
