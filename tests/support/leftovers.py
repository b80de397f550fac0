"""What a job that has ended well has left in its storage, though no checkpoint names it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from onceflow.core.errors import CheckpointCorrupt
from onceflow.core.protocol.ids import AttemptId
from onceflow.core.storage import FileSystemStorage

_ENDED_WELL = ("finished", "stopped")


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
