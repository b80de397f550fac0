"""A sink in a job: under a sink id, with its attempts."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace

import pyarrow as pa

from onceflow.core import spi
from onceflow.core.commit.loop import open_global_committer
from onceflow.core.errors import OnceflowError
from onceflow.core.protocol.committables import AbortOutcome, CommitOutcome, Committable
from onceflow.core.protocol.ids import AttemptId, CheckpointId
from onceflow.core.storage import JobStorage

JOB = "conformance"
UID = "sink"


@dataclass
class SinkJob:
    """A sink under one sink id with one decision log. `close` closes its writers and committers.

    An attempt is opened (`Sink.open`) at its first use.
    """

    sink: spi.Sink
    sink_id: str
    storage: JobStorage
    schema: pa.Schema
    log_id: str = ""
    _attempt: int = 0
    _open: ExitStack = field(default_factory=ExitStack)

    def __post_init__(self) -> None:
        self.log_id = self.log_id or self.storage.log_id

    def committer_context(self, attempt: int = 1) -> spi.CommitterContext:
        """Return the context of committers, in the driver and in slots."""
        return spi.CommitterContext(
            JOB,
            UID,
            self.sink_id,
            AttemptId(attempt),
            log_id=self.log_id,
            staging=self.storage.staging(self.sink_id),
        )

    def writer_context(
        self, attempt: int = 1, subtask: int = 0, parallelism: int = 4, first_checkpoint: int = 1
    ) -> spi.WriterContext:
        """Return the context of one subtask's writer."""
        return spi.WriterContext(
            job=JOB,
            uid=UID,
            sink_id=self.sink_id,
            subtask=subtask,
            parallelism=parallelism,
            attempt=AttemptId(attempt),
            first_checkpoint=CheckpointId(first_checkpoint),
            schema=self.schema,
            staging=self.storage.staging(self.sink_id),
        )

    def check(self, attempt: int) -> None:
        """Open `attempt`, even if it was opened before."""
        self.sink.open(self.committer_context(attempt), self.schema)
        self._attempt = max(self._attempt, attempt)

    def begin(self, attempt: int) -> None:
        """Open `attempt` if neither it nor a later one was opened."""
        if attempt > self._attempt:
            self.check(attempt)

    def writer(
        self, attempt: int = 1, subtask: int = 0, parallelism: int = 4, first_checkpoint: int = 1
    ) -> spi.SinkWriter:
        """Return a new writer of one subtask."""
        self.begin(attempt)
        context = self.writer_context(attempt, subtask, parallelism, first_checkpoint)
        writer = self.sink.writer(context)
        self._open.callback(_close, writer)
        return writer

    def committer(self, attempt: int = 1) -> spi.Committer:
        """Return a new committer."""
        self.begin(attempt)
        committer = self.sink.committer(self.committer_context(attempt))
        self._open.callback(_close, committer)
        return committer

    def through(self, sink: spi.Sink) -> SinkJob:
        """Return the same job with another description of the sink."""
        other = replace(self, sink=sink, _open=ExitStack())
        self._open.callback(other.close)
        return other

    def in_doubt(self) -> list[str]:
        """Return the sorted names of the transactions that a new committer finds in doubt."""
        committer = self.sink.committer(self.committer_context(max(1, self._attempt)))
        try:
            return sorted(str(committable.transaction) for committable in committer.in_doubt())
        finally:
            committer.close()

    def close(self) -> None:
        """Close every writer and committer."""
        self._open.close()

    def clean_up(self) -> None:
        """Abort transactions in doubt if possible, so that a shared target is not blocked."""
        self.close()
        if not self._attempt:
            return
        with suppress(Exception):
            committer = self.sink.committer(self.committer_context(self._attempt))
            for committable in committer.in_doubt():
                if committable.transaction.sink_id == self.sink_id:
                    committer.abort(committable)
            committer.close()


@dataclass(frozen=True)
class OneByOne(spi.Sink):
    """An adapter for sinks of whole checkpoints that commits each transaction as a checkpoint."""

    sink: spi.Sink

    def __repr__(self) -> str:
        return repr(self.sink)

    def routing_key(self) -> tuple[str, ...]:
        """Delegate to the sink."""
        return self.sink.routing_key()

    def validate(self, context: spi.CommitterContext, schema: pa.Schema) -> None:
        """Delegate to the sink."""
        self.sink.validate(context, schema)

    def open(self, context: spi.CommitterContext, schema: pa.Schema) -> None:
        """Delegate to the sink."""
        self.sink.open(context, schema)

    def writer(self, context: spi.WriterContext) -> spi.SinkWriter:
        """Delegate to the sink."""
        return self.sink.writer(context)

    def committer(self, context: spi.CommitterContext) -> spi.Committer:
        """Return a committer that commits each transaction as a checkpoint."""
        return WholeCommitter(open_global_committer(self.sink, context))


class WholeCommitter(spi.Committer):
    """An adapter that uses a global committer as a committer of single transactions."""

    def __init__(self, committer: spi.GlobalCommitter) -> None:
        """`committer` is the global committer to use."""
        self._committer = committer

    def commit_whole(self, committables: Sequence[Committable]) -> CommitOutcome:
        """Commit all as one checkpoint: that of the last committable."""
        return self._committer.commit_checkpoint(committables[-1].checkpoint, committables)

    def commit(self, committable: Committable) -> CommitOutcome:
        """Commit the transaction as a checkpoint."""
        return self.commit_whole((committable,))

    def abort(self, committable: Committable) -> AbortOutcome:
        """Abort the transaction."""
        return self._committer.abort(committable)

    def in_doubt(self) -> Sequence[Committable]:
        """Return the transactions in doubt."""
        return self._committer.in_doubt()

    def close(self) -> None:
        """Close the global committer."""
        self._committer.close()


def _close(resource: spi.SinkWriter | spi.Committer) -> None:
    # Ignore errors: the clause has made its checks before, and a dead connection is not a
    # violation.
    with suppress(OnceflowError, OSError):
        resource.close()
