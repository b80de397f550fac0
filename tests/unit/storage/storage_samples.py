"""Values and processes that the storage tests share."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import onceflow
from onceflow.core.protocol.committables import Committable
from onceflow.core.protocol.ids import AttemptId, CheckpointId, SubtaskRef, TransactionId
from onceflow.core.protocol.snapshots import (
    CompletedCheckpoint,
    OperatorSnapshot,
    SnapshotTimings,
    StateHandle,
    SubtaskSnapshot,
)

PACKAGE = Path(next(iter(onceflow.__path__)))
REPOSITORY = Path(__file__).parents[3]

PREAMBLE = f"""
import sys, types
# The package's own __init__ imports Spark, which takes longer than all that these processes do.
sys.modules["onceflow"] = types.ModuleType("onceflow")
sys.modules["onceflow"].__path__ = [{str(PACKAGE)!r}]
sys.path.insert(0, {str(REPOSITORY)!r})
"""


def decision(
    checkpoint: int, attempt: int, handles: tuple[StateHandle, ...] = (), *, filler: bytes = b""
) -> CompletedCheckpoint:
    """A completed checkpoint that names `handles`."""
    committable = Committable(TransactionId("sink", attempt, checkpoint, 0), 7, filler)
    operator = OperatorSnapshot(
        "balance", handles, (), {"splits": (b"\x00\xff", b"")}, (committable,)
    )
    snapshot = SubtaskSnapshot(
        SubtaskRef("balance", 0), (operator,), SnapshotTimings(0.1, 2.5, 1e-9, 3.0, 10)
    )
    return CompletedCheckpoint(
        CheckpointId(checkpoint), AttemptId(attempt), 1, 128, (snapshot,), 1, 2
    )


def start_python(script: str, *arguments: str) -> subprocess.Popen[str]:
    """Start `script` in a process of its own; it imports onceflow and tests as we do."""
    return subprocess.Popen(
        [sys.executable, "-c", PREAMBLE + script, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str], timeout_s: float = 60.0) -> tuple[int, str, str]:
    """Return (exit code, stdout, stderr) of `process`; kills it when it takes too long."""
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
    return process.returncode, out, err
