"""The writer of one subtask: it writes rows into data files, and stages their description.

    write        rows → data files in the table's own directories, which no version names
    pre_commit   files ended and durable → their description in checkpoint storage

A crash before the description is staged leaves data files that nothing refers to.
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
from typing_extensions import override

from onceflow.core.crash_points import reach
from onceflow.core.errors import PreCommitFailed, SinkError, StorageError
from onceflow.core.protocol.committables import Committable
from onceflow.core.protocol.ids import CheckpointId
from onceflow.core.spi import RejectedRows, SinkWriter, WriterContext
from onceflow.core.spi.staging import make_staged_committable, require_staging
from onceflow.sinks.lake.refused_rows import RefusedRows
from onceflow.sinks.lake.table import DataFiles


class LakeWriter(SinkWriter):
    """A writer that uses `files`, which refuses rows that the table never accepts."""

    def __init__(self, context: WriterContext, files: DataFiles, refused: RefusedRows) -> None:
        """Begin with no rows."""
        self._context, self._files, self._refused = context, files, refused
        self._staging = require_staging(
            context.staging, context.sink_id, "the description of data files waits"
        )
        self._rows = 0

    @override
    def write(self, batch: pa.RecordBatch) -> None:
        with self._refused.check_failure():
            self._rows += self._files.write(batch)

    @override
    def pre_commit(self, checkpoint: CheckpointId) -> Sequence[Committable]:
        transaction = self._context.transaction(checkpoint)
        try:
            self._refused.check_checkpoint()
        except SinkError as error:
            raise PreCommitFailed(f"{transaction} is not durable: {error}") from error
        rows, self._rows = self._rows, 0
        if not rows:
            return ()
        staged = self._staging.open()
        try:
            description = self._files.end(checkpoint)
            reach("flushed")
            staged.write(description)
            staged.seal(transaction)
        except (SinkError, StorageError) as error:
            raise PreCommitFailed(f"{transaction} is not durable: {error}") from error
        finally:
            staged.close()
        return (make_staged_committable(transaction, rows),)

    @override
    def take_rejected(self) -> Sequence[RejectedRows]:
        return self._refused.take()

    @override
    def close(self) -> None:
        self._files.drop()
