"""The entries of one state in memory, as layers of dicts.

A snapshot puts an empty dict over the others, whatever their size: changes go to it, and reads look
there first. The dicts below are not changed while an upload may read one of them. After that the
owner's thread merges them into the lowest, the bottom.

The top stays apart from the bottom, so that the next snapshot finds in it what has changed: then
the state is *tracked*. Where most of a state changes from one snapshot to the next, that would cost
the memory of a second one. So with too many changes all layers are *folded* into one dict, which is
the top itself, and the next snapshot holds the state as a whole.

Invariants:
    a dict below the top is not changed while a pending snapshot may read it
    the bottom holds no DELETED
    at most LAYERS_MAX frozen dicts lie on each other, however many snapshots overlap
    tracked: what was changed since the barrier of checkpoint `_tracked_since` is in `_changes`, by
        the checkpoint whose snapshot froze it, or in the top
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

from onceflow.core.protocol.ids import CheckpointId
from onceflow.core.state.heap.entries import (
    ABSENT,
    DELETED,
    Cells,
    CurrentKey,
    EntryRows,
    EntryTable,
)
from onceflow.core.state.snapshots.canonical import StateRows
from onceflow.core.state.types.serializers import ExpiringSerializer

LAYERS_MAX = 4
"""Frozen layers that a look-up may have to pass; more are merged into one."""


@dataclass(frozen=True, slots=True)
class LayerLimits:
    """When snapshots of the heap are written as layers of changes, and when as a whole."""

    entries_min: int = 1000
    """A state of fewer entries is never tracked: writing all of it costs nothing."""
    changed_share_max: float = 0.25
    """The part of a state's entries that may be changed, and held twice, before it is folded."""
    layers_share_max: float = 0.5
    """The bytes of all layers by those of their base, above which there is a new base. With 1 %
    changed each time it comes once in 50 snapshots, and triples what they write on average."""
    layer_files_max: int = 64
    """The files of layers above which there is a new base: a restore reads each of them."""


Entries = dict[Any, Any]


@dataclass(frozen=True, slots=True)
class ChangedEntries:
    """Which keys of a state have changed, and their entries; DELETED stands for what is gone.

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
        """`is_idle` tells whether no pending snapshot reads what is frozen here.

        Without `limits` the state is never tracked.
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
        """The number of entries, about: one that was changed since the last merge counts twice."""
        return sum(map(len, self._frozen)) + len(self.fresh)

    def find_older(self, key: Any) -> Any:
        """Return the entry of the frozen layers, or ABSENT."""
        if len(self._frozen) == 1:
            # Nearly always: called for each record whose key has not changed since the snapshot.
            return self._frozen[0].get(key, ABSENT)
        for layer in reversed(self._frozen):
            entry = layer.get(key, ABSENT)
            if entry is not ABSENT:
                return ABSENT if entry is DELETED else entry
        return ABSENT

    def delete(self, key: Any) -> None:
        """Leave no entry at `key`."""
        # With a layer below, the key may be there: the deletion is written down. Without one it is
        # simply gone, and a dict without DELETED need not be filtered later.
        if self._frozen:
            self.fresh[key] = DELETED
        else:
            self.fresh.pop(key, None)

    def clean(self, count: int) -> None:
        """Look at `count` further entries; delete what of them has expired."""
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
            # The keys as of now: a dict may not change while somebody iterates over it.
            self._to_clean = chain.from_iterable([list(d) for d in (*self._frozen, self.fresh)])

    def all(self) -> Iterator[tuple[Any, Any]]:
        """Yield every key and its value."""
        thaw = self.cells.thaw
        for key, entry in iterate_layers([*self._frozen, self.fresh]):
            yield key, thaw(entry)

    def load(self, rows: StateRows, reader: EntryRows) -> None:
        """Take rows of a snapshot, as `reader` reads them."""
        reader.load(rows, self.fresh)

    def freeze(self, checkpoint: CheckpointId) -> None:
        """Let no entry as of now change any more, until `merge`."""
        if len(self._frozen) >= LAYERS_MAX:
            # A new dict, for uploads may still read the old ones.
            self._frozen = [dict(iterate_layers(self._frozen))]
        self._frozen.append(self.fresh)
        # The changes of the first snapshot are not known: nothing was told apart before it.
        if self._tracked_since is not None:
            self._changes[checkpoint] = self.fresh
        elif self._limits is not None:
            self._tracked_since = checkpoint
        self.fresh = {}
        self._bound_fresh()

    def read_frozen(self) -> Iterator[StateRows]:
        """Return the rows of what is frozen now. Any thread may iterate over them."""
        # A tuple of the layers as of now: `merge` replaces the list.
        layers = tuple(self._frozen)
        if len(layers) == 1:
            return self.codec.rows(layers[0], self._max_parallelism)
        return self.codec.rows_of_pairs(iterate_layers(layers), self._max_parallelism)

    def is_tracked(self) -> bool:
        """Tell whether the next snapshot may know what has changed since the last `freeze`."""
        return self._tracked_since is not None and self._find_changes_max() >= 0

    def find_changes(self, base: CheckpointId) -> ChangedEntries | None:
        """Return what was changed between the barrier of `base` and the last `freeze`.

        None if that is not known.
        """
        if self._tracked_since is None or self._tracked_since > base:
            return None
        since = [changes for number, changes in self._changes.items() if number > base]
        if len(since) == 1:
            return ChangedEntries(since[0], self.codec, self._max_parallelism)
        merged: Entries = {}
        for changes in since:
            # In the order of their checkpoints, as a dict keeps them: the newest change of a key
            # counts.
            merged.update(changes)
        return ChangedEntries(merged, self.codec, self._max_parallelism)

    def forget_changes(self, base: CheckpointId) -> None:
        """Forget what was changed before the barrier of `base`, on which snapshots build now."""
        for number in [number for number in self._changes if number <= base]:
            del self._changes[number]

    def merge(self) -> None:
        """Put frozen changes into the bottom layer; no pending snapshot may be reading."""
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
        """Fold, for more has changed than is worth to be told apart."""
        if self._is_idle():
            self.merge()
        else:
            # `merge` looks again, once nothing is read any more.
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
        """Return how many entries may be changed and apart from the bottom; -1: not tracked."""
        limits = self._limits
        if limits is None or not self._frozen or len(self._frozen[0]) < limits.entries_min:
            return -1
        # Against the bottom alone, which is nearly all of the entries: counting each layer would
        # cost time for every record.
        return int(len(self._frozen[0]) * limits.changed_share_max)


def _apply(changes: Entries, entries: Entries) -> None:
    """Apply a layer of changes, deletions included, to a dict of entries."""
    entries.update(changes)
    # First all, then without the deleted ones: two passes in C, instead of a test for each entry in
    # Python.
    for key in [key for key, entry in changes.items() if entry is DELETED]:
        del entries[key]


def iterate_layers(layers: Sequence[Entries]) -> Iterator[tuple[Any, Any]]:
    """Yield each key of some layers, the lowest first, with its entry; what is deleted is left out.

    Copies nothing: a state may be most of the memory that there is.
    """
    for index, layer in enumerate(layers):
        above = layers[index + 1 :]
        for key, entry in layer.items():
            # A key counts where it lies highest; `any` looks at LAYERS_MAX layers at most.
            if entry is not DELETED and not any(key in upper for upper in above):
                yield key, entry
