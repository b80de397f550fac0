"""The changes by key of a checkpoint, buffered until they are applied together.

Changes by key cannot stream into an open transaction as inserts do: when it is prepared, it locks
its rows against the next checkpoint's changes. So the changes are buffered, reduced to at most one
delete and one put per key, and sorted. Sorting makes all writers lock rows in one order, and walk
through the indexes in order.

    for batch in …:                                            # write
        for part in validator.take(batch):                     # the rows of each table
            buffer.add(Classified(part.rows, part.deletes), part.target.name)
    for change in buffer.changes():                            # pre-commit, table by table
        for rows in change.deletes(): …                        # first all deletes,
        for rows in change.puts(): …                           # then all puts
    buffer.clear()

The result equals that of applying the rows one by one in arrival order, so it does not depend on
the position of barriers. A key may have both a delete and a put; deletes come first. A row that is
put after its delete has the defaults of a new row in columns that the stream does not have.

Reduced changes are again an ordered list of changes with the same effect, so they may be reduced
together with later changes. The rules per key, in arrival order:

    upsert   the last put, if no delete came after it
    ignore   the first put after the last delete
    update   the last put, if there is no delete at all: after one there is no row to update
    each     the last delete, which is applied before the put

A put may lack the values of some columns, which its change left as they were. It takes them from
the last earlier put of the key that has them, if no delete came in between. A put that still lacks
values is an update of the table's row: `updates`.

Keys are equal if Arrow finds them equal. The database must not treat more keys as equal (for
example text that ignores case), or its rows must be looked up one by one.
"""

from __future__ import annotations

import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from typing_extensions import override

from onceflow.clients.sql.tables import Target
from onceflow.core.arrow.kinds import cast_batch
from onceflow.core.arrow.nested_rows import filter_batch, take_batch, take_rows
from onceflow.core.errors import SinkError
from onceflow.sinks.sql.row_validator import GIVEN
from onceflow.sinks.sql.unchanged import WHOLE, Numbers, UnchangedSets, split_by_set
from onceflow.sinks.sql.write_mode import ChangeRules, Classified, WriteMode

MEMORY_BYTES_MAX = 64 * 1024 * 1024
"""The memory that one writer's changes may use before they are moved to local temporary files."""

ROWS_A_BATCH = 50_000

# No column of a database has a name with NUL.
_DELETES = "\0\0deletes"
_UNCHANGED = "\0\0unchanged"

Flags = NDArray[np.bool_]
Positions = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PartialRows:
    """Rows to put that all lack the values of the same columns."""

    rows: pa.RecordBatch
    """The rows with all columns; those of `unchanged` are null."""
    unchanged: frozenset[str]

    def select_present(self, target: Target) -> Target:
        """Return `target` with the fits of the columns that the rows have."""
        fits = tuple(fit for fit in target.fits if fit.name not in self.unchanged)
        return replace(target, fits=fits)


@dataclass(frozen=True, slots=True)
class Reduction:
    """The rules by which the changes of a key are reduced."""

    key: tuple[str, ...]
    mode: WriteMode
    sets: UnchangedSets | None = None
    """The sets of columns that rows lack; None if every row has all of its values."""
    unchanged_column: str | None = None

    @property
    def mark_count(self) -> int:
        """The number of columns behind those of the rows."""
        return 1 if self.sets is None else 2


class TableChanges:
    """The changes of one table. The iterators may be restarted until the buffer is cleared.

    Batches have the sink's schema, including columns that are not written, and about `rows_a_batch`
    rows. For a delete only the key columns have a meaning.
    """

    def __init__(self, table: str, runs: Sequence[_Run], reduction: Reduction) -> None:
        self.table = table
        self._runs = runs
        self._reduction = reduction

    def deletes(self) -> Iterator[pa.RecordBatch]:
        """Yield the rows whose keys are deleted, sorted by key, each key once."""
        if any(run.deletes for run in self._runs):
            yield from self._select(deletes=True)

    def puts(self) -> Iterator[pa.RecordBatch]:
        """Yield the rows to put, sorted by key, each key once. Apply them after the deletes.

        Rows that lack values are left out: see `updates`.
        """
        yield from self._select(deletes=False)

    def updates(self) -> Iterator[PartialRows]:
        """Yield the rows to put that lack values. Apply them after the deletes."""
        sets = self._reduction.sets
        if sets is None or not sets.is_needed:
            return
        for block in self._blocks():
            numbers = read_unchanged(block.rows)
            for number, rows in split_by_set(self._drop_marks(block.rows), numbers):
                yield PartialRows(rows, sets.names(number))

    def _select(self, *, deletes: bool) -> Iterator[pa.RecordBatch]:
        sets = self._reduction.sets
        for block in self._blocks():
            marked = block.rows.column(block.rows.num_columns - 1)
            # Most blocks contain only deletes or only puts; the filter would copy them needlessly.
            if pc.any(marked).as_py() is deletes and pc.all(marked).as_py() is deletes:
                chosen = block.rows
            else:
                chosen = filter_batch(block.rows, marked if deletes else pc.invert(marked))
            if sets is not None and sets.is_needed:
                chosen = filter_batch(chosen, pa.array(read_unchanged(chosen) == WHOLE))
            if chosen.num_rows:
                yield self._drop_marks(chosen)

    def _drop_marks(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        return rows.select(range(rows.num_columns - self._reduction.mark_count))

    def _blocks(self) -> Iterator[SortedChanges]:
        blocks = [run.blocks() for run in self._runs]
        if len(blocks) == 1:
            return blocks[0]
        return merge_runs(blocks, self._reduction)


class ChangeBuffer:
    """The changes since the last `clear`, by table. Used by one thread.

    Holds at most `memory_bytes_max` bytes of rows in memory, and twice as much while it sorts.
    Further rows wait in unnamed local files, which the system deletes after a crash.
    """

    def __init__(
        self,
        rules: ChangeRules,
        unchanged_sets: UnchangedSets | None = None,
        *,
        memory_bytes_max: int = MEMORY_BYTES_MAX,
        rows_a_batch: int = ROWS_A_BATCH,
    ) -> None:
        """Hold nothing yet; `rules` must have a mode that changes rows in place."""
        has_partial_rows = rules.unchanged_column is not None
        self._reduction = Reduction(
            rules.primary_key,
            rules.mode,
            unchanged_sets or UnchangedSets() if has_partial_rows else None,
            rules.unchanged_column,
        )
        self._memory_bytes_max = memory_bytes_max
        self._rows_a_batch = rows_a_batch
        self._fresh: dict[str, list[pa.RecordBatch]] = {}
        self._runs: dict[str, list[_Run]] = {}
        self._memory_bytes = 0
        self.rows = 0
        """The number of rows added since the last `clear`, before reduction."""

    def add(self, classified: Classified, table: str, unchanged: Numbers | None = None) -> None:
        """Add rows in the sink's schema for `table`; their columns must be plain (`decoded_rows`).

        `unchanged` has the number of the set of columns that each row lacks.

        Raises:
            SinkError: The rows have another schema than the rows before.
        """
        if not classified.rows.num_rows:
            return
        # The flag is the last column, so that every sort and filter below moves it with its row.
        marked = classified.rows
        if self._reduction.sets is not None:
            numbers = np.zeros(marked.num_rows, np.int32) if unchanged is None else unchanged
            marked = marked.append_column(_UNCHANGED, pa.array(numbers, pa.int32()))
        marked = marked.append_column(_DELETES, classified.deletes)
        fresh = self._fresh.setdefault(table, [])
        if fresh and not fresh[0].schema.equals(marked.schema):
            marked = _as_before(marked, fresh[0].schema)
        fresh.append(marked)
        self.rows += marked.num_rows
        self._memory_bytes += marked.nbytes
        if self._memory_bytes > self._memory_bytes_max:
            self._make_room()

    def changes(self) -> Sequence[TableChanges]:
        """Return the reduced changes, in the order of the tables' names.

        Keep them in the buffer.
        """
        return [
            TableChanges(
                table,
                [
                    *self._runs.get(table, ()),
                    *([_MemoryRun(self._reduce(table), self._rows_a_batch)] if fresh else ()),
                ],
                self._reduction,
            )
            for table, fresh in sorted(self._fresh.items())
        ]

    def clear(self) -> None:
        """Remove all changes and delete the files. May be called twice."""
        for runs in self._runs.values():
            for run in runs:
                run.close()
        self._runs.clear()
        self._fresh.clear()
        self._memory_bytes = 0
        self.rows = 0

    def _reduce(self, table: str) -> SortedChanges:
        sorted_changes = reduce_changes(self._fresh[table], self._reduction)
        self._fresh[table] = [sorted_changes.rows]
        return sorted_changes

    def _make_room(self) -> None:
        """Reduce the changes in memory, and write them to files unless they became much smaller."""
        # Reduce all tables, because the limit applies to their sum.
        tables = {table: self._reduce(table) for table, fresh in self._fresh.items() if fresh}
        self._memory_bytes = sum(reduced.rows.nbytes for reduced in tables.values())
        # Many changes of few keys shrink a lot and need no file. If more than half stayed in
        # memory, the next few batches would cause another reduction of all of them.
        if self._memory_bytes <= self._memory_bytes_max // 2:
            return
        for table, changes in tables.items():
            run = _FileRun(changes, self._rows_a_batch)
            self._runs.setdefault(table, []).append(run)
            self._fresh[table] = []
        self._memory_bytes = 0


class _Run(ABC):
    """The sorted, reduced changes of a table that all arrived before those of the next run."""

    def __init__(self, *, deletes: bool) -> None:
        self.deletes = deletes

    @abstractmethod
    def blocks(self) -> Iterator[SortedChanges]:
        """Yield the changes from the beginning, in blocks."""

    def close(self) -> None:  # noqa: B027 - only files are closed
        """Free the resources of the changes."""


class _MemoryRun(_Run):
    def __init__(self, changes: SortedChanges, rows_a_batch: int) -> None:
        super().__init__(deletes=changes.has_deletes())
        self._changes = changes
        self._rows_a_batch = rows_a_batch

    @override
    def blocks(self) -> Iterator[SortedChanges]:
        return self._changes.blocks(self._rows_a_batch)


class _FileRun(_Run):
    def __init__(self, changes: SortedChanges, rows_a_batch: int) -> None:
        super().__init__(deletes=changes.has_deletes())
        self._key = changes.key
        # The file has no name, so the system deletes it when the process ends in any way.
        self._file: IO[bytes] = tempfile.TemporaryFile(prefix="onceflow-changes-")  # noqa: SIM115
        try:
            with pa.ipc.new_file(self._file, changes.rows.schema) as sink:
                for block in changes.blocks(rows_a_batch):
                    sink.write_batch(block.rows)
        except OSError as error:
            self._file.close()
            raise SinkError(
                f"{changes.rows.num_rows} changes do not fit into the local directory "
                f"{tempfile.gettempdir()}: {error}. Make room, or set TMPDIR to a larger one"
            ) from error

    @override
    def blocks(self) -> Iterator[SortedChanges]:
        reader = pa.ipc.open_file(self._file)
        for number in range(reader.num_record_batches):
            yield SortedChanges(reader.get_batch(number), self._key)

    @override
    def close(self) -> None:
        self._file.close()


def _as_before(rows: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    try:
        return cast_batch(rows.select(schema.names), schema)
    except (KeyError, ValueError) as error:
        raise SinkError(
            f"a batch has the columns {rows.schema.names[:-1]}, which cannot be taken for those "
            f"of the batches before it, {schema.names[:-1]}: {error}"
        ) from error


class SortedChanges:
    """A set of rows sorted by key, whose last column marks deletes; immutable."""

    def __init__(self, rows: pa.RecordBatch, key: Sequence[str]) -> None:
        self.rows = rows
        self.key = tuple(key)

    @property
    def columns(self) -> list[pa.Array]:
        """The key columns."""
        return [self.rows.column(name) for name in self.key]

    def has_deletes(self) -> bool:
        """Return True if any row deletes its key."""
        return pc.any(self.rows.column(self.rows.num_columns - 1)).as_py() is True

    def slice(self, start: int, count: int | None = None) -> SortedChanges:
        """Return `count` rows from `start` on, or all of them up to the end without `count`."""
        return SortedChanges(self.rows.slice(start, count), self.key)

    def count_through(self, bound: Sequence[pa.Scalar]) -> int:
        """Return the number of rows whose key is at most `bound`."""
        # Lexicographic comparison, from the last column to the first: less, or equal and the later
        # columns are at most those of the bound.
        at_most: Any = True
        for column, value in reversed(list(zip(self.columns, bound, strict=True))):
            at_most = pc.or_(pc.less(column, value), pc.and_(pc.equal(column, value), at_most))
        count: int = pc.sum(at_most).as_py() or 0
        return count

    def last_key(self) -> list[pa.Scalar]:
        """Return the key of the last row."""
        return [column[len(column) - 1] for column in self.columns]

    def blocks(self, rows_max: int) -> Iterator[SortedChanges]:
        """Yield blocks of about `rows_max` rows; the two rows of a key stay together."""
        total = self.rows.num_rows
        start = 0
        while start < total:
            end = min(start + rows_max, total)
            # A key has at most two rows, a delete and then a put, so one more row keeps both
            # together.
            if end < total and all(
                column.slice(end - 1, 1).equals(column.slice(end, 1)) for column in self.columns
            ):
                end += 1
            yield self.slice(start, end - start)
            start = end


def reduce_changes(changes: Sequence[pa.RecordBatch], reduction: Reduction) -> SortedChanges:
    """Return the reduced `changes`, which are in arrival order, sorted by key.

    The last column of each batch is boolean: True if the row deletes its key. If rows may lack
    values, the column before has the numbers of the sets of their columns.
    """
    key, sets = reduction.key, reduction.sets
    rows = pa.concat_batches(list(changes)) if len(changes) > 1 else changes[0]
    order = _order([rows.column(name) for name in key])
    keys = [rows.column(name).take(order) for name in key]
    starts = _group_starts(keys)
    deletes = rows.column(rows.num_columns - 1).take(order).to_numpy(zero_copy_only=False)
    kept = _find_remaining(starts, deletes, reduction.mode)
    sorted_at: Positions = order.to_numpy()
    reduced = take_batch(rows, sorted_at[kept])
    if sets is not None and sets.is_needed:
        reduced = _fill_values(rows, sorted_at, starts, kept, reduced, reduction)
    return SortedChanges(reduced, key)


def read_unchanged(rows: pa.RecordBatch) -> Numbers:
    """Return the numbers of the sets of columns that the marked `rows` lack."""
    numbers: Numbers = rows.column(rows.num_columns - 2).to_numpy()
    return numbers


def _fill_values(
    rows: pa.RecordBatch,
    order: Positions,
    starts: Positions,
    kept: Positions,
    reduced: pa.RecordBatch,
    reduction: Reduction,
) -> pa.RecordBatch:
    """Return `reduced`, the sorted rows at `kept`, with the values that earlier puts have."""
    sets = reduction.sets
    assert sets is not None
    numbers = read_unchanged(rows)[order]
    kept_numbers = numbers[kept]
    partial_rows = np.flatnonzero(kept_numbers)
    if not len(partial_rows):
        return reduced
    at = np.arange(len(order))
    deletes = rows.column(rows.num_columns - 1).to_numpy(zero_copy_only=False)[order]
    # The position from which on puts of the same key count: after its last delete.
    first = np.repeat(starts, np.diff(np.append(starts, len(order))))
    first = np.maximum.accumulate(np.maximum(first, np.where(deletes, at + 1, 0)))
    remaining = {row: set(sets.names(int(kept_numbers[row]))) for row in partial_rows}
    columns = dict(zip(reduced.schema.names, reduced.columns, strict=True))
    for name in sets.list_columns(kept_numbers):
        lacks = sets.lack(numbers, name)
        source = np.maximum.accumulate(np.where(deletes | lacks, -1, at))[kept]
        is_filled = lacks[kept] & (source >= first[kept])
        indexes = order[np.where(is_filled, source, kept)]
        for column in (name, GIVEN + name):
            if column in columns:
                columns[column] = take_rows(rows.column(column), indexes)
        for row in np.flatnonzero(is_filled):
            remaining[row].discard(name)
    left = np.zeros(len(kept), np.int32)
    for row, names in remaining.items():
        left[row] = sets.add(frozenset(names))
    columns[_UNCHANGED] = pa.array(left, pa.int32())
    given = f"{GIVEN}{reduction.unchanged_column}"
    if given in columns:
        columns[given] = sets.decode(left, columns[given].type)
    return pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))


def merge_runs(
    runs: Sequence[Iterator[SortedChanges]], reduction: Reduction
) -> Iterator[SortedChanges]:
    """Merge and reduce `runs`, which are sorted, reduced and in arrival order.

    Holds one block of each run in memory.
    """
    heads = [next(run, None) for run in runs]
    while True:
        present = [head for head in heads if head is not None]
        if not present:
            return
        # All rows with keys up to the smallest last key are in memory. So the rows of these keys
        # can be reduced, in the order of the runs.
        bound = _smallest([head.last_key() for head in present], present[0])
        parts: list[pa.RecordBatch] = []
        for position, head in enumerate(heads):
            if head is None:
                continue
            count = head.count_through(bound)
            if count:
                parts.append(head.rows.slice(0, count))
            heads[position] = (
                next(runs[position], None) if count == head.rows.num_rows else head.slice(count)
            )
        yield reduce_changes(parts, reduction)


def _order(keys: Sequence[pa.Array]) -> pa.Array:
    """Return the positions of the rows in key order; rows of one key stay in arrival order."""
    names = [str(position) for position in range(len(keys))]
    order: pa.Array = pc.sort_indices(
        pa.RecordBatch.from_arrays(list(keys), names=names),
        sort_keys=[(name, "ascending") for name in names],
    )
    return order


def _group_starts(keys: Sequence[pa.Array]) -> Positions:
    """Return the position of the first row of each key among sorted keys."""
    count = len(keys[0])
    differs: Flags = np.zeros(max(count - 1, 0), dtype=np.bool_)
    for column in keys:
        # Compare each key with the key before it, all at once.
        unequal = pc.not_equal(column.slice(1), column.slice(0, max(count - 1, 0)))
        differs |= unequal.to_numpy(zero_copy_only=False)
    return np.concatenate(([0], np.flatnonzero(differs) + 1)).astype(np.int64)


def _find_remaining(starts: Positions, deletes: Flags, mode: WriteMode) -> Positions:
    """Return the positions of the rows that remain after reduction, in order."""
    count = len(deletes)
    if not count:
        return np.zeros(0, dtype=np.int64)
    ends = np.concatenate((starts[1:], [count])) - 1
    if not deletes.any():
        return starts if mode is WriteMode.IGNORE else ends
    # The position of each key's last delete, or -1. All changes before it have no effect.
    last_delete = np.maximum.reduceat(np.where(deletes, np.arange(count), -1), starts)
    has_delete = last_delete >= 0
    if mode is WriteMode.IGNORE:
        # The first put after the delete remains, if there is one.
        puts = np.where(has_delete, last_delete + 1, starts)
        # A position after the key's last row belongs to the next key.
        puts = puts[puts <= ends]
    elif mode is WriteMode.UPDATE:
        # A deleted key has no row that a put could update.
        puts = ends[~has_delete]
    else:
        # The last put remains, unless a delete came after it.
        puts = ends[ends != last_delete]
    return np.sort(np.concatenate((last_delete[has_delete], puts)))


def _smallest(keys: Sequence[Sequence[pa.Scalar]], like: SortedChanges) -> Sequence[pa.Scalar]:
    columns = [
        pa.array([key[position] for key in keys], column.type)
        for position, column in enumerate(like.columns)
    ]
    # Use Arrow's own order, by which the runs are sorted. Python's may differ, for example for
    # text.
    return keys[int(_order(columns)[0].as_py())]
