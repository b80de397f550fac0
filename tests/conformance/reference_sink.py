"""A correct two-phase sink over SQLite, every step of it a method that a broken one may override.

target      the rows, as readers see them
prepared    name, position, row       pre-committed, and seen by nobody who reads `target`
ledger      name                      proves that the rows of a transaction are in `target`
owners      sink id, log, attempt     the fence
begun       of `beginning_sink` alone
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa

from onceflow.core.crash_points import reach
from onceflow.core.errors import BadRow, ConfigError, Fenced
from onceflow.core.protocol import committables
from onceflow.core.protocol.ids import CheckpointId, TransactionId
from onceflow.core.protocol.log.target_records import TargetRecord, to_record
from onceflow.core.spi import Committer, CommitterContext, Sink, SinkWriter, WriterContext
from onceflow.integration.conformance import SinkTarget

PASSWORD = "correct-horse-battery"
_TABLES = """
    CREATE TABLE IF NOT EXISTS target (id INTEGER, account TEXT, amount INTEGER);
    CREATE TABLE IF NOT EXISTS begun (name TEXT, id INTEGER, account TEXT, amount INTEGER);
    CREATE TABLE IF NOT EXISTS prepared (
        name TEXT PRIMARY KEY, sink_id TEXT, rows TEXT
    ) WITHOUT ROWID;
    CREATE TABLE IF NOT EXISTS ledger (
        name TEXT PRIMARY KEY, sink_id TEXT, checkpoint_number INTEGER
    ) WITHOUT ROWID;
    CREATE TABLE IF NOT EXISTS owners (
        sink_id TEXT PRIMARY KEY, log_id TEXT, attempt INTEGER
    ) WITHOUT ROWID;
"""


@contextmanager
def transaction(path: str) -> Generator[sqlite3.Connection, None, None]:
    """One whole transaction on a connection of its own, alone from its beginning."""
    connection = sqlite3.connect(path, timeout=30, isolation_level=None)
    try:
        # A kill -9 of a process is what is tested here, not a power cut.
        connection.execute("PRAGMA synchronous = OFF")
        connection.execute("BEGIN IMMEDIATE")
        yield connection
        connection.execute("COMMIT")
    finally:
        connection.close()


def obstruct(connection: sqlite3.Connection, table: str, ids: Sequence[int]) -> None:
    """Have `table` refuse new rows of `ids`."""
    listed = ", ".join(map(str, ids))
    connection.execute(
        f"CREATE TRIGGER obstacle BEFORE INSERT ON {table} WHEN NEW.id IN ({listed})"
        " BEGIN SELECT RAISE(ABORT, 'the row is in the way'); END"
    )


def remove_obstacle(connection: sqlite3.Connection) -> None:
    """Take the rows of `obstruct` again."""
    connection.execute("DROP TRIGGER obstacle")


class ReferenceWriter(SinkWriter):
    """Keeps the rows in memory until they are prepared."""

    def __init__(self, sink: ReferenceSink, context: WriterContext) -> None:
        self.sink = sink
        self.context = context
        self.rows: list[dict[str, Any]] = []

    def write(self, batch: pa.RecordBatch) -> None:
        self.rows += batch.to_pylist()

    def pre_commit(self, checkpoint: CheckpointId) -> Sequence[committables.Committable]:
        if not self.rows:
            return ()
        self.require_good()
        transaction_id = self.name(checkpoint)
        reach("flushed")
        self.prepare(transaction_id)
        committable = committables.Committable(transaction_id, len(self.rows), self.payload())
        self.rows = []
        return (committable,)

    def require_good(self) -> None:
        if len({row["id"] for row in self.rows}) < len(self.rows):
            raise BadRow("an id is there twice")

    def name(self, checkpoint: CheckpointId) -> TransactionId:
        context = self.context
        return TransactionId(context.sink_id, context.attempt, checkpoint, context.subtask)

    def prepare(self, transaction_id: TransactionId) -> None:
        with transaction(self.sink.path) as connection:
            self.require_owner(connection)
            connection.execute(
                "INSERT INTO prepared VALUES (?, ?, ?)",
                (self.stored_name(transaction_id), self.context.sink_id, json.dumps(self.rows)),
            )

    def require_owner(self, connection: sqlite3.Connection) -> None:
        (attempt,) = connection.execute(
            "SELECT attempt FROM owners WHERE sink_id = ?", (self.context.sink_id,)
        ).fetchone()
        if attempt > self.context.attempt:
            raise Fenced(f"attempt {attempt} owns the sink")

    def stored_name(self, transaction_id: TransactionId) -> str:
        return str(transaction_id)

    def payload(self) -> bytes:
        return b""

    def close(self) -> None:
        self.rows = []


class ReferenceCommitter(Committer):
    """Opens a connection for each question, and keeps nothing."""

    def __init__(self, sink: ReferenceSink, context: CommitterContext) -> None:
        self.sink = sink
        self.context = context

    def commit(self, committable: committables.Committable) -> committables.CommitOutcome:
        name = self.stored_name(committable.transaction)
        try:
            with transaction(self.sink.path) as connection:
                if self.is_committed(connection, name):
                    return committables.AlreadyCommitted()
                rows = self.prepared_rows(connection, name)
                if rows is None:
                    return self.unknown(name)
                self.apply(connection, rows)
                self.record(connection, committable.transaction)
        except sqlite3.IntegrityError as error:
            return self.refused(str(error))
        return committables.Committed()

    def refused(self, why: str) -> committables.CommitOutcome:
        return committables.RetryLater(why, until_fixed=True)

    def apply(self, connection: sqlite3.Connection, rows: str) -> None:
        connection.executemany(
            "INSERT INTO target VALUES (:id, :account, :amount)", json.loads(rows)
        )

    def record(self, connection: sqlite3.Connection, transaction_id: TransactionId) -> None:
        name = self.stored_name(transaction_id)
        connection.execute("DELETE FROM prepared WHERE name = ?", (name,))
        connection.execute(
            "INSERT INTO ledger VALUES (?, ?, ?)",
            (name, self.context.sink_id, transaction_id.checkpoint),
        )

    def unknown(self, name: str) -> committables.CommitOutcome:
        return committables.Lost(f"{name} is neither prepared nor in the ledger")

    def abort(self, committable: committables.Committable) -> committables.AbortOutcome:
        name = self.stored_name(committable.transaction)
        with transaction(self.sink.path) as connection:
            if self.is_committed(connection, name):
                return committables.AlreadyCommitted()
            connection.execute("DELETE FROM prepared WHERE name = ?", (name,))
        return committables.Aborted()

    def in_doubt(self) -> Sequence[committables.Committable]:
        with transaction(self.sink.path) as connection:
            names = self.listed(connection)
        parsed = [TransactionId.parse(name) for name in names]
        return [committables.Committable(one) for one in parsed if one is not None]

    def listed(self, connection: sqlite3.Connection) -> list[str]:
        found = connection.execute(
            "SELECT name FROM prepared WHERE sink_id = ? ORDER BY name", (self.context.sink_id,)
        )
        return [str(name) for (name,) in found]

    def prune(self, before: CheckpointId) -> None:
        with transaction(self.sink.path) as connection:
            connection.execute(
                "DELETE FROM ledger WHERE sink_id = ? AND checkpoint_number < ?",
                (self.context.sink_id, before),
            )

    def is_committed(self, connection: sqlite3.Connection, name: str) -> bool:
        found = connection.execute("SELECT 1 FROM ledger WHERE name = ?", (name,))
        return found.fetchone() is not None

    def prepared_rows(self, connection: sqlite3.Connection, name: str) -> str | None:
        row = connection.execute("SELECT rows FROM prepared WHERE name = ?", (name,)).fetchone()
        return None if row is None else str(row[0])

    def stored_name(self, transaction_id: TransactionId) -> str:
        return str(transaction_id)

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class ReferenceSink(Sink):
    """Writes rows into the table `target` of one SQLite file."""

    path: str
    password: str = field(default=PASSWORD, repr=False)

    writer_class: ClassVar[type[ReferenceWriter]] = ReferenceWriter
    committer_class: ClassVar[type[ReferenceCommitter]] = ReferenceCommitter

    def open(self, context: CommitterContext, schema: pa.Schema) -> None:
        with transaction(self.path) as connection:
            owner = connection.execute(
                "SELECT log_id, attempt FROM owners WHERE sink_id = ?", (context.sink_id,)
            ).fetchone()
            if owner is not None:
                self.check_fence(context, *owner)
            connection.execute(
                "INSERT OR REPLACE INTO owners VALUES (?, ?, ?)",
                (context.sink_id, context.log_id, context.attempt),
            )

    def check_fence(self, context: CommitterContext, log_id: str, attempt: int) -> None:
        if log_id != context.log_id:
            raise ConfigError("another job owns the sink id")
        if attempt >= context.attempt:
            raise Fenced("a newer attempt owns the sink id")

    def target_record(self, context: CommitterContext) -> TargetRecord | None:
        with transaction(self.path) as connection:
            owner = connection.execute(
                "SELECT log_id, attempt FROM owners WHERE sink_id = ?", (context.sink_id,)
            ).fetchone()
            names = connection.execute(
                "SELECT name FROM ledger WHERE sink_id = ?", (context.sink_id,)
            ).fetchall()
        log_id, attempt = owner or (context.log_id, 0)
        if log_id != context.log_id:
            raise ConfigError("another job owns the sink id")
        parsed = [TransactionId.parse(name) for (name,) in names]
        return to_record(context.sink_id, attempt, [one for one in parsed if one is not None])

    def writer(self, context: WriterContext) -> SinkWriter:
        return self.writer_class(self, context)

    def committer(self, context: CommitterContext) -> Committer:
        return self.committer_class(self, context)


class ReferenceTarget(SinkTarget):
    """A SQLite file in `directory`; every optional method but those of a server."""

    def __init__(self, directory: Path, sink_class: type[ReferenceSink] = ReferenceSink) -> None:
        self._path = str(directory / "target.sqlite")
        self._sink_class = sink_class
        with sqlite3.connect(self._path) as connection:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.executescript(_TABLES)
        connection.close()

    def sink(self) -> Sink:
        return self._sink_class(self._path)

    def rows(self) -> list[dict[str, object]]:
        with transaction(self._path) as connection:
            cursor = connection.execute("SELECT id, account, amount FROM target")
            names = [column[0] for column in cursor.description]
            return [dict(zip(names, row, strict=True)) for row in cursor]

    def bad_batch(self, ids: Sequence[int]) -> pa.RecordBatch:
        return self.batch([*ids, ids[0]])

    def obstruct(self, ids: Sequence[int]) -> None:
        with transaction(self._path) as connection:
            obstruct(connection, "target", ids)

    def remove_obstacle(self) -> None:
        with transaction(self._path) as connection:
            remove_obstacle(connection)

    def secrets(self) -> Sequence[str]:
        return [PASSWORD]

    def lose(self, committable: committables.Committable) -> None:
        with transaction(self._path) as connection:
            connection.execute(
                "DELETE FROM prepared WHERE name = ?", (str(committable.transaction),)
            )
