"""The entries of one state by key, the state objects over them, and their canonical rows.

Both backends share this module. An entry table is a dict of *fresh* changes over older entries that
a snapshot may be reading. Only `fresh` is ever written; a backend replaces it by an empty dict when
it takes a snapshot.

A value of an immutable type is stored directly, any other value as its bytes. So a list that is
changed after `set`, or after `get`, changes neither the state nor a running snapshot, and both
backends give the same answers. A value is checked when it is set: a value that could not be
restored is refused at once, not by the restore.
"""

from __future__ import annotations

import datetime as dt
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, TypeAlias, TypeVar

import msgspec
import numpy as np
import pyarrow as pa

from onceflow.core import errors
from onceflow.core.decoding import msgpack_decoder
from onceflow.core.state.api.descriptors import ValueStateDescriptor
from onceflow.core.state.keys import key_codec
from onceflow.core.state.keys.key_groups import key_groups
from onceflow.core.state.snapshots.canonical import StateRows
from onceflow.core.state.stores.keyed_store import ListState, ValueState
from onceflow.core.state.types.serializers import (
    MsgpackSerializer,
    Serializer,
    encode_scalars,
    serializer_of,
)

Stored: TypeAlias = Any
"""A value of a direct type, or `Encoded`."""


class Encoded(bytes):
    """The bytes of a value of a mutable type."""

    __slots__ = ()


class Absent:
    """A marker for a missing entry."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "ABSENT"


class NoDirectType:
    """A class that has no values."""


_READ_BACK: frozenset[type[Any]] = frozenset({dt.datetime, dt.time})
"""The direct types whose values may differ in behavior after encoding and decoding, although they
are equal: a point in time in UTC instead of its zone, a time without `fold`. They are stored in the
decoded form, so that no result depends on a restore in between."""


ABSENT = Absent()
DELETED = Absent()
"""The marker in a layer of changes of a deleted entry, even if a lower layer has the entry."""


class Cells:
    """Converts values of one state to their stored form, to bytes, and back."""

    def __init__(self, serializer: Serializer[Any], name: str) -> None:
        self.serializer = serializer
        self._name = name
        self._direct = frozenset(serializer.direct_types)
        self._kept_as_given = self._direct - _READ_BACK - {str}
        self._holds_text = str in self._direct
        self.encode = serializer.encode
        self.decode = serializer.decode
        # A user's serializer may encode a plain number differently.
        self._is_msgpack = type(serializer) is MsgpackSerializer
        # A user's serializer has its own rules for numbers and classes.
        self._check_given = (
            serializer.check_given if isinstance(serializer, MsgpackSerializer) else _check_none
        )
        # Comparing one class by `is` is faster than a look-up in a set for each record.
        self.unchecked: type[Any] = _find_only(self._kept_as_given)
        """The class whose values are stored without a check, or `NoDirectType`."""
        self.direct: type[Any] = _find_only(self._direct - _READ_BACK)
        """The class whose values are stored directly, or `NoDirectType`."""

    def to_checking(self) -> Cells:
        """Return cells with the same stored form that refuse to round values; see `Serializer`."""
        return Cells(self.serializer.to_checking(), self._name)

    def freeze(self, value: Any) -> Stored:
        """Return the stored form of `value`.

        Raises:
            BadStateValue: `value` is not of the state's type.
        """
        if value.__class__ in self._kept_as_given:
            return value
        # A str may contain a lone surrogate, which cannot be encoded. ASCII, the common case, needs
        # no check.
        if value.__class__ is str and self._holds_text and value.isascii():
            return value
        try:
            data = self.encode(value)
            # Decoding immediately shows whether a restore could read the value.
            read_back = self.decode(data)
            self._check_given(data, read_back)
        except Exception as error:  # a user's serializer may raise anything
            raise errors.BadStateValue(
                f"state {self._name!r} holds {self.serializer.signature} and cannot hold"
                f" {value!r:.80} ({type(value).__name__}): {type(error).__name__}: {error}"
            ) from error
        # A subclass of a direct type, such as an IntEnum, is decoded as the plain type. It is
        # stored in that form, so that it is the same before and after a restore.
        return read_back if read_back.__class__ in self._direct else Encoded(data)

    def thaw(self, stored: Stored) -> Any:
        """Return the value of a stored form. The caller may change the result."""
        return self.decode(stored) if stored.__class__ is Encoded else stored

    def to_bytes(self, stored: Stored) -> bytes:
        """Return the bytes for a snapshot."""
        if stored.__class__ is Encoded:
            return bytes(stored)
        try:
            return self.encode(stored)
        except (errors.OnceflowError, MemoryError):
            raise
        except Exception as error:
            raise self._not_encoded(error) from error

    def to_binary(self, stored: Sequence[Stored]) -> pa.Array:
        """Return `to_bytes` of each as a large_binary array, in one call if all have one class."""
        classes = set(map(type, stored))
        if Encoded in classes:
            whole = len(classes) == 1
            return pa.array(stored if whole else map(self.to_bytes, stored), pa.large_binary())
        if self._is_msgpack and len(classes) == 1:
            packed = encode_scalars(stored, classes.pop())
            if packed is not None:
                return packed
        try:
            return pa.array(map(self.encode, stored), pa.large_binary())
        except (errors.OnceflowError, MemoryError):
            raise
        except Exception as error:
            raise self._not_encoded(error) from error

    def _not_encoded(self, error: Exception) -> errors.BadStateValue:
        """Return the error for `error`, which a user's serializer raised while encoding."""
        return errors.BadStateValue(
            f"the serializer {self.serializer.signature} of state {self._name!r} cannot encode a"
            f" value: {type(error).__name__}: {error}. A serializer must encode every value of"
            " its direct_types"
        )

    def from_bytes(self, data: bytes) -> Stored:
        """Return the stored form of bytes of a snapshot.

        Raises:
            StateIncompatible: The type of the same name can no longer read the bytes.
        """
        try:
            value = self.decode(data)
        except (errors.OnceflowError, MemoryError):
            raise
        except Exception as error:  # a user's serializer may raise anything
            raise errors.StateIncompatible(
                f"state {self._name!r} can no longer be read as {self.serializer.signature}:"
                f" {type(error).__name__}: {error}. Give new fields a default and keep the types"
                " of old fields, or give the state another name"
            ) from error
        return value if value.__class__ in self._direct else Encoded(data)


def _find_only(classes: frozenset[type[Any]]) -> type[Any]:
    return next(iter(classes)) if len(classes) == 1 else NoDirectType


def _check_none(data: bytes, read_back: Any) -> None:
    """Accept every value."""


class MapKeys:
    """The keys of one map state: the check of their type, and their representation in memory."""

    def __init__(self, key_type: Any, name: str) -> None:
        self._name = name
        self._cells = Cells(serializer_of(key_type), name)
        self.signature = serializer_of(key_type).signature

    def to_put(self, key: Any) -> Any:
        """Return the representation in memory of a key to put; see `to_stored_map_key`.

        Raises:
            BadStateValue: `key` is None, has no stable hash, or is not of the declared type.
        """
        if key.__class__ is not self._cells.unchecked:
            frozen = self._cells.freeze(key)
            # After a restore, the key would have another type than the one that was put.
            if frozen.__class__ is not key.__class__ and not isinstance(key, tuple):
                raise errors.BadStateValue(
                    f"map state {self._name!r} has keys of {self.signature}, not"
                    f" {type(key).__name__}: {key!r:.80}"
                )
        return key_codec.to_stored_map_key(key)


KEYS_A_SLICE = 8192
"""The number of keys to encode before the processing thread may run: about 1 ms."""
_YIELD_S = 50e-6
"""The length of a sleep, just long enough for another thread to take the interpreter."""

_encode_list = msgspec.msgpack.Encoder().encode
_decode_list = msgpack_decoder(list[bytes]).decode


def pack_list(elements: Iterable[Any], cells: Cells) -> bytes:
    """Return a list state's stored elements as the bytes of one row's value."""
    return _encode_list([cells.to_bytes(element) for element in elements])


def unpack_list(data: bytes, cells: Cells) -> list[Any]:
    """Return the stored elements that `pack_list` encoded as `data`.

    Raises:
        StateCorrupt: The bytes are no list.
    """
    try:
        return [cells.from_bytes(element) for element in _decode_list(data)]
    except msgspec.DecodeError as error:
        raise errors.StateCorrupt(f"a list of a snapshot cannot be read: {error}") from error


def filter_alive(elements: list[Any], expired: Callable[[Any], bool]) -> Any:
    """Return the elements that have not expired: the same list if none has, ABSENT if all have."""
    alive = [element for element in elements if not expired(element)]
    return elements if len(alive) == len(elements) else alive or ABSENT


def map_row_key(key: Any, stored: Any) -> bytes:
    """Return the row key of one entry of a map state; `stored` is from `to_stored_map_key`."""
    return key_codec.add_length(key_codec.encode_key(key)) + key_codec.encode_stored_map_key(stored)


def split_map_row_key(data: bytes) -> tuple[Any, Any]:
    """Return the key and the map key that `map_row_key` encoded as `data`.

    Raises:
        StateCorrupt: The bytes are no key of a map state.
    """
    try:
        key, end = key_codec.split_length(data)
    except ValueError as error:
        raise errors.StateCorrupt(
            f"a snapshot holds {data!r:.80}, which cannot be read as the key of a map state:"
            f" {error}; restore an older checkpoint"
        ) from error
    return key_codec.decode_key(key), key_codec.decode_key(data[end:])


class EntryRows:
    """The conversion of a value state's entries to rows: one row an entry."""

    def __init__(self, cells: Cells) -> None:
        self.cells = cells

    def rows(self, entries: Mapping[Any, Any], max_parallelism: int) -> Iterator[StateRows]:
        """Yield the rows of all entries. Lets other threads run after each few thousand keys."""
        keys, values = iter(entries), iter(entries.values())
        while piece := list(islice(keys, KEYS_A_SLICE)):
            yield self._encode(piece, list(islice(values, KEYS_A_SLICE)), max_parallelism)
            time.sleep(_YIELD_S)

    def rows_of_pairs(
        self, pairs: Iterator[tuple[Any, Any]], max_parallelism: int
    ) -> Iterator[StateRows]:
        """Yield the rows of pairs of a key and its entry, like `rows`."""
        while piece := dict(islice(pairs, KEYS_A_SLICE)):
            yield from self.rows(piece, max_parallelism)

    def encode_changes(
        self, changes: Mapping[Any, Any], max_parallelism: int
    ) -> Iterator[StateRows]:
        """Yield the rows of a layer of changes, in which DELETED means that the entry was deleted.

        A row with a null value means that older rows of its key are invalid. For a value or a list,
        any row of the key means this, too.
        """
        gone = [key for key, entry in changes.items() if entry is DELETED]
        alive = ((key, entry) for key, entry in changes.items() if entry is not DELETED)
        yield from self.rows_of_pairs(alive, max_parallelism)
        yield from self._removals(gone, max_parallelism)

    def _removals(self, keys: Sequence[Any], max_parallelism: int) -> Iterator[StateRows]:
        for start in range(0, len(keys), KEYS_A_SLICE):
            piece = keys[start : start + KEYS_A_SLICE]
            groups = key_groups(key_codec.hash_python_keys(piece), max_parallelism)
            nothing = pa.nulls(len(piece), pa.large_binary())
            yield StateRows(groups, self._encode_owners(piece), nothing)
            time.sleep(_YIELD_S)

    def _encode(
        self, keys: Sequence[Any], entries: Sequence[Any], max_parallelism: int
    ) -> StateRows:
        counts, row_keys, row_values = self.encode(keys, entries)
        groups = key_groups(key_codec.hash_python_keys(keys), max_parallelism)
        return StateRows(np.repeat(groups, counts), row_keys, row_values)

    def _encode_owners(self, keys: Sequence[Any]) -> pa.Array:
        """Return the common start of the keys of all rows of each entry."""
        return key_codec.encode_python_keys(keys)

    def encode(
        self, keys: Sequence[Any], entries: Sequence[Any]
    ) -> tuple[int | list[int], pa.Array, pa.Array]:
        """Return the number of rows of each entry, and the keys and values of all rows."""
        return 1, key_codec.encode_python_keys(keys), self.cells.to_binary(entries)

    def filter_alive(self, entry: Any, expired: Callable[[Any], bool]) -> Any:
        """Return the part of `entry` that has not expired: itself, another entry, or ABSENT."""
        return ABSENT if expired(entry) else entry

    def load(self, rows: StateRows, into: dict[Any, Any]) -> None:
        """Add the entries of `rows` to the dict `into`."""
        from_bytes = self.cells.from_bytes
        for key, value in zip(rows.keys.to_pylist(), rows.values.to_pylist(), strict=True):
            into[key_codec.decode_key(key)] = from_bytes(value)


class ListRows(EntryRows):
    """Entries that are lists of stored elements: one row a list."""

    def encode(
        self, keys: Sequence[Any], entries: Sequence[Any]
    ) -> tuple[int | list[int], pa.Array, pa.Array]:
        """Return the number of rows of each entry, and the keys and values of all rows."""
        lists = [pack_list(entry, self.cells) for entry in entries]
        return 1, key_codec.encode_python_keys(keys), pa.array(lists, pa.large_binary())

    def filter_alive(self, entry: Any, expired: Callable[[Any], bool]) -> Any:
        """Return the elements that have not expired."""
        return filter_alive(entry, expired)

    def load(self, rows: StateRows, into: dict[Any, Any]) -> None:
        """Add the entries of `rows` to the dict `into`."""
        for key, value in zip(rows.keys.to_pylist(), rows.values.to_pylist(), strict=True):
            into[key_codec.decode_key(key)] = unpack_list(value, self.cells)


class MapRows(EntryRows):
    """The rows of map states: one row for each item of an entry.

    An entry is a dict whose keys are results of `to_stored_map_key`.
    """

    def encode(
        self, keys: Sequence[Any], entries: Sequence[Any]
    ) -> tuple[int | list[int], pa.Array, pa.Array]:
        """Return the number of rows of each entry, and the keys and values of all rows."""
        row_keys: list[bytes] = []
        values: list[Stored] = []
        for key, entry in zip(keys, entries, strict=True):
            prefix = key_codec.add_length(key_codec.encode_key(key))
            row_keys.extend(prefix + key_codec.encode_stored_map_key(stored) for stored in entry)
            values.extend(entry.values())
        packed_keys = pa.array(row_keys, pa.large_binary())
        return list(map(len, entries)), packed_keys, self.cells.to_binary(values)

    def encode_changes(
        self, changes: Mapping[Any, Any], max_parallelism: int
    ) -> Iterator[StateRows]:
        """Yield the rows of a layer of changes: for each key a null row, and its items."""
        alive = ((key, entry) for key, entry in changes.items() if entry is not DELETED)
        yield from self.rows_of_pairs(alive, max_parallelism)
        yield from self._removals(list(changes), max_parallelism)

    def _encode_owners(self, keys: Sequence[Any]) -> pa.Array:
        return pa.array(
            [key_codec.add_length(key_codec.encode_key(key)) for key in keys], pa.large_binary()
        )

    def filter_alive(self, entry: Any, expired: Callable[[Any], bool]) -> Any:
        """Return the items that have not expired."""
        alive = {key: stored for key, stored in entry.items() if not expired(stored)}
        return entry if len(alive) == len(entry) else alive or ABSENT

    def load(self, rows: StateRows, into: dict[Any, Any]) -> None:
        """Add the entries of `rows` to the dict `into`."""
        for key, value in zip(rows.keys.to_pylist(), rows.values.to_pylist(), strict=True):
            outer, inner = split_map_row_key(key)
            into.setdefault(outer, {})[key_codec.to_stored_map_key(inner)] = self.cells.from_bytes(
                value
            )


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
        """The changes since the last snapshot: key to the stored form, or DELETED."""
        self.fresh_max = sys.maxsize
        """The number of new entries above which `spill` is called."""

    @abstractmethod
    def find_older(self, key: Any) -> Any:
        """Return the read-only entry below `fresh` at `key`, or ABSENT."""

    def find(self, key: Any) -> Any:
        """Return the read-only entry at `key`, or ABSENT."""
        entry = self.fresh.get(key, ABSENT)
        if entry is ABSENT:
            return self.find_older(key)
        return ABSENT if entry is DELETED else entry

    def put(self, key: Any, entry: Any) -> None:
        """Set the entry at `key`."""
        fresh = self.fresh
        fresh[key] = entry
        if len(fresh) > self.fresh_max:
            self.spill()

    def spill(self) -> None:
        """Move `fresh`, which has more than `fresh_max` entries, out of memory."""
        raise errors.InvariantViolation("entries without a bound are never too many")

    def delete(self, key: Any) -> None:
        """Delete the entry at `key`."""
        self.fresh[key] = DELETED


class EntryValueState(ValueState[T]):
    """A value state over an entry table."""

    __slots__ = ("_current", "_default", "_direct", "_table", "_unchecked")

    def __init__(self, table: EntryTable, descriptor: ValueStateDescriptor[T]) -> None:
        self._table = table
        self._current = table.current
        self._direct = table.cells.direct
        self._unchecked = table.cells.unchecked
        default = descriptor.default
        self._default: Stored = None if default is None else table.cells.freeze(default)

    def get(self) -> T:
        """Return the value, or the default."""
        table = self._table
        stored = table.fresh.get(self._current.key, ABSENT)
        if stored.__class__ is self._direct:
            return stored  # type: ignore[no-any-return]
        if stored is ABSENT:
            stored = table.find_older(self._current.key)
        if stored is ABSENT or stored is DELETED:
            stored = self._default
        return table.cells.thaw(stored)  # type: ignore[no-any-return]

    def set(self, value: T) -> None:
        """Set the value; None clears it."""
        table = self._table
        if value.__class__ is self._unchecked:
            # An inlined `put`, for each record: the call would take as long as its body.
            fresh = table.fresh
            fresh[self._current.key] = value
            if len(fresh) > table.fresh_max:
                table.spill()
        elif value is None:
            table.delete(self._current.key)
        else:
            table.put(self._current.key, table.cells.freeze(value))

    def clear(self) -> None:
        """Clear the value."""
        self._table.delete(self._current.key)


class EntryListState(ListState[T]):
    """A list state over an entry table, whose entries are lists of stored elements.

    A list in `fresh` belongs to the owner's thread and grows in place. Any other may be in a
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
        """Append `value`."""
        self._extend([self._table.cells.freeze(value)])

    def add_all(self, values: Iterable[T]) -> None:
        """Append all of `values`."""
        freeze = self._table.cells.freeze
        frozen = [freeze(value) for value in values]
        if frozen:
            self._extend(frozen)

    def update(self, values: Iterable[T]) -> None:
        """Replace the list by `values`."""
        freeze = self._table.cells.freeze
        frozen = [freeze(value) for value in values]
        if frozen:
            self._table.put(self._table.current.key, frozen)
        else:
            self.clear()

    def clear(self) -> None:
        """Clear the list."""
        self._table.delete(self._table.current.key)

    def _extend(self, frozen: list[Stored]) -> None:
        table, key = self._table, self._table.current.key
        own = table.fresh.get(key, ABSENT)
        # No snapshot reads `fresh`, so the list may grow in place.
        if own.__class__ is list:
            own.extend(frozen)
            return
        # DELETED hides the entry in the layers below.
        older: Any = ABSENT if own is DELETED else table.find_older(key)
        table.put(key, frozen if older is ABSENT else list(older) + frozen)
