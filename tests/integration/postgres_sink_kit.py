"""A sink's writers and committers without a runtime, and a network that breaks at a word."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import psycopg
import pyarrow as pa
from typing_extensions import Self

from onceflow.core.protocol.committables import Committable
from onceflow.core.protocol.ids import AttemptId, CheckpointId
from onceflow.core.spi import Committer, CommitterContext, OnBadRow, SinkWriter, WriterContext
from onceflow.core.staging import StagingArea
from onceflow.sinks import PostgresSink

SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("account", pa.string()),
        pa.field("amount", pa.int64()),
    ]
)


def rows(ids: Iterable[int]) -> pa.RecordBatch:
    """Return one row for each id."""
    numbers = list(ids)
    return pa.record_batch(
        [
            pa.array(numbers, pa.int64()),
            pa.array([f"acct-{number % 7}" for number in numbers]),
            pa.array([number * 10 for number in numbers], pa.int64()),
        ],
        schema=SCHEMA,
    )


def query(url: str, statement: str) -> list[tuple[Any, ...]]:
    """Return the rows of `statement`, run alone."""
    with psycopg.connect(url, autocommit=True) as connection:
        cursor = connection.execute(statement.encode())
        return cursor.fetchall() if cursor.description else []


def ids_in(url: str, table: str = "ledger") -> list[int]:
    """Return all ids that are visible in the table, sorted, doubles kept."""
    return [int(row[0]) for row in query(url, f"SELECT id FROM {table} ORDER BY id")]


def prepared(url: str) -> list[str]:
    """Return the names of all transactions prepared in the database, sorted."""
    found = query(url, "SELECT gid FROM pg_prepared_xacts WHERE database = current_database()")
    return sorted(str(row[0]) for row in found)


def ledger_rows(url: str) -> list[str]:
    """Return the transactions that the ledger proves committed, sorted."""
    found = query(url, "SELECT transaction_id FROM onceflow.onceflow_ledger")
    return sorted(str(row[0]) for row in found)


def until_waiting(url: str) -> None:
    """Return when a session of the database waits for another's lock."""
    waiting = (
        "SELECT pid FROM pg_stat_activity "
        "WHERE wait_event_type = 'Lock' AND datname = current_database()"
    )
    deadline = time.monotonic() + 20
    while not query(url, waiting):
        assert time.monotonic() < deadline, "nobody waits for a lock"
        time.sleep(0.01)


@dataclass
class Job:
    """A sink under one sink id; closes every writer and committer that it made."""

    sink: PostgresSink
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

    def writer(self, attempt: int = 1, subtask: int = 0, parallelism: int = 1) -> SinkWriter:
        writer = self.sink.writer(
            WriterContext(
                job="job",
                uid="ledger",
                sink_id=self.sink_id,
                subtask=subtask,
                parallelism=parallelism,
                attempt=AttemptId(attempt),
                first_checkpoint=CheckpointId(1),
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
        writer = self.writer(attempt)
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


class WordProxy:
    """A network that resets the connection over which a certain word is sent, once.

    `lose_reply`: the server gets the word and answers it, and the answer is thrown away.
    `lose_request`: the server never gets the word.
    """

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._armed: tuple[bytes, bool] | None = None
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()
        self.resets = 0

    def lose_reply(self, word: str) -> None:
        self._armed = (word.encode(), True)

    def lose_request(self, word: str) -> None:
        self._armed = (word.encode(), False)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for one in self._sockets:
            self._end(one)
        for thread in self._threads:
            thread.join(10)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(self._target, timeout=10)
            except OSError:
                self._end(client)
                continue
            server.settimeout(None)
            self._sockets += [client, server]
            for pair in ((client, server, True), (server, client, False)):
                thread = threading.Thread(target=self._copy, args=pair, daemon=True)
                self._threads.append(thread)
                thread.start()

    def _copy(self, reader: socket.socket, writer: socket.socket, to_server: bool) -> None:
        with contextlib.suppress(OSError):
            while chunk := reader.recv(65536):
                armed = self._armed
                if to_server and armed is not None and armed[0] in chunk:
                    self._armed = None
                    self._break(reader, writer, chunk, deliver=armed[1])
                    return
                writer.sendall(chunk)
        self._end(writer)
        self._end(reader)

    def _break(
        self, client: socket.socket, server: socket.socket, chunk: bytes, *, deliver: bool
    ) -> None:
        self.resets += 1
        # The client's side goes first, so that the answer has nowhere to go.
        self._end(client)
        if deliver:
            server.sendall(chunk)
            # The other thread reads the answer, fails to hand it on, and closes the server's side.
        else:
            self._end(server)

    @staticmethod
    def _end(one: socket.socket) -> None:
        with contextlib.suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)
        one.close()


def committables(found: Sequence[Committable]) -> list[str]:
    """Return the names of committables, sorted."""
    return sorted(str(committable.transaction) for committable in found)
