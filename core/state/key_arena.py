"""Keys of a table, one a slot: appended and never changed, so a snapshot may go on reading them.

Slot 0 is nobody's: an index can use 0 for "no slot" and still look there.

Invariants:
    what lies before `count` in any array never changes; growing makes a larger array and copies
    BytesArena: starts[i + 1] == starts[i] + lengths[i], so the arena is an Arrow buffer as it is

Encoded form of a key (checkpoint format): one column of bytes alone: the bytes. Otherwise the
columns in order, a fixed one as its words of 8 bytes big-endian, one of bytes as a 4-byte
big-endian length and the bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from onceflow.core.errors import StateCorrupt
from onceflow.core.state.key_columns import (
    PADDING_BYTES,
    BytesKeys,
    FixedKeys,
    Ints,
    KeyColumn,
    Words,
)

Mask: TypeAlias = npt.NDArray[np.bool_]

WORDS_COMPARED_MAX = 16
"""Keys longer than this many words (128 bytes) are compared one by one."""


def grown(array: npt.NDArray[Any], used: int, needed: int) -> npt.NDArray[Any]:
    """Return an array that holds `needed` items and begins with the first `used` of `array`."""
    if needed <= len(array):
        return array
    larger = np.zeros(max(needed, 2 * len(array)), array.dtype)
    larger[:used] = array[:used]
    return larger


class FixedArena:
    """Slots of a column of one or two words."""

    def __init__(self, width: int) -> None:
        self._planes = [np.zeros(1024, np.uint64) for _ in range(width)]
        self.count = 1

    def append(self, keys: FixedKeys) -> None:
        """Put `keys` into the next slots."""
        end = self.count + len(keys)
        for index, plane in enumerate(self._planes):
            larger = grown(plane, self.count, end)
            larger[self.count : end] = keys.words[index]
            self._planes[index] = larger
        self.count = end

    def equal(self, slots: Ints, keys: FixedKeys) -> Mask:
        """Tell for each row whether its key is the one in its slot."""
        same: Mask = self._planes[0][slots] == keys.words[0]
        for plane, words in zip(self._planes[1:], keys.words[1:], strict=True):
            same &= plane[slots] == words
        return same

    def view(self) -> FixedKeys:
        """Return every slot's key, slot 0's included, as of now and for ever."""
        return FixedKeys(tuple(plane[: self.count] for plane in self._planes))


class BytesArena:
    """Slots of a column of bytes."""

    def __init__(self) -> None:
        self._data = np.zeros(1 << 14, np.uint8)
        self._starts = np.zeros(1024, np.int64)
        self._lengths = np.zeros(1024, np.int64)
        self._used = 0
        self.count = 1

    def append(self, keys: BytesKeys) -> None:
        """Put `keys` into the next slots."""
        lengths = keys.lengths
        ends = self._used + np.cumsum(lengths)
        used = int(ends[-1]) if len(ends) else self._used
        end = self.count + len(keys)
        self._data = grown(self._data, self._used, used + PADDING_BYTES)
        self._starts = grown(self._starts, self.count, end)
        self._lengths = grown(self._lengths, self.count, end)
        starts = ends - lengths
        from_bytes = np.repeat(keys.starts - starts, lengths) + np.arange(self._used, used)
        self._data[self._used : used] = keys.data[from_bytes]
        self._starts[self.count : end] = starts
        self._lengths[self.count : end] = lengths
        self._used, self.count = used, end

    def equal(self, slots: Ints, keys: BytesKeys) -> Mask:
        """Tell for each row whether its key is the one in its slot."""
        stored = BytesKeys(self._data, self._starts[slots], keys.lengths)
        same: Mask = self._lengths[slots] == keys.lengths
        if not len(same):
            return same
        shortest, longest = int(keys.lengths.min()), int(keys.lengths.max())
        everywhere = bool(same.all())
        for index in range(min((longest + 7) // 8, WORDS_COMPARED_MAX)):
            if everywhere and 8 * index < shortest:
                same &= stored.word(index) == keys.word(index)
            else:
                rows = np.flatnonzero(same & (keys.lengths > 8 * index))
                same[rows] = stored.word(index, rows) == keys.word(index, rows)
        for row in np.flatnonzero(same & (keys.lengths > 8 * WORDS_COMPARED_MAX)).tolist():
            same[row] = stored.bytes_of(row) == keys.bytes_of(row)
        return same

    def view(self) -> BytesKeys:
        """Return every slot's key, slot 0's included, as of now and for ever."""
        return BytesKeys(
            self._data[: self._used + PADDING_BYTES],
            self._starts[: self.count],
            self._lengths[: self.count],
        )


KeyArena: TypeAlias = FixedArena | BytesArena


def arena_for(column: KeyColumn) -> KeyArena:
    """Return an empty arena for keys such as those of `column`."""
    return BytesArena() if isinstance(column, BytesKeys) else FixedArena(len(column.words))


def encode_keys(columns: Sequence[KeyColumn]) -> pa.Array:
    """Return the encoded form of each row's key, as a large_binary array."""
    if len(columns) == 1 and isinstance(columns[0], BytesKeys):
        return _binary_of(columns[0])
    parts: list[pa.Array] = []
    for column in columns:
        if isinstance(column, BytesKeys):
            parts += [fixed_binary(column.lengths.astype(">u4")), _binary_of(column)]
        else:
            parts += [fixed_binary(plane.astype(">u8")) for plane in column.words]
    if len(parts) == 1:
        return parts[0]
    joined: pa.Array = pc.binary_join_element_wise(*parts, pa.scalar(b"", pa.large_binary()))
    return joined


def decode_keys(encoded: pa.Array, shape: Sequence[KeyColumn]) -> tuple[KeyColumn, ...]:
    """Return the key columns that `encode_keys` was given; `shape` are columns of the same kinds.

    Raises:
        StateCorrupt: The bytes are no such keys.
    """
    whole = _bytes_keys_of(encoded)
    if len(shape) == 1 and isinstance(shape[0], BytesKeys):
        return (whole,)
    position, ends = whole.starts.copy(), whole.starts + whole.lengths
    columns: list[KeyColumn] = []
    for column in shape:
        if isinstance(column, FixedKeys):
            planes: list[Words] = []
            for _ in column.words:
                planes.append(_load(whole.data, ">u8", position, ends).astype(np.uint64))
                position = position + 8
            columns.append(FixedKeys(tuple(planes)))
        else:
            lengths = _load(whole.data, ">u4", position, ends).astype(np.int64)
            columns.append(BytesKeys(whole.data, position + 4, lengths))
            position = position + 4 + lengths
    if not np.array_equal(position, ends):
        raise StateCorrupt("keys of a snapshot do not have the columns that the snapshot names")
    return tuple(columns)


def _load(data: npt.NDArray[np.uint8], dtype: str, at: Ints, ends: Ints) -> npt.NDArray[Any]:
    size = np.dtype(dtype).itemsize
    if bool((at + size > ends).any()):
        raise StateCorrupt("a key of a snapshot is shorter than its columns")
    loads: npt.NDArray[Any] = np.ndarray((len(data) - size + 1,), dtype, data, strides=(1,))
    return loads[at]


def fixed_binary(values: npt.NDArray[Any]) -> pa.Array:
    """Return the bytes of each item as a large_binary array."""
    fixed = pa.binary(values.dtype.itemsize)
    array = pa.Array.from_buffers(fixed, len(values), [None, pa.py_buffer(values.tobytes())])
    return array.cast(pa.large_binary())


def _binary_of(column: BytesKeys) -> pa.Array:
    rows = len(column)
    offsets: Ints = np.zeros(rows + 1, np.int64)
    np.cumsum(column.lengths, out=offsets[1:])
    if rows and np.array_equal(column.starts, offsets[:-1] + column.starts[0]):
        first = int(column.starts[0])
        data = column.data[first : first + int(offsets[-1])]
    else:
        chosen: Ints = np.repeat(column.starts - offsets[:-1], column.lengths)
        data = column.data[chosen + np.arange(offsets[-1])]
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(data)]
    return pa.Array.from_buffers(pa.large_binary(), rows, buffers)


def _bytes_keys_of(array: pa.Array) -> BytesKeys:
    from onceflow.core.state.key_columns import read_key_columns

    (column,) = read_key_columns([array.cast(pa.large_binary())], ["key"])
    if not isinstance(column, BytesKeys):
        raise StateCorrupt(f"keys of a snapshot are {array.type}, not bytes")
    return column
