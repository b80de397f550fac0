"""A hash table of keys: it numbers the keys of a whole batch, and turns them back into columns.

Each distinct key has one entry, and an entry is a number: 1, 2, 3, … in the order of insertion.
Callers store data of each key in arrays that are indexed by entry. Entry 0 stands for "no entry".
Arrays have an item for it, so they may be indexed with 0 as well.

An arena holds the keys themselves, by entry. Keys are appended and never changed, so a snapshot may
read them while further ones are appended.

The table is an array of buckets for open addressing with linear probing. A bucket holds an entry,
or 0 if it is free. The search for a key starts at the bucket given by the top bits of its hash and
continues bucket by bucket. Two keys with one hash are two entries of one probe sequence.

Invariants:
    items before `count` in any array never change; growing copies them into a larger array
    BytesArena: starts[i + 1] == starts[i] + lengths[i], so the arena is a valid Arrow buffer
    entries have no gaps: 1 to `end` - 1
    2 * `end` <= number of buckets, so every probe sequence reaches a free bucket

Encoded form of a key (checkpoint format). A single column of bytes: the bytes. Otherwise the
columns in order: a fixed one as its words of 8 bytes big-endian, one of bytes as a 4-byte
big-endian length and the bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from onceflow.core.arrow.kinds import cast_rows
from onceflow.core.errors import StateCorrupt, StateError
from onceflow.core.state.keys.key_columns import (
    PADDING_BYTES,
    BytesKeys,
    FixedKeys,
    Ints,
    KeyColumn,
    Mask,
    Words,
)
from onceflow.core.state.keys.key_groups import Hashes

ENTRIES_MAX = (1 << 31) - 2
"""The maximum number of entries. Buckets are 32-bit integers, so that the table fits into caches.
"""


def enlarge(array: npt.NDArray[Any], used: int, needed: int) -> npt.NDArray[Any]:
    """Return `array`, or a larger copy of its first `used` items, with room for `needed` items.

    A copy has at least twice the room, so that appending costs constant time on average.
    """
    if needed <= len(array):
        return array
    larger = np.zeros((max(needed, 2 * len(array)), *array.shape[1:]), array.dtype)
    larger[:used] = array[:used]
    return larger


class FixedArena:
    """The keys of a column of one or two words, by entry."""

    def __init__(self, width: int, hash_factor: int = 1) -> None:
        self._planes = [np.zeros(1024, np.uint64) for _ in range(width)]
        self._hash_factor = hash_factor
        self.count = 1

    def append(self, keys: FixedKeys) -> None:
        """Append `keys` as the next entries."""
        end = self.count + len(keys)
        for index, plane in enumerate(self._planes):
            larger = enlarge(plane, self.count, end)
            larger[self.count : end] = keys.words[index]
            self._planes[index] = larger
        self.count = end

    def equal(self, entries: Ints, keys: FixedKeys) -> Mask:
        """Return for each row True if its key equals the key of its entry."""
        return FixedKeys(tuple(plane[entries] for plane in self._planes)).equal(keys)

    def view(self) -> FixedKeys:
        """Return the keys of all entries, including entry 0.

        Later appends do not change the result.
        """
        return FixedKeys(tuple(plane[: self.count] for plane in self._planes), self._hash_factor)


class BytesArena:
    """The keys of a column of bytes, by entry."""

    def __init__(self) -> None:
        self._data = np.zeros(1 << 14, np.uint8)
        self._starts = np.zeros(1024, np.int64)
        self._lengths = np.zeros(1024, np.int64)
        self._used = 0
        self.count = 1

    def append(self, keys: BytesKeys) -> None:
        """Append `keys` as the next entries."""
        lengths = keys.lengths
        ends = self._used + np.cumsum(lengths)
        used = int(ends[-1]) if len(ends) else self._used
        end = self.count + len(keys)
        self._data = enlarge(self._data, self._used, used + PADDING_BYTES)
        self._starts = enlarge(self._starts, self.count, end + 1)
        self._lengths = enlarge(self._lengths, self.count, end)
        starts = ends - lengths
        # Copies all keys in one gather. Byte t of the arena is byte t + (source - target) of
        # `keys.data`, and that difference is the same for all bytes of a key.
        sources = np.repeat(keys.starts - starts, lengths) + np.arange(self._used, used)
        self._data[self._used : used] = keys.data[sources]
        self._starts[self.count : end] = starts
        self._lengths[self.count : end] = lengths
        # The end of the last key follows the starts, like in Arrow.
        self._starts[end] = used
        self._used, self.count = used, end

    def equal(self, entries: Ints, keys: BytesKeys) -> Mask:
        """Return for each row True if its key equals the key of its entry."""
        stored = BytesKeys(self._data, self._starts[entries], self._lengths[entries])
        return stored.equal(keys)

    def take(self, entries: Ints) -> pa.Array:
        """Return the keys of these entries, as a large_binary array."""
        offsets = pa.py_buffer(self._starts[: self.count + 1])
        buffers = [None, offsets, pa.py_buffer(self._data)]
        # Arrow copies a whole key at a time; numpy would copy it byte by byte.
        return pa.Array.from_buffers(pa.large_binary(), self.count, buffers).take(pa.array(entries))

    def view(self) -> BytesKeys:
        """Return the keys of all entries, including entry 0.

        Later appends do not change the result.
        """
        return BytesKeys(
            self._data[: self._used + PADDING_BYTES],
            self._starts[: self.count],
            self._lengths[: self.count],
        )


KeyArena: TypeAlias = FixedArena | BytesArena


def arena_for(column: KeyColumn) -> KeyArena:
    """Return an empty arena for keys of the kind of `column`."""
    if isinstance(column, BytesKeys):
        return BytesArena()
    return FixedArena(len(column.words), column.hash_factor)


def encode_keys(columns: Sequence[KeyColumn]) -> pa.Array:
    """Return the encoded form of each row's key, as a large_binary array."""
    if len(columns) == 1 and isinstance(columns[0], BytesKeys):
        return to_binary(columns[0])
    parts: list[pa.Array] = []
    for column in columns:
        if isinstance(column, BytesKeys):
            parts += [to_fixed_binary(column.lengths.astype(">u4")), to_binary(column)]
        else:
            parts += [to_fixed_binary(plane.astype(">u8")) for plane in column.words]
    if len(parts) == 1:
        return parts[0]
    joined: pa.Array = pc.binary_join_element_wise(*parts, pa.scalar(b"", pa.large_binary()))
    return joined


def decode_keys(encoded: pa.Array, shape: Sequence[KeyColumn]) -> tuple[KeyColumn, ...]:
    """Return the key columns that `encode_keys` encoded; `shape` has columns of the same kinds.

    Raises:
        StateCorrupt: The bytes are no keys of these columns.
    """
    whole = _to_bytes_keys(encoded)
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
            columns.append(FixedKeys(tuple(planes), column.hash_factor))
        else:
            lengths = _load(whole.data, ">u4", position, ends).astype(np.int64)
            columns.append(BytesKeys(whole.data, position + 4, lengths))
            position = position + 4 + lengths
    if not np.array_equal(position, ends):
        raise StateCorrupt(
            "keys of a snapshot do not have the columns that the snapshot names; restore an older"
            " checkpoint"
        )
    return tuple(columns)


def _load(data: npt.NDArray[np.uint8], dtype: str, positions: Ints, ends: Ints) -> npt.NDArray[Any]:
    """Return the number of type `dtype` at each position.

    Raise StateCorrupt if it exceeds `ends`.
    """
    size = np.dtype(dtype).itemsize
    if bool((positions + size > ends).any()):
        raise StateCorrupt(
            "a key of a snapshot is shorter than its columns; restore an older checkpoint"
        )
    # A view with a number at each byte, aligned or not: one gather loads all numbers.
    loads: npt.NDArray[Any] = np.ndarray((len(data) - size + 1,), dtype, data, strides=(1,))
    return loads[positions]


def to_fixed_binary(values: npt.NDArray[Any]) -> pa.Array:
    """Return the bytes of each item as a large_binary array."""
    fixed = pa.binary(values.dtype.itemsize)
    array = pa.Array.from_buffers(fixed, len(values), [None, pa.py_buffer(values.tobytes())])
    return array.cast(pa.large_binary())


def to_binary(column: BytesKeys) -> pa.Array:
    """Return the bytes of each row as a large_binary array."""
    rows = len(column)
    offsets: Ints = np.zeros(rows + 1, np.int64)
    np.cumsum(column.lengths, out=offsets[1:])
    if rows and np.array_equal(column.starts, offsets[:-1] + column.starts[0]):
        # The rows are contiguous, as Arrow needs them: nothing is copied.
        first = int(column.starts[0])
        data = column.data[first : first + int(offsets[-1])]
    else:
        # One gather, as in `BytesArena.append`.
        chosen: Ints = np.repeat(column.starts - offsets[:-1], column.lengths)
        data = column.data[chosen + np.arange(offsets[-1])]
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(data)]
    return pa.Array.from_buffers(pa.large_binary(), rows, buffers)


def _to_bytes_keys(array: pa.Array) -> BytesKeys:
    from onceflow.core.state.keys.key_columns import read_key_columns

    (column,) = read_key_columns([array.cast(pa.large_binary())], ["key"])
    if not isinstance(column, BytesKeys):
        raise StateCorrupt(
            f"keys of a snapshot are {array.type}, but must be bytes; restore an older checkpoint"
        )
    return column


def _sort_by_hash(rows: Ints, hashes: Hashes) -> tuple[Ints, Mask]:
    """Return `rows` sorted by hash, and for each row whether it is the first one of its hash.

    Hashes that differ only in their lowest bits may be treated as equal.
    """
    # The hash in the high bits and the index into `rows` in the low bits of one integer: sorting
    # integers is faster than an argsort. The index replaces the lowest bits of the hash.
    bits = np.uint64(max(len(rows) - 1, 1).bit_length())
    packed = ((hashes[rows] >> bits) << bits) | np.arange(len(rows), dtype=np.uint64)
    packed.sort()
    order = rows[(packed & ((np.uint64(1) << bits) - np.uint64(1))).view(np.int64)]
    packed >>= bits
    first = np.ones(len(rows), np.bool_)
    first[1:] = packed[1:] != packed[:-1]
    return order, first


def number_keys(hashes: Hashes, equal: Callable[[Ints, Ints], Mask]) -> tuple[Ints, Ints]:
    """Return the number of each row's key, from 0, and the first row of each number.

    `hashes` has each row's hash. `equal` gets pairs of rows, as two arrays of row indices
    with the lower index in the first array, and returns whether their keys are equal. The order of
    the keys is not defined. A `KeyIndex` does the same and also stores the keys, which takes
    longer.
    """
    numbers: Ints = np.empty(len(hashes), np.int64)
    leaders: list[Ints] = [np.zeros(0, np.int64)]
    count, missing = 0, np.arange(len(hashes))
    while len(missing):
        # One key of each hash in each round, as in `KeyIndex.resolve`.
        order, is_first = _sort_by_hash(missing, hashes)
        chosen = order[is_first]
        of_order = np.cumsum(is_first) - 1
        numbers[order] = count + of_order
        leaders.append(chosen)
        count += len(chosen)
        others = order[~is_first]
        same = equal(chosen[of_order[~is_first]], others)
        # Sorted, so that the first row of a number is the lowest one in the next round, too.
        missing = np.sort(others[~same])
    return numbers, np.concatenate(leaders)


class KeyIndex:
    """Numbers distinct keys: each key has its own entry."""

    def __init__(self, shape: Sequence[KeyColumn], bits: int = 12) -> None:
        """Create an empty index. `shape` has columns of the keys' types.

        There are 2**bits buckets.
        """
        self._shape = tuple(shape)
        self._arenas: tuple[KeyArena, ...] = tuple(arena_for(column) for column in shape)
        self._hashes: Hashes = np.zeros(1 << (bits - 1), np.uint64)
        self._bits = bits
        self._table: npt.NDArray[np.int32] = np.zeros(1 << bits, np.int32)
        self.end = 1
        """The entry of the next new key."""

    def __len__(self) -> int:
        return self.end - 1

    def resolve(self, columns: Sequence[KeyColumn], hashes: Hashes) -> tuple[Ints, Ints]:
        """Return each row's entry, and one row for each entry that this call added, in entry order.

        Raises:
            StateError: There would be more than 2**31 - 2 entries.
        """
        entries = self.find(columns, hashes)
        missing = np.flatnonzero(entries == 0)
        leaders: list[Ints] = []
        while len(missing):
            # Inserts one row for each distinct hash among the missing rows. Other rows of that hash
            # nearly always have the same key, and get its entry. Rows with another key are still
            # missing, and are inserted in the next round.
            order, is_first = _sort_by_hash(missing, hashes)
            chosen = order[is_first]
            made = self._insert(tuple(column.take(chosen) for column in columns), hashes[chosen])
            entries[chosen] = made
            leaders.append(chosen)
            others = order[~is_first]
            # The number of firsts up to a row is the number of its hash's group, and so gives the
            # entry of the group's first row.
            guess = made[np.cumsum(is_first)[~is_first] - 1]
            guess[~self._equal(guess, tuple(column.take(others) for column in columns))] = 0
            entries[others] = guess
            missing = others[guess == 0]
        none = np.zeros(0, np.int64)
        return entries, np.concatenate(leaders) if leaders else none

    def view_keys(self) -> tuple[KeyColumn, ...]:
        """Return the keys of all entries, including entry 0.

        Later inserts do not change the result.
        """
        return tuple(arena.view() for arena in self._arenas)

    def take_keys(self, column: int, entries: Ints) -> FixedKeys | pa.Array:
        """Return one column of the keys of these entries.

        A column of bytes is a large_binary array.
        """
        arena = self._arenas[column]
        return arena.view().take(entries) if isinstance(arena, FixedArena) else arena.take(entries)

    def view_hashes(self) -> Hashes:
        """Return the hashes of all entries, including entry 0.

        Later inserts do not change the result.
        """
        return self._hashes[: self.end]

    def copy_some(self, entries: Ints) -> KeyIndex:
        """Return a new index with only these entries' keys, numbered from 1 in the given order."""
        # The new table has the size of this one, because as many keys may be inserted again.
        # A table that grows inserts all keys anew.
        index = KeyIndex(self._shape, max(12, int(2 * self.end).bit_length()))
        if len(entries):
            index._insert(
                tuple(column.take(entries) for column in self.view_keys()), self._hashes[entries]
            )
        return index

    def find(self, columns: Sequence[KeyColumn], hashes: Hashes) -> Ints:
        """Return each row's entry, or 0 if the index does not have its key."""
        if not len(hashes):
            return np.zeros(0, np.int64)
        # All rows look into the first bucket of their key at once. Rows that find another hash
        # there continue with the next bucket, until each row has found its hash or a free bucket.
        buckets = self._first_buckets(hashes)
        entries: Ints = self._table[buckets].astype(np.int64)
        active = np.flatnonzero(self._have_other_hashes(entries, hashes))
        while True:
            while len(active):
                buckets[active] = (buckets[active] + 1) & (len(self._table) - 1)
                candidates = self._table[buckets[active]].astype(np.int64)
                entries[active] = candidates
                active = active[self._have_other_hashes(candidates, hashes[active])]
            # Keys are compared only once, because different keys nearly always have different
            # hashes. Rows that found the hash of another key continue behind it.
            active = self._list_rows_of_other_keys(entries, columns)
            if not len(active):
                return entries

    def _have_other_hashes(self, entries: Ints, hashes: Hashes) -> Mask:
        """Return for each row True if its entry has another hash. No entry (0) counts as False."""
        others: Mask = self._hashes[entries] != hashes
        others &= entries != 0
        return others

    def _list_rows_of_other_keys(self, entries: Ints, columns: Sequence[KeyColumn]) -> Ints:
        """Return the rows whose entry has another key. Rows without an entry (0) are left out."""
        if entries.all():
            return np.flatnonzero(~self._equal(entries, columns))
        rows = np.flatnonzero(entries)
        equal = self._equal(entries[rows], tuple(column.take(rows) for column in columns))
        return rows[~equal]

    def _equal(self, entries: Ints, columns: Sequence[KeyColumn]) -> Mask:
        same: Mask | None = None
        for arena, column in zip(self._arenas, columns, strict=True):
            equal = arena.equal(entries, column)  # type: ignore[arg-type]
            same = equal if same is None else same & equal
        assert same is not None
        return same

    def _insert(self, columns: Sequence[KeyColumn], hashes: Hashes) -> Ints:
        """Return a new entry for each row. The keys must be distinct and new."""
        end = self.end + len(hashes)
        if end > ENTRIES_MAX:
            raise StateError(f"one subtask cannot hold {end} keys: raise the parallelism")
        for arena, column in zip(self._arenas, columns, strict=True):
            arena.append(column)  # type: ignore[arg-type]
        self._hashes = enlarge(self._hashes, self.end, end)
        self._hashes[self.end : end] = hashes
        entries = np.arange(self.end, end)
        self.end = end
        if 2 * end > len(self._table):
            while 2 * end > 1 << self._bits:
                self._bits += 1
            self._table = np.zeros(1 << self._bits, np.int32)
            # A bucket is given by the top bits, of which there is one more now: all entries move.
            self._fill_buckets(np.arange(1, end), self._hashes[1:end])
        else:
            self._fill_buckets(entries, hashes)
        return entries

    def _fill_buckets(self, entries: Ints, hashes: Hashes) -> None:
        buckets = self._first_buckets(hashes)
        while len(entries):
            # Several entries may write into one free bucket, and numpy keeps the last one. Reading
            # it back shows which entries lost, or found it taken: these continue with the next
            # bucket.
            free = self._table[buckets] == 0
            self._table[buckets[free]] = entries[free]
            lost = self._table[buckets] != entries
            entries, buckets = entries[lost], (buckets[lost] + 1) & (len(self._table) - 1)

    def _first_buckets(self, hashes: Hashes) -> Ints:
        # The top bits, because the lowest bits give the key group, and a subtask has few key
        # groups.
        return (hashes >> np.uint64(64 - self._bits)).view(np.int64)


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
