"""Rows to a Delta Lake table, exactly once: one version of the table a checkpoint.

No reader sees a file before a version names it. The driver makes one version of all files of a
checkpoint, with the checkpoint as Delta's own ordered proof (`txn`: a number that only rises).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import CommitProperties, DeltaTable, Transaction
from deltalake.exceptions import DeltaError
from deltalake.transaction import AddAction, RemoveAction

from onceflow import connectors as spi


@dataclass(frozen=True)
class DeltaSink(spi.Sink):
    """Appends to the table in directory `path`, which all executors share."""

    path: str

    def validate(self, context: spi.CommitterContext, schema: pa.Schema) -> None:
        """Compare the columns, where there is a table."""
        if DeltaTable.is_deltatable(self.path):
            found = pa.schema(DeltaTable(self.path).schema().to_arrow())
            if (found.names, found.types) != (schema.names, schema.types):
                raise spi.ConfigError(f"{self.path} has the columns {found}, the rows {schema}")

    def open(self, context: spi.CommitterContext, schema: pa.Schema) -> None:
        """Create the table, and claim the sink id."""
        self.validate(context, schema)
        DeltaTable.create(self.path, schema, mode="ignore")
        spi.claim_in_files(self.path, context, self._committed_through(context))
        _files(self.path, context.sink_id).open(context)

    def target_record(self, context: spi.CommitterContext) -> spi.TargetRecord:
        """Tell what was committed, and by which attempts."""
        return spi.record_in_files(self.path, context, self._committed_through(context))

    def writer(self, context: spi.WriterContext) -> spi.SinkWriter:
        """Return a writer of a file a checkpoint."""
        return _files(self.path, context.sink_id).writer(context, pq.ParquetWriter)

    @property
    def committed_by(self) -> spi.CommittedBy:
        """Have the driver make one version a checkpoint."""
        return spi.CommittedBy.DRIVER

    def committer(self, context: spi.CommitterContext) -> spi.GlobalCommitter:
        """Return what makes versions."""
        return DeltaCommitter(self.path, context.sink_id)

    def _committed_through(self, context: spi.CommitterContext) -> spi.CheckpointId:
        if not DeltaTable.is_deltatable(self.path):
            return spi.CheckpointId(0)
        return DeltaCommitter(self.path, context.sink_id).read_committed_through()


class DeltaCommitter(spi.GlobalCommitter):
    """Makes versions of the table at `path`; the sink id is Delta's application."""

    def __init__(self, path: str, sink_id: str) -> None:
        self.path, self.sink_id, self.files = path, sink_id, _files(path, sink_id)

    def commit_checkpoint(
        self, checkpoint: spi.CheckpointId, committables: Sequence[spi.Committable]
    ) -> spi.CommitOutcome:
        """Make a version of all files, unless the table has one of this checkpoint or later."""
        table = DeltaTable(self.path)
        if (table.transaction_version(self.sink_id) or 0) >= checkpoint:
            return spi.AlreadyCommitted()
        return self.append(table, checkpoint, committables)

    def append(
        self, table: DeltaTable, checkpoint: spi.CheckpointId, parts: Sequence[spi.Committable]
    ) -> spi.CommitOutcome:
        """Make the version after that of `table`, or none if somebody else has made it."""
        actions: list[AddAction | RemoveAction] = []
        for part in parts:
            file, now_ms = self.files.path(part.transaction), int(time.time() * 1000)
            if not file.exists():
                return spi.Lost(f"{file} is gone")
            name, stats = str(file.relative_to(self.path)), f'{{"numRecords": {part.rows}}}'
            actions.append(AddAction(name, file.stat().st_size, {}, now_ms, True, stats))
        proof = [Transaction(self.sink_id, checkpoint)]
        once = CommitProperties(max_commit_retries=0, app_transactions=proof)
        columns = table.schema()
        try:
            table.create_write_transaction(actions, "append", columns, commit_properties=once)
        except (DeltaError, OSError) as error:
            return spi.Unknown(str(error))
        return spi.Committed()

    def read_committed_through(self) -> spi.CheckpointId:
        """Ask the table."""
        return spi.CheckpointId(DeltaTable(self.path).transaction_version(self.sink_id) or 0)

    def in_doubt(self) -> Sequence[spi.Committable]:
        """List files that the last version does not name."""
        return [file for file in self.files.list_files() if not self._is_visible(file)]

    def abort(self, committable: spi.Committable) -> spi.AbortOutcome:
        """Delete the file."""
        if self._is_visible(committable):
            return spi.AlreadyCommitted()
        self.files.delete(committable.transaction)
        return spi.Aborted()

    def close(self) -> None:
        """Hold nothing open."""

    def _is_visible(self, one: spi.Committable) -> bool:
        file = self.files.path(one.transaction)
        uris = DeltaTable(self.path).file_uris()
        return any(uri.endswith(f"/{file.parent.name}/{file.name}") for uri in uris)


def _files(path: str, sink_id: str) -> spi.CheckpointFiles:
    return spi.CheckpointFiles(Path(path, "onceflow", sink_id), sink_id, "parquet")
