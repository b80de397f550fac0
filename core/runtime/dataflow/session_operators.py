"""Aggregates of sessions, a batch at a time.

The open sessions of a key are numbered from 0 in the order of their starts. The totals of a session
are in a row under the session's number and key; its start and end are among the totals. The rows of
a batch and the kept sessions of their keys are sorted by key and time; overlapping ones are merged
into one session.

The distinct values of a session are in sets of their own, one for each span of `gap`: two records
of a key in one span are always in one session. So sessions that merge leave their sets as they are.

A queue in memory contains the times at which keys must be checked. It is rebuilt at a restore. If a
session becomes longer, its entry stays at the earlier time, and that check has no effect.

Invariants, for a session start <= t < end, a watermark w, and the queue:
    start = its first record's time;  end = its last record's time + gap
    the end of a session and the start of the next of its key:  end < start
    it is due   <=>  end - 1 <= w;  it is over, and not held  <=>  end - 1 + lateness <= w
    a record is late  <=>  the session that it is in, or would be, is over
    a held session's key is in the queue for a moment <= when that is due next, or over
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from onceflow.core.errors import BadStateValue
from onceflow.core.plan.all_windows import list_totals
from onceflow.core.plan.windows import EventTimeSessionWindows
from onceflow.core.plan.work import AggregateWindows
from onceflow.core.protocol.watermarks import MAX_WATERMARK
from onceflow.core.runtime.dataflow.user_functions import call_user, user_error
from onceflow.core.runtime.dataflow.window_operators import WindowOperator
from onceflow.core.state import AccumulatorColumn, KeyedStateStore, hash_keys
from onceflow.core.state.keys.key_columns import Ints, plain_keys, read_key_columns
from onceflow.core.state.keys.key_groups import Hashes
from onceflow.core.state.snapshots.canonical import Groups
from onceflow.core.state.states.distinct_sets import OwnedSets

START, END, COUNT = "onceflow.start", "onceflow.end", "onceflow.count"
"""The columns for a session's bounds and, in a key's first session, for the key's session count."""
BUCKET_MS_MIN = 250
"""The smallest span of a bucket of moments. A bucket is sorted as a whole when a part of it
is due."""
_INT64_MAX = np.iinfo(np.int64).max
_NONE: Ints = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True)
class Sessions:
    """The sessions that result from overlapping or touching intervals, sorted by key and start."""

    ids: Ints
    """The session of each interval."""
    key_numbers: Ints
    """The key of each session."""
    ends: Ints

    @classmethod
    def of(cls, key_numbers: Ints, starts: Ints, ends: Ints) -> Sessions:
        """Merge intervals to sessions; `key_numbers` contains the key of each interval."""
        if not len(key_numbers):
            return cls(_NONE, _NONE, _NONE)
        order = _order(key_numbers, starts)
        keys, begins = key_numbers[order], starts[order]
        latest = _latest(keys, ends[order])
        new = np.ones(len(order), np.bool_)
        new[1:] = (keys[1:] != keys[:-1]) | (begins[1:] > latest[:-1])
        ids = np.empty_like(order)
        ids[order] = np.cumsum(new) - 1
        firsts = np.flatnonzero(new)
        return cls(ids, keys[firsts], latest[np.append(firsts[1:], len(order)) - 1])

    @property
    def numbers(self) -> Ints:
        """The number of each session within its key."""
        return _numbers(self.key_numbers)


def _order(key_numbers: Ints, starts: Ints) -> Ints:
    """Return the positions of intervals, sorted by key and then by start."""
    first = int(starts.min())
    bits = (int(starts.max()) - first).bit_length(), len(starts).bit_length()
    if int(key_numbers.max()).bit_length() + sum(bits) > 63:
        return np.lexsort((starts, key_numbers))
    # Pack key, start and position into one integer, from the high bits to the low bits: numpy
    # sorts plain integers several times as fast as two columns. The low bits return the position.
    packed = (((key_numbers << bits[0]) | (starts - first)) << bits[1]) | np.arange(len(starts))
    packed.sort()
    order: Ints = packed & ((1 << bits[1]) - 1)
    return order


def _latest(key_numbers: Ints, ends: Ints) -> Ints:
    """Return for each interval the latest end so far of its key; `key_numbers` must be sorted."""
    first = int(ends.min())
    span = int(ends.max()) - first + 1
    # One running maximum over all keys: each key's ends are shifted above every end of the
    # preceding keys, so the maximum starts anew with each key.
    if (int(key_numbers[-1]) + 1) * span < _INT64_MAX:
        base = key_numbers * span - first
        latest: Ints = np.maximum.accumulate(base + ends) - base
        return latest
    # The shifted ends would overflow 64 bits, so shift their ranks instead.
    distinct, ranks = np.unique(ends, return_inverse=True)
    base = key_numbers * len(distinct)
    by_rank: Ints = distinct[np.maximum.accumulate(base + ranks) - base]
    return by_rank


def _numbers(key_numbers: Ints) -> Ints:
    """Return for each of the sorted `key_numbers` the number of equal ones before it."""
    every = np.arange(len(key_numbers))
    new = np.ones(len(key_numbers), np.bool_)
    new[1:] = key_numbers[1:] != key_numbers[:-1]
    counted: Ints = every - np.maximum.accumulate(np.where(new, every, 0))
    return counted


@dataclass(frozen=True, slots=True)
class Held:
    """The held sessions of the keys of some rows."""

    keys: list[pa.Array]
    """Key columns, with a row for each distinct key. The row's position is the key's number."""
    hashes: Hashes
    firsts: Ints
    """The entry of each key's session number 0, which may be unused."""
    key_numbers: Ints
    """The number of each session's key."""
    entries: Ints
    starts: Ints
    ends: Ints


class WakeUps:
    """A queue of the moments at which keys must be checked; a key may occur several times."""

    def __init__(self, bucket_ms: int) -> None:
        self._bucket_ms = bucket_ms
        self._buckets: dict[int, list[tuple[Ints, list[pa.Array]]]] = {}
        self.next_ms: int | None = None
        """The earliest moment; None if the queue is empty."""

    def add(self, moments: Ints, keys: Sequence[pa.Array]) -> None:
        """Add each key with the moment at which it must be checked."""
        if not len(moments):
            return
        order = np.argsort(moments, kind="stable")
        moments, sorted_keys = (
            moments[order],
            [key_column.take(pa.array(order)) for key_column in keys],
        )
        buckets = moments // self._bucket_ms
        starts = np.flatnonzero(np.append(True, buckets[1:] != buckets[:-1])).tolist()
        for start, stop in zip(starts, [*starts[1:], len(moments)], strict=True):
            part = (moments[start:stop], [key_column[start:stop] for key_column in sorted_keys])
            self._buckets.setdefault(int(buckets[start]), []).append(part)
        first = int(moments[0])
        self.next_ms = first if self.next_ms is None else min(first, self.next_ms)

    def take(self, until_ms: int) -> list[pa.Array]:
        """Remove the moments up to `until_ms` and return their key columns."""
        taken: list[list[pa.Array]] = []
        for bucket in [number for number in self._buckets if number * self._bucket_ms <= until_ms]:
            moments, keys = _join_parts(self._buckets.pop(bucket))
            count = int(np.searchsorted(moments, until_ms, "right"))
            if count:
                taken.append([key_column[:count] for key_column in keys])
            if count < len(moments):
                self._buckets[bucket] = [
                    (moments[count:], [key_column[count:] for key_column in keys])
                ]
        self.next_ms = None
        if self._buckets:
            first = self._buckets[min(self._buckets)]
            self.next_ms = min(int(moments[0]) for moments, _ in first)
        return [pa.concat_arrays(column) for column in zip(*taken, strict=True)]


def _join_parts(parts: list[tuple[Ints, list[pa.Array]]]) -> tuple[Ints, list[pa.Array]]:
    """Merge parts, each sorted by its moments, into one."""
    if len(parts) == 1:
        return parts[0]
    moments = np.concatenate([of_part for of_part, _ in parts])
    order = np.argsort(moments, kind="stable")
    columns = zip(*(keys for _, keys in parts), strict=True)
    return moments[order], [pa.concat_arrays(pieces).take(pa.array(order)) for pieces in columns]


class SessionAggregator(WindowOperator):
    """An operator that emits the aggregates of each session of a key."""

    def __init__(
        self,
        uid: str,
        work: AggregateWindows,
        store: KeyedStateStore,
        input_schema: pa.Schema,
        schema: pa.Schema,
        key_groups: range,
        restored: Sequence[bytes] = (),
    ) -> None:
        super().__init__(uid, work, store, input_schema, schema, key_groups, restored)
        assert isinstance(work.windows, EventTimeSessionWindows)
        self._gap_ms = work.windows.gap_ms
        self._lateness_ms = work.lateness_ms
        self._key_types = [input_schema.field(name).type for name in work.key]
        columns = list_totals(work.aggregates, input_schema, work.key)
        self._start, self._end, self._count = range(len(columns), len(columns) + 3)
        columns.append(AccumulatorColumn(START, "min", pa.int64()))
        columns += [AccumulatorColumn(name, "max", pa.int64()) for name in (END, COUNT)]
        self._table = store.accumulators(
            f"onceflow.sessions-{self._gap_ms}", self._key_types, columns, namespaced=True
        )
        self._sets = self._inputs.open_sets(store, work.key)
        self.dropped = store.finish_open()
        self._wakes = WakeUps(max(BUCKET_MS_MIN, self._gap_ms // 8))
        entries = self._table.select(0, _INT64_MAX)
        keys = [plain_keys(key_column, "key") for key_column in self._table.keys_of(entries)]
        self._wake_at(self._table.numbers(self._end, entries), keys)
        self._table.release(entries, _NONE)

    def on_watermark(self, watermark: int) -> None:
        """Emit the sessions that are due, and remove those that are over."""
        if watermark <= self._watermark:
            return
        if self._wakes.next_ms is not None and self._wakes.next_ms <= watermark:
            self._end_sessions(self._wakes.take(watermark), watermark)
        elif watermark != MAX_WATERMARK:
            self._watermark = watermark

    def _group_of_hashes(self, hashes: Hashes) -> Groups:
        return self._table.group_of_hashes(hashes)

    def _take(self, rows: pa.RecordBatch, hashes: Hashes | None, now: int) -> None:
        starts = self._times_of(rows)
        self._check_times(rows, starts)
        ends = starts + self._gap_ms
        behind = ends - 1 <= now
        try:
            keys = self._read_keys(rows)
            known_hashes = hash_keys(keys) if hashes is None else hashes
            held, key_numbers = self._load_held(keys, known_hashes)
        except BadStateValue as error:
            raise user_error(self.uid, error, self._to_readable(rows), error.row) from error
        late = self._late_rows(held, key_numbers, starts, now)
        chosen = np.flatnonzero(~late)
        if len(chosen) < len(rows):
            self._late(rows.filter(pa.array(late)))
        sessions = Sessions.of(
            np.concatenate([held.key_numbers, key_numbers[chosen]]),
            np.concatenate([held.starts, starts[chosen]]),
            np.concatenate([held.ends, ends[chosen]]),
        )
        known, new = np.split(sessions.ids, [len(held.key_numbers)])
        entries = self._entries_at(sessions.numbers, held, sessions.key_numbers)
        if len(chosen) < len(rows):
            rows = rows.filter(pa.array(~late))
            starts, ends, known_hashes = starts[chosen], ends[chosen], known_hashes[chosen]
            keys = self._read_keys(rows)
        values = call_user(self.uid, lambda: self._inputs.read(rows, starts))
        values |= {START: starts, END: ends, COUNT: np.zeros(len(starts), np.int64)}
        try:
            self._sets.add(rows, starts // self._gap_ms, keys, known_hashes, values)
            self._table.regroup(held.entries, known, new, keys, values, entries)
        except BadStateValue as error:
            raise user_error(self.uid, error, self._to_readable(rows), error.row) from error
        again = np.unique(new[behind[chosen]])
        self._emit(entries[again[sessions.ends[again] - 1 <= now]])
        # A continued session is in the queue already, unless it was emitted before.
        fresh = np.ones(len(entries), np.bool_)
        fresh[known[held.ends - 1 > now]] = False
        self._wake_at(sessions.ends[fresh], _take(held.keys, sessions.key_numbers[fresh]), now)
        self._keep(held, entries, sessions.key_numbers)

    def _end_sessions(self, keys: list[pa.Array], watermark: int) -> None:
        """Emit the sessions of these keys that have become due, and remove those that are over.

        At the end of the input `keys` are all keys, and event time advances to the last due time.
        """
        held, _ = self._load_held(keys, hash_keys(keys))
        before = self._watermark
        if watermark == MAX_WATERMARK:
            watermark = max(before, int(held.ends.max(initial=before)) - 1)
        self._watermark = now = watermark
        due = (held.ends - 1 <= now) & (held.ends - 1 > before)
        if before < self._restored.most:
            watermarks = self._restored.watermarks_of(self._table.groups_of(held.entries))
            due &= watermarks < held.ends - 1
        self._emit(held.entries[due])
        over = held.ends - 1 + self._lateness_ms <= now
        self._sets.remove_owned(
            self._sets_of(
                held.starts[over],
                held.ends[over],
                _take(held.keys, held.key_numbers[over]),
            )
        )
        self._wake_at(held.ends[~over], _take(held.keys, held.key_numbers[~over]), now)
        # If a key has lost a session, number its remaining sessions anew.
        changed = np.zeros(len(held.firsts), np.bool_)
        changed[held.key_numbers[over]] = True
        left = np.flatnonzero(~over & changed[held.key_numbers])
        left = left[np.lexsort((held.starts[left], held.key_numbers[left]))]
        key_numbers = held.key_numbers[left]
        entries = self._entries_at(_numbers(key_numbers), held, key_numbers)
        every = np.arange(len(left))
        self._table.regroup(held.entries[left], every, _NONE, [], {}, entries)
        kept = held.entries[~changed[held.key_numbers]]
        self._keep(held, entries, key_numbers, kept)

    def _load_held(self, keys: Sequence[pa.Array], hashes: Hashes) -> tuple[Held, Ints]:
        """Return the held sessions of the keys of some rows, and the number of each row's key."""
        zeros = pa.array(np.zeros(len(hashes), np.int64))
        group = self._table.group([zeros, *keys], hashes)
        row_key_numbers = group.in_row_order(group.spread(np.arange(len(group.entries))))
        leaders = group.order[group.firsts]
        distinct = _take(keys, leaders)
        held = Held(distinct, hashes[leaders], group.entries, _NONE, _NONE, _NONE, _NONE)
        counts = self._table.numbers(self._count, group.entries)
        key_numbers = [np.flatnonzero(counts)]
        entries = [group.entries[key_numbers[0]]]
        for number in range(1, int(counts.max(initial=0))):
            mine = np.flatnonzero(counts > number)
            key_numbers.append(mine)
            entries.append(self._entries_at(np.full(len(mine), number), held, mine))
        all_entries, of_keys = np.concatenate(entries), np.concatenate(key_numbers)
        starts, ends = (
            self._table.numbers(column, all_entries) for column in (self._start, self._end)
        )
        return Held(
            distinct, held.hashes, group.entries, of_keys, all_entries, starts, ends
        ), row_key_numbers

    def _entries_at(self, numbers: Ints, held: Held, key_numbers: Ints) -> Ints:
        """Return the entries of sessions by their numbers and keys."""
        entries = held.firsts[key_numbers]
        others = np.flatnonzero(numbers)
        if len(others):
            mine = key_numbers[others]
            keys = [pa.array(numbers[others]), *_take(held.keys, mine)]
            group = self._table.group(keys, held.hashes[mine])
            entries[others] = group.in_row_order(group.spread(group.entries))
        return entries

    def _keep(self, held: Held, entries: Ints, key_numbers: Ints, others: Ints = _NONE) -> None:
        """Store the number of sessions per key; remove all entries but `entries` and `others`."""
        counts = np.bincount(key_numbers, minlength=len(held.firsts))
        used = np.flatnonzero(counts)
        self._table.put(self._count, held.firsts[used], counts[used])
        every = np.concatenate([held.firsts, held.entries, entries])
        gone = np.zeros(int(every.max(initial=0)) + 1, np.bool_)
        gone[every] = True
        gone[entries] = gone[others] = False
        self._table.release(every, np.flatnonzero(gone))

    def _late_rows(
        self, held: Held, key_numbers: Ints, starts: Ints, now: int
    ) -> npt.NDArray[np.bool_]:
        """Return a mask of late rows, which also join no session of earlier rows."""
        ends = starts + self._gap_ms
        alone_late: npt.NDArray[np.bool_] = ends - 1 + self._lateness_ms <= now
        if not alone_late.any():
            return alone_late
        sessions = Sessions.of(
            np.concatenate([held.key_numbers, key_numbers]),
            np.concatenate([held.starts, starts]),
            np.concatenate([held.ends, ends]),
        )
        known, new = np.split(sessions.ids, [len(held.key_numbers)])
        saved = np.zeros(len(sessions.key_numbers), np.bool_)
        saved[known] = saved[new[~alone_late]] = True
        late = alone_late & ~saved[new]
        # Other rows are in time if the session existed before them.
        doubtful = np.zeros(len(saved), np.bool_)
        doubtful[new[alone_late & saved[new]]] = True
        there: dict[int, list[tuple[int, int]]] = {}
        for index in np.flatnonzero(doubtful[known]).tolist():
            bounds = (int(held.starts[index]), int(held.ends[index]))
            there.setdefault(int(known[index]), []).append(bounds)
        for row in np.flatnonzero(doubtful[new]).tolist():
            mine = there.setdefault(int(new[row]), [])
            start, end = int(starts[row]), int(ends[row])
            joined = [session for session in mine if session[0] <= end and start <= session[1]]
            if alone_late[row] and not joined:
                late[row] = True
                continue
            for session in joined:
                mine.remove(session)
                start, end = min(start, session[0]), max(end, session[1])
            mine.append((start, end))
        return late

    def _read_keys(self, rows: pa.RecordBatch) -> list[pa.Array]:
        return [plain_keys(rows.column(name), name) for name in self._key]

    def _check_times(self, rows: pa.RecordBatch, starts: Ints) -> None:
        latest = int(starts.max())
        if latest > _INT64_MAX - self._gap_ms - self._lateness_ms:
            error = BadStateValue(f"a session that begins at {latest} ms since 1970 has no end")
            raise user_error(self.uid, error, self._to_readable(rows), int(starts.argmax()))

    def _wake_at(self, ends: Ints, keys: Sequence[pa.Array], now: int | None = None) -> None:
        """Queue keys for the moments at which their sessions are due or over."""
        moments = ends - 1
        passed = moments <= (self._watermark if now is None else now)
        self._wakes.add(np.where(passed, moments + self._lateness_ms, moments), keys)

    def _emit(self, entries: Ints) -> None:
        if not len(entries):
            return
        table = self._table
        bounds = [table.values(column, entries) for column in (self._start, self._end)]
        totals = [table.values(column, entries) for column in range(self._start)]
        keys = table.keys_of(entries)
        if self._sets:
            starts, ends = (table.numbers(column, entries) for column in (self._start, self._end))
            owned = self._sets_of(starts, ends, keys)
            totals = self._inputs.replace_counts(
                totals, self._sets.count_owned(owned, len(entries))
            )
        self._emit_windows(keys, bounds, totals)

    def _sets_of(self, starts: Ints, ends: Ints, keys: Sequence[pa.Array]) -> OwnedSets:
        """Return the sets of distinct values of these sessions, a group for each session."""
        last_times = ends - self._gap_ms
        return OwnedSets.of_ranges(
            starts // self._gap_ms, last_times // self._gap_ms, read_key_columns(keys)
        )


def _take(columns: Sequence[pa.Array], rows: Ints) -> list[pa.Array]:
    return [column.take(pa.array(rows)) for column in columns]
