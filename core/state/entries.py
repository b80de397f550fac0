"""Entries of one state by key, and the value and list states over them; both backends share these.

An entry table is a dict of *fresh* changes over older entries that a snapshot may be reading. Only
`fresh` is ever written; a backend swaps it for an empty one when it takes a snapshot.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, TypeVar

from onceflow.core.state.api import ListState, ValueState
from onceflow.core.state.cells import ABSENT, DELETED, Cells, Stored
from onceflow.core.state.descriptors import ValueStateDescriptor

T = TypeVar("T")


class CurrentKey:
    """The key that a store's state objects read and write."""

    __slots__ = ("key",)

    def __init__(self) -> None:
        self.key: Any = ABSENT


class EntryTable(ABC):
    """The entries of one state; owned by the subtask's thread."""

    def __init__(self, current: CurrentKey, cells: Cells) -> None:
        self.current = current
        self.cells = cells
        self.fresh: dict[Any, Any] = {}
        """Changes since the last snapshot: key to what is stored, or DELETED."""

    @abstractmethod
    def older(self, key: Any) -> Any:
        """Return what lies below `fresh` at `key`, to be read only, or ABSENT."""

    def find(self, key: Any) -> Any:
        """Return the entry at `key`, to be read only, or ABSENT."""
        entry = self.fresh.get(key, ABSENT)
        if entry is ABSENT:
            return self.older(key)
        return ABSENT if entry is DELETED else entry

    def put(self, key: Any, entry: Any) -> None:
        """Make `entry` the entry at `key`."""
        self.fresh[key] = entry

    def delete(self, key: Any) -> None:
        """Leave no entry at `key`."""
        self.fresh[key] = DELETED


class EntryValueState(ValueState[T]):
    """A value state over an entry table."""

    __slots__ = ("_current", "_default", "_direct", "_table")

    def __init__(self, table: EntryTable, descriptor: ValueStateDescriptor[T]) -> None:
        self._table = table
        self._current = table.current
        self._direct = table.cells.direct
        default = descriptor.default
        self._default: Stored = None if default is None else table.cells.freeze(default)

    def get(self) -> T:
        """Return the value, or the default."""
        table = self._table
        stored = table.fresh.get(self._current.key, ABSENT)
        if stored.__class__ is self._direct:
            return stored  # type: ignore[no-any-return]
        if stored is ABSENT:
            stored = table.older(self._current.key)
        if stored is ABSENT or stored is DELETED:
            stored = self._default
        return table.cells.thaw(stored)  # type: ignore[no-any-return]

    def set(self, value: T) -> None:
        """Make `value` the value."""
        table = self._table
        if value.__class__ is self._direct:
            table.put(self._current.key, value)
        elif value is None:
            table.delete(self._current.key)
        else:
            table.put(self._current.key, table.cells.freeze(value))

    def clear(self) -> None:
        """Forget the value."""
        self._table.delete(self._current.key)


class EntryListState(ListState[T]):
    """A list state over an entry table, whose entries are lists of what is stored for each element.

    A list in `fresh` belongs to the owner's thread and grows in place; any other may be in a
    snapshot.
    """

    __slots__ = ("_table",)

    def __init__(self, table: EntryTable) -> None:
        self._table = table

    def get(self) -> list[T]:
        """Return the elements."""
        elements = self._table.find(self._table.current.key)
        if elements is ABSENT:
            return []
        thaw = self._table.cells.thaw
        return [thaw(element) for element in elements]

    def add(self, value: T) -> None:
        """Put `value` at the end."""
        self._extend([self._table.cells.freeze(value)])

    def add_all(self, values: Iterable[T]) -> None:
        """Put all of `values` at the end."""
        freeze = self._table.cells.freeze
        frozen = [freeze(value) for value in values]
        if frozen:
            self._extend(frozen)

    def clear(self) -> None:
        """Forget every element."""
        self._table.delete(self._table.current.key)

    def _extend(self, frozen: list[Stored]) -> None:
        table, key = self._table, self._table.current.key
        own = table.fresh.get(key, ABSENT)
        if own.__class__ is list:
            own.extend(frozen)
            return
        older: Any = ABSENT if own is DELETED else table.older(key)
        table.put(key, frozen if older is ABSENT else list(older) + frozen)
