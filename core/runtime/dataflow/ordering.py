"""The order of records by the values of a column."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from onceflow.core.arrow.kinds import cast_rows
from onceflow.core.errors import BadStateValue
from onceflow.core.state.keys.key_columns import Ints


def require_values(rows: pa.RecordBatch, column: str, method: str) -> None:
    """Raise BadStateValue if a row has no value by which `method` can order it."""
    values = rows.column(column)
    if not values.null_count:
        return
    is_missing = values.is_null().to_numpy(zero_copy_only=False)
    raise BadStateValue(
        f"{method}(by={column!r}): the record has no value in this column, so its place in the"
        " order of its key is unknown. Filter such records before, or give them a value",
        row=int(np.flatnonzero(is_missing)[0]),
    )


def rank_values(parts: Sequence[pa.Array]) -> Ints:
    """Return the rank of each value in the order of all values; equal values have equal ranks.

    NaN is the largest number, and 0.0 equals -0.0. A null has the highest rank.
    """
    ranks = pc.rank(pa.concat_arrays([_to_rankable(part) for part in parts]), tiebreaker="dense")
    numbers: Ints = ranks.to_numpy(zero_copy_only=False).astype(np.int64)
    return numbers


def _to_rankable(values: pa.Array) -> pa.Array:
    """Return `values` in a type that Arrow can rank, which holds each value exactly."""
    kind = values.type
    if pa.types.is_dictionary(kind):
        return _to_rankable(values.dictionary_decode())
    if pa.types.is_float16(kind):
        return cast_rows(values, pa.float32())
    if pa.types.is_decimal32(kind) or pa.types.is_decimal64(kind):
        return cast_rows(values, pa.decimal128(kind.precision, kind.scale))
    return values
