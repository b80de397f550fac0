"""The totals of a key as the bytes of one row, for snapshots and databases.

The parts of a row, one after the other:

    for each column its total, little-endian: 8 bytes; a decimal has 16, an average 16 or 24, in
        the words of `wide_totals`; a column of text or bytes has the size of its value
    for each column a byte: 1 if it has seen a value
    for each column of text or bytes its value
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from onceflow.core.errors import StateCorrupt
from onceflow.core.state.keys.key_columns import PADDING_BYTES, BytesKeys, read_key_columns
from onceflow.core.state.keys.key_index import to_binary, to_fixed_binary

Records = npt.NDArray[Any]
"""The fixed-size part of rows: fields t0, t1, … and s0, s1, …."""


def encode_totals(records: Records, texts: Sequence[pa.Array]) -> pa.Array:
    """Return a binary array of rows. `texts` are the columns of text or bytes, without nulls."""
    if not texts:
        kind = pa.binary(records.dtype.itemsize)
        return pa.Array.from_buffers(kind, len(records), [None, pa.py_buffer(records.tobytes())])
    nothing = pa.scalar(b"", pa.large_binary())
    joined: pa.Array = pc.binary_join_element_wise(to_fixed_binary(records), *texts, nothing)
    return joined


def decode_totals(
    values: pa.Array, layout: np.dtype[Any], of_bytes: Sequence[int]
) -> tuple[Records, list[pa.Array]]:
    """Return the parts that `encode_totals` joined. `of_bytes` are the columns of `texts`.

    Raises:
        StateCorrupt: The bytes are no rows of this layout.
    """
    if not of_bytes:
        return np.frombuffer(b"".join(values.to_pylist()), layout), []
    (whole,) = read_key_columns([values.cast(pa.large_binary())], ["totals"])
    assert isinstance(whole, BytesKeys)
    size = layout.itemsize
    if not len(whole):
        return np.zeros(0, layout), [pa.array([], pa.large_binary()) for _ in of_bytes]
    if int(whole.lengths.min()) < size:
        shortest = int(whole.lengths.min())
        raise StateCorrupt(
            f"a row of totals in a snapshot has {shortest} bytes, and needs at least {size};"
            " restore an older checkpoint"
        )
    # A view with a record at each byte, aligned or not: one gather loads the record of each row.
    data = np.append(whole.data, np.zeros(max(0, size - PADDING_BYTES), np.uint8))
    loads: Records = np.ndarray((len(data) - size + 1,), layout, data, strides=(1,))
    records = loads[whole.starts]
    texts: list[pa.Array] = []
    position, ends = whole.starts + size, whole.starts + whole.lengths
    for column in of_bytes:
        lengths = records[f"t{column}"].astype(np.int64)
        # Checked before the gather, which would read beyond the row into the next one.
        if int(lengths.min()) < 0 or bool((position + lengths > ends).any()):
            raise StateCorrupt(
                "a text among totals in a snapshot is longer than its row; restore an older"
                " checkpoint"
            )
        texts.append(to_binary(BytesKeys(whole.data, position, lengths)))
        position = position + lengths
    if not np.array_equal(position, ends):
        raise StateCorrupt(
            "rows of totals do not have the columns that their snapshot names; restore an older"
            " checkpoint"
        )
    return records, texts
