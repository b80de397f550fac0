"""Whether a job seems to be running, as far as its checkpoint storage shows. Never a proof.

Storage holds no heartbeat, only who wrote the log last and when. So every sign counts as "it may be
running"; only a final last decision, or a claim made by hand, means that it is not.
"""

from __future__ import annotations

import os
import re
import socket
from datetime import datetime, timezone
from itertools import pairwise

from onceflow.core.protocol.ids import AttemptId
from onceflow.core.protocol.in_doubt import LogFacts
from onceflow.core.protocol.log import LogView
from onceflow.core.storage import JobStorage

QUIET_S_MIN = 60.0
"""A log that was written more recently than this may be a running job's."""
QUIET_INTERVALS = 3
"""And so may one in which less time has passed than between so many of its decisions."""

_BY_HAND = "txn "
_OWNER = re.compile(r"(.+):(\d+) [0-9a-f]+")


def read_log(storage: JobStorage) -> LogFacts:
    """Return what the job's log says now, and what makes its job look alive. Changes nothing.

    Raises:
        StorageError: Storage cannot be read.
        CheckpointCorrupt: The log is damaged.
    """
    log = storage.log
    view = log.read()
    if view.attempt == 0:
        # Asking a job that never ran for its identity would make one.
        return LogFacts(log.job, "", view)
    signs = tuple(
        filter(None, (_recently_written(view, log.written_at()), _owner_lives(view.owner)))
    )
    return LogFacts(log.job, storage.log_id, view, () if _has_ended(view) else signs)


def fence(storage: JobStorage) -> LogFacts:
    """Take the job over, as its next start does: no earlier attempt decides anything after this.

    An attempt that still runs ends itself at its next checkpoint. The job starts again as usual.

    Raises:
        CheckpointError: The claim failed or nobody knows; repeat it.
    """
    claimed = storage.log.claim(f"{_BY_HAND}{socket.gethostname()}:{os.getpid()}")
    return LogFacts(storage.log.job, storage.log_id, claimed.view)


def attempt_of(log: LogFacts | None) -> AttemptId:
    """Return in whose name one commits by hand: the newest attempt's."""
    return AttemptId(max(1, log.view.attempt if log else 1))


def _has_ended(view: LogView) -> bool:
    if view.owner.startswith(_BY_HAND):
        return True  # an attempt that only fences and runs nothing
    last = view.decided[-1] if view.decided else None
    return last is not None and last.sequence == view.last_sequence and last.completed.final


def _recently_written(view: LogView, written_at: datetime | None) -> str:
    if written_at is None:
        return ""
    moments = [c.completed_at_ms / 1000 for c in view.completed if c.attempt == view.attempt]
    gaps_s = [later - earlier for earlier, later in pairwise(moments)]
    quiet_s = max(QUIET_S_MIN, QUIET_INTERVALS * max(gaps_s, default=0.0))
    age_s = (datetime.now(timezone.utc) - written_at).total_seconds()
    if age_s > quiet_s:
        return ""
    return (
        f"attempt {view.attempt} wrote its decision log {max(0.0, age_s):.0f} s ago; a log that is"
        f" quiet for {quiet_s:.0f} s counts as left"
    )


def _owner_lives(owner: str) -> str:
    match = _OWNER.fullmatch(owner)
    if match is None or match[1] != socket.gethostname():
        return ""
    pid = int(match[2])
    if pid == os.getpid():
        return ""  # this very process asks; the log's age tells whether its job still runs
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return ""
    except PermissionError:
        pass
    return f"process {pid} of this machine, which claimed the newest attempt, is there"
