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

Keys are equal if Arrow finds them equal. The database must not treat more keys as equal (for
example text that ignores case), or its rows must be looked up one by one.
"""

from __future__ import annotations

import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from typing_extensions import override

from onceflow.core.arrow.kinds import cast_batch
from onceflow.core.arrow.nested_rows import filter_batch, take_batch
from onceflow.core.errors import SinkError
from onceflow.sinks.sql.write_mode import ChangeRules, Classified, WriteMode

MEMORY_BYTES_MAX = 64 * 1024 * 1024
"""The memory that one writer's changes may use before they are moved to local temporary files."""

ROWS_A_BATCH = 50_000

_DELETES = "deletes"

Flags = NDArray[np.bool_]
Positions = NDArray[np.int64]


class TableChanges:
    """The changes of one table. The iterators may be restarted until the buffer is cleared.

    Batches have the sink's schema, including columns that are not written, and about `rows_a_batch`
    rows. For a delete only the key columns have a meaning.
    """

    def __init__(self, table: str, runs: Sequence[_Run], rules: ChangeRules) -> None:
        self.table = table
        self._runs = runs
        self._rules = rules

    def deletes(self) -> Iterator[pa.RecordBatch]:
        """Yield the rows whose keys are deleted, sorted by key, each key once."""
        if any(run.deletes for run in self._runs):
            yield from self._select(deletes=True)

    def puts(self) -> Iterator[pa.RecordBatch]:
        """Yield the rows to put, sorted by key, each key once. Apply them after the deletes."""
        yield from self._select(deletes=False)

    def _select(self, *, deletes: bool) -> Iterator[pa.RecordBatch]:
        for block in self._blocks():
            marked = block.rows.column(block.rows.num_columns - 1)
            # Most blocks contain only deletes or only puts; the filter would copy them needlessly.
            if pc.any(marked).as_py() is deletes and pc.all(marked).as_py() is deletes:
                chosen = block.rows
            else:
                chosen = filter_batch(block.rows, marked if deletes else pc.invert(marked))
            if chosen.num_rows:
                yield chosen.select(range(chosen.num_columns - 1))

    def _blocks(self) -> Iterator[SortedChanges]:
        blocks = [run.blocks() for run in self._runs]
        if len(blocks) == 1:
            return blocks[0]
        return merge_runs(blocks, self._rules.primary_key, self._rules.mode)


class ChangeBuffer:
    """The changes since the last `clear`, by table. Used by one thread.

    Holds at most `memory_bytes_max` bytes of rows in memory, and twice as much while it sorts.
    Further rows wait in unnamed local files, which the system deletes after a crash.
    """

    def __init__(
        self,
        rules: ChangeRules,
        *,
        memory_bytes_max: int = MEMORY_BYTES_MAX,
        rows_a_batch: int = ROWS_A_BATCH,
    ) -> None:
        """Hold nothing yet; `rules` must have a mode that changes rows in place."""
        self._rules = rules
        self._memory_bytes_max = memory_bytes_max
        self._rows_a_batch = rows_a_batch
        self._fresh: dict[str, list[pa.RecordBatch]] = {}
        self._runs: dict[str, list[_Run]] = {}
        self._memory_bytes = 0
        self.rows = 0
        """The number of rows added since the last `clear`, before reduction."""

    def add(self, classified: Classified, table: str) -> None:
        """Add rows in the sink's schema for `table`; their columns must be plain (`decoded_rows`).

        Raises:
            SinkError: The rows have another schema than the rows before.
        """
        if not classified.rows.num_rows:
            return
        # The flag is the last column, so that every sort and filter below moves it with its row.
        marked = classified.rows.append_column(_DELETES, classified.deletes)
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
                self._rules,
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
        sorted_changes = reduce_changes(
            self._fresh[table], self._rules.primary_key, self._rules.mode
        )
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


def reduce_changes(
    changes: Sequence[pa.RecordBatch], key: Sequence[str], mode: WriteMode
) -> SortedChanges:
    """Return the reduced `changes`, which are in arrival order, sorted by `key`.

    The last column of each batch is boolean: True if the row deletes its key.
    """
    rows = pa.concat_batches(list(changes)) if len(changes) > 1 else changes[0]
    order = _order([rows.column(name) for name in key])
    keys = [rows.column(name).take(order) for name in key]
    starts = _group_starts(keys)
    deletes = rows.column(rows.num_columns - 1).take(order).to_numpy(zero_copy_only=False)
    kept = _find_remaining(starts, deletes, mode)
    return SortedChanges(take_batch(rows, order.take(pa.array(kept)).to_numpy()), key)


def merge_runs(
    runs: Sequence[Iterator[SortedChanges]], key: Sequence[str], mode: WriteMode
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
        yield reduce_changes(parts, key, mode)


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
