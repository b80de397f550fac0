"""Joins of two keyed streams by the time distance of their records, a batch at a time.

A record is kept until no partner in the other stream can arrive any more. The later record of a
pair produces it: a batch's rows are matched with the kept rows of the other stream, then kept
themselves.

Invariants, at a time w (the watermark, or the clock), for records of the left stream; those of the
right are their mirror:
    a pair  <=>  lower <= right's time - left's time <= upper
    late  <=>  event time <= w;  a late record is not joined
    kept as long as  time + upper > w, and at most one step longer: moments are whole steps
    if a column of the left stream is the upper limit, its value takes the place of time + upper;
    a right record is then kept as long as before, because `lower` is fixed
    alone  <=>  kept, on an outer side, and in no pair so far;  emitted alone when it is dropped
    at the end of the input the rows of outer sides are dropped, and no others
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from onceflow.core.errors import BadStateValue, ConfigError
from onceflow.core.plan.event_time import LateRecords, times_ms
from onceflow.core.plan.functions import Record
from onceflow.core.plan.join_functions import MergedColumns, ProcessJoinFunction
from onceflow.core.plan.work import JoinConnected
from onceflow.core.protocol.watermarks import MAX_WATERMARK
from onceflow.core.runtime.dataflow import user_functions
from onceflow.core.runtime.dataflow.channels import Batch
from onceflow.core.runtime.dataflow.function_context import KeyedContext
from onceflow.core.runtime.dataflow.function_operators import SnapshottedOperator
from onceflow.core.runtime.dataflow.keyed_operators import with_event_time
from onceflow.core.runtime.dataflow.operators import Emit, PendingSnapshot
from onceflow.core.runtime.dataflow.restored_event_time import (
    NOTHING_RESTORED,
    RestoredEventTime,
)
from onceflow.core.runtime.dataflow.result_rows import ResultRows
from onceflow.core.state import KeyedStateStore, hash_keys
from onceflow.core.state.api.context import StateClock
from onceflow.core.state.keys.key_columns import Ints, read_key_columns
from onceflow.core.state.keys.key_groups import Hashes
from onceflow.core.state.states.kept_rows import (
    ROWS_A_CHUNK,
    KeptRows,
    check_moments,
    coarse_moments_of,
    moments_of,
)
from onceflow.core.state.states.operator_state import OperatorStateStore
from onceflow.core.state.stores.keyed_store import PendingKeyedSnapshot as FrozenState

Side: TypeAlias = pa.RecordBatch | None
"""A side of some pairs, with a row per pair; None if the pairs lack this side."""


class JoinOperator(SnapshottedOperator):
    """An operator that emits results for pairs of records, and for records without a partner."""

    def __init__(
        self,
        uid: str,
        work: JoinConnected,
        store: KeyedStateStore,
        states: OperatorStateStore,
        schema: pa.Schema,
        clock: StateClock | None = None,
        event_time: RestoredEventTime = NOTHING_RESTORED,
    ) -> None:
        join = work.join
        super().__init__(uid, join.function, store, states, schema)
        self._keys = work.keys
        self._sides = join.sides
        self._reach_ms = join.reach_ms
        self._steps_ms = join.steps_ms
        self._upper = join.upper
        self._clock = (clock or StateClock()) if join.by_clock else None
        self._event_time = event_time
        self._watermark = event_time.least
        self.kept = [
            KeptRows(
                store,
                f"onceflow.{side.name}-rows",
                side.schema,
                key,
                outer=side.outer,
                limited=number == 0 and join.upper is not None,
            )
            for number, (side, key) in enumerate(zip(join.sides, work.keys, strict=True))
        ]
        context = KeyedContext(store, states, self._operator, self._side_outputs)
        self._late = [
            LateRecords(
                f"the {side.name} side of an interval join", "it has passed them", side.late
            )
            for side in join.sides
        ]
        for late in self._late:
            late.open(context)
        user_functions.call_user(uid, join.function.open, context)
        if context.registered is not None:
            raise ConfigError(
                f"{type(join.function).__name__} of join {uid!r} uses timers, but a function of"
                " pairs has none. Put a .process(…) after the join, or use connect()"
            )
        self._cleaned_a_record = context.cleaned_a_record
        self.dropped = store.finish_open() + states.finish_open()
        self._make = choose_pair_maker(uid, join.function, schema, store, work.keys)

    @property
    def inputs(self) -> tuple[Emit, ...]:
        """The receivers of each stream's batches."""
        return (self.receive, self._receive_right)

    def process(self, batch: Batch) -> None:
        """Join the left stream's rows."""
        self._join(0, batch)

    def _receive_right(self, batch: Batch) -> None:
        self.records_in += batch.rows.num_rows
        self._join(1, batch)

    @property
    def due_in_s(self) -> float | None:
        """The seconds until rows are dropped by the clock; None if no rows will be."""
        if self._clock is None:
            return None
        moments = [
            kept.next_moment * step_ms
            for kept, step_ms in zip(self.kept, self._steps_ms, strict=True)
            if kept.next_moment is not None
        ]
        return max(0, min(moments) - self._clock.now_ms()) / 1000 if moments else None

    def on_time(self) -> None:
        """Drop rows that have expired by the clock."""
        if self._clock is not None:
            self._drop_due(self._clock.now_ms())

    def on_watermark(self, watermark: int) -> None:
        """Drop rows for which no partner can arrive any more."""
        if self._clock is not None:
            return
        if watermark == MAX_WATERMARK:
            self._end_outer_sides()
        elif watermark > self._watermark:
            self._watermark = watermark
            self._drop_due(watermark)

    def flush(self) -> None:
        """Drop rows that would wait for the clock, because the input has ended."""
        if self._clock is not None:
            self._end_outer_sides()

    def _pending(self, pending: FrozenState) -> PendingSnapshot:
        taken = super()._pending(pending)
        if self._clock is not None:
            return taken
        return with_event_time(taken, self._event_time.elements(self._watermark))

    def _join(self, side: int, batch: Batch) -> None:
        """Emit the pairs of a stream's rows, and keep the rows."""
        if not batch.rows.num_rows:
            return
        try:
            for part in self._event_time.parts_of(batch, self._keys[side], self._watermark):
                self._join_part(side, *part)
        except BadStateValue as error:
            raise user_functions.user_error(self.uid, error, batch.rows, error.row) from error
        self._side_outputs.flush()
        if self._cleaned_a_record:
            self.store.clean(self._cleaned_a_record * batch.rows.num_rows)

    def _join_part(
        self, side: int, rows: pa.RecordBatch, hashes: Hashes | None, watermark: int
    ) -> None:
        """Join rows for which event time has reached `watermark`."""
        try:
            now, times = self._now_and_times(side, rows, watermark)
            if self._clock is None and int(times.min()) <= now:
                in_time = times > now
                self._late[side].take_rows(rows.filter(pa.array(~in_time)), now)
                rows, times = rows.filter(pa.array(in_time)), times[in_time]
                hashes = None if hashes is None else hashes[in_time]
            if rows.num_rows:
                keys = [rows.column(name) for name in self._keys[side]]
                known = hash_keys(keys, self._keys[side]) if hashes is None else hashes
                self._match_and_keep(side, rows, known, times, now)
        except BadStateValue as error:
            raise user_functions.user_error(self.uid, error, rows, error.row) from error

    def _now_and_times(self, side: int, rows: pa.RecordBatch, watermark: int) -> tuple[int, Ints]:
        """Return the current event time or clock time, and the rows' times."""
        column = self._sides[side].time
        if self._clock is not None or column is None:
            assert self._clock is not None
            now = self._clock.now_ms()
            return now, np.full(rows.num_rows, now)
        return watermark, times_ms(rows.column(column), column, "is joined with nothing")

    def _match_and_keep(
        self, side: int, rows: pa.RecordBatch, hashes: Hashes, times: Ints, now: int
    ) -> None:
        mine, others = self.kept[side], self.kept[1 - side]
        names = self._keys[side]
        keys = read_key_columns([rows.column(name) for name in names], names)
        limits, moments = self._limits_and_moments(side, rows, times)
        alone = np.ones(len(times), np.bool_)
        used: list[Ints] = []
        firsts, lasts = self._moments_of_partners(side, times, limits)
        for row_indices, entries in others.find_near(keys, hashes, firsts, lasts):
            # Moments are rounded to steps, so `find_near` returns a few rows too many.
            near = self._are_near(side, times[row_indices], limits[row_indices], entries)
            partners, of_rows = entries[near], row_indices[near]
            alone[of_rows] = False
            others.mark_paired(partners)
            # Entries stay valid until `finish`, so call it only after all pairs have been made.
            used.append(np.unique(entries))
            self._emit_pairs(side, rows, of_rows, partners)
        # Do not keep a row that no partner can follow any more, whether it has a pair or not.
        keeps = limits > now
        if not keeps.all():
            if mine.outer:
                self._emit_alone(side, _take(rows, np.flatnonzero(alone & ~keeps)))
            chosen = np.flatnonzero(keeps)
            rows, hashes, times = _take(rows, chosen), hashes[chosen], times[chosen]
            keys = tuple(column.take(chosen) for column in keys)
            moments, alone, limits = moments[chosen], alone[chosen], limits[chosen]
        if len(times):
            mine.finish(mine.add(keys, hashes, rows, times, moments, alone, limits))
        others.finish(np.concatenate(used) if used else np.zeros(0, np.int64))

    def _limits_and_moments(
        self, side: int, rows: pa.RecordBatch, times: Ints
    ) -> tuple[Ints, Ints]:
        """Return the latest time of each row's partners, and the moment until which it is kept."""
        step_ms, last = self._steps_ms[side], self._reach_ms[side][1]
        if self._upper is None or side == 1:
            limits = times + last
            moments = moments_of(limits, step_ms)
            check_moments(moments, times, self._sides[side].time or "the clock")
            return limits, moments
        uppers = times_ms(rows.column(self._upper), self._upper, "is joined with nothing")
        limits = uppers + last
        moments = coarse_moments_of(times, limits, step_ms)
        check_moments(moments, uppers, self._upper)
        check_moments(moments_of(times, step_ms), times, self._sides[side].time or "the clock")
        return limits, moments

    def _moments_of_partners(self, side: int, times: Ints, limits: Ints) -> tuple[Ints, Ints]:
        """Return the first and the last moment until which a partner of each row is kept."""
        # A left partner is kept until its limit, which is not before this row's time. A partner at
        # time p with a fixed reach is kept until p + its last distance. For times p from the
        # earliest to the latest partner, this is from this row's time to `limits - first`.
        step_ms, others = self._steps_ms[1 - side], self.kept[1 - side]
        firsts = moments_of(times, step_ms)
        if self._upper is not None and side == 1:
            return firsts, np.full(len(times), others.last_moment or 0)
        return firsts, moments_of(limits - self._reach_ms[side][0], step_ms)

    def _are_near(
        self, side: int, times: Ints, limits: Ints, entries: Ints
    ) -> npt.NDArray[np.bool_]:
        """Return for each pair of a row and a kept row whether both limits hold."""
        others = self.kept[1 - side]
        partners = others.times(entries)
        if self._upper is not None and side == 1:
            return (partners <= limits) & (others.limits(entries) >= times)
        near: npt.NDArray[np.bool_] = (partners <= limits) & (
            partners >= times + self._reach_ms[side][0]
        )
        return near

    def _emit_pairs(self, side: int, rows: pa.RecordBatch, of_rows: Ints, partners: Ints) -> None:
        """Emit the pairs in the order of rows. A row's earlier partners come first."""
        others = self.kept[1 - side]
        # If row indices rise strictly, each row has one partner, and no sorting is needed.
        if len(of_rows) > 1 and not bool((of_rows[1:] > of_rows[:-1]).all()):
            sort = np.lexsort((others.numbers(partners), others.times(partners), of_rows))
            of_rows, partners = of_rows[sort], partners[sort]
        for start in range(0, len(of_rows), ROWS_A_CHUNK):
            part = slice(start, start + ROWS_A_CHUNK)
            mine = _take(rows, of_rows[part])
            keys = [mine.column(name) for name in self._keys[side]]
            self._emit_made(side, mine, others.rows(partners[part], keys))

    def _emit_alone(self, side: int, rows: pa.RecordBatch) -> None:
        if rows.num_rows:
            self._emit_made(side, rows, None)

    def _emit_made(self, side: int, mine: pa.RecordBatch, theirs: Side) -> None:
        left, right = (mine, theirs) if side == 0 else (theirs, mine)
        self.emit(self._make(left, right, mine.num_rows))

    def _drop_due(self, now: int) -> None:
        """Drop the rows that are due. Emit the dropped rows of outer sides that have no partner."""
        for side in range(len(self.kept)):
            self._drop_due_rows(side, now)
        self._side_outputs.flush()

    def _end_outer_sides(self) -> None:
        """Emit and drop the unpaired rows of outer sides at the end of the input.

        The rows of other sides and the event time stay in the state. A job that is restored from
        this state may read their partners.
        """
        for side, kept in enumerate(self.kept):
            if kept.outer:
                self._drop_due_rows(side, MAX_WATERMARK)
        self._side_outputs.flush()

    def _drop_due_rows(self, side: int, now: int) -> None:
        kept, until = self.kept[side], now // self._steps_ms[side]
        if kept.next_moment is None or kept.next_moment > until:
            return
        entries = kept.find_due(until)
        alone = kept.find_alone(entries)
        for start in range(0, len(alone), ROWS_A_CHUNK):
            self._emit_alone(side, kept.rows(alone[start : start + ROWS_A_CHUNK]))
        kept.remove(entries, until)


MakesPairs: TypeAlias = Callable[[Side, Side, int], pa.RecordBatch]
"""A function that returns the results for the pairs of two sides, given their number."""


def choose_pair_maker(
    uid: str,
    function: ProcessJoinFunction,
    schema: pa.Schema,
    store: KeyedStateStore,
    keys: tuple[Sequence[str], Sequence[str]],
) -> MakesPairs:
    """Return a callable that applies `function` to pairs of two sides and returns `schema` rows."""
    if isinstance(function, MergedColumns):
        return function.merge
    return _FunctionOfPairs(uid, function, schema, store, keys)


class _FunctionOfPairs:
    """Calls a function for each pair, with the state of its key."""

    def __init__(
        self,
        uid: str,
        function: ProcessJoinFunction,
        schema: pa.Schema,
        store: KeyedStateStore,
        keys: tuple[Sequence[str], Sequence[str]],
    ) -> None:
        self._uid = uid
        self._function = function
        self._results = ResultRows(uid, schema)
        self._store = store
        self._keys = keys

    def __call__(self, left: Side, right: Side, count: int) -> pa.RecordBatch:
        """Return the function's results for `count` pairs."""
        side, rows = (1, right) if left is None else (0, left)
        assert rows is not None
        function = self._function
        batch = user_functions.BatchRecords(rows)
        of_batch = user_functions.keys_of_records(self._uid, batch, self._keys[side])
        self._store.prefetch(of_batch)
        keys = iter(of_batch)
        others: Iterator[Record] = iter(())
        if left is not None and right is not None:
            others = chain.from_iterable(user_functions.BatchRecords(right).pieces())

        def results(records: Iterator[Record]) -> Iterator[Any]:
            if left is None or right is None:
                process = (function.process_left, function.process_right)[side]
                calls = (process(record) for record in self._with_key(keys, records))
            else:
                pairs = zip(self._with_key(keys, records), others, strict=False)
                calls = (function.process(own, other) for own, other in pairs)
            yield from calls

        def take_results(records: Iterator[Record]) -> None:
            for result in results(records):
                self._results.take(result)

        return self._results.batch_of_pieces(
            user_functions.call_user_on_records(self._uid, take_results, batch)
        )

    def _with_key(self, keys: Iterator[Any], records: Iterator[Record]) -> Iterator[Record]:
        # Records first in `zip`: they are a part of the batch, and at their end no further key must
        # be taken.
        for record, key in zip(records, keys, strict=False):
            self._store.set_current_key(key)
            yield record


def _take(rows: pa.RecordBatch, chosen: Ints) -> pa.RecordBatch:
    # If all rows are chosen in their order, nothing needs to be copied.
    if len(chosen) == rows.num_rows and np.array_equal(chosen, np.arange(len(chosen))):
        return rows
    return rows.take(pa.array(chosen))
