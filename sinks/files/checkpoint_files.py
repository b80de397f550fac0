"""The files of whole checkpoints, for sinks whose target names files: a table format, a load job.

    <attempt>-<checkpoint>-<subtask>-<sequence>.<suffix>       whole and durable
    .<the same>.open                                           being written

Readers find a file only through the target, so a commit consists of naming it there. All processes
see the directory; renaming within it is atomic.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
from typing_extensions import override

from onceflow.core.errors import PreCommitFailed
from onceflow.core.protocol.committables import Committable
from onceflow.core.protocol.ids import GENESIS, CheckpointId, TransactionId
from onceflow.core.protocol.log.memory import Decided
from onceflow.core.protocol.log.target_records import TargetRecord
from onceflow.core.spi import CommitterContext, SinkWriter, TransactionNamer, WriterContext
from onceflow.core.storage.filesystems.file_location import FileLocation
from onceflow.core.storage.filesystems.local import make_durable_directory
from onceflow.sinks.files.layout import SinkPaths, claim, claims_through, read_claim
from onceflow.sinks.files.publication import open_files, sink_errors


def claim_in_files(
    url: str, context: CommitterContext, committed_through: CheckpointId = GENESIS
) -> None:
    """Claim the sink id below `url` for this attempt; no older attempt may write from then on.

    For `open` of a sink whose target has no transactions. The claim is a file in `_onceflow` of a
    directory or bucket, which only one process can create. A crash leaves at most the sink id
    claimed, which the next attempt claims in turn. A sink that commits whole checkpoints passes the
    last committed one. `record_in_files` then knows what was committed when each later attempt
    claimed.

    Raises:
        ConfigError: Another job owns the sink id.
        Fenced: This attempt or a newer one has claimed it.
        SinkError: The place cannot be reached now.
    """
    location = FileLocation.parse(url, publish="auto", options={})
    with sink_errors():
        claim(open_files(location), SinkPaths(context.sink_id), context, committed_through)


def record_in_files(
    url: str, context: CommitterContext, committed_through: CheckpointId
) -> TargetRecord:
    """Return the record of the claims below `url` and of the last whole committed checkpoint.

    For `target_record` of a sink that commits whole checkpoints and claims by `claim_in_files`.

    Raises:
        ConfigError: Another job owns the sink id.
        SinkError: The place cannot be reached now.
    """
    fs = open_files(FileLocation.parse(url, publish="auto", options={}))
    paths = SinkPaths(context.sink_id)
    with sink_errors():
        attempt = read_claim(fs, paths, context)
        claims = tuple(Decided(*decided) for decided in claims_through(fs, paths))
    return TargetRecord(context.sink_id, attempt, through=committed_through, claims=claims)


class OpenFile(Protocol):
    """A writer of one file, such as `pyarrow.parquet.ParquetWriter`."""

    def write_batch(self, batch: pa.RecordBatch, /) -> Any:
        """Add rows."""
        ...

    def close(self) -> Any:
        """End the file."""
        ...


@dataclass(frozen=True)
class CheckpointFiles:
    """The files of one sink id in `directory`. Any process."""

    directory: Path
    sink_id: str
    suffix: str

    def path(self, transaction: TransactionId) -> Path:
        """Return the path of the file with the rows of `transaction`."""
        ident = transaction
        name = f"{ident.attempt}-{ident.checkpoint}-{ident.subtask}-{ident.sequence}.{self.suffix}"
        return self.directory / name

    def list_files(self) -> Sequence[Committable]:
        """Return every transaction whose file is whole, in the order of their commits."""
        pattern = re.compile(rf"(\d+)-(\d+)-(\d+)-(\d+)\.{re.escape(self.suffix)}")
        paths = self.directory.iterdir() if self.directory.is_dir() else ()
        matches = filter(None, (pattern.fullmatch(path.name) for path in paths))
        transactions = [TransactionId(self.sink_id, *map(int, match.groups())) for match in matches]
        transactions.sort(
            key=lambda transaction: (
                transaction.checkpoint,
                transaction.attempt,
                transaction.subtask,
                transaction.sequence,
            )
        )
        return [Committable(transaction) for transaction in transactions]

    def open(self, context: CommitterContext) -> None:
        """Create the directory durably, and delete unfinished files of older attempts' writers."""
        make_durable_directory(str(self.directory), str(self.directory))
        for path in self.directory.glob(f".*.{self.suffix}.open"):
            if int(path.name[1:].partition("-")[0]) < context.attempt:
                path.unlink(missing_ok=True)

    def delete(self, transaction: TransactionId) -> None:
        """Delete the file of `transaction`, if there is one. Idempotent."""
        self.path(transaction).unlink(missing_ok=True)

    def writer(
        self, context: WriterContext, opened: Callable[[Path, pa.Schema], OpenFile]
    ) -> SinkWriter:
        """Return the writer of one subtask: one file per checkpoint, which `opened` begins."""
        return _FileWriter(self, context, opened)


class _FileWriter(SinkWriter):
    def __init__(
        self,
        files: CheckpointFiles,
        context: WriterContext,
        opened: Callable[[Path, pa.Schema], OpenFile],
    ) -> None:
        self._files, self._opened, self._rows = files, opened, 0
        self._names = TransactionNamer(context)
        self._open: tuple[TransactionId, OpenFile] | None = None

    @override
    def write(self, batch: pa.RecordBatch) -> None:
        if not batch.num_rows:
            return
        if self._open is None:
            name = self._names.next()
            self._open = name, self._opened(self._path_while_written(name), batch.schema)
        self._open[1].write_batch(batch)
        self._rows += batch.num_rows

    @override
    def pre_commit(self, checkpoint: CheckpointId) -> Sequence[Committable]:
        self._names.advance_past(checkpoint)
        if self._open is None:
            return ()
        (name, file), rows = self._open, self._rows
        self._open, self._rows = None, 0
        try:
            file.close()
            make_durable(self._path_while_written(name))
            self._path_while_written(name).rename(self._files.path(name))
            make_durable(self._files.directory)
        except OSError as error:
            raise PreCommitFailed(f"{self._files.path(name)} is not durable: {error}") from error
        return (Committable(name, rows),)

    @override
    def close(self) -> None:
        if self._open is not None:
            (name, file), self._open = self._open, None
            file.close()
            self._path_while_written(name).unlink(missing_ok=True)

    def _path_while_written(self, name: TransactionId) -> Path:
        path = self._files.path(name)
        return path.with_name(f".{path.name}.open")


def make_durable(path: Path) -> None:
    """Make a file or directory of a local disk survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
