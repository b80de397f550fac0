"""Window joins and `co_group` over two keyed streams, a batch at a time.

Each record is kept once for each of its windows, until the window is over. When windows are due,
the rows of both streams are grouped by key, for all keys at once. The function is called for their
pairs, for each key, or for many keys at once.

Invariants, for the window with number n, a watermark w, and kept rows:
    start = offset + n * slide;  end = start + size;  the moment of its kept rows is n
    it is due   <=>  end - 1 <= w;  it is over, and not kept  <=>  end - 1 + lateness <= w
    a record is late  <=>  all windows that it is in are over
    a window that was due before is emitted again for each further record
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from onceflow.core.errors import BadStateValue, ConfigError
from onceflow.core.plan.event_time import LateRecords, times_ms
from onceflow.core.plan.join_functions import WindowPairs
from onceflow.core.plan.window_batches import WindowBatches
from onceflow.core.plan.window_functions import CoWindowedFunction
from onceflow.core.plan.windows import PaneAssigner, pane_windows
from onceflow.core.plan.work import ProcessConnected
from onceflow.core.protocol.watermarks import MAX_WATERMARK
from onceflow.core.runtime.dataflow.channels import Batch
from onceflow.core.runtime.dataflow.due_windows import (
    BatchesOfWindows,
    DueWindows,
    GroupsOfWindows,
    PairsOfWindows,
    RowsOfWindows,
)
from onceflow.core.runtime.dataflow.function_context import KeyedContext
from onceflow.core.runtime.dataflow.function_operators import CoProcessor, SnapshottedOperator
from onceflow.core.runtime.dataflow.join_operators import choose_pair_maker
from onceflow.core.runtime.dataflow.keyed_operators import with_event_time
from onceflow.core.runtime.dataflow.operators import Emit, PendingSnapshot
from onceflow.core.runtime.dataflow.restored_event_time import (
    NOTHING_RESTORED,
    RestoredEventTime,
)
from onceflow.core.runtime.dataflow.user_functions import call_user, user_error
from onceflow.core.state import KeyedStateStore, hash_keys
from onceflow.core.state.keys import key_columns
from onceflow.core.state.keys.key_groups import Hashes, combine_hashes, hash_key_columns
from onceflow.core.state.keys.key_index import number_keys
from onceflow.core.state.states.kept_rows import (
    NUMBER_BITS,
    TIME_MAX,
    KeptRows,
    check_moments,
)
from onceflow.core.state.states.operator_state import OperatorStateStore
from onceflow.core.state.stores.keyed_store import PendingKeyedSnapshot as FrozenState

ROWS_AGAIN = 256
"""The number of late rows whose windows are emitted together: each brings all rows of its
windows."""
PARTS_ON_DISK = 16
"""The number of parts in which due windows are emitted if not all rows are in memory."""
_NUMBER_BITS_MIN = 14
"""The bits of the row index in windows that begin every millisecond: 16,384 rows per key."""
_LATE_WHY = "all their windows have closed"
_NOT_ALONE: npt.NDArray[np.bool_] = np.zeros(0, np.bool_)
_Keys: TypeAlias = tuple[key_columns.KeyColumn, ...]


class WindowJoinOperator(SnapshottedOperator):
    """An operator that emits a function's results for the windows of two streams."""

    def __init__(
        self,
        uid: str,
        work: ProcessConnected,
        store: KeyedStateStore,
        states: OperatorStateStore,
        schema: pa.Schema,
        event_time: RestoredEventTime = NOTHING_RESTORED,
    ) -> None:
        """Create the operator. `work` must have a function of windows that `takes_batches`."""
        of_windows = work.function
        assert isinstance(of_windows, CoWindowedFunction)
        assert isinstance(of_windows.windows, PaneAssigner)
        function = of_windows.records.function
        super().__init__(uid, function, store, states, schema)
        self._keys = work.keys
        self._times = [window_input.time for window_input in of_windows.inputs]
        self._windows = windows = pane_windows(of_windows.windows, of_windows.lateness_ms)
        self._number_bits = number_bits_of(windows.slide_ms)
        self._event_time = event_time
        self._watermark = event_time.least
        left, right = (
            KeptRows(
                store,
                f"onceflow.{side}-window-rows",
                schema_of_side,
                key,
                outer=False,
                number_bits=self._number_bits,
            )
            for side, schema_of_side, key in zip(
                ("left", "right"), of_windows.records.schemas, work.keys, strict=True
            )
        )
        self._kept = left, right
        self._open(of_windows)
        if isinstance(function, WindowPairs):
            make = choose_pair_maker(uid, function.function, schema, store, work.keys)
            self._of_windows: PairsOfWindows | GroupsOfWindows | BatchesOfWindows = PairsOfWindows(
                make, self._kept, work.keys, function.outer
            )
        elif isinstance(function, WindowBatches):
            self._of_windows = BatchesOfWindows(
                uid, function.function, windows, schema, self._kept, work.keys
            )
        else:
            self._of_windows = GroupsOfWindows(
                uid, function, windows, self._results, store, self._kept, work.keys
            )

    def _open(self, of_windows: CoWindowedFunction) -> None:
        """Open the states."""
        context = KeyedContext(self.store, self._states, self._operator, self._side_outputs)
        whose = type(of_windows.windows).__name__
        self._late = [
            LateRecords(whose, _LATE_WHY, window_input.late) for window_input in of_windows.inputs
        ]
        for late in self._late:
            late.open(context)
        function = of_windows.records.function
        call_user(self.uid, function.open, context)
        if context.registered is not None:
            raise ConfigError(
                f"{type(function).__name__} of {self.uid!r} uses timers, but a function of"
                " windows has none. Put a .process(…) after the windows, or use connect()"
            )
        self._cleaned_a_record = context.cleaned_a_record
        self.dropped = self.store.finish_open() + self._states.finish_open()

    @property
    def inputs(self) -> tuple[Emit, ...]:
        """The receivers of each stream's batches."""
        return (self.receive, self._receive_right)

    def process(self, batch: Batch) -> None:
        """Add the left stream's rows to their windows."""
        self._take(0, batch)

    def _receive_right(self, batch: Batch) -> None:
        self.records_in += batch.rows.num_rows
        self._take(1, batch)

    def on_watermark(self, watermark: int) -> None:
        """Emit the windows that are due, and remove those that are over."""
        # At the end of the input, advance only as far as windows need it: a restored job must not
        # treat all of its records as late.
        now = self._last_due() if watermark == MAX_WATERMARK else watermark
        if now <= self._watermark:
            return
        before, self._watermark = self._watermark, now
        until = self._last_ended(now)
        if all(
            kept_rows.next_moment is None or kept_rows.next_moment > until
            for kept_rows in self._kept
        ):
            return
        # Process the key groups in parts, so that the rows of one part can be evicted before the
        # next part is read. All rows at once may not fit into memory.
        for groups in max(
            (kept_rows.split_groups(PARTS_ON_DISK) for kept_rows in self._kept), key=len
        ):
            self._end_windows(before, now, groups)
        for kept in self._kept:
            kept.forget_moments(self._last_ended(now - self._windows.lateness_ms))

    def _end_windows(self, before: int, now: int, groups: range | None) -> None:
        """Emit windows that became due after `before`, up to `now`; remove those that are over."""
        due = self._find_due(before, now, groups)
        if due is not None:
            self._emit_windows(due)
        over = self._last_ended(now - self._windows.lateness_ms)
        for side, kept in enumerate(self._kept):
            if due is not None and self._windows.lateness_ms:
                kept.finish(due.sides[side].entries)
            kept.remove_some(kept.find_due(over, groups=groups))

    def _pending(self, pending: FrozenState) -> PendingSnapshot:
        taken = super()._pending(pending)
        return with_event_time(taken, self._event_time.elements(self._watermark))

    def _last_due(self) -> int:
        """Return the time at which the last open window is due, or event time if none is open."""
        last = [kept.last_moment for kept in self._kept if kept.last_moment is not None]
        windows = self._windows
        ends = [windows.offset_ms + number * windows.slide_ms + windows.size_ms for number in last]
        return max(ends) - 1 if ends else self._watermark

    def _last_ended(self, watermark: int) -> int:
        """Return the number of the last window that has ended at `watermark`."""
        windows = self._windows
        return (watermark + 1 - windows.size_ms - windows.offset_ms) // windows.slide_ms

    def _take(self, side: int, batch: Batch) -> None:
        """Add rows to their windows. Emit again windows that were emitted before."""
        if not batch.rows.num_rows:
            return
        try:
            for part in self._event_time.parts_of(batch, self._keys[side], self._watermark):
                self._take_part(side, *part)
        except BadStateValue as error:
            raise user_error(self.uid, error, batch.rows, error.row) from error
        self._side_outputs.flush()
        if self._cleaned_a_record:
            self.store.clean(self._cleaned_a_record * batch.rows.num_rows)

    def _take_part(self, side: int, rows: pa.RecordBatch, hashes: Hashes | None, now: int) -> None:
        """Add rows for which event time has reached `now`."""
        column = self._times[side]
        assert column is not None
        try:
            times = times_ms(rows.column(column), column)
            of_rows, numbers = self._assign_windows(times)
            over = self._last_ended(now - self._windows.lateness_ms)
            if int(numbers.min()) <= over:
                open_windows = numbers > over
                of_rows, numbers = of_rows[open_windows], numbers[open_windows]
                late = np.ones(len(times), np.bool_)
                late[of_rows] = False
                if late.any():
                    self._late[side].take_rows(rows.filter(pa.array(late)), now)
                if not len(of_rows):
                    return
            # If windows do not overlap, each row occurs at most once, so an equal count means all
            # rows.
            if self._windows.overlap or len(of_rows) < len(times):
                rows, times = rows.take(pa.array(of_rows)), times[of_rows]
                hashes = None if hashes is None else hashes[of_rows]
            self._keep(side, rows, hashes, times, numbers, now)
        except BadStateValue as error:
            raise user_error(self.uid, error, rows, error.row) from error

    def _assign_windows(self, times: key_columns.Ints) -> tuple[key_columns.Ints, key_columns.Ints]:
        """Return pairs of a row and the number of a window that contains it, sorted by both."""
        windows = self._windows
        # `check_moments` refuses times further away later; here they must only not overflow.
        near = np.clip(times, -2 * TIME_MAX, 2 * TIME_MAX) - windows.offset_ms
        last = near // windows.slide_ms
        if not windows.overlap:
            return np.arange(len(times)), last
        count = -(-windows.size_ms // windows.slide_ms)
        numbers = last[:, None] - np.arange(count - 1, -1, -1)
        inside = numbers * windows.slide_ms + windows.size_ms > near[:, None]
        return np.nonzero(inside)[0], numbers[inside]

    def _keep(
        self,
        side: int,
        rows: pa.RecordBatch,
        hashes: Hashes | None,
        times: key_columns.Ints,
        numbers: key_columns.Ints,
        now: int,
    ) -> None:
        """Keep each row in the window of its number. Emit again windows that were emitted."""
        names, kept = self._keys[side], self._kept[side]
        check_moments(numbers, times, self._times[side] or "", self._number_bits)
        arrays = [rows.column(name) for name in names]
        known = hash_keys(arrays, names) if hashes is None else hashes
        keys = key_columns.read_key_columns(arrays, names)
        entries = kept.add(keys, known, rows, times, numbers, _NOT_ALONE)
        used: tuple[list[key_columns.Ints], list[key_columns.Ints]] = ([], [])
        used[side].append(entries)
        again = np.flatnonzero(numbers <= self._last_ended(now))
        for start in range(0, len(again), ROWS_AGAIN):
            part = again[start : start + ROWS_AGAIN]
            of_part = tuple(column.take(part) for column in keys), known[part], numbers[part]
            sides = self._find_windows(side, entries[part], *of_part, used)
            mine = sides[side]
            # The window's first row on the late row's side identifies the window.
            repeats = _cut_before_repeats(mine.entries[mine.starts[:-1]])
            every = np.arange(len(part) + 1)
            self._emit_windows(DueWindows(numbers[part], sides, every, repeats))
        if not len(again):
            # Each row has its own entry, so the entries are distinct.
            kept.finish(entries)
            return
        for kept_rows, entries_used in zip(self._kept, used, strict=True):
            kept_rows.finish(np.unique(np.concatenate(entries_used)))

    def _find_windows(
        self,
        side: int,
        entries: key_columns.Ints,
        keys: _Keys,
        hashes: Hashes,
        numbers: key_columns.Ints,
        used: tuple[list[key_columns.Ints], list[key_columns.Ints]],
    ) -> tuple[RowsOfWindows, RowsOfWindows]:
        """Return, for each row, the rows of its window up to that row, in the order of arrival.

        `entries` are the entries of the rows, which are stored already.
        """
        sides: list[RowsOfWindows] = []
        for of_side, (kept, used_of_side) in enumerate(zip(self._kept, used, strict=True)):
            parts = list(kept.find_near(keys, hashes, numbers, numbers))
            none = [np.zeros(0, np.int64)]
            windows = np.concatenate([of_part for of_part, _ in parts] or none)
            partners = np.concatenate([of_part for _, of_part in parts] or none)
            used_of_side.append(partners)
            order_of_addition = kept.numbers(partners)
            if of_side == side:
                before = order_of_addition <= kept.numbers(entries)[windows]
                windows, partners = windows[before], partners[before]
                order_of_addition = order_of_addition[before]
            order = np.lexsort((order_of_addition, windows))
            sides.append(RowsOfWindows.of(partners[order], windows[order], len(entries)))
        left, right = sides
        return left, right

    def _find_due(self, before: int, now: int, groups: range | None) -> DueWindows | None:
        """Return the windows that became due after `before`, up to `now`; None if none did."""
        after, until = self._last_ended(before), self._last_ended(now)
        entries = [kept.find_due(until, after, groups) for kept in self._kept]
        if before < self._event_time.most:
            entries = [
                self._leave_out_fired(kept, side_entries)
                for kept, side_entries in zip(self._kept, entries, strict=True)
            ]
        if not any(map(len, entries)):
            return None
        keys = [
            kept.keys(side_entries) for kept, side_entries in zip(self._kept, entries, strict=True)
        ]
        numbers = np.concatenate(
            [
                kept.moments(side_entries)
                for kept, side_entries in zip(self._kept, entries, strict=True)
            ]
        )
        windows, numbers = _number_windows(numbers, keys[0], keys[1])
        of_sides = np.split(windows, [len(entries[0])])
        left, right = (
            RowsOfWindows.sort(side_entries, of_rows, len(numbers))
            for side_entries, of_rows in zip(entries, of_sides, strict=True)
        )
        cuts = np.flatnonzero(np.diff(numbers)) + 1
        ends = np.array([0, len(numbers)])
        return DueWindows(numbers, (left, right), np.insert(ends, 1, cuts), ends)

    def _leave_out_fired(self, kept: KeptRows, entries: key_columns.Ints) -> key_columns.Ints:
        """Return the entries without those whose windows were emitted before a restore."""
        windows = self._windows
        watermarks = self._event_time.watermarks_of(kept.key_groups(entries))
        starts = windows.offset_ms + kept.moments(entries) * windows.slide_ms
        return entries[watermarks < starts + windows.size_ms - 1]

    def _emit_windows(self, due: DueWindows) -> None:
        for batch in self._of_windows.results(due):
            self.emit(batch)
            self._side_outputs.flush()
        # A function of batches may have returned no batch.
        self._side_outputs.flush()


def connect_streams(
    uid: str,
    work: ProcessConnected,
    store: KeyedStateStore,
    states: OperatorStateStore,
    schema: pa.Schema,
    event_time: RestoredEventTime = NOTHING_RESTORED,
) -> WindowJoinOperator | CoProcessor:
    """Return the operator for a function of two connected streams.

    It processes whole batches if windows and function allow that, otherwise single records.
    """
    by_batches = isinstance(work.function, CoWindowedFunction) and work.function.takes_batches
    operator = WindowJoinOperator if by_batches else CoProcessor
    return operator(uid, work, store, states, schema, event_time)


def number_bits_of(slide_ms: int) -> int:
    """Return the number of bits used for the row index within one key and window.

    A window's number and the row index share one integer. If windows begin more often, their
    numbers are larger, so the index gets fewer bits: windows of the years 1 to 9999 must fit.
    """
    return min(NUMBER_BITS, _NUMBER_BITS_MIN + slide_ms.bit_length() - 1)


def _cut_before_repeats(windows: key_columns.Ints) -> key_columns.Ints:
    """Divide `windows` into parts in which no window occurs twice; return the limits of the parts.

    The first limit is 0, the last one the number of `windows`.
    """
    cuts, seen = [0], set[int]()
    for index, window in enumerate(windows.tolist()):
        if window in seen:
            cuts.append(index)
            seen.clear()
        seen.add(window)
    return np.array([*cuts, len(windows)])


def _number_windows(
    numbers: key_columns.Ints, left: _Keys, right: _Keys
) -> tuple[key_columns.Ints, key_columns.Ints]:
    """Return the index of each row's window, and the number of each window. A window has one key.

    The rows are the left ones and then the right ones; `numbers` are their windows' numbers. The
    windows are sorted by number. Windows of one number are in no particular order.
    """
    hashes = np.concatenate([hash_key_columns(left), hash_key_columns(right)])
    is_one_number = bool((numbers == numbers[0]).all())
    if not is_one_number:
        combine_hashes(hashes, numbers.view(np.uint64))

    def equal(firsts: key_columns.Ints, others: key_columns.Ints) -> key_columns.Mask:
        same = _equal_keys_of_sides(left, right, firsts, others)
        same &= numbers[firsts] == numbers[others]
        return same

    windows, leaders = number_keys(hashes, equal)
    numbers = numbers[leaders]
    if is_one_number:
        return windows, numbers
    order = np.argsort(numbers, kind="stable")
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    return rank[windows], numbers[order]


def _equal_keys_of_sides(
    left: _Keys, right: _Keys, firsts: key_columns.Ints, others: key_columns.Ints
) -> key_columns.Mask:
    """Return a mask of the pairs of rows whose keys are equal.

    Right rows are numbered after the left ones. `firsts` has the lower number of each pair.
    """
    left_count = len(left[0])
    first_is_left, other_is_left = firsts < left_count, others < left_count
    same: key_columns.Mask = np.zeros(len(firsts), np.bool_)
    # A right row never precedes a left row.
    for pairs, first_keys, other_keys in (
        (other_is_left, left, left),
        (first_is_left & ~other_is_left, left, right),
        (~first_is_left, right, right),
    ):
        first_rows = firsts[pairs] - (0 if first_keys is left else left_count)
        other_rows = others[pairs] - (0 if other_keys is left else left_count)
        same[pairs] = key_columns.equal_keys(
            [column.take(first_rows) for column in first_keys],
            [column.take(other_rows) for column in other_keys],
        )
    return same
