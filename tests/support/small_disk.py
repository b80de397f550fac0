"""A file system that is soon full."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest


class MountRefused(Exception):
    """Raised when this user may not mount a file system here."""


@contextmanager
def mount_disk(path: Path, size: str) -> Generator[None, None, None]:
    """Mount a file system of `size` at `path`.

    Raises:
        MountRefused: This user or this machine does not allow it.
    """
    if os.geteuid() != 0:
        raise MountRefused("mounting a small file system needs root")
    path.mkdir(parents=True, exist_ok=True)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)], capture_output=True
    )
    if mounted.returncode:
        raise MountRefused(f"mounting is not allowed here: {mounted.stderr.decode()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


@contextmanager
def mount_small_disk(path: Path, size: str) -> Generator[None, None, None]:
    """Mount a file system of `size` at `path`; skip the test where that is not allowed."""
    with ExitStack() as stack:
        try:
            stack.enter_context(mount_disk(path, size))
        except MountRefused as error:
            pytest.skip(str(error))
        yield


def grow_disk(path: Path, size: str) -> None:
    """Change the size of the file system at `path`. Its files stay."""
    subprocess.run(["mount", "-o", f"remount,size={size}", str(path)], check=True)
