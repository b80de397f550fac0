"""The committer of a sink that commits nothing."""

from __future__ import annotations

from collections.abc import Sequence

from onceflow.core.protocol.committables import (
    Aborted,
    AbortOutcome,
    CommitOutcome,
    Committable,
    Lost,
)
from onceflow.core.spi import Committer


class IdleCommitter(Committer):
    """At least once, and no checkpoint storage in which anything could be left from before."""

    def commit(self, committable: Committable) -> CommitOutcome:
        """Say that nothing of the name is there."""
        return Lost(f"nothing is staged for {committable.transaction}: there is no storage for it")

    def abort(self, committable: Committable) -> AbortOutcome:
        """There is nothing to abort."""
        return Aborted()

    def in_doubt(self) -> Sequence[Committable]:
        """Return nothing."""
        return ()

    def close(self) -> None:
        """Release nothing."""
