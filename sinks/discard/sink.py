"""A sink that counts rows and writes nothing, to measure a job without its target.

Each checkpoint with rows has a committable, which holds nothing but their number. So the status and
the metrics count each row once, as those of other sinks do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa

from onceflow.core.argument_types import check_fields
from onceflow.core.protocol.committables import (
    Aborted,
    AbortOutcome,
    CommitOutcome,
    Committable,
    Committed,
)
from onceflow.core.protocol.ids import CheckpointId
from onceflow.core.spi import Committer, CommitterContext, Sink, SinkWriter, WriterContext


@check_fields
@dataclass(frozen=True)
class DiscardSink(Sink):
    """A sink that drops all rows. It counts them in `JobStatus.sinks` and in the metrics.

    It has no target, so any job may use any sink id. All other rules are those of other sinks: the
    rows of a checkpoint are pre-committed, decided and committed.
    """

    def describe_target(self) -> str:
        """Return "nothing"."""
        return "nothing"

    def writer(self, context: WriterContext) -> SinkWriter:
        """Return a writer that counts."""
        return _CountingWriter(context)

    def committer(self, context: CommitterContext) -> Committer:
        """Return a committer without a target."""
        return _CommitterOfNothing()


class _CountingWriter(SinkWriter):
    def __init__(self, context: WriterContext) -> None:
        self._context = context
        self._rows = 0

    def write(self, batch: pa.RecordBatch) -> None:
        self._rows += batch.num_rows

    def pre_commit(self, checkpoint: CheckpointId) -> Sequence[Committable]:
        rows, self._rows = self._rows, 0
        return [Committable(self._context.transaction(checkpoint), rows)] if rows else []

    def close(self) -> None:
        self._rows = 0


class _CommitterOfNothing(Committer):
    def commit(self, committable: Committable) -> CommitOutcome:
        del committable
        return Committed()

    def abort(self, committable: Committable) -> AbortOutcome:
        del committable
        return Aborted()

    def in_doubt(self) -> Sequence[Committable]:
        return ()

    def close(self) -> None:
        pass
