"""Keyed state as operators use it, and the contract that a state backend fulfils.

Ownership: one thread, the subtask's, calls everything here except `PendingSnapshot.upload` and
`PendingSnapshot.discard`, which may run on any other thread at the same time.

A value handed in or out is the caller's own: changing a list after `set` or after `get` changes
no state, and no snapshot, until it is `set` again. That holds for every backend.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Generic, TypeVar

import pyarrow as pa

from onceflow.core.protocol.ids import CheckpointId
from onceflow.core.state.aggregates.accumulators import AccumulatorTable
from onceflow.core.state.api.context import StateContext, StateHandle, StateReader, StateWriter
from onceflow.core.state.api.descriptors import (
    AccumulatorColumn,
    ListStateDescriptor,
    MapStateDescriptor,
    StateTtlConfig,
    ValueStateDescriptor,
)

T = TypeVar("T")
K = TypeVar("K")
V = TypeVar("V")
IN = TypeVar("IN")
OUT = TypeVar("OUT")


class ValueState(ABC, Generic[T]):
    """One value of the current key.

    A value of a type that can be changed in place (a list, a dataclass) is encoded by every `set`
    and decoded by every `get`; a number or a text is kept as it is. On the heap that is all. In
    RocksDB a value that is not among the `cache_entries` in memory is read from disk, those of a
    batch together before its first record, and a changed one is written once a checkpoint.
    """

    @abstractmethod
    def get(self) -> T:
        """Return the value, or the descriptor's default (None unless given) when there is none."""

    @abstractmethod
    def set(self, value: T) -> None:
        """Make `value` the value; None clears it.

        Raises:
            BadStateValue: It is not of the descriptor's type, so it could never be restored.
        """

    @abstractmethod
    def clear(self) -> None:
        """Forget the value; `get` returns the default again."""


class ReducingState(ABC, Generic[T]):
    """One value of the current key: what the descriptor's function makes of all that was added."""

    @abstractmethod
    def get(self) -> T | None:
        """Return the value, or None when nothing was added."""

    @abstractmethod
    def add(self, value: T) -> None:
        """Make the function's result of the value so far and `value` the value.

        Raises:
            BadStateValue: `value` or the result is None, or not of the descriptor's type.
        """

    @abstractmethod
    def clear(self) -> None:
        """Forget all that was added."""


class AggregatingState(ABC, Generic[IN, OUT]):
    """A reducing state in which what is added, what is kept and what is read may be three types."""

    @abstractmethod
    def get(self) -> OUT | None:
        """Return the function's result of what is kept, or None when nothing was added."""

    @abstractmethod
    def add(self, value: IN) -> None:
        """Add `value` to the accumulator of the current key.

        Raises:
            BadStateValue: The function made None of it, or what is not of the descriptor's type.
        """

    @abstractmethod
    def clear(self) -> None:
        """Forget all that was added."""


class ListState(ABC, Generic[T]):
    """A list of the current key, kept and snapshotted as a whole.

    `get` decodes all of it. The first `add` to a key after each checkpoint copies its list, later
    ones do not; RocksDB besides reads and writes it as one row. A list that grows without a bound
    is better a map state with a number as key.
    """

    @abstractmethod
    def get(self) -> list[T]:
        """Return the elements in the order they were added; empty when there are none."""

    @abstractmethod
    def add(self, value: T) -> None:
        """Put `value` at the end.

        Raises:
            BadStateValue: It is not of the descriptor's type.
        """

    @abstractmethod
    def add_all(self, values: Iterable[T]) -> None:
        """Put all of `values` at the end, or none of them when one is not of the type.

        Raises:
            BadStateValue: One is not of the descriptor's type.
        """

    @abstractmethod
    def update(self, values: Iterable[T]) -> None:
        """Make `values` the list, in place of what was there; none at all clears it.

        Raises:
            BadStateValue: One is not of the descriptor's type; nothing has changed.
        """

    @abstractmethod
    def clear(self) -> None:
        """Forget every element."""


class MapState(ABC, Generic[K, V]):
    """A mapping of the current key, read and written one entry at a time.

    A key is a str, bytes, int, bool, date, datetime or Decimal, or a tuple of them, and never None;
    a value is whatever the descriptor's type says.

    What a call costs, where n is the number of entries under the current key:
        heap      `get`, `put`, `remove`, `contains`: one dict look-up; besides, the first change of
                  a key after each checkpoint copies its n entries. `keys`, `items`: n. `clear`: 1.
        RocksDB   each entry is a row. `get`, `put`, `remove`, `contains`: one row, from memory or,
                  when it is not among the `cache_entries` there, from disk (`put` only writes, with
                  the next checkpoint). `keys`, `items`, `clear` read all n rows.
    """

    @abstractmethod
    def get(self, key: K) -> V | None:
        """Return the value under `key`, or None when there is none."""

    @abstractmethod
    def put(self, key: K, value: V) -> None:
        """Put `value` under `key`, in place of what was there.

        Raises:
            BadStateValue: Key or value is not of the descriptor's type; nothing has changed.
        """

    @abstractmethod
    def remove(self, key: K) -> None:
        """Forget `key`; nothing happens when it is not there."""

    @abstractmethod
    def contains(self, key: K) -> bool:
        """Tell whether `key` is there; also when its value is None."""

    @abstractmethod
    def keys(self) -> Iterator[K]:
        """Return the keys as of this call, each once.

        In no order that may be relied on: it differs between backends and after a restart. The
        keys are collected first, so the mapping may be changed while they are gone through, and
        the loop does not see it.
        """

    @abstractmethod
    def items(self) -> Iterator[tuple[K, V]]:
        """Return the entries as of this call, each once; order and changes as with `keys`."""

    def put_all(self, entries: Mapping[K, V]) -> None:
        """Put every entry of `entries`, one after the other.

        Raises:
            BadStateValue: One is not of the descriptor's type; those before it are put.
        """
        for key, value in entries.items():
            self.put(key, value)

    def values(self) -> Iterator[V]:
        """Return the values as of this call; order and changes as with `keys`."""
        return iter([value for _, value in self.items()])

    def is_empty(self) -> bool:
        """Tell whether there is no entry. Costs what `keys` does."""
        return next(self.keys(), None) is None

    @abstractmethod
    def clear(self) -> None:
        """Forget every entry of the current key, and of no other."""


class PendingKeyedSnapshot(ABC):
    """State frozen at a barrier and not yet durable; it is either uploaded or discarded."""

    @abstractmethod
    def upload(self, writer: StateWriter) -> tuple[StateHandle, ...]:
        """Make the frozen state durable and return every handle needed to restore it.

        Runs on another thread than the owner's, who goes on changing the state meanwhile. Handles
        of shared files that a completed checkpoint already holds are returned again, not uploaded.
        What a failed upload has written stays for the storage to delete with the checkpoint.

        Raises:
            StorageError: The storage refused; the state itself is unharmed.
        """

    @abstractmethod
    def discard(self) -> None:
        """Let the frozen state go without uploading it. Safe to call after `upload`, and twice."""


class KeyedStateStore(ABC):
    """All keyed state of one operator's subtask; lost with the process, except for snapshots."""

    @abstractmethod
    def set_current_key(self, key: Any) -> None:
        """Make `key` the key that every state object reads and writes. Called for every record.

        `key` is the Python value of the key column, or a tuple of several columns' values. It is
        not checked here; a key of another type than `hash_key` takes is refused by the snapshot.
        """

    @abstractmethod
    def current_key(self) -> Any:
        """Return what `set_current_key` was given last."""

    def prefetch(self, keys: Sequence[Any]) -> None:  # noqa: B027 - optional hook
        """Hear which keys come next, with repetitions: those of the batch about to be processed.

        Changes no state. A store that reads from disk reads all of them at once, in order, which is
        several times as fast as one by one.
        """

    @abstractmethod
    def value_state(self, descriptor: ValueStateDescriptor[T]) -> ValueState[T]:
        """Return the state of this name, restored if a snapshot held it.

        The same object for the same name, so that it can be asked for again.

        Raises:
            StateIncompatible: The snapshot holds the name as another kind or type.
            ConfigError: The operator has opened without asking for it.
        """

    @abstractmethod
    def entries(self, descriptor: ValueStateDescriptor[T]) -> Iterator[tuple[Any, T]]:
        """Yield (key, value) of every key that has a value, in any order.

        The state was asked for, and is not changed while this is gone through.
        """

    @abstractmethod
    def list_state(self, descriptor: ListStateDescriptor[T]) -> ListState[T]:
        """As `value_state`."""

    @abstractmethod
    def map_state(self, descriptor: MapStateDescriptor[K, V]) -> MapState[K, V]:
        """As `value_state`."""

    @abstractmethod
    def accumulators(
        self,
        name: str,
        key_types: Sequence[pa.DataType],
        columns: Sequence[AccumulatorColumn],
        *,
        namespaced: bool = False,
        ttl: StateTtlConfig | None = None,
    ) -> AccumulatorTable:
        """Return the running aggregates of this name, restored if a snapshot held them.

        With a namespace, a number of 64 bits before the key columns, they are kept for each value
        of it besides the key; which key group they belong to is the key's alone. With a `ttl`, a
        key that was not used for so long begins anew.

        Raises:
            ConfigError: A key or column type cannot be aggregated by or over.
            StateIncompatible: The snapshot holds the name with other types, columns or operations.
        """

    def clean(self, count: int) -> None:  # noqa: B027 - optional hook
        """Look at about `count` further entries of each state that expires; delete what has.

        Called between batches, so that all entries are looked at in the end. A store that does not
        override it keeps what nobody reads or clears.
        """

    def list_restored_names(self) -> frozenset[str]:
        """Return the names of restored states that the operator has not asked for yet.

        A store that does not override it names none: an operator that reads the state of earlier
        versions in their form then does not find it.
        """
        return frozenset()

    def finish_open(self) -> tuple[str, ...]:
        """Hear that the operator has asked for all its states; return what was dropped, for people.

        From here on no other state can be asked for. A store that does not override it drops
        nothing and refuses nothing.

        Raises:
            StateIncompatible: The snapshot holds a state that nobody has asked for.
        """
        return ()

    @abstractmethod
    def snapshot(self, checkpoint: CheckpointId) -> PendingKeyedSnapshot:
        """Freeze the state as of now; a few milliseconds for a million keys."""

    @abstractmethod
    def savepoint(self, checkpoint: CheckpointId) -> PendingKeyedSnapshot:
        """Do as `snapshot`, in the canonical form: self-contained and restored by any backend."""

    def native_savepoint(self, checkpoint: CheckpointId) -> PendingKeyedSnapshot:
        """Do as `snapshot`, self-contained, in the form that `StateBackend.native_form` names."""
        return self.savepoint(checkpoint)

    @abstractmethod
    def notify_completed(self, checkpoint: CheckpointId) -> None:
        """Hear that `checkpoint` is decided: later snapshots may name its shared files again.

        May be late, repeated or left out; then more is uploaded than needed, and nothing worse.
        """

    @abstractmethod
    def notify_aborted(self, checkpoint: CheckpointId) -> None:
        """Hear that `checkpoint` will never be: its shared files must not be named again."""

    @abstractmethod
    def close(self) -> None:
        """Release memory, files and threads; unfinished uploads fail. Safe to call twice."""


class StateBackend(ABC):
    """Describes where keyed state lives: pickled to the slots, holds settings and no open resource.

    Third-party backends register a class under the entry point group `onceflow.state_backends`.
    """

    native_form: ClassVar[str] = ""
    """Name of the form in which its stores write `native_savepoint`; empty: the canonical one."""

    @abstractmethod
    def open(
        self, context: StateContext, restored: Sequence[StateHandle], reader: StateReader
    ) -> KeyedStateStore:
        """Return a store that holds what `restored` says about the context's key groups.

        `restored` are handles of any number of old subtasks, at any old parallelism; what lies
        outside of the key groups is left out. Empty: a new, empty store.

        Raises:
            StateIncompatible: Written with another max parallelism, or natively by another backend.
            CheckpointCorrupt: A file is damaged or missing.
        """
