"""A sink that throws rows away and counts them, to measure everything before the database."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from onceflow.core.protocol import committables
from onceflow.core.protocol.ids import CheckpointId
from onceflow.core.spi import Committer, CommitterContext, Sink, SinkWriter, WriterContext


@dataclass(frozen=True)
class DiscardingSink(Sink):
    """Leaves one small file a checkpoint and subtask in `directory`: how many rows there were."""

    directory: str

    def writer(self, context: WriterContext) -> SinkWriter:
        return _CountingWriter(Path(self.directory), context)

    def committer(self, context: CommitterContext) -> Committer:
        return _NothingToCommit()

    def rows(self) -> int:
        """Return the rows of all checkpoints; right as long as no attempt was repeated."""
        return sum(int(path.read_text()) for path in Path(self.directory).glob("rows-*"))


class _CountingWriter(SinkWriter):
    def __init__(self, directory: Path, context: WriterContext) -> None:
        self._prefix = directory / f"rows-{context.attempt}-{context.subtask}"
        self._rows = 0

    def write(self, batch: pa.RecordBatch) -> None:
        self._rows += batch.num_rows

    def pre_commit(self, checkpoint: CheckpointId) -> Sequence[committables.Committable]:
        self._prefix.with_name(f"{self._prefix.name}-{checkpoint}").write_text(str(self._rows))
        self._rows = 0
        return ()

    def close(self) -> None:
        pass


class _NothingToCommit(Committer):
    def commit(self, committable: committables.Committable) -> committables.CommitOutcome:
        return committables.Committed()

    def abort(self, committable: committables.Committable) -> committables.AbortOutcome:
        return committables.Aborted()

    def in_doubt(self) -> Sequence[committables.Committable]:
        return ()

    def close(self) -> None:
        pass
