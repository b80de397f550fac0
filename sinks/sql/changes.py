"""A checkpoint's changes by key, held until they are applied all at once.

Changes in place cannot stream into an open transaction as inserts do: a prepared one locks its rows
against the next checkpoint's. So they wait here, are reduced to at most one delete and one put a
key, and come out sorted, which makes every writer lock rows in one order and the indexes be walked
through from left to right.

    for batch in …:                                            # write
        for part in validator.take(batch):                     # the rows of each table
            buffer.add(Classified(part.rows, part.deletes), part.target.name)
    for change in buffer.changes():                            # pre-commit, table by table
        for rows in change.deletes(): …                        # first all deletes,
        for rows in change.puts(): …                           # then all puts
    buffer.clear()

The outcome is the same as of the rows applied one by one in the order they came in, so it does not
depend on where barriers fall. Deletes come before puts because a key may have both: a row put back
after its delete has the defaults of a new row in columns that the stream does not have.

What changes come to is itself a list of changes in order, with the effect of the whole list applied
row by row, so it may be reduced again together with changes that came later. Per key, in arrival
order:

    upsert   the last put, if no delete came after it
    ignore   the first put after the last delete
    update   the last put, if there is no delete at all: after one there is no row to update
    each     the last delete, which is applied before the put

Equal keys are those that Arrow finds equal: the database must not find more of them equal than
Arrow does (text that ignores case), or must be asked for the rows one by one.
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
"""What one writer's changes may take in memory before they go on in local temporary files."""

ROWS_A_BATCH = 50_000

_DELETES = "deletes"

Flags = NDArray[np.bool_]
Positions = NDArray[np.int64]


class TableChanges:
    """The changes of one table. The iterators may be asked for again until the buffer is cleared.

    Batches have the sink's schema, columns that are not written included, and about `rows_a_batch`
    rows. Of a delete only the key columns mean anything.
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
        """Yield the rows that are put, sorted by key, each key once; to be applied last."""
        yield from self._select(deletes=False)

    def _select(self, *, deletes: bool) -> Iterator[pa.RecordBatch]:
        for block in self._blocks():
            marked = block.rows.column(block.rows.num_columns - 1)
            # A block of one kind, as most are, is not copied by the filter.
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

    Holds at most `memory_bytes_max` of rows in memory, and twice that while it sorts; what is more
    waits in unnamed local files, of which a crash leaves nothing.
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
        """Rows taken since the last `clear`, before any of them superseded another."""

    def add(self, classified: Classified, table: str) -> None:
        """Take rows in the sink's schema for `table`; their columns must be plain (`decoded_rows`).

        Raises:
            SinkError: The rows have another schema than those before.
        """
        if not classified.rows.num_rows:
            return
        # The flag travels as the last column: every sort and filter below moves it with its row.
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
        """Return what the rows come to, in the order of the tables' names; forgets nothing."""
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
        """Forget everything and delete the files. Safe to call twice."""
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
        """Reduce what is in memory, and write it to files unless it has become much less."""
        # All tables: the limit is for all of them together.
        tables = {table: self._reduce(table) for table, fresh in self._fresh.items() if fresh}
        self._memory_bytes = sum(one.rows.nbytes for one in tables.values())
        # Many changes of few keys shrink a lot, and need no file. If more than half stayed in
        # memory, the next few batches would have all of it reduced again.
        if self._memory_bytes <= self._memory_bytes_max // 2:
            return
        for table, changes in tables.items():
            run = _FileRun(changes, self._rows_a_batch)
            self._runs.setdefault(table, []).append(run)
            self._fresh[table] = []
        self._memory_bytes = 0


class _Run(ABC):
    """Sorted, reduced changes of one table that all came before those of the next run."""

    def __init__(self, *, deletes: bool) -> None:
        self.deletes = deletes

    @abstractmethod
    def blocks(self) -> Iterator[SortedChanges]:
        """Yield them from the beginning."""

    def close(self) -> None:  # noqa: B027 - only files are closed
        """Free them."""


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
        # Without a name: the system deletes it with the process, however that ends.
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
    """Rows by key, with the last column telling deletes from puts; immutable."""

    def __init__(self, rows: pa.RecordBatch, key: Sequence[str]) -> None:
        self.rows = rows
        self.key = tuple(key)

    @property
    def columns(self) -> list[pa.Array]:
        """The key columns."""
        return [self.rows.column(name) for name in self.key]

    def has_deletes(self) -> bool:
        """Return whether any row deletes its key."""
        return pc.any(self.rows.column(self.rows.num_columns - 1)).as_py() is True

    def slice(self, start: int, count: int | None = None) -> SortedChanges:
        """Return `count` rows from `start` on, to the end without one."""
        return SortedChanges(self.rows.slice(start, count), self.key)

    def count_through(self, bound: Sequence[pa.Scalar]) -> int:
        """Return how many rows have a key that is not over `bound`."""
        # Compares by column like a dictionary does by letter, from the last column to the first:
        # less, or equal and the columns behind it are at most those of the bound.
        at_most: Any = True
        for column, value in reversed(list(zip(self.columns, bound, strict=True))):
            at_most = pc.or_(pc.less(column, value), pc.and_(pc.equal(column, value), at_most))
        count: int = pc.sum(at_most).as_py() or 0
        return count

    def last_key(self) -> list[pa.Scalar]:
        """Return the key of the last row."""
        return [column[len(column) - 1] for column in self.columns]

    def blocks(self, rows_max: int) -> Iterator[SortedChanges]:
        """Cut into blocks of about `rows_max` rows; a key's two rows stay together."""
        total = self.rows.num_rows
        start = 0
        while start < total:
            end = min(start + rows_max, total)
            # A key has at most two rows, a delete and a put behind it: one more row keeps both.
            if end < total and all(
                column.slice(end - 1, 1).equals(column.slice(end, 1)) for column in self.columns
            ):
                end += 1
            yield self.slice(start, end - start)
            start = end


def reduce_changes(
    changes: Sequence[pa.RecordBatch], key: Sequence[str], mode: WriteMode
) -> SortedChanges:
    """Return what `changes`, in arrival order, come to; sorted by `key`.

    The last column of each batch is boolean: whether the row deletes its key.
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
    """Reduce `runs`, each sorted and reduced, in arrival order, holding one block of each."""
    heads = [next(run, None) for run in runs]
    while True:
        present = [head for head in heads if head is not None]
        if not present:
            return
        # Up to the smallest last key, no run has a row that is not in memory now. So all rows of
        # these keys are here, in the order of the runs, and can be reduced.
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
    """Return the positions of the rows by key, those of one key in arrival order."""
    names = [str(position) for position in range(len(keys))]
    order: pa.Array = pc.sort_indices(
        pa.RecordBatch.from_arrays(list(keys), names=names),
        sort_keys=[(name, "ascending") for name in names],
    )
    return order


def _group_starts(keys: Sequence[pa.Array]) -> Positions:
    """Return where each key begins among sorted keys."""
    count = len(keys[0])
    differs: Flags = np.zeros(max(count - 1, 0), dtype=np.bool_)
    for column in keys:
        # Each key is compared with the one before it, all at once.
        unequal = pc.not_equal(column.slice(1), column.slice(0, max(count - 1, 0)))
        differs |= unequal.to_numpy(zero_copy_only=False)
    return np.concatenate(([0], np.flatnonzero(differs) + 1)).astype(np.int64)


def _find_remaining(starts: Positions, deletes: Flags, mode: WriteMode) -> Positions:
    """Return the positions that remain, in order."""
    count = len(deletes)
    if not count:
        return np.zeros(0, dtype=np.int64)
    ends = np.concatenate((starts[1:], [count])) - 1
    if not deletes.any():
        return starts if mode is WriteMode.IGNORE else ends
    # The position of each key's last delete, -1 without one. Whatever came before it is void.
    last_delete = np.maximum.reduceat(np.where(deletes, np.arange(count), -1), starts)
    has_delete = last_delete >= 0
    if mode is WriteMode.IGNORE:
        # The first put behind the delete wins, if there is one.
        puts = np.where(has_delete, last_delete + 1, starts)
        # Behind the key's last row the next key begins.
        puts = puts[puts <= ends]
    elif mode is WriteMode.UPDATE:
        # A key that was deleted has no row any more that a put could update.
        puts = ends[~has_delete]
    else:
        # The last put wins, unless the delete came last.
        puts = ends[ends != last_delete]
    return np.sort(np.concatenate((last_delete[has_delete], puts)))


def _smallest(keys: Sequence[Sequence[pa.Scalar]], like: SortedChanges) -> Sequence[pa.Scalar]:
    columns = [
        pa.array([key[position] for key in keys], column.type)
        for position, column in enumerate(like.columns)
    ]
    # By Arrow's own order, as the runs were sorted: Python's may differ, for text for instance.
    return keys[int(_order(columns)[0].as_py())]
