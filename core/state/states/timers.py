"""The timers of keys, stored as keyed state: they are in each snapshot and move with their keys.

The timers of one key are one value: their times, 8 bytes each. This value decides which timers
fire. A queue in memory, rebuilt from all values after a restore, only tells when to look at which
key; it may still contain deleted timers.
"""

from __future__ import annotations

import heapq
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

from onceflow.core.errors import BadStateValue
from onceflow.core.protocol.watermarks import MAX_WATERMARK, NO_WATERMARK
from onceflow.core.state.api.context import StateClock
from onceflow.core.state.api.descriptors import ValueStateDescriptor
from onceflow.core.state.stores.keyed_store import KeyedStateStore, ValueState

TimeDomain: TypeAlias = Literal["event", "processing"]
TIME_DOMAINS: tuple[TimeDomain, TimeDomain] = ("event", "processing")


@dataclass(frozen=True, slots=True)
class Timer:
    """A timer that fires: its key, the time it was registered for, and its time domain."""

    key: Any
    at_ms: int
    domain: TimeDomain


class TimerQueue:
    """A queue of the times at which to look at a key.

    Keys of one time keep the order of addition.
    """

    def __init__(self) -> None:
        self._times: list[int] = []
        self._keys: dict[int, list[Any]] = {}

    @property
    def next_ms(self) -> int | None:
        """The earliest time, or None if the queue is empty."""
        return self._times[0] if self._times else None

    @property
    def last_ms(self) -> int | None:
        """The latest time, or None if the queue is empty."""
        return max(self._times, default=None)

    def add(self, at_ms: int, key: Any) -> None:
        """Add `key` for the time `at_ms`."""
        keys = self._keys.get(at_ms)
        if keys is None:
            self._keys[at_ms] = [key]
            heapq.heappush(self._times, at_ms)
        else:
            keys.append(key)

    def take(self, until_ms: int, count: int) -> list[tuple[int, Any]]:
        """Remove and return about `count` of the next pairs (time, key) up to `until_ms`."""
        taken: list[tuple[int, Any]] = []
        while self._times and self._times[0] <= until_ms and len(taken) < count:
            at_ms = heapq.heappop(self._times)
            taken += [(at_ms, key) for key in self._keys.pop(at_ms)]
        return taken


def describe_timers(domain: TimeDomain) -> ValueStateDescriptor[Any]:
    """Return the descriptor of the state with the timers of a key in one time domain."""
    return ValueStateDescriptor[Any](f"onceflow.{domain}-timers", bytes)


class TimersOfDomain(Protocol):
    """The timers of one time domain, for an operator that decides when to fire them."""

    fired_ms: int
    """The time of the timer that fired last."""

    @property
    def next_ms(self) -> int | None:
        """The time at which the next timer may be due, or None if there is none."""
        ...


class OperatorTimers(Protocol):
    """The timers of all keys of an operator, with their watermark and clock."""

    watermark: int
    """The event time that all inputs have reached, for all keys."""

    @property
    def event(self) -> TimersOfDomain:
        """The timers in event time."""
        ...

    @property
    def processing(self) -> TimersOfDomain:
        """The timers in processing time."""
        ...

    def current_processing_time(self) -> int:
        """Return the slot's clock in milliseconds since 1970."""
        ...

    def advance(self, watermark: int) -> None:
        """Set the watermark unless it is older than a restored one."""
        ...


class DomainTimers:
    """The timers of one time domain, of all keys of a store."""

    def __init__(self, store: KeyedStateStore, domain: TimeDomain) -> None:
        descriptor = describe_timers(domain)
        self._store = store
        self._domain: TimeDomain = domain
        self._times: ValueState[bytes | None] = store.value_state(descriptor)
        self.queue = TimerQueue()
        self.fired_ms = NO_WATERMARK
        """The time of the timer that fired last."""
        for key, packed in store.entries(descriptor):
            for at_ms in _unpack(packed):
                self.queue.add(at_ms, key)

    @property
    def next_ms(self) -> int | None:
        """The time of the earliest timer, which may have been deleted since."""
        return self.queue.next_ms

    def register(self, at_ms: int) -> None:
        """Register a timer of the current key.

        Registering an existing timer again has no effect.
        """
        if at_ms.__class__ is not int or not NO_WATERMARK < at_ms < MAX_WATERMARK:
            raise BadStateValue(
                f"{at_ms!r:.80} is not a valid time for a timer in {self._domain} time: register"
                f" the timer for whole milliseconds since 1970, from {NO_WATERMARK + 1} to"
                f" {MAX_WATERMARK - 1}"
            )
        key = self._store.current_key()
        packed = self._times.get()
        if packed is None:
            self._times.set(_pack(at_ms))
        elif at_ms not in _unpack(packed):
            self._times.set(packed + _pack(at_ms))
        else:
            return
        self.queue.add(at_ms, key)

    def delete(self, at_ms: int) -> bool:
        """Delete a timer of the current key. Return True if it existed."""
        packed = self._times.get()
        times = () if packed is None else _unpack(packed)
        if at_ms not in times:
            return False
        left = b"".join(_pack(time_ms) for time_ms in times if time_ms != at_ms)
        if left:
            self._times.set(left)
        else:
            self._times.clear()
        return True

    def fire_due(self, until_ms: int) -> Iterator[Timer]:
        """Delete the timers up to `until_ms`, in order, and yield each with its key selected.

        A timer that is registered meanwhile and is due is yielded, too. At the end of time
        (MAX_WATERMARK) only earlier timers are yielded: otherwise a timer that registers its
        successor would never end.
        """
        last_round = until_ms == MAX_WATERMARK
        while taken := self.queue.take(until_ms, MAX_WATERMARK if last_round else TIMERS_A_ROUND):
            for start in range(0, len(taken), TIMERS_A_ROUND):
                now = taken[start : start + TIMERS_A_ROUND]
                self._store.prefetch([key for _, key in now])
                for at_ms, key in now:
                    self._store.set_current_key(key)
                    if self.delete(at_ms):
                        self.fired_ms = at_ms
                        yield Timer(key, at_ms, self._domain)
            if last_round:
                return


TIMERS_A_ROUND = 4096
"""The number of due timers whose keys are prefetched together."""
_pack = struct.Struct(">q").pack


def _unpack(packed: bytes) -> tuple[int, ...]:
    return struct.unpack(f">{len(packed) // 8}q", packed)


class Timers:
    """The timers of the current key, with the watermark and the clock.

    A timer fires once, when its time is reached: `KeyedFunction.on_timer` is called with its key
    selected. A timer whose time has already passed fires after the current records.
    """

    def __init__(self, store: KeyedStateStore, clock: StateClock) -> None:
        self._store = store
        self._clock = clock
        self.watermark = NO_WATERMARK
        """The event time that all inputs have reached, for all keys."""
        self._restored_most = NO_WATERMARK
        self.event = DomainTimers(store, "event")
        self.processing = DomainTimers(store, "processing")

    def register_event_time_timer(self, at_ms: int) -> None:
        """Call `on_timer` once the watermark is `at_ms` or later.

        Raises:
            BadStateValue: `at_ms` is no integer number of milliseconds.
        """
        self.event.register(at_ms)

    def register_processing_time_timer(self, at_ms: int) -> None:
        """Call `on_timer` when the slot's clock has reached `at_ms`, or soon after.

        Raises:
            BadStateValue: `at_ms` is no integer number of milliseconds.
        """
        self.processing.register(at_ms)

    def delete_event_time_timer(self, at_ms: int) -> None:
        """Delete the timer if it exists."""
        self.event.delete(at_ms)

    def delete_processing_time_timer(self, at_ms: int) -> None:
        """Delete the timer if it exists."""
        self.processing.delete(at_ms)

    def current_processing_time(self) -> int:
        """Return the slot's clock in ms since 1970. It never goes back within one attempt."""
        return self._clock.now_ms()

    def current_watermark(self) -> int:
        """Return the watermark of the current key; -2**63 before a job's first watermark.

        Checkpoints contain it: after a restore it is at least what it was for the current key.
        """
        if self.watermark >= self._restored_most:
            return self.watermark
        return max(self.watermark, self._restored_of(self._store.current_key()))

    def restore(self, least: int, most: int, of_key: Callable[[Any], int]) -> None:
        """Continue from a snapshot's watermarks. Only the engine calls this.

        `least` and `most` bound the watermarks of all keys, and `of_key` returns that of a key.
        """
        self.watermark, self._restored_most, self._restored_of = least, most, of_key

    def advance(self, watermark: int) -> None:
        """Set the watermark unless it is older than a restored one. Only the engine calls this."""
        self.watermark = max(self.watermark, watermark)
