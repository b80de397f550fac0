"""A state backend as another package brings it: it counts keys and leaves the rest to the heap."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from onceflow.core.state import (
    KeyedStateStore,
    StateBackend,
    StateContext,
    StateHandle,
    StateReader,
)
from onceflow.core.state.heap.store import HeapStore


class CountingStore(HeapStore):
    """Counts how often a key was set."""

    records = 0

    def set_current_key(self, key: Any) -> None:
        self.records += 1
        super().set_current_key(key)


@dataclass(frozen=True)
class CountingBackend(StateBackend):
    def open(
        self, context: StateContext, restored: Sequence[StateHandle], reader: StateReader
    ) -> KeyedStateStore:
        return CountingStore.open(context, restored, reader)


class ForgetfulStore(CountingStore):
    """Loses what it is told to prefetch: a mistake that the suite must find."""

    def prefetch(self, keys: Sequence[Any]) -> None:
        for table in self._entries.values():
            for key in keys[:1]:
                table.delete(key)


@dataclass(frozen=True)
class ForgetfulBackend(StateBackend):
    def open(
        self, context: StateContext, restored: Sequence[StateHandle], reader: StateReader
    ) -> KeyedStateStore:
        return ForgetfulStore.open(context, restored, reader)
