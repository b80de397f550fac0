"""The operator that keeps the first n records of each key, and emits those whose rank has changed.

A record loses its rank only to a better record. So once a rank has a record, it always has one, and
no deletes are needed. Each emitted record replaces the one with its key and rank: a sink with these
as its primary key has the table of the best records.

The table has a row for each key and rank. Its namespace is the rank, from 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from onceflow.core.arrow.kinds import cast_rows
from onceflow.core.errors import BadStateValue
from onceflow.core.plan.work import KeepTop
from onceflow.core.runtime.dataflow.channels import Batch
from onceflow.core.runtime.dataflow.keyed_operators import KeyedOperator
from onceflow.core.runtime.dataflow.ordering import rank_values, require_values
from onceflow.core.runtime.dataflow.user_functions import user_error
from onceflow.core.state import KeyedStateStore
from onceflow.core.state.aggregates.running import Grouping
from onceflow.core.state.keys.key_columns import Ints, KeyColumn, read_key_columns
from onceflow.core.state.keys.key_groups import Hashes, hash_key_columns
from onceflow.core.state.keys.key_index import KeyIndex
from onceflow.core.state.states.kept_rows import plan_column

ENTRIES_AT_ONCE = 1 << 18
"""The number of ranks that are looked up at once; bounds the memory that a batch needs."""


@dataclass(frozen=True, slots=True)
class _Candidates:
    """The records that compete for the ranks of some keys: those held, then the new ones."""

    columns: list[pa.Array]
    """The columns of the stream, in its order."""
    key_numbers: Ints
    held_ranks: Ints
    """The rank of each held record."""


class TopKeeper(KeyedOperator):
    """An operator that emits a record when it gets a rank within its key, up to n.

    Used by the chain's thread.
    """

    def __init__(
        self,
        uid: str,
        work: KeepTop,
        store: KeyedStateStore,
        input_schema: pa.Schema,
        schema: pa.Schema,
    ) -> None:
        super().__init__(uid, store)
        self._key, self._by, self._n = work.key, work.by, work.n
        self._names, self._schema = input_schema.names, schema
        self._columns = [plan_column(f) for f in input_schema if f.name not in work.key]
        self._table = store.accumulators(
            "onceflow.top",
            [input_schema.field(name).type for name in work.key],
            [column.of_table for column in self._columns],
            namespaced=True,
        )
        self.dropped = store.finish_open()

    def process(self, batch: Batch) -> None:
        """Emit the records of the batch's keys whose rank has changed."""
        rows = batch.rows
        if not rows.num_rows:
            return
        try:
            for criterion in self._by:
                require_values(rows, criterion.column, "top_n")
            columns = read_key_columns([rows.column(name) for name in self._key], self._key)
        except BadStateValue as error:
            raise user_error(self.uid, error, rows, error.row) from error
        hashes = hash_key_columns(columns) if batch.hashes is None else batch.hashes
        group = Grouping.of(KeyIndex(columns).resolve(columns, hashes)[0])
        for part in self._split(group):
            keys = tuple(column.take(part) for column in columns)
            self._rank(rows.take(pa.array(part)), keys, hashes[part])

    def _split(self, group: Grouping) -> Iterator[Ints]:
        """Yield the row numbers of some keys at a time, in row order."""
        keys_at_once = max(1, ENTRIES_AT_ONCE // self._n)
        ends = group.firsts + group.counts
        for first in range(0, len(group.firsts), keys_at_once):
            last = min(first + keys_at_once, len(group.firsts)) - 1
            yield np.sort(group.order[group.firsts[first] : ends[last]])

    def _rank(self, rows: pa.RecordBatch, keys: tuple[KeyColumn, ...], hashes: Hashes) -> None:
        numbers, firsts = KeyIndex(keys).resolve(keys, hashes)
        numbers = numbers - 1
        keys, hashes = tuple(column.take(firsts) for column in keys), hashes[firsts]
        key_numbers = np.repeat(np.arange(len(firsts)), self._n)
        ranks = np.tile(np.arange(self._n), len(firsts))
        repeated = tuple(column.take(key_numbers) for column in keys)
        self._table.fetch(ranks, repeated, hashes[key_numbers])
        entries = self._table.find(ranks, repeated, hashes[key_numbers])
        is_held = entries > 0
        held = entries[is_held]
        candidates = _Candidates(
            self._join_columns(held, rows, firsts, key_numbers[is_held]),
            np.concatenate([key_numbers[is_held], numbers]),
            ranks[is_held],
        )
        chosen, new_ranks = self._choose(candidates)
        owners = candidates.key_numbers[chosen]
        taken = [column.take(pa.array(chosen)) for column in candidates.columns]
        written = self._table.insert(
            new_ranks, tuple(column.take(owners) for column in keys), hashes[owners]
        )
        values = dict(zip(self._names, taken, strict=True))
        for index, column in enumerate(self._columns):
            self._table.put(index, written, column.to_table(values[column.name]))
        if len(chosen):
            self.emit(pa.record_batch([*taken, pa.array(new_ranks + 1)], schema=self._schema))
        self._table.finish(np.unique(np.concatenate([held, written])))

    def _join_columns(
        self, held: Ints, rows: pa.RecordBatch, firsts: Ints, owners: Ints
    ) -> list[pa.Array]:
        """Return the columns of the held records and `rows`; `owners` are the held ones' keys."""
        of_held = {
            column.name: column.from_table(self._table.values(index, held))
            for index, column in enumerate(self._columns)
        }
        first_rows = pa.array(firsts[owners])
        for name in self._key:
            of_held[name] = rows.column(name).take(first_rows)
        return [_concat(of_held[name], rows.column(name)) for name in self._names]

    def _choose(self, candidates: _Candidates) -> tuple[Ints, Ints]:
        """Return the candidates that get a rank they did not have, and that rank, from 0."""
        total, held = len(candidates.key_numbers), len(candidates.held_ranks)
        # Among equal records, the one that arrived first gets the lower rank.
        later = np.arange(self._n, self._n + total - held)
        arrival = np.concatenate([candidates.held_ranks, later])
        criteria: list[Ints] = []
        for criterion in self._by:
            ranked = rank_values([candidates.columns[self._names.index(criterion.column)]])
            criteria.append(-ranked if criterion.descending else ranked)
        order = np.lexsort((arrival, *reversed(criteria), candidates.key_numbers))
        sorted_keys = candidates.key_numbers[order]
        is_start = np.ones(total, np.bool_)
        is_start[1:] = sorted_keys[1:] != sorted_keys[:-1]
        starts = np.flatnonzero(is_start)
        ranks = np.arange(total) - np.repeat(starts, np.diff(starts, append=total))
        before = np.full(total, -1)
        before[:held] = candidates.held_ranks
        is_changed = (ranks < self._n) & (ranks != before[order])
        return order[is_changed], ranks[is_changed]


def _concat(first: pa.Array, second: pa.Array) -> pa.Array:
    if pa.types.is_dictionary(second.type):
        joined = pa.concat_arrays([first.dictionary_decode(), second.dictionary_decode()])
        return cast_rows(joined.dictionary_encode(), second.type)
    return pa.concat_arrays([first, second])
