"""Sinks that are wrong only when a server is away or a reply is lost; around the Postgres sink."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

import psycopg
import pyarrow as pa
from psycopg import sql
from typing_extensions import LiteralString

from onceflow.core.errors import PreCommitFailed, SinkError
from onceflow.core.protocol import committables
from onceflow.core.protocol.ids import CheckpointId, TransactionId
from onceflow.core.spi import Committer, CommitterContext, Sink, SinkWriter, WriterContext
from onceflow.sinks import PostgresSink
from onceflow.sinks.base.staged import StagedSink


class HandsOnCommits(Committer):
    """Hands everything on."""

    def __init__(self, sink: PostgresSink, context: CommitterContext) -> None:
        self.sink = sink
        self.inner = sink.committer(context)

    def commit(self, committable: committables.Committable) -> committables.CommitOutcome:
        return self.inner.commit(committable)

    def abort(self, committable: committables.Committable) -> committables.AbortOutcome:
        return self.inner.abort(committable)

    def in_doubt(self) -> Sequence[committables.Committable]:
        return self.inner.in_doubt()

    def close(self) -> None:
        self.inner.close()


class _Writer(SinkWriter):
    """Hands everything on."""

    def __init__(self, inner: SinkWriter, context: WriterContext) -> None:
        self.inner = inner
        self.context = context

    def write(self, batch: pa.RecordBatch) -> None:
        self.inner.write(batch)

    def pre_commit(self, checkpoint: CheckpointId) -> Sequence[committables.Committable]:
        return self.inner.pre_commit(checkpoint)

    def close(self) -> None:
        self.inner.close()


@dataclass(frozen=True)
class BrokenServerSink(Sink):
    """Wrong in one way."""

    sink: PostgresSink

    breaks: ClassVar[str]
    writer_class: ClassVar[type[_Writer]] = _Writer
    committer_class: ClassVar[type[HandsOnCommits]] = HandsOnCommits

    def open(self, context: CommitterContext, schema: pa.Schema) -> None:
        self.sink.open(context, schema)

    def writer(self, context: WriterContext) -> SinkWriter:
        return self.writer_class(self.sink.writer(context), context)

    def committer(self, context: CommitterContext) -> Committer:
        return self.committer_class(self.sink, context)


class _SilenceIsSuccess(HandsOnCommits):
    def commit(self, committable: committables.Committable) -> committables.CommitOutcome:
        outcome = super().commit(committable)
        return (
            committables.Committed()
            if isinstance(outcome, (committables.RetryLater, committables.Unknown))
            else outcome
        )


class TakesSilenceForSuccess(BrokenServerSink):
    """Says Committed where nobody can tell."""

    breaks = "server-away-changes-nothing"
    committer_class = _SilenceIsSuccess


class _NothingInDoubt(HandsOnCommits):
    def in_doubt(self) -> Sequence[committables.Committable]:
        try:
            return super().in_doubt()
        except SinkError:
            return ()


class FindsNothingWhenAway(BrokenServerSink):
    """Says that nothing is in doubt where it could not look."""

    breaks = "server-away-changes-nothing"
    committer_class = _NothingInDoubt


class _LooksAtBegin(HandsOnCommits):
    def begin_commit(self, committable: committables.Committable) -> bool:
        return committable.transaction in [one.transaction for one in self.in_doubt()]


class RaisesAtBegin(BrokenServerSink):
    """Raises where it cannot begin, and so ends a slot that only has to wait."""

    breaks = "begun-while-the-server-is-away"
    committer_class = _LooksAtBegin


class _NoReply(Exception):
    """The connection broke while the server was at it."""


def _did(url: str, statement: LiteralString, committable: committables.Committable) -> bool:
    """Return whether the server did it; not when it is away or has no such transaction.

    Raises:
        _NoReply: Nobody knows.
    """
    try:
        connection = psycopg.connect(url, autocommit=True)
    except psycopg.OperationalError:
        return False
    with closing(connection):
        try:
            connection.execute(sql.SQL(statement).format(str(committable.transaction)))
        except psycopg.errors.UndefinedObject:
            return False
        except psycopg.OperationalError as error:
            raise _NoReply from error
    return True


class _LostReplyIsLost(HandsOnCommits):
    def commit(self, committable: committables.Committable) -> committables.CommitOutcome:
        try:
            done = _did(self.sink.url, "COMMIT PREPARED {}", committable)
        except _NoReply as error:
            return committables.Lost(f"the connection broke: {error.__cause__}")
        return committables.Committed() if done else self.inner.commit(committable)


class TakesLostReplyForLostRows(BrokenServerSink):
    """Says Lost where the reply did not come, though the rows may be there."""

    breaks = "reply-lost-at-commit"
    committer_class = _LostReplyIsLost


class _LostReplyIsGone(HandsOnCommits):
    def abort(self, committable: committables.Committable) -> committables.AbortOutcome:
        try:
            _did(self.sink.url, "ROLLBACK PREPARED {}", committable)
        except _NoReply:
            return committables.AlreadyCommitted()
        return self.inner.abort(committable)


class TakesLostReplyForCommitted(BrokenServerSink):
    """Says at abort that it was committed where the reply did not come."""

    breaks = "reply-lost-at-abort"
    committer_class = _LostReplyIsGone


class _AcksWhatFailed(_Writer):
    def pre_commit(self, checkpoint: CheckpointId) -> Sequence[committables.Committable]:
        try:
            return super().pre_commit(checkpoint)
        except PreCommitFailed:
            context = self.context
            transaction = TransactionId(
                context.sink_id, context.attempt, checkpoint, context.subtask
            )
            return (committables.Committable(transaction, 3),)


class AcksWhatItCouldNotPrepare(BrokenServerSink):
    """Acks the checkpoint although prepare has failed: the offsets go on, and the rows are gone."""

    breaks = "reply-lost-at-pre-commit"
    writer_class = _AcksWhatFailed


_APPLY = """
    WITH proof AS (INSERT INTO proofs VALUES (%s, %s) ON CONFLICT DO NOTHING RETURNING 1)
    INSERT INTO kept_rows SELECT given.* FROM proof, unnest(%s::bigint[], %s::text[], %s::int[])
    AS given (id, account, amount) ON CONFLICT (id)
    DO UPDATE SET (account, amount) = (excluded.account, excluded.amount)
"""


@dataclass(frozen=True)
class AsksForTheFloorInAnotherRequest(StagedSink):
    """Looks at the floor right before it sends what writes rows and proof, and not in it."""

    sink: PostgresSink

    breaks: ClassVar[str] = "overtaken-on-the-way"

    def routing_key(self) -> tuple[str, ...]:
        return ("id",)

    def open(self, context: CommitterContext, schema: pa.Schema) -> None:
        with psycopg.connect(self.sink.url) as connection:
            connection.execute(
                "CREATE TABLE IF NOT EXISTS proofs (name text PRIMARY KEY, checkpoint_id bigint);"
                "CREATE TABLE IF NOT EXISTS floors (name text PRIMARY KEY, floor bigint)"
            )

    def apply(self, transaction: TransactionId, rows: Iterator[pa.RecordBatch]) -> bool:
        columns = [column.to_pylist() for column in pa.Table.from_batches(list(rows)).columns]
        sent = [str(transaction), transaction.checkpoint, *columns]
        asked = [transaction.sink_id, transaction.checkpoint]
        below = "SELECT 1 FROM floors WHERE name = %s AND floor > %s"
        try:
            with psycopg.connect(self.sink.url, autocommit=True) as on:
                # In one line, so that no committer is held up between the two, but on the way.
                done = on.execute(below, asked).rowcount < 1 and on.execute(_APPLY, sent).rowcount
        except psycopg.Error as error:
            raise SinkError(str(error)) from error
        return bool(done)

    def is_applied(self, transaction: TransactionId) -> bool:
        with psycopg.connect(self.sink.url, autocommit=True) as connection:
            found = connection.execute("SELECT 1 FROM proofs WHERE name = %s", (str(transaction),))
            return found.rowcount > 0

    def forget(self, sink_id: str, before: CheckpointId) -> None:
        with psycopg.connect(self.sink.url) as connection:
            connection.execute(
                "INSERT INTO floors VALUES (%s, %s) ON CONFLICT (name)"
                " DO UPDATE SET floor = greatest(floors.floor, excluded.floor)",
                (sink_id, before),
            )
            connection.execute(
                "DELETE FROM proofs WHERE starts_with(name, %s) AND checkpoint_id < %s",
                (f"{sink_id}/", before),
            )


BrokenKind: TypeAlias = type[BrokenServerSink] | type[AsksForTheFloorInAnotherRequest]

GALLERY: tuple[BrokenKind, ...] = (
    TakesSilenceForSuccess,
    FindsNothingWhenAway,
    RaisesAtBegin,
    TakesLostReplyForLostRows,
    TakesLostReplyForCommitted,
    AcksWhatItCouldNotPrepare,
    AsksForTheFloorInAnotherRequest,
)
