"""Disks that are full, read-only, or fail: file systems, and a library that lets calls fail."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Literal, TypeAlias

from tests.support.small_disk import mount_disk
from typing_extensions import assert_never

Condition: TypeAlias = Literal["full", "read-only", "failing"]

FAILING: Condition = "failing"
LIBRARY = "failing_disk"
_CONDITIONS: Mapping[str, Condition] = {
    "full": "full",
    "read-only": "read-only",
    "failing": FAILING,
}
_FOLDERS = {"checkpoints": "disk", "scratch": "scratch"}
_SIZE = "96m"
_CHUNK_BYTES = 1 << 20
_COMMAND_TIMEOUT_S = 30
_CONTROL = "failing-disk"


def to_condition(text: str) -> Condition:
    """Return the condition of this name."""
    return _CONDITIONS[text]


def describe_disks(directory: Path) -> dict[str, str]:
    """Return the environment of processes whose disks may fail."""
    return {"CHAOS_FAILING_DISK": str(directory / _CONTROL)}


@contextmanager
def mount_disks(directory: Path) -> Generator[None, None, None]:
    """Mount a small file system for checkpoints and another one for scratch directories.

    Raises:
        MountRefused: This user or this machine does not allow it.
    """
    with ExitStack() as stack:
        for folder in _FOLDERS.values():
            stack.enter_context(mount_disk(directory / folder, _SIZE))
        yield


def fill_disk(directory: Path, disk: str, number: int) -> Callable[[], bool]:
    """Fill the disk. Return the function that frees it and says whether the disk was full."""
    filler = directory / _FOLDERS[disk] / f"filler-{number}"
    is_full = False
    with filler.open("wb", buffering=0) as file:
        size = _CHUNK_BYTES
        while size:
            try:
                size = size if file.write(bytes(size)) == size else size // 2
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                size //= 2
                is_full = True

    def heal() -> bool:
        filler.unlink()
        return is_full

    return heal


def break_disk(directory: Path, disk: str, condition: Condition, number: int) -> Callable[[], bool]:
    """Break a disk of a schedule. Return the function that heals it.

    That function returns True if calls on the disk really failed.
    """
    match condition:
        case "full":
            return fill_disk(directory, disk, number)
        case "read-only":
            return _forbid_writes(directory / _FOLDERS[disk])
        case "failing":
            return _fail_calls(directory, directory / _FOLDERS[disk])
        case _:
            assert_never(condition)


def _forbid_writes(disk: Path) -> Callable[[], bool]:
    """Put a read-only mount of the disk over itself.

    Files that are open already stay writable. A disk with such files could not be remounted itself.
    """
    _run("mount", "--bind", str(disk), str(disk))
    _run("mount", "-o", "remount,bind,ro", str(disk))
    is_forbidden = False
    try:
        os.close(os.open(disk / "probe", os.O_CREAT | os.O_WRONLY))
    except OSError as error:
        is_forbidden = error.errno == errno.EROFS

    def heal() -> bool:
        _run("umount", "--lazy", str(disk))
        return is_forbidden

    return heal


def _fail_calls(directory: Path, disk: Path) -> Callable[[], bool]:
    control = directory / _CONTROL
    hits = control.with_name(f"{_CONTROL}.hits")
    hits_before = hits.stat().st_size if hits.exists() else 0
    fresh = control.with_suffix(".new")
    fresh.write_text(str(disk), encoding="utf-8")
    fresh.rename(control)

    def heal() -> bool:
        control.unlink()
        return hits.exists() and hits.stat().st_size > hits_before

    return heal


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=_COMMAND_TIMEOUT_S)
