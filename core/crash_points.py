"""Named places at which a test may have this process killed, exactly there and exactly once.

A crash is data: a test puts an empty file named after the point into the directory that
`ONCEFLOW_CRASH_POINTS` names; the first process to reach the point removes the file and kills
itself with SIGKILL, so nothing is flushed, closed or said. Unset, as in production, a point costs
one look into the environment.

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

and two of batches that Spark writes, on the driver before the tasks:

    claimed     the batch has its attempt, older ones are fenced, and nothing is settled
    settled     what older attempts left is committed or rolled back
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Literal, TypeAlias

CrashPoint: TypeAlias = Literal[
    "write", "flushed", "prepared", "acked", "logged", "commit", "committed", "replied",
    "offered", "decided", "begun", "overtaken", "persisted", "replayed", "claimed", "settled",
]  # fmt: skip

CRASH_POINTS: tuple[CrashPoint, ...] = (
    "write", "flushed", "prepared", "acked", "logged", "commit", "committed", "replied",
)  # fmt: skip

VARIABLE = "ONCEFLOW_CRASH_POINTS"


def reach(point: CrashPoint) -> None:
    """Pass `point`, or end this process here if a test has asked for it."""
    directory = os.environ.get(VARIABLE)
    if directory is None:
        return
    try:
        (Path(directory) / point).unlink()
    except FileNotFoundError:
        return
    os.kill(os.getpid(), signal.SIGKILL)
