"""From keys to slots, a batch at a time: open addressing over the hash, exact by comparing keys.

The table holds slot numbers, 0 where it is free. A key's probe sequence starts at the top bits of
its hash and goes on by one. Two keys of one hash are two slots of one probe sequence.

Invariants:
    slots are numbered from 1, in the order of insertion, without gaps
    2 * (slots used) <= table size
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from onceflow.core.errors import StateError
from onceflow.core.state.key_arena import KeyArena, Mask, arena_for, grown
from onceflow.core.state.key_columns import Ints, KeyColumn
from onceflow.core.state.key_groups import Hashes

SLOTS_MAX = (1 << 31) - 2


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
        slots = self._find(columns, hashes)
        missing = np.flatnonzero(slots == 0)
        leaders: list[Ints] = []
        while len(missing):
            # One row for each distinct hash; another key of that hash gets its turn next time.
            order = missing[np.argsort(hashes[missing], kind="stable")]
            sorted_hashes = hashes[order]
            first = np.ones(len(order), np.bool_)
            first[1:] = sorted_hashes[1:] != sorted_hashes[:-1]
            chosen = order[first]
            slots[chosen] = self._insert(
                tuple(column.take(chosen) for column in columns), hashes[chosen]
            )
            leaders.append(chosen)
            rest = order[~first]
            slots[rest] = self._find(tuple(column.take(rest) for column in columns), hashes[rest])
            missing = rest[slots[rest] == 0]
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
        index = SlotIndex(self._shape, max(12, int(2 * len(slots) + 1).bit_length()))
        if len(slots):
            index._insert(
                tuple(column.take(slots) for column in self.slot_keys()), self._hashes[slots]
            )
        return index

    def _find(self, columns: Sequence[KeyColumn], hashes: Hashes) -> Ints:
        """Return each row's slot, 0 where its key is not there."""
        if not len(hashes):
            return np.zeros(0, np.int64)
        positions = self._home(hashes)
        slots: Ints = self._table[positions].astype(np.int64)
        wrong = ~self._equal(slots, columns)
        wrong &= slots != 0
        active = np.flatnonzero(wrong)
        while len(active):
            positions[active] = (positions[active] + 1) & (len(self._table) - 1)
            candidates = self._table[positions[active]].astype(np.int64)
            slots[active] = candidates
            wrong = ~self._equal(candidates, tuple(column.take(active) for column in columns))
            wrong &= candidates != 0
            active = active[wrong]
        return slots

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
