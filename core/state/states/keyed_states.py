"""The states of one operator, built from the states that every backend has.

A backend stores values, lists and maps. All other states are built from these here, so they behave
the same on each backend:

    reducing, aggregating   a value, and a function that computes the next one
    in a namespace          an entry of a map: by namespace, or by namespace and map key
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeAlias, TypeVar

from onceflow.core.errors import BadStateValue, ConfigError
from onceflow.core.state.api.context import StateClock
from onceflow.core.state.api.descriptors import (
    AggregateFunction,
    AggregatingStateDescriptor,
    ListStateDescriptor,
    MapStateDescriptor,
    ReducingStateDescriptor,
    StateTtlConfig,
    ValueStateDescriptor,
)
from onceflow.core.state.states.timers import Timers
from onceflow.core.state.states.ttl import (
    Timed,
    TimedSerializer,
    TtlListState,
    TtlMapState,
    TtlValueState,
)
from onceflow.core.state.stores.entries import Cells, Stored
from onceflow.core.state.stores.keyed_store import (
    AggregatingState,
    KeyedStateStore,
    ListState,
    MapState,
    ReducingState,
    ValueState,
)
from onceflow.core.state.types.serializers import ListSerializer, serializer_of

T = TypeVar("T")
K = TypeVar("K")
V = TypeVar("V")
N = TypeVar("N")
IN = TypeVar("IN")
ACC = TypeVar("ACC")
OUT = TypeVar("OUT")

Descriptor: TypeAlias = (
    ValueStateDescriptor[Any]
    | ListStateDescriptor[Any]
    | MapStateDescriptor[Any, Any]
    | ReducingStateDescriptor[Any]
    | AggregatingStateDescriptor[Any, Any, Any]
)


def to_value_descriptor(
    descriptor: ReducingStateDescriptor[Any] | AggregatingStateDescriptor[Any, Any, Any],
) -> ValueStateDescriptor[Any]:
    """Return the descriptor of the value state that holds the accumulated value."""
    return ValueStateDescriptor[Any](descriptor.name, descriptor.type, ttl=descriptor.ttl)


class FoldedState(ReducingState[T]):
    """A reducing state over a value state."""

    def __init__(self, kept: ValueState[T], descriptor: ReducingStateDescriptor[T]) -> None:
        self._kept = kept
        self._name = descriptor.name
        self._function = descriptor.function

    def get(self) -> T | None:
        """Return the value, or None if there is none."""
        return self._kept.get()

    def add(self, value: T) -> None:
        """Reduce the value and `value` to the new value."""
        before = self._kept.get()
        after: T | None = (
            value if before is None or value is None else self._function(before, value)
        )
        if after is None:
            what = (
                "None is added"
                if value is None
                else f"its function returned None for {value!r:.80}"
            )
            raise BadStateValue(f"reducing state {self._name!r} cannot hold None, but {what}")
        self._kept.set(after)

    def clear(self) -> None:
        """Clear the value."""
        self._kept.clear()


class AccumulatedState(AggregatingState[IN, OUT], Generic[IN, ACC, OUT]):
    """An aggregating state over a value state that holds the accumulator."""

    def __init__(
        self, kept: ValueState[ACC], descriptor: AggregatingStateDescriptor[IN, ACC, OUT]
    ) -> None:
        self._kept = kept
        self._name = descriptor.name
        self._function: AggregateFunction[IN, ACC, OUT] = descriptor.function

    def get(self) -> OUT | None:
        """Return the result, or None if nothing was added."""
        kept: ACC | None = self._kept.get()
        return None if kept is None else self._function.get_result(kept)

    def add(self, value: IN) -> None:
        """Add `value` to the accumulator."""
        before: ACC | None = self._kept.get()
        if before is None:
            before = self._function.create_accumulator()
        after: ACC | None = self._function.add(value, before)
        if after is None:
            raise BadStateValue(
                f"the function of aggregating state {self._name!r} returned None for {value!r:.80}:"
                " add() must return the accumulator"
            )
        self._kept.set(after)

    def clear(self) -> None:
        """Clear the accumulator."""
        self._kept.clear()


class NamespacedValue(ValueState[T]):
    """A value for each namespace of the current key: an entry of a map state."""

    def __init__(
        self,
        entries: MapState[Any, T],
        namespace: Callable[[], Any],
        descriptor: ValueStateDescriptor[T],
    ) -> None:
        self._entries = entries
        self._namespace = namespace
        self._cells = Cells(serializer_of(descriptor.type), descriptor.name)
        default = descriptor.default
        self._default: Stored = None if default is None else self._cells.freeze(default)

    def get(self) -> T:
        """Return the value, or the default."""
        kept: T | None = self._entries.get(self._namespace())
        return self._cells.thaw(self._default) if kept is None else kept

    def set(self, value: T) -> None:
        """Set the value; None clears it."""
        if value is None:
            self.clear()
        else:
            self._entries.put(self._namespace(), value)

    def clear(self) -> None:
        """Clear the value."""
        self._entries.remove(self._namespace())


class NamespacedList(ListState[T]):
    """A list for each namespace of the current key; an `add` writes the whole list."""

    def __init__(self, entries: MapState[Any, list[T]], namespace: Callable[[], Any]) -> None:
        self._entries = entries
        self._namespace = namespace

    def get(self) -> list[T]:
        """Return the elements."""
        return self._entries.get(self._namespace()) or []

    def add(self, value: T) -> None:
        """Append `value`."""
        self.add_all([value])

    def add_all(self, values: Iterable[T]) -> None:
        """Append all of `values`."""
        added = list(values)
        if added:
            self.update([*self.get(), *added])

    def update(self, values: Iterable[T]) -> None:
        """Replace the list by `values`."""
        elements = list(values)
        if elements:
            self._entries.put(self._namespace(), elements)
        else:
            self.clear()

    def clear(self) -> None:
        """Clear the list."""
        self._entries.remove(self._namespace())


class NamespacedMap(MapState[K, V]):
    """A mapping for each namespace of the current key; `keys` reads all namespaces."""

    def __init__(self, entries: MapState[Any, V], namespace: Callable[[], Any]) -> None:
        self._entries = entries
        self._namespace = namespace

    def get(self, key: K) -> V | None:
        """Return the value under `key`, or None."""
        return self._entries.get((self._namespace(), key))

    def put(self, key: K, value: V) -> None:
        """Set the value under `key`."""
        self._entries.put((self._namespace(), key), value)

    def remove(self, key: K) -> None:
        """Remove `key`."""
        self._entries.remove((self._namespace(), key))

    def contains(self, key: K) -> bool:
        """Return True if `key` exists."""
        return self._entries.contains((self._namespace(), key))

    def keys(self) -> Iterator[K]:
        """Return the keys at the time of the call."""
        mine = self._namespace()
        # One map holds the entries of all namespaces and has no index of them, so this reads all
        # entries of the key.
        return iter([key for namespace, key in self._entries.keys() if namespace == mine])  # noqa: SIM118

    def items(self) -> Iterator[tuple[K, V]]:
        """Return the entries at the time of the call."""
        mine = self._namespace()
        return iter(
            [(key, v) for (namespace, key), v in self._entries.items() if namespace == mine]
        )

    def clear(self) -> None:
        """Remove all entries."""
        for key in self.keys():
            self.remove(key)


class Namespace(Generic[N]):
    """Separate states for each value of a namespace: for each window of a key, for example."""

    def __init__(self, map_state: MapStates, kind: Any) -> None:
        self._map_state = map_state
        self._kind = kind
        # In a list, so that None can be a namespace like any other.
        self._current: list[N] = []
        self._states: list[Callable[[], None]] = []

    def set(self, namespace: N) -> None:
        """Select the namespace that the states of this object read and write."""
        self._current = [namespace]

    def clear(self) -> None:
        """Clear every state of the current key in this namespace."""
        for clear in self._states:
            clear()

    def value_state(self, descriptor: ValueStateDescriptor[T]) -> ValueState[T]:
        """Return the state of one value for each key and namespace."""
        entries = self._entries(descriptor.name, self._kind, descriptor.type, descriptor.ttl)
        return self._register(NamespacedValue(entries, self._now, descriptor))

    def list_state(self, descriptor: ListStateDescriptor[T]) -> ListState[T]:
        """Return the state of a list for each key and namespace."""
        elements = ListSerializer(serializer_of(descriptor.type))
        return self._register(
            NamespacedList(
                self._entries(descriptor.name, self._kind, elements, descriptor.ttl), self._now
            )
        )

    def map_state(self, descriptor: MapStateDescriptor[K, V]) -> MapState[K, V]:
        """Return the state of a mapping for each key and namespace."""
        pair = types.GenericAlias(tuple, (self._kind, descriptor.key_type))
        return self._register(
            NamespacedMap[K, V](
                self._entries(descriptor.name, pair, descriptor.type, descriptor.ttl), self._now
            )
        )

    def reducing_state(self, descriptor: ReducingStateDescriptor[T]) -> ReducingState[T]:
        """Return the state of one reduced value for each key and namespace."""
        kept = self.value_state(
            ValueStateDescriptor[T](descriptor.name, descriptor.type, ttl=descriptor.ttl)
        )
        return FoldedState(kept, descriptor)

    def aggregating_state(
        self, descriptor: AggregatingStateDescriptor[IN, ACC, OUT]
    ) -> AggregatingState[IN, OUT]:
        """Return the state of one accumulator for each key and namespace."""
        kept = self.value_state(
            ValueStateDescriptor[ACC](descriptor.name, descriptor.type, ttl=descriptor.ttl)
        )
        return AccumulatedState(kept, descriptor)

    def _now(self) -> N:
        if not self._current:
            raise ConfigError(
                "a state in a namespace was used before Namespace.set() chose the namespace"
            )
        return self._current[0]

    def _entries(
        self, name: str, key_type: Any, value_type: Any, ttl: StateTtlConfig | None
    ) -> MapState[Any, Any]:
        return self._map_state(MapStateDescriptor[Any, Any](name, key_type, value_type, ttl))

    def _register(self, state: Cleared) -> Cleared:
        self._states.append(state.clear)
        return state


MapStates: TypeAlias = Callable[[MapStateDescriptor[Any, Any]], MapState[Any, Any]]
Cleared = TypeVar("Cleared", ValueState[Any], ListState[Any], MapState[Any, Any])


class KeyedStates:
    """Creates the states of a function while its operator opens; see `StateAccess`."""

    def __init__(self, store: KeyedStateStore, clock: StateClock | None = None) -> None:
        self._store = store
        self._clock = clock or StateClock()
        self._asked: dict[str, Descriptor] = {}
        self.registered: Timers | None = None
        """The timers, or None if the function has not asked for timers."""

    @property
    def cleaned_a_record(self) -> int:
        """The number of entries of expiring states to check for each record."""
        ttls = [descriptor.ttl for descriptor in self._asked.values()]
        return max((ttl.cleanup_incrementally for ttl in ttls if ttl is not None), default=0)

    def value_state(self, descriptor: ValueStateDescriptor[T]) -> ValueState[T]:
        """Return the state of one value for each key."""
        self._check(descriptor)
        return self._value(descriptor)

    def list_state(self, descriptor: ListStateDescriptor[T]) -> ListState[T]:
        """Return the state of a list for each key."""
        self._check(descriptor)
        if descriptor.ttl is None:
            return self._store.list_state(descriptor)
        timed = self._make_timed(descriptor, descriptor.ttl)
        kept = self._store.list_state(ListStateDescriptor[Timed](descriptor.name, timed))
        return TtlListState(kept, timed)

    def map_state(self, descriptor: MapStateDescriptor[K, V]) -> MapState[K, V]:
        """Return the state of a mapping for each key."""
        self._check(descriptor)
        if descriptor.ttl is None:
            return self._store.map_state(descriptor)
        timed = self._make_timed(descriptor, descriptor.ttl)
        kept = MapStateDescriptor[K, Timed](descriptor.name, descriptor.key_type, timed)
        return TtlMapState(self._store.map_state(kept), timed)

    def reducing_state(self, descriptor: ReducingStateDescriptor[T]) -> ReducingState[T]:
        """Return the state of one reduced value for each key."""
        self._check(descriptor)
        kept = to_value_descriptor(descriptor)
        return FoldedState(self._value(kept), descriptor)

    def aggregating_state(
        self, descriptor: AggregatingStateDescriptor[IN, ACC, OUT]
    ) -> AggregatingState[IN, OUT]:
        """Return the state of one accumulator for each key."""
        self._check(descriptor)
        kept = to_value_descriptor(descriptor)
        return AccumulatedState(self._value(kept), descriptor)

    def namespace(self, kind: Any) -> Namespace[Any]:
        """Return an object that creates states for each key and each namespace of type `kind`."""
        serializer_of(kind)
        return Namespace(self.map_state, kind)

    def timers(self) -> Timers:
        """Return the timers of the current key. Each call returns the same object."""
        if self.registered is None:
            self.registered = Timers(self._store, self._clock)
        return self.registered

    def _value(self, descriptor: ValueStateDescriptor[T]) -> ValueState[T]:
        if descriptor.ttl is None:
            return self._store.value_state(descriptor)
        timed = self._make_timed(descriptor, descriptor.ttl)
        kept = self._store.value_state(ValueStateDescriptor[Timed | None](descriptor.name, timed))
        return TtlValueState(kept, timed, descriptor.default)

    def _make_timed(self, descriptor: Descriptor, ttl: StateTtlConfig) -> TimedSerializer:
        return TimedSerializer(serializer_of(descriptor.type), descriptor.name, ttl, self._clock)

    def _check(self, descriptor: Descriptor) -> None:
        # The same descriptor may be used twice, for example in a helper function. Two descriptors
        # with one name would read each other's bytes.
        before = self._asked.setdefault(descriptor.name, descriptor)
        if before != descriptor:
            raise ConfigError(
                f"state {descriptor.name!r} is declared as {before} and as {descriptor}; give"
                " each state its own name"
            )
