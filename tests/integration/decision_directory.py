"""The decision log and the recovery of the jobs that crash tests run as programs, and kill.

The log is a directory: `attempt-<n>` claims an attempt, `decision-<n>` is a checkpoint with its
committables, both created by link so that they are there whole or not at all. What recovery commits
and aborts is decided by `commit.planner`, as in the engine.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests.integration.sink_kit import until_settled

from onceflow.core.commit.planner import plan_commits
from onceflow.core.crash_points import VARIABLE, reach
from onceflow.core.protocol.committables import AlreadyCommitted, Committable, Committed
from onceflow.core.protocol.ids import AttemptId, TransactionId
from onceflow.core.spi import Committer

PATIENCE_S = 60.0
"""How long a commit may have to be asked for."""


@dataclass(frozen=True)
class Decision:
    """A decided checkpoint: how far the source had been read, and what to commit."""

    checkpoint: int
    position: int
    committables: tuple[Committable, ...]


@dataclass(frozen=True)
class DecisionDirectory:
    """The decisions of one job, over all its attempts."""

    path: Path

    def claim_attempt(self) -> int:
        attempt = 1
        while not _publish(self.path / f"attempt-{attempt:06d}", ""):
            attempt += 1
        return attempt

    def attempts(self) -> int:
        return len(list(self.path.glob("attempt-*")))

    def decided(self) -> int:
        """Return how many checkpoints are decided."""
        return len(list(self.path.glob("decision-*")))

    def decide(self, decision: Decision) -> bool:
        """Return whether it is this caller's; not when the checkpoint is decided already."""
        todo = [
            (str(committable.transaction), committable.payload.decode())
            for committable in decision.committables
        ]
        text = json.dumps([decision.checkpoint, decision.position, todo])
        return _publish(self.path / f"decision-{decision.checkpoint:06d}", text)

    def last(self) -> Decision:
        """Return the last decision; one that nothing follows from when there is none."""
        found = sorted(self.path.glob("decision-*"))
        if not found:
            return Decision(0, 0, ())
        checkpoint, position, todo = json.loads(found[-1].read_text())
        return Decision(checkpoint, position, tuple(_committable(*one) for one in todo))


def recover(
    committer: Committer,
    restored: Decision,
    *,
    sink_id: str,
    attempt: int,
    patience_s: float = PATIENCE_S,
) -> None:
    """Settle what the attempts before this one left."""
    plan = plan_commits(
        restored.committables, committer.in_doubt(), sink_ids=(sink_id,), attempt=AttemptId(attempt)
    )
    for committable in plan.commit:
        _commit(committer, committable, patience_s)
    for committable in plan.abort:
        aborted = committer.abort(committable)
        assert not isinstance(aborted, AlreadyCommitted), committable


def commit_decided(committer: Committer, decision: Decision) -> None:
    """Commit what was decided last; dies on the way where a test says."""
    for committable in decision.committables:
        reach("commit")
        _commit(committer, committable, PATIENCE_S)
        reach("committed")


def arm(crash: Iterable[str], checkpoint: int) -> None:
    """Let this process die at the POINT of each POINT@CHECKPOINT of this checkpoint."""
    for wanted in crash:
        point, _, at = wanted.partition("@")
        if int(at) == checkpoint:
            (Path(os.environ[VARIABLE]) / point).touch()


def _commit(committer: Committer, committable: Committable, patience_s: float) -> None:
    outcome = until_settled(partial(committer.commit, committable), patience_s)
    assert isinstance(outcome, (Committed, AlreadyCommitted)), outcome


def _committable(name: str, payload: str) -> Committable:
    transaction = TransactionId.parse(name)
    assert transaction is not None
    return Committable(transaction, payload=payload.encode())


def _publish(path: Path, text: str) -> bool:
    """Create `path` with `text`, whole and durable; False when somebody else has created it."""
    fresh = path.with_name(f"fresh-{os.getpid()}")
    with fresh.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    try:
        os.link(fresh, path)
    except FileExistsError:
        return False
    finally:
        fresh.unlink()
    return True
