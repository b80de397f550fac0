"""A whole job around one sink: the real engine, with driver and slots as processes.

Each attempt is a new driver that does not restart. So any of its processes may be killed, and the
next attempt may have another parallelism. The driver forks the host of its slots before it opens
any resource.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from onceflow.core.api.pipeline import Pipeline
from onceflow.core.crash_points import VARIABLE, CrashPoint
from onceflow.core.errors import SlotLost
from onceflow.core.protocol.log.rules import LogView
from onceflow.core.protocol.restart import NoRestart
from onceflow.core.runtime.cluster.local_processes import LocalProcesses, fork_own_host
from onceflow.core.runtime.cluster.process_host import Link
from onceflow.core.runtime.driver.source_splits import splits_of
from onceflow.core.settings.pipeline_settings import Checkpointing, RuntimeSettings
from onceflow.core.spi import EndOfInput, ReaderContext, Sink, Source, SourceReader, Split
from onceflow.integration.conformance.harness import SERVER_PATIENCE_S
from onceflow.integration.conformance.sink_job import JOB, UID

_ROWS_UID = "rows"
_SPLITS = 3
"""The number of splits. It must be at least the highest tested parallelism."""
_BATCH_ROWS = 7


@dataclass(frozen=True, slots=True)
class Work:
    """The parameters that all attempts of a job share."""

    sink: Sink
    sink_id: str
    storage: str
    """The root of checkpoint storage."""
    rows: pa.RecordBatch
    rows_a_checkpoint: int


@dataclass(frozen=True, slots=True)
class KillPlan:
    """The parallelism and the crash of one attempt."""

    parallelism: int
    crash: CrashPoint | None = None
    crash_at: int = 1
    """The number of the attempt's checkpoint at which the crash point is armed, from 1."""


def run_attempt(link: Link, work: Work, plan: KillPlan) -> bool:
    """Run the driver of one attempt. Return True if all rows are committed, False if a slot died.

    Runs in a new process without open resources.
    """
    # Fork before any thread starts. Slots are forks of this process, with all modules imported.
    fork_own_host()
    pipeline = Pipeline(
        LocalProcesses(),
        name=JOB,
        parallelism=plan.parallelism,
        # Checkpoint as often as possible, so that an attempt reaches its crash point within a
        # second.
        checkpointing=Checkpointing(storage=work.storage, interval=0.01, retained=2),
        restart=NoRestart(),
        settings=RuntimeSettings(commit_deadline_s=SERVER_PATIENCE_S, poll_timeout_s=0.002),
    )
    rows = pipeline.read(_Rows(work.rows, work.rows_a_checkpoint, plan), uid=_ROWS_UID)
    rows.write(work.sink, uid=UID, sink_id=work.sink_id)
    job = pipeline.start()
    link.send("started")
    try:
        job.wait()
    except SlotLost:
        return False
    return True


def find_decided_rows(view: LogView) -> set[int]:
    """Return the indexes of the rows that the log has decided."""
    splits = splits_of(view.completed[-1], _ROWS_UID) if view.decided else None
    return {
        at * _SPLITS + int(split.id) for split in splits or () for at in range(int(split.position))
    }


@dataclass(frozen=True)
class _Rows(Source):
    """The source of the kit's rows. Row i belongs to split i % 3."""

    rows: pa.RecordBatch
    rows_a_checkpoint: int
    plan: KillPlan

    @property
    def schema(self) -> pa.Schema:
        return self.rows.schema

    @property
    def bounded(self) -> bool:
        return True

    def splits(self) -> Sequence[Split]:
        return [Split(str(number), b"0") for number in range(_SPLITS)]

    def reader(self, splits: Sequence[Split], context: ReaderContext) -> SourceReader:
        # Only one subtask arms the crash point, so that its checkpoint number is well defined.
        arms = context.subtask == 0 and self.plan.crash is not None
        return _Reader(self, splits, self.plan.crash_at if arms else 0)


class _Reader(SourceReader):
    """A reader that emits a share of each split, and the next share after a snapshot.

    So there are rows for several checkpoints, even on a fast machine.
    """

    def __init__(self, source: _Rows, splits: Sequence[Split], arms_at: int) -> None:
        self._source = source
        self._at = {int(split.id): int(split.position) for split in splits}
        self._arms_at = arms_at
        self._checkpoint = 1
        self._begin()

    def poll(self, timeout_s: float) -> pa.RecordBatch | EndOfInput | None:
        rows = self._source.rows
        for split, at in self._at.items():
            taken = range(split, rows.num_rows, _SPLITS)[
                at : min(at + _BATCH_ROWS, self._to[split])
            ]
            if taken:
                self._at[split] += len(taken)
                return rows.take(pa.array(taken))
        if all(self._at[split] >= len(range(split, rows.num_rows, _SPLITS)) for split in self._at):
            return EndOfInput()
        time.sleep(timeout_s)
        return None

    def snapshot(self) -> Sequence[Split]:
        splits = [Split(str(split), str(at).encode()) for split, at in self._at.items()]
        self._checkpoint += 1
        self._begin()
        return splits

    def close(self) -> None:
        pass

    def _begin(self) -> None:
        """Release the rows of the next checkpoint. Arm the crash point if it is the chosen one."""
        share = self._source.rows_a_checkpoint // _SPLITS
        self._to = {split: at + share for split, at in self._at.items()}
        if self._checkpoint == self._arms_at:
            assert self._source.plan.crash is not None
            # Arm after the previous snapshot, so that the next process to reach the point dies in
            # the chosen checkpoint.
            (Path(os.environ[VARIABLE]) / self._source.plan.crash).touch()
