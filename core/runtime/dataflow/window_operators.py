"""Aggregates of windows, a batch at a time.

Totals are kept for each pane and key (see `protocol.windows`). A due window is emitted with one row
per key. A pane is removed when all of its windows are over. Each snapshot contains the event time
with the key groups that it applies to: so a window fires only once, and late records stay late,
after a restore at any parallelism. At the end of the input, event time advances to the time at
which the last window is due: a restored job treats its windows as fired, and keeps them for the
allowed lateness.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from onceflow.core.arrow.kinds import cast_rows
from onceflow.core.errors import BadStateValue
from onceflow.core.logged_counts import gains_digit
from onceflow.core.plan.aggregates import AggregateInputs
from onceflow.core.plan.all_windows import ALL, list_totals
from onceflow.core.plan.event_time import times_ms
from onceflow.core.plan.windows import PaneAssigner, pane_windows
from onceflow.core.plan.work import AggregateWindows
from onceflow.core.protocol.watermarks import MAX_WATERMARK
from onceflow.core.runtime.dataflow import user_functions
from onceflow.core.runtime.dataflow.channels import Batch
from onceflow.core.runtime.dataflow.keyed_operators import KeyedOperator, with_event_time
from onceflow.core.runtime.dataflow.operators import PendingSnapshot
from onceflow.core.runtime.dataflow.restored_event_time import RestoredEventTime
from onceflow.core.state import AccumulatorColumn, KeyedStateStore, hash_keys
from onceflow.core.state.api.context import StateClock
from onceflow.core.state.keys.key_columns import Ints
from onceflow.core.state.keys.key_groups import Hashes
from onceflow.core.state.snapshots.canonical import Groups
from onceflow.core.state.stores.keyed_store import PendingKeyedSnapshot as FrozenState

ROWS_A_BATCH = 32_768
WINDOWS_SELECTED_MAX = 64
"""The number of overlapping windows whose panes are looked up at once."""
ENTRIES_MERGED_MAX = 262_144
"""The number of entries that are merged at once, if windows overlap; bounds the memory that copies
of them need. At least one window is merged."""
_log = logging.getLogger("onceflow.runtime")
_INT64 = np.iinfo(np.int64)
_MOMENT = pa.timestamp("ms", "UTC")


class WindowOperator(KeyedOperator):
    """The common base of window operators: event time that survives a restore, and late records."""

    def __init__(
        self,
        uid: str,
        work: AggregateWindows,
        store: KeyedStateStore,
        input_schema: pa.Schema,
        schema: pa.Schema,
        key_groups: range,
        restored: Sequence[bytes],
    ) -> None:
        super().__init__(uid, store)
        self._key = work.key
        self._time = work.time
        self._names = work.names
        self._schema = schema
        self._late_tag = work.late
        if work.late is not None:
            self.side_schemas[work.late.name] = work.late.schema
        self._inputs = AggregateInputs(work.aggregates, input_schema)
        self._restored = RestoredEventTime(restored, key_groups)
        self._watermark = self._restored.least

    @abstractmethod
    def _take(self, rows: pa.RecordBatch, hashes: Hashes | None, now: int) -> None:
        """Add rows to their windows, at event time `now`."""

    @abstractmethod
    def _group_of_hashes(self, hashes: Hashes) -> Groups:
        """Return the key group of each key."""

    def process(self, batch: Batch) -> None:
        """Add the rows to their windows; emit windows that were due before again."""
        now = self._now()
        if not batch.rows.num_rows:
            return
        if now >= self._restored.most:
            self._take(batch.rows, batch.hashes, now)
            return
        # Some key groups come from a subtask that had reached a later event time.
        hashes = batch.hashes
        if hashes is None:
            hashes = hash_keys([batch.rows.column(name) for name in self._key])
        watermarks = np.maximum(self._restored.watermarks_of(self._group_of_hashes(hashes)), now)
        for watermark in np.unique(watermarks).tolist():
            mine = watermarks == watermark
            self._take(batch.rows.filter(pa.array(mine)), hashes[mine], watermark)

    def _pending(self, pending: FrozenState) -> PendingSnapshot:
        taken = super()._pending(pending)
        return with_event_time(taken, self._restored.elements(self._watermark))

    def _now(self) -> int:
        return self._watermark

    def _times_of(self, rows: pa.RecordBatch) -> Ints:
        assert self._time is not None
        return read_times(self.uid, rows, self._time)

    def _emit_windows(
        self, keys: Sequence[pa.Array], bounds: Sequence[pa.Array], results: Sequence[pa.Array]
    ) -> None:
        """Emit records of these columns, as far as they are in the schema of the output."""
        columns = dict(zip(self._names, bounds, strict=True))
        columns |= dict(zip(self._key, keys, strict=True))
        columns |= dict(zip(self._inputs.names, results, strict=True))
        made = pa.record_batch(
            [self._cast_result(columns[field.name], field, bounds) for field in self._schema],
            schema=self._schema,
        )
        for first in range(0, made.num_rows, ROWS_A_BATCH):
            self.emit(made.slice(first, ROWS_A_BATCH))

    def _cast_result(
        self, column: pa.Array, field: pa.Field, bounds: Sequence[pa.Array]
    ) -> pa.Array:
        """Return a column of results in its type. Sums without a key are wider before.

        Raises:
            BadStateValue: A sum does not fit; names the window and the value.
        """
        try:
            return cast_rows(column, field.type)
        except pa.ArrowInvalid as error:
            row = _find_misfit(column, field.type)
            start, end = (cast_rows(bound, _MOMENT)[row].as_py().isoformat() for bound in bounds)
            raise BadStateValue(
                f"the sum {field.name!r} of operator {self.uid!r} is {column[row]} in the window"
                f" from {start} to {end}, which leaves {field.type} (the sum of a column of"
                " DECIMAL(20, 0) has 38 digits)"
            ) from error

    def _late(self, rows: pa.RecordBatch) -> None:
        """Emit to the late side output, or reject, rows whose windows are all over."""
        if self._late_tag is not None:
            self.emit_to(self._late_tag.name, rows.select(self._late_tag.schema.names))
            return
        before, late = self.rejected, self._count_records(rows)
        self.rejected = before + late
        if gains_digit(before, self.rejected):
            shown = user_functions.record_text(self._to_readable(rows.slice(0, 1)), 0)
            _log.warning(
                "operator %s has dropped late records, %d so far: event time is at %d ms, and"
                " all their windows have closed; one of them: %s",
                self.uid,
                self.rejected,
                self._watermark,
                shown[: user_functions.RECORD_LENGTH_MAX],
            )

    def _count_records(self, rows: pa.RecordBatch) -> int:
        """Return the number of the user's records in some rows."""
        return rows.num_rows

    def _to_readable(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Return rows as logs and errors show them."""
        return rows.drop_columns([ALL]) if ALL in rows.schema.names else rows


def _find_misfit(column: pa.Array, kind: pa.DataType) -> int:
    """Return the first row whose value `kind` does not hold."""
    for row in range(len(column)):
        try:
            cast_rows(column.slice(row, 1), kind)
        except pa.ArrowInvalid:
            return row
    raise AssertionError(f"{kind} holds each value of the column")


def read_times(uid: str, rows: pa.RecordBatch, column: str) -> Ints:
    """Return the event times of rows for the operator `uid`, in ms.

    Raises:
        UserFunctionError: An event time is null, or too far from 1970.
    """
    try:
        return times_ms(rows.column(column), column)
    except BadStateValue as error:
        raise user_functions.user_error(uid, error, rows, error.row) from error


class WindowAggregator(WindowOperator):
    """An operator that emits aggregates of each key and window, for windows with fixed bounds."""

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
        assert isinstance(work.windows, PaneAssigner)
        self._windows = windows = pane_windows(work.windows, work.lateness_ms)
        self._table = store.accumulators(
            f"onceflow.panes-{windows.pane_ms}-{windows.offset_ms}",
            [input_schema.field(name).type for name in work.key],
            self._list_totals(work, input_schema),
            namespaced=True,
        )
        self._sets = self._inputs.open_sets(store, work.key)
        self.dropped = store.finish_open()
        self._clock: StateClock | None = None
        if work.windows.by_clock:
            self._clock = StateClock()
        self._panes = {self._pane_at(start) for start in self._table.namespaces().tolist()}
        self._next_ms = windows.next_ms(self._panes, self._watermark)

    def _list_totals(
        self, work: AggregateWindows, input_schema: pa.Schema
    ) -> list[AccumulatorColumn]:
        """Return the columns of the panes. Those of the aggregates are the first ones."""
        return list_totals(work.aggregates, input_schema, work.key)

    def _emit_early(self, entries: Ints, now: int) -> None:
        """Emit early results of entries to which rows were added, and which may repeat.

        This class has none.
        """

    def _group_of_hashes(self, hashes: Hashes) -> Groups:
        return self._table.group_of_hashes(hashes)

    def _take(self, rows: pa.RecordBatch, hashes: Hashes | None, now: int) -> None:
        panes = self._read_panes(rows)
        over = self._windows.last_over(now)
        if int(panes.min()) <= over:
            kept = panes > over
            self._late(rows.filter(pa.array(~kept)))
            rows, panes = rows.filter(pa.array(kept)), panes[kept]
            hashes = None if hashes is None else hashes[kept]
            if not rows.num_rows:
                return
        starts = panes * self._windows.pane_ms + self._windows.offset_ms
        try:
            entries = self._fold(starts, rows, hashes)
        except BadStateValue as error:
            shown = self._to_readable(rows)
            raise user_functions.user_error(self.uid, error, shown, error.row) from error
        touched = _distinct(panes)
        self._panes.update(touched)
        # The earliest window of the earliest pane shows if any window has fired before.
        if self._windows.ends_of(touched[0])[0] - 1 <= now:
            self._fire_again(np.unique(entries), touched, now)
        self._emit_early(entries, now)
        self._table.finish(entries)
        next_ms = self._windows.next_ms(touched, self._watermark)
        if next_ms is not None and (self._next_ms is None or next_ms < self._next_ms):
            self._next_ms = next_ms

    def _fold(self, starts: Ints, rows: pa.RecordBatch, hashes: Hashes | None) -> Ints:
        """Add rows to the panes that begin at `starts`, and return the rows' entries."""
        keys = [rows.column(name) for name in self._key]
        by_time = self._clock is None and self._inputs.needs_times
        times = self._times_of(rows) if by_time else None
        values = user_functions.call_user(self.uid, lambda: self._inputs.read(rows, times))
        self._sets.add(rows, starts, keys, hashes, values)
        return self._table.fold(starts, keys, hashes, values)

    @property
    def due_in_s(self) -> float | None:
        """The seconds until the next window in processing time is due; None if there is none."""
        if self._clock is None or self._next_ms is None:
            return None
        return max(0, self._next_ms - _last_over_ms(self._clock)) / 1000

    def on_time(self) -> None:
        """Emit the processing-time windows that are due."""
        if self._clock is not None:
            self._advance(_last_over_ms(self._clock))

    def flush(self) -> None:
        """Emit the open windows in processing time, because no record follows."""
        if self._clock is None or not self._panes:
            return
        first, stop = min(self._panes), max(self._panes) + 1
        entries = self._select(first, stop)
        self._emit_panes(entries, self._table.namespaces_of(entries) + self._windows.size_ms)
        self._table.remove(entries)
        self._sets.remove(*self._limits(first, stop))
        self._panes.clear()
        self._next_ms = None

    def on_watermark(self, watermark: int) -> None:
        """Emit the event-time windows that are due."""
        if self._clock is not None:
            return
        # At the end of the input, advance only as far as windows need it: a job restored from here
        # must not treat all of its records as late.
        now = self._last_due() if watermark == MAX_WATERMARK else watermark
        if now > self._watermark:
            self._advance(now)

    def _last_due(self) -> int:
        """Return the time at which the last open window is due, or event time if none is open."""
        if not self._panes:
            return self._watermark
        return min(self._windows.ends_of(max(self._panes))[-1] - 1, MAX_WATERMARK)

    def _pending(self, pending: FrozenState) -> PendingSnapshot:
        if self._clock is not None:
            return KeyedOperator._pending(self, pending)
        return super()._pending(pending)

    def _now(self) -> int:
        if self._clock is not None:
            self._advance(_last_over_ms(self._clock))
        return self._watermark

    def _read_panes(self, rows: pa.RecordBatch) -> Ints:
        windows = self._windows
        if self._clock is not None:
            pane = (self._clock.now_ms() - windows.offset_ms) // windows.pane_ms
            return np.full(rows.num_rows, pane, np.int64)
        panes: Ints = (self._times_of(rows) - windows.offset_ms) // windows.pane_ms
        return panes

    def _pane_at(self, start_ms: int) -> int:
        return (start_ms - self._windows.offset_ms) // self._windows.pane_ms

    def _advance(self, now: int) -> None:
        """Emit the windows that are due at `now`, and remove panes that are over."""
        before, self._watermark = self._watermark, now
        if self._next_ms is None or now < self._next_ms:
            return
        self._fire(before, now)
        over = self._windows.last_over(now)
        gone = [pane for pane in self._panes if pane <= over]
        if gone:
            self._table.remove(self._select(min(gone), over + 1))
            self._sets.remove(*self._limits(min(gone), over + 1))
            self._panes.difference_update(gone)
        self._next_ms = self._windows.next_ms(self._panes, now)

    def _select(self, first: int, stop: int) -> Ints:
        """Return the entries of panes `first` (inclusive) to `stop` (exclusive)."""
        return self._table.select(*self._limits(first, stop))

    def _limits(self, first: int, stop: int) -> tuple[int, int]:
        """Return the namespaces of the panes `first` (inclusive) to `stop` (exclusive)."""
        start_of = self._windows.start_of
        return max(start_of(first), _INT64.min), min(start_of(stop), _INT64.max)

    def _fire(self, before: int, now: int) -> None:
        """Emit the windows that became due after `before`, up to `now`."""
        windows = self._windows
        due = windows.due(self._panes, before, now)
        if windows.overlap:
            for first in range(0, len(due), WINDOWS_SELECTED_MAX):
                for entries, ends in self._list_windows(due[first : first + WINDOWS_SELECTED_MAX]):
                    self._emit_merged(*self._not_fired(entries, ends, before))
        elif due:
            # Each pane is a window, and all panes in between are due, too: emit all at once.
            entries = self._select(windows.panes_of(due[0]).start, windows.panes_of(due[-1]).stop)
            ends = self._table.namespaces_of(entries) + windows.size_ms
            self._emit_panes(*self._not_fired(entries, ends, before))

    def _list_windows(self, due: Sequence[int]) -> Iterator[tuple[Ints, Ints]]:
        """Yield the entries of overlapping windows with the end of each, several windows at once.

        An entry that is in several windows is repeated.
        """
        windows = self._windows
        entries = self._select(windows.panes_of(due[0]).start, windows.panes_of(due[-1]).stop)
        starts, ends = self._table.namespaces_of(entries), np.array(due)
        firsts = np.searchsorted(starts, ends - windows.size_ms)
        stops = np.searchsorted(starts, ends)
        # Distinct values are counted one window at a time.
        entries_max = 1 if self._sets else ENTRIES_MERGED_MAX
        at = 0
        while at < len(due):
            counts = np.cumsum(stops[at:] - firsts[at:])
            stop = at + max(1, int(np.searchsorted(counts, entries_max, "right")))
            ranges = zip(firsts[at:stop], stops[at:stop], strict=True)
            chosen = np.concatenate([entries[first:last] for first, last in ranges])
            yield chosen, np.repeat(ends[at:stop], stops[at:stop] - firsts[at:stop])
            at = stop

    def _not_fired(self, entries: Ints, ends: Ints, before: int) -> tuple[Ints, Ints]:
        """Return the entries, and their ends, whose windows have not fired before a restore."""
        if before >= self._restored.most:
            return entries, ends
        watermarks = self._restored.watermarks_of(self._table.groups_of(entries))
        return entries[watermarks < ends - 1], ends[watermarks < ends - 1]

    def _fire_again(self, changed: Ints, panes: Sequence[int], now: int) -> None:
        """Emit again the fired windows of changed entries in these panes that are not over."""
        windows = self._windows
        for end in windows.due(panes, now - windows.lateness_ms, now):
            entries = self._select(windows.panes_of(end).start, windows.panes_of(end).stop)
            mine = np.isin(entries, changed)
            if windows.overlap and mine.any():
                self._emit_merged(entries, np.full(len(entries), end), mine)
            else:
                self._emit_panes(entries[mine], np.full(int(mine.sum()), end))

    def _emit_panes(self, entries: Ints, ends: Ints) -> None:
        """Emit windows of one pane each; `ends` has the end of each entry's window."""
        totals = [self._table.values(index, entries) for index in range(self._inputs.count)]
        self._emit(entries, ends, totals)

    def _emit_merged(
        self, entries: Ints, ends: Ints, of_keys: npt.NDArray[np.bool_] | None = None
    ) -> None:
        """Emit windows of several panes, of all keys or of the keys of some entries.

        `ends` has the end of the window in which each entry counts.
        """
        leaders, positions, totals = self._table.merge_by_key(entries, ends)
        if of_keys is not None:
            chosen = np.unique(positions[of_keys])
            leaders, totals = leaders[chosen], [total.take(pa.array(chosen)) for total in totals]
        entries, ends = entries[leaders], ends[leaders]
        if self._sets and len(ends):
            # A value that is in several panes of the window counts once.
            panes = self._windows.panes_of(int(ends[0]))
            keys = self._table.keys_of(entries)
            if of_keys is None:
                counts = self._sets.count_union(*self._limits(panes.start, panes.stop), keys)
            else:
                starts = [self._windows.start_of(pane) for pane in self._panes.intersection(panes)]
                counts = self._sets.count_keys(np.array(starts), keys)
            totals = self._inputs.replace_counts(totals, counts)
        self._emit(entries, ends, totals)

    def _emit(self, entries: Ints, ends: Ints, totals: Sequence[pa.Array]) -> None:
        moments = [pa.array(ends - self._windows.size_ms), pa.array(ends)]
        self._emit_windows(self._table.keys_of(entries), moments, totals)


def _last_over_ms(clock: StateClock) -> int:
    """Return the last millisecond that is over by the clock, as a watermark in processing time.

    Records still arrive in the current one: as a watermark it would make them late for its window.
    """
    return clock.now_ms() - 1


def _distinct(panes: Ints) -> list[int]:
    """Return the distinct panes, in order."""
    first, last = int(panes.min()), int(panes.max())
    if first == last:
        return [first]
    distinct: list[int]
    # Counting is faster than sorting, but needs memory for the whole range.
    if last - first < 1 << 16:
        distinct = (np.flatnonzero(np.bincount(panes - first)) + first).tolist()
    else:
        distinct = np.unique(panes).tolist()
    return distinct
