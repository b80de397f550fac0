"""Directory sinks whose first pre-commits fail, or whose pre-commits or commits take long."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
from tests.support.directory_sink import DirectoryCommitter, DirectorySink

from onceflow.core.errors import PreCommitFailed
from onceflow.core.protocol.committables import CommitOutcome, Committable
from onceflow.core.protocol.ids import CheckpointId
from onceflow.core.spi import Committer, CommitterContext, SinkWriter, WriterContext


@dataclass(frozen=True)
class FailingSink(DirectorySink):
    """The first pre-commit of the job raises; the file `failed` tells that it has."""

    def writer(self, context: WriterContext) -> SinkWriter:
        return _HinderedWriter(super().writer(context), self._fail)

    def _fail(self) -> None:
        try:
            (Path(self.directory) / "failed").touch(exist_ok=False)
        except FileExistsError:
            return
        raise PreCommitFailed("the first pre-commit fails")


@dataclass(frozen=True)
class SlowSink(DirectorySink):
    """Every pre-commit waits until the file `go on` is there."""

    def writer(self, context: WriterContext) -> SinkWriter:
        return _HinderedWriter(super().writer(context), self._wait)

    def go_on(self) -> None:
        """Let every pre-commit through."""
        (Path(self.directory) / "go on").touch()

    def _wait(self) -> None:
        _wait_for(Path(self.directory) / "go on")


@dataclass(frozen=True)
class SlowlyCommittingSink(DirectorySink):
    """Every commit waits until the file `go on` is there."""

    def committer(self, context: CommitterContext) -> Committer:
        return _SlowCommitter(Path(self.directory), context.sink_id)

    def go_on(self) -> None:
        """Let every commit through."""
        (Path(self.directory) / "go on").touch()


class _SlowCommitter(DirectoryCommitter):
    def commit(self, committable: Committable) -> CommitOutcome:
        _wait_for(self.prepared.parent / "go on")
        return super().commit(committable)


def _wait_for(file: Path) -> None:
    deadline = time.monotonic() + 90
    while not file.exists() and time.monotonic() < deadline:
        time.sleep(0.01)


class _HinderedWriter(SinkWriter):
    def __init__(self, inner: SinkWriter, before: Callable[[], None]) -> None:
        self._inner = inner
        self._before = before

    def write(self, batch: pa.RecordBatch) -> None:
        self._inner.write(batch)

    def pre_commit(self, checkpoint: CheckpointId) -> Sequence[Committable]:
        self._before()
        return self._inner.pre_commit(checkpoint)

    def close(self) -> None:
        self._inner.close()
