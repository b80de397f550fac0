"""The writer of one subtask whose rows change others by key: they wait in checkpoint storage.

    write        rows → the table's columns and whether each deletes, on their way into storage
    pre_commit   all of them sealed under one transaction

No file is in the table's directories before the driver commits. A crash before that leaves no file
that must be removed.
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pyarrow.compute as pc
from typing_extensions import override

from onceflow.core.arrow.kinds import to_plain_rows
from onceflow.core.crash_points import reach
from onceflow.core.errors import PreCommitFailed, SinkError, StorageError
from onceflow.core.protocol.committables import Committable
from onceflow.core.protocol.ids import CheckpointId
from onceflow.core.spi import RejectedRows, SinkWriter, WriterContext
from onceflow.core.spi.staging import make_staged_committable, require_staging
from onceflow.sinks.lake.changes import DELETES, ChangesLabel
from onceflow.sinks.lake.refused_rows import RefusedRows
from onceflow.sinks.sql.write_mode import ChangeRules


class LakeChangeWriter(SinkWriter):
    """A writer that stages the changes of one subtask, in the order in which they arrive."""

    def __init__(
        self,
        context: WriterContext,
        rules: ChangeRules,
        table_id: str,
        refused: RefusedRows,
    ) -> None:
        """Begin with no rows."""
        self._context, self._rules, self._refused = context, rules, refused
        self._columns, self._bad_rows = refused.columns, refused.bad_rows
        self._part = ChangesLabel(table_id, rules.primary_key).to_part()
        self._staging = require_staging(
            context.staging, context.sink_id, "changes of rows wait for their commit"
        )
        self._staged = self._staging.open()

    @override
    def write(self, batch: pa.RecordBatch) -> None:
        with self._refused.check_failure():
            self._stage(batch)

    def _stage(self, batch: pa.RecordBatch) -> None:
        classified = self._rules.classify(to_plain_rows(batch), self._bad_rows)
        rows = self._empty_deletes(classified.rows, classified.deletes)
        rows = self._columns.sift(rows, self._bad_rows, exempt=classified.deletes)
        if not rows.num_rows:
            return
        # Classify the remaining rows again: emptied rows still delete.
        deletes = self._rules.classify(rows, self._bad_rows).deletes
        converted = self._columns.cast(rows)
        names = [*self._columns.names, DELETES]
        marked = pa.RecordBatch.from_arrays([*converted.columns, deletes], names=names)
        self._staged.write(marked, part=self._part)

    @override
    def pre_commit(self, checkpoint: CheckpointId) -> Sequence[Committable]:
        transaction = self._context.transaction(checkpoint)
        try:
            self._refused.check_checkpoint()
            rows = self._staged.rows
            if not rows:
                return ()
            reach("flushed")
            self._staged.seal(transaction)
            self._staged.close()
            self._staged = self._staging.open()
        except (SinkError, StorageError) as error:
            raise PreCommitFailed(f"{transaction} is not durable: {error}") from error
        return (make_staged_committable(transaction, rows),)

    @override
    def take_rejected(self) -> Sequence[RejectedRows]:
        return self._refused.take()

    @override
    def close(self) -> None:
        self._staged.close()

    def _empty_deletes(self, rows: pa.RecordBatch, deletes: pa.BooleanArray) -> pa.RecordBatch:
        """Return `rows` with nulls in rows that delete: their values need not fit the table."""
        if not deletes.true_count:
            return rows
        kept = {*self._rules.primary_key, self._rules.operation_column}
        columns = [
            column if name in kept else _set_null(column, deletes)
            for name, column in zip(rows.schema.names, rows.columns, strict=True)
        ]
        return pa.RecordBatch.from_arrays(columns, schema=rows.schema)


def _set_null(column: pa.Array, deletes: pa.BooleanArray) -> pa.Array:
    emptied: pa.Array = pc.if_else(deletes, pa.scalar(None, column.type), column)
    return emptied
