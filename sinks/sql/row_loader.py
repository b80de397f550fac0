"""How valid rows get into a transaction: at once, a batch a table at a time, or at the barrier.

StreamedInserts    inserts into one table, when the first bad row ends the job
BatchedInserts     inserts into several tables, or with refused rows left out
BufferedChanges    changes by key, sorted: no row is locked before the barrier
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import pyarrow as pa
from typing_extensions import override

from onceflow.core.spi.bad_rows import BadRows
from onceflow.core.spi.staging import RowStager
from onceflow.sinks.sql.changes import ChangeBuffer
from onceflow.sinks.sql.dialect import DmlExecutor, InsertStream
from onceflow.sinks.sql.row_validator import ValidRows, as_given
from onceflow.sinks.sql.session import RowRefused, Session
from onceflow.sinks.sql.tables import ColumnFit, TableName, Target
from onceflow.sinks.sql.transactions import Transactions
from onceflow.sinks.sql.write_mode import ChangeRules, Classified, StagedOperation

_CHUNK_ROWS = 20_000
_CHUNK_BYTES = 16 * 1024 * 1024
"""Rows wait until either of both is reached, and are then sent as one."""


class RowLoader(ABC):
    """Takes rows now and has all of them where they belong when it is asked to finish.

    Used by one writer. Errors of the server are `SqlError`s and end the transaction.
    """

    @property
    @abstractmethod
    def rows(self) -> int:
        """How many rows were taken and not rejected since the last `finish`."""

    @abstractmethod
    def load(self, part: ValidRows) -> None:
        """Take rows of one table.

        Raises:
            BadRow: The server cannot take a row, and bad rows fail the job.
        """

    @abstractmethod
    def finish(self) -> int:
        """Return how many rows since the last call are where they belong, which is all of them."""

    @abstractmethod
    def close(self) -> None:
        """Give up what is under way, without waiting long. Safe to call twice."""


class StreamedInserts(RowLoader):
    """Rows of one table that go in at once. The first bad row is the end of the transaction."""

    def __init__(self, transactions: Transactions, stream: InsertStream) -> None:
        """Send nothing yet."""
        self._transactions = transactions
        self._stream = stream
        self._rows = 0

    @property
    @override
    def rows(self) -> int:
        return self._rows

    @override
    def load(self, part: ValidRows) -> None:
        # `begin` as a function: the stream opens the transaction when it sends, and may keep rows
        # first.
        self._stream.write(self._transactions.begin, part.rows)
        self._rows += part.rows.num_rows

    @override
    def finish(self) -> int:
        self._stream.finish(self._transactions.begin())
        rows, self._rows = self._rows, 0
        return rows

    @override
    def close(self) -> None:
        self._transactions.hasten()
        self._stream.give_up()


class Destination(ABC):
    """Where rows are put, and keys deleted: an open transaction, or checkpoint storage."""

    @abstractmethod
    def put(self, target: Target, batches: Iterable[pa.RecordBatch]) -> int:
        """Return how many rows of `batches` were taken."""

    @abstractmethod
    def delete(self, target: Target, batches: Iterable[pa.RecordBatch]) -> int:
        """Return of how many rows of `batches` the delete of the key was taken."""

    @abstractmethod
    def give_up(self) -> None:
        """Take nothing more. Safe to call twice."""


class OpenTransaction(Destination):
    """Statements in the writer's transaction, which leave out refused rows unless those fail."""

    def __init__(
        self,
        transactions: Transactions,
        executor: DmlExecutor,
        bad_rows: BadRows,
        schema: pa.Schema,
    ) -> None:
        """Begin no transaction yet; `schema` is the sink's."""
        self._transactions = transactions
        self._executor = executor
        self._bad_rows = bad_rows
        self._schema = schema

    @override
    def put(self, target: Target, batches: Iterable[pa.RecordBatch]) -> int:
        session = self._transactions.begin()
        put = partial(self._executor.put, session, target)
        return self._apply_batches(session, target, batches, lambda rows: put([rows]))

    @override
    def delete(self, target: Target, batches: Iterable[pa.RecordBatch]) -> int:
        session = self._transactions.begin()
        return self._apply_batches(
            session, target, batches, partial(self._executor.delete, session, target)
        )

    @override
    def give_up(self) -> None:
        self._transactions.hasten()

    def _apply_batches(
        self,
        session: Session,
        target: Target,
        batches: Iterable[pa.RecordBatch],
        apply: Callable[[pa.RecordBatch], None],
    ) -> int:
        width = len(target.fits)
        done = 0
        for rows in batches:
            if self._bad_rows.fail:
                apply(rows)
                done += rows.num_rows
            else:
                taken = self._without_refused(
                    session, rows, lambda part: apply(part.select(range(width)))
                )
                done += sum(taken)
        return done

    def _without_refused(
        self,
        session: Session,
        rows: pa.RecordBatch,
        apply: Callable[[pa.RecordBatch], None],
    ) -> Iterator[int]:
        """Apply `rows` but those that the server refuses, and yield how many it took.

        A refused batch is taken back to a savepoint and halved until the row is alone, so each bad
        row costs about twice the logarithm of the batch in statements.
        """
        try:
            # A refused statement ends a transaction on Postgres: the savepoint keeps what went
            # before it.
            with session.savepoint():
                apply(rows)
        except RowRefused as error:
            if rows.num_rows == 1:
                self._bad_rows.reject(as_given(rows, self._schema), [str(error)])
                return
        else:
            yield rows.num_rows
            return
        # The first half goes first, so rows are applied in their order.
        half = rows.num_rows // 2
        for part in (rows.slice(0, half), rows.slice(half)):
            yield from self._without_refused(session, part, apply)


class StagedChanges(Destination):
    """Checkpoint storage: what is staged is applied when it is decided, as it is then."""

    def __init__(self, stager: RowStager, rules: ChangeRules) -> None:
        """Stage nothing yet; whoever made `stager` pre-commits and closes it."""
        self._stager = stager
        self._rules = rules

    @override
    def put(self, target: Target, batches: Iterable[pa.RecordBatch]) -> int:
        return self._stage(target, batches, target.fits, deletes=False)

    @override
    def delete(self, target: Target, batches: Iterable[pa.RecordBatch]) -> int:
        # Of a delete only the key is staged; its other columns mean nothing.
        fits = [fit for fit in target.fits if fit.name in self._rules.primary_key]
        return self._stage(target, batches, fits, deletes=True)

    @override
    def give_up(self) -> None:
        self._stager.close()

    def _stage(
        self,
        target: Target,
        batches: Iterable[pa.RecordBatch],
        fits: Sequence[ColumnFit],
        *,
        deletes: bool,
    ) -> int:
        operation = StagedOperation(
            target.name,
            self._rules.mode,
            self._rules.primary_key,
            deletes,
            tuple(fit.shown for fit in fits),
        )
        names = [fit.name for fit in fits]
        staged = 0
        for rows in batches:
            self._stager.write(rows.select(names), part=operation.to_label())
            staged += rows.num_rows
        return staged


class BatchedInserts(RowLoader):
    """Inserts into several tables, or with bad rows left out: a batch of each table at a time."""

    def __init__(self, destination: Destination) -> None:
        """Hold nothing yet."""
        self._destination = destination
        self._waiting: dict[TableName, tuple[Target, list[pa.RecordBatch]]] = {}
        self._waiting_rows = 0
        self._waiting_bytes = 0
        self._placed = 0

    @property
    @override
    def rows(self) -> int:
        return self._placed + self._waiting_rows

    @override
    def load(self, part: ValidRows) -> None:
        _, batches = self._waiting.setdefault(part.target.name, (part.target, []))
        batches.append(part.rows)
        self._waiting_rows += part.rows.num_rows
        self._waiting_bytes += part.rows.nbytes
        if self._waiting_rows >= _CHUNK_ROWS or self._waiting_bytes >= _CHUNK_BYTES:
            self._send()

    @override
    def finish(self) -> int:
        self._send()
        placed, self._placed = self._placed, 0
        return placed

    @override
    def close(self) -> None:
        self._waiting.clear()
        self._destination.give_up()

    def _send(self) -> None:
        """Send what waits, table after table in one order for all writers."""
        # In one order, for two writers that lock tables in different orders could wait for each
        # other.
        for name in sorted(self._waiting, key=str):
            target, batches = self._waiting[name]
            self._placed += self._destination.put(target, [pa.concat_batches(batches)])
        self._waiting.clear()
        self._waiting_rows = self._waiting_bytes = 0


class BufferedChanges(RowLoader):
    """Changes by key, applied sorted when asked to finish: no row is locked before the barrier."""

    def __init__(self, rules: ChangeRules, destination: Destination) -> None:
        """Hold nothing yet."""
        self._buffer = ChangeBuffer(rules)
        self._targets: dict[str, Target] = {}
        self._destination = destination

    @property
    @override
    def rows(self) -> int:
        return self._buffer.rows

    @override
    def load(self, part: ValidRows) -> None:
        table = str(part.target.name)
        self._targets[table] = part.target
        self._buffer.add(Classified(part.rows, part.deletes), table)

    @override
    def finish(self) -> int:
        applied = 0
        for changes in self._buffer.changes():
            target = self._targets[changes.table]
            # Deletes first: a key may have a delete and a put behind it.
            applied += self._destination.delete(target, changes.deletes())
            applied += self._destination.put(target, changes.puts())
        self._buffer.clear()
        return applied

    @override
    def close(self) -> None:
        self._buffer.clear()
        self._destination.give_up()
