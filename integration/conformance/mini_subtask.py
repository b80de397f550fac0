"""A subtask of the mini job, and what it and its driver say to each other."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, TypeAlias

import pyarrow as pa

from onceflow.core.crash_points import reach
from onceflow.core.protocol.commits import CommitQueue, CommitRetryPolicy
from onceflow.core.protocol.committables import Committable
from onceflow.core.protocol.ids import CheckpointId
from onceflow.core.runtime.slot.commits import CommitWorker
from onceflow.core.spi import CommitterContext, Sink, WriterContext
from onceflow.integration.conformance.clause import told

ANSWER_S = 60.0
"""How long driver and subtasks wait for each other."""
_BATCH_ROWS = 7
SubtaskPipe: TypeAlias = "Connection[Any, Any]"


@dataclass(frozen=True, slots=True)
class Work:
    """What is the same for every attempt of a job."""

    sink: Sink
    sink_id: str
    storage: str
    """Root of checkpoint storage."""
    rows: pa.RecordBatch
    rows_a_checkpoint: int


@dataclass(frozen=True, slots=True)
class Start:
    """The first thing a subtask hears."""

    writer: WriterContext
    committer: CommitterContext


@dataclass(frozen=True, slots=True)
class Barrier:
    """Write the rows `first` to `end`, your share of them, and pre-commit."""

    checkpoint: CheckpointId
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class Complete:
    """The checkpoint is decided."""

    checkpoint: CheckpointId
    retain_ledger_from: CheckpointId


@dataclass(frozen=True, slots=True)
class Ack:
    """Pre-committed; all that is pending."""

    checkpoint: CheckpointId
    pending: tuple[Committable, ...]


@dataclass(frozen=True, slots=True)
class Through:
    """All is committed up to here."""

    checkpoint: CheckpointId


@dataclass(frozen=True, slots=True)
class Failed:
    """The subtask ends with an error."""

    text: str


class Subtask:
    """Writes and commits: the main thread writes, the commit worker's thread commits."""

    def __init__(self, work: Work, pipe: SubtaskPipe) -> None:
        self._work = work
        self._pipe = pipe
        self._lock = threading.Lock()

    def run(self) -> None:
        """Do what the driver says until it is gone."""
        start = self._pipe.recv()
        writer = self._work.sink.writer(start.writer)
        worker = CommitWorker(
            "conformance",
            CommitQueue(CommitRetryPolicy(deadline_s=ANSWER_S / 2)),
            self._work.sink.committer(start.committer),
            committed=lambda checkpoint, _: self._say(Through(checkpoint)),
            failed=lambda error: self._say(Failed(told(error))),
        )
        while True:
            match self._pipe.recv():
                case Barrier(checkpoint, first, end):
                    share = range(
                        first + (start.writer.subtask - first) % start.writer.parallelism,
                        end,
                        start.writer.parallelism,
                    )
                    for at in range(0, len(share), _BATCH_ROWS):
                        writer.write(self._work.rows.take(pa.array(share[at : at + _BATCH_ROWS])))
                        reach("write")
                    committables = writer.pre_commits(checkpoint)
                    reach("prepared")
                    self._say(Ack(checkpoint, worker.pre_committed(checkpoint, committables)))
                    reach("acked")
                case Complete(checkpoint, needed):
                    worker.completed(checkpoint, needed)
                case message:
                    raise TypeError(f"the driver says {message}")

    def _say(self, message: object) -> None:
        with self._lock:
            self._pipe.send(message)
