"""From keys to slots, a batch at a time, and the keys themselves, one a slot.

Keys are appended and never changed, so a snapshot may go on reading them. Slot 0 is nobody's: an
index can use 0 for "no slot" and still look there.

Invariants:
    what lies before `count` in any array never changes; growing makes a larger array and copies
    BytesArena: starts[i + 1] == starts[i] + lengths[i], so the arena is an Arrow buffer as it is

Encoded form of a key (checkpoint format): one column of bytes alone: the bytes. Otherwise the
columns in order, a fixed one as its words of 8 bytes big-endian, one of bytes as a 4-byte
big-endian length and the bytes.

The table holds slot numbers, 0 where it is free. A key's probe sequence starts at the top bits of
its hash and goes on by one. Two keys of one hash are two slots of one probe sequence.

Invariants:
    slots are numbered from 1, in the order of insertion, without gaps
    2 * (slots used) <= table size
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from onceflow.core.errors import StateCorrupt, StateError
from onceflow.core.state.keys.key_columns import (
    PADDING_BYTES,
    BytesKeys,
    FixedKeys,
    Ints,
    KeyColumn,
    Words,
)
from onceflow.core.state.keys.key_groups import Hashes

Mask: TypeAlias = npt.NDArray[np.bool_]

WORDS_COMPARED_MAX = 16
"""Keys longer than this many words (128 bytes) are compared one by one."""


def grown(array: npt.NDArray[Any], used: int, needed: int) -> npt.NDArray[Any]:
    """Return an array that holds `needed` items and begins with the first `used` of `array`."""
    if needed <= len(array):
        return array
    larger = np.zeros((max(needed, 2 * len(array)), *array.shape[1:]), array.dtype)
    larger[:used] = array[:used]
    return larger


class FixedArena:
    """Slots of a column of one or two words."""

    def __init__(self, width: int, hash_factor: int = 1) -> None:
        self._planes = [np.zeros(1024, np.uint64) for _ in range(width)]
        self._hash_factor = hash_factor
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
        return FixedKeys(tuple(plane[: self.count] for plane in self._planes), self._hash_factor)


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
    if isinstance(column, BytesKeys):
        return BytesArena()
    return FixedArena(len(column.words), column.hash_factor)


def encode_keys(columns: Sequence[KeyColumn]) -> pa.Array:
    """Return the encoded form of each row's key, as a large_binary array."""
    if len(columns) == 1 and isinstance(columns[0], BytesKeys):
        return binary_of(columns[0])
    parts: list[pa.Array] = []
    for column in columns:
        if isinstance(column, BytesKeys):
            parts += [fixed_binary(column.lengths.astype(">u4")), binary_of(column)]
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
            columns.append(FixedKeys(tuple(planes), column.hash_factor))
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


def binary_of(column: BytesKeys) -> pa.Array:
    """Return the bytes of each row as a large_binary array."""
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
    from onceflow.core.state.keys.key_columns import read_key_columns

    (column,) = read_key_columns([array.cast(pa.large_binary())], ["key"])
    if not isinstance(column, BytesKeys):
        raise StateCorrupt(f"keys of a snapshot are {array.type}, not bytes")
    return column


SLOTS_MAX = (1 << 31) - 2


def _by_hash(rows: Ints, hashes: Hashes) -> tuple[Ints, Mask]:
    """Return `rows` with those of one hash together, and which of them is the first of its hash.

    Hashes are told apart by their upper bits: below these is a row's place, so that the sort is one
    of plain integers. Two that differ further down are taken for one.
    """
    bits = np.uint64(max(len(rows) - 1, 1).bit_length())
    packed = ((hashes[rows] >> bits) << bits) | np.arange(len(rows), dtype=np.uint64)
    packed.sort()
    order = rows[(packed & ((np.uint64(1) << bits) - np.uint64(1))).view(np.int64)]
    packed >>= bits
    first = np.ones(len(rows), np.bool_)
    first[1:] = packed[1:] != packed[:-1]
    return order, first


class SlotIndex:
    """Gives every key that it is shown a slot of its own."""

    def __init__(self, shape: Sequence[KeyColumn], bits: int = 12) -> None:
        self._shape = tuple(shape)
        self._arenas: tuple[KeyArena, ...] = tuple(arena_for(column) for column in shape)
        self._hashes: Hashes = np.zeros(1 << (bits - 1), np.uint64)
        self._bits = bits
        self._table: npt.NDArray[np.int32] = np.zeros(1 << bits, np.int32)
        self.end = 1
        """The next free slot; slots 1 to end - 1 are taken."""

    def __len__(self) -> int:
        return self.end - 1

    def resolve(self, columns: Sequence[KeyColumn], hashes: Hashes) -> tuple[Ints, Ints]:
        """Return each row's slot, and one row for each slot made by this call, in slot order.

        Raises:
            StateError: There would be more than 2**31 - 2 slots.
        """
        slots = self.find(columns, hashes)
        missing = np.flatnonzero(slots == 0)
        leaders: list[Ints] = []
        while len(missing):
            # One row for each distinct hash; another key of that hash gets its turn next time.
            order, first = _by_hash(missing, hashes)
            chosen = order[first]
            made = self._insert(tuple(column.take(chosen) for column in columns), hashes[chosen])
            slots[chosen] = made
            leaders.append(chosen)
            rest = order[~first]
            guess = made[np.cumsum(first)[~first] - 1]
            guess[~self._equal(guess, tuple(column.take(rest) for column in columns))] = 0
            slots[rest] = guess
            missing = rest[guess == 0]
        none = np.zeros(0, np.int64)
        return slots, np.concatenate(leaders) if leaders else none

    def slot_keys(self) -> tuple[KeyColumn, ...]:
        """Return the key of every slot, slot 0 included, as of now and for ever."""
        return tuple(arena.view() for arena in self._arenas)

    def slot_hashes(self) -> Hashes:
        """Return the hash of every slot, slot 0 included, as of now and for ever."""
        return self._hashes[: self.end]

    def kept(self, slots: Ints) -> SlotIndex:
        """Return an index of these slots' keys alone, renumbered from 1 in the order given."""
        # As many keys as there were may come again: a table that grows places all of them anew.
        index = SlotIndex(self._shape, max(12, int(2 * self.end).bit_length()))
        if len(slots):
            index._insert(
                tuple(column.take(slots) for column in self.slot_keys()), self._hashes[slots]
            )
        return index

    def find(self, columns: Sequence[KeyColumn], hashes: Hashes) -> Ints:
        """Return each row's slot, 0 where its key is not there."""
        if not len(hashes):
            return np.zeros(0, np.int64)
        positions = self._home(hashes)
        slots: Ints = self._table[positions].astype(np.int64)
        if slots.all():
            active = np.flatnonzero(~self._equal(slots, columns))
        else:
            active = np.flatnonzero(self._others(slots, columns, hashes))
        while len(active):
            positions[active] = (positions[active] + 1) & (len(self._table) - 1)
            candidates = self._table[positions[active]].astype(np.int64)
            slots[active] = candidates
            active = active[self._others(candidates, columns, hashes[active], active)]
        return slots

    def _others(
        self,
        slots: Ints,
        columns: Sequence[KeyColumn],
        hashes: Hashes,
        rows: Ints | None = None,
    ) -> Mask:
        """Tell for which slots there is another key than that of the row; `hashes` are of `rows`.

        Another key has another hash, all but always: few keys are compared.
        """
        others: Mask = slots != 0
        alike = np.flatnonzero(others & (self._hashes[slots] == hashes))
        if len(alike):
            mine = alike if rows is None else rows[alike]
            equal = self._equal(slots[alike], tuple(column.take(mine) for column in columns))
            others[alike[equal]] = False
        return others

    def _equal(self, slots: Ints, columns: Sequence[KeyColumn]) -> Mask:
        same: Mask | None = None
        for arena, column in zip(self._arenas, columns, strict=True):
            equal = arena.equal(slots, column)  # type: ignore[arg-type]
            same = equal if same is None else same & equal
        assert same is not None
        return same

    def _insert(self, columns: Sequence[KeyColumn], hashes: Hashes) -> Ints:
        """Give each row a new slot; the keys are distinct and not there."""
        end = self.end + len(hashes)
        if end > SLOTS_MAX:
            raise StateError(f"one subtask cannot hold {end} keys: raise the parallelism")
        for arena, column in zip(self._arenas, columns, strict=True):
            arena.append(column)  # type: ignore[arg-type]
        self._hashes = grown(self._hashes, self.end, end)
        self._hashes[self.end : end] = hashes
        slots = np.arange(self.end, end)
        self.end = end
        if 2 * end > len(self._table):
            while 2 * end > 1 << self._bits:
                self._bits += 1
            self._table = np.zeros(1 << self._bits, np.int32)
            self._place(np.arange(1, end), self._hashes[1:end])
        else:
            self._place(slots, hashes)
        return slots

    def _place(self, slots: Ints, hashes: Hashes) -> None:
        positions = self._home(hashes)
        while len(slots):
            free = self._table[positions] == 0
            self._table[positions[free]] = slots[free]
            lost = self._table[positions] != slots
            slots, positions = slots[lost], (positions[lost] + 1) & (len(self._table) - 1)

    def _home(self, hashes: Hashes) -> Ints:
        return (hashes >> np.uint64(64 - self._bits)).view(np.int64)
