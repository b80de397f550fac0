"""Entries of one state by key, the states over them, and their rows in the canonical form.

Both backends share these. An entry table is a dict of *fresh* changes over older entries that a
snapshot may be reading. Only `fresh` is ever written; a backend swaps it for an empty one when it
takes a snapshot.

What a state object keeps for a value: the value itself if nobody can change it, else its bytes.

So a list changed after `set`, or after `get`, changes neither the state nor a snapshot under way,
and both backends give the same answers. A value is checked when it is set: what could not be
restored is refused at once, not by the restore.
"""

from __future__ import annotations

import datetime as dt
import re
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, TypeAlias, TypeVar

import msgspec
import numpy as np
import pyarrow as pa

from onceflow.core.errors import (
    BadStateValue,
    InvariantViolation,
    OnceflowError,
    StateCorrupt,
    StateIncompatible,
)
from onceflow.core.msgspec_decoders import msgpack_decoder
from onceflow.core.state.api.descriptors import ValueStateDescriptor
from onceflow.core.state.api.stores import ListState, ValueState
from onceflow.core.state.keys.key_codec import (
    add_length,
    decode_key,
    encode_key,
    encode_python_keys,
    encode_stored_map_key,
    hash_python_keys,
    split_length,
    to_stored_map_key,
)
from onceflow.core.state.keys.key_groups import key_groups
from onceflow.core.state.snapshots.canonical import StateRows
from onceflow.core.state.snapshots.state_meta import StateMeta
from onceflow.core.state.types.bulk_encoding import encode_scalars
from onceflow.core.state.types.serializers import MsgpackSerializer, Serializer, serializer_of

Stored: TypeAlias = Any
"""A value of a direct type, or `Encoded`."""


class Encoded(bytes):
    """The bytes of a value that could be changed in place."""

    __slots__ = ()


class Absent:
    """Marks that there is no entry."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "ABSENT"


class NoDirectType:
    """The class of no value."""


_READ_BACK: frozenset[type[Any]] = frozenset({dt.datetime, dt.time})
"""Direct types whose values may come back from their bytes as equal ones that behave differently:
a point in time in UTC instead of its zone, a time without `fold`. They are stored as they come
back, so that no result depends on whether there was a restore in between."""


ABSENT = Absent()
DELETED = Absent()
"""Says, in a layer of changes, that the entry is gone, whatever lies below."""


class Cells:
    """Turns values into what is stored, into bytes, and back; for one state."""

    def __init__(self, serializer: Serializer[Any], name: str) -> None:
        self.serializer = serializer
        self._name = name
        self._direct = frozenset(serializer.direct_types)
        self._kept_as_given = self._direct - _READ_BACK - {str}
        self._holds_text = str in self._direct
        self.encode = serializer.encode
        self.decode = serializer.decode
        # A serializer of the user's may give a plain number other bytes.
        self._is_msgpack = type(serializer) is MsgpackSerializer
        # A user's serializer has rules of its own for numbers and classes.
        self._check_given = (
            serializer.check_given if isinstance(serializer, MsgpackSerializer) else _check_none
        )
        # One class, compared by `is`, is faster than a look into a set for each record.
        self.unchecked: type[Any] = _find_only(self._kept_as_given)
        """The class whose values are stored unseen; `NoDirectType` unless there is one."""
        self.direct: type[Any] = _find_only(self._direct - _READ_BACK)
        """The class whose values are stored as they are; `NoDirectType` unless there is one."""

    def to_checking(self) -> Cells:
        """Return cells that store the same, and refuse what would be rounded; see `Serializer`."""
        return Cells(self.serializer.to_checking(), self._name)

    def freeze(self, value: Any) -> Stored:
        """Return what to store for `value`.

        Raises:
            BadStateValue: It is not of the state's type.
        """
        if value.__class__ in self._kept_as_given:
            return value
        # Text may hold half of a surrogate pair, which has no bytes; ASCII, the most of it, not.
        if value.__class__ is str and self._holds_text and value.isascii():
            return value
        try:
            data = self.encode(value)
            # Decoding at once shows whether a restore could read the value.
            read_back = self.decode(data)
            self._check_given(data, read_back)
        except Exception as error:  # a serializer may be the user's, and raise anything
            raise BadStateValue(
                f"state {self._name!r} holds {self.serializer.signature} and cannot hold"
                f" {value!r:.80} ({type(value).__name__}): {type(error).__name__}: {error}"
            ) from error
        # A subclass of a direct type, an IntEnum say, comes back as the plain type: stored like
        # that, it is the same before and after a restore.
        return read_back if read_back.__class__ in self._direct else Encoded(data)

    def thaw(self, stored: Stored) -> Any:
        """Return the value of what was stored: the caller's own, to change as it likes."""
        return self.decode(stored) if stored.__class__ is Encoded else stored

    def to_bytes(self, stored: Stored) -> bytes:
        """Return the bytes for a snapshot."""
        if stored.__class__ is Encoded:
            return bytes(stored)
        try:
            return self.encode(stored)
        except (OnceflowError, MemoryError):
            raise
        except Exception as error:
            raise self._not_encoded(error) from error

    def to_binary(self, stored: Sequence[Stored]) -> pa.Array:
        """Return `to_bytes` of each as a large_binary array; in one go when all are of one kind."""
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
        except (OnceflowError, MemoryError):
            raise
        except Exception as error:
            raise self._not_encoded(error) from error

    def _not_encoded(self, error: Exception) -> BadStateValue:
        """Return what is told of `error`; a serializer may be the user's, and raise anything."""
        return BadStateValue(
            f"state {self._name!r} holds a value that its own {self.serializer.signature} does not"
            f" encode: {type(error).__name__}: {error}; a serializer must encode every value of its"
            " direct_types"
        )

    def from_bytes(self, data: bytes) -> Stored:
        """Return what to store for bytes of a snapshot.

        Raises:
            StateIncompatible: The type of the same name no longer takes them.
        """
        try:
            value = self.decode(data)
        except (OnceflowError, MemoryError):
            raise
        except Exception as error:  # a serializer may be the user's, and raise anything
            raise StateIncompatible(
                f"state {self._name!r} does not read as {self.serializer.signature} any more:"
                f" {type(error).__name__}: {error}; give new fields a default and leave the types"
                " of old ones, or give the state another name"
            ) from error
        return value if value.__class__ in self._direct else Encoded(data)


def _find_only(classes: frozenset[type[Any]]) -> type[Any]:
    return next(iter(classes)) if len(classes) == 1 else NoDirectType


def _check_none(data: bytes, read_back: Any) -> None:
    """Take every value."""


class MapKeys:
    """The keys of one map state: which there may be, and what stands for them in memory."""

    def __init__(self, key_type: Any, name: str) -> None:
        self._name = name
        self._cells = Cells(serializer_of(key_type), name)
        self.signature = serializer_of(key_type).signature

    def to_put(self, key: Any) -> Any:
        """Return what stands in memory for a key that is put; see `to_stored_map_key`.

        Raises:
            BadStateValue: It is None, cannot be hashed for ever, or is not of the declared type.
        """
        if key.__class__ is not self._cells.unchecked:
            frozen = self._cells.freeze(key)
            # Read back, the key would be of another type than the one that was put.
            if frozen.__class__ is not key.__class__ and not isinstance(key, tuple):
                raise BadStateValue(
                    f"map state {self._name!r} has keys of {self.signature}, not"
                    f" {type(key).__name__}: {key!r:.80}"
                )
        return to_stored_map_key(key)


KEYS_A_SLICE = 8192
"""Keys encoded before the interpreter is offered to the thread that processes: about 1 ms."""
_YIELD_S = 50e-6
"""Any sleep offers the interpreter: this one is just long enough for another thread to take it."""

_encode_list = msgspec.msgpack.Encoder().encode
_decode_list = msgpack_decoder(list[bytes]).decode


def pack_list(elements: Iterable[Any], cells: Cells) -> bytes:
    """Return a list state's stored elements as the bytes of one row's value."""
    return _encode_list([cells.to_bytes(element) for element in elements])


def unpack_list(data: bytes, cells: Cells) -> list[Any]:
    """Return the stored elements that `pack_list` made `data` of.

    Raises:
        StateCorrupt: The bytes are no list.
    """
    try:
        return [cells.from_bytes(element) for element in _decode_list(data)]
    except msgspec.DecodeError as error:
        raise StateCorrupt(f"a list of a snapshot cannot be read: {error}") from error


def filter_alive(elements: list[Any], expired: Callable[[Any], bool]) -> Any:
    """Return the elements that have not expired: the same list if none has, ABSENT if all have."""
    alive = [element for element in elements if not expired(element)]
    return elements if len(alive) == len(elements) else alive or ABSENT


def map_row_key(key: Any, stored: Any) -> bytes:
    """Return the row key of one entry of a map state, whose map key is as `to_stored_map_key`."""
    return add_length(encode_key(key)) + encode_stored_map_key(stored)


def split_map_row_key(data: bytes) -> tuple[Any, Any]:
    """Return the key and the map key that `map_row_key` made `data` of.

    Raises:
        StateCorrupt: The bytes are no such key.
    """
    try:
        key, end = split_length(data)
    except ValueError as error:
        raise StateCorrupt(
            f"a snapshot holds {data!r:.80}, which does not read as the key of a map state:"
            f" {error}; restore an older checkpoint"
        ) from error
    return decode_key(key), decode_key(data[end:])


def upgrade_map_keys(meta: StateMeta, rows: StateRows) -> StateRows:
    """Return rows of a state with a map's keys as `map_row_key` writes them.

    An older version kept the zeros behind a decimal's last digit.
    """
    if meta.kind != "map" or not _MAY_HOLD_DECIMALS.search(meta.signature.partition(" -> ")[0]):
        return rows
    # Decoding and encoding again writes each key as this version does, whatever wrote it.
    pairs = map(split_map_row_key, rows.keys.to_pylist())
    keys = [map_row_key(key, to_stored_map_key(map_key)) for key, map_key in pairs]
    return StateRows(rows.groups, pa.array(keys, pa.large_binary()), rows.values)


_MAY_HOLD_DECIMALS = re.compile(r"\b(Decimal|any)\b")


class EntryRows:
    """How the entries of a value state become rows: one row an entry."""

    def __init__(self, cells: Cells) -> None:
        self.cells = cells

    def rows(self, entries: Mapping[Any, Any], max_parallelism: int) -> Iterator[StateRows]:
        """Yield the rows of all entries; lets other threads run every thousand keys or so."""
        keys, values = iter(entries), iter(entries.values())
        while piece := list(islice(keys, KEYS_A_SLICE)):
            yield self._encode(piece, list(islice(values, KEYS_A_SLICE)), max_parallelism)
            time.sleep(_YIELD_S)

    def rows_of_pairs(
        self, pairs: Iterator[tuple[Any, Any]], max_parallelism: int
    ) -> Iterator[StateRows]:
        """Do what `rows` does for pairs of a key and its entry."""
        while piece := dict(islice(pairs, KEYS_A_SLICE)):
            yield from self.rows(piece, max_parallelism)

    def encode_changes(
        self, changes: Mapping[Any, Any], max_parallelism: int
    ) -> Iterator[StateRows]:
        """Yield the rows of a layer of changes, in which DELETED stands for an entry that is gone.

        A row with a null value says that older rows of its key do not count any more. Any row of a
        value's or a list's key says so, too.
        """
        gone = [key for key, entry in changes.items() if entry is DELETED]
        alive = ((key, entry) for key, entry in changes.items() if entry is not DELETED)
        yield from self.rows_of_pairs(alive, max_parallelism)
        yield from self._removals(gone, max_parallelism)

    def _removals(self, keys: Sequence[Any], max_parallelism: int) -> Iterator[StateRows]:
        for start in range(0, len(keys), KEYS_A_SLICE):
            piece = keys[start : start + KEYS_A_SLICE]
            groups = key_groups(hash_python_keys(piece), max_parallelism)
            nothing = pa.nulls(len(piece), pa.large_binary())
            yield StateRows(groups, self._encode_owners(piece), nothing)
            time.sleep(_YIELD_S)

    def _encode(
        self, keys: Sequence[Any], entries: Sequence[Any], max_parallelism: int
    ) -> StateRows:
        counts, row_keys, row_values = self.encode(keys, entries)
        groups = key_groups(hash_python_keys(keys), max_parallelism)
        return StateRows(np.repeat(groups, counts), row_keys, row_values)

    def _encode_owners(self, keys: Sequence[Any]) -> pa.Array:
        """Return what the keys of all rows of each entry begin with."""
        return encode_python_keys(keys)

    def encode(
        self, keys: Sequence[Any], entries: Sequence[Any]
    ) -> tuple[int | list[int], pa.Array, pa.Array]:
        """Return how many rows each entry has, and the keys and values of all of them."""
        return 1, encode_python_keys(keys), self.cells.to_binary(entries)

    def filter_alive(self, entry: Any, expired: Callable[[Any], bool]) -> Any:
        """Return what of `entry` has not expired: itself, another entry, or ABSENT."""
        return ABSENT if expired(entry) else entry

    def load(self, rows: StateRows, into: dict[Any, Any]) -> None:
        """Put the entries of `rows` into a dict of entries."""
        from_bytes = self.cells.from_bytes
        for key, value in zip(rows.keys.to_pylist(), rows.values.to_pylist(), strict=True):
            into[decode_key(key)] = from_bytes(value)


class ListRows(EntryRows):
    """Entries that are lists of stored elements: one row a list."""

    def encode(
        self, keys: Sequence[Any], entries: Sequence[Any]
    ) -> tuple[int | list[int], pa.Array, pa.Array]:
        """Return how many rows each entry has, and the keys and values of all of them."""
        lists = [pack_list(entry, self.cells) for entry in entries]
        return 1, encode_python_keys(keys), pa.array(lists, pa.large_binary())

    def filter_alive(self, entry: Any, expired: Callable[[Any], bool]) -> Any:
        """Return the elements that have not expired."""
        return filter_alive(entry, expired)

    def load(self, rows: StateRows, into: dict[Any, Any]) -> None:
        """Put the entries of `rows` into a dict of entries."""
        for key, value in zip(rows.keys.to_pylist(), rows.values.to_pylist(), strict=True):
            into[decode_key(key)] = unpack_list(value, self.cells)


class MapRows(EntryRows):
    """Entries that are dicts, by what `to_stored_map_key` returns: one row for each item."""

    def encode(
        self, keys: Sequence[Any], entries: Sequence[Any]
    ) -> tuple[int | list[int], pa.Array, pa.Array]:
        """Return how many rows each entry has, and the keys and values of all of them."""
        row_keys: list[bytes] = []
        values: list[Stored] = []
        for key, entry in zip(keys, entries, strict=True):
            prefix = add_length(encode_key(key))
            row_keys.extend(prefix + encode_stored_map_key(stored) for stored in entry)
            values.extend(entry.values())
        packed_keys = pa.array(row_keys, pa.large_binary())
        return list(map(len, entries)), packed_keys, self.cells.to_binary(values)

    def encode_changes(
        self, changes: Mapping[Any, Any], max_parallelism: int
    ) -> Iterator[StateRows]:
        """Yield the rows of a layer of changes: of each key one without a value, and its items."""
        alive = ((key, entry) for key, entry in changes.items() if entry is not DELETED)
        yield from self.rows_of_pairs(alive, max_parallelism)
        yield from self._removals(list(changes), max_parallelism)

    def _encode_owners(self, keys: Sequence[Any]) -> pa.Array:
        return pa.array([add_length(encode_key(key)) for key in keys], pa.large_binary())

    def filter_alive(self, entry: Any, expired: Callable[[Any], bool]) -> Any:
        """Return the entries that have not expired."""
        alive = {key: stored for key, stored in entry.items() if not expired(stored)}
        return entry if len(alive) == len(entry) else alive or ABSENT

    def load(self, rows: StateRows, into: dict[Any, Any]) -> None:
        """Put the entries of `rows` into a dict of entries."""
        for key, value in zip(rows.keys.to_pylist(), rows.values.to_pylist(), strict=True):
            outer, inner = split_map_row_key(key)
            into.setdefault(outer, {})[to_stored_map_key(inner)] = self.cells.from_bytes(value)


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
        self.fresh_max = sys.maxsize
        """The number of new entries above which `spill` is called."""

    @abstractmethod
    def find_older(self, key: Any) -> Any:
        """Return what lies below `fresh` at `key`, to be read only, or ABSENT."""

    def find(self, key: Any) -> Any:
        """Return the entry at `key`, to be read only, or ABSENT."""
        entry = self.fresh.get(key, ABSENT)
        if entry is ABSENT:
            return self.find_older(key)
        return ABSENT if entry is DELETED else entry

    def put(self, key: Any, entry: Any) -> None:
        """Make `entry` the entry at `key`."""
        fresh = self.fresh
        fresh[key] = entry
        if len(fresh) > self.fresh_max:
            self.spill()

    def spill(self) -> None:
        """Move `fresh`, which has more than `fresh_max` entries, out of memory."""
        raise InvariantViolation("entries without a bound are never too many")

    def delete(self, key: Any) -> None:
        """Leave no entry at `key`."""
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
        """Make `value` the value."""
        table = self._table
        if value.__class__ is self._unchecked:
            # What `put` does, for every record: a call takes as long as all of it.
            fresh = table.fresh
            fresh[self._current.key] = value
            if len(fresh) > table.fresh_max:
                table.spill()
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

    def update(self, values: Iterable[T]) -> None:
        """Make `values` the list."""
        freeze = self._table.cells.freeze
        frozen = [freeze(value) for value in values]
        if frozen:
            self._table.put(self._table.current.key, frozen)
        else:
            self.clear()

    def clear(self) -> None:
        """Forget every element."""
        self._table.delete(self._table.current.key)

    def _extend(self, frozen: list[Stored]) -> None:
        table, key = self._table, self._table.current.key
        own = table.fresh.get(key, ABSENT)
        # No snapshot reads what is in `fresh`, so the list may grow in place.
        if own.__class__ is list:
            own.extend(frozen)
            return
        # DELETED hides what the layers below still hold.
        older: Any = ABSENT if own is DELETED else table.find_older(key)
        table.put(key, frozen if older is ABSENT else list(older) + frozen)
