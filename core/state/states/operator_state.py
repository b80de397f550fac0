"""The state of one operator's subtask that is not kept by key: lists, shared maps, raw bytes.

It is in memory, and each checkpoint contains all of it. The distribution at a restore, for any old
and new parallelism:

    split       all elements of all subtasks, redistributed: each element to one subtask
    union       all elements of all subtasks, to every subtask
    broadcast   the entries of one subtask, which equal those of every other
    raw-keyed   the bytes of a key group, to the subtask that owns the group

A snapshot has one handle for each mode, named after it, whose bytes are MessagePack:

    [1, [[state name, key signature, value signature, [element, ...]], ...]]

The elements of a broadcast state are, in turn, a key in the form of `key_codec` and its value;
those of a raw keyed state a key group as text and its bytes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypeVar, cast, get_args

import msgspec

from onceflow.core.decoding import msgpack_decoder
from onceflow.core.errors import BadStateValue, ConfigError, StateCorrupt, StateIncompatible
from onceflow.core.protocol.checkpoints.snapshots import StateHandle
from onceflow.core.protocol.splits import redistribute_list
from onceflow.core.state.api.context import StateReader, StateWriter
from onceflow.core.state.api.descriptors import (
    ListStateDescriptor,
    MapStateDescriptor,
    check_state_name,
)
from onceflow.core.state.keys.key_codec import decode_key, encode_map_key, encode_stored_map_key
from onceflow.core.state.keys.key_groups import key_group_of
from onceflow.core.state.stores.entries import Cells, MapKeys, Stored
from onceflow.core.state.stores.keyed_store import ListState, MapState
from onceflow.core.state.types.serializers import serializer_of
from onceflow.core.state.types.type_names import depends_on_values, explain_misfit, reads_as

T = TypeVar("T")
K = TypeVar("K")
V = TypeVar("V")

Mode: TypeAlias = Literal["split", "union", "broadcast", "raw-keyed"]
MODES: tuple[Mode, ...] = get_args(Mode)
_HANDLE = "operator-state-"
_FORMAT = 1


def find_mode(handle: StateHandle) -> Mode | None:
    """Return the mode of the states in `handle`, or None if it holds no operator state."""
    return next((mode for mode in MODES if handle.name == _HANDLE + mode), None)


class Saved(msgspec.Struct, array_like=True, frozen=True):
    """The content of one state of one subtask in a snapshot."""

    name: str
    key_signature: str
    signature: str
    elements: list[bytes]


class _File(msgspec.Struct, array_like=True, frozen=True):
    format: int
    states: list[Saved]


@dataclass(frozen=True, slots=True)
class FrozenOperatorState:
    """A copy of the state at a barrier."""

    states: tuple[tuple[Mode, _State], ...]
    key_groups: range

    def upload(self, writer: StateWriter) -> tuple[StateHandle, ...]:
        """Make the state durable and return its handles. Any thread."""
        handles: list[StateHandle] = []
        for mode in MODES:
            saved = [state.save() for of_mode, state in self.states if of_mode == mode]
            if saved:
                groups = self.key_groups if mode == "raw-keyed" else None
                handles.append(write_saved(writer, mode, saved, groups))
        return tuple(handles)


class _State(ABC):
    """The name, types and content of one state."""

    def __init__(self, name: str) -> None:
        self.name = name

    @property
    def key_signature(self) -> str:
        return ""

    @property
    @abstractmethod
    def signature(self) -> str: ...

    @abstractmethod
    def freeze(self) -> _State: ...

    @abstractmethod
    def save(self) -> Saved: ...

    @abstractmethod
    def restore(self, elements: Sequence[bytes]) -> None: ...

    @abstractmethod
    def check_values(self, elements: Sequence[bytes]) -> None: ...


class OperatorList(_State, ListState[T]):
    """A list of the subtask. A restore redistributes the elements among all subtasks."""

    def __init__(self, name: str, kind: Any) -> None:
        super().__init__(name)
        self.cells = Cells(serializer_of(kind), name)
        self._elements: list[Stored] = []

    @property
    def signature(self) -> str:
        """The signature of an element's type."""
        return self.cells.serializer.signature

    def get(self) -> list[T]:
        """Return the elements in the order in which they were added."""
        return [self.cells.thaw(element) for element in self._elements]

    def add(self, value: T) -> None:
        """Append `value`."""
        self._elements.append(self._freeze_value(value))

    def add_all(self, values: Iterable[T]) -> None:
        """Append all of `values`, or none."""
        self._elements += [self._freeze_value(value) for value in values]

    def update(self, values: Iterable[T]) -> None:
        """Replace the list by `values`."""
        self._elements = [self._freeze_value(value) for value in values]

    def clear(self) -> None:
        """Clear the list."""
        self._elements = []

    def freeze(self) -> OperatorList[T]:
        """Return a copy of the list."""
        copy = OperatorList[T](self.name, self.cells.serializer)
        # A shallow copy is enough: stored elements are frozen, and a change of the list replaces an
        # element.
        copy._elements = list(self._elements)
        return copy

    def save(self) -> Saved:
        """Return the state as bytes."""
        elements = [self.cells.to_bytes(element) for element in self._elements]
        return Saved(self.name, "", self.signature, elements)

    def restore(self, elements: Sequence[bytes]) -> None:
        """Set the list to `elements`."""
        self._elements = [self.cells.from_bytes(element) for element in elements]

    def check_values(self, elements: Sequence[bytes]) -> None:
        """Raise StateIncompatible unless all elements can be read without rounding."""
        checking = self.cells.to_checking()
        for element in elements:
            checking.from_bytes(element)

    def _freeze_value(self, value: T) -> Stored:
        if value is None:
            raise BadStateValue(f"list state {self.name!r} cannot hold None; leave it out")
        return self.cells.freeze(value)


class BroadcastMap(_State, MapState[K, V]):
    """A mapping that is equal on all subtasks. Only records that all subtasks get may change it."""

    def __init__(self, descriptor: MapStateDescriptor[K, V]) -> None:
        super().__init__(descriptor.name)
        self.cells = Cells(serializer_of(descriptor.type), descriptor.name)
        self._descriptor = descriptor
        self._keys = MapKeys(descriptor.key_type, descriptor.name)
        self._entries: dict[bytes, Stored] = {}
        self.may_change = False
        """True while a record is processed that each subtask gets."""

    @property
    def key_signature(self) -> str:
        """The signature of the keys' type."""
        return self._keys.signature

    @property
    def signature(self) -> str:
        """The signature of the values' type."""
        return self.cells.serializer.signature

    def get(self, key: K) -> V | None:
        """Return the value under `key`, or None."""
        stored = self._entries.get(encode_map_key(key))
        return None if stored is None else self.cells.thaw(stored)

    def put(self, key: K, value: V) -> None:
        """Set the value under `key`."""
        self._check()
        if value is None:
            raise BadStateValue(f"broadcast state {self.name!r} cannot hold None; remove the key")
        data = encode_stored_map_key(self._keys.to_put(key))
        self._entries[data] = self.cells.freeze(value)

    def remove(self, key: K) -> None:
        """Remove `key`."""
        self._check()
        self._entries.pop(encode_map_key(key), None)

    def contains(self, key: K) -> bool:
        """Return True if `key` exists."""
        return encode_map_key(key) in self._entries

    def keys(self) -> Iterator[K]:
        """Return the keys at the time of the call."""
        return iter([decode_key(key) for key in self._entries])

    def items(self) -> Iterator[tuple[K, V]]:
        """Return the entries at the time of the call."""
        return iter(
            [(decode_key(key), self.cells.thaw(value)) for key, value in self._entries.items()]
        )

    def is_empty(self) -> bool:
        """Return True if there is no entry."""
        return not self._entries

    def clear(self) -> None:
        """Remove all entries."""
        self._check()
        self._entries.clear()

    def freeze(self) -> BroadcastMap[K, V]:
        """Return a copy of the mapping."""
        copy = BroadcastMap(self._descriptor)
        # A shallow copy is enough, as for a list: entries are replaced and never changed in place.
        copy._entries = dict(self._entries)
        return copy

    def save(self) -> Saved:
        """Return the state as bytes."""
        elements = [
            part
            for key, value in self._entries.items()
            for part in (key, self.cells.to_bytes(value))
        ]
        return Saved(self.name, self.key_signature, self.signature, elements)

    def restore(self, elements: Sequence[bytes]) -> None:
        """Set the entries to those in `elements`."""
        pairs = zip(elements[::2], elements[1::2], strict=True)
        self._entries = {
            encode_map_key(decode_key(key)): self.cells.from_bytes(data) for key, data in pairs
        }

    def check_values(self, elements: Sequence[bytes]) -> None:
        """Raise StateIncompatible unless all values can be read without rounding."""
        checking = self.cells.to_checking()
        for data in elements[1::2]:
            checking.from_bytes(data)

    def _check(self) -> None:
        if not self.may_change:
            raise BadStateValue(
                f"broadcast state {self.name!r} can only be read here. A change would make it"
                " differ between subtasks: change it in process_broadcast()"
            )


class RawKeyedState(_State):
    """Bytes in a function's own format, for each key group of its subtask.

    If the parallelism changes, the bytes of a key group move with its keys. A function updates them
    in `snapshot_state`.
    """

    def __init__(self, name: str, key_groups: range, max_parallelism: int) -> None:
        super().__init__(name)
        self.key_groups = key_groups
        """The key groups of this subtask."""
        self._max_parallelism = max_parallelism
        self._bytes: dict[int, bytes] = {}

    @property
    def signature(self) -> str:
        """The same for all raw states, because only the function knows what the bytes mean."""
        return RAW

    def key_group_of(self, key: Any) -> int:
        """Return the key group of `key`. The key of several columns is a tuple."""
        return key_group_of(key, self._max_parallelism)

    def get(self, key_group: int) -> bytes | None:
        """Return the bytes of `key_group`, or None if there are none."""
        return self._bytes.get(key_group)

    def put(self, key_group: int, data: bytes) -> None:
        """Set the bytes of `key_group`.

        Raises:
            BadStateValue: `data` is not bytes, or the key group belongs to another subtask.
        """
        if not isinstance(cast("object", data), bytes):
            raise BadStateValue(
                f"raw keyed state {self.name!r} holds bytes, so it cannot hold {data!r:.80}"
            )
        if key_group not in self.key_groups:
            raise BadStateValue(
                f"raw keyed state {self.name!r} was put for key group {key_group!r}, but this"
                f" subtask has only {self.key_groups.start} to {self.key_groups.stop - 1}, so the"
                " state would be lost"
            )
        self._bytes[key_group] = data

    def clear(self) -> None:
        """Clear the bytes of all key groups."""
        self._bytes.clear()

    def freeze(self) -> RawKeyedState:
        """Return a copy of the bytes of all key groups."""
        copy = RawKeyedState(self.name, self.key_groups, self._max_parallelism)
        copy._bytes = dict(self._bytes)
        return copy

    def save(self) -> Saved:
        """Return the state as bytes."""
        pairs = sorted(self._bytes.items())
        elements = [part for group, data in pairs for part in (str(group).encode(), data)]
        return Saved(self.name, "", self.signature, elements)

    def restore(self, elements: Sequence[bytes]) -> None:
        """Set the bytes to those in `elements`, for the key groups of this subtask."""
        # A handle covers the key groups of an old subtask, which may now belong to several slots.
        self._bytes = {
            group: data for group, data in parse_groups(elements) if group in self.key_groups
        }

    def check_values(self, elements: Sequence[bytes]) -> None:
        """Accept any bytes."""


RAW = "raw"
"""The signature of raw keyed state."""


def parse_groups(elements: Sequence[bytes]) -> Iterator[tuple[int, bytes]]:
    """Yield the key groups of a raw keyed state's elements, and the bytes of each."""
    for group, data in zip(elements[::2], elements[1::2], strict=True):
        yield int(group), data


class OperatorStateStore:
    """The state of one subtask that is not kept by key.

    Used by the chain's thread, except for uploads.
    """

    def __init__(
        self,
        uid: str,
        *,
        subtask: int,
        parallelism: int,
        key_groups: range = range(0),
        max_parallelism: int = 1,
        is_restored: bool | None = None,
        handles: Sequence[StateHandle] = (),
        reader: StateReader | None = None,
        allow_non_restored_state: bool = False,
    ) -> None:
        """Read the restored states.

        `handles` come from all subtasks, in the order of subtasks; for broadcast states, those
        of one subtask. `key_groups` are for functions with keys. `is_restored` may be True without
        any handle.
        """
        self._uid = uid
        self.subtask, self.parallelism = subtask, parallelism
        self.is_restored = bool(handles) if is_restored is None else is_restored
        """True if a checkpoint held state of this operator, even if the state is empty."""
        self._key_groups, self._max_parallelism = key_groups, max_parallelism
        self._allow_non_restored_state = allow_non_restored_state
        self._restored: dict[tuple[Mode, str], list[Saved]] = {}
        self._states: dict[tuple[Mode, str], _State] = {}
        self._closed = False
        for handle in handles:
            mode = find_mode(handle)
            assert mode is not None
            assert reader is not None
            for saved in read_saved(reader.read(handle), f"{uid}: {handle.name}"):
                self._restored.setdefault((mode, saved.name), []).append(saved)

    def list_state(self, descriptor: ListStateDescriptor[T]) -> ListState[T]:
        """Return a list whose elements a restore distributes evenly over all subtasks."""
        self._check_lives(descriptor)
        return self._open("split", OperatorList(descriptor.name, descriptor.type))

    def union_list_state(self, descriptor: ListStateDescriptor[T]) -> ListState[T]:
        """Return a list. At a restore, each subtask gets the elements of all subtasks."""
        self._check_lives(descriptor)
        return self._open("union", OperatorList(descriptor.name, descriptor.type))

    def broadcast_state(self, descriptor: MapStateDescriptor[K, V]) -> BroadcastMap[K, V]:
        """Return a mapping that is the same on each subtask."""
        self._check_lives(descriptor)
        return self._open("broadcast", BroadcastMap(descriptor))

    def raw_keyed_state(self, name: str) -> RawKeyedState:
        """Return a state that stores bytes for each key group of the subtask."""
        check_state_name(name)
        return self._open("raw-keyed", RawKeyedState(name, self._key_groups, self._max_parallelism))

    def finish_open(self) -> tuple[str, ...]:
        """Accept no further states. Return the restored states that the function did not open.

        Raises:
            StateIncompatible: There are such states, and dropping state is not allowed.
        """
        # By mode and name: a list that was asked for as a union before is another state.
        left = sorted({name for _, name in self._restored.keys() - self._states.keys()})
        if left and not self._allow_non_restored_state:
            raise StateIncompatible(
                f"operator {self._uid!r} declares no state {', '.join(map(repr, left))}, but its"
                " checkpoint holds it. Declare it in open() as before; or, if it is no longer"
                " needed, start with Pipeline(…, allow_non_restored_state=True)"
            )
        self._restored = {}
        self._closed = True
        return tuple(f"state {name!r} of operator {self._uid!r}" for name in left)

    def freeze(self) -> FrozenOperatorState:
        """Return a copy of the state."""
        return FrozenOperatorState(
            tuple((mode, state.freeze()) for (mode, _), state in self._states.items()),
            self._key_groups,
        )

    def _check_lives(
        self, descriptor: ListStateDescriptor[Any] | MapStateDescriptor[Any, Any]
    ) -> None:
        if descriptor.ttl is not None:
            raise ConfigError(
                f"state {descriptor.name!r} of operator {self._uid!r} has a time to live, but"
                " only keyed state can have one"
            )

    def _open(self, mode: Mode, state: _S) -> _S:
        if self._closed:
            raise ConfigError(
                f"operator {self._uid!r} declares {mode} state {state.name!r} after open()."
                " Declare every state in open(), where it is restored"
            )
        if (mode, state.name) in self._states:
            raise ConfigError(
                f"operator {self._uid!r} declares {mode} state {state.name!r} twice: give each"
                " state its own name"
            )
        parts = self._restored.get((mode, state.name), [])
        for saved in parts:
            held, expected = (saved.key_signature, saved.signature), _signatures(state)
            if held[0] != expected[0] or not reads_as(held[1], expected[1]):
                why = explain_misfit(held[1], expected[1])
                raise StateIncompatible(
                    f"{mode} state {state.name!r} of operator {self._uid!r} was written as"
                    f" {' to '.join(filter(None, held))}, but is now declared as"
                    f" {' to '.join(filter(None, expected))}{f' ({why})' if why else ''}: give it"
                    " its old type, or another name"
                )
            # Types alone do not tell whether an integer survives as a float, so the values are read
            # once more.
            if depends_on_values(held[1], expected[1]):
                state.check_values(saved.elements)
        lists = [saved.elements for saved in parts]
        # Each subtask reads the whole list and takes its part by number. All subtasks compute the
        # same division.
        if mode == "split":
            state.restore(redistribute_list(lists, self.parallelism)[self.subtask])
        else:
            state.restore([element for elements in lists for element in elements])
        self._states[mode, state.name] = state
        return state


_S = TypeVar("_S", OperatorList[Any], BroadcastMap[Any, Any], RawKeyedState)


def _signatures(state: _State) -> tuple[str, str]:
    return state.key_signature, state.signature


_FILES = msgpack_decoder(_File)


def write_saved(
    writer: StateWriter, mode: Mode, states: Sequence[Saved], key_groups: range | None = None
) -> StateHandle:
    """Make the states of one mode durable and return their handle."""
    data = msgspec.msgpack.encode(_File(_FORMAT, list(states)))
    return writer.write(_HANDLE + mode, data, key_groups=key_groups)


def read_saved(data: bytes, label: str) -> list[Saved]:
    """Return the states in the bytes of one handle.

    Raises:
        StateCorrupt: The bytes are no operator state.
        StateIncompatible: A newer onceflow wrote them.
    """
    try:
        file = _FILES.decode(data)
    except msgspec.DecodeError as error:
        raise StateCorrupt(
            f"{label} cannot be read as operator state: {error}; restore an older checkpoint"
        ) from error
    if file.format != _FORMAT:
        raise StateIncompatible(
            f"{label} has format {file.format}, and this version of onceflow reads {_FORMAT}: run"
            " the job with the version that wrote it, or a later one"
        )
    return file.states
