"""A staged sink whose target remembers by a floor what it has taken, and nobody's attempts."""

from __future__ import annotations

import sqlite3
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass

import pyarrow as pa

from onceflow.connectors import CheckpointId, CommitterContext, StagedSink, TransactionId


@dataclass(frozen=True)
class FlooredSink(StagedSink):
    """Writes the column `id` of every row into the SQLite file `path`."""

    path: str

    def open(self, context: CommitterContext, schema: pa.Schema) -> None:
        with self._locked() as db:
            db.execute("CREATE TABLE IF NOT EXISTS rows (id INTEGER)")
            db.execute("CREATE TABLE IF NOT EXISTS ledger (name PRIMARY KEY, checkpoint_id)")
            db.execute("CREATE TABLE IF NOT EXISTS floors (sink PRIMARY KEY, floor)")
            db.execute("INSERT OR IGNORE INTO floors VALUES (?, 0)", (context.sink_id,))

    def apply(self, transaction: TransactionId, rows: Iterator[pa.RecordBatch]) -> bool:
        proof = (str(transaction), transaction.sink_id, transaction.checkpoint)
        unless_below = "SELECT ?1, ?3 FROM floors WHERE sink = ?2 AND floor <= ?3"
        with self._locked() as db:
            if not db.execute(f"INSERT OR IGNORE INTO ledger {unless_below}", proof).rowcount:
                return False
            ids = [(one,) for batch in rows for one in batch.column("id").to_pylist()]
            db.executemany("INSERT INTO rows VALUES (?)", ids)
        return True

    def is_applied(self, transaction: TransactionId) -> bool:
        with self._locked() as db:
            return bool(
                list(db.execute("SELECT 1 FROM ledger WHERE name = ?", (str(transaction),)))
            )

    def forget(self, sink_id: str, before: CheckpointId) -> None:
        with self._locked() as db:
            raise_it = "UPDATE floors SET floor = max(floor, ?2) WHERE sink = ?1"
            db.execute(raise_it, (sink_id, before))
            db.execute("DELETE FROM ledger WHERE checkpoint_id < ?", (before,))

    def ids(self) -> list[int]:
        """Return the id of every visible row, sorted, doubles kept."""
        with self._locked() as db:
            return [int(row[0]) for row in db.execute("SELECT id FROM rows ORDER BY id")]

    @contextmanager
    def _locked(self) -> Generator[sqlite3.Connection, None, None]:
        with closing(sqlite3.connect(self.path, timeout=30)) as db, db:
            db.execute("BEGIN IMMEDIATE")
            yield db
