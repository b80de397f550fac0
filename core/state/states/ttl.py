"""Time to live: states whose values expire some time after they were written, or read.

On each backend, a value is stored with the time of its last use before its bytes (8 bytes,
milliseconds since 1970, big-endian). Elements of a list and entries of a map expire one by one.

Invariants:
    expired  <=>  time of last use + ttl <= now
    now never goes back in one process, whatever the machine's clock does; a last use after now, by
    another machine's clock, counts as a use now
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

from onceflow.core.state.api.context import StateClock
from onceflow.core.state.api.descriptors import StateTtlConfig
from onceflow.core.state.stores.entries import Cells, Stored
from onceflow.core.state.stores.keyed_store import ListState, MapState, ValueState
from onceflow.core.state.types.serializers import TTL_PREFIX, ExpiringSerializer, Serializer

T = TypeVar("T")
K = TypeVar("K")
V = TypeVar("V")

STAMP_BYTES = 8


class Timed(NamedTuple):
    """The stored form of a value, and the time of its last use."""

    used_ms: int
    stored: Stored


class TimedSerializer(ExpiringSerializer):
    """Encodes values with the time of their last use; `stored` has the form of their cells."""

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
        """The signature of the values behind `TTL_PREFIX`. It does not contain the time to live."""
        return self._signature

    @property
    def direct_types(self) -> tuple[type[Any], ...]:
        """The type `Timed`, which is immutable."""
        return (Timed,)

    @property
    def cleans_snapshots(self) -> bool:
        """True if the user wants expired values left out of full snapshots."""
        return self.ttl.cleanup_full_snapshot

    def to_checking(self) -> TimedSerializer:
        """Return a serializer that checks the values."""
        values = self.cells.serializer.to_checking()
        return TimedSerializer(values, self._name, self.ttl, self.clock)

    def encode(self, value: Timed) -> bytes:
        """Return time and value as bytes."""
        return value.used_ms.to_bytes(STAMP_BYTES, "big") + self.cells.to_bytes(value.stored)

    def decode(self, data: bytes) -> Timed:
        """Return the value in `data` with its time."""
        stored = self.cells.from_bytes(data[STAMP_BYTES:])
        return Timed(int.from_bytes(data[:STAMP_BYTES], "big"), stored)

    def stamp(self, data: bytes) -> bytes:
        """Return the bytes of a value that was stored without a time, with the time now."""
        return self.clock.now_ms().to_bytes(STAMP_BYTES, "big") + data

    def are_bytes_expired(self, data: bytes) -> bool:
        """Return True if the value of these bytes has expired."""
        used_ms = int.from_bytes(data[:STAMP_BYTES], "big")
        # Needs only the bytes, so a snapshot leaves out expired values without decoding them.
        return used_ms + self._ttl_ms <= self.clock.now_ms()

    def is_expired(self, stored: Timed) -> bool:
        """Return True if the value has expired."""
        return stored.used_ms + self._ttl_ms <= self.clock.now_ms()

    def freeze(self, value: Any) -> Timed:
        """Return the stored form of `value`, with the time now."""
        return Timed(self.clock.now_ms(), self.cells.freeze(value))

    def is_visible(self, stored: Timed) -> bool:
        """Return True if `stored` may be returned to the user."""
        return not self.is_expired(stored) or not self.ttl.never_returns_expired

    def renew(self, stored: Timed) -> Timed | None:
        """Return the stored form after a read of `stored`, or None if it does not change."""
        # An expired value may still be visible (`visibility`), but reading it must not renew it.
        if not self.ttl.updates_on_read or self.is_expired(stored):
            return None
        now_ms = self.clock.now_ms()
        # The last use may be in the future, by the clock of another machine. Replacing it by an
        # earlier time would shorten the life of the value.
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
        """Set the value; None clears it."""
        if value is None:
            self._kept.clear()
        else:
            self._kept.set(self._timed.freeze(value))

    def clear(self) -> None:
        """Clear the value."""
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
        # The whole list is written again, which also drops expired elements at no extra cost.
        if timed.ttl.updates_on_read and visible:
            self._kept.update([timed.renew(element) or element for element in visible])
        return [timed.thaw(element) for element in visible]

    def add(self, value: T) -> None:
        """Append `value`."""
        self._kept.add(self._timed.freeze(value))

    def add_all(self, values: Iterable[T]) -> None:
        """Append all of `values`."""
        self._kept.add_all([self._timed.freeze(value) for value in values])

    def update(self, values: Iterable[T]) -> None:
        """Replace the list by `values`."""
        self._kept.update([self._timed.freeze(value) for value in values])

    def clear(self) -> None:
        """Clear the list."""
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
        """Set the value under `key`."""
        self._kept.put(key, self._timed.freeze(value))

    def remove(self, key: K) -> None:
        """Remove `key`."""
        self._kept.remove(key)

    def contains(self, key: K) -> bool:
        """Return True if `key` exists and is visible."""
        kept = self._kept.get(key)
        return kept is not None and self._timed.is_visible(kept)

    def keys(self) -> Iterator[K]:
        """Return the keys at the time of the call."""
        visible = self._timed.is_visible
        return iter([key for key, kept in self._kept.items() if visible(kept)])

    def items(self) -> Iterator[tuple[K, V]]:
        """Return the entries at the time of the call."""
        visible = self._timed.is_visible
        # Collected first: `_read` may put a renewed entry, which would change the mapping while
        # iterating.
        entries = [(key, kept) for key, kept in self._kept.items() if visible(kept)]
        return iter([(key, self._read(key, kept)) for key, kept in entries])

    def clear(self) -> None:
        """Remove all entries."""
        self._kept.clear()

    def _read(self, key: K, kept: Timed) -> V:
        renewed = self._timed.renew(kept)
        if renewed is not None:
            self._kept.put(key, renewed)
        return self._timed.thaw(kept)  # type: ignore[no-any-return]
