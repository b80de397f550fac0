"""State of one operator's subtask that belongs to no key: lists, and maps that all subtasks share.

It is in memory, and whole in every checkpoint. Who gets what at a restore, whatever the parallelism
is and was:

    split       all elements of all subtasks, dealt out anew: each to one subtask
    union       all elements of all subtasks, to every subtask
    broadcast   the entries of one subtask, which are those of every other

A snapshot has one handle a mode, named after it, whose bytes are MessagePack:

    [1, [[state name, key signature, value signature, [element, ...]], ...]]

An element of a broadcast state is its key, as `key_codec` has it, followed by its value.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypeVar, get_args

import msgspec

from onceflow.core.decoders import msgpack_decoder
from onceflow.core.errors import BadStateValue, ConfigError, StateCorrupt, StateIncompatible
from onceflow.core.protocol.snapshots import StateHandle
from onceflow.core.protocol.splits import redistribute_list
from onceflow.core.state.api import ListState, MapState
from onceflow.core.state.context import StateReader, StateWriter
from onceflow.core.state.descriptors import ListStateDescriptor, MapStateDescriptor
from onceflow.core.state.entries import Cells, MapKeys, Stored
from onceflow.core.state.key_codec import decode_key, encode_key
from onceflow.core.state.serializers import serializer_of

T = TypeVar("T")
K = TypeVar("K")
V = TypeVar("V")

Mode: TypeAlias = Literal["split", "union", "broadcast"]
MODES: tuple[Mode, ...] = get_args(Mode)
_HANDLE = "operator-state-"
_FORMAT = 1


def mode_of(handle: StateHandle) -> Mode | None:
    """Return what the states in `handle` are; None when it holds none of these."""
    return next((mode for mode in MODES if handle.name == _HANDLE + mode), None)


class _Saved(msgspec.Struct, array_like=True, frozen=True):
    name: str
    key_signature: str
    signature: str
    elements: list[bytes]


class _File(msgspec.Struct, array_like=True, frozen=True):
    format: int
    states: list[_Saved]


@dataclass(frozen=True, slots=True)
class FrozenOperatorState:
    """The state as of a barrier: nobody changes it any more."""

    states: tuple[tuple[Mode, _State], ...]

    def upload(self, writer: StateWriter) -> tuple[StateHandle, ...]:
        """Make it durable and return its handles. Any thread."""
        handles: list[StateHandle] = []
        for mode in MODES:
            saved = [state.saved() for of_mode, state in self.states if of_mode == mode]
            if saved:
                data = msgspec.msgpack.encode(_File(_FORMAT, saved))
                handles.append(writer.write(_HANDLE + mode, data))
        return tuple(handles)


class _State(ABC):
    """One state's name, types and what it holds."""

    def __init__(self, name: str, kind: Any) -> None:
        self.name = name
        self.cells = Cells(serializer_of(kind), name)

    @property
    def key_signature(self) -> str:
        return ""

    @property
    def signature(self) -> str:
        return self.cells.serializer.signature

    @abstractmethod
    def frozen(self) -> _State: ...

    @abstractmethod
    def saved(self) -> _Saved: ...

    @abstractmethod
    def restore(self, elements: Sequence[bytes]) -> None: ...


class OperatorList(_State, ListState[T]):
    """A list that belongs to the subtask, until it is dealt out anew."""

    def __init__(self, name: str, kind: Any) -> None:
        super().__init__(name, kind)
        self._elements: list[Stored] = []

    def get(self) -> list[T]:
        """Return the elements in the order they were added."""
        return [self.cells.thaw(one) for one in self._elements]

    def add(self, value: T) -> None:
        """Put `value` at the end."""
        self._elements.append(self._frozen_value(value))

    def add_all(self, values: Iterable[T]) -> None:
        """Put all of `values` at the end, or none."""
        self._elements += [self._frozen_value(value) for value in values]

    def update(self, values: Iterable[T]) -> None:
        """Make `values` the list."""
        self._elements = [self._frozen_value(value) for value in values]

    def clear(self) -> None:
        """Forget every element."""
        self._elements = []

    def frozen(self) -> OperatorList[T]:
        """Return the list as of now."""
        copy = OperatorList[T](self.name, self.cells.serializer)
        copy._elements = list(self._elements)
        return copy

    def saved(self) -> _Saved:
        """Return its bytes."""
        elements = [self.cells.to_bytes(one) for one in self._elements]
        return _Saved(self.name, "", self.signature, elements)

    def restore(self, elements: Sequence[bytes]) -> None:
        """Begin with `elements`."""
        self._elements = [self.cells.from_bytes(one) for one in elements]

    def _frozen_value(self, value: T) -> Stored:
        if value is None:
            raise BadStateValue(f"list state {self.name!r} cannot hold None")
        return self.cells.freeze(value)


class BroadcastMap(_State, MapState[K, V]):
    """A mapping that is the same on every subtask: only what all of them get may change it."""

    def __init__(self, descriptor: MapStateDescriptor[K, V]) -> None:
        super().__init__(descriptor.name, descriptor.type)
        self._descriptor = descriptor
        self._keys = MapKeys(descriptor.key_type, descriptor.name)
        self._entries: dict[bytes, Stored] = {}
        self.may_change = False
        """Whether a record is at hand that every subtask gets."""

    @property
    def key_signature(self) -> str:
        """That of the keys' type."""
        return self._keys.signature

    def get(self, key: K) -> V | None:
        """Return the value under `key`, or None."""
        stored = self._entries.get(encode_key(key))
        return None if stored is None else self.cells.thaw(stored)

    def put(self, key: K, value: V) -> None:
        """Put `value` under `key`."""
        self._check()
        if value is None:
            raise BadStateValue(f"broadcast state {self.name!r} cannot hold None; remove the key")
        self._keys.check(key)
        self._entries[encode_key(key)] = self.cells.freeze(value)

    def remove(self, key: K) -> None:
        """Forget `key`."""
        self._check()
        self._entries.pop(encode_key(key), None)

    def contains(self, key: K) -> bool:
        """Tell whether `key` is there."""
        return encode_key(key) in self._entries

    def keys(self) -> Iterator[K]:
        """Return the keys as of now."""
        return iter([decode_key(key) for key in self._entries])

    def items(self) -> Iterator[tuple[K, V]]:
        """Return the entries as of now."""
        return iter([(decode_key(key), self.cells.thaw(one)) for key, one in self._entries.items()])

    def is_empty(self) -> bool:
        """Tell whether there is no entry."""
        return not self._entries

    def clear(self) -> None:
        """Forget every entry."""
        self._check()
        self._entries.clear()

    def frozen(self) -> BroadcastMap[K, V]:
        """Return the entries as of now."""
        copy = BroadcastMap(self._descriptor)
        copy._entries = dict(self._entries)
        return copy

    def saved(self) -> _Saved:
        """Return its bytes."""
        elements = [
            part for key, one in self._entries.items() for part in (key, self.cells.to_bytes(one))
        ]
        return _Saved(self.name, self.key_signature, self.signature, elements)

    def restore(self, elements: Sequence[bytes]) -> None:
        """Begin with `elements`."""
        pairs = zip(elements[::2], elements[1::2], strict=True)
        self._entries = {key: self.cells.from_bytes(one) for key, one in pairs}

    def _check(self) -> None:
        if not self.may_change:
            raise BadStateValue(
                f"broadcast state {self.name!r} is changed where it may only be read: it would no"
                " longer be the same on all subtasks; change it in process_broadcast()"
            )


class OperatorStateStore:
    """All state without a key of one subtask. Used by the chain's thread, uploads excepted."""

    def __init__(
        self,
        uid: str,
        *,
        subtask: int,
        parallelism: int,
        handles: Sequence[StateHandle] = (),
        reader: StateReader | None = None,
        allow_non_restored_state: bool = False,
    ) -> None:
        """`handles` are those of all subtasks, by number; of one where they are broadcast."""
        self._uid = uid
        self.subtask, self.parallelism = subtask, parallelism
        self._allow_non_restored_state = allow_non_restored_state
        self._restored: dict[tuple[Mode, str], list[_Saved]] = {}
        self._states: dict[tuple[Mode, str], _State] = {}
        self.is_restored = bool(handles)
        """Whether a checkpoint held state of this operator, be it empty."""
        for handle in handles:
            mode = mode_of(handle)
            assert mode is not None
            assert reader is not None
            for saved in _read(reader.read(handle), f"{uid}: {handle.name}"):
                self._restored.setdefault((mode, saved.name), []).append(saved)

    def list_state(self, descriptor: ListStateDescriptor[T]) -> ListState[T]:
        """Return a list whose elements are dealt out evenly at a restore."""
        return self._opened("split", OperatorList(descriptor.name, descriptor.type), descriptor)

    def union_list_state(self, descriptor: ListStateDescriptor[T]) -> ListState[T]:
        """Return a list of which every subtask gets all elements of all at a restore."""
        return self._opened("union", OperatorList(descriptor.name, descriptor.type), descriptor)

    def broadcast_state(self, descriptor: MapStateDescriptor[K, V]) -> BroadcastMap[K, V]:
        """Return a mapping that is the same on every subtask."""
        return self._opened("broadcast", BroadcastMap(descriptor), descriptor)

    def opened(self) -> tuple[str, ...]:
        """End the asking for states; return those that the checkpoint held and nobody asked for.

        Raises:
            StateIncompatible: There are such, and they may not be dropped.
        """
        left = sorted({name for _, name in self._restored.keys() - self._states.keys()})
        if left and not self._allow_non_restored_state:
            raise StateIncompatible(
                f"operator {self._uid!r} asks for no state {', '.join(map(repr, left))}, which its"
                " checkpoint holds: ask for it in open() as before; or, when it is not wanted any"
                " more, start with Pipeline(…, allow_non_restored_state=True)"
            )
        self._restored = {}
        return tuple(f"state {name!r} of operator {self._uid!r}" for name in left)

    def frozen(self) -> FrozenOperatorState:
        """Return the state as of now."""
        return FrozenOperatorState(
            tuple((mode, state.frozen()) for (mode, _), state in self._states.items())
        )

    def _opened(
        self,
        mode: Mode,
        state: _S,
        descriptor: ListStateDescriptor[Any] | MapStateDescriptor[Any, Any],
    ) -> _S:
        if descriptor.ttl is not None:
            raise ConfigError(
                f"{mode} state {descriptor.name!r} of operator {self._uid!r} has a time to live,"
                " and only keyed state may"
            )
        if (mode, state.name) in self._states:
            raise ConfigError(
                f"operator {self._uid!r} asks twice for {mode} state {state.name!r}: give each a"
                " name of its own"
            )
        parts = self._restored.get((mode, state.name), [])
        for saved in parts:
            held, wanted = (saved.key_signature, saved.signature), _signatures(state)
            if held != wanted:
                raise StateIncompatible(
                    f"{mode} state {state.name!r} of operator {self._uid!r} was written as"
                    f" {' to '.join(filter(None, held))}, and is asked for as"
                    f" {' to '.join(filter(None, wanted))}: give it its old type, or another name"
                )
        lists = [saved.elements for saved in parts]
        if mode == "split":
            state.restore(redistribute_list(lists, self.parallelism)[self.subtask])
        else:
            state.restore([element for elements in lists for element in elements])
        self._states[mode, state.name] = state
        return state


_S = TypeVar("_S", OperatorList[Any], BroadcastMap[Any, Any])


def _signatures(state: _State) -> tuple[str, str]:
    return state.key_signature, state.signature


_FILES = msgpack_decoder(_File)


def _read(data: bytes, label: str) -> list[_Saved]:
    try:
        file = _FILES.decode(data)
    except msgspec.DecodeError as error:
        raise StateCorrupt(f"{label} is no operator state: {error}") from error
    if file.format != _FORMAT:
        raise StateIncompatible(
            f"{label} has format {file.format}, and this version of onceflow reads {_FORMAT}: run"
            " the job with the version that wrote it, or a later one"
        )
    return file.states
