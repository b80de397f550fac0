"""A directory sink that takes its time for each batch, until it is told to hurry."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
from tests.support.directory_sink import DirectorySink

from onceflow.core.protocol.committables import Committable
from onceflow.core.protocol.ids import CheckpointId
from onceflow.core.spi import SinkWriter, WriterContext


@dataclass(frozen=True)
class ThrottledSink(DirectorySink):
    """Writing a batch takes `pause_s`, so that rows wait in every channel before it."""

    pause_s: float = 0.02

    def writer(self, context: WriterContext) -> SinkWriter:
        return _ThrottledWriter(super().writer(context), self)

    def hurry(self) -> None:
        """Take no time from now on."""
        self._hurry.touch()

    @property
    def _hurry(self) -> Path:
        return Path(self.directory) / "hurry"

    def pause(self) -> None:
        if not self._hurry.exists():
            time.sleep(self.pause_s)


class _ThrottledWriter(SinkWriter):
    def __init__(self, inner: SinkWriter, sink: ThrottledSink) -> None:
        self._inner = inner
        self._sink = sink

    def write(self, batch: pa.RecordBatch) -> None:
        self._sink.pause()
        self._inner.write(batch)

    def pre_commit(self, checkpoint: CheckpointId) -> Sequence[Committable]:
        return self._inner.pre_commit(checkpoint)

    def close(self) -> None:
        self._inner.close()
