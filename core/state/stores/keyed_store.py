"""Keyed state as operators use it, and the interface of a state backend.

One thread, the subtask's, calls everything here except `PendingSnapshot.upload` and
`PendingSnapshot.discard`, which may run on another thread at the same time.

The caller owns each value that it passes or gets. If it changes a list after `set` or after `get`,
the state and its snapshots do not change until the list is `set` again. This holds for every
backend.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Generic, TypeVar

import pyarrow as pa

from onceflow.core.protocol.ids import CheckpointId
from onceflow.core.state.aggregates.accumulators import AccumulatorTable
from onceflow.core.state.api import descriptors
from onceflow.core.state.api.context import StateContext, StateHandle, StateReader, StateWriter

T = TypeVar("T")
K = TypeVar("K")
V = TypeVar("V")
IN = TypeVar("IN")
OUT = TypeVar("OUT")


class ValueState(ABC, Generic[T]):
    """A value of the current key.

    A value of a mutable type (a list, a dataclass) is encoded by each `set` and decoded by each
    `get`; a number or a text is stored directly. On the heap there are no further costs. In RocksDB
    a value that is not among the `cache_entries` in memory is read from disk. The values of a batch
    are read together before its first record, and a changed value is written once a checkpoint.
    """

    @abstractmethod
    def get(self) -> T:
        """Return the value, or the descriptor's default (None unless given) if there is none."""

    @abstractmethod
    def set(self, value: T) -> None:
        """Set the value; None clears it.

        Raises:
            BadStateValue: `value` is not of the descriptor's type, so it could never be restored.
        """

    @abstractmethod
    def clear(self) -> None:
        """Clear the value; `get` returns the default again."""


class ReducingState(ABC, Generic[T]):
    """A value of the current key, to which a function reduces all added values."""

    @abstractmethod
    def get(self) -> T | None:
        """Return the value, or None if nothing was added."""

    @abstractmethod
    def add(self, value: T) -> None:
        """Replace the value by the function's result for the value so far and `value`.

        Raises:
            BadStateValue: `value` or the result is None, or not of the descriptor's type.
        """

    @abstractmethod
    def clear(self) -> None:
        """Clear the value."""


class AggregatingState(ABC, Generic[IN, OUT]):
    """A reducing state whose input, accumulator and result may have three different types."""

    @abstractmethod
    def get(self) -> OUT | None:
        """Return the function's result for the accumulator, or None if nothing was added."""

    @abstractmethod
    def add(self, value: IN) -> None:
        """Add `value` to the accumulator of the current key.

        Raises:
            BadStateValue: The function returned None, or a value that is not of the descriptor's
                type.
        """

    @abstractmethod
    def clear(self) -> None:
        """Clear the accumulator."""


class ListState(ABC, Generic[T]):
    """A list of the current key, stored and snapshotted as a whole.

    `get` decodes the whole list. The first `add` to a key after each checkpoint copies its list,
    later ones do not. RocksDB also reads and writes the list as one row. For a list that grows
    without bound, use a map state with a number as key.
    """

    @abstractmethod
    def get(self) -> list[T]:
        """Return the elements in the order in which they were added; empty if there are none."""

    @abstractmethod
    def add(self, value: T) -> None:
        """Append `value`.

        Raises:
            BadStateValue: `value` is not of the descriptor's type.
        """

    @abstractmethod
    def add_all(self, values: Iterable[T]) -> None:
        """Append all of `values`, or none of them if one has a wrong type.

        Raises:
            BadStateValue: A value is not of the descriptor's type.
        """

    @abstractmethod
    def update(self, values: Iterable[T]) -> None:
        """Replace the list by `values`. If there are none, the list is cleared.

        Raises:
            BadStateValue: A value is not of the descriptor's type; nothing has changed.
        """

    @abstractmethod
    def clear(self) -> None:
        """Clear the list."""


class MapState(ABC, Generic[K, V]):
    """A mapping of the current key, read and written one entry at a time.

    A key is a str, bytes, int, bool, date, datetime or Decimal, or a tuple of them, and never None.
    A value has the descriptor's type.

    The cost of a call, where n is the number of entries under the current key:
        heap      `get`, `put`, `remove`, `contains`: one dict look-up; in addition, the first
                  change of a key after each checkpoint copies its n entries. `keys`, `items`: n.
                  `clear`: 1.
        RocksDB   each entry is a row. `get`, `put`, `remove`, `contains`: one row, from memory or,
                  if it is not among the `cache_entries` there, from disk (`put` only writes, with
                  the next checkpoint). `keys`, `items`, `clear` read all n rows.
    """

    @abstractmethod
    def get(self, key: K) -> V | None:
        """Return the value under `key`, or None if there is none."""

    @abstractmethod
    def put(self, key: K, value: V) -> None:
        """Set the value under `key`, and replace an existing one.

        Raises:
            BadStateValue: Key or value is not of the descriptor's type; nothing has changed.
        """

    @abstractmethod
    def remove(self, key: K) -> None:
        """Remove `key` if it exists."""

    @abstractmethod
    def contains(self, key: K) -> bool:
        """Return True if `key` exists, even if its value is None."""

    @abstractmethod
    def keys(self) -> Iterator[K]:
        """Return the keys at the time of the call, each once.

        The order is not defined: it differs between backends and after a restart. The keys are
        collected first. So a loop over them may change the mapping, and does not see the change.
        """

    @abstractmethod
    def items(self) -> Iterator[tuple[K, V]]:
        """Return the entries at the time of the call, each once; order and changes as in `keys`."""

    def put_all(self, entries: Mapping[K, V]) -> None:
        """Put each entry of `entries`, one after the other.

        Raises:
            BadStateValue: An entry is not of the descriptor's type; the entries before it are put.
        """
        for key, value in entries.items():
            self.put(key, value)

    def values(self) -> Iterator[V]:
        """Return the values at the time of the call; see `keys` for order and changes."""
        return iter([value for _, value in self.items()])

    def is_empty(self) -> bool:
        """Return True if there is no entry. Costs as much as `keys`."""
        return next(self.keys(), None) is None

    @abstractmethod
    def clear(self) -> None:
        """Remove all entries of the current key."""


class PendingKeyedSnapshot(ABC):
    """State frozen at a barrier and not yet durable. It is either uploaded or discarded."""

    @abstractmethod
    def upload(self, writer: StateWriter) -> tuple[StateHandle, ...]:
        """Make the frozen state durable and return all handles needed to restore it.

        Runs on another thread than the owner's, which continues to change the state. A shared file
        that a completed checkpoint already holds is not uploaded; its handle is returned again.
        After a failure, the storage deletes uploaded files together with the checkpoint.

        Raises:
            StorageError: The storage refused the upload. The state itself is unharmed.
        """

    @abstractmethod
    def discard(self) -> None:
        """Release the frozen state without uploading it. Idempotent; may follow `upload`."""


class KeyedStateStore(ABC):
    """The keyed state of one operator's subtask. Lost with the process, except for snapshots."""

    @abstractmethod
    def set_current_key(self, key: Any) -> None:
        """Select the key that each state object reads and writes. Called for each record.

        `key` is the Python value of the key column, or a tuple of several columns' values. It is
        not checked here: the snapshot refuses a key of a type that `hash_key` does not accept.
        """

    @abstractmethod
    def current_key(self) -> Any:
        """Return the key that was passed last to `set_current_key`."""

    def prefetch(self, keys: Sequence[Any]) -> None:  # noqa: B027 - optional hook
        """Announce the keys of the batch that is processed next; keys may repeat.

        Changes no state. A store that reads from disk reads all of them together, in order, which
        is several times as fast as one by one.
        """

    @abstractmethod
    def value_state(self, descriptor: descriptors.ValueStateDescriptor[T]) -> ValueState[T]:
        """Return the state of this name, restored if a snapshot held it.

        Returns the same object for the same name, so a function may ask again.

        Raises:
            StateIncompatible: The snapshot holds the name with another kind or type.
            ConfigError: The operator has opened without asking for the state.
        """

    @abstractmethod
    def entries(self, descriptor: descriptors.ValueStateDescriptor[T]) -> Iterator[tuple[Any, T]]:
        """Yield (key, value) of each key that has a value, in any order.

        The state must have been asked for, and must not change during the iteration.
        """

    @abstractmethod
    def list_state(self, descriptor: descriptors.ListStateDescriptor[T]) -> ListState[T]:
        """Return the list state of this name, like `value_state`."""

    @abstractmethod
    def map_state(self, descriptor: descriptors.MapStateDescriptor[K, V]) -> MapState[K, V]:
        """Return the map state of this name, like `value_state`."""

    @abstractmethod
    def accumulators(
        self,
        name: str,
        key_types: Sequence[pa.DataType],
        columns: Sequence[descriptors.AccumulatorColumn],
        *,
        namespaced: bool = False,
        ttl: descriptors.StateTtlConfig | None = None,
        member_type: pa.DataType | None = None,
    ) -> AccumulatorTable:
        """Return the running aggregates of this name, restored if a snapshot held them.

        If `namespaced`, they are stored for each key and namespace: a 64-bit number before the key
        columns, which does not affect the key group. With a `member_type`, they are stored for each
        key and member: a value after the key columns, which does not affect the key group either.
        With a `ttl`, the aggregates of a key that was not used for that time start again from
        nothing.

        Raises:
            ConfigError: A type cannot be a key, or cannot be aggregated.
            StateIncompatible: The snapshot holds the name with other types, columns or operations.
        """

    def clean(self, count: int) -> None:  # noqa: B027 - optional hook
        """Check about `count` further entries of each expiring state, and delete expired ones.

        Called between batches, so that all entries are checked eventually. A store without this
        method keeps expired entries that are neither read nor cleared.
        """

    def finish_open(self) -> tuple[str, ...]:
        """Declare that the operator has asked for all its states.

        Return the dropped ones, for people.

        From here on no other state can be asked for. A store that does not override this drops and
        refuses nothing.

        Raises:
            StateIncompatible: The snapshot holds a state that the operator has not asked for.
        """
        return ()

    @abstractmethod
    def snapshot(self, checkpoint: CheckpointId) -> PendingKeyedSnapshot:
        """Freeze the current state; takes a few milliseconds for a million keys."""

    @abstractmethod
    def savepoint(self, checkpoint: CheckpointId) -> PendingKeyedSnapshot:
        """Freeze the state in the canonical form: self-contained, and restorable by any backend."""

    def native_savepoint(self, checkpoint: CheckpointId) -> PendingKeyedSnapshot:
        """Freeze the state, self-contained, in the form that `StateBackend.native_form` names."""
        return self.savepoint(checkpoint)

    @abstractmethod
    def notify_completed(self, checkpoint: CheckpointId) -> None:
        """Handle that `checkpoint` is decided: later snapshots may reference its shared files.

        The call may be late, repeated or missing. Then later snapshots upload more files than
        needed.
        """

    @abstractmethod
    def notify_aborted(self, checkpoint: CheckpointId) -> None:
        """Handle that `checkpoint` is aborted: no later snapshot may reference its files."""

    @abstractmethod
    def close(self) -> None:
        """Release memory, files and threads; unfinished uploads fail. Idempotent."""


class StateBackend(ABC):
    """The settings of a backend for keyed state. Pickled to the slots; holds no open resource.

    Third-party backends register a class under the entry point group `onceflow.state_backends`.
    """

    native_form: ClassVar[str] = ""
    """The name of the form in which its stores write `native_savepoint`; empty for the canonical
    one."""

    @abstractmethod
    def open(
        self, context: StateContext, restored: Sequence[StateHandle], reader: StateReader
    ) -> KeyedStateStore:
        """Return a store that holds the state in `restored` of the context's key groups.

        `restored` holds handles of any number of old subtasks, at any old parallelism. State of
        other key groups is left out. If it is empty, the store is empty.

        Raises:
            StateIncompatible: Written with another max parallelism, or natively by another backend.
            CheckpointCorrupt: A file is damaged or missing.
        """
