"""Which columns of a Parquet file are written with a dictionary: those whose values come again.

Parquet's writers build a dictionary of every column until it gets too large, and only then write
the values plainly. Of a column of ids, times or other values that hardly come again, all of that is
lost: half of the time that a data file takes, and a file that is larger.
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types as arrow

_SAMPLED_SHARE = 50
"""One row of so many is looked at: that costs less than a tenth of what it may save."""
_SAMPLED_ROWS_MIN = 1000
_DISTINCT_SHARE_MAX = 0.95
"""Of the sampled values. In a row group 50 times as large, where values come evenly, one value of
five is then a new one: about where a dictionary begins to make a file larger."""


def choose_dictionaries(rows: pa.Table) -> list[str] | bool:
    """Return the columns that get a dictionary, as `ParquetWriter` takes them.

    `rows` is the first row group of a file. Its first rows are the sample: values that come again
    right after each other, as sorted ones do, are seen there. With nested columns, whose parts have
    names of their own, every column gets one.
    """
    if any(arrow.is_nested(field.type) for field in rows.schema):
        return True
    count = max(_SAMPLED_ROWS_MIN, rows.num_rows // _SAMPLED_SHARE)
    sample = [column.slice(0, count) for column in rows.columns]
    return [
        name for name, column in zip(rows.column_names, sample, strict=True) if _is_repeated(column)
    ]


def _is_repeated(column: pa.ChunkedArray) -> bool:
    if arrow.is_boolean(column.type):
        return False  # one bit each: there is nothing to save
    distinct: int = pc.count_distinct(column, mode="only_valid").as_py()
    return distinct <= _DISTINCT_SHARE_MAX * (len(column) - column.null_count)
