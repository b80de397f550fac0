"""Values and processes that the storage tests share."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import onceflow
from onceflow.core.protocol.checkpoints import snapshots
from onceflow.core.protocol.committables import Committable
from onceflow.core.protocol.ids import AttemptId, CheckpointId, SubtaskRef, TransactionId

PACKAGE = Path(next(iter(onceflow.__path__)))
REPOSITORY = Path(__file__).parents[3]

PREAMBLE = f"""
import sys, types
# The package's own __init__ imports Spark, which takes longer than all that these processes do.
sys.modules["onceflow"] = types.ModuleType("onceflow")
sys.modules["onceflow"].__path__ = [{str(PACKAGE)!r}]
sys.path.insert(0, {str(REPOSITORY)!r})
"""


AT_EACH_STEP = """
import os, signal, sys, traceback

def killed_at_each_step(prepare, names):
    # In a fork for each step: what `prepare(root)` returns is killed before and after each call of
    # the functions `names` of os, until it comes to its end. Prints how each fork ended.
    for step in range(1, 200):
        pid = os.fork()
        if pid == 0:
            try:
                run = prepare(os.path.join(sys.argv[1], str(step)))
                count_steps(names, step)
                run()
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        print(status)
        if status >= 0:
            return

def count_steps(names, last):
    steps = 0
    def step():
        nonlocal steps
        steps += 1
        if steps == last:
            os.kill(os.getpid(), signal.SIGKILL)
    def stepping(call):
        def stepped(*arguments, **keywords):
            step()
            result = call(*arguments, **keywords)
            step()
            return result
        return stepped
    for name in names:
        setattr(os, name, stepping(getattr(os, name)))
"""


def decision(
    checkpoint: int,
    attempt: int,
    handles: tuple[snapshots.StateHandle, ...] = (),
    *,
    filler: bytes = b"",
) -> snapshots.CompletedCheckpoint:
    """A completed checkpoint that names `handles`."""
    committable = Committable(TransactionId("sink", attempt, checkpoint, 0), 7, filler)
    operator = snapshots.OperatorSnapshot(
        "balance", handles, (), {"splits": (b"\x00\xff", b"")}, (committable,)
    )
    snapshot = snapshots.SubtaskSnapshot(
        SubtaskRef("balance", 0), (operator,), snapshots.SnapshotTimings(0.1, 2.5, 1e-9, 3.0, 10)
    )
    return snapshots.CompletedCheckpoint(
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


def killed_at_each_step(script: str, root: Path, *arguments: str) -> list[int]:
    """Return how each fork ended that `script` had killed by AT_EACH_STEP, in `root`/1, /2, …"""
    _, out, err = finish(start_python(AT_EACH_STEP + script, str(root), *arguments))
    statuses = [int(line) for line in out.split()]
    assert statuses, err
    assert statuses == [-signal.SIGKILL] * (len(statuses) - 1) + [0], (statuses, err)
    return statuses


def finish(process: subprocess.Popen[str], timeout_s: float = 60.0) -> tuple[int, str, str]:
    """Return (exit code, stdout, stderr) of `process`; kills it when it takes too long."""
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
    return process.returncode, out, err
