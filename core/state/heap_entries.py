"""Entries of a heap store: dicts on dicts, so that a snapshot takes no time.

A snapshot freezes the dict of each state and puts an empty one over it, whatever its size: changes
go to the top dict, reads look there first. When no upload reads the frozen dicts any more, the
owner's thread merges the changes down.

Invariants:
    a dict below the top is not changed while a pending snapshot may read it
    at most LAYERS_MAX frozen dicts lie on each other, however many snapshots overlap
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

from onceflow.core.state.api import MapState
from onceflow.core.state.canonical import StateRows
from onceflow.core.state.cells import ABSENT, DELETED, Cells
from onceflow.core.state.entries import CurrentKey, EntryTable
from onceflow.core.state.entry_rows import EntryRows
from onceflow.core.state.map_keys import MapKeys

K = TypeVar("K")
V = TypeVar("V")

LAYERS_MAX = 4


class HeapEntries(EntryTable):
    """Entries in dicts, the oldest at the bottom."""

    def __init__(self, current: CurrentKey, cells: Cells, codec: EntryRows) -> None:
        super().__init__(current, cells)
        self._codec = codec
        self._frozen: list[dict[Any, Any]] = []

    def older(self, key: Any) -> Any:
        """Return the entry of the frozen layers, or ABSENT."""
        for layer in reversed(self._frozen):
            entry = layer.get(key, ABSENT)
            if entry is not ABSENT:
                return ABSENT if entry is DELETED else entry
        return ABSENT

    def delete(self, key: Any) -> None:
        """Leave no entry at `key`."""
        if self._frozen:
            self.fresh[key] = DELETED
        else:
            self.fresh.pop(key, None)

    def load(self, rows: StateRows) -> None:
        """Take rows of a snapshot."""
        self._codec.load(rows, self.fresh)

    def freeze(self, max_parallelism: int) -> Iterable[StateRows]:
        """Return the entries as of now; they are turned into rows when they are iterated."""
        if len(self._frozen) >= LAYERS_MAX:
            self._frozen = [_merged(self._frozen)]
        self._frozen.append(self.fresh)
        self.fresh = {}
        return _FrozenRows(self._codec, tuple(self._frozen), max_parallelism)

    def merge(self) -> None:
        """Put the changes into the bottom layer; no pending snapshot may be reading."""
        if not self._frozen:
            return
        bottom, *changes = [*self._frozen, self.fresh]
        for layer in changes:
            _apply(layer, bottom)
        self._frozen = []
        self.fresh = bottom


class _FrozenRows:
    """The rows of frozen layers."""

    def __init__(
        self, codec: EntryRows, layers: tuple[dict[Any, Any], ...], max_parallelism: int
    ) -> None:
        self._codec = codec
        self._layers = layers
        self._max_parallelism = max_parallelism

    def __iter__(self) -> Iterator[StateRows]:
        entries = self._layers[0] if len(self._layers) == 1 else _merged(self._layers)
        return self._codec.rows(entries, self._max_parallelism)


def _apply(changes: dict[Any, Any], entries: dict[Any, Any]) -> None:
    """Apply a layer of changes, deletions included, to a dict of entries."""
    entries.update(changes)
    for key in [key for key, entry in changes.items() if entry is DELETED]:
        del entries[key]


def _merged(layers: Sequence[dict[Any, Any]]) -> dict[Any, Any]:
    entries = dict(layers[0])
    for layer in layers[1:]:
        _apply(layer, entries)
    return entries


class HeapMapState(MapState[K, V]):
    """A map state whose entries are dicts: one in `fresh` is the owner's, others are frozen."""

    def __init__(self, table: HeapEntries, keys: MapKeys) -> None:
        self._table = table
        self._keys = keys

    def get(self, key: K) -> V | None:
        """Return the value under `key`, or None."""
        entry = self._table.find(self._table.current.key)
        if entry is ABSENT or key not in entry:
            return None
        return self._table.cells.thaw(entry[key])  # type: ignore[no-any-return]

    def put(self, key: K, value: V) -> None:
        """Put `value` under `key`."""
        self._keys.check(key)
        stored = self._table.cells.freeze(value)
        self._own()[key] = stored

    def remove(self, key: K) -> None:
        """Forget `key`."""
        if self.contains(key):
            own = self._own()
            del own[key]
            if not own:
                self.clear()

    def contains(self, key: K) -> bool:
        """Tell whether `key` is there."""
        entry = self._table.find(self._table.current.key)
        return entry is not ABSENT and key in entry

    def keys(self) -> Iterator[K]:
        """Return the keys as of now."""
        entry = self._table.find(self._table.current.key)
        return iter([] if entry is ABSENT else list(entry))

    def items(self) -> Iterator[tuple[K, V]]:
        """Return the entries as of now."""
        entry = self._table.find(self._table.current.key)
        thaw = self._table.cells.thaw
        return iter([] if entry is ABSENT else [(key, thaw(entry[key])) for key in entry])

    def clear(self) -> None:
        """Forget every entry."""
        self._table.delete(self._table.current.key)

    def _own(self) -> dict[K, Any]:
        table, key = self._table, self._table.current.key
        own: Any = table.fresh.get(key, ABSENT)
        if own.__class__ is not dict:
            older: Any = ABSENT if own is DELETED else table.older(key)
            own = {} if older is ABSENT else dict(older)
            table.put(key, own)
        return own  # type: ignore[no-any-return]
