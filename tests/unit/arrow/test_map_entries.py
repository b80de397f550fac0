"""The keys and values of maps, taken out of an array."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from onceflow.core.arrow.instants import map_entries, rows_beyond_python

_PLACE = pa.struct([pa.field("n", pa.int32(), nullable=False)])
_ROWS: list[Any] = [[("a", {"n": 1}), ("b", None)], None, [], [("c", None)]]


@pytest.mark.parametrize(
    ("first", "length", "expected"),
    [
        (0, 4, [("a", {"n": 1}), ("b", None), ("c", None)]),
        (1, 3, [("c", None)]),
        (0, 1, [("a", {"n": 1}), ("b", None)]),
        (1, 1, []),
        (2, 0, []),
    ],
)
def test_entries_of_a_part_are_those_of_its_own_maps(
    first: int, length: int, expected: list[Any]
) -> None:
    part = pa.array(_ROWS, pa.map_(pa.string(), _PLACE)).slice(first, length)
    keys, values = map_entries(part)
    assert list(zip(keys.to_pylist(), values.to_pylist(), strict=True)) == expected


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.string_view()])
def test_a_null_beside_maps_of_any_text_is_no_obstacle(kind: pa.DataType) -> None:
    maps = pa.array([[("a", "x")], None, [("b", None)]], pa.map_(pa.string(), kind))
    keys, values = map_entries(maps)
    assert (keys.to_pylist(), values.to_pylist()) == (["a", "b"], ["x", None])
    assert rows_beyond_python(maps) == []


def test_entries_that_a_null_map_hides_are_left_out() -> None:
    whole: Any = pa.MapArray.from_arrays(
        pa.array([0, 1, 3], pa.int32()), pa.array(["x", "y", "z"]), pa.array([1, 2, 3])
    )
    entries = pa.StructArray.from_arrays(
        [whole.keys, whole.items],
        fields=[pa.field("key", pa.string(), nullable=False), pa.field("value", pa.int64())],
    )
    only_second = pa.py_buffer(bytes([0b10]))
    buffers = [only_second, whole.buffers()[1]]
    maps = pa.Array.from_buffers(whole.type, 2, buffers, children=[entries])
    keys, values = map_entries(maps)
    assert (keys.to_pylist(), values.to_pylist()) == (["y", "z"], [2, 3])
