"""The timers of functions by batch: all timers of a batch are registered and fire together.

Each timer is a row of a table by time and key, so it is in each snapshot and moves with its key.
Memory holds only the seconds that have timers; the rows of the earliest second tell the next time.

Invariants:
    the second of each timer is in `_seconds`; a second in it may have no timer any more
    no timer is for a time before `_none_before_ms`
    `_next_ms`, if not None, is the time of the earliest timer
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from onceflow.core.errors import BadStateValue, ConfigError
from onceflow.core.protocol.watermarks import MAX_WATERMARK, NO_WATERMARK
from onceflow.core.state.aggregates.accumulators import AccumulatorTable
from onceflow.core.state.api.context import StateClock
from onceflow.core.state.api.descriptors import AccumulatorColumn
from onceflow.core.state.keys.key_columns import Ints, read_key_columns
from onceflow.core.state.keys.key_groups import Hashes
from onceflow.core.state.states.timers import TimeDomain
from onceflow.core.state.stores.keyed_store import KeyedStateStore

Values: TypeAlias = "pa.Array | pa.ChunkedArray | npt.NDArray[Any]"

TIMER_MS = "timer_ms"
"""The column of a batch of timers with the time for which each was registered."""
FIRED_MAX = 65_536
"""The maximum number of timers that fire together; bounds the memory that a call needs."""
_SECOND_BITS = 10
"""Timers are searched in spans of 1,024 ms."""
_NONE: Ints = np.zeros(0, np.int64)


HashedKeys: TypeAlias = tuple[list[pa.Array], Hashes]


class KeysAtHand(Protocol):
    """The keys of the current batch."""

    def to_timers(self, values: Values, method: str) -> pa.Array:
        """Return the times that `method` got, one for each key, as milliseconds."""
        ...

    def hash_keys_at_hand(self) -> HashedKeys:
        """Return the key columns, one row for each key, and the keys' hashes."""
        ...


class TimerTable:
    """The timers of one time domain, of all keys of a store. Used by the subtask's thread."""

    def __init__(
        self, store: KeyedStateStore, domain: TimeDomain, key_types: Sequence[pa.DataType]
    ) -> None:
        self._domain: TimeDomain = domain
        # Only the existence of a row matters. The value of its only column is not used.
        self._table: AccumulatorTable = store.accumulators(
            f"onceflow.{domain}-timers-of-batches",
            key_types,
            [AccumulatorColumn("registered", "count", pa.int64())],
            namespaced=True,
        )
        self._seconds: set[int] = set(self._table.namespaces(_SECOND_BITS).tolist())
        self._next_ms: int | None = None
        self._none_before_ms = NO_WATERMARK
        self.fired_ms = NO_WATERMARK
        """The time of the timer that fired last."""

    @property
    def next_ms(self) -> int | None:
        """The time of the earliest timer, or None if there is none."""
        while self._next_ms is None and self._seconds:
            second = min(self._seconds)
            entries = self._table.select(second << _SECOND_BITS, (second + 1) << _SECOND_BITS)
            if len(entries):
                self._next_ms = int(self._table.namespaces_of(entries[:1])[0])
            else:
                # All timers of this second were deleted or have fired.
                self._seconds.discard(second)
            self._table.release(entries, _NONE)
        return self._next_ms

    def register(self, times_ms: Ints, keys: HashedKeys) -> None:
        """Register a timer for each key. Registering an existing timer again has no effect."""
        if not len(times_ms):
            return
        self._table.release(self._table.fold(times_ms, *keys, {}), _NONE)
        self._seconds.update(np.unique(times_ms >> _SECOND_BITS).tolist())
        earliest_ms = int(times_ms.min())
        self._none_before_ms = min(self._none_before_ms, earliest_ms)
        if self._next_ms is not None:
            self._next_ms = min(self._next_ms, earliest_ms)

    def delete(self, times_ms: Ints, keys: HashedKeys) -> None:
        """Delete a timer of each key. A missing timer is ignored."""
        if not len(times_ms):
            return
        arrays, hashes = keys
        entries = self._table.find(times_ms, read_key_columns(arrays), hashes)
        self._remove(np.unique(entries[entries > 0]))

    def take_due(self, until_ms: int) -> tuple[Ints, list[pa.Array]]:
        """Delete and return up to `FIRED_MAX` timers that are due by `until_ms`: times and keys.

        The earliest timers come first, in the order of their times.
        """
        # Decided without access to the table, because this is called after each batch.
        if until_ms < self._none_before_ms or not self._seconds:
            return _NONE, []
        entries = self._select_due(until_ms)
        if len(entries) < FIRED_MAX:
            self._none_before_ms = until_ms + 1
        entries = entries[:FIRED_MAX]
        times, keys = self._table.namespaces_of(entries), self._table.keys_of(entries)
        if len(entries):
            self.fired_ms = int(times[-1])
        self._remove(entries)
        return times, keys

    def _select_due(self, until_ms: int) -> Ints:
        """Return the entries of due timers in the order of their times, enough to fill a call."""
        due = sorted(second for second in self._seconds if second << _SECOND_BITS <= until_ms)
        if not due:
            return _NONE
        first_ms = max(due[0] << _SECOND_BITS, self._none_before_ms)
        count = 1
        while True:
            # Double the range in each step, because each step reads all timers of the range into
            # memory.
            last_ms = ((due[min(count, len(due)) - 1] + 1) << _SECOND_BITS) - 1
            entries = self._table.select(first_ms, min(last_ms, until_ms) + 1)
            if len(entries) >= FIRED_MAX:
                return entries
            if count >= len(due):
                # All timers in these spans are returned, but the last span may end after
                # `until_ms`.
                self._seconds.difference_update(due[:-1])
                return entries
            count *= 2

    def _remove(self, entries: Ints) -> None:
        self._table.remove(entries)
        self._next_ms = None


class BatchTimers:
    """The timers of the current batch's keys: registered by a column, fired as a batch.

    A key may have any number of timers. Each fires once, when its time is reached:
    `KeyedBatchFunction.on_timers` is then called with all due timers. A timer whose time has
    already passed fires after the current batch.
    """

    def __init__(
        self,
        store: KeyedStateStore,
        of_keys: KeysAtHand,
        key: Sequence[pa.Field],
        clock: StateClock,
    ) -> None:
        """Open the timer tables; `key` holds the key columns."""
        if TIMER_MS in {field.name for field in key}:
            raise ConfigError(
                f"a function of batches uses timers, but a key column is named {TIMER_MS!r}, the"
                " name of the column of timer times: rename the key column before key_by()"
            )
        self._of_keys = of_keys
        self._clock = clock
        self._schema = pa.schema([*key, pa.field(TIMER_MS, pa.int64())])
        self.watermark = NO_WATERMARK
        """The event time that all inputs have reached, for all keys."""
        types = [field.type for field in key]
        self.event = TimerTable(store, "event", types)
        self.processing = TimerTable(store, "processing", types)

    def register_event_time_timers(self, at_ms: Values) -> None:
        """Call `on_timers` for each key once the watermark has reached its time in `at_ms`.

        `at_ms` has a value for each key, in the order of the batch's keys. A null registers no
        timer.

        Raises:
            BadStateValue: The number of times differs from that of the keys, or they are no
                integers.
        """
        self.event.register(*self._read(at_ms, "register_event_time_timers"))

    def register_processing_time_timers(self, at_ms: Values) -> None:
        """Call `on_timers` for each key when the slot's clock has reached its time, or soon after.

        Raises:
            BadStateValue: As `register_event_time_timers`.
        """
        self.processing.register(*self._read(at_ms, "register_processing_time_timers"))

    def delete_event_time_timers(self, at_ms: Values) -> None:
        """Delete a timer of each key. A null or a missing timer is ignored.

        Raises:
            BadStateValue: As `register_event_time_timers`.
        """
        self.event.delete(*self._read(at_ms, "delete_event_time_timers"))

    def delete_processing_time_timers(self, at_ms: Values) -> None:
        """Delete a timer of each key. A null or a missing timer is ignored.

        Raises:
            BadStateValue: As `register_event_time_timers`.
        """
        self.processing.delete(*self._read(at_ms, "delete_processing_time_timers"))

    def current_processing_time(self) -> int:
        """Return the slot's clock in ms since 1970. It never goes back within one attempt."""
        return self._clock.now_ms()

    def current_watermark(self) -> int:
        """Return the watermark of all keys; -2**63 before the first one."""
        return self.watermark

    def advance(self, watermark: int) -> None:
        """Set the watermark unless it is older than a restored one. Only the engine calls this."""
        self.watermark = max(self.watermark, watermark)

    def take_due(self, timers: TimerTable, until_ms: int) -> pa.RecordBatch | None:
        """Delete and return the next due timers: keys and times. Only the engine calls this."""
        times, keys = timers.take_due(until_ms)
        if not len(times):
            return None
        return pa.record_batch([*keys, pa.array(times)], schema=self._schema)

    def _read(self, at_ms: Values, method: str) -> tuple[Ints, HashedKeys]:
        """Return the times, and the keys of those times. Skips keys without a time."""
        times = self._of_keys.to_timers(at_ms, method)
        keys, hashes = self._of_keys.hash_keys_at_hand()
        if times.null_count:
            known = times.is_valid()
            times, keys = times.filter(known), [key.filter(known) for key in keys]
            hashes = hashes[known.to_numpy(zero_copy_only=False)]
        times_ms: Ints = times.to_numpy()
        wrong = (times_ms <= NO_WATERMARK) | (times_ms >= MAX_WATERMARK)
        if wrong.any():
            raise BadStateValue(
                f"{method} was given {int(times_ms[wrong][0])}, which is not a valid time. Give"
                f" milliseconds since 1970 from {NO_WATERMARK + 1} to {MAX_WATERMARK - 1}"
            )
        return times_ms, (keys, hashes)
