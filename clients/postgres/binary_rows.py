"""Rows in Postgres's binary format as columns: found for a whole batch at once, with numpy.

A message holds one row. The row begins at the same index of each message, and ends with it:

    a row of pgoutput    number of columns (2 bytes); for each column its kind: n null, b binary,
                         then length (4 bytes) and value
    a row of COPY        number of columns (2 bytes); for each column length (4 bytes, -1 for null)
                         and value

Python would take about a microsecond for each value. numpy takes a few operations for each column
of a batch, and makes no object for a value.

Source: PostgreSQL 18, "Logical Replication Message Formats" and "COPY".
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias, overload

import numpy as np
import pyarrow as pa

Binary: TypeAlias = bytes | None
"""A value in binary format; None is SQL's null."""

_NULL, _BINARY, _TEXT, _UNCHANGED = b"nbtu"
_COUNT_SIZE = 2
_LENGTH_SIZE = 4
_PADDING = bytes(16)
"""The bytes after the last message: a length can be read at the end of each row, and a number at
index 0 even if all values are null."""
_OFFSET_MAX = 2**31 - 1


class BinaryColumn(Sequence[Binary]):
    """The values of one column. It reads as a sequence of bytes and None."""

    def __init__(self, data: bytes, starts: Any, lengths: Any, present: Any) -> None:
        """Take the index of each value in `data`, its length, and False for each null."""
        self._data = data
        self._starts, self._lengths = starts, lengths
        self._present = present

    def __len__(self) -> int:
        return len(self._starts)

    @overload
    def __getitem__(self, index: int) -> Binary: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Binary]: ...
    def __getitem__(self, index: int | slice) -> Binary | Sequence[Binary]:
        if isinstance(index, slice):
            return list(self)[index]
        if not self._present[index]:
            return None
        start = int(self._starts[index])
        return self._data[start : start + int(self._lengths[index])]

    def __iter__(self) -> Iterator[Binary]:
        data = self._data
        ends = (self._starts + self._lengths).tolist()
        for start, end, is_present in zip(
            self._starts.tolist(), ends, self._present.tolist(), strict=True
        ):
            yield data[start:end] if is_present else None

    @property
    def nulls(self) -> Any:
        """True for each null."""
        return ~self._present

    @property
    def lengths(self) -> Any:
        """The size of each value in bytes; of no meaning for nulls."""
        return self._lengths

    @property
    def validity(self) -> pa.Buffer:
        """The bitmap of an Arrow array in which the nulls are null."""
        return pa.py_buffer(np.packbits(self._present, bitorder="little"))

    def to_numbers(self, kind: str) -> Any | None:
        """Return values of the numpy type `kind`, 0 for nulls, or None if one has another size."""
        size = np.dtype(kind).itemsize
        if (self._lengths[self._present] != size).any():
            return None
        return self.read_numbers(0, kind)

    def read_numbers(self, offset: int, kind: str) -> Any:
        """Return the numbers of the numpy type `kind` at `offset` of each value.

        The number is 0 for nulls, and for values that end before it.
        """
        dtype = np.dtype(kind)
        is_inside = self._present & (self._lengths >= offset + dtype.itemsize)
        starts = np.where(is_inside, self._starts + offset, 0)
        values = _view_numbers(self._data, dtype)[starts].astype(dtype.newbyteorder("="))
        values[~is_inside] = np.zeros((), dtype)
        return values

    def to_arrow(self) -> pa.Array:
        """Return the values as an Arrow array of the type binary."""
        count = len(self)
        if len(self._data) > _OFFSET_MAX:
            return pa.array(list(self), pa.binary())
        # An array whose even elements are the values. Its odd ones are the bytes between them.
        offsets = np.empty(2 * count + 1, np.int32)
        offsets[:-1:2] = self._starts
        offsets[1::2] = self._starts + np.where(self._present, self._lengths, 0)
        offsets[-1] = len(self._data)
        buffers = [None, pa.py_buffer(offsets), pa.py_buffer(self._data)]
        parts = pa.Array.from_buffers(pa.binary(), 2 * count, buffers)
        return parts.take(pa.array(np.arange(0, 2 * count, 2), mask=~self._present))


def split_tuples(
    messages: Sequence[bytes], start: int, column_count: int, selected: Sequence[int]
) -> Sequence[BinaryColumn] | None:
    """Return the `selected` columns of the rows of pgoutput that begin at `start` of each message.

    Returns None if a value of these columns is neither binary nor null, or if a row has another
    number of columns or another end. The caller then reads the rows one by one.
    """
    rows = _Rows(messages, start, column_count)
    if not rows.is_inside:
        return None
    columns: dict[int, BinaryColumn] = {}
    for number in range(column_count):
        kinds = rows.read_byte()
        is_binary = kinds == _BINARY
        has_value = is_binary | (kinds == _TEXT)
        if not (has_value | (kinds == _NULL) | (kinds == _UNCHANGED)).all():
            return None
        lengths = np.where(has_value, rows.peek_length(), 0)
        if (lengths < 0).any():
            return None
        column = rows.take(lengths, is_binary, np.where(has_value, _LENGTH_SIZE, 0))
        if not rows.is_inside:
            return None
        if number in selected:
            if not (is_binary | (kinds == _NULL)).all():
                return None
            columns[number] = column
    return [columns[number] for number in selected] if rows.is_at_end else None


def encode_tuple(values: Sequence[Binary]) -> bytes:
    """Return the row as pgoutput sends it."""
    parts = [len(values).to_bytes(_COUNT_SIZE, "big")]
    for value in values:
        if value is None:
            parts.append(b"n")
        else:
            parts += (b"b", len(value).to_bytes(_LENGTH_SIZE, "big"), value)
    return b"".join(parts)


def split_copy_rows(messages: Sequence[bytes], column_count: int) -> Sequence[BinaryColumn] | None:
    """Return the columns of the rows of COPY, or None if a message is not one row of them."""
    rows = _Rows(messages, 0, column_count)
    if not rows.is_inside:
        return None
    columns: list[BinaryColumn] = []
    for _ in range(column_count):
        lengths = rows.peek_length()
        present = lengths >= 0
        columns.append(rows.take(np.where(present, lengths, 0), present, _LENGTH_SIZE))
        if not rows.is_inside:
            return None
    return columns if rows.is_at_end else None


class _Rows:
    """Rows that are read column by column: a position in each row, moved for all rows together."""

    def __init__(self, messages: Sequence[bytes], start: int, column_count: int) -> None:
        self._data = b"".join((*messages, _PADDING))
        self._bytes: Any = np.frombuffer(self._data, np.uint8)
        self._words = _view_numbers(self._data, np.dtype(">i4"))
        sizes = np.fromiter(map(len, messages), np.int64, len(messages))
        self._ends = np.cumsum(sizes)
        self._at = self._ends - sizes + start
        self._is_right_count = bool(
            (self._at + _COUNT_SIZE <= self._ends).all()
            and (self._bytes[self._at] == column_count >> 8).all()
            and (self._bytes[self._at + 1] == column_count & 0xFF).all()
        )
        self._at += _COUNT_SIZE

    @property
    def is_inside(self) -> bool:
        """True if no position is behind the end of its row."""
        return self._is_right_count and bool((self._at <= self._ends).all())

    @property
    def is_at_end(self) -> bool:
        """True if each position is at the end of its row."""
        return self._is_right_count and bool((self._at == self._ends).all())

    def read_byte(self) -> Any:
        """Return the byte at each position, and move behind it."""
        values = self._bytes[self._at]
        self._at += 1
        return values

    def peek_length(self) -> Any:
        """Return the length at each position."""
        return self._words[self._at].astype(np.int64)

    def take(self, lengths: Any, present: Any, skipped: Any) -> BinaryColumn:
        """Return the values that follow `skipped` bytes, and move behind them."""
        self._at += skipped
        column = BinaryColumn(self._data, self._at.copy(), lengths, present)
        self._at += lengths
        return column


def _view_numbers(data: bytes, dtype: Any) -> Any:
    """Return a view of the number that begins at each index of `data`."""
    return np.ndarray(len(data) - dtype.itemsize + 1, dtype, data, 0, (1,))
