"""A SQLite file as the target of committers, and prepared transactions that the test holds.

SQLite itself cannot prepare transactions.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import astuple
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import pyarrow as pa
from tests.support.failing_once import Calls, CountedFiles
from typing_extensions import override

from onceflow.clients.sql.session import ConnectionLost, NameUnknown, Session, SqlEndpoint
from onceflow.clients.sqlite import connection
from onceflow.core.protocol.committables import Committable
from onceflow.core.protocol.ids import AttemptId, CheckpointId, TransactionId
from onceflow.core.spi import Committer, CommitterContext, WriterContext
from onceflow.core.storage import FileStagingArea
from onceflow.core.storage.memory_storage import MemoryFiles
from onceflow.sinks import SQLiteSink
from onceflow.sinks.sql.dialect import TwoPhase
from onceflow.sinks.sql.transactions import PreparedTransactions

T = TypeVar("T")
SINK_ID = "job.rows"
SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False)])


def run_or_lose(session: Session, calls: Calls, work: Callable[[], T]) -> T:
    """Return what `work` returns, unless this is the call at which the connection is lost."""
    before, after = calls.next()
    if before:
        session.close()
        raise ConnectionLost("the connection was lost before the statement came")
    result = work()
    if after:
        session.close()
        raise ConnectionLost("the connection was lost before the answer came")
    return result


class LossySession(connection.SQLiteSession):
    """Loses its connection at one of the statements that `calls` counts, or at none."""

    calls: ClassVar = Calls()

    def __init__(self, server: sqlite3.Connection) -> None:
        super().__init__(server)
        # The machine does not crash in this test, and waiting for its disk takes most of the time.
        server.execute("PRAGMA synchronous = OFF")

    @override
    def query(self, statement: str) -> Sequence[tuple[Any, ...]]:
        return run_or_lose(self, self.calls, lambda: super(LossySession, self).query(statement))

    @override
    def execute(self, statement: str) -> int:
        return run_or_lose(self, self.calls, lambda: super(LossySession, self).execute(statement))

    @override
    def execute_many(self, statement: str, rows: Iterable[Sequence[object]]) -> int:
        return run_or_lose(
            self, self.calls, lambda: super(LossySession, self).execute_many(statement, rows)
        )


class Preparing(TwoPhase):
    """Prepared transactions of one row each, held by the test."""

    commit_words = "COMMIT PREPARED"
    roll_back_words = "ROLLBACK PREPARED"

    def __init__(self, write: Callable[[str], None]) -> None:
        super().__init__("main")
        self.prepared: set[TransactionId] = set()
        self._write = write

    def find(self, schema: str) -> TwoPhase:
        """Return these transactions, whatever the ledger's schema is."""
        return self

    @override
    def transactions(self, endpoint: SqlEndpoint, context: WriterContext) -> PreparedTransactions:
        raise NotImplementedError

    @override
    def list_prepared(self, session: Session, sink_id: str) -> tuple[TransactionId, ...]:
        return run_or_lose(session, LossySession.calls, lambda: tuple(sorted(self.prepared)))

    @override
    def find_prepare_time(self, session: Session, transaction: TransactionId) -> datetime | None:
        raise NotImplementedError

    @override
    def commit(self, session: Session, transaction: TransactionId) -> None:
        run_or_lose(session, LossySession.calls, lambda: self._end(transaction, commits=True))

    @override
    def roll_back(self, session: Session, transaction: TransactionId) -> None:
        run_or_lose(session, LossySession.calls, lambda: self._end(transaction, commits=False))

    @override
    def end_holding_session(self, session: Session, transaction: TransactionId) -> str:
        raise NotImplementedError

    @override
    def endings(self, transaction: TransactionId) -> str:
        raise NotImplementedError

    def _end(self, transaction: TransactionId, *, commits: bool) -> None:
        if transaction not in self.prepared:
            raise NameUnknown(f"{transaction} is not prepared")
        self.prepared.remove(transaction)
        if commits:
            name, sink_id, attempt, checkpoint, subtask, sequence = (
                str(transaction),
                *astuple(transaction),
            )
            self._write(
                f"INSERT INTO rows VALUES ({checkpoint}); INSERT INTO onceflow_ledger"
                " (transaction_id, sink_id, attempt, checkpoint, subtask, row_count) VALUES"
                f" ('{name}', '{sink_id}', {attempt}, {checkpoint}, {subtask}, {1 + sequence})"
            )


class Target:
    """A SQLite file, and the committers of one sink id."""

    def __init__(self, path: Path, storage_calls: Calls) -> None:
        self.path = path
        files = MemoryFiles()
        self.sound_area = FileStagingArea(files, "staged", SINK_ID)
        self.area = FileStagingArea(CountedFiles(files, storage_calls), "staged", SINK_ID)
        self.sink = SQLiteSink(f"sqlite:///{path}", table="rows", create=True)
        LossySession.calls = Calls()
        self.sink.open(self.context(1), SCHEMA)

    def context(self, attempt: int) -> CommitterContext:
        return CommitterContext("job", "rows", SINK_ID, AttemptId(attempt), "log", self.area)

    def committer(self, attempt: int) -> Committer:
        return self.sink.committer(self.context(attempt))

    def stage(self, checkpoint: int) -> Committable:
        """Stage two rows as the sink's writer does."""
        writer = self.sink.writer(
            WriterContext(
                job="job",
                uid="rows",
                sink_id=SINK_ID,
                subtask=0,
                parallelism=1,
                attempt=AttemptId(1),
                first_checkpoint=CheckpointId(checkpoint),
                schema=SCHEMA,
                staging=self.sound_area,
            )
        )
        writer.write(pa.record_batch({"id": [checkpoint]}, schema=SCHEMA))
        (committable,) = writer.pre_commit(CheckpointId(checkpoint))
        writer.close()
        return committable

    def write(self, statements: str) -> None:
        with closing(sqlite3.connect(self.path)) as server:
            server.executescript(f"BEGIN; {statements}; COMMIT")

    def ids(self) -> list[int]:
        with closing(sqlite3.connect(self.path)) as server:
            return [row[0] for row in server.execute("SELECT id FROM rows ORDER BY id")]

    def proofs(self) -> int:
        with closing(sqlite3.connect(self.path)) as server:
            return len(server.execute("SELECT 1 FROM onceflow_ledger").fetchall())
