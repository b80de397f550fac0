"""The choice of the columns of a Parquet file that get a dictionary: those with repeated values.

Parquet's writers build a dictionary of every column until it gets too large, and only then write
plain values. For a column of ids, times or other values that hardly repeat, this work is wasted: it
takes half of the time of a data file, and makes the file larger.
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types as arrow

_SAMPLED_SHARE = 50
"""The divisor of the sample: one row in 50 costs less than a tenth of what a good choice saves."""
_SAMPLED_ROWS_MIN = 1000
_DISTINCT_SHARE_MAX = 0.95
"""The largest share of distinct values in the sample. If values are spread evenly, a row group 50
times as large then has one new value in five: about where a dictionary makes a file larger."""


def choose_dictionaries(rows: pa.Table) -> list[str] | bool:
    """Return the columns that get a dictionary, in the form of `ParquetWriter`'s option.

    `rows` is the first row group of a file. Its first rows are the sample, because sorted columns
    repeat their values there. If there are nested columns, whose parts have other names, every
    column gets a dictionary.
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
