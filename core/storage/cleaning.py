"""Deleting state files: what the coordinator discards, and what dead attempts left (I9)."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import contextmanager

from onceflow.core.errors import StorageError
from onceflow.core.protocol.ids import GENESIS, AttemptId, CheckpointId
from onceflow.core.protocol.log import LogView
from onceflow.core.protocol.snapshots import StateHandle
from onceflow.core.protocol.state_files import paths_of
from onceflow.core.storage.filesystem import CheckpointFileSystem
from onceflow.core.storage.layout import JobPaths


def discard(fs: CheckpointFileSystem, paths: JobPaths, handles: Iterable[StateHandle]) -> None:
    """Delete the files of `handles`, and directories that they leave empty. Idempotent.

    Tries every file, also after a failure.

    Raises:
        StorageError: The first failure; some files are still there, for `sweep` to find.
    """
    files = {paths.in_job(handle.path): handle for handle in handles if handle.path}
    failures: list[StorageError] = []
    for path in files:
        with _noted(failures):
            fs.delete(path)
    private = [path for path, handle in files.items() if not handle.shared]
    for parent in {path.rpartition("/")[0] for path in private}:
        with _noted(failures):
            if fs.delete_directory_if_empty(parent):
                fs.delete_directory_if_empty(parent.rpartition("/")[0])
    _raise_first(failures)


def sweep(
    fs: CheckpointFileSystem, paths: JobPaths, view: LogView, attempt: AttemptId
) -> tuple[str, ...]:
    """Delete every state file that no checkpoint of `view` names and that nobody will name.

    Runs on the driver, at the start of `attempt` and at any time during it; `view` is the log as of
    then. Safe beside writers of `attempt` itself and of newer ones: it touches only

        files of older attempts, probes too, and
        directories of checkpoints of this attempt below its last decided one.

    Shared files of `attempt` itself are the coordinator's to discard.
    Returns what it deleted.

    Raises:
        StorageError: The first failure, after trying everything; the next sweep tries again.
    """
    named = paths_of(s for completed in view.completed for s in completed.snapshots)
    decided = view.completed
    over_before = decided[-1].checkpoint if decided else GENESIS
    named_directories = {path.rpartition("/")[0] for path in named}
    deleted: list[str] = []
    failures: list[StorageError] = []
    for directory in _dead_directories(fs, paths, attempt, over_before):
        if directory.removeprefix(f"{paths.job}/") not in named_directories:
            with _noted(failures):
                fs.delete_tree(directory)
                fs.delete_directory_if_empty(directory.rpartition("/")[0])
                deleted.append(directory)
    stray = [*_dead(fs, paths.shared, attempt), *_dead(fs, paths.probes, attempt)]
    stray = [path for path in stray if path.removeprefix(f"{paths.job}/") not in named]
    for path in stray:
        with _noted(failures):
            fs.delete(path)
            deleted.append(path)
    _raise_first(failures)
    return tuple(deleted)


def _dead_directories(
    fs: CheckpointFileSystem, paths: JobPaths, attempt: AttemptId, over_before: CheckpointId
) -> Iterable[str]:
    for name in fs.list(paths.job):
        checkpoint = paths.checkpoint_of(name)
        if checkpoint is None:
            continue
        directory = paths.checkpoint(checkpoint)
        for inner in fs.list(directory):
            writer = paths.attempt_of(inner)
            if writer is None or writer > attempt:
                continue
            if writer < attempt or checkpoint < over_before:
                yield f"{directory}/{inner}"


def _dead(fs: CheckpointFileSystem, directory: str, attempt: AttemptId) -> Iterable[str]:
    unfinished = fs.list_unfinished(directory)
    names = {name: name for name in fs.list(directory)}
    names.update({item.name: item.target for item in unfinished})
    for name, target in names.items():
        writer = JobPaths.writer_of(target)
        if writer is not None and writer < attempt:
            yield f"{directory}/{name}"


@contextmanager
def _noted(failures: list[StorageError]) -> Generator[None]:
    """Go on after a failure: one file that cannot be deleted must not keep the others."""
    try:
        yield
    except StorageError as error:
        failures.append(error)


def _raise_first(failures: list[StorageError]) -> None:
    if failures:
        raise failures[0]
