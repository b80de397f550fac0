"""Finds what successful jobs have left in their storage, in savepoints, at their slots."""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from onceflow.core.errors import CheckpointCorrupt, StateIncompatible
from onceflow.core.protocol.checkpoints.snapshots import handles_of
from onceflow.core.protocol.ids import AttemptId
from onceflow.core.protocol.messages import DriverMessage, Shutdown
from onceflow.core.runtime.driver.attempt_context import SlotPool
from onceflow.core.storage import FileSystemStorage
from onceflow.core.storage.filesystems.local import LocalFileSystem
from onceflow.core.storage.snapshots.savepoints import SavepointDirectory
from onceflow.integration.conformance.processes import eventually

_ENDED_WELL = ("finished", "stopped")
_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{32}\.tmp")
TIDY_S = 10.0
"""How long slots may take to delete what they do not need any more, on a busy machine."""


def find_leftovers(directory: Path) -> Sequence[str]:
    """Return the files and directories that jobs below `directory` have left behind.

    Looks at the jobs whose last driver ended well: at the state files that the next attempt would
    sweep, and at staged rows. Deletes that state. The probe is no leftover: slots try the storage
    by this small file, until the next attempt. A job whose log a test has damaged is passed over.
    """
    return [
        left
        for meta in sorted(directory.rglob("meta.json"))
        for left in _find_in(meta.parent)
        if "/probe/" not in left
    ]


def find_copies(scratch: Path) -> Sequence[str]:
    """Return the copies of RocksDB databases in the scratch directories of slots, dead or alive.

    A living slot has one for each checkpoint that it uploads now.
    """
    return [name for _, names, _ in os.walk(scratch) for name in names if name.startswith("copy-")]


def _find_in(job: Path) -> Sequence[str]:
    storage = FileSystemStorage(str(job.parent)).open(job.name)
    try:
        last = storage.last_run.read()
        if last is None or last.state not in _ENDED_WELL:
            return ()
        view = storage.log.read()
    except CheckpointCorrupt:
        return ()
    swept = storage.sweep(view, AttemptId(view.attempt + 1))
    staged = sorted((job / "staged").rglob("*.arrow"))
    return [*swept, *(str(path.relative_to(job.parent)) for path in staged)]


def find_savepoint_leftovers(directory: Path) -> Sequence[str]:
    """Return what lies below `directory` of savepoints that are not whole, and not of them.

    That is a savepoint without metadata, a lock, a temporary file, and a state file that the
    metadata does not name. A savepoint whose metadata a test has damaged is passed over.
    """
    savepoints = {path.parent for path in directory.rglob("_metadata")}
    savepoints |= {path for path in directory.rglob("savepoint-*") if path.is_dir()}
    return [
        str(left.relative_to(directory))
        for savepoint in sorted(savepoints)
        for left in _find_in_savepoint(savepoint)
    ]


def _find_in_savepoint(savepoint: Path) -> Sequence[Path]:
    if not (savepoint / "_metadata").exists():
        return [savepoint]
    files = sorted(path for path in savepoint.rglob("*") if path.is_file())
    unfinished = [path for path in files if path.name == "_changing" or _TEMPORARY.match(path.name)]
    try:
        completed = SavepointDirectory(LocalFileSystem(str(savepoint))).read().completed
    except (CheckpointCorrupt, StateIncompatible):
        return unfinished
    named = {handle.path for handle in handles_of(completed.snapshots)}
    state = [path for path in files if path.parent.name == "state" and path not in unfinished]
    return [*unfinished, *(path for path in state if f"state/{path.name}" not in named)]


def find_slot_directories(scratch: Path) -> Sequence[str]:
    """Return the scratch directories in `scratch` that no later slot would delete.

    Their slots live, or the directory has no lock. That of a slot that was killed is no leftover:
    the next slot deletes it.
    """
    return [path.name for path in sorted(scratch.glob("onceflow-*/")) if not _is_of_dead_slot(path)]


def _is_of_dead_slot(path: Path) -> bool:
    try:
        with path.with_name(f"{path.name}.lock").open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except FileNotFoundError:
        # The slot deletes the directory first.
        return not path.exists()
    return True


@contextmanager
def watching_copies(scratch: Path) -> Generator[list[str]]:
    """Yield a list of the copies that slots in `scratch` still have when their job has ended well.

    Covers the jobs whose drivers are in this process. The slots delete all they have at the end, so
    the driver looks before it tells them to.
    """
    left: list[str] = []
    send_all = SlotPool.send_all

    def look_and_send(pool: SlotPool, message: DriverMessage) -> None:
        if isinstance(message, Shutdown) and message.reason.endswith(" is done"):
            job = message.reason.removeprefix("job ").removesuffix(" is done")

            def list_copies() -> Sequence[str]:
                slots = list(scratch.glob(f"onceflow-{job}-*/"))
                return [copy for slot in slots for copy in find_copies(slot)]

            # What was declined a moment ago is deleted by another thread.
            if not eventually(lambda: not list_copies(), TIDY_S):
                left.extend(list_copies())
        send_all(pool, message)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SlotPool, "send_all", look_and_send)
        yield left
