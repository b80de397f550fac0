"""Due windows of two streams, and the results of functions of these windows or of their pairs.

A window here belongs to one key. Its rows are entries of the two tables of kept rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from onceflow.core.plan.functions import Record
from onceflow.core.plan.window_batches import CoGroupBatch, CoGroupBatchFunction, WindowRows
from onceflow.core.plan.window_functions import CoGroupFunction, TimeWindow
from onceflow.core.protocol.watermarks import PaneWindows
from onceflow.core.runtime.dataflow import user_functions
from onceflow.core.runtime.dataflow.join_operators import MakesPairs
from onceflow.core.runtime.dataflow.result_rows import ResultRows
from onceflow.core.state import KeyedStateStore
from onceflow.core.state.keys.key_columns import Ints
from onceflow.core.state.states.kept_rows import ROWS_A_CHUNK, KeptRows

KeptSides: TypeAlias = tuple[KeptRows, KeptRows]
"""The kept rows of the left stream, and those of the right stream."""
SideKeys: TypeAlias = tuple[Sequence[str], Sequence[str]]


@dataclass(frozen=True, slots=True)
class RowsOfWindows:
    """The rows of some windows in one stream, sorted by window, then by the order of addition."""

    entries: Ints
    windows: Ints
    """The index of each row's window."""
    starts: Ints
    """The position of the first row of each window, and the number of rows at the end."""

    @classmethod
    def of(cls, entries: Ints, windows: Ints, window_count: int) -> RowsOfWindows:
        """Build from rows that are sorted already."""
        starts: Ints = np.zeros(window_count + 1, np.int64)
        np.cumsum(np.bincount(windows, minlength=window_count), out=starts[1:])
        return cls(entries, windows, starts)

    @classmethod
    def sort(cls, entries: Ints, windows: Ints, window_count: int) -> RowsOfWindows:
        """Build from unsorted rows. Rows of one window keep their order."""
        bits = max(len(windows) - 1, 1).bit_length()
        # Distinct integers, as in `Grouping`: sorting them is faster than a stable argsort.
        packed = (windows << bits) | np.arange(len(windows))
        packed.sort()
        order = packed & ((1 << bits) - 1)
        return cls.of(entries[order], packed >> bits, window_count)

    @property
    def counts(self) -> Ints:
        """The number of rows of each window."""
        return np.diff(self.starts)

    def cut(self, first: int, stop: int) -> RowsOfWindows:
        """Return the rows of the windows `first` (inclusive) to `stop` (exclusive)."""
        start, end = int(self.starts[first]), int(self.starts[stop])
        starts = self.starts[first : stop + 1] - start
        return RowsOfWindows(self.entries[start:end], self.windows[start:end] - first, starts)


@dataclass(frozen=True, slots=True)
class DueWindows:
    """Due windows, in the order in which their results are emitted."""

    numbers: Ints
    """The number of each window, which begins at offset + number * slide."""
    sides: tuple[RowsOfWindows, RowsOfWindows]
    cuts: Ints
    """Limits, from 0 to the number of windows: between two limits each key has at most one
    window."""
    cuts_of_repeats: Ints
    """Limits of the same kind: between two limits each window occurs at most once."""

    def __len__(self) -> int:
        return len(self.numbers)


class PairsOfWindows:
    """Builds pairs of the left and the right rows of windows, and rows without a partner."""

    def __init__(
        self, make: MakesPairs, kept: KeptSides, keys: SideKeys, outer: tuple[bool, bool]
    ) -> None:
        self._make = make
        self._kept = kept
        self._keys = keys
        self._outer = outer

    def results(self, due: DueWindows) -> Iterator[pa.RecordBatch]:
        """Yield the results of each pair, and those of outer rows without a pair."""
        if not any(self._outer):
            yield from self._pairs(*due.sides)
            return
        # The rows of a window either all have partners or all have none. The calls for one key
        # keep the order of its windows, because the function's states may depend on it.
        for first, stop in pairwise(due.cuts.tolist()):
            left, right = (side.cut(first, stop) for side in due.sides)
            yield from self._pairs(left, right)
            if self._outer[0]:
                yield from self._alone(0, left.entries[right.counts[left.windows] == 0])
            if self._outer[1]:
                yield from self._alone(1, right.entries[left.counts[right.windows] == 0])

    def _pairs(self, left: RowsOfWindows, right: RowsOfWindows) -> Iterator[pa.RecordBatch]:
        partners = right.counts[left.windows]
        for start, stop in _split(np.cumsum(partners)):
            counts = partners[start:stop]
            of_left = np.repeat(np.arange(start, stop), counts)
            numbers = np.arange(len(of_left)) - np.repeat(np.cumsum(counts) - counts, counts)
            of_right = right.starts[left.windows[of_left]] + numbers
            # The pairs of a row with very many partners are split into several chunks.
            for first in range(0, len(of_left), ROWS_A_CHUNK):
                part = slice(first, first + ROWS_A_CHUNK)
                mine = self._kept[0].rows(left.entries[of_left[part]])
                keys = [mine.column(name) for name in self._keys[0]]
                theirs = self._kept[1].rows(right.entries[of_right[part]], keys)
                yield self._make(mine, theirs, mine.num_rows)

    def _alone(self, side: int, entries: Ints) -> Iterator[pa.RecordBatch]:
        for first in range(0, len(entries), ROWS_A_CHUNK):
            rows = self._kept[side].rows(entries[first : first + ROWS_A_CHUNK])
            left, right = (rows, None) if side == 0 else (None, rows)
            yield self._make(left, right, rows.num_rows)


class GroupsOfWindows:
    """Calls a function for each window, with the state of its key."""

    def __init__(
        self,
        uid: str,
        function: CoGroupFunction,
        windows: PaneWindows,
        results: ResultRows,
        store: KeyedStateStore,
        kept: KeptSides,
        keys: SideKeys,
    ) -> None:
        self._uid = uid
        self._process = function.process
        self._windows = windows
        self._results = results
        self._store = store
        self._kept = kept
        self._keys = keys

    def results(self, due: DueWindows) -> Iterator[pa.RecordBatch]:
        """Yield the function's results for each window."""
        rows_until = due.sides[0].starts[1:] + due.sides[1].starts[1:]
        for first, stop in _split(rows_until):
            user_functions.call_user(self._uid, self._call, due, first, stop)
            yield self._results.batch()

    def _call(self, due: DueWindows, first: int, stop: int) -> None:
        """Call the function for the windows `first` (inclusive) to `stop` (exclusive)."""
        left, right = (side.cut(first, stop) for side in due.sides)
        (lefts, left_keys), (rights, right_keys) = (
            self._records(0, left.entries),
            self._records(1, right.entries),
        )
        left_at, right_at = left.starts.tolist(), right.starts.tolist()
        # Every window has at least one row; take the key from it.
        keys = [
            left_keys[at] if at < left_stop else right_keys[other_at]
            for at, left_stop, other_at in zip(left_at, left_at[1:], right_at, strict=False)
        ]
        self._store.prefetch(keys)
        set_current_key, process = self._store.set_current_key, self._process
        take, take_record = self._results.take, self._results.take_record
        for key, window, at, left_stop, other_at, right_stop in zip(
            keys,
            self._find_bounds(due.numbers[first:stop]),
            left_at,
            left_at[1:],
            right_at,
            right_at[1:],
            strict=False,
        ):
            set_current_key(key)
            result: Any = process(key, window, lefts[at:left_stop], rights[other_at:right_stop])
            if result.__class__ is dict:
                take_record(result)
            else:
                take(result)

    def _find_bounds(self, numbers: Ints) -> list[TimeWindow]:
        """Return the bounds of each window. Windows of many keys share a number."""
        windows = self._windows
        distinct, indices = np.unique(numbers, return_inverse=True)
        starts_ms = (windows.offset_ms + distinct * windows.slide_ms).tolist()
        times = [TimeWindow(start_ms, start_ms + windows.size_ms) for start_ms in starts_ms]
        return [times[index] for index in indices.tolist()]

    def _records(self, side: int, entries: Ints) -> tuple[list[Record], list[Any]]:
        """Return the records of these rows, and the key of each."""
        if not len(entries):
            return [], []
        records = user_functions.BatchRecords(self._kept[side].rows(entries))
        keys = user_functions.keys_of_records(self._uid, records, self._keys[side])
        return list(chain.from_iterable(records.pieces())), keys


class BatchesOfWindows:
    """Calls a function for many windows at once."""

    def __init__(
        self,
        uid: str,
        function: CoGroupBatchFunction,
        windows: PaneWindows,
        schema: pa.Schema,
        kept: KeptSides,
        keys: SideKeys,
    ) -> None:
        self._uid = uid
        self._process = function.process
        self._windows = windows
        self._schema = schema
        self._kept = kept
        self._keys = keys

    def results(self, due: DueWindows) -> Iterator[pa.RecordBatch]:
        """Yield the function's results for the windows."""
        rows_until = due.sides[0].starts + due.sides[1].starts
        for start, end in pairwise(due.cuts_of_repeats.tolist()):
            for first, stop in _split(rows_until[start + 1 : end + 1] - rows_until[start]):
                windows = self._slice(due, start + first, start + stop)
                made = user_functions.call_user(self._uid, self._process, windows)
                if made is not None:
                    yield user_functions.as_schema(made, self._schema, self._uid)

    def _slice(self, due: DueWindows, first: int, stop: int) -> CoGroupBatch:
        """Return the windows `first` (inclusive) to `stop` (exclusive), with their rows."""
        sides = [side.cut(first, stop) for side in due.sides]
        left, right = (
            WindowRows(kept.rows(side.entries), side.windows, side.starts[:-1], side.counts)
            for kept, side in zip(self._kept, sides, strict=True)
        )
        # Every window has at least one row; take the key from it. Right rows follow the left ones.
        of_keys = np.where(left.counts > 0, left.firsts, left.rows.num_rows + right.firsts)
        keys = [
            pa.concat_arrays([left.rows.column(left_name), right.rows.column(other)]).take(
                pa.array(of_keys)
            )
            for left_name, other in zip(*self._keys, strict=True)
        ]
        starts_ms = self._windows.offset_ms + due.numbers[first:stop] * self._windows.slide_ms
        return CoGroupBatch(
            pa.record_batch(keys, names=list(self._keys[0])),
            starts_ms,
            starts_ms + self._windows.size_ms,
            left,
            right,
        )


def _split(until: Ints) -> Iterator[tuple[int, int]]:
    """Yield ranges (inclusive, exclusive) of items with about `ROWS_A_CHUNK` rows each.

    `until[i]` is the number of rows of the items up to the i-th. A range has at least one item.
    """
    start, done = 0, 0
    while start < len(until):
        stop = max(start + 1, int(np.searchsorted(until, done + ROWS_A_CHUNK, "right")))
        yield start, stop
        start, done = stop, int(until[stop - 1])
