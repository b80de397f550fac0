"""A whole job around a sink or a source: the real engine, with driver and slots as processes.

Each attempt is a new driver that does not restart. So any of its processes may be killed, and the
next attempt may have another parallelism. The driver forks the host of its slots before it opens
any resource.
"""

from __future__ import annotations

import os
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from onceflow.core.api.pipeline import Pipeline
from onceflow.core.crash_points import VARIABLE, CrashPoint
from onceflow.core.errors import SlotLost
from onceflow.core.protocol.log.rules import LogView
from onceflow.core.protocol.restart import NoRestart
from onceflow.core.runtime.cluster.local_processes import LocalProcesses, fork_own_host
from onceflow.core.runtime.cluster.process_host import Link, ProcessKilled
from onceflow.core.runtime.driver.source_splits import splits_of
from onceflow.core.settings.pipeline_settings import Checkpointing, RuntimeSettings
from onceflow.core.spi import EndOfInput, ReaderContext, Sink, Source, SourceReader, Split
from onceflow.integration.conformance.harness import SERVER_PATIENCE_S
from onceflow.integration.conformance.processes import ChildFailed, Processes
from onceflow.integration.conformance.sink_job import JOB, UID
from onceflow.integration.conformance.target import Violation
from onceflow.integration.traces import rules
from onceflow.integration.traces.events import read_trace

_ROWS_UID = "rows"
_SPLITS = 3
"""The number of splits. It must be at least the highest tested parallelism."""
_BATCH_ROWS = 7


@dataclass(frozen=True, slots=True)
class JobParameters:
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


def run_attempt(link: Link, work: JobParameters, plan: KillPlan) -> bool:
    """Run the driver of one attempt. Return True if all rows are committed, False if a slot died.

    Runs in a new process without open resources.
    """
    pipeline = make_pipeline(work.storage, plan.parallelism)
    rows = pipeline.read(_Rows(work.rows, work.rows_a_checkpoint, plan), uid=_ROWS_UID)
    rows.write(work.sink, uid=UID, sink_id=work.sink_id)
    job = pipeline.start()
    link.send("started")
    try:
        job.wait()
    except SlotLost:
        return False
    return True


def make_pipeline(storage: str, parallelism: int) -> Pipeline:
    """Return the empty pipeline of one attempt. Call it in a process without open resources."""
    # Fork before any thread starts. Slots are forks of this process, with all modules imported.
    fork_own_host()
    return Pipeline(
        LocalProcesses(),
        name=JOB,
        parallelism=parallelism,
        # Checkpoint as often as possible, so that an attempt reaches its crash point within a
        # second.
        checkpointing=Checkpointing(storage=storage, interval=0.01, retained=2),
        restart=NoRestart(),
        settings=RuntimeSettings(commit_deadline_s=SERVER_PATIENCE_S, poll_timeout_s=0.002),
    )


def arm_in_job(point: CrashPoint) -> None:
    """Arm `point` from inside a process of the job: the next process that reaches it is killed."""
    (Path(os.environ[VARIABLE]) / point).touch()


class KilledJob(ABC):
    """A job that runs attempt by attempt, with checks between attempts."""

    def __init__(
        self, processes: Processes, run: Callable[[Link, Any, KillPlan], bool], work: object
    ) -> None:
        """`run(link, work, plan)` is called in a new process for each attempt.

        It returns True if all rows are committed, and False if a slot died.
        """
        self._processes = processes
        self._run = run
        self.work = work
        self._history: list[str] = []
        self._traces = processes.make_trace_directory()

    @abstractmethod
    def look(self) -> None:
        """Raise Violation if the target has rows that it must not have."""

    def check_trace(self) -> None:
        """Raise Violation if a process has taken a step that the protocol forbids."""
        for broken in rules.check_trace(read_trace(self._traces)):
            raise Violation(f"{self}: {broken}")

    def attempt(
        self,
        plan: KillPlan,
        kill_after_s: float | None = None,
        once_started: Callable[[], object] | None = None,
    ) -> bool:
        """Run an attempt until it ends or dies. Return True if all rows are committed.

        Kills the driver `kill_after_s` after the start of the job, and calls `once_started` then.

        Raises:
            Violation: The attempt failed with an error, `look` found wrong rows, or a process took
                a step that the protocol forbids.
        """
        child = self._processes.start(self._run, self.work, plan, traces=self._traces)
        done = False
        try:
            if kill_after_s is not None or once_started is not None:
                child.receive()
            if once_started is not None:
                once_started()
            if kill_after_s is not None:
                time.sleep(kill_after_s)
                with suppress(ProcessLookupError):
                    os.kill(child.pid, signal.SIGKILL)
            done = child.result()
            self._history.append(f"{plan}: {'all is committed' if done else 'a slot was killed'}")
        except ProcessKilled:
            self._history.append(f"{plan}: the driver was killed")
        except ChildFailed as failed:
            raise Violation(f"{self}: {plan} failed: {failed}") from failed
        self.look()
        self.check_trace()
        return done

    def __str__(self) -> str:
        return "a job of these attempts: " + ("; ".join(self._history) or "its first")


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
            arm_in_job(self._source.plan.crash)
