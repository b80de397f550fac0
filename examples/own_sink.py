"""A sink of one's own: the newest row of each key in a SQLite file, exactly once.

SQLite cannot prepare a transaction, so rows wait in checkpoint storage until they are decided. Then
one writes them, with a row in `ledger` that proves it. `python examples/own_sink.py` shows it.
`onceflow.sinks.SQLiteSink` does all that and more; this one is here to be read.
"""

from __future__ import annotations

import runpy
import sqlite3
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass

import pyarrow as pa

from onceflow import connectors as spi

STORED = (pa.int64(), pa.int32(), pa.float64(), pa.string(), pa.binary())


@dataclass(frozen=True)
class OwnSink(spi.StagedSink):
    """Keeps the newest row of each `key` in `table` of the SQLite file `path`."""

    path: str
    table: str
    key: str

    def routing_key(self) -> tuple[str, ...]:
        """Bring every row of a key to one writer, so that they stay in order."""
        return (self.key,)

    def open(self, context: spi.CommitterContext, schema: pa.Schema) -> None:
        """Make the tables; keep other jobs and older attempts out."""
        if not all(one in STORED for one in schema.types):
            raise spi.ConfigError(
                f"SQLite takes {', '.join(map(str, STORED))}; cast before the sink"
            )
        table = f'"{self.table}" ("{_joined(schema)}", PRIMARY KEY ("{self.key}"))'
        me = (context.sink_id, context.log_id, context.attempt)
        with self._locked() as db:
            db.execute(f"CREATE TABLE IF NOT EXISTS {table}")
            db.execute("CREATE TABLE IF NOT EXISTS ledger (id PRIMARY KEY, sink, checkpoint_id)")
            db.execute("CREATE TABLE IF NOT EXISTS owners (sink PRIMARY KEY, log, attempt, floor)")
            db.execute("INSERT OR IGNORE INTO owners VALUES (?, ?, 0, 0)", me[:2])
            claim = "UPDATE owners SET attempt = ?3 WHERE sink = ?1 AND log = ?2 AND attempt < ?3"
            if not db.execute(claim, me).rowcount:
                raise spi.Fenced(f"{me}: the sink id is another job's, or a newer attempt's")

    def refusals(self, rows: pa.RecordBatch) -> Mapping[int, str]:
        """Refuse rows without a key, while there is time."""
        keys = enumerate(rows[self.key].is_valid().to_pylist())
        return {row: f"{self.key!r} is the key, and null" for row, known in keys if not known}

    def apply(self, transaction: spi.TransactionId, rows: Iterator[pa.RecordBatch]) -> bool:
        """Write rows and ledger row, unless it is there or was; the lock keeps others out."""
        proof = (str(transaction), transaction.sink_id, transaction.checkpoint)
        unless_below = "SELECT ?1, ?2, ?3 FROM owners WHERE sink = ?2 AND floor <= ?3"
        with self._locked() as db:
            if not db.execute(f"INSERT OR IGNORE INTO ledger {unless_below}", proof).rowcount:
                return False
            for batch in rows:
                marks = ", ".join("?" * batch.num_columns)
                into = f'"{self.table}" ("{_joined(batch.schema)}") VALUES ({marks})'
                values = zip(*batch.to_pydict().values(), strict=True)
                db.executemany(f"REPLACE INTO {into}", values)
        return True

    def is_applied(self, transaction: spi.TransactionId) -> bool:
        """Look for the ledger row."""
        with self._locked() as db:
            return bool(list(db.execute("SELECT 1 FROM ledger WHERE id = ?", (str(transaction),))))

    def forget(self, sink_id: str, before: spi.CheckpointId) -> None:
        """Raise the floor, and delete the ledger rows below it."""
        raise_it = "UPDATE owners SET floor = max(floor, ?2) WHERE sink = ?1"
        with self._locked() as db:
            db.execute(raise_it, (sink_id, before))
            db.execute("DELETE FROM ledger WHERE sink = ? AND checkpoint_id < ?", (sink_id, before))

    @contextmanager
    def _locked(self) -> Generator[sqlite3.Connection]:
        """Begin a transaction that excludes others; commit it at the end, or roll back."""
        try:
            with closing(sqlite3.connect(self.path, timeout=30)) as db, db:
                db.execute("BEGIN IMMEDIATE")
                yield db
        except sqlite3.Error as error:
            raise spi.SinkError(f"SQLite file {self.path}: {error}") from error


def _joined(schema: pa.Schema) -> str:
    return '", "'.join(schema.names)


if __name__ == "__main__":
    runpy.run_path(__file__.replace("own_sink", "killed_job"), run_name="__main__")
