"""Rows that are held back before they go in: to be put by key, or to find those that are bad."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import pyarrow as pa
from typing_extensions import override

from onceflow.core.spi import RejectedRows
from onceflow.sinks.postgres.applying import Applier, apply_without_refused
from onceflow.sinks.postgres.intake import Intake
from onceflow.sinks.postgres.targets import Target
from onceflow.sinks.postgres.transactions import Transactions
from onceflow.sinks.sql import BadRows, ChangeBuffer, ChangeRules, TableName
from onceflow.sinks.sql.placement import Placement

_CHUNK_ROWS = 20_000
_CHUNK_BYTES = 16 * 1024 * 1024

Apply = Callable[[pa.RecordBatch], None]


class _Placing:
    """Applies batches, and leaves refused rows out where they do not fail the job."""

    def __init__(self, transactions: Transactions, bad_rows: BadRows) -> None:
        self._transactions = transactions
        self._bad_rows = bad_rows

    def place(self, rows: pa.RecordBatch, apply: Apply) -> int:
        """Return how many of `rows` the server took."""
        if self._bad_rows.fail:
            apply(rows)
            return rows.num_rows
        connection = self._transactions.begin()
        taken = apply_without_refused(connection, rows, apply, self._bad_rows)
        return sum(part.num_rows for part in taken)


class BatchedInserts(Placement):
    """Inserts into several tables, or with bad rows left out: a COPY a batch of each table."""

    def __init__(
        self, transactions: Transactions, intake: Intake, applier: Applier, bad_rows: BadRows
    ) -> None:
        self._transactions = transactions
        self._intake = intake
        self._applier = applier
        self._bad_rows = bad_rows
        self._placing = _Placing(transactions, bad_rows)
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
        for part in self._intake.take(batch):
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
    def rejected(self) -> Sequence[RejectedRows]:
        return self._bad_rows.taken()

    @override
    def close(self) -> None:
        self._waiting.clear()
        self._transactions.hasten()

    def _send(self) -> None:
        """Send what waits, table after table in one order for all writers."""
        for name in sorted(self._waiting, key=str):
            target, batches = self._waiting[name]
            connection = self._transactions.begin()
            apply = partial(self._applier.put, connection, target)
            self._placed += self._placing.place(pa.concat_batches(batches), apply)
        self._waiting.clear()
        self._waiting_rows = self._waiting_bytes = 0


class BufferedChanges(Placement):
    """Changes by key, applied sorted when asked to finish: no row is locked before the barrier."""

    def __init__(
        self,
        transactions: Transactions,
        intake: Intake,
        rules: ChangeRules,
        bad_rows: BadRows,
    ) -> None:
        self._transactions = transactions
        self._intake = intake
        self._applier = Applier(rules.mode, rules.primary_key)
        self._bad_rows = bad_rows
        self._placing = _Placing(transactions, bad_rows)
        self._buffer = ChangeBuffer(rules)
        self._targets: dict[str, Target] = {}

    @property
    @override
    def rows(self) -> int:
        return self._buffer.rows

    @override
    def write(self, batch: pa.RecordBatch) -> None:
        for part in self._intake.take(batch):
            table = str(part.target.name)
            self._targets[table] = part.target
            self._buffer.add(part.changes, table)

    @override
    def finish(self) -> int:
        connection = self._transactions.begin()
        applied = 0
        for changes in self._buffer.changes():
            target = self._targets[changes.table]
            applied += self._place(
                changes.deletes(), partial(self._applier.delete, connection, target)
            )
            applied += self._place(changes.puts(), partial(self._applier.put, connection, target))
        self._buffer.clear()
        return applied

    @override
    def rejected(self) -> Sequence[RejectedRows]:
        return self._bad_rows.taken()

    @override
    def close(self) -> None:
        self._buffer.clear()
        self._transactions.hasten()

    def _place(self, batches: Iterable[pa.RecordBatch], apply: Apply) -> int:
        return sum(self._placing.place(rows, apply) for rows in batches)
