"""Finds Prometheus' own programs beside the Python that runs the tests, or on PATH."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path


def find_program(name: str) -> str:
    """Return the path of `prometheus` or `promtool`; empty where it is not installed."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return shutil.which(name, path=path) or ""
