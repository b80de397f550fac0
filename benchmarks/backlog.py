"""Measures how long checkpoints take while rows wait, with aligned and with unaligned barriers.

No server and no Spark: generated payments, keyed by account, into a sink that takes `pause_s` for a
batch, so that all channels before it are full. A checkpoint begins when they are.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
from typing_extensions import override

from benchmarks.discarding_sink import DiscardingSink
from benchmarks.watch import Watch
from onceflow import Checkpointing, LocalProcesses, NoRestart, Pipeline, RuntimeSettings, count
from onceflow.core.protocol.committables import Committable
from onceflow.core.protocol.ids import CheckpointId
from onceflow.core.spi import SinkWriter, WriterContext
from onceflow.sources.datagen import DatagenSource

PAUSE_S = 0.9
PARALLELISM = 2
CHANNEL_BATCHES = 16
OVERTAKING_COUNT = 10
_BATCH_ROWS = 1_000


@dataclass(frozen=True, slots=True)
class BacklogCheckpoints:
    """Seconds from the trigger to the decision, of checkpoints that began with full channels."""

    backlog_s: float
    """What the sink takes for the rows that wait before one of its subtasks."""
    aligned_s: float
    overtaking_s: tuple[float, ...]
    in_flight_bytes: int
    """Of the largest of those that overtook."""


def backlog_checkpoints(
    directory: Path, *, pause_s: float = PAUSE_S, say: Callable[[str], None]
) -> BacklogCheckpoints:
    """Take one checkpoint whose barriers wait, and several whose barriers overtake."""
    (aligned,) = _taken(directory / "aligned", pause_s, 1, unaligned=False)
    say(f"barriers that wait: {aligned[0]:.1f} s")
    overtaking = _taken(directory / "overtaking", pause_s, OVERTAKING_COUNT, unaligned=True)
    say(f"barriers that overtake: {max(seconds for seconds, _ in overtaking):.1f} s at most")
    return BacklogCheckpoints(
        round(pause_s * CHANNEL_BATCHES * PARALLELISM, 3),
        aligned[0],
        tuple(seconds for seconds, _ in overtaking),
        max(size_bytes for _, size_bytes in overtaking),
    )


def _taken(
    directory: Path, pause_s: float, checkpoints: int, *, unaligned: bool
) -> list[tuple[float, int]]:
    """Return seconds and bytes in flight of each checkpoint of a job of its own."""
    directory.mkdir()
    pipeline = Pipeline(
        LocalProcesses(directory / "logs"),
        name="backlog",
        parallelism=PARALLELISM,
        checkpointing=Checkpointing(
            storage=str(directory / "checkpoints"), interval=None, unaligned=unaligned
        ),
        restart=NoRestart(),
        settings=RuntimeSettings(channel_batches=CHANNEL_BATCHES, heartbeat_interval_s=0.1),
    )
    source = DatagenSource(rows=None, splits_count=PARALLELISM, batch_rows=_BATCH_ROWS)
    payments = pipeline.read(source, uid="payments")
    counted = payments.key_by("account").running(n=count(), uid="counted")
    counted.write(HeldUpSink(str(directory), pause_s), uid="held-up")
    job = pipeline.start()
    watch = Watch(job)
    try:
        # Each batch that is read becomes one for every channel of its sender.
        waiting_rows = PARALLELISM * CHANNEL_BATCHES * _BATCH_ROWS
        watch.until(lambda status: status.records_in >= waiting_rows)
        for done in range(checkpoints):
            job.checkpoint()
            watch.until(lambda status, done=done: status.checkpoints_completed > done)  # type: ignore[misc]
        history = job.status().history
    finally:
        job.cancel()
    return [(round(one.duration_ms / 1000, 3), one.in_flight_bytes) for one in history]


@dataclass(frozen=True)
class HeldUpSink(DiscardingSink):
    """Takes `pause_s` for each batch."""

    pause_s: float = 0.0

    @override
    def writer(self, context: WriterContext) -> SinkWriter:
        return _HeldUpWriter(super().writer(context), self.pause_s)


class _HeldUpWriter(SinkWriter):
    def __init__(self, inner: SinkWriter, pause_s: float) -> None:
        self._inner = inner
        self._pause_s = pause_s

    def write(self, batch: pa.RecordBatch) -> None:
        time.sleep(self._pause_s)
        self._inner.write(batch)

    def pre_commit(self, checkpoint: CheckpointId) -> Sequence[Committable]:
        return self._inner.pre_commit(checkpoint)

    def close(self) -> None:
        self._inner.close()
