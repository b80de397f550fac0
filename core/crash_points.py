"""The named points in the code at which a test can kill this process, exactly once.

To arm a point, a test creates an empty file with the point's name in the directory
`ONCEFLOW_CRASH_POINTS`. The first process that reaches the point removes the file and kills itself
with SIGKILL. So it flushes, closes and sends nothing. If the variable is not set, as in production,
a point costs one look-up in the environment. Each death is recorded in the directory
`ONCEFLOW_CRASH_DEATHS`.

    write       a sink has received a batch of the checkpoint
    flushed     all rows of the checkpoint are sent to the database, nothing is prepared
    prepared    the transaction is prepared, the ack not sent
    acked       the ack is sent
    logged      the driver has written the decision and notified no slot
    commit      a committer is about to commit
    committed   the database has committed, the slot has not reported it
    replied     the slot has reported that all is committed

Every job passes these points. A source that gets new splits passes two more:

    offered     the splits are offered to a subtask, and are in no checkpoint
    decided     a decision contains the splits, and no row of them is read

Sinks that begin a commit before its decision pass one:

    begun       the commit has begun, and the decision has not arrived

Checkpoints whose barriers overtake rows pass three:

    overtaken   a subtask has forwarded the barrier ahead of rows, and no row is stored yet
    persisted   the rows are stored, the ack is not sent
    replayed    a restored subtask has loaded its part of the rows, and has processed none

A savepoint passes three:

    saved       a slot has written its state into the savepoint's directory, the ack is not sent
    collected   the driver has all state in the directory, and not its metadata
    finished    the savepoint is whole, and the request is not answered

A driver that starts a job from a savepoint passes three:

    imported    the staged rows of the savepoint are in the job's storage
    copied      the state of the savepoint is in the job's storage, too
    restored    the log has the first decision, and a claimed savepoint is not deleted yet

Batches that Spark writes pass two, on the driver before the tasks:

    claimed     the batch has its attempt, older attempts are fenced but not yet resolved
    settled     transactions of older attempts are committed or rolled back
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Literal, TypeAlias

CrashPoint: TypeAlias = Literal[
    "write", "flushed", "prepared", "acked", "logged", "commit", "committed", "replied",
    "offered", "decided", "begun", "overtaken", "persisted", "replayed", "saved", "collected",
    "finished", "imported", "copied", "restored", "claimed", "settled",
]  # fmt: skip

CRASH_POINTS: tuple[CrashPoint, ...] = (
    "write", "flushed", "prepared", "acked", "logged", "commit", "committed", "replied",
)  # fmt: skip

SINK_POINTS: tuple[CrashPoint, ...] = ("flushed",)
"""The points that a sink's writer reaches if its author calls `reach`. The engine calls it for all
other points."""

VARIABLE = "ONCEFLOW_CRASH_POINTS"
"""The environment variable with the directory in which a test arms points."""

DEATHS_VARIABLE = "ONCEFLOW_CRASH_DEATHS"
"""The environment variable with a directory in which each process that dies leaves a file."""


def reach(point: CrashPoint) -> None:
    """Kill this process if a test has armed `point`."""
    directory = os.environ.get(VARIABLE)
    if directory is None:
        return
    try:
        (Path(directory) / point).unlink()
    except FileNotFoundError:
        return
    record_death(point)
    os.kill(os.getpid(), signal.SIGKILL)


def record_death(point: CrashPoint) -> None:
    """Create the file `<point>.<process id>.<time>` in the directory of ONCEFLOW_CRASH_DEATHS.

    Tests count these files, so that a crash test cannot pass without a crash. The file exists
    before the process dies. A test that interrupts a call in its own process calls this, too.
    """
    directory = os.environ.get(DEATHS_VARIABLE)
    if directory is not None:
        (Path(directory) / f"{point}.{os.getpid()}.{time.monotonic_ns()}").touch()
