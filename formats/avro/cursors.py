"""The reading of Avro's binary encoding from many records at once, one field after the other.

Every record has a cursor. A few operations on whole arrays read a field at all cursors, so the cost
of a record does not grow with the number of Python calls. Data that cannot be read is a fault of
its own record. It is found before other records are affected: the record's cursor moves to its end,
values read from it are ignored, and the other records continue.

Rows are always given in ascending order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from onceflow.core.arrow.exact_decimals import decimals_from_python

Rows: TypeAlias = NDArray[np.int64]
"""The indices of records."""

_PAD_BYTES = 16
"""The number of bytes added after the last record, because a number is read before the check for
its end.
"""
_EMPTY_ITEMS_MAX = 65_536
"""The maximum number of items of zero bytes, such as nulls, in one array.

The record's length does not limit them.
"""
_VARINT_BITS = 64
_SHORT = "it ends in the middle of"


class Cursors:
    """The reading positions in some records."""

    def __init__(self, values: Sequence[bytes], *, skip_bytes: int) -> None:
        """Set each cursor `skip_bytes` after the beginning of its value."""
        joined = b"".join([*values, bytes(_PAD_BYTES)])
        self._buffer = pa.py_buffer(joined)
        self._bytes = np.frombuffer(joined, np.uint8)
        lengths = np.fromiter(map(len, values), np.int64, len(values))
        self._ends = np.cumsum(lengths)
        self._at = np.minimum(self._ends - lengths + skip_bytes, self._ends)
        self.faults: dict[int, str] = {}
        """The reasons why records cannot be read, by row."""
        self.field = ""
        """The field that is being read, for faults."""

    def refuse(self, rows: Rows, why: str) -> None:
        """Mark `rows` as faulty because of `why`. A row that is faulty already keeps its reason."""
        for row in rows.tolist():
            self.faults.setdefault(row, f"{why} {self.field}".strip())
        self._at[rows] = self._ends[rows]

    def require_ends(self, rows: Rows) -> None:
        """Mark the rows as faulty that have more bytes after the last field."""
        self.field = ""
        over = rows[self._at[rows] < self._ends[rows]]
        if over.size:
            self.refuse(over, "it has bytes after its last field")

    def longs(self, rows: Rows) -> NDArray[np.int64]:
        """Read an int or a long of each row."""
        # Round n reads byte n of all numbers that have as many bytes. Each byte holds seven bits,
        # the lowest first. The eighth bit says that another byte follows.
        at = self._at[rows]
        byte = self._bytes[at]
        numbers = (byte & 0x7F).astype(np.uint64)
        at += 1
        going = np.flatnonzero(byte > 0x7F)
        shift = 7
        while going.size:
            if shift >= _VARINT_BITS:
                self.refuse(rows[going], "a number takes more than ten bytes in")
                at[going] = self._ends[rows[going]]
                break
            more = self._bytes[at[going]]
            numbers[going] |= (more & 0x7F).astype(np.uint64) << np.uint64(shift)
            at[going] += 1
            going = going[more > 0x7F]
            shift += 7
        self._move(rows, at)
        # Zigzag: 0, -1, 1, -2, … are written as 0, 1, 2, 3, …
        halved: NDArray[np.int64] = (numbers >> np.uint64(1)).view(np.int64)
        zigzag: NDArray[np.int64] = halved ^ -(numbers & np.uint64(1)).view(np.int64)
        return zigzag

    def ints(self, rows: Rows) -> NDArray[np.int32]:
        """Read an int of each row."""
        numbers = self.longs(rows)
        short = numbers.astype(np.int32)
        wrong = short != numbers
        if wrong.any():
            self.refuse(rows[wrong], "a number of more than 32 bits in")
        return short

    def booleans(self, rows: Rows) -> NDArray[np.bool_]:
        """Read a boolean of each row."""
        values = self.raw_bytes(rows, 1)[:, 0]
        wrong = values > 1
        if wrong.any():
            self.refuse(rows[wrong], "a boolean that is neither 0 nor 1 in")
        true: NDArray[np.bool_] = values == 1
        return true

    def raw_bytes(self, rows: Rows, size: int) -> NDArray[np.uint8]:
        """Read `size` bytes of each row. Return one line for each row."""
        at = self._at[rows]
        positions = at[:, None] + np.arange(size, dtype=np.int64)
        # For rows that end too early this reads arbitrary bytes: `_move` gives these rows up.
        np.minimum(positions, len(self._bytes) - 1, out=positions)
        self._move(rows, at + size)
        values: NDArray[np.uint8] = self._bytes[positions]
        return values

    def spans(self, rows: Rows) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Read a length of each row and skip so many bytes. Return their starts and lengths."""
        lengths = self.longs(rows)
        at = self._at[rows]
        wrong = (lengths < 0) | (lengths > self._ends[rows] - at)
        if wrong.any():
            self.refuse(rows[wrong], _SHORT)
            lengths[wrong] = 0
            at = self._at[rows]
        self._at[rows] = at + lengths
        return at, lengths

    def binary(self, rows: Rows) -> pa.Array:
        """Read bytes of each row as one array."""
        starts, lengths = self.spans(rows)
        if not rows.size:
            return pa.array([], pa.binary())
        # This finds the values without copying bytes: an array over the whole buffer has the values
        # at even indices and the gaps between them at odd indices. Arrow takes the even indices.
        offsets = np.empty(2 * rows.size, np.int32)
        offsets[0::2] = starts
        offsets[1::2] = starts + lengths
        count = offsets.size - 1
        both = pa.Array.from_buffers(
            pa.binary(), count, [None, pa.py_buffer(offsets), self._buffer], 0
        )
        return both.take(pa.array(np.arange(0, count, 2, dtype=np.int64)))

    def strings(self, rows: Rows) -> pa.Array:
        """Read text of each row."""
        encoded = self.binary(rows)
        try:
            return encoded.cast(pa.string())
        except pa.ArrowInvalid:
            pass
        # Arrow does not say which value is bad, so decode each value.
        texts: list[str] = []
        for row, value in zip(rows, encoded.to_pylist(), strict=True):
            try:
                texts.append(value.decode())
            except UnicodeDecodeError as error:
                self.refuse(np.array([row]), f"no UTF-8 text ({error.reason}) in")
                texts.append("")
        return pa.array(texts, pa.string())

    def decimals(self, rows: Rows, size: int | None, kind: pa.DataType) -> pa.Array:
        """Read decimals of `size` bytes, or of the length that precedes them."""
        if size is None:
            starts, lengths = self.spans(rows)
        else:
            starts, lengths = self._at[rows], np.full(rows.size, size, np.int64)
            self._move(rows, starts + size)
        width = kind.bit_width // 8
        over = lengths > width
        if over.any():
            self.refuse(rows[over], f"a decimal of more than {width} bytes in")
        # Avro writes two's complement, big-endian, with as few bytes as possible. Arrow needs
        # little-endian with `width` bytes. So each row is read backwards, and missing bytes are
        # filled with the sign.
        back = np.arange(width, dtype=np.int64)
        positions = starts[:, None] + (lengths[:, None] - 1 - back)
        inside = back < lengths[:, None]
        np.clip(positions, 0, len(self._bytes) - 1, out=positions)
        signs = self._bytes[np.minimum(starts, len(self._bytes) - 1)] > 0x7F
        filling = np.where(signs & (lengths > 0), 0xFF, 0).astype(np.uint8)
        little_endian = np.where(inside, self._bytes[positions], filling[:, None])
        array = pa.Array.from_buffers(
            kind, rows.size, [None, pa.py_buffer(np.ascontiguousarray(little_endian))], 0
        )
        return self._within_precision(rows, array)

    def blocks(
        self, rows: Rows, read: Callable[[Rows], pa.Array]
    ) -> tuple[NDArray[np.int32], list[pa.Array], NDArray[np.int64]]:
        """Read an array or a map. `read` reads one item of each of some rows.

        An item must have at least one byte.

        Returns:
            Offsets of each row's items, parts of the items, and the order in which to take them.
        """
        parts: list[pa.Array] = []
        owners: list[Rows] = [np.zeros(0, np.int64)]
        going = np.arange(rows.size, dtype=np.int64)
        while going.size:
            counts = self._block_counts(rows[going])
            # There cannot be more items than remaining bytes. Otherwise a damaged count would make
            # the loop run for ever.
            left = self._ends[rows[going]] - self._at[rows[going]]
            self._bound_counts(rows[going], counts, left, _SHORT)
            going, counts = going[counts > 0], counts[counts > 0]
            # Read item n of all rows that have as many items at once. So a row's items are spread
            # over several parts, and the stable sort by owner joins them in order.
            for item in range(int(counts.max(initial=0))):
                having = going[counts > item]
                parts.append(read(rows[having]))
                owners.append(having)
        owner = np.concatenate(owners)
        offsets = _to_offsets(np.bincount(owner, minlength=rows.size))
        return offsets, parts, np.argsort(owner, kind="stable")

    def empty_items(self, rows: Rows) -> NDArray[np.int32]:
        """Read an array with items of zero bytes. Return the offsets of each row's items."""
        totals = np.zeros(rows.size, np.int64)
        going = np.arange(rows.size, dtype=np.int64)
        while going.size:
            counts = self._block_counts(rows[going])
            left = _EMPTY_ITEMS_MAX - totals[going]
            why = f"more than {_EMPTY_ITEMS_MAX} items of no bytes in"
            self._bound_counts(rows[going], counts, left, why)
            going, counts = going[counts > 0], counts[counts > 0]
            totals[going] += counts
        return _to_offsets(totals)

    def _block_counts(self, rows: Rows) -> NDArray[np.int64]:
        counts = self.longs(rows)
        sized = counts < 0
        if sized.any():
            # The block's length in bytes follows, for readers that skip the block.
            self.longs(rows[sized])
            counts[sized] = -counts[sized]
        return counts

    def _bound_counts(
        self, rows: Rows, counts: NDArray[np.int64], counts_max: NDArray[np.int64], why: str
    ) -> None:
        """Mark rows with a negative or too large count as faulty, and set their count to 0."""
        wrong = (counts < 0) | (counts > counts_max)
        if wrong.any():
            self.refuse(rows[wrong], why)
            counts[wrong] = 0

    def _move(self, rows: Rows, at: NDArray[np.int64]) -> None:
        self._at[rows] = at
        over = at > self._ends[rows]
        if over.any():
            self.refuse(rows[over], _SHORT)

    def _within_precision(self, rows: Rows, decimals: pa.Array) -> pa.Array:
        try:
            decimals.validate(full=True)
        except pa.ArrowInvalid:
            kept: list[Any] = []
            for at, row in enumerate(rows):
                single = decimals.slice(at, 1)
                try:
                    single.validate(full=True)
                except pa.ArrowInvalid:
                    self.refuse(np.array([row]), f"more digits than {decimals.type} has in")
                    kept.append(0)
                else:
                    kept.append(single[0].as_py())
            return decimals_from_python(kept, decimals.type)
        return decimals


def _to_offsets(counts: NDArray[np.int64]) -> NDArray[np.int32]:
    """Return the start of each row's items, and the end of the last row's."""
    offsets = np.zeros(counts.size + 1, np.int32)
    offsets[1:] = np.cumsum(counts)
    return offsets
