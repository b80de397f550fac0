"""Timers of functions of batches: those of all keys of a batch are registered and fire together.

Each timer is a row of a table by time and key, so it is in every snapshot and moves with its key.
Which seconds have timers is known in memory; the rows of the next one say when it is due.

Invariants:
    the second of every timer is in `_seconds`; one that is there may have no timer any more
    no timer is for a time before `_none_before_ms`
    `_next_ms`, where it is known, is the time of the earliest timer
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
from onceflow.core.state.api.clock import StateClock
from onceflow.core.state.api.descriptors import AccumulatorColumn
from onceflow.core.state.api.stores import KeyedStateStore
from onceflow.core.state.api.timers import TimeDomain
from onceflow.core.state.keys.key_columns import Ints, read_key_columns
from onceflow.core.state.keys.key_groups import Hashes

Values: TypeAlias = "pa.Array | pa.ChunkedArray | npt.NDArray[Any]"

TIMER_MS = "timer_ms"
"""The column of a batch of timers that says for when each was registered."""
FIRED_MAX = 65_536
"""Timers that fire together; bounds the memory that a call needs."""
_SECOND_BITS = 10
"""Timers are looked for by spans of 1,024 ms."""
_NONE: Ints = np.zeros(0, np.int64)


HashedKeys: TypeAlias = tuple[list[pa.Array], Hashes]


class KeysAtHand(Protocol):
    """The keys of the batch at hand."""

    def to_timers(self, values: Values, method: str) -> pa.Array:
        """Return the times that `method` was given as milliseconds, one for each key."""
        ...

    def hash_keys_at_hand(self) -> HashedKeys:
        """Return the key columns, a row for each key, and the keys' hashes."""
        ...


class TimerTable:
    """The timers of one time domain, of all keys of a store. Used by the subtask's thread."""

    def __init__(
        self, store: KeyedStateStore, domain: TimeDomain, key_types: Sequence[pa.DataType]
    ) -> None:
        self._domain: TimeDomain = domain
        # A row is there or is not: what its one column counts is of no matter.
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
        """The time of the earliest timer."""
        while self._next_ms is None and self._seconds:
            second = min(self._seconds)
            entries = self._table.select(second << _SECOND_BITS, (second + 1) << _SECOND_BITS)
            if len(entries):
                self._next_ms = int(self._table.namespaces_of(entries[:1])[0])
            else:
                # All of its timers were deleted or have fired.
                self._seconds.discard(second)
            self._table.release(entries, _NONE)
        return self._next_ms

    def register(self, times_ms: Ints, keys: HashedKeys) -> None:
        """Keep a timer of each key; one that is there already stays one."""
        if not len(times_ms):
            return
        self._table.release(self._table.fold(times_ms, *keys, {}), _NONE)
        self._seconds.update(np.unique(times_ms >> _SECOND_BITS).tolist())
        earliest_ms = int(times_ms.min())
        self._none_before_ms = min(self._none_before_ms, earliest_ms)
        if self._next_ms is not None:
            self._next_ms = min(self._next_ms, earliest_ms)

    def delete(self, times_ms: Ints, keys: HashedKeys) -> None:
        """Forget a timer of each key; nothing happens where there is none."""
        if not len(times_ms):
            return
        arrays, hashes = keys
        entries = self._table.find(times_ms, read_key_columns(arrays), hashes)
        self._remove(np.unique(entries[entries > 0]))

    def take_due(self, until_ms: int) -> tuple[Ints, list[pa.Array]]:
        """Delete up to `FIRED_MAX` timers that are due by `until_ms`; return times and keys.

        They are the earliest of all, in the order of their times.
        """
        # By what is known without a look at the table: this is called after every batch.
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
        due = sorted(one for one in self._seconds if one << _SECOND_BITS <= until_ms)
        if not due:
            return _NONE
        first_ms = max(due[0] << _SECOND_BITS, self._none_before_ms)
        count = 1
        while True:
            # Twice as far with each look, for a look reads all timers on its way into memory.
            last_ms = ((due[min(count, len(due)) - 1] + 1) << _SECOND_BITS) - 1
            entries = self._table.select(first_ms, min(last_ms, until_ms) + 1)
            if len(entries) >= FIRED_MAX:
                return entries
            if count >= len(due):
                # All that is in these spans is due, but the last one may go on.
                self._seconds.difference_update(due[:-1])
                return entries
            count *= 2

    def _remove(self, entries: Ints) -> None:
        self._table.remove(entries)
        self._next_ms = None


class BatchTimers:
    """Timers of the keys of the batch at hand: a column of times in, a batch of timers out.

    A key has any number of timers. Each fires once, when its time has come: then
    `KeyedBatchFunction.on_timers` is called with all that are due. One whose time has come already
    fires after the batch at hand.
    """

    def __init__(
        self,
        store: KeyedStateStore,
        of_keys: KeysAtHand,
        key: Sequence[pa.Field],
        clock: StateClock,
    ) -> None:
        """`key`: the key columns."""
        if TIMER_MS in {field.name for field in key}:
            raise ConfigError(
                f"a function of batches asks for timers, and {TIMER_MS!r} is a key column, which"
                " is the name of the timers' times: rename the column before key_by()"
            )
        self._of_keys = of_keys
        self._clock = clock
        self._schema = pa.schema([*key, pa.field(TIMER_MS, pa.int64())])
        self.watermark = NO_WATERMARK
        """The event time up to which everything has come, for every key."""
        types = [field.type for field in key]
        self.event = TimerTable(store, "event", types)
        self.processing = TimerTable(store, "processing", types)

    def register_event_time_timers(self, at_ms: Values) -> None:
        """Have `on_timers` called for each key once the watermark is its `at_ms` or more.

        `at_ms` has a value for each key, in the order of the batch's keys; null: no timer.

        Raises:
            BadStateValue: There are more or fewer than keys, or one is no whole milliseconds.
        """
        self.event.register(*self._read(at_ms, "register_event_time_timers"))

    def register_processing_time_timers(self, at_ms: Values) -> None:
        """Have `on_timers` called for each key when the slot's clock says `at_ms`, or soon after.

        Raises:
            BadStateValue: As `register_event_time_timers`.
        """
        self.processing.register(*self._read(at_ms, "register_processing_time_timers"))

    def delete_event_time_timers(self, at_ms: Values) -> None:
        """Forget a timer of each key; nothing happens for a null, or where there is none.

        Raises:
            BadStateValue: As `register_event_time_timers`.
        """
        self.event.delete(*self._read(at_ms, "delete_event_time_timers"))

    def delete_processing_time_timers(self, at_ms: Values) -> None:
        """Forget a timer of each key; nothing happens for a null, or where there is none.

        Raises:
            BadStateValue: As `register_event_time_timers`.
        """
        self.processing.delete(*self._read(at_ms, "delete_processing_time_timers"))

    def current_processing_time(self) -> int:
        """Return the slot's clock in milliseconds since 1970; it never goes back in one attempt."""
        return self._clock.now_ms()

    def current_watermark(self) -> int:
        """Return up to which event time all has come for all keys; -2**63 before the first."""
        return self.watermark

    def advance(self, watermark: int) -> None:
        """Take in the watermark, which may be behind a restored one. Called by the engine alone."""
        self.watermark = max(self.watermark, watermark)

    def take_due(self, timers: TimerTable, until_ms: int) -> pa.RecordBatch | None:
        """Delete and return the next timers that are due: keys and times. Called by the engine."""
        times, keys = timers.take_due(until_ms)
        if not len(times):
            return None
        return pa.record_batch([*keys, pa.array(times)], schema=self._schema)

    def _read(self, at_ms: Values, method: str) -> tuple[Ints, HashedKeys]:
        """Return the times and keys of those keys that have a time."""
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
                f"{method} was given {int(times_ms[wrong][0])}: the ends of 64 bits are no time."
                f" Give milliseconds since 1970 from {NO_WATERMARK + 1} to {MAX_WATERMARK - 1}"
            )
        return times_ms, (keys, hashes)
