"""Running aggregates of many keys, updated a whole batch at a time.

Nulls among the values are skipped. A sum starts at 0; a minimum or maximum is null until the first
value that is not. Of floating point numbers NaN is the largest, as in Spark and Postgres: it
becomes the maximum, and the minimum only while there is nothing else. The *last* value is what was
written last, null when nothing was: a value state that is read and written a batch at a time. It
alone may be text or bytes.

A key that was removed keeps its slot, as one that has seen nothing, until the table is packed; a
snapshot does not hold it. How a key's totals are encoded says `encoded_totals`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from onceflow.core.errors import BadStateValue
from onceflow.core.protocol.invariant import require
from onceflow.core.state.aggregates.accumulator_shape import AccumulatorShape
from onceflow.core.state.aggregates.byte_values import BytesTotals, totals_of
from onceflow.core.state.aggregates.encoded_totals import decode_totals, encode_totals
from onceflow.core.state.aggregates.expiring_totals import Expiry
from onceflow.core.state.aggregates.running import Grouping, SumOverflow
from onceflow.core.state.aggregates.totals import Results, Totals
from onceflow.core.state.api.descriptors import DIGITS_MAX, StateTtlConfig
from onceflow.core.state.keys.key_arrays import key_array
from onceflow.core.state.keys.key_columns import (
    BytesKeys,
    FixedKeys,
    Ints,
    KeyColumn,
    read_key_columns,
)
from onceflow.core.state.keys.key_groups import (
    Hashes,
    hash_key_columns,
    key_groups,
)
from onceflow.core.state.keys.slot_index import SlotIndex, decode_keys, encode_keys, grown
from onceflow.core.state.snapshots.canonical import Groups, StateRows

CHUNK_SLOTS = 65_536
REMOVED_MIN = 4096
"""So many slots of removed keys, and half of all, are packed away."""


class AccumulatorTable:
    """Running aggregates by key, in numpy arrays; owned by the subtask's thread."""

    def __init__(
        self,
        shape: AccumulatorShape,
        label: str,
        max_parallelism: int,
        ttl: StateTtlConfig | None = None,
    ) -> None:
        """With `ttl`, `USED` is the last column of `shape`."""
        self.shape = shape
        self._label = label
        self._max_parallelism = max_parallelism
        self._index = SlotIndex(shape.empty_keys())
        self._kinds = tuple(type(column) for column in shape.empty_keys())
        self._columns = tuple(totals_of(column) for column in shape.columns)
        self._aggregates = self._columns
        self.expiry: Expiry | None = None
        if ttl is not None:
            *aggregates, used = self._columns
            self._aggregates = tuple(aggregates)
            self.expiry = Expiry(ttl, used, shape.totals_type, len(aggregates))
        self._clean_at = 1
        self._removed = np.zeros(1024, np.bool_)
        self._removed_count = 0
        self._forgets = all(column.op == "last" for column in shape.columns)
        """Whether a key without any value is as good as removed."""

    def __len__(self) -> int:
        """The number of keys in memory, with removed ones that still have a slot."""
        return len(self._index)

    def update(
        self,
        keys: Sequence[pa.Array],
        hashes: Hashes | None,
        values: Mapping[str, pa.Array | npt.NDArray[Any]],
    ) -> dict[str, Results]:
        """Return, by aggregate, the running value after each row, and keep the new totals.

        `keys` are the key columns, `hashes` what `hash_keys` gives for them if known already, and
        `values` one column for each aggregate, by its name; a count without one counts rows.
        Results are in row order; a minimum or maximum that has seen no value yet is masked.

        Raises:
            BadStateValue: A sum left 64 bits, or 38 digits (names table, aggregate and key), a key
                is null, or values cannot be cast to the aggregate's type. No total has changed.
        """
        columns = self._read(keys)
        hashes = self.shape.slot_hashes(columns, hashes)
        if not len(hashes):
            return {column.column.name: column.no_results() for column in self._aggregates}
        slots = self._resolve(columns, hashes)
        group = Grouping.of(slots)
        if self.expiry is not None:
            self._begin_anew(group.slots, self.expiry)
        results: dict[str, Results] = {}
        changes: list[tuple[Totals, npt.NDArray[Any], npt.NDArray[Any]]] = []
        for column in self._aggregates:
            name = column.column.name
            given = values.get(name)
            require(
                given is not None or column.column.op == "count",
                f"update of {self.shape.name!r} has no values for {name!r}",
            )
            try:
                results[name], totals, seen = column.run(group, given)
            except SumOverflow as overflow:
                raise self._overflow(column, keys, overflow.row) from overflow
            changes.append((column, totals, seen))
        for column, totals, seen in changes:
            column.totals[group.slots] = totals
            column.seen[group.slots] = seen
        if self.expiry is not None:
            self.expiry.use(group.slots)
        self._mark(group.slots)
        self._touch(group.slots)
        return results

    def group(self, keys: Sequence[pa.Array], hashes: Hashes | None) -> Grouping:
        """Return the rows of a batch by key; its slots hold until `done` or `remove`."""
        columns = self._read(keys)
        return Grouping.of(self._resolve(columns, self.shape.slot_hashes(columns, hashes)))

    def fold(
        self,
        namespaces: Ints,
        keys: Sequence[pa.Array],
        hashes: Hashes | None,
        values: Mapping[str, pa.Array],
    ) -> Ints:
        """Add each row to the totals of its namespace and key; return the rows' slots.

        As `update`, without what the totals were at each row. The slots hold until `done` or
        `remove`, one of which must follow.

        Raises:
            BadStateValue: A sum left 64 bits (names table, aggregate and key), a key is null, or
                values cannot be cast to the aggregate's type.
        """
        columns = (FixedKeys((namespaces.view(np.uint64),)), *read_key_columns(keys))
        slots = self._resolve(columns, self.shape.slot_hashes(columns, hashes))
        for column in self._columns:
            try:
                column.fold(slots, values.get(column.column.name))
            except SumOverflow as overflow:
                raise self._overflow(column, keys, overflow.row) from overflow
        self._mark(slots)
        return slots

    def regroup(
        self,
        old: Ints,
        old_into: Ints,
        rows_into: Ints,
        keys: Sequence[pa.Array],
        values: Mapping[str, pa.Array | npt.NDArray[Any]],
        new: Ints,
    ) -> None:
        """Make the totals of `new`, distinct slots, what slots `old` and a batch's rows come to.

        `old_into` and `rows_into` say to which of `new` each adds; of a sum of floats first the old
        totals, then the rows in their order. Old ones that are not among `new` stay as they are.
        `release` must follow.

        Raises:
            BadStateValue: As `fold`; nothing has changed.
        """
        made: list[Totals] = []
        for column in self._columns:
            name = column.column.name
            try:
                one = column.merged(old, old_into + 1, len(new))
            except SumOverflow as overflow:
                raise self._merge_overflow(column, old, overflow.row) from overflow
            try:
                if len(rows_into):
                    one.fold(rows_into + 1, values.get(name))
            except SumOverflow as overflow:
                raise self._overflow(column, keys, overflow.row) from overflow
            made.append(one)
        for column, one in zip(self._columns, made, strict=True):
            column.totals[new] = one.totals[1 : len(new) + 1]
            column.seen[new] = one.seen[1 : len(new) + 1]
        self._mark(new)

    def find(self, namespaces: Ints, keys: tuple[KeyColumn, ...], hashes: Hashes) -> Ints:
        """Return each row's slot, 0 where its namespace and key are not there; changes nothing.

        `hashes` are those of the keys. The slots hold until `done` or `remove`.
        """
        columns = (FixedKeys((namespaces.view(np.uint64),)), *keys)
        mixed = self.shape.slot_hashes(columns, hashes)
        slots = self._index.find(columns, mixed)
        if self._removed_count:
            slots[self._removed[slots]] = 0
        return slots

    def bring(self, namespaces: Ints, keys: tuple[KeyColumn, ...], hashes: Hashes) -> None:
        """Have the rows of these namespaces and keys in memory, as far as there are any."""

    def insert(self, namespaces: Ints, keys: tuple[KeyColumn, ...], hashes: Hashes) -> Ints:
        """Return each row's slot; what has none in memory is not there either, and gets one.

        `hashes` are those of the keys. The slots hold until `done` or `remove`.
        """
        columns = (FixedKeys((namespaces.view(np.uint64),)), *keys)
        return AccumulatorTable._resolve(self, columns, self.shape.slot_hashes(columns, hashes))

    def namespaces(self, bits: int = 0) -> Ints:
        """Return the namespaces that any key has totals in, in order, without the last `bits`."""
        return np.unique(self._namespaces()[1:][~self._removed[1 : self._index.end]] >> bits)

    def select(self, first: int, stop: int) -> Ints:
        """Return the slots of namespaces `first` to before `stop`, by namespace."""
        found = self._namespaces()
        inside = (found >= first) & (found < stop) & ~self._removed[: self._index.end]
        inside[0] = False
        slots = np.flatnonzero(inside)
        return slots[np.argsort(found[slots], kind="stable")]

    def namespaces_of(self, slots: Ints) -> Ints:
        """Return the namespace of each slot."""
        return self._namespaces()[slots]

    def keys_of(self, slots: Ints) -> list[pa.Array]:
        """Return the key columns of slots."""
        columns = self.shape.keys_alone(self._index.slot_keys())
        return [
            key_array(_part(column, slots), kind)
            for column, kind in zip(columns, self.shape.key_types, strict=True)
        ]

    def groups_of(self, slots: Ints) -> Groups:
        """Return the key group of each slot."""
        columns = tuple(_part(column, slots) for column in self._index.slot_keys())
        return self.group_of_hashes(hash_key_columns(self.shape.keys_alone(columns)))

    def group_of_hashes(self, hashes: Hashes) -> Groups:
        """Return the key group of each key, by what `hash_keys` gives for it."""
        return key_groups(hashes, self._max_parallelism)

    def merged(self, slots: Ints) -> tuple[Ints, Ints, list[pa.Array]]:
        """Return the totals of `slots` by key, whatever the namespace; changes nothing.

        That is: one slot of each key, for each of `slots` the place of its key among those, and the
        columns of totals.

        Raises:
            BadStateValue: A sum left 64 bits.
        """
        keys = self.shape.keys_alone(self._index.slot_keys())
        columns = tuple(_part(column, slots) for column in keys)
        places, leaders = SlotIndex(columns).resolve(columns, hash_key_columns(columns))
        every = np.arange(1, len(leaders) + 1)
        made: list[Totals] = []
        for column in self._columns:
            try:
                made.append(column.merged(slots, places, len(leaders)))
            except SumOverflow as overflow:
                raise self._merge_overflow(column, slots, overflow.row) from overflow
        return slots[leaders], places - 1, [one.values(every) for one in made]

    def _namespaces(self) -> Ints:
        (namespace, *_) = self._index.slot_keys()
        assert isinstance(namespace, FixedKeys)
        return namespace.words[0].view(np.int64)

    def values(self, column: int, slots: Ints) -> pa.Array:
        """Return the totals of one column; null where there is none."""
        return self._columns[column].values(slots)

    def numbers(self, column: int, slots: Ints) -> Ints:
        """Return the totals of one column of whole numbers; 0 where there is none."""
        one = self._columns[column]
        return np.where(one.seen[slots] == 0, 0, one.totals[slots])

    def put(self, column: int, slots: Ints, values: pa.Array | npt.NDArray[Any]) -> None:
        """Make `values` the totals of one column in distinct `slots`; `done` must follow.

        Raises:
            BadStateValue: They cannot be cast to the column's type; nothing has changed.
        """
        self._columns[column].put(slots, values)
        self._mark(slots)

    def done(self, slots: Ints) -> None:
        """Hear that a batch of these keys is done; a key that has no value then is removed."""
        if self._forgets:
            empty = np.ones(len(slots), np.bool_)
            for column in self._columns:
                empty &= column.seen[slots] == 0
            if empty.any():
                self._forget(slots[empty])
        self._touch(slots)
        self._pack_some()

    def remove(self, slots: Ints) -> None:
        """Remove the keys of these distinct slots: as if they had never been."""
        self.release(slots, slots)

    def release(self, slots: Ints, gone: Ints) -> None:
        """Hear that a batch of these keys is done, and remove those of `gone`, distinct slots."""
        self._forget(gone)
        self._touch(slots)
        self._pack_some()

    def clean(self, count: int) -> None:
        """Look at `count` further keys in memory; remove those that have expired."""
        if self.expiry is None:
            return
        first = self._clean_at if self._clean_at < self._index.end else 1
        self._clean_at = stop = min(first + count, self._index.end)
        expired = self.expiry.expired(slice(first, stop))
        if expired.any():
            gone = first + np.flatnonzero(expired & ~self._removed[first:stop])
            if len(gone):
                self.remove(gone)

    def alive(self, rows: Iterable[StateRows]) -> Iterable[StateRows]:
        """Return what a full snapshot holds of these rows of the table. Any thread."""
        return rows if self.expiry is None else self.expiry.alive(rows)

    def _begin_anew(self, slots: Ints, expiry: Expiry) -> None:
        """Take the keys of these slots that have expired as never seen."""
        expired = expiry.expired(slots)
        if expired.any():
            for column in self._aggregates:
                column.clear(slots[expired])

    def _forget(self, slots: Ints) -> None:
        for column in self._columns:
            column.clear(slots)
        self._removed_count += len(slots) - int(np.count_nonzero(self._removed[slots]))
        self._removed[slots] = True
        self._mark(slots)

    def _pack_some(self) -> None:
        if self._removed_count > max(REMOVED_MIN, len(self) // 2):
            self._pack()

    def _pack(self) -> None:
        """Let go of the slots of removed keys; others are renumbered."""
        self._keep(1 + np.flatnonzero(~self._removed[1 : self._index.end]))

    def _keep(self, slots: Ints) -> None:
        """Keep these slots alone, renumbered from 1 in the order given."""
        self._index = self._index.kept(slots)
        for column in self._columns:
            column.keep(slots)
        removed = self._removed[slots]
        self._removed[1 : len(slots) + 1] = removed
        self._removed_count = int(np.count_nonzero(removed))

    def view(self) -> AccumulatorView:
        """Return the table as of now: copies the totals, shares the keys, which never change."""
        end = self._index.end
        if self._removed_count:
            return self.view_of(1 + np.flatnonzero(~self._removed[1:end]))
        return self.view_of(slice(1, end))

    def view_of(self, slots: slice | Ints) -> AccumulatorView:
        """Return some of the slots as of now."""
        return AccumulatorView(
            self.shape,
            self._max_parallelism,
            tuple(_part(column, slots) for column in self._index.slot_keys()),
            self._index.slot_hashes()[slots],
            tuple(column.totals[slots].copy() for column in self._columns),
            tuple(column.seen[slots].copy() for column in self._columns),
            tuple(c.bytes_at() for c in self._columns if isinstance(c, BytesTotals)),
        )

    def load(self, rows: StateRows) -> None:
        """Take rows of a snapshot; their keys are not in the table yet."""
        columns = decode_keys(rows.keys, self.shape.empty_keys())
        slots = self._resolve(columns, self.shape.slot_hashes(columns, None))
        self._put(slots, rows.values.cast(pa.large_binary()))

    def _read(self, keys: Sequence[pa.Array]) -> tuple[KeyColumn, ...]:
        columns = read_key_columns(keys)
        require(
            tuple(type(column) for column in columns) == self._kinds,
            f"{self.shape.name!r} is keyed by {self.shape.key_types}, got {[k.type for k in keys]}",
        )
        return columns

    def _resolve(self, columns: tuple[KeyColumn, ...], hashes: Hashes) -> Ints:
        """Return each row's slot; new ones have totals before this returns."""
        used = self._index.end
        slots, _ = self._index.resolve(columns, hashes)
        if self._index.end > used:
            self._reserve(used, self._index.end)
        if self._removed_count:
            back = np.unique(slots[self._removed[slots]])
            self._removed[back] = False
            self._removed_count -= len(back)
        return slots

    def _reserve(self, used: int, end: int) -> None:
        """Make room for the slots from `used` to before `end`, new ones."""
        for column in self._columns:
            column.reserve(used, end)
        self._removed = grown(self._removed, used, end)
        self._removed[used:end] = False

    def _put(self, slots: Ints, values: pa.Array) -> None:
        """Set the totals of `slots` to encoded ones."""
        decoded, texts = decode_totals(values, self.shape.totals_type, self.shape.of_bytes)
        left = iter(texts)
        for index, column in enumerate(self._columns):
            column.seen[slots] = decoded[f"s{index}"]
            if isinstance(column, BytesTotals):
                column.put_bytes(slots, next(left))
            else:
                column.totals[slots] = decoded[f"t{index}"]

    def _mark(self, slots: Ints) -> None:
        """Hear which slots have new totals."""

    def _touch(self, slots: Ints) -> None:
        """Hear which slots were used, once nobody needs their numbers."""

    def _merge_overflow(self, column: Totals, slots: Ints, row: int) -> BadStateValue:
        keys = self.keys_of(slots[row : row + 1])
        return BadStateValue(f"{self._overflow_text(column, keys, 0)}, where windows are merged")

    def _overflow(self, column: Totals, keys: Sequence[pa.Array], row: int) -> BadStateValue:
        return BadStateValue(self._overflow_text(column, keys, row), row=row)

    def _overflow_text(self, column: Totals, keys: Sequence[pa.Array], row: int) -> str:
        one, key = column.column, tuple(array[row].as_py() for array in keys)
        limit, remedy = "64 bits", "the sum of a column of DECIMAL(20, 0) has 38 digits"
        if one.words_of_total > 1:
            limit, remedy = f"{DIGITS_MAX} digits", "sum in larger units"
        what = "sum" if one.op in ("sum", "count") else f"sum of the {one.op}"
        return (
            f"the running {what} {one.name!r} in state {self.shape.name!r} of {self._label}, of"
            f" {one.type}, leaves {limit} at key {key[0] if len(key) == 1 else key!r} ({remedy})"
        )


@dataclass(frozen=True, slots=True)
class AccumulatorView:
    """An `AccumulatorTable` as of one moment; any thread may read it."""

    shape: AccumulatorShape
    max_parallelism: int
    keys: tuple[KeyColumn, ...]
    hashes: Hashes
    totals: tuple[npt.NDArray[Any], ...]
    seen: tuple[npt.NDArray[Any], ...]
    bytes_at: tuple[pa.Array, ...]
    """Where the totals of each column of text or bytes are places in."""

    def rows(self) -> Iterator[StateRows]:
        """Yield every key with its encoded totals, some ten thousand at a time."""
        for start in range(0, len(self.hashes), CHUNK_SLOTS):
            yield self.rows_of(slice(start, start + CHUNK_SLOTS))

    def rows_of(self, slots: slice) -> StateRows:
        """Return the rows of some of the keys, by their place in this view."""
        chosen = tuple(_part(column, slots) for column in self.keys)
        hashes = self.hashes[slots]
        if self.shape.namespaced:
            hashes = hash_key_columns(self.shape.keys_alone(chosen))
        records = np.zeros(len(hashes), self.shape.totals_type)
        for index, (totals, seen) in enumerate(zip(self.totals, self.seen, strict=True)):
            records[f"t{index}"] = totals[slots]
            records[f"s{index}"] = seen[slots]
        texts: list[pa.Array] = []
        for place, values in zip(self.shape.of_bytes, self.bytes_at, strict=True):
            texts.append(values.take(pa.array(self.totals[place][slots])))
            records[f"t{place}"] = pc.binary_length(texts[-1]).to_numpy()
        groups = key_groups(hashes, self.max_parallelism)
        return StateRows(groups, encode_keys(chosen), encode_totals(records, texts))


def _part(column: KeyColumn, slots: slice | Ints) -> KeyColumn:
    if isinstance(column, FixedKeys):
        return FixedKeys(tuple(plane[slots] for plane in column.words), column.hash_factor)
    return BytesKeys(column.data, column.starts[slots], column.lengths[slots])
