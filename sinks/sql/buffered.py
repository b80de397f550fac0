"""Rows that are held back before they go in: to be put by key, or to find those that are bad."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import pyarrow as pa
from typing_extensions import override

from onceflow.core.bad_rows import BadRows
from onceflow.core.spi import RejectedRows
from onceflow.sinks.sql.changes import ChangeBuffer
from onceflow.sinks.sql.dml import DmlExecutor, apply_without_refused
from onceflow.sinks.sql.row_loader import RowLoader
from onceflow.sinks.sql.row_validator import RowValidator
from onceflow.sinks.sql.session import Session
from onceflow.sinks.sql.tables import TableName, Target
from onceflow.sinks.sql.transactions import Transactions
from onceflow.sinks.sql.write_mode import ChangeRules

_CHUNK_ROWS = 20_000
_CHUNK_BYTES = 16 * 1024 * 1024

_Apply = Callable[[Session, Target, pa.RecordBatch], None]


class _Held(RowLoader):
    """Applies batches, and leaves refused rows out where they do not fail the job."""

    def __init__(
        self,
        transactions: Transactions,
        validator: RowValidator,
        executor: DmlExecutor,
        bad_rows: BadRows,
    ) -> None:
        self._transactions = transactions
        self._validator = validator
        self._executor = executor
        self._bad_rows = bad_rows

    @override
    def rejected(self) -> Sequence[RejectedRows]:
        return self._bad_rows.taken()

    def _place(
        self,
        apply: _Apply,
        target: Target,
        batches: Iterable[pa.RecordBatch],
    ) -> int:
        """Return how many rows of `batches` the server took."""
        session = self._transactions.begin()
        placed = 0
        for rows in batches:
            if self._bad_rows.fail:
                apply(session, target, rows)
                placed += rows.num_rows
                continue
            taken = apply_without_refused(
                rows,
                partial(apply, session, target),
                session,
                self._bad_rows,
            )
            placed += sum(part.num_rows for part in taken)
        return placed


class BatchedInserts(_Held):
    """Inserts into several tables, or with bad rows left out: a batch of each table at a time."""

    def __init__(
        self,
        transactions: Transactions,
        validator: RowValidator,
        executor: DmlExecutor,
        bad_rows: BadRows,
    ) -> None:
        super().__init__(transactions, validator, executor, bad_rows)
        self._waiting: dict[TableName, tuple[Target, list[pa.RecordBatch]]] = {}
        self._waiting_rows = 0
        self._waiting_bytes = 0
        self._placed = 0

    @property
    @override
    def rows(self) -> int:
        return self._placed + self._waiting_rows

    @override
    def write(self, batch: pa.RecordBatch) -> None:
        for part in self._validator.take(batch):
            rows = part.changes.rows
            _, batches = self._waiting.setdefault(part.target.name, (part.target, []))
            batches.append(rows)
            self._waiting_rows += rows.num_rows
            self._waiting_bytes += rows.nbytes
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
        self._transactions.hasten()

    def _send(self) -> None:
        """Send what waits, table after table in one order for all writers."""
        for name in sorted(self._waiting, key=str):
            target, batches = self._waiting[name]
            rows = pa.concat_batches(batches)
            self._placed += self._place(self._executor.put, target, [rows])
        self._waiting.clear()
        self._waiting_rows = self._waiting_bytes = 0


class BufferedChanges(_Held):
    """Changes by key, applied sorted when asked to finish: no row is locked before the barrier."""

    def __init__(
        self,
        transactions: Transactions,
        validator: RowValidator,
        rules: ChangeRules,
        executor: DmlExecutor,
        bad_rows: BadRows,
    ) -> None:
        super().__init__(transactions, validator, executor, bad_rows)
        self._buffer = ChangeBuffer(rules)
        self._targets: dict[str, Target] = {}

    @property
    @override
    def rows(self) -> int:
        return self._buffer.rows

    @override
    def write(self, batch: pa.RecordBatch) -> None:
        for part in self._validator.take(batch):
            table = str(part.target.name)
            self._targets[table] = part.target
            self._buffer.add(part.changes, table)

    @override
    def finish(self) -> int:
        applied = 0
        for changes in self._buffer.changes():
            target = self._targets[changes.table]
            applied += self._place(self._executor.delete, target, changes.deletes())
            applied += self._place(self._executor.put, target, changes.puts())
        self._buffer.clear()
        return applied

    @override
    def close(self) -> None:
        self._buffer.clear()
        self._transactions.hasten()
