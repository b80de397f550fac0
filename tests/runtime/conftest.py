"""The runtime as it is everywhere, on processes of this machine: no JVM is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from onceflow import LocalProcesses


@pytest.fixture
def cluster(tmp_path: Path) -> LocalProcesses:
    """Slots as processes; what they say is among a failed test's files."""
    return LocalProcesses(tmp_path / "logs")
