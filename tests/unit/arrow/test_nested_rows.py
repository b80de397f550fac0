"""Rows of columns of any type are taken as they are, and cost no more memory the next time."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pyarrow as pa
import pytest

from onceflow.core.arrow.nested_rows import filter_batch, filter_rows, take_rows

_TEXT, _BYTES = pa.string_view(), pa.binary_view()
_LONG = "more than the twelve letters that a view holds"
_ROWS: list[tuple[pa.DataType, Any]] = [
    (_TEXT, _LONG),
    (_BYTES, b"\xff" * 20),
    (pa.list_(_TEXT), ["a", None, _LONG]),
    (pa.large_list(_BYTES), [b"\xff" * 20]),
    (pa.list_(_TEXT, 2), [_LONG, None]),
    (pa.struct([pa.field("a", _TEXT), pa.field("n", pa.int8())]), {"a": _LONG, "n": 1}),
    (pa.map_(pa.string(), _TEXT), [("k", _LONG)]),
    (pa.list_(pa.struct([pa.field("a", pa.list_(_TEXT))])), [{"a": [_LONG]}, {"a": None}]),
]


def _count_buffers(column: pa.Array) -> int:
    return len(cast("Any", column).buffers())


@pytest.mark.parametrize(("kind", "value"), _ROWS, ids=lambda one: str(one)[:40])
def test_rows_with_views_are_taken_again_and_again_without_more_buffers(
    kind: pa.DataType, value: Any
) -> None:
    column = pa.array([value, None] * 20, kind)
    taken = column
    for count in (39, 38, 37):
        taken = take_rows(taken, np.arange(count))
        assert taken.equals(column.slice(0, count))
    assert _count_buffers(taken) <= _count_buffers(column)
    chosen = pa.array([True, False, None] * 12 + [True])
    expected = [column[row] for row in range(0, 37, 3)]
    assert list(filter_rows(taken, chosen)) == expected
    batch = pa.RecordBatch.from_arrays([taken], names=["v"])
    assert list(filter_batch(batch, chosen)["v"]) == expected
