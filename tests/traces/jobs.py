"""The small jobs whose traces are recorded. Each runs in a directory, and to its end."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests.support.counting_source import CountingSource
from tests.support.directory_sink import DirectoryCommitter, DirectorySink

from onceflow import Checkpointing, FixedDelay, Job, LocalProcesses, Pipeline
from onceflow.core.crash_points import VARIABLE, CrashPoint
from onceflow.core.errors import Fenced, SinkError, StorageBehind
from onceflow.core.protocol.committables import Committable
from onceflow.core.spi import Committer, CommitterContext, Sink
from onceflow.sinks import SQLiteSink

_RECORDS = 4_000
_BATCH_ROWS = 5
_TIMEOUT_S = 120.0


def start(
    directory: Path,
    sinks: Mapping[str, Sink],
    *,
    interval_s: float | None = None,
    retired: Mapping[str, Sink | None] | None = None,
) -> Job:
    """Start a job that ends its input when the file `end` is in `directory`."""
    pipeline = Pipeline(
        LocalProcesses(),
        name="job",
        parallelism=2,
        checkpointing=Checkpointing(
            storage=str(directory / "checkpoints"), interval=interval_s, retained=3
        ),
        restart=FixedDelay(attempts=3, delay_s=0.01),
        retired_sinks=retired,
    )
    # Slow enough that each checkpoint has rows until the input is to end.
    source = CountingSource(
        _RECORDS, batch_rows=_BATCH_ROWS, pause_s=0.05, ends_with=str(directory / "end")
    )
    records = pipeline.read(source, uid="records")
    for uid, sink in sinks.items():
        records.write(sink, uid=uid)
    return pipeline.start()


def finish(directory: Path, job: Job) -> None:
    (directory / "end").touch()
    job.wait(_TIMEOUT_S)


def run_one_attempt(directory: Path) -> None:
    """Decide a checkpoint on request and the one at the end."""
    job = start(directory, {"out": DirectorySink(str(directory / "out"))})
    job.checkpoint()
    finish(directory, job)


def run_to_crash(point: CrashPoint) -> Callable[[Path], None]:
    """Return the job of which a slot dies at `point` of its second checkpoint."""

    def run(directory: Path) -> None:
        job = start(directory, {"out": DirectorySink(str(directory / "out"))}, interval_s=0.3)
        job.wait_for(checkpoints=1)
        (Path(os.environ[VARIABLE]) / point).touch()
        job.wait_for(checkpoints=job.status().checkpoints_completed + 2)
        finish(directory, job)

    return run


def run_two_drivers(directory: Path) -> None:
    """Start a second driver of a job. The first one is fenced."""
    sinks = {"out": DirectorySink(str(directory / "out"))}
    first = start(directory, sinks, interval_s=0.3)
    first.wait_for(checkpoints=1)
    second = start(directory, sinks, interval_s=0.3)
    second.wait_for(checkpoints=1)
    (directory / "end").touch()
    for job in (first, second):
        with suppress(Fenced):
            job.wait(_TIMEOUT_S)


def run_without_a_sink(directory: Path) -> None:
    """Write two sinks, of which the second start retires one while a slot has prepared rows."""
    kept, gone = (DirectorySink(str(directory / name)) for name in ("kept", "gone"))
    job = start(directory, {"kept": kept, "gone": gone})
    job.checkpoint()
    job.stop()
    (directory / "end").touch()
    start(directory, {"kept": kept}, retired={"job.gone": gone}).wait(_TIMEOUT_S)


def run_in_an_older_copy(directory: Path) -> None:
    """Start a job once more in a copy of its storage, from before its last decisions."""
    sink = SQLiteSink(str(directory / "target.db"), table="rows", create=True)
    storage, copy = directory / "checkpoints", directory / "copy"
    job = start(directory, {"out": sink})
    job.checkpoint()
    job.stop()
    shutil.copytree(storage, copy)
    job = start(directory, {"out": sink})
    job.checkpoint()
    job.stop()
    shutil.rmtree(storage)
    copy.rename(storage)
    (directory / "end").touch()
    with suppress(StorageBehind):
        start(directory, {"out": sink}).wait(_TIMEOUT_S)


@dataclass(frozen=True)
class _Unlistable(DirectorySink):
    """A sink that cannot be listed for a while after its first listing."""

    refusals: int = 1

    def committer(self, context: CommitterContext) -> Committer:
        return _UnlistableCommitter(Path(self.directory), context.sink_id, self.refusals)


class _UnlistableCommitter(DirectoryCommitter):
    def __init__(self, directory: Path, sink_id: str, refusals: int) -> None:
        super().__init__(directory, sink_id)
        self._refused = range(2, 2 + refusals)
        self._listed = 0

    def in_doubt(self) -> Sequence[Committable]:
        self._listed += 1
        if self._listed in self._refused:
            raise SinkError("the directory cannot be listed just now")
        return super().in_doubt()


def run_with_failed_sweeps(failures: int) -> Callable[[Path], None]:
    """Return the job that finishes with one checkpoint, after which sweeps fail."""

    def run(directory: Path) -> None:
        job = start(directory, {"out": _Unlistable(str(directory / "out"), failures)})
        finish(directory, job)

    return run
