"""The stored checkpoints and savepoints, for commands that inspect a job without running it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from onceflow.core import errors
from onceflow.core.protocol.checkpoints import snapshots
from onceflow.core.protocol.checkpoints.snapshots import committables_of
from onceflow.core.storage.described_storage import savepoint_directory
from onceflow.core.storage.snapshots.savepoints import SavepointDirectory
from onceflow.core.storage.snapshots.state_files import FileStateReader
from onceflow.core.storage.storage import CheckpointStorage, JobStorage


@dataclass(frozen=True, slots=True)
class StoredCheckpoint:
    """A checkpoint that a job's decision log retains, or a savepoint."""

    job: str
    name: str
    """The checkpoint's number, or the savepoint's directory."""
    kind: str
    completed: snapshots.CompletedCheckpoint
    reader: FileStateReader
    savepoint: SavepointDirectory | None = None

    def __str__(self) -> str:
        what = "savepoint" if self.savepoint else "checkpoint"
        return f"{what} {self.name} of job {self.job!r}"

    def describe(self) -> dict[str, Any]:
        """Return the name, kind, time and sizes, for people and for JSON."""
        completed = self.completed
        at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(completed.completed_at_ms / 1000))
        return {
            "name": self.name,
            "kind": self.kind,
            "checkpoint": completed.checkpoint,
            "attempt": completed.attempt,
            "completed": at,
            "parallelism": completed.parallelism,
            "max_parallelism": completed.max_parallelism,
            "final": completed.final,
            "bytes": sum(size_bytes(o) for s in completed.snapshots for o in s.operators),
            "files": len(snapshots.handles_of(completed.snapshots)),
            "transactions": len(committables_of(completed)),
        }


def size_bytes(operator: snapshots.OperatorSnapshot) -> int:
    """Return the size of the state of one operator's subtask."""
    return sum(handle.size_bytes for handle in (*operator.keyed, *operator.raw))


def open_job(storage: CheckpointStorage, job: str | None) -> JobStorage:
    """Return the storage of `job`, or of the only job if `job` is None.

    Raises:
        ConfigError: There is no such job, or there are several; names the existing ones.
    """
    root = getattr(storage, "root", None)
    if root is not None and not Path(root).is_dir():
        raise errors.ConfigError(
            f"checkpoint storage {root}: this machine has no such directory. Give the storage of"
            " the job's Checkpointing(storage=…), on a machine where that directory is mounted"
        )
    jobs = storage.open("_").jobs()
    if job is None and len(jobs) == 1:
        return storage.open(jobs[0])
    if job is None:
        there = ", ".join(jobs) or "none"
        raise errors.ConfigError(f"checkpoint storage holds {len(jobs)} jobs ({there}): name one")
    if job not in jobs:
        raise errors.ConfigError(f"checkpoint storage has no job {job!r}: {nearest(job, jobs)}")
    return storage.open(job)


def checkpoints_of(job: JobStorage) -> list[StoredCheckpoint]:
    """Return the checkpoints that the job's decision log retains, in rising order.

    Raises:
        CheckpointCorrupt: The log is damaged.
        StorageError: The log cannot be read now.
    """
    return [
        StoredCheckpoint(job.job, str(completed.checkpoint), "checkpoint", completed, job.reader())
        for completed in job.log.read().completed
    ]


def savepoints_of(
    storage: CheckpointStorage, job: JobStorage
) -> Iterator[StoredCheckpoint | errors.OnceflowError]:
    """Yield the savepoints in the job's own directory, and an error for each unreadable one.

    Skips files, which cannot be savepoints.
    """
    for name in job.savepoint_names():
        location = f"{job.savepoints}/{name}"
        try:
            yield savepoint_at(storage, location)
        except errors.SavepointRefused as error:
            if savepoint_directory(storage, location).is_begun():
                yield error
        except (errors.CheckpointCorrupt, errors.StateIncompatible, errors.StorageError) as error:
            yield error


def savepoint_at(storage: CheckpointStorage, location: str) -> StoredCheckpoint:
    """Return the savepoint in directory `location`, on any file system.

    Raises:
        SavepointRefused: There is no savepoint, or it was never finished.
        CheckpointCorrupt: Its metadata is damaged.
    """
    directory = savepoint_directory(storage, location)
    savepoint = directory.read()
    return StoredCheckpoint(
        savepoint.job,
        str(directory),
        savepoint.kind.value,
        savepoint.completed,
        directory.reader(),
        directory,
    )


def checkpoint_at(job: JobStorage, number: int | None) -> StoredCheckpoint:
    """Return the checkpoint with this number, or the last one if `number` is None.

    Raises:
        ConfigError: The decision log does not retain it; names those that it retains.
    """
    checkpoints = checkpoints_of(job)
    if number is None and checkpoints:
        return checkpoints[-1]
    for checkpoint in checkpoints:
        if checkpoint.completed.checkpoint == number:
            return checkpoint
    there = ", ".join(checkpoint.name for checkpoint in checkpoints) or "none"
    what = f"no checkpoint {number}" if number is not None else "no completed checkpoint"
    raise errors.ConfigError(f"the decision log of job {job.job!r} holds {what} (there: {there})")


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a text with the known name nearest to `name`, and all known names."""
    names = sorted(known)
    near = get_close_matches(name, names, n=1)
    meant = f"did you mean {near[0]!r}? " if near else ""
    return f"{meant}there: {', '.join(map(repr, names)) or 'none'}"
