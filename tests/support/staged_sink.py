"""A sink that prepares nothing in its target: rows are staged, then applied with a ledger row.

The target is a SQLite file with the tables `rows` and `ledger`.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass

import pyarrow as pa

from onceflow.core.errors import ConfigError
from onceflow.core.protocol import committables
from onceflow.core.protocol.ids import CheckpointId, TransactionId
from onceflow.core.spi import Committer, CommitterContext, Sink, SinkWriter, WriterContext
from onceflow.core.spi.staging import StagingArea, make_staged_committable


@dataclass(frozen=True)
class StagedSink(Sink):
    """Writes the column `id` of every row into the SQLite file `path`."""

    path: str

    def open(self, context: CommitterContext, schema: pa.Schema) -> None:
        with closing(sqlite3.connect(self.path)) as database:
            database.execute("CREATE TABLE IF NOT EXISTS rows (id INTEGER)")
            database.execute("CREATE TABLE IF NOT EXISTS ledger (id TEXT PRIMARY KEY)")

    def writer(self, context: WriterContext) -> SinkWriter:
        return _Writer(_staging(context.staging), context)

    def committer(self, context: CommitterContext) -> Committer:
        return _Committer(self.path, _staging(context.staging))

    def ids(self) -> list[int]:
        """Return the id of every visible row, sorted, doubles kept."""
        with closing(sqlite3.connect(self.path)) as database:
            return [int(row[0]) for row in database.execute("SELECT id FROM rows ORDER BY id")]


def _staging(staging: StagingArea | None) -> StagingArea:
    if staging is None:
        raise ConfigError("StagedSink needs checkpoint storage")
    return staging


class _Writer(SinkWriter):
    def __init__(self, staging: StagingArea, context: WriterContext) -> None:
        self._context = context
        self._rows = staging.open()

    def write(self, batch: pa.RecordBatch) -> None:
        self._rows.write(batch)

    def pre_commit(self, checkpoint: CheckpointId) -> Sequence[committables.Committable]:
        if not self._rows.rows:
            return ()
        context = self._context
        transaction = TransactionId(context.sink_id, context.attempt, checkpoint, context.subtask)
        return (self._rows.seal(transaction),)

    def close(self) -> None:
        self._rows.close()


class _Committer(Committer):
    def __init__(self, path: str, staging: StagingArea) -> None:
        self._path = path
        self._staging = staging

    def commit(self, committable: committables.Committable) -> committables.CommitOutcome:
        transaction = committable.transaction
        with closing(sqlite3.connect(self._path)) as database, database:
            if _is_in(database, transaction):
                self._staging.discard(transaction)
                return committables.AlreadyCommitted()
            staged = self._staging.read(transaction)
            if staged is None:
                return committables.Lost(
                    f"nothing is staged under {transaction} and the ledger has no row"
                )
            for _, batch in staged:
                ids = [(row,) for row in batch.column("id").to_pylist()]
                database.executemany("INSERT INTO rows VALUES (?)", ids)
            database.execute("INSERT INTO ledger VALUES (?)", (str(transaction),))
        self._staging.discard(transaction)
        return committables.Committed()

    def abort(self, committable: committables.Committable) -> committables.AbortOutcome:
        with closing(sqlite3.connect(self._path)) as database:
            committed = _is_in(database, committable.transaction)
        self._staging.discard(committable.transaction)
        return committables.AlreadyCommitted() if committed else committables.Aborted()

    def in_doubt(self) -> Sequence[committables.Committable]:
        return [make_staged_committable(t) for t in self._staging.transactions()]

    def close(self) -> None:
        pass


def _is_in(database: sqlite3.Connection, transaction: TransactionId) -> bool:
    found = database.execute("SELECT 1 FROM ledger WHERE id = ?", (str(transaction),))
    return found.fetchone() is not None
