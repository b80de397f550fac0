"""Named places at which a test may have this process killed, exactly there and exactly once.

A crash is data: a test puts an empty file named after the point into the directory that
`ONCEFLOW_CRASH_POINTS` names; the first process to reach the point removes the file and kills
itself with SIGKILL, so nothing is flushed, closed or said. Unset, as in production, a point costs
one look into the environment. Each death is recorded in the directory `ONCEFLOW_CRASH_DEATHS`.

    write       a sink has taken a batch of the checkpoint
    flushed     all rows of the checkpoint are at the database, nothing is prepared
    prepared    the transaction is prepared, the ack not sent
    acked       the ack is sent
    logged      the driver has written the decision and told nobody
    commit      a committer is about to commit
    committed   the database has committed, nobody has heard
    replied     the slot has reported that all is committed

Every job passes these, except the two of a source that is told of new splits:

    offered     they are offered to a subtask, and in no checkpoint
    decided     a decision holds them, and nothing of them is read

one of sinks that begin a commit before its decision:

    begun       the commit is begun, and the decision has not come

three of checkpoints whose barriers overtake rows:

    overtaken   a subtask has forwarded the barrier ahead of rows, and none of them is in storage
    persisted   they are in storage, the ack not sent
    replayed    a restored subtask holds its part of them, and has taken none

three of a driver that starts a job from a savepoint:

    imported    the staged rows of the savepoint are in the job's storage
    copied      the state of the savepoint is in the job's storage, too
    restored    the log has the decision that begins the job, and a claimed savepoint is still there

and two of batches that Spark writes, on the driver before the tasks:

    claimed     the batch has its attempt, older ones are fenced, and nothing is settled
    settled     what older attempts left is committed or rolled back
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Literal, TypeAlias

CrashPoint: TypeAlias = Literal[
    "write", "flushed", "prepared", "acked", "logged", "commit", "committed", "replied",
    "offered", "decided", "begun", "overtaken", "persisted", "replayed", "imported", "copied",
    "restored", "claimed", "settled",
]  # fmt: skip

CRASH_POINTS: tuple[CrashPoint, ...] = (
    "write", "flushed", "prepared", "acked", "logged", "commit", "committed", "replied",
)  # fmt: skip

SINK_POINTS: tuple[CrashPoint, ...] = ("flushed",)
"""The points that the writer of a sink passes, if its author calls `reach` there. The engine passes
all others."""

VARIABLE = "ONCEFLOW_CRASH_POINTS"
"""The environment variable with the directory in which a test arms points."""

DEATHS_VARIABLE = "ONCEFLOW_CRASH_DEATHS"
"""The environment variable with a directory in which each process that dies leaves a file."""


def reach(point: CrashPoint) -> None:
    """Pass `point`, or end this process here if a test has asked for it."""
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
    """Leave a file `<point>.<process id>.<time>` where the environment asks for it.

    Tests count these files, so that no test of a crash passes without a crash. The file is there
    before the process dies. A test that interrupts a call in its own process calls this, too.
    """
    directory = os.environ.get(DEATHS_VARIABLE)
    if directory is not None:
        (Path(directory) / f"{point}.{os.getpid()}.{time.monotonic_ns()}").touch()
