"""A sink for a target that can prepare: a rename in a directory commits a whole Arrow file.

A writer moves a durable file to `prepared`, where no reader looks. A committer renames it to
`committed`. The file there is its own proof, as long as nobody deletes it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from onceflow import connectors as spi


@dataclass(frozen=True)
class RenameSink(spi.Sink):
    """Writes Arrow files to the directory `path`. It has settings alone, because it is pickled."""

    path: str

    def open(self, context: spi.CommitterContext, schema: pa.Schema) -> None:
        """Claim the attempt by a file that only one process can create (rule 7)."""
        directory = Path(self.path)
        for part in ("fresh", "prepared", "committed", "owners"):
            (directory / part).mkdir(parents=True, exist_ok=True)
        for owner in (directory / "owners").iterdir():
            sink_id, log_id, attempt = owner.name.split("~")
            if sink_id == context.sink_id and log_id != context.log_id:
                raise spi.Fenced(f"{sink_id} belongs to the job of log {log_id}: use another id")
            if sink_id == context.sink_id and int(attempt) >= context.attempt:
                raise spi.Fenced(f"attempt {context.attempt} of {sink_id}: {attempt} has begun")
        claim = f"{context.sink_id}~{context.log_id}~{context.attempt}"
        (directory / "owners" / claim).touch(exist_ok=False)
        _sync(directory / "owners")

    def writer(self, context: spi.WriterContext) -> spi.SinkWriter:
        """Return the writer of one subtask."""
        return RenameWriter(Path(self.path), context)

    def committer(self, context: spi.CommitterContext) -> spi.Committer:
        """Return a committer, for any process."""
        return RenameCommitter(Path(self.path), context.sink_id)


class RenameWriter(spi.SinkWriter):
    """Keeps the rows of a checkpoint in memory, and writes them to one file at the barrier."""

    def __init__(self, directory: Path, context: spi.WriterContext) -> None:
        self._directory, self._context = directory, context
        self._batches: list[pa.RecordBatch] = []

    def write(self, batch: pa.RecordBatch) -> None:
        """Take rows."""
        if batch.num_rows:
            self._batches.append(batch)

    def pre_commit(self, checkpoint: spi.CheckpointId) -> Sequence[spi.Committable]:
        """Make the rows durable, and keep them invisible."""
        if not self._batches:
            return ()  # nothing to commit is no error
        transaction = self._context.transaction(checkpoint)  # rule 6
        name = str(transaction).replace("/", "~")
        fresh = self._directory / "fresh" / name
        with pa.ipc.new_file(str(fresh), self._batches[0].schema) as file:
            for batch in self._batches:
                file.write_batch(batch)
        _sync(fresh)
        _move(fresh, self._directory / "prepared" / name)  # a whole file, or none
        rows = sum(batch.num_rows for batch in self._batches)
        self._batches = []
        return (spi.Committable(transaction, rows),)

    def close(self) -> None:
        """Drop rows that are not pre-committed. Pre-committed files stay."""
        self._batches = []


class RenameCommitter(spi.Committer):
    """Commits and aborts the files of one sink id."""

    def __init__(self, directory: Path, sink_id: str) -> None:
        self._prepared, self._committed = directory / "prepared", directory / "committed"
        self._sink_id = sink_id

    def commit(self, committable: spi.Committable) -> spi.CommitOutcome:
        """Rename the file; look for the prepared file first, then for the proof (rule 4)."""
        name = str(committable.transaction).replace("/", "~")
        try:
            _move(self._prepared / name, self._committed / name)
        except FileNotFoundError:
            if (self._committed / name).exists():
                _sync(self._committed)  # the process that moved it may have died before its fsync
                return spi.AlreadyCommitted()
            return spi.Lost(f"{name} is neither prepared nor committed: it was deleted")
        return spi.Committed()

    def abort(self, committable: spi.Committable) -> spi.AbortOutcome:
        """Delete the prepared file."""
        name = str(committable.transaction).replace("/", "~")
        (self._prepared / name).unlink(missing_ok=True)
        is_committed = (self._committed / name).exists()
        return spi.AlreadyCommitted() if is_committed else spi.Aborted()

    def in_doubt(self) -> Sequence[spi.Committable]:
        """Return the prepared files of exactly this sink id (rule 5)."""
        names = (path.name.replace("~", "/") for path in self._prepared.iterdir())
        transactions = (spi.TransactionId.parse(name) for name in names)
        return [spi.Committable(t) for t in transactions if t and t.sink_id == self._sink_id]

    def close(self) -> None:
        """Do nothing: no resource is open."""


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def _move(source: Path, target: Path) -> None:
    source.rename(target)
    _sync(target.parent)  # rule 1: the name must be durable, too
