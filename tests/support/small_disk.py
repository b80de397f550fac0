"""A file system that is soon full."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def mount_small_disk(path: Path, size: str) -> Generator[None, None, None]:
    """Mount a file system of `size` at `path`; skip the test where that is not allowed."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    path.mkdir(parents=True, exist_ok=True)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip(f"mounting is not allowed here: {mounted.stderr.decode()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


def grow_disk(path: Path, size: str) -> None:
    """Change the size of the file system at `path`. Its files stay."""
    subprocess.run(["mount", "-o", f"remount,size={size}", str(path)], check=True)
