"""Tells how much space a local disk has left, for errors of code that writes working files."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from onceflow.core.errors import StateError

_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})
_REMEDY = (
    "if it is full, free space there, or have the state on a larger local disk:"
    " RocksDBBackend(directory=…), or RuntimeSettings(scratch_dir=…) for all working files"
)
_MIB = 1 << 20


def advise_on_disk(path: Path) -> str:
    """Return the free space of the disk that has `path`, and what to do if the disk is full."""
    for parent in (path, *path.parents):
        # The path may not exist yet, or lie below a directory that this user may not search.
        with suppress(OSError):
            usage = shutil.disk_usage(parent)
            free, total = usage.free / _MIB, usage.total / _MIB
            return f"the disk of {parent} has {free:,.1f} MiB of {total:,.1f} MiB free; {_REMEDY}"
    return f"the free space of the disk of {path} is not known; {_REMEDY}"


@contextmanager
def naming_full_disk(path: Path, work: str) -> Generator[None, None, None]:
    """Raise StateError, which names `path` and the remedy, if the disk has no room for `work`."""
    try:
        yield
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        raise StateError(f"{work} in {path}: {error}; {advise_on_disk(path)}") from error
