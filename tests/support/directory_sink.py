"""A two-phase sink over a directory, for tests that need no database: one file a transaction.

    <directory>/prepared/<id>     pre-committed: survives any crash, belongs to nobody yet
    <directory>/committed/<id>    committed: `rename` is the commit

The id is the transaction's, with "~" for "/".
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from onceflow.core.protocol import committables
from onceflow.core.protocol.ids import CheckpointId, TransactionId
from onceflow.core.spi import Committer, CommitterContext, Sink, SinkWriter, WriterContext


@dataclass(frozen=True)
class DirectorySink(Sink):
    """Writes Arrow files into `directory`, each visible from its checkpoint's decision on."""

    directory: str

    def open(self, context: CommitterContext, schema: pa.Schema) -> None:
        for name in ("prepared", "committed"):
            (Path(self.directory) / name).mkdir(parents=True, exist_ok=True)

    def writer(self, context: WriterContext) -> SinkWriter:
        return _Writer(Path(self.directory), context)

    def committer(self, context: CommitterContext) -> Committer:
        return DirectoryCommitter(Path(self.directory), context.sink_id)

    def rows(self) -> list[dict[str, Any]]:
        """Return every committed row."""
        found: list[dict[str, Any]] = []
        for path in sorted((Path(self.directory) / "committed").iterdir()):
            with pa.ipc.open_file(path) as reader:
                found.extend(reader.read_all().to_pylist())
        return found

    def prepared(self) -> list[str]:
        """Return the ids of transactions in doubt."""
        return sorted(p.name for p in (Path(self.directory) / "prepared").iterdir())


class _Writer(SinkWriter):
    def __init__(self, directory: Path, context: WriterContext) -> None:
        self._directory = directory
        self._context = context
        self._batches: list[pa.RecordBatch] = []

    def write(self, batch: pa.RecordBatch) -> None:
        self._batches.append(batch)

    def pre_commit(self, checkpoint: CheckpointId) -> Sequence[committables.Committable]:
        if not self._batches:
            return ()
        context = self._context
        transaction = TransactionId(context.sink_id, context.attempt, checkpoint, context.subtask)
        rows = sum(batch.num_rows for batch in self._batches)
        handle, name = tempfile.mkstemp(dir=self._directory)
        os.close(handle)
        with pa.ipc.new_file(name, self._batches[0].schema) as writer:
            for batch in self._batches:
                writer.write_batch(batch)
        Path(name).rename(self._directory / "prepared" / _file(transaction))
        self._batches.clear()
        return (committables.Committable(transaction, rows),)

    def close(self) -> None:
        self._batches.clear()


class DirectoryCommitter(Committer):
    """Commits and lists what is prepared in the directory, for the sink with `sink_id`."""

    def __init__(self, directory: Path, sink_id: str) -> None:
        self.prepared = directory / "prepared"
        self._committed = directory / "committed"
        self.sink_id = sink_id

    def commit(self, committable: committables.Committable) -> committables.CommitOutcome:
        name = _file(committable.transaction)
        try:
            (self.prepared / name).rename(self._committed / name)
        except FileNotFoundError:
            if (self._committed / name).exists():
                return committables.AlreadyCommitted()
            return committables.Lost(f"{name} is neither prepared nor committed")
        return committables.Committed()

    def abort(self, committable: committables.Committable) -> committables.AbortOutcome:
        name = _file(committable.transaction)
        if (self._committed / name).exists():
            return committables.AlreadyCommitted()
        (self.prepared / name).unlink(missing_ok=True)
        return committables.Aborted()

    def in_doubt(self) -> Sequence[committables.Committable]:
        found = (TransactionId.parse(p.name.replace("~", "/")) for p in self.prepared.iterdir())
        return [
            committables.Committable(t)
            for t in found
            if t is not None and t.sink_id == self.sink_id
        ]

    def close(self) -> None:
        pass


def _file(transaction: TransactionId) -> str:
    return str(transaction).replace("/", "~")
