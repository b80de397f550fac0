"""The command ends with all of its processes, whatever ends it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
from tests.support.program import REPOSITORY

pytestmark = [pytest.mark.servers, pytest.mark.timeout(240)]

_DEADLINE_S = 60.0


def find_processes(mark: str) -> list[int]:
    """Return the living processes whose environment has `mark`."""
    found: list[int] = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark.encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has namespaces of its own")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_no_process_outlives_the_command(number: signal.Signals) -> None:
    mark = f"chaos-{uuid.uuid4().hex}"
    command = subprocess.Popen(
        [sys.executable, "-m", "tests.chaos", "--kinds", "slots,disk", "--schedules", "1"],
        cwd=REPOSITORY,
        env={**os.environ, "CHAOS_MARK": mark},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert command.stderr is not None
    for line in command.stderr:
        # Servers and the disk of the first schedule are there.
        if line.startswith("seed "):
            break
    assert len(find_processes(mark)) > 3
    command.send_signal(number)
    assert command.wait(_DEADLINE_S) != 0
    deadline = time.monotonic() + _DEADLINE_S
    while (left := find_processes(mark)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left
    command.stderr.close()
