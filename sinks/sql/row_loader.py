"""The loaders that bring valid rows into a transaction or into checkpoint storage.

StreamedInserts    inserts into one table, if the first bad row fails the job
BatchedInserts     inserts into several tables, or with refused rows left out
BufferedChanges    changes by key, sorted: no row is locked before the barrier
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TypeVar

import pyarrow as pa
from typing_extensions import override

from onceflow.clients.sql.session import RowRefused, Session
from onceflow.clients.sql.tables import CheckConstraint, ColumnFit, TableName, Target
from onceflow.core.spi.bad_rows import BadRows
from onceflow.core.spi.staging import RowStager
from onceflow.sinks.sql.changes import ChangeBuffer, PartialRows
from onceflow.sinks.sql.dialect import DmlExecutor, InsertStream, RowCheck
from onceflow.sinks.sql.row_validator import ValidRows, as_given
from onceflow.sinks.sql.settings import SqlSettings
from onceflow.sinks.sql.transactions import Transactions
from onceflow.sinks.sql.unchanged import UnchangedSets
from onceflow.sinks.sql.write_mode import (
    ChangeRules,
    Classified,
    StagedOperation,
    StagedVerb,
    WriteMode,
)

_B = TypeVar("_B", pa.RecordBatch, PartialRows)

_CHUNK_ROWS = 20_000
_CHUNK_BYTES = 16 * 1024 * 1024
"""The limits of the rows that wait. If either is reached, the rows are sent together."""


class RowLoader(ABC):
    """A loader that takes rows, and completes the writing of all of them in `finish`.

    Used by one writer. Errors of the server are raised as `SqlError` and end the transaction.
    """

    @property
    @abstractmethod
    def rows(self) -> int:
        """The number of rows that were taken and not rejected since the last `finish`."""

    @abstractmethod
    def load(self, part: ValidRows) -> None:
        """Take rows of one table.

        Raises:
            BadRow: The server cannot take a row, and bad rows fail the job.
        """

    @abstractmethod
    def finish(self) -> int:
        """Complete the writing of all rows since the last call; return their number."""

    @abstractmethod
    def close(self) -> None:
        """Abandon unfinished work without a long wait. May be called twice."""


class StreamedInserts(RowLoader):
    """A loader that sends inserts into one table at once.

    The first bad row ends the transaction.
    """

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
        # Pass `begin` as a function: the stream may keep rows first, and opens the transaction when
        # it sends.
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
    """The place where rows are written and keys deleted: a transaction or checkpoint storage."""

    @abstractmethod
    def put(self, target: Target, batches: Iterable[pa.RecordBatch]) -> int:
        """Write `batches`; return the number of accepted rows."""

    @abstractmethod
    def update(self, target: Target, batches: Iterable[PartialRows]) -> int:
        """Set columns of existing rows; return the number of accepted rows."""

    @abstractmethod
    def delete(self, target: Target, batches: Iterable[pa.RecordBatch]) -> int:
        """Delete the keys of `batches`; return the number of accepted rows."""

    @abstractmethod
    def give_up(self) -> None:
        """Stop accepting rows. May be called twice."""


class OpenTransaction(Destination):
    """The writer's open transaction; refused rows are left out unless bad rows fail."""

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
        if target.refers:
            # A foreign key does not see a row that is prepared and not yet committed.
            batches = self._after_earlier(batches)
        return self._apply_batches(session, target, batches, lambda rows: put([rows]))

    @override
    def update(self, target: Target, batches: Iterable[PartialRows]) -> int:
        session, done = self._transactions.begin(), 0
        # Like a DELETE, an UPDATE does not see a row that is prepared and not yet committed.
        for partial_rows in self._after_earlier(batches):
            present = partial_rows.select_present(target)
            names = [fit.name for fit in present.fits]
            update = partial(self._executor.update_existing, session, present)

            def apply(
                rows: pa.RecordBatch,
                update: Callable[[pa.RecordBatch], None] = update,
                names: Sequence[str] = names,
            ) -> None:
                update(rows.select(names))

            done += self._apply_batches(session, target, [partial_rows.rows], apply)
        return done

    @override
    def delete(self, target: Target, batches: Iterable[pa.RecordBatch]) -> int:
        session = self._transactions.begin()
        delete = partial(self._executor.delete, session, target)
        return self._apply_batches(session, target, self._after_earlier(batches), delete)

    def _after_earlier(self, batches: Iterable[_B]) -> Iterator[_B]:
        """Yield `batches`. Wait for earlier transactions before each; never without rows."""
        for batch in batches:
            self._transactions.await_earlier()
            yield batch

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

                def apply_in_savepoint(part: pa.RecordBatch) -> None:
                    # A refused statement aborts a transaction on Postgres; the savepoint keeps the
                    # earlier statements.
                    with session.savepoint():
                        apply(part.select(range(width)))

                taken = leave_out_refused(rows, apply_in_savepoint, self._bad_rows, self._schema)
                done += sum(part.num_rows for part in taken)
        return done


def leave_out_refused(
    rows: pa.RecordBatch,
    apply: Callable[[pa.RecordBatch], None],
    bad_rows: BadRows,
    schema: pa.Schema,
) -> Iterator[pa.RecordBatch]:
    """Call `apply` for all of `rows`, yield the accepted parts in order, and reject the other rows.

    A refused part is halved until the bad row is alone. So each bad row costs about twice the
    logarithm of the batch in statements. `apply` must undo what it did for a refused part.
    """
    try:
        apply(rows)
    except RowRefused as error:
        if rows.num_rows == 1:
            bad_rows.reject(as_given(rows, schema), [str(error)])
            return
    else:
        yield rows
        return
    half = rows.num_rows // 2
    for part in (rows.slice(0, half), rows.slice(half)):
        yield from leave_out_refused(part, apply, bad_rows, schema)


class StagedChanges(Destination):
    """The checkpoint storage.

    Staged rows are applied when they are decided, to the table of then. The server is asked before
    for each value that only the server can judge: a decided row must not be refused.
    """

    def __init__(
        self,
        stager: RowStager,
        settings: SqlSettings,
        open_session: Callable[[], Session],
        bad_rows: BadRows,
        schema: pa.Schema,
    ) -> None:
        """Stage nothing yet; the owner of `stager` pre-commits and closes it."""
        self._stager = stager
        self._rules = settings.rules
        self._dialect = settings.dialect
        self._open_session = open_session
        self._bad_rows = bad_rows
        self._schema = schema

    @override
    def put(self, target: Target, batches: Iterable[pa.RecordBatch]) -> int:
        return self._stage(target, batches, target.fits, StagedVerb.PUT)

    @override
    def update(self, target: Target, batches: Iterable[PartialRows]) -> int:
        return sum(
            self._stage(
                target,
                [partial_rows.rows],
                partial_rows.select_present(target).fits,
                StagedVerb.UPDATE,
            )
            for partial_rows in batches
        )

    @override
    def delete(self, target: Target, batches: Iterable[pa.RecordBatch]) -> int:
        # For a delete only the key is staged; its other columns have no meaning.
        fits = [fit for fit in target.fits if fit.name in self._rules.primary_key]
        return self._stage(target, batches, fits, StagedVerb.DELETE)

    @override
    def give_up(self) -> None:
        self._stager.close()

    def _stage(
        self,
        target: Target,
        batches: Iterable[pa.RecordBatch],
        fits: Sequence[ColumnFit],
        verb: StagedVerb,
    ) -> int:
        operation = StagedOperation(
            target.name,
            self._rules.mode,
            self._rules.primary_key,
            verb,
            tuple(fit.shown for fit in fits),
        )
        names = [fit.name for fit in fits]
        check = self._dialect.find_row_check(target, names, self._find_constraints(target, verb))
        staged = 0
        for rows in batches:
            for part in self._find_accepted(rows, check):
                self._stager.write(part.select(names), part=operation.to_label())
                staged += part.num_rows
        return staged

    def _find_constraints(self, target: Target, verb: StagedVerb) -> Sequence[CheckConstraint]:
        """Return the CHECK constraints that the written columns alone decide for every row.

        Empty if rows may change nothing: an UPDATE of no row violates no constraint.
        """
        if verb is not StagedVerb.PUT or self._rules.mode is WriteMode.UPDATE:
            return ()
        written = {fit.name for fit in target.fits}
        return [each for each in target.table.checks if each.columns <= written]

    def _find_accepted(
        self, rows: pa.RecordBatch, check: RowCheck | None
    ) -> Iterator[pa.RecordBatch]:
        if check is None:
            yield rows
            return
        session = self._open_session()
        if self._bad_rows.fail:
            check(session, rows)
            yield rows
        else:
            yield from leave_out_refused(
                rows, lambda part: check(session, part), self._bad_rows, self._schema
            )


class BatchedInserts(RowLoader):
    """A loader of inserts into several tables, or without bad rows. It sends a batch per table."""

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
        """Send the waiting rows, table by table in an order that all writers share."""
        # If two writers locked tables in different orders, each could wait for the other.
        for target, batches in sorted(self._waiting.values(), key=lambda each: _order(each[0])):
            self._placed += self._destination.put(target, [pa.concat_batches(batches)])
        self._waiting.clear()
        self._waiting_rows = self._waiting_bytes = 0


class BufferedChanges(RowLoader):
    """A loader of changes by key, applied in sorted order. No row is locked before the barrier."""

    def __init__(
        self, rules: ChangeRules, destination: Destination, unchanged_sets: UnchangedSets
    ) -> None:
        """Hold nothing yet; rows that lack values name their columns by `unchanged_sets`."""
        self._buffer = ChangeBuffer(rules, unchanged_sets)
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
        self._buffer.add(Classified(part.rows, part.deletes), table, part.unchanged)

    @override
    def finish(self) -> int:
        applied = 0
        tables = [(self._targets[changes.table], changes) for changes in self._buffer.changes()]
        tables.sort(key=lambda each: _order(each[0]))
        # Deletes first: a key may have a delete and a later put. If tables refer to each other, the
        # rows that refer are deleted before all others.
        is_linked = any(target.depth for target, _ in tables)
        if is_linked:
            for target, changes in reversed(tables):
                applied += self._destination.delete(target, changes.deletes())
        for target, changes in tables:
            if not is_linked:
                applied += self._destination.delete(target, changes.deletes())
            applied += self._destination.put(target, changes.puts())
            applied += self._destination.update(target, changes.updates())
        self._buffer.clear()
        return applied

    @override
    def close(self) -> None:
        self._buffer.clear()
        self._destination.give_up()


def _order(target: Target) -> tuple[int, str]:
    """Return the place of a table among others: after all tables to which its foreign keys refer.

    It depends on nothing else, so all writers share the order.
    """
    return target.depth, str(target.name)
