"""The entries of one state in memory, as layers of dicts.

A snapshot puts an empty dict on top of the others, whatever their size: changes are written to it,
and reads look there first. The dicts below do not change while an upload may read one of them.
Afterwards the owner's thread merges them into the lowest dict, the bottom.

The top stays separate from the bottom, so that the next snapshot finds the changes in it: then the
state is *tracked*. If most of a state changed between two snapshots, that would cost the memory of
a second copy. So if there are too many changes, all layers are *folded* into one dict, which
becomes the top itself, and the next snapshot holds the state as a whole.

Invariants:
    a dict below the top is not changed while a pending snapshot may read it
    the bottom holds no DELETED
    at most LAYERS_MAX frozen dicts lie on each other, however many snapshots overlap
    tracked: each change since the barrier of checkpoint `_tracked_since` is in `_changes`, under
        the checkpoint whose snapshot froze it, or in the top
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

from onceflow.core.protocol.ids import CheckpointId
from onceflow.core.state.snapshots.canonical import StateRows
from onceflow.core.state.stores.entries import (
    ABSENT,
    DELETED,
    Cells,
    CurrentKey,
    EntryRows,
    EntryTable,
)
from onceflow.core.state.types.serializers import ExpiringSerializer

LAYERS_MAX = 4
"""The number of frozen layers that a look-up may have to pass; more are merged into one."""


@dataclass(frozen=True, slots=True)
class LayerLimits:
    """The limits by which a snapshot of the heap is a layer of changes, or the whole state."""

    entries_min: int = 1000
    """The number of entries below which a state is never tracked: it is cheap to write as a whole.
    """
    changed_share_max: float = 0.25
    """The part of a state's entries that may be changed, and so held twice, before it is folded."""
    layers_share_max: float = 0.5
    """The ratio of the bytes of all layers to those of their base above which a new base is
    written. If 1 % changes between snapshots, this happens once in 50 snapshots, and triples the
    bytes written on average."""
    layer_files_max: int = 64
    """The number of layer files above which a new base is written: a restore reads all of them."""


Entries = dict[Any, Any]


@dataclass(frozen=True, slots=True)
class ChangedEntries:
    """The changed keys of a state, and their entries; DELETED means that an entry was deleted.

    Any thread may read it.
    """

    entries: Mapping[Any, Any]
    codec: EntryRows
    max_parallelism: int

    def __len__(self) -> int:
        return len(self.entries)

    def rows(self) -> Iterator[StateRows]:
        """Return the rows of a layer."""
        return self.codec.encode_changes(self.entries, self.max_parallelism)


class HeapEntries(EntryTable):
    """Entries in dicts, the oldest at the bottom."""

    def __init__(
        self,
        current: CurrentKey,
        cells: Cells,
        codec: EntryRows,
        max_parallelism: int,
        is_idle: Callable[[], bool],
        limits: LayerLimits | None,
    ) -> None:
        """Create an empty table.

        `is_idle` returns True if no pending snapshot reads its frozen dicts.

        If `limits` is None, the state is never tracked.
        """
        super().__init__(current, cells)
        self.codec = codec
        self._max_parallelism = max_parallelism
        self._is_idle = is_idle
        self._limits = limits
        self._frozen: list[Entries] = []
        self._changes: dict[CheckpointId, Entries] = {}
        self._tracked_since: CheckpointId | None = None
        self._to_clean: Iterator[Any] = iter(())

    def __len__(self) -> int:
        """Return the approximate number of entries: those changed since a merge count twice."""
        return sum(map(len, self._frozen)) + len(self.fresh)

    def find_older(self, key: Any) -> Any:
        """Return the entry of the frozen layers, or ABSENT."""
        if len(self._frozen) == 1:
            # The common case, called for each record whose key has not changed since the snapshot.
            return self._frozen[0].get(key, ABSENT)
        for layer in reversed(self._frozen):
            entry = layer.get(key, ABSENT)
            if entry is not ABSENT:
                return ABSENT if entry is DELETED else entry
        return ABSENT

    def delete(self, key: Any) -> None:
        """Delete the entry at `key`."""
        # If there is a layer below, the key may be in it, so the deletion is recorded. Otherwise it
        # is removed: a dict without DELETED need not be filtered later.
        if self._frozen:
            self.fresh[key] = DELETED
        else:
            self.fresh.pop(key, None)

    def clean(self, count: int) -> None:
        """Check `count` further entries, and delete expired ones."""
        serializer = self.cells.serializer
        if not isinstance(serializer, ExpiringSerializer):
            return
        looked_at = 0
        for key in islice(self._to_clean, count):
            looked_at += 1
            entry = self.find(key)
            alive = (
                entry if entry is ABSENT else self.codec.filter_alive(entry, serializer.is_expired)
            )
            if alive is entry:
                continue
            if alive is ABSENT:
                self.delete(key)
            else:
                self.put(key, alive)
        if looked_at < count:
            # A copy of the keys: a dict must not change during an iteration.
            self._to_clean = chain.from_iterable([list(d) for d in (*self._frozen, self.fresh)])

    def all(self) -> Iterator[tuple[Any, Any]]:
        """Yield each key and its value."""
        thaw = self.cells.thaw
        for key, entry in iterate_layers([*self._frozen, self.fresh]):
            yield key, thaw(entry)

    def load(self, rows: StateRows, reader: EntryRows) -> None:
        """Add the rows of a snapshot, decoded by `reader`."""
        reader.load(rows, self.fresh)

    def freeze(self, checkpoint: CheckpointId) -> None:
        """Freeze all entries: they do not change until `merge`."""
        if len(self._frozen) >= LAYERS_MAX:
            # A new dict, because uploads may still read the old ones.
            self._frozen = [dict(iterate_layers(self._frozen))]
        self._frozen.append(self.fresh)
        # The changes of the first snapshot are not known, because they were not kept separate.
        if self._tracked_since is not None:
            self._changes[checkpoint] = self.fresh
        elif self._limits is not None:
            self._tracked_since = checkpoint
        self.fresh = {}
        self._bound_fresh()

    def read_frozen(self) -> Iterator[StateRows]:
        """Return the rows that are frozen now. Any thread may iterate over them."""
        # A tuple of the current layers: `merge` replaces the list.
        layers = tuple(self._frozen)
        if len(layers) == 1:
            return self.codec.rows(layers[0], self._max_parallelism)
        return self.codec.rows_of_pairs(iterate_layers(layers), self._max_parallelism)

    def is_tracked(self) -> bool:
        """Return True if the next snapshot may know the changes since the last `freeze`."""
        return self._tracked_since is not None and self._find_changes_max() >= 0

    def find_changes(self, base: CheckpointId) -> ChangedEntries | None:
        """Return the changes between the barrier of `base` and the last `freeze`.

        None if they are not known.
        """
        if self._tracked_since is None or self._tracked_since > base:
            return None
        since = [changes for number, changes in self._changes.items() if number > base]
        if len(since) == 1:
            return ChangedEntries(since[0], self.codec, self._max_parallelism)
        merged: Entries = {}
        for changes in since:
            # A dict keeps the order of the checkpoints, so the newest change of a key is used.
            merged.update(changes)
        return ChangedEntries(merged, self.codec, self._max_parallelism)

    def forget_changes(self, base: CheckpointId) -> None:
        """Forget the changes before the barrier of `base`, on which snapshots build now."""
        for number in [number for number in self._changes if number <= base]:
            del self._changes[number]

    def merge(self) -> None:
        """Merge frozen changes into the bottom layer. No pending snapshot may be reading."""
        if not self._frozen:
            return
        bottom, *layers = self._frozen
        for changes in layers:
            _apply(changes, bottom)
        self._frozen = [bottom]
        changed = len(self.fresh) + sum(map(len, self._changes.values()))
        if changed > self._find_changes_max():
            self._fold()
        self._bound_fresh()

    def spill(self) -> None:
        """Fold the layers, because there are too many changes to keep them separate."""
        if self._is_idle():
            self.merge()
        else:
            # `merge` checks again, once no snapshot reads.
            self.fresh_max = sys.maxsize

    def _fold(self) -> None:
        (bottom,) = self._frozen
        _apply(self.fresh, bottom)
        self._frozen = []
        self.fresh = bottom
        self._changes.clear()
        self._tracked_since = None

    def _bound_fresh(self) -> None:
        changed_max = self._find_changes_max()
        self.fresh_max = sys.maxsize if changed_max < 0 else changed_max

    def _find_changes_max(self) -> int:
        """Return the number of changed entries to keep apart from the bottom; -1 if not tracked."""
        limits = self._limits
        if limits is None or not self._frozen or len(self._frozen[0]) < limits.entries_min:
            return -1
        # Relative to the bottom, which has nearly all entries: counting each layer would cost time
        # for each record.
        return int(len(self._frozen[0]) * limits.changed_share_max)


def _apply(changes: Entries, entries: Entries) -> None:
    """Apply a layer of changes, deletions included, to a dict of entries."""
    entries.update(changes)
    # Update all entries, then remove the deleted ones: two passes in C, instead of a test for each
    # entry in Python.
    for key in [key for key, entry in changes.items() if entry is DELETED]:
        del entries[key]


def iterate_layers(layers: Sequence[Entries]) -> Iterator[tuple[Any, Any]]:
    """Yield each key of the layers, the lowest first, with its entry. Skips deleted keys.

    Copies nothing, because a state may fill most of the memory.
    """
    for index, layer in enumerate(layers):
        above = layers[index + 1 :]
        for key, entry in layer.items():
            # The highest layer with a key counts; `any` checks at most LAYERS_MAX layers.
            if entry is not DELETED and not any(key in upper for upper in above):
                yield key, entry
