"""One sink without a runtime around it: its writer on this thread, its committer on another.

As in a slot: a checkpoint is committed while the rows of the next one are written, and a commit is
begun when the one before has ended. There is no decision to wait for, so that what is measured is
the sink's own work.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from benchmarks.sinks.rows import SCHEMA
from benchmarks.stage import BenchmarkError
from onceflow.core.commit.queue import CommitRetryPolicy
from onceflow.core.protocol.committables import CommitOutcome, Committable, Committed, RetryLater
from onceflow.core.protocol.ids import AttemptId, CheckpointId
from onceflow.core.spi import Committer, CommitterContext, GlobalCommitter, Sink, WriterContext
from onceflow.core.storage import FileSystemStorage

_RETRIES = CommitRetryPolicy()
_JOB, _UID, _SINK_ID = "bench", "ledger", "bench.ledger"


@dataclass(frozen=True, slots=True)
class Loaded:
    """The time that a number of rows took, whichever way they were written."""

    rows: int
    seconds: float
    cpu_s: float
    """Of this process: encoding, sending and waiting, all threads."""

    @property
    def rows_per_second(self) -> float:
        """Rows over seconds."""
        return self.rows / self.seconds


@dataclass(frozen=True, slots=True)
class Alone(Loaded):
    """The time of a sink, from the first row to the last commit."""

    pre_commit_ms: tuple[float, ...]
    """Of each checkpoint: what the barrier waits for."""
    commit_ms: tuple[float, ...]
    """Of each checkpoint: from the decision to rows that everybody sees."""


class Clock:
    """Wall and CPU time of a block of this process."""

    def __enter__(self) -> Clock:
        self._cpu_s = time.process_time()
        self._wall_s = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = time.perf_counter() - self._wall_s
        self.cpu_s = time.process_time() - self._cpu_s


def write_alone(
    sink: Sink, batches: Sequence[pa.RecordBatch], *, barrier_rows: int, directory: Path
) -> Alone:
    """Return what it took to write and commit `batches`, with a barrier every `barrier_rows`.

    Args:
        sink: Its place is empty; it may create it.
        batches: What is written, in this order.
        barrier_rows: At least; a batch is never cut.
        directory: For rows that are staged; new and empty.

    Raises:
        BenchmarkError: A commit did not simply succeed.
        OnceflowError: The sink failed.
    """
    storage = FileSystemStorage(str(directory)).open(_JOB)
    staging = storage.staging(_SINK_ID)
    context = CommitterContext(_JOB, _UID, _SINK_ID, AttemptId(1), "bench", staging)
    sink.open(context, SCHEMA)
    writer = sink.writer(
        WriterContext(
            _JOB,
            _UID,
            _SINK_ID,
            subtask=0,
            parallelism=1,
            attempt=AttemptId(1),
            first_checkpoint=CheckpointId(1),
            schema=SCHEMA,
            staging=staging,
        )
    )
    committer = sink.committer(context)
    pre_commit_ms: list[float] = []
    commits: list[Future[float]] = []
    try:
        with ThreadPoolExecutor(1) as commit_thread, Clock() as clock:
            for checkpoint, part in enumerate(_checkpoints(batches, barrier_rows), start=1):
                for batch in part:
                    writer.write(batch)
                began = time.perf_counter()
                committables = writer.pre_commit(CheckpointId(checkpoint))
                pre_commit_ms.append((time.perf_counter() - began) * 1e3)
                commits += [
                    commit_thread.submit(_commit_ms, committer, committable)
                    for committable in committables
                ]
            commit_ms = tuple(commit.result() for commit in commits)
    finally:
        writer.close()
        committer.close()
    rows = sum(batch.num_rows for batch in batches)
    return Alone(rows, clock.seconds, clock.cpu_s, tuple(pre_commit_ms), commit_ms)


def _checkpoints(
    batches: Sequence[pa.RecordBatch], barrier_rows: int
) -> Iterator[list[pa.RecordBatch]]:
    part: list[pa.RecordBatch] = []
    for batch in batches:
        part.append(batch)
        if sum(one.num_rows for one in part) >= barrier_rows:
            yield part
            part = []
    if part:
        yield part


def _commit_ms(committer: Committer | GlobalCommitter, committable: Committable) -> float:
    began = time.perf_counter()
    tries = 1
    # As in a slot: tried again a moment later. The wait is part of the latency.
    while isinstance(outcome := _commit(committer, committable), RetryLater):
        if time.perf_counter() - began > _RETRIES.deadline_s:
            break
        time.sleep(_RETRIES.delay_s(tries))
        tries += 1
    milliseconds = (time.perf_counter() - began) * 1e3
    if not isinstance(outcome, Committed):
        raise BenchmarkError(f"{committable.transaction} ended as {outcome}")
    return milliseconds


def _commit(committer: Committer | GlobalCommitter, committable: Committable) -> CommitOutcome:
    if isinstance(committer, GlobalCommitter):
        return committer.commit_checkpoint(committable.checkpoint, [committable])
    return committer.commit(committable)
