"""A MySQL sink's writers and committers without a runtime, and looks at what the server holds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

import pyarrow as pa
from tests.integration.postgres_sink_kit import SCHEMA, WordProxy, committables, rows
from typing_extensions import Self

from onceflow.core.protocol.committables import (
    AbortOutcome,
    CommitOutcome,
    Committable,
    RetryLater,
    Unknown,
)
from onceflow.core.protocol.ids import AttemptId, CheckpointId
from onceflow.core.spi import Committer, CommitterContext, OnBadRow, SinkWriter, WriterContext
from onceflow.core.staging import StagingArea
from onceflow.integration.servers.mysql_admin import connect
from onceflow.sinks import MySQLSink

__all__ = [
    "FLAVORS",
    "SCHEMA",
    "Job",
    "WordProxy",
    "await_lock_wait",
    "committables",
    "eventually",
    "ids_in",
    "ledger_rows",
    "prepared",
    "query",
    "rows",
    "sessions",
    "until_settled",
    "xid",
]

FLAVORS = ("mysql", "mariadb")


def query(url: str, *statements: str) -> list[tuple[Any, ...]]:
    """Return the rows of the last of `statements`, each run alone."""
    connection = connect(url)
    try:
        with connection.cursor() as cursor:
            for statement in statements:
                cursor.execute(statement)
            found: Sequence[tuple[Any, ...]] = cursor.fetchall()
            return list(found)
    finally:
        connection.close()


def ids_in(url: str, table: str = "ledger") -> list[int]:
    """Return all ids that are visible in the table, sorted, doubles kept."""
    return [int(row[0]) for row in query(url, f"SELECT id FROM {table} ORDER BY id")]


def prepared(url: str) -> list[str]:
    """Return the names of all XA transactions prepared for a ledger in the database, sorted."""
    qualifier = urlsplit(url).path.lstrip("/")
    names: list[str] = []
    for _, length, _, data in query(url, "XA RECOVER"):
        text = data.decode() if isinstance(data, bytes) else str(data)
        if text[length:] == qualifier:
            names.append(text[:length])
    return sorted(names)


def xid(url: str, name: object) -> str:
    """Return the name of a transaction as an operator writes it in XA statements."""
    return f"'{name}','{urlsplit(url).path.lstrip('/')}',1869505381"


def sessions(url: str) -> list[int]:
    """Return the sessions that others have in the database."""
    found = query(
        url,
        "SELECT id FROM information_schema.processlist WHERE db = DATABASE() "
        "AND id <> CONNECTION_ID()",
    )
    return [int(row[0]) for row in found]


def ledger_rows(url: str) -> list[str]:
    """Return the transactions that the ledger proves committed, sorted."""
    return sorted(str(row[0]) for row in query(url, "SELECT transaction_id FROM onceflow_ledger"))


def until_settled(
    ask: Callable[[], CommitOutcome | AbortOutcome], timeout_s: float = 60
) -> CommitOutcome | AbortOutcome:
    """Ask as the engine does, until the outcome is final."""
    deadline = time.monotonic() + timeout_s
    while True:
        outcome = ask()
        if not isinstance(outcome, (RetryLater, Unknown)) or time.monotonic() > deadline:
            return outcome
        time.sleep(0.05)


def eventually(holds: Callable[[], object], timeout_s: float = 20) -> None:
    """Return once it holds.

    Raises:
        AssertionError: It does not in time.
    """
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def await_lock_wait(url: str, timeout_s: float = 20) -> None:
    """Return once a transaction on the server waits for a lock.

    The server answers from a copy that it renews only when nobody has asked for a tenth of a
    second: who asks more often never sees anything new.

    Raises:
        AssertionError: None does in time.
    """
    deadline = time.monotonic() + timeout_s
    while not query(
        url, "SELECT 1 FROM information_schema.innodb_trx WHERE trx_state = 'LOCK WAIT'"
    ):
        assert time.monotonic() < deadline, "nobody waits for a lock"
        time.sleep(0.15)


@dataclass
class Job:
    """A sink under one sink id; closes every writer and committer that it made."""

    sink: MySQLSink
    sink_id: str = "job.ledger"
    log_id: str = "log-1"
    schema: pa.Schema = field(default_factory=lambda: SCHEMA)
    staging: StagingArea | None = None
    on_bad_row: OnBadRow = OnBadRow.FAIL
    _open: ExitStack = field(default_factory=ExitStack)

    def check(self, attempt: int = 1) -> Self:
        self.sink.check(self.committer_context(attempt), self.schema)
        return self

    def committer_context(self, attempt: int = 1) -> CommitterContext:
        return CommitterContext(
            "job", "ledger", self.sink_id, AttemptId(attempt), self.log_id, self.staging
        )

    def writer(
        self, attempt: int = 1, subtask: int = 0, parallelism: int = 1, first_checkpoint: int = 1
    ) -> SinkWriter:
        writer = self.sink.writer(
            WriterContext(
                job="job",
                uid="ledger",
                sink_id=self.sink_id,
                subtask=subtask,
                parallelism=parallelism,
                attempt=AttemptId(attempt),
                first_checkpoint=CheckpointId(first_checkpoint),
                schema=self.schema,
                staging=self.staging,
                on_bad_row=self.on_bad_row,
            )
        )
        self._open.callback(writer.close)
        return writer

    def committer(self, attempt: int = 1) -> Committer:
        committer = self.sink.committer(self.committer_context(attempt))
        self._open.callback(committer.close)
        return committer

    def prepare(self, checkpoint: int, ids: Iterable[int], attempt: int = 1) -> Committable:
        """Return what a writer of its own pre-committed; the writer is closed."""
        writer = self.writer(attempt, first_checkpoint=checkpoint)
        writer.write(rows(ids))
        committable = writer.pre_commit(CheckpointId(checkpoint))
        writer.close()
        assert committable is not None
        return committable

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._open.close()
