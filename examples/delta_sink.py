"""Rows to a Delta Lake table, exactly once: one version of the table a checkpoint.

Writers put Parquet files into the table's directory under their final names, and no reader sees one
before a version names it. The driver makes one version of all files of a checkpoint, with the
checkpoint as Delta's own ordered proof (`txn`: an application, and a number that only rises).
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import CommitProperties, DeltaTable, Transaction
from deltalake.exceptions import DeltaError
from deltalake.transaction import AddAction, RemoveAction

from onceflow import connectors as spi


@dataclass(frozen=True)
class DeltaSink(spi.GlobalSink):
    """Appends to the table in directory `path`, which all executors share."""

    path: str

    def validate(self, context: spi.CommitterContext, schema: pa.Schema) -> None:
        """Compare the columns, where there is a table."""
        if DeltaTable.is_deltatable(self.path):
            found = pa.schema(DeltaTable(self.path).schema().to_arrow())
            if (found.names, found.types) != (schema.names, schema.types):
                raise spi.ConfigError(f"{self.path} has the columns {found}, the rows {schema}")

    def open(self, context: spi.CommitterContext, schema: pa.Schema) -> None:
        """Create the table, and claim the sink id by a file that one process can create."""
        self.validate(context, schema)
        DeltaTable.create(self.path, schema, mode="ignore")
        files, claims = (
            _files(self.path, context.sink_id),
            Path(self.path, "_onceflow", context.sink_id),
        )
        for directory in (files, claims):
            directory.mkdir(parents=True, exist_ok=True)
        held = {int(claim.name): claim.read_text() for claim in claims.iterdir()}
        if others := set(held.values()) - {context.log_id}:
            raise spi.ConfigError(f"sink id {context.sink_id} belongs to the job with log {others}")
        with NamedTemporaryFile("w", dir=claims.parent) as mine:
            mine.write(context.log_id)
            mine.flush()
            try:
                if max(held, default=0) > context.attempt:
                    raise FileExistsError(f"attempt {max(held)} is newer")
                os.link(mine.name, claims / str(context.attempt))
            except FileExistsError as error:
                raise spi.Fenced(f"{context.sink_id}, attempt {context.attempt}: {error}") from None
        for path in files.iterdir():
            if not _is_whole(path):
                path.unlink(missing_ok=True)

    def writer(self, context: spi.WriterContext) -> spi.SinkWriter:
        """Return a writer of a file a checkpoint."""
        return _Writer(_files(self.path, context.sink_id), context)

    def global_committer(self, context: spi.CommitterContext) -> spi.GlobalCommitter:
        """Return what makes versions."""
        return DeltaCommitter(self.path, context.sink_id)


class _Writer(spi.SinkWriter):
    def __init__(self, files: Path, context: spi.WriterContext) -> None:
        self._files, self._names, self._rows = files, spi.TransactionNamer(context), 0
        self._open: tuple[spi.TransactionId, pq.ParquetWriter] | None = None

    def write(self, batch: pa.RecordBatch) -> None:
        if batch.num_rows and self._open is None:
            name = self._names.next()
            self._open = name, pq.ParquetWriter(_file(self._files, name), batch.schema)
        if self._open is not None:
            self._open[1].write_table(pa.Table.from_batches([batch]))
            self._rows += batch.num_rows

    def pre_commit(self, checkpoint: spi.CheckpointId) -> spi.Committable | None:
        self._names.pre_committed(checkpoint)
        if self._open is None:
            return None
        (name, writer), rows = self._open, self._rows
        self._open, self._rows = None, 0
        writer.close()
        try:
            for path in (_file(self._files, name), self._files):
                handle = os.open(path, os.O_RDONLY)
                os.fsync(handle)
                os.close(handle)
        except OSError as error:
            raise spi.PreCommitFailed(f"{name} is not durable: {error}") from error
        return spi.Committable(name, rows)

    def close(self) -> None:
        if self._open is not None:
            (name, writer), self._open = self._open, None
            writer.close()
            _file(self._files, name).unlink(missing_ok=True)


class DeltaCommitter(spi.GlobalCommitter):
    """Makes versions of the table at `path`; the sink id is Delta's application."""

    def __init__(self, path: str, sink_id: str) -> None:
        self.path, self.sink_id = path, sink_id

    def commit(
        self, checkpoint: spi.CheckpointId, committables: Sequence[spi.Committable]
    ) -> spi.CommitOutcome:
        """Make a version of all files, unless the table has one of this checkpoint or later."""
        table = DeltaTable(self.path)
        if (table.transaction_version(self.sink_id) or 0) >= checkpoint:
            return spi.AlreadyCommitted()
        return self.append(table, checkpoint, committables)

    def append(
        self,
        table: DeltaTable,
        checkpoint: spi.CheckpointId,
        committables: Sequence[spi.Committable],
    ) -> spi.CommitOutcome:
        """Make the version after that of `table`, or none if somebody else has made it."""
        actions: list[AddAction | RemoveAction] = []
        for one in committables:
            file, now_ms = self.file(one), int(time.time() * 1000)
            if not file.exists():
                return spi.Lost(f"{file} is gone")
            name, size, stats = str(file.relative_to(self.path)), file.stat().st_size, one.rows
            actions.append(AddAction(name, size, {}, now_ms, True, f'{{"numRecords": {stats}}}'))
        proof = [Transaction(self.sink_id, checkpoint)]
        once = CommitProperties(max_commit_retries=0, app_transactions=proof)
        try:
            table.create_write_transaction(
                actions, "append", table.schema(), commit_properties=once
            )
        except (DeltaError, OSError) as error:
            return spi.Unknown(str(error))
        return spi.Committed()

    def committed_through(self) -> spi.CheckpointId:
        """Ask the table."""
        return spi.CheckpointId(DeltaTable(self.path).transaction_version(self.sink_id) or 0)

    def in_doubt(self) -> Sequence[spi.Committable]:
        """List whole files that the last version does not name."""
        files, visible = _files(self.path, self.sink_id), self._visible()
        names = [path for path in files.iterdir() if _is_whole(path) and path.name not in visible]
        numbers = [map(int, path.stem.split("-")) for path in names]
        return [spi.Committable(spi.TransactionId(self.sink_id, *four)) for four in numbers]

    def abort(self, committable: spi.Committable) -> spi.AbortOutcome:
        """Delete the file."""
        if self.file(committable).name in self._visible():
            return spi.AlreadyCommitted()
        self.file(committable).unlink(missing_ok=True)
        return spi.Aborted()

    def close(self) -> None:
        """Hold nothing open."""

    def file(self, committable: spi.Committable) -> Path:
        """Return where its rows are."""
        return _file(_files(self.path, self.sink_id), committable.transaction)

    def _visible(self) -> set[str]:
        uris = map(Path, DeltaTable(self.path).file_uris())
        return {uri.name for uri in uris if uri.parent.name == self.sink_id}


def _files(path: str, sink_id: str) -> Path:
    return Path(path, "onceflow", sink_id)


def _file(files: Path, one: spi.TransactionId) -> Path:
    return files / f"{one.attempt}-{one.checkpoint}-{one.subtask}-{one.sequence}.parquet"


def _is_whole(path: Path) -> bool:
    """Whether its writer has closed it: Parquet ends with these bytes."""
    with path.open("rb") as file:
        file.seek(-min(4, path.stat().st_size), os.SEEK_END)
        return file.read() == b"PAR1"
