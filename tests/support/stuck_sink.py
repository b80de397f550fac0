"""A sink whose first commit is stuck in the target until a test lets it go on.

Its target has no floor: whatever arrives after its proof was forgotten is applied again. So only an
engine that leaves no commit under way keeps its rows from being doubled.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from onceflow import connectors

_STUCK_S_MAX = 120.0


@dataclass(frozen=True)
class StuckSink(connectors.StagedSink):
    """Writes the column `id` of every row into a SQLite file in `directory`."""

    directory: str

    def open(self, context: connectors.CommitterContext, schema: pa.Schema) -> None:
        with self._locked() as db:
            db.execute("CREATE TABLE IF NOT EXISTS rows (id INTEGER)")
            db.execute("CREATE TABLE IF NOT EXISTS ledger (name PRIMARY KEY, checkpoint_id)")

    def apply(self, transaction: connectors.TransactionId, rows: Iterator[pa.RecordBatch]) -> bool:
        ids = [(one,) for batch in rows for one in batch.column("id").to_pylist()]
        with suppress(FileExistsError), self.stuck.open("x") as file:
            # Seen whole, or not at all.
            file.write(str(os.getpid()))
            file.flush()
            self._wait_to_be_released()
        proof = (str(transaction), transaction.checkpoint)
        with self._locked() as db:
            if not db.execute("INSERT OR IGNORE INTO ledger VALUES (?, ?)", proof).rowcount:
                return False
            db.executemany("INSERT INTO rows VALUES (?)", ids)
        return True

    def is_applied(self, transaction: connectors.TransactionId) -> bool:
        with self._locked() as db:
            found = db.execute("SELECT 1 FROM ledger WHERE name = ?", (str(transaction),))
            return found.fetchone() is not None

    def forget(self, sink_id: str, before: connectors.CheckpointId) -> None:
        with self._locked() as db:
            db.execute("DELETE FROM ledger WHERE checkpoint_id < ?", (before,))

    @property
    def stuck(self) -> Path:
        """The file that is there once a commit is stuck; holds the pid of its process."""
        return Path(self.directory, "stuck")

    def release(self) -> None:
        """Let the stuck commit go on."""
        Path(self.directory, "released").touch()

    def proofs(self) -> list[int]:
        """Return the checkpoints of all proofs that the target keeps, sorted."""
        with self._locked() as db:
            return sorted(int(one) for (one,) in db.execute("SELECT checkpoint_id FROM ledger"))

    def ids(self) -> list[int]:
        """Return the id of every visible row, sorted, doubles kept."""
        with self._locked() as db:
            return [int(one) for (one,) in db.execute("SELECT id FROM rows ORDER BY id")]

    def _wait_to_be_released(self) -> None:
        deadline = time.monotonic() + _STUCK_S_MAX
        while not Path(self.directory, "released").exists() and time.monotonic() < deadline:
            time.sleep(0.02)

    @contextmanager
    def _locked(self) -> Generator[sqlite3.Connection]:
        with closing(sqlite3.connect(f"{self.directory}/target.db", timeout=30)) as db, db:
            db.execute("BEGIN IMMEDIATE")
            yield db
