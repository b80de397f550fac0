"""Inserts that go to the server as they come, while the next ones are spelled.

A reply is read when the next rows are sent, or at the barrier. So the server works on rows while
this process spells others, and a refused row is heard of one statement later.
"""

from __future__ import annotations

import pyarrow as pa
from typing_extensions import override

from onceflow.sinks.mysql.connection import own
from onceflow.sinks.mysql.fitting import fits_of, fitted_rows
from onceflow.sinks.mysql.sending import (
    BYTES_A_STATEMENT,
    ROWS_A_STATEMENT,
    RowSender,
    statement_sized,
)
from onceflow.sinks.sql.row_loader import RowLoader
from onceflow.sinks.sql.tables import Target
from onceflow.sinks.sql.transactions import Transactions


class StreamedInserts(RowLoader):
    """Rows of one table that go in at once. The first bad row is the end of the transaction."""

    def __init__(self, transactions: Transactions, target: Target, sender: RowSender) -> None:
        self._transactions = transactions
        self._fits = fits_of(target)
        self._sender = sender
        self._waiting: list[pa.RecordBatch] = []
        self._waiting_rows = 0
        self._waiting_bytes = 0
        self._rows = 0

    @property
    @override
    def rows(self) -> int:
        return self._rows

    @override
    def write(self, batch: pa.RecordBatch) -> None:
        # A value that does not fit is told of now, and not when enough rows have come together.
        self._waiting.append(fitted_rows(self._fits, batch))
        self._waiting_rows += batch.num_rows
        self._waiting_bytes += batch.nbytes
        self._rows += batch.num_rows
        if self._waiting_rows >= ROWS_A_STATEMENT or self._waiting_bytes >= BYTES_A_STATEMENT:
            self._send()

    @override
    def finish(self) -> int:
        self._send()
        self._sender.settle(own(self._transactions.begin()))
        rows, self._rows = self._rows, 0
        return rows

    @override
    def close(self) -> None:
        self._waiting.clear()
        self._sender.forget()

    def _send(self) -> None:
        if not self._waiting:
            return
        session = own(self._transactions.begin())
        rows = pa.concat_batches(self._waiting) if len(self._waiting) > 1 else self._waiting[0]
        for part in statement_sized(rows):
            self._sender.send(session, part)
        self._waiting.clear()
        self._waiting_rows = self._waiting_bytes = 0
