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

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias, overload

import numpy as np
import pyarrow as pa

Binary: TypeAlias = bytes | None
"""A value in binary format; None is SQL's null."""

_NULL, _BINARY, _TEXT, _UNCHANGED = b"nbtu"
_COUNT_SIZE = 2
_LENGTH_SIZE = 4
_PADDING = bytes(16)
"""The bytes before the first row. The number of a null is read there, which takes 16 at most."""
_OFFSET_MAX = 2**31 - 1


class RowBuffer:
    """Rows in one buffer, one after another. To append to it costs less than an object a row."""

    __slots__ = ("data", "sizes")

    def __init__(self) -> None:
        self.data = bytearray(_PADDING)
        """The bytes of the rows, after 16 bytes that belong to no row."""
        self.sizes: list[int] = []
        """The number of bytes of each row."""

    @classmethod
    def of(cls, rows: Iterable[bytes]) -> RowBuffer:
        """Return a buffer with copies of `rows`."""
        buffer = cls()
        for row in rows:
            buffer.data += row
            buffer.sizes.append(len(row))
        return buffer

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.sizes)

    def join(self, rows: RowBuffer) -> RowBuffer:
        """Return a buffer with these rows, then `rows`. Neither may be used afterwards."""
        if not self.sizes:
            return rows
        self.data += memoryview(rows.data)[len(_PADDING) :]
        self.sizes += rows.sizes
        return self

    def cut_head(self, head: bytes, size: int) -> bool:
        """Remove `size` bytes from the first row, and the row if nothing is left of it.

        Returns:
            False if the row does not begin with `head`. Nothing is removed then.
        """
        start = len(_PADDING)
        if not self.sizes or self.sizes[0] < size or not self.data.startswith(head, start):
            return False
        del self.data[start : start + size]
        self.sizes[0] -= size
        if not self.sizes[0]:
            del self.sizes[0]
        return True

    def cut_last(self, row: bytes) -> bool:
        """Remove the last row if it equals `row`. Return False if it does not."""
        if not self.sizes or self.sizes[-1] != len(row) or not self.data.endswith(row):
            return False
        del self.data[-len(row) :], self.sizes[-1]
        return True


class BinaryColumn(Sequence[Binary]):
    """The values of one column. It reads as a sequence of bytes and None."""

    def __init__(
        self, data: bytes | bytearray, starts: Any, lengths: Any, present: Any | None
    ) -> None:
        """Create a column of values in `data`, which begins with 16 bytes that belong to no value.

        `starts` has the index of each value in `data`, `lengths` its size, and `present` False for
        each null. `present` is None if no value is null.
        """
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
        if self._present is not None and not self._present[index]:
            return None
        start = int(self._starts[index])
        return bytes(self._data[start : start + int(self._lengths[index])])

    def __iter__(self) -> Iterator[Binary]:
        data = bytes(self._data)
        ends = (self._starts + self._lengths).tolist()
        present = [True] * len(self) if self._present is None else self._present.tolist()
        for start, end, is_present in zip(self._starts.tolist(), ends, present, strict=True):
            yield data[start:end] if is_present else None

    @property
    def nulls(self) -> Any | None:
        """True for each null, or None if no value is null."""
        return None if self._present is None else ~self._present

    @property
    def lengths(self) -> Any:
        """The size of each value in bytes; of no meaning for nulls."""
        return self._lengths

    @property
    def validity(self) -> pa.Buffer | None:
        """The validity bitmap for an Arrow array of these values, or None if no value is null."""
        if self._present is None:
            return None
        return pa.py_buffer(np.packbits(self._present, bitorder="little"))

    def to_numbers(self, kind: str) -> Any | None:
        """Return values of the numpy type `kind`, 0 for nulls, or None if one has another size."""
        dtype = np.dtype(kind)
        fit = self._lengths == dtype.itemsize
        if not (fit.all() if self._present is None else fit[self._present].all()):
            return None
        if self._present is not None:
            return self.read_numbers(0, kind)
        return _read_at(self._data, self._starts, dtype)

    def read_numbers(self, offset: int, kind: str) -> Any:
        """Return the numbers of the numpy type `kind` at `offset` of each value.

        The number is 0 for nulls, and for values that end before it.
        """
        dtype = np.dtype(kind)
        is_inside = self._lengths >= offset + dtype.itemsize
        if self._present is not None:
            is_inside &= self._present
        if is_inside.all():
            return _read_at(self._data, self._starts + offset, dtype)
        values = _read_at(self._data, np.where(is_inside, self._starts + offset, 0), dtype)
        values[~is_inside] = np.zeros((), dtype)
        return values

    def read_ends(self, kind: str) -> Any:
        """Return the numbers of the numpy type `kind` with which the values end.

        All values but nulls have the bytes. The number of a null has no meaning.
        """
        dtype = np.dtype(kind)
        starts = self._starts + self._lengths
        starts -= dtype.itemsize
        return _read_at(self._data, starts, dtype)

    def to_arrow(self, skipped: int = 0) -> pa.Array:
        """Return the values as an Arrow array of the type binary, each without `skipped` bytes.

        No value has fewer bytes.
        """
        count = len(self)
        if len(self._data) > _OFFSET_MAX:
            values = [None if value is None else value[skipped:] for value in self]
            return pa.array(values, pa.binary())
        # An array whose even elements are the values. Its odd ones are the bytes between them.
        offsets = np.empty(2 * count + 1, np.int32)
        offsets[:-1:2] = self._starts
        offsets[1::2] = self._starts
        offsets[1::2] += self._lengths
        if skipped:
            offsets[:-1:2] += np.minimum(self._lengths, skipped)
        offsets[-1] = len(self._data)
        buffers = [None, pa.py_buffer(offsets), pa.py_buffer(self._data)]
        parts = pa.Array.from_buffers(pa.binary(), 2 * count, buffers)
        return parts.take(pa.array(np.arange(0, 2 * count, 2), mask=self.nulls))


def split_tuples(
    messages: Sequence[bytes], start: int, column_count: int, selected: Sequence[int]
) -> Sequence[BinaryColumn] | None:
    """Return the `selected` columns of the rows of pgoutput that begin at `start` of each message.

    Returns None if a value of these columns is neither binary nor null, or if a row has another
    number of columns or another end. The caller then reads the rows one by one.
    """
    sizes = np.fromiter(map(len, messages), np.int64, len(messages))
    # A length is read after each kind, also if the kind is the last byte of the last row.
    rows = _Rows(b"".join((_PADDING, *messages, _PADDING)), sizes, start, column_count)
    try:
        return _split_tuples(rows, column_count, selected)
    except IndexError:
        return None


def _split_tuples(
    rows: _Rows, column_count: int, selected: Sequence[int]
) -> Sequence[BinaryColumn] | None:
    if not rows.have_count:
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
        present = None if is_binary.all() else is_binary
        column = rows.take(lengths, present, np.where(has_value, _LENGTH_SIZE, 0))
        if number in selected:
            if present is not None and not (is_binary | (kinds == _NULL)).all():
                return None
            columns[number] = column
    return [columns[number] for number in selected] if rows.are_at_end else None


def encode_tuple(values: Sequence[Binary]) -> bytes:
    """Return the row as pgoutput sends it."""
    parts = [len(values).to_bytes(_COUNT_SIZE, "big")]
    for value in values:
        if value is None:
            parts.append(b"n")
        else:
            parts += (b"b", len(value).to_bytes(_LENGTH_SIZE, "big"), value)
    return b"".join(parts)


def split_copy_rows(rows: RowBuffer, column_count: int) -> Sequence[BinaryColumn] | None:
    """Return the columns of the rows of COPY, or None if a row has another form."""
    split = _Rows(rows.data, np.array(rows.sizes, np.int64), 0, column_count)
    if not split.have_count:
        return None
    columns: list[BinaryColumn] = []
    try:
        for _ in range(column_count):
            lengths = split.peek_length()
            present = None
            if lengths.min(initial=0) < 0:
                present = lengths >= 0
                lengths = np.maximum(lengths, 0)
            columns.append(split.take(lengths, present, _LENGTH_SIZE))
    except IndexError:
        return None
    return columns if split.are_at_end else None


class _Rows:
    """A reader of rows, column by column. Keeps a position in each row, and moves all together.

    Positions never decrease. So if each position is at the end of its row after the last column,
    no value was read past the end of its row. Reading past the end of the data raises IndexError.
    """

    def __init__(self, data: bytes | bytearray, sizes: Any, start: int, column_count: int) -> None:
        """Start after the column counts of the rows in `data`.

        The first 16 bytes of `data` belong to no row.
        """
        self._data = data
        self._bytes: Any = np.frombuffer(data, np.uint8)
        self._words = _view_numbers(data, np.dtype(">i4"))
        self._ends = np.cumsum(sizes) + len(_PADDING)
        self._at = self._ends - sizes + start
        self.have_count = bool(
            (self._at + _COUNT_SIZE <= self._ends).all()
            and (self._bytes[self._at] == column_count >> 8).all()
            and (self._bytes[self._at + 1] == column_count & 0xFF).all()
        )
        """True if each row has the number of columns."""
        self._at += _COUNT_SIZE

    @property
    def are_at_end(self) -> bool:
        """True if each position is at the end of its row."""
        return bool((self._at == self._ends).all())

    def read_byte(self) -> Any:
        """Return the byte at each position, and move past it."""
        values = self._bytes[self._at]
        self._at += 1
        return values

    def peek_length(self) -> Any:
        """Return the length at each position."""
        return self._words[self._at].astype(np.int64)

    def take(self, lengths: Any, present: Any | None, skipped: Any) -> BinaryColumn:
        """Skip `skipped` bytes, return the values of `lengths` bytes, and move past them."""
        self._at += skipped
        column = BinaryColumn(self._data, self._at.copy(), lengths, present)
        self._at += lengths
        return column


def _view_numbers(data: bytes | bytearray, dtype: Any) -> Any:
    """Return a view of the number that begins at each index of `data`."""
    return np.ndarray(len(data) - dtype.itemsize + 1, dtype, data, 0, (1,))


def _read_at(data: bytes | bytearray, starts: Any, dtype: Any) -> Any:
    """Return the numbers at `starts` in the byte order of this machine."""
    return _view_numbers(data, dtype)[starts].astype(dtype.newbyteorder("="), copy=False)
