"""The MessagePack of many scalars of one class, in one call instead of one for each value.

The encoding of a list is a header and the encodings of its items, one after the other. So the items
can be cut out of it, once the length of each item is known.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

Sizes: TypeAlias = npt.NDArray[np.int64]

_encode_list = msgspec.msgpack.Encoder().encode


def encode_scalars(values: Sequence[Any], kind: type[Any]) -> pa.Array | None:
    """Return the MessagePack of each of `values`, all of class `kind`, as a large_binary array.

    None if they must be encoded one by one: `kind` is no plain scalar, or a value has no
    MessagePack form, such as an integer beyond 64 bits.
    """
    measure = _MEASURES.get(kind)
    if measure is None or not values:
        return None
    try:
        sizes = measure(values)
        data = _encode_list(values)
    except (OverflowError, UnicodeEncodeError, pa.ArrowInvalid):
        return None
    ends = np.zeros(len(values) + 1, np.int64)
    np.cumsum(sizes, out=ends[1:])
    header_bytes = len(data) - int(ends[-1])
    if header_bytes != _list_header_bytes(len(values)):
        return None
    buffers = [None, pa.py_buffer(ends), pa.py_buffer(data).slice(header_bytes)]
    return pa.Array.from_buffers(pa.large_binary(), len(values), buffers)


def _list_header_bytes(count: int) -> int:
    return 1 if count < 16 else 3 if count < 1 << 16 else 5


def _measure_ints(values: Sequence[int]) -> Sizes:
    numbers = np.array(values, np.int64)
    # One comparison for each limit above which one more byte, or twice the bytes, are needed.
    sizes = np.ones(len(values), np.int64)
    for limit, more in ((1 << 7, 1), (1 << 8, 1), (1 << 16, 2), (1 << 32, 4)):
        sizes += more * (numbers >= limit)
    for limit, more in ((-(1 << 5), 1), (-(1 << 7), 1), (-(1 << 15), 2), (-(1 << 31), 4)):
        sizes += more * (numbers < limit)
    return sizes


def _measure_texts(values: Sequence[str]) -> Sizes:
    lengths: Sizes = pc.binary_length(pa.array(values, pa.large_string())).to_numpy()
    # A text of less than 32 bytes has its length in the first byte.
    return _with_length_bytes(lengths) - (lengths < 32)


def _measure_bytes(values: Sequence[bytes]) -> Sizes:
    return _with_length_bytes(np.fromiter(map(len, values), np.int64, len(values)))


def _with_length_bytes(lengths: Sizes) -> Sizes:
    return lengths + 2 + (lengths >= 1 << 8) + 2 * (lengths >= 1 << 16)


_MEASURES: Mapping[type[Any], Callable[[Sequence[Any]], Sizes]] = {
    int: _measure_ints,
    str: _measure_texts,
    bytes: _measure_bytes,
    float: lambda values: np.full(len(values), 9, np.int64),
    bool: lambda values: np.ones(len(values), np.int64),
}
