"""The operator that adds aggregates over the last n records of each key, a batch at a time.

The *frame* of a record has the last n records of its key up to the record: in the order of arrival,
or the n greatest so far in the order of given columns. Each result is computed from the records of
its frame alone, from the first to the last one. So results do not depend on the boundaries of
batches, and a sum of floats has no rest of a record that has left the frame.

State has one entry for each key. Its columns are the number of held records, and for each slot the
values that the aggregates and the order take from the record in this slot.

Invariants, between two batches:
    a key with k held records has them in the slots 0 to k - 1, in their order
    k <= n - 1 in the order of arrival, where the next record always belongs to its own frame
    k <= n otherwise, where the next record may come before all held ones
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from onceflow.core.arrow.kinds import cast_rows
from onceflow.core.errors import BadStateValue
from onceflow.core.plan.aggregates import Aggregate, AggregateInputs
from onceflow.core.plan.work import AggregateLastRows, Emission
from onceflow.core.runtime.dataflow.channels import Batch
from onceflow.core.runtime.dataflow.keyed_operators import KeyedOperator
from onceflow.core.runtime.dataflow.ordering import rank_values, require_values
from onceflow.core.runtime.dataflow.user_functions import call_user, user_error
from onceflow.core.state import AccumulatorColumn, KeyedStateStore
from onceflow.core.state.aggregates.kinds_of_totals import totals_of
from onceflow.core.state.aggregates.running import Grouping, SumOverflow
from onceflow.core.state.aggregates.totals import to_typed_array
from onceflow.core.state.keys.key_columns import Ints
from onceflow.core.state.keys.key_groups import Hashes
from onceflow.core.state.states.distinct_sets import plan_members
from onceflow.core.state.states.kept_rows import KeptColumn, plan_column

HELD = "onceflow.held"
"""The column with the number of held records of a key."""
PAIRS_AT_ONCE = 1 << 18
"""The number of records in all frames that are computed at once; bounds the memory of a batch."""


@dataclass(frozen=True, slots=True)
class _Candidates:
    """The records of a batch's keys that frames may have: those held, then those of the batch."""

    values: Mapping[str, pa.Array]
    """The values of the candidates, by the name of the value."""
    order: Ints
    """The candidates, sorted by key, then by their order within the key."""
    starts: Ints
    """The position in `order` of the first candidate of each key."""
    ends: Ints
    """The position after the last candidate of each key."""
    positions: Ints
    """The position in `order` of each candidate."""
    held: Ints
    """The number of held records of each key."""

    @property
    def held_count(self) -> int:
        """The number of held records of all keys."""
        return len(self.order) - self.row_count

    @property
    def row_count(self) -> int:
        """The number of rows of the batch."""
        return len(self.order) - int(self.held.sum())

    def find_frames(self, keys: Ints, lasts: Ints, size: int) -> Ints:
        """Return a row of `size` positions for each frame, which ends at a position in `lasts`.

        `keys` has the key of each frame. Where a frame has fewer records, it begins with -1.
        """
        frames: Ints = lasts[:, None] + np.arange(1 - size, 1)
        return np.where(frames < self.starts[keys][:, None], -1, frames)

    def find_growing_frames(self, group: Grouping, size: int) -> Ints:
        """Return the frames like `find_frames`, of all rows, with what had arrived before each row.

        `group` has the rows of each key.
        """
        count = self.held_count
        latest: Ints = np.full((len(self.held), size), -1)
        owners = np.repeat(np.arange(len(self.held)), self.held)
        # The held records of a key are in their order, so the last one is at the right.
        columns = size + np.arange(count) - np.repeat(np.cumsum(self.held), self.held)
        latest[owners, columns] = self.positions[:count]
        frames: Ints = np.empty((self.row_count, size), np.int64)
        # Round n takes row n of each key. Inserting it moves the smallest position out.
        for number in range(int(group.counts.max())):
            keys = np.flatnonzero(group.counts > number)
            rows = group.order[group.firsts[keys] + number]
            grown = np.column_stack([latest[keys], self.positions[count + rows]])
            grown.sort(axis=1)
            latest[keys] = frames[rows] = grown[:, 1:]
        return frames


class LastRowsAggregator(KeyedOperator):
    """An operator that emits records with aggregates over the last records of their keys.

    Used by the chain's thread.
    """

    def __init__(
        self,
        uid: str,
        work: AggregateLastRows,
        store: KeyedStateStore,
        input_schema: pa.Schema,
        schema: pa.Schema,
    ) -> None:
        super().__init__(uid, store)
        self._work = work
        self._schema = schema
        self._input_schema = input_schema
        self._inputs = AggregateInputs(work.aggregates, input_schema)
        self._columns = _plan_values(work, input_schema)
        self._held_max = work.rows if work.by else work.rows - 1
        slots = [
            replace(column.of_table, name=f"{slot} {column.of_table.name}")
            for slot in range(self._held_max)
            for column in self._columns.values()
        ]
        self._table = store.accumulators(
            "onceflow.over",
            [input_schema.field(name).type for name in work.key],
            [AccumulatorColumn(HELD, "last", pa.int64()), *slots],
            ttl=work.ttl,
        )
        self._cleaned_a_record = work.ttl.cleanup_incrementally if work.ttl is not None else 0
        self.dropped = store.finish_open()

    def process(self, batch: Batch) -> None:
        """Emit the records of the batch with their aggregates."""
        rows, step = batch.rows, max(1, PAIRS_AT_ONCE // self._work.rows)
        for first in range(0, rows.num_rows, step):
            hashes = None if batch.hashes is None else batch.hashes[first : first + step]
            self._process(rows.slice(first, step), hashes)
        if self._cleaned_a_record:
            self.store.clean(self._cleaned_a_record * rows.num_rows)

    def _process(self, rows: pa.RecordBatch, hashes: Hashes | None) -> None:
        keys = [rows.column(name) for name in self._work.key]
        values = call_user(self.uid, lambda: self._inputs.read(rows))
        try:
            for order in self._work.by:
                require_values(rows, order.column, "over")
            group = self._table.group(keys, hashes)
            candidates = self._gather(group, self._name_values(rows, values))
            shown, frames = self._frame(group, candidates)
            results = self._aggregate(candidates, frames, [key.take(shown) for key in keys])
        except BadStateValue as error:
            raise user_error(self.uid, error, rows, error.row) from error
        self._hold(group, candidates)
        self._table.finish(group.entries)
        self.emit(pa.record_batch([*rows.take(shown).columns, *results], schema=self._schema))

    def _name_values(
        self, rows: pa.RecordBatch, values: Mapping[str, pa.Array]
    ) -> dict[str, pa.Array]:
        """Return the values that are held of each row, by the names in `self._columns`."""
        named = {
            aggregate.argument: values[name]
            for name, aggregate in self._work.aggregates.items()
            if aggregate.argument is not None
        }
        for order in self._work.by:
            column = rows.column(order.column)
            is_encoded = pa.types.is_dictionary(column.type)
            named[repr(order.column)] = column.dictionary_decode() if is_encoded else column
        return named

    def _gather(self, group: Grouping, given: Mapping[str, pa.Array]) -> _Candidates:
        """Return the held records of the group's keys and the rows with the values `given`."""
        held = self._table.numbers(0, group.entries)
        held_owners = np.repeat(np.arange(len(held)), held)
        slots = np.arange(len(held_owners)) - np.repeat(np.cumsum(held) - held, held)
        # The values of all keys in slot 0, then those in slot 1, and so on.
        chosen = pa.array(slots * len(held) + held_owners)
        values: dict[str, pa.Array] = {}
        for number, (name, column) in enumerate(self._columns.items()):
            stored = [
                self._table.values(1 + slot * len(self._columns) + number, group.entries)
                for slot in range(int(held.max()))
            ]
            before = given[name][:0]
            if stored:
                before = column.from_table(pa.concat_arrays(stored).take(chosen))
            values[name] = pa.concat_arrays([before, given[name]])
        row_owners = group.in_row_order(group.spread(np.arange(len(held))))
        owners = np.concatenate([held_owners, row_owners])
        order = np.lexsort((np.arange(len(owners)), *self._rank(values), owners))
        positions = np.empty_like(order)
        positions[order] = np.arange(len(order))
        counts = held + group.counts
        ends = np.cumsum(counts)
        return _Candidates(values, order, ends - counts, ends, positions, held)

    def _rank(self, values: Mapping[str, pa.Array]) -> list[Ints]:
        """Return the ranks of all candidates in each criterion of the order, the last one first."""
        criteria: list[Ints] = []
        for order in reversed(self._work.by):
            ranks = rank_values([values[repr(order.column)]])
            criteria.append(-ranks if order.descending else ranks)
        return criteria

    def _frame(self, group: Grouping, candidates: _Candidates) -> tuple[pa.Array, Ints]:
        """Return the rows that are emitted, in row order, and their frames."""
        size = self._work.rows
        row_keys = group.in_row_order(group.spread(np.arange(len(group.entries))))
        if self._work.emit is Emission.BATCH:
            rows = np.sort(group.lasts(group.order))
            keys = row_keys[rows]
            return pa.array(rows), candidates.find_frames(keys, candidates.ends[keys] - 1, size)
        rows = np.arange(len(row_keys))
        if self._work.by:
            return pa.array(rows), candidates.find_growing_frames(group, size)
        lasts = candidates.positions[candidates.held_count :]
        return pa.array(rows), candidates.find_frames(row_keys, lasts, size)

    def _aggregate(
        self, candidates: _Candidates, frames: Ints, keys: Sequence[pa.Array]
    ) -> list[pa.Array]:
        """Return the column of each aggregate over `frames`, whose keys are `keys`.

        Raises:
            BadStateValue: A sum does not fit; names the aggregate and the key.
        """
        is_member = frames >= 0
        members = pa.array(candidates.order[frames[is_member]])
        every = np.arange(1, len(frames) + 1)
        owners = np.repeat(every, np.count_nonzero(is_member, axis=1))
        taken = {name: values.take(members) for name, values in candidates.values.items()}
        results: list[pa.Array] = []
        for name, aggregate in self._work.aggregates.items():
            totals = totals_of(aggregate.total(name, self._input_schema))
            totals.reserve(1, len(frames) + 1)
            values = None if aggregate.argument is None else taken[aggregate.argument]
            if aggregate.op == "count_distinct" and values is not None:
                values = _mark_distinct(owners, values)
            try:
                totals.fold(owners, values)
            except SumOverflow as overflow:
                frame = int(owners[overflow.row]) - 1
                raise self._table.explain_overflow(totals, keys, frame) from overflow
            results.append(to_typed_array(totals.values(every), self._schema.field(name).type))
        return results

    def _hold(self, group: Grouping, candidates: _Candidates) -> None:
        """Store the last candidates of each key."""
        kept = np.minimum(candidates.ends - candidates.starts, self._held_max)
        stored = {
            name: column.to_table(candidates.values[name]) for name, column in self._columns.items()
        }
        for slot in range(int(kept.max())):
            keys = np.flatnonzero(kept > slot)
            chosen = pa.array(candidates.order[candidates.ends[keys] - kept[keys] + slot])
            for number, values in enumerate(stored.values()):
                column = 1 + slot * len(stored) + number
                self._table.put(column, group.entries[keys], values.take(chosen))
        self._table.put(0, group.entries, kept)


def _plan_values(work: AggregateLastRows, schema: pa.Schema) -> dict[str, KeptColumn]:
    """Return the stored column of each value that is kept of a record, by the value's name."""
    fields: dict[str, pa.DataType] = {}
    for order in work.by:
        fields[repr(order.column)] = schema.field(order.column).type
    for aggregate in work.aggregates.values():
        if aggregate.argument is not None:
            fields[aggregate.argument] = _argument_type(aggregate, schema)
    return {name: _plan_value(name, fields[name]) for name in sorted(fields)}


def _argument_type(aggregate: Aggregate, schema: pa.Schema) -> pa.DataType:
    # A condition alone is kept as a mark of the records for which it is true.
    return pa.bool_() if aggregate.column is None else schema.field(aggregate.column).type


def _plan_value(name: str, kind: pa.DataType) -> KeptColumn:
    if pa.types.is_dictionary(kind):
        return _plan_value(name, kind.value_type)
    if not pa.types.is_decimal(kind):
        return plan_column(pa.field(name, kind))
    # The text of a decimal is exact, and Arrow converts whole columns of them.
    text = plan_column(pa.field(f"{name}: decimal({kind.scale})", pa.string()))

    def to_text(values: pa.Array) -> pa.Array:
        return cast_rows(values, pa.string())

    def from_text(texts: pa.Array) -> pa.Array:
        return cast_rows(texts, kind)

    return replace(text, to_table=to_text, from_table=from_text)


def _mark_distinct(owners: Ints, values: pa.Array) -> pa.Array:
    """Return True for the first of equal values of each owner, and null for all others."""
    valid = np.flatnonzero(values.is_valid().to_numpy(zero_copy_only=False))
    members = plan_members(values.type).convert(values.take(pa.array(valid))).dictionary_encode()
    codes = members.indices.to_numpy(zero_copy_only=False).astype(np.int64)
    _, firsts = np.unique(owners[valid] * (len(members.dictionary) + 1) + codes, return_index=True)
    is_first = np.zeros(len(values), np.bool_)
    is_first[valid[firsts]] = True
    return pa.array(is_first, mask=~is_first)
