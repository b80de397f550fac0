"""Sinks that are wrong only when a server is away or a reply is lost; around the Postgres sink."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import ClassVar

import psycopg
import pyarrow as pa
from psycopg import sql
from typing_extensions import LiteralString

from onceflow.core.errors import PreCommitFailed, SinkError
from onceflow.core.protocol.committables import (
    AbortOutcome,
    AlreadyCommitted,
    CommitOutcome,
    Committable,
    Committed,
    Lost,
    RetryLater,
    Unknown,
)
from onceflow.core.protocol.ids import CheckpointId, TransactionId
from onceflow.core.spi import Committer, CommitterContext, Sink, SinkWriter, WriterContext
from onceflow.sinks import PostgresSink


class _Committer(Committer):
    """Hands everything on."""

    def __init__(self, sink: PostgresSink, context: CommitterContext) -> None:
        self.sink = sink
        self.inner = sink.committer(context)

    def commit(self, committable: Committable) -> CommitOutcome:
        return self.inner.commit(committable)

    def abort(self, committable: Committable) -> AbortOutcome:
        return self.inner.abort(committable)

    def in_doubt(self) -> Sequence[Committable]:
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

    def pre_commit(self, checkpoint: CheckpointId) -> Committable | None:
        return self.inner.pre_commit(checkpoint)

    def close(self) -> None:
        self.inner.close()


@dataclass(frozen=True)
class BrokenServerSink(Sink):
    """Wrong in one way."""

    sink: PostgresSink

    breaks: ClassVar[str]
    writer_class: ClassVar[type[_Writer]] = _Writer
    committer_class: ClassVar[type[_Committer]] = _Committer

    def check(self, context: CommitterContext, schema: pa.Schema) -> None:
        self.sink.check(context, schema)

    def writer(self, context: WriterContext) -> SinkWriter:
        return self.writer_class(self.sink.writer(context), context)

    def committer(self, context: CommitterContext) -> Committer:
        return self.committer_class(self.sink, context)


class _SilenceIsSuccess(_Committer):
    def commit(self, committable: Committable) -> CommitOutcome:
        outcome = super().commit(committable)
        return Committed() if isinstance(outcome, (RetryLater, Unknown)) else outcome


class TakesSilenceForSuccess(BrokenServerSink):
    """Says Committed where nobody can tell."""

    breaks = "server-away-changes-nothing"
    committer_class = _SilenceIsSuccess


class _NothingInDoubt(_Committer):
    def in_doubt(self) -> Sequence[Committable]:
        try:
            return super().in_doubt()
        except SinkError:
            return ()


class FindsNothingWhenAway(BrokenServerSink):
    """Says that nothing is in doubt where it could not look."""

    breaks = "server-away-changes-nothing"
    committer_class = _NothingInDoubt


class _NoReply(Exception):
    """The connection broke while the server was at it."""


def _did(url: str, statement: LiteralString, committable: Committable) -> bool:
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


class _LostReplyIsLost(_Committer):
    def commit(self, committable: Committable) -> CommitOutcome:
        try:
            done = _did(self.sink.url, "COMMIT PREPARED {}", committable)
        except _NoReply as error:
            return Lost(f"the connection broke: {error.__cause__}")
        return Committed() if done else self.inner.commit(committable)


class TakesLostReplyForLostRows(BrokenServerSink):
    """Says Lost where the reply did not come, though the rows may be there."""

    breaks = "reply-lost-at-commit"
    committer_class = _LostReplyIsLost


class _LostReplyIsGone(_Committer):
    def abort(self, committable: Committable) -> AbortOutcome:
        try:
            _did(self.sink.url, "ROLLBACK PREPARED {}", committable)
        except _NoReply:
            return AlreadyCommitted()
        return self.inner.abort(committable)


class TakesLostReplyForCommitted(BrokenServerSink):
    """Says at abort that it was committed where the reply did not come."""

    breaks = "reply-lost-at-abort"
    committer_class = _LostReplyIsGone


class _AcksWhatFailed(_Writer):
    def pre_commit(self, checkpoint: CheckpointId) -> Committable | None:
        try:
            return super().pre_commit(checkpoint)
        except PreCommitFailed:
            context = self.context
            transaction = TransactionId(
                context.sink_id, context.attempt, checkpoint, context.subtask
            )
            return Committable(transaction, 3)


class AcksWhatItCouldNotPrepare(BrokenServerSink):
    """Acks the checkpoint although prepare has failed: the offsets go on, and the rows are gone."""

    breaks = "reply-lost-at-pre-commit"
    writer_class = _AcksWhatFailed


GALLERY: tuple[type[BrokenServerSink], ...] = (
    TakesSilenceForSuccess,
    FindsNothingWhenAway,
    TakesLostReplyForLostRows,
    TakesLostReplyForCommitted,
    AcksWhatItCouldNotPrepare,
)
