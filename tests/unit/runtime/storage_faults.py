"""A file system of its own, which a test may make read-only."""

from __future__ import annotations

import subprocess
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def mounted(directory: Path) -> Generator[Path, None, None]:
    """Mount four megabytes at `directory`, which is made, for the block."""
    directory.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(directory)]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting needs root")
    try:
        yield directory
    finally:
        subprocess.run(["umount", "-l", str(directory)], check=True)


def remount(directory: Path, how: str) -> None:
    """Make what is mounted at `directory` read-only ("ro") or writable again ("rw")."""
    subprocess.run(["mount", "-o", f"remount,{how}", str(directory)], check=True)
