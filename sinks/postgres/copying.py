"""Inserts that stream to the server as they come: binary COPYs in the open transaction.

libpq does not tell of an error before the COPY is ended, and the server drops what comes after one
in silence. So a COPY is ended after a second and another begun in the same transaction: a refused
row is heard of soon, whatever the checkpoint interval, at the cost of one round trip a second. It
also bounds what the server queues for the end of the statement, the checks of foreign keys.
"""

from __future__ import annotations

import time

import pyarrow as pa
from typing_extensions import override

from onceflow.sinks.postgres.catalog import identifier, quoted
from onceflow.sinks.postgres.connection import CopyIn, own
from onceflow.sinks.postgres.encoder import BinaryRows
from onceflow.sinks.postgres.fitting import fits_of
from onceflow.sinks.sql.row_loader import RowLoader
from onceflow.sinks.sql.tables import Target
from onceflow.sinks.sql.transactions import Transactions

_COPY_S_MAX = 1.0


def copy_statement(target: Target) -> str:
    """Return the COPY into `target` of the columns that its fits have, in their order."""
    columns = ", ".join(quoted(fit.name) for fit in target.fits)
    return f"COPY {identifier(target.name)} ({columns}) FROM STDIN (FORMAT binary)"


class StreamedInserts(RowLoader):
    """Rows of one table that go in at once. The first bad row is the end of the transaction."""

    def __init__(self, transactions: Transactions, target: Target) -> None:
        self._transactions = transactions
        self._format = BinaryRows(fits_of(target))
        self._copy_in = copy_statement(target)
        self._copy: CopyIn | None = None
        self._copying_since = 0.0
        self._rows = 0

    @property
    @override
    def rows(self) -> int:
        return self._rows

    @override
    def write(self, batch: pa.RecordBatch) -> None:
        copy = self._copy or self._begin_copy()
        copy.write(self._format.encode(batch))
        self._rows += batch.num_rows
        if time.monotonic() - self._copying_since > _COPY_S_MAX:
            self._end_copy()

    @override
    def finish(self) -> int:
        self._end_copy()
        rows, self._rows = self._rows, 0
        return rows

    @override
    def close(self) -> None:
        copy, self._copy = self._copy, None
        self._transactions.hasten()
        if copy is not None:
            copy.give_up()

    def _begin_copy(self) -> CopyIn:
        copy = own(self._transactions.begin()).copy_in(self._copy_in)
        self._copy = copy
        copy.write(self._format.begin())
        self._copying_since = time.monotonic()
        return copy

    def _end_copy(self) -> None:
        copy = self._copy
        if copy is not None:
            copy.write(self._format.end())
            self._copy = None
            copy.end()
