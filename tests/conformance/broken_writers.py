"""Sinks whose writers, names or committables are wrong in one way."""

from __future__ import annotations

import json
import random
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa
from tests.conformance import reference_sink
from tests.conformance.broken_sink import BrokenSink

from onceflow.core.errors import BadRow, PreCommitFailed, SinkError
from onceflow.core.protocol.committables import (
    Committable,
)
from onceflow.core.protocol.ids import CheckpointId, TransactionId

_INSERT = "INSERT INTO target VALUES (:id, :account, :amount)"


# --- visible too early --------------------------------------------------------------------------


class _WritesThrough(reference_sink.ReferenceWriter):
    def write(self, batch: pa.RecordBatch) -> None:
        super().write(batch)
        with reference_sink.transaction(self.sink.path) as connection:
            connection.executemany(_INSERT, batch.to_pylist())


class ShowsRowsAsTheyCome(BrokenSink):
    """Inserts with autocommit, as most sinks in the wild."""

    breaks = "hidden-after-write"
    writer_class = _WritesThrough


class _CommitsAtPreCommit(reference_sink.ReferenceWriter):
    def prepare(self, transaction_id: TransactionId) -> None:
        super().prepare(transaction_id)
        with reference_sink.transaction(self.sink.path) as connection:
            connection.executemany(_INSERT, self.rows)


class CommitsAtPreCommit(BrokenSink):
    """Commits with the snapshot, before the checkpoint is complete."""

    breaks = "hidden-after-pre-commit"
    writer_class = _CommitsAtPreCommit


class _CommitsOnClose(reference_sink.ReferenceWriter):
    def close(self) -> None:
        with reference_sink.transaction(self.sink.path) as connection:
            connection.executemany(_INSERT, self.rows)
        super().close()


class FlushesOnClose(BrokenSink):
    """Takes the end of a writer for the end of the input."""

    breaks = "close-rolls-back-what-is-open"
    writer_class = _CommitsOnClose


# --- not durable --------------------------------------------------------------------------------

_IN_MEMORY: dict[str, str] = {}


class _PreparesInMemory(reference_sink.ReferenceWriter):
    def prepare(self, transaction_id: TransactionId) -> None:
        super().prepare(transaction_id)
        name = str(transaction_id)
        _IN_MEMORY[name] = json.dumps(self.rows)
        with reference_sink.transaction(self.sink.path) as connection:
            connection.execute("UPDATE prepared SET rows = '[]' WHERE name = ?", (name,))


class _CommitsFromMemory(reference_sink.ReferenceCommitter):
    def prepared_rows(self, connection: sqlite3.Connection, name: str) -> str | None:
        rows = super().prepared_rows(connection, name)
        return rows if rows is None else _IN_MEMORY.get(name, "[]")


class KeepsPreparedRowsInMemory(BrokenSink):
    """Has a name in the target and the rows in the process."""

    breaks = "pre-committed-survives-death"
    writer_class = _PreparesInMemory
    committer_class = _CommitsFromMemory


class _ClosesByAborting(reference_sink.ReferenceWriter):
    def close(self) -> None:
        with reference_sink.transaction(self.sink.path) as connection:
            connection.execute(
                "DELETE FROM prepared WHERE name LIKE ?",
                (f"{self.context.sink_id}/{self.context.attempt}/%/{self.context.subtask}/%",),
            )
        super().close()


class AbortsPreparedOnClose(BrokenSink):
    """Cleans up more than is its own when a writer ends."""

    breaks = "close-keeps-what-is-pre-committed"
    writer_class = _ClosesByAborting


class _LosesRowsOfLargeBatches(reference_sink.ReferenceWriter):
    def write(self, batch: pa.RecordBatch) -> None:
        super().write(batch.slice(0, 250))


class CutsLargeBatches(BrokenSink):
    """Writes at most so many rows of a batch."""

    breaks = "commit-shows-its-rows"
    writer_class = _LosesRowsOfLargeBatches


class _AltersValues(reference_sink.ReferenceWriter):
    def write(self, batch: pa.RecordBatch) -> None:
        super().write(batch)
        for row in self.rows:
            row["amount"] = min(row["amount"], 5000)


class ClampsValues(BrokenSink):
    """Lets the target cut what does not fit, as a lenient SQL mode does."""

    breaks = "commit-shows-its-rows"
    writer_class = _AltersValues


class _KeepsWrittenRows(reference_sink.ReferenceWriter):
    def pre_commit(self, checkpoint: CheckpointId) -> Sequence[Committable]:
        rows = list(self.rows)
        committables = super().pre_commit(checkpoint)
        self.rows = rows[:1] if len(rows) > 1 else []
        return committables


class CarriesRowsOver(BrokenSink):
    """Leaves a row of one checkpoint in the buffer of the next."""

    breaks = "commit-shows-its-rows"
    writer_class = _KeepsWrittenRows


class _EmptyIsAnError(reference_sink.ReferenceWriter):
    def pre_commit(self, checkpoint: CheckpointId) -> Sequence[Committable]:
        if not self.rows:
            raise SinkError("there is no open transaction")
        return super().pre_commit(checkpoint)


class FailsOnEmptyCheckpoint(BrokenSink):
    """Prepares a transaction that was never begun."""

    breaks = "empty-checkpoint"
    writer_class = _EmptyIsAnError


class _SwallowsBadRows(reference_sink.ReferenceWriter):
    def require_good(self) -> None:
        self.rows = list({row["id"]: row for row in self.rows}.values())


class SwallowsBadRows(BrokenSink):
    """Logs what the target refuses and goes on."""

    breaks = "bad-batch-is-refused"
    writer_class = _SwallowsBadRows


# --- names and committables ---------------------------------------------------------------------


class _RandomNames(reference_sink.ReferenceWriter):
    def name(self, checkpoint: CheckpointId) -> TransactionId:
        attempt = random.randrange(10**7, 10**8)
        return TransactionId(self.context.sink_id, attempt, checkpoint, self.context.subtask)


class NamesAtRandom(BrokenSink):
    """Draws a part of the name: what a replay finds prepared, nobody can tell whose it is."""

    breaks = "names-follow-the-checkpoint"
    writer_class = _RandomNames


def _without_attempt(transaction_id: TransactionId) -> str:
    own = transaction_id
    return str(TransactionId(own.sink_id, 1, own.checkpoint, own.subtask))


class _NamesWithoutAttempt(reference_sink.ReferenceWriter):
    def stored_name(self, transaction_id: TransactionId) -> str:
        return _without_attempt(transaction_id)

    def prepare(self, transaction_id: TransactionId) -> None:
        try:
            super().prepare(transaction_id)
        except sqlite3.IntegrityError as error:
            raise SinkError(f"transaction {transaction_id} is prepared already") from error


class _WithoutAttempt(reference_sink.ReferenceCommitter):
    def stored_name(self, transaction_id: TransactionId) -> str:
        return _without_attempt(transaction_id)


class NamesWithoutAttempt(BrokenSink):
    """Stores by checkpoint and subtask: a replay meets what the attempt before has left."""

    breaks = "names-follow-the-checkpoint"
    writer_class = _NamesWithoutAttempt
    committer_class = _WithoutAttempt


class _CarriesPassword(reference_sink.ReferenceWriter):
    def payload(self) -> bytes:
        return f"sqlite://kit:{self.sink.password}@{self.sink.path}".encode()


class KeepsPasswordInCommittable(BrokenSink):
    """Puts the connection string into the committable, hence into the decision log."""

    breaks = "no-secret-is-kept"
    writer_class = _CarriesPassword


@dataclass(frozen=True)
class PrintsPassword(BrokenSink):
    """Has a repr with all its settings."""

    breaks = "no-secret-is-kept"

    def __repr__(self) -> str:
        return f"PrintsPassword({self.path!r}, password={self.password!r})"


class _CarriesRows(reference_sink.ReferenceWriter):
    def payload(self) -> bytes:
        return json.dumps(self.rows).encode()[:60_000]


class CarriesRowsInCommittable(BrokenSink):
    """Puts the rows into the committable, which grows with them."""

    breaks = "committable-fits-the-log"
    writer_class = _CarriesRows


class _PreparesTheNameFirst(reference_sink.ReferenceWriter):
    """Prepares in two steps, rows last."""

    def prepare(self, transaction_id: TransactionId) -> None:
        rows, self.rows = self.rows, []
        super().prepare(transaction_id)
        self.rows = rows
        with reference_sink.transaction(self.sink.path) as connection:
            connection.execute(
                "UPDATE prepared SET rows = ? WHERE name = ?",
                (json.dumps(rows), str(transaction_id)),
            )


class PreparesTheNameFirst(BrokenSink):
    """Has the name in doubt before the rows are there: a crash in between loses them."""

    breaks = "killed-in-pre-commit"
    rounds = 40
    writer_class = _PreparesTheNameFirst


# --- tried again without an end -----------------------------------------------------------------


class _BlamesTheTarget(reference_sink.ReferenceWriter):
    def require_good(self) -> None:
        try:
            super().require_good()
        except BadRow:
            raise PreCommitFailed("the target has answered with an error") from None


class TakesBadRowsForATargetThatIsAway(BrokenSink):
    """Raises the same for every error of its client's."""

    breaks = "bad-rows-end-by-name"
    writer_class = _BlamesTheTarget


class _ServiceUnavailable(Exception):
    """An error class of a client's own, with a word for a connection in its name."""


class _BlamesTheService(reference_sink.ReferenceWriter):
    def require_good(self) -> None:
        try:
            super().require_good()
        except BadRow:
            raise _ServiceUnavailable("400: the id is there already") from None


class RaisesAnOutageForBadRows(BrokenSink):
    """Lets its client's only error class through, which is named for outages."""

    breaks = "own-error-for-a-bad-row-ends-by-name"
    writer_class = _BlamesTheService
