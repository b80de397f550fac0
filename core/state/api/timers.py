"""Timers of keys, kept as keyed state: what is registered is in every snapshot and moves with keys.

The timers of one key are one value: their times, 8 bytes each. That value decides what fires. A
queue in memory, built anew from all values at a restore, only says when to look at which key; what
was deleted since may still be in it.
"""

from __future__ import annotations

import heapq
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

from onceflow.core.errors import BadStateValue
from onceflow.core.protocol.watermarks import MAX_WATERMARK, NO_WATERMARK
from onceflow.core.state.api.clock import StateClock
from onceflow.core.state.api.descriptors import ValueStateDescriptor
from onceflow.core.state.api.stores import KeyedStateStore, ValueState

TimeDomain: TypeAlias = Literal["event", "processing"]
TIME_DOMAINS: tuple[TimeDomain, TimeDomain] = ("event", "processing")


@dataclass(frozen=True, slots=True)
class Timer:
    """A timer that fires: its key, the time it was registered for, and by which time it went."""

    key: Any
    at_ms: int
    domain: TimeDomain


class TimerQueue:
    """When to look at which key. The keys of one time come in the order they were added."""

    def __init__(self) -> None:
        self._times: list[int] = []
        self._keys: dict[int, list[Any]] = {}

    @property
    def next_ms(self) -> int | None:
        """The earliest time."""
        return self._times[0] if self._times else None

    @property
    def last_ms(self) -> int | None:
        """The latest time."""
        return max(self._times, default=None)

    def add(self, at_ms: int, key: Any) -> None:
        """Have `key` looked at when `at_ms` has come."""
        keys = self._keys.get(at_ms)
        if keys is None:
            self._keys[at_ms] = [key]
            heapq.heappush(self._times, at_ms)
        else:
            keys.append(key)

    def take(self, until_ms: int, count: int) -> list[tuple[int, Any]]:
        """Return the next (time, key) up to `until_ms`, about `count` of them, and forget them."""
        taken: list[tuple[int, Any]] = []
        while self._times and self._times[0] <= until_ms and len(taken) < count:
            at_ms = heapq.heappop(self._times)
            taken += [(at_ms, key) for key in self._keys.pop(at_ms)]
        return taken


def describe_timers(domain: TimeDomain) -> ValueStateDescriptor[Any]:
    """Return the state that has the timers of a key in one time domain."""
    return ValueStateDescriptor[Any](f"onceflow.{domain}-timers", bytes)


class TimersOfDomain(Protocol):
    """The timers of one time domain, as an operator sees when to fire them."""

    fired_ms: int
    """The time of the timer that fired last."""

    @property
    def next_ms(self) -> int | None:
        """When the next timer may be due."""
        ...


class OperatorTimers(Protocol):
    """The timers of all keys of an operator, and what time it is for them."""

    watermark: int
    """The event time up to which everything has come, for every key."""

    @property
    def event(self) -> TimersOfDomain:
        """Those in event time."""
        ...

    @property
    def processing(self) -> TimersOfDomain:
        """Those in processing time."""
        ...

    def current_processing_time(self) -> int:
        """Return the slot's clock in milliseconds since 1970."""
        ...

    def advance(self, watermark: int) -> None:
        """Take in the watermark, which may be behind a restored one."""
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
        """The time of the earliest timer; it may have been deleted since."""
        return self.queue.next_ms

    def register(self, at_ms: int) -> None:
        """Keep a timer of the current key; one that is there already stays one."""
        if at_ms.__class__ is not int or not NO_WATERMARK < at_ms < MAX_WATERMARK:
            raise BadStateValue(
                f"a timer in {self._domain} time at {at_ms!r:.80} is none: register it for whole"
                f" milliseconds since 1970, from {NO_WATERMARK + 1} to {MAX_WATERMARK - 1}"
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
        """Forget a timer of the current key; return whether there was one."""
        packed = self._times.get()
        times = () if packed is None else _unpack(packed)
        if at_ms not in times:
            return False
        left = b"".join(_pack(one) for one in times if one != at_ms)
        if left:
            self._times.set(left)
        else:
            self._times.clear()
        return True

    def fire_due(self, until_ms: int) -> Iterator[Timer]:
        """Delete the timers up to `until_ms`, in order, and yield each with its key current.

        One that is registered meanwhile and is due comes, too; but at the end of all time only what
        was there before, or one that registers its next would never end.
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
"""Due timers whose keys are prefetched together."""
_pack = struct.Struct(">q").pack


def _unpack(packed: bytes) -> tuple[int, ...]:
    return struct.unpack(f">{len(packed) // 8}q", packed)


class Timers:
    """The timers of the current key, and what time it is.

    A timer fires once, when its time has come: `KeyedFunction.on_timer` is called with its key
    current. One whose time has come already fires after the records at hand.
    """

    def __init__(self, store: KeyedStateStore, clock: StateClock) -> None:
        self._store = store
        self._clock = clock
        self.watermark = NO_WATERMARK
        """The event time up to which everything has come, for every key."""
        self._restored_most = NO_WATERMARK
        self.event = DomainTimers(store, "event")
        self.processing = DomainTimers(store, "processing")

    def register_event_time_timer(self, at_ms: int) -> None:
        """Have `on_timer` called once the watermark is `at_ms` or more.

        Raises:
            BadStateValue: `at_ms` is no whole number of milliseconds.
        """
        self.event.register(at_ms)

    def register_processing_time_timer(self, at_ms: int) -> None:
        """Have `on_timer` called when the slot's clock says `at_ms`, or soon after.

        Raises:
            BadStateValue: `at_ms` is no whole number of milliseconds.
        """
        self.processing.register(at_ms)

    def delete_event_time_timer(self, at_ms: int) -> None:
        """Forget the timer; nothing happens where there is none."""
        self.event.delete(at_ms)

    def delete_processing_time_timer(self, at_ms: int) -> None:
        """Forget the timer; nothing happens where there is none."""
        self.processing.delete(at_ms)

    def current_processing_time(self) -> int:
        """Return the slot's clock in milliseconds since 1970; it never goes back in one attempt."""
        return self._clock.now_ms()

    def current_watermark(self) -> int:
        """Return up to which event time all has come; -2**63 before a job's first watermark.

        It is in checkpoints: after a restore it is what it was for the current key, or more.
        """
        if self.watermark >= self._restored_most:
            return self.watermark
        return max(self.watermark, self._restored_of(self._store.current_key()))

    def restore(self, least: int, most: int, of_key: Callable[[Any], int]) -> None:
        """Go on from a snapshot's event time, that `of_key`. Called by the engine alone."""
        self.watermark, self._restored_most, self._restored_of = least, most, of_key

    def advance(self, watermark: int) -> None:
        """Take in the watermark, which may be behind a restored one. Called by the engine alone."""
        self.watermark = max(self.watermark, watermark)
