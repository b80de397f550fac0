"""Time to live: states whose values are forgotten some time after they were written, or read.

A value is kept with the time of its last use, in front of its bytes (8 bytes, milliseconds since
1970, big-endian), whatever the backend. Elements of a list and entries of a map expire one by one.

Invariants:
    expired  <=>  time of last use + ttl <= now
    now never goes back in one process, whatever the machine's clock does; a value that was used
    after now, by another machine's clock, is as good as used just now
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

from onceflow.core.state.api.clock import StateClock
from onceflow.core.state.api.descriptors import StateTtlConfig
from onceflow.core.state.api.stores import ListState, MapState, ValueState
from onceflow.core.state.heap.entries import Cells, Stored
from onceflow.core.state.types.serializers import TTL_PREFIX, ExpiringSerializer, Serializer

T = TypeVar("T")
K = TypeVar("K")
V = TypeVar("V")

STAMP_BYTES = 8


class Timed(NamedTuple):
    """What is stored of a value, and when it was last used."""

    used_ms: int
    stored: Stored


class TimedSerializer(ExpiringSerializer):
    """Values with the time of their last use; `stored` is as the values' own cells have it."""

    def __init__(
        self, serializer: Serializer[Any], name: str, ttl: StateTtlConfig, clock: StateClock
    ) -> None:
        self._signature = TTL_PREFIX + serializer.signature
        self._name = name
        self.cells = Cells(serializer, name)
        self.ttl = ttl
        self._ttl_ms = ttl.ttl_ms
        self.clock = clock

    @property
    def signature(self) -> str:
        """That of the values, said to expire; how long they live is no part of it."""
        return self._signature

    @property
    def direct_types(self) -> tuple[type[Any], ...]:
        """Nobody can change a `Timed`."""
        return (Timed,)

    @property
    def cleans_snapshots(self) -> bool:
        """Whether the user wants what has expired left out of full snapshots."""
        return self.ttl.cleanup_full_snapshot

    def to_checking(self) -> TimedSerializer:
        """Return one that checks the values."""
        values = self.cells.serializer.to_checking()
        return TimedSerializer(values, self._name, self.ttl, self.clock)

    def encode(self, value: Timed) -> bytes:
        """Return time and value as bytes."""
        return value.used_ms.to_bytes(STAMP_BYTES, "big") + self.cells.to_bytes(value.stored)

    def decode(self, data: bytes) -> Timed:
        """Return what `data` holds."""
        stored = self.cells.from_bytes(data[STAMP_BYTES:])
        return Timed(int.from_bytes(data[:STAMP_BYTES], "big"), stored)

    def stamp(self, data: bytes) -> bytes:
        """Return the bytes of a value that was kept without a time, as used just now."""
        return self.clock.now_ms().to_bytes(STAMP_BYTES, "big") + data

    def are_bytes_expired(self, data: bytes) -> bool:
        """Tell whether the value of these bytes has expired."""
        used_ms = int.from_bytes(data[:STAMP_BYTES], "big")
        # Of the bytes alone: a snapshot leaves out what has expired without decoding the values.
        return used_ms + self._ttl_ms <= self.clock.now_ms()

    def is_expired(self, stored: Timed) -> bool:
        """Tell whether a value has expired."""
        return stored.used_ms + self._ttl_ms <= self.clock.now_ms()

    def freeze(self, value: Any) -> Timed:
        """Return what to store for `value`, as used just now."""
        return Timed(self.clock.now_ms(), self.cells.freeze(value))

    def is_visible(self, stored: Timed) -> bool:
        """Tell whether `stored` may be handed out."""
        return not self.is_expired(stored) or not self.ttl.never_returns_expired

    def renew(self, stored: Timed) -> Timed | None:
        """Return what to store once `stored` is read, None when it stays as it is."""
        # An expired value may still be shown (`visibility`), and must not live again by that.
        if not self.ttl.updates_on_read or self.is_expired(stored):
            return None
        now_ms = self.clock.now_ms()
        # Never backwards: the last use may be in the future by another machine's clock, and going
        # back would shorten a life that was promised.
        return Timed(now_ms, stored.stored) if now_ms > stored.used_ms else None

    def thaw(self, stored: Timed) -> Any:
        """Return the value."""
        return self.cells.thaw(stored.stored)


class TtlValueState(ValueState[T]):
    """A value state whose value expires."""

    def __init__(
        self, kept: ValueState[Timed | None], timed: TimedSerializer, default: T | None
    ) -> None:
        self._kept = kept
        self._timed = timed
        self._default: Stored = None if default is None else timed.cells.freeze(default)

    def get(self) -> T:
        """Return the value, or the default."""
        kept = self._kept.get()
        if kept is None or not self._timed.is_visible(kept):
            return self._timed.cells.thaw(self._default)  # type: ignore[no-any-return]
        renewed = self._timed.renew(kept)
        if renewed is not None:
            self._kept.set(renewed)
        return self._timed.thaw(kept)  # type: ignore[no-any-return]

    def set(self, value: T) -> None:
        """Make `value` the value; None clears it."""
        if value is None:
            self._kept.clear()
        else:
            self._kept.set(self._timed.freeze(value))

    def clear(self) -> None:
        """Forget the value."""
        self._kept.clear()


class TtlListState(ListState[T]):
    """A list state whose elements expire one by one."""

    def __init__(self, kept: ListState[Timed], timed: TimedSerializer) -> None:
        self._kept = kept
        self._timed = timed

    def get(self) -> list[T]:
        """Return the elements."""
        timed = self._timed
        kept = self._kept.get()
        visible = [element for element in kept if timed.is_visible(element)]
        # The whole list is written again. It also drops the elements that have expired, which costs
        # nothing more.
        if timed.ttl.updates_on_read and visible:
            self._kept.update([timed.renew(element) or element for element in visible])
        return [timed.thaw(element) for element in visible]

    def add(self, value: T) -> None:
        """Put `value` at the end."""
        self._kept.add(self._timed.freeze(value))

    def add_all(self, values: Iterable[T]) -> None:
        """Put all of `values` at the end."""
        self._kept.add_all([self._timed.freeze(value) for value in values])

    def update(self, values: Iterable[T]) -> None:
        """Make `values` the list."""
        self._kept.update([self._timed.freeze(value) for value in values])

    def clear(self) -> None:
        """Forget every element."""
        self._kept.clear()


class TtlMapState(MapState[K, V]):
    """A map state whose entries expire one by one."""

    def __init__(self, kept: MapState[K, Timed], timed: TimedSerializer) -> None:
        self._kept = kept
        self._timed = timed

    def get(self, key: K) -> V | None:
        """Return the value under `key`, or None."""
        kept = self._kept.get(key)
        return None if kept is None or not self._timed.is_visible(kept) else self._read(key, kept)

    def put(self, key: K, value: V) -> None:
        """Put `value` under `key`."""
        self._kept.put(key, self._timed.freeze(value))

    def remove(self, key: K) -> None:
        """Forget `key`."""
        self._kept.remove(key)

    def contains(self, key: K) -> bool:
        """Tell whether `key` is there."""
        kept = self._kept.get(key)
        return kept is not None and self._timed.is_visible(kept)

    def keys(self) -> Iterator[K]:
        """Return the keys as of now."""
        visible = self._timed.is_visible
        return iter([key for key, kept in self._kept.items() if visible(kept)])

    def items(self) -> Iterator[tuple[K, V]]:
        """Return the entries as of now."""
        visible = self._timed.is_visible
        # Collected first: `_read` may put a renewed entry, which would change the mapping under its
        # own iterator.
        entries = [(key, kept) for key, kept in self._kept.items() if visible(kept)]
        return iter([(key, self._read(key, kept)) for key, kept in entries])

    def clear(self) -> None:
        """Forget every entry."""
        self._kept.clear()

    def _read(self, key: K, kept: Timed) -> V:
        renewed = self._timed.renew(kept)
        if renewed is not None:
            self._kept.put(key, renewed)
        return self._timed.thaw(kept)  # type: ignore[no-any-return]
