"""Key columns turned back into Arrow arrays of the types that they were read from."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from onceflow.core.arrow.kinds import cast_rows
from onceflow.core.state.keys.key_columns import BytesKeys, FixedKeys, KeyColumn
from onceflow.core.state.keys.key_index import to_binary

_MS_A_DAY = 86_400_000


def to_key_array(column: KeyColumn | pa.Array, kind: pa.DataType) -> pa.Array:
    """Return the keys as an array of `kind`, the type of the column that they were read from.

    Keys of bytes may be given as a large_binary array.
    """
    if pa.types.is_dictionary(kind):
        return cast_rows(to_key_array(column, kind.value_type).dictionary_encode(), kind)
    if isinstance(column, FixedKeys):
        return _to_fixed_array(column, kind)
    return cast_rows(to_binary(column) if isinstance(column, BytesKeys) else column, kind)


def _to_fixed_array(column: FixedKeys, kind: pa.DataType) -> pa.Array:
    if pa.types.is_decimal(kind):
        # The two words of a key are Arrow's own bytes of a decimal128.
        words = np.stack(column.words, axis=1).astype("<u8")
        return pa.Array.from_buffers(kind, len(column), [None, pa.py_buffer(words.tobytes())])
    if kind == pa.uint64():
        return pa.array(column.words[0])
    numbers = column.words[0].view(np.int64)
    if pa.types.is_timestamp(kind):
        return pa.array(numbers).view(kind)
    if pa.types.is_date32(kind):
        return pa.array(numbers).cast(pa.int32()).view(kind)
    if pa.types.is_date64(kind):
        return pa.array(numbers * _MS_A_DAY).view(kind)
    return cast_rows(pa.array(numbers), kind)
