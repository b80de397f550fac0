"""Small libraries that stand between a process and libc, loaded by LD_PRELOAD."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

_COMPILE_TIMEOUT_S = 60


def find_compiler() -> str | None:
    """Return the C compiler of this machine, or None."""
    return shutil.which("cc")


def build_library(compiler: str, name: str, directory: Path) -> Path:
    """Build the library `name` of this package into `directory`.

    Raises:
        CalledProcessError: The compiler refused it.
    """
    source = Path(__file__).with_name(f"{name}.c")
    library = directory / f"{name}.so"
    command = [compiler, "-O2", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"]
    subprocess.run(command, capture_output=True, timeout=_COMPILE_TIMEOUT_S, check=True)
    return library


def preload(libraries: Sequence[Path]) -> dict[str, str]:
    """Return the environment of a process that loads `libraries`."""
    return {"LD_PRELOAD": ":".join(map(str, libraries))} if libraries else {}
