"""What sinks of lake tables have in common for their user: when versions are made."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from typing_extensions import override

from onceflow.core.protocol.committables import CommitInterval
from onceflow.core.setting_values import seconds_of
from onceflow.core.spi import CommittedBy, Sink
from onceflow.core.spi.options import COUNT, DURATION, option


@dataclass(frozen=True, kw_only=True, repr=False)
class LakeSink(Sink):
    """A table that the driver makes versions of, each of one or several whole checkpoints."""

    instead_of_replacing: ClassVar[str] = "Append to a new table, and let readers go there"

    commit_interval: float | str | None = field(
        default=None,
        metadata=option(
            "How long decided checkpoints wait, at most, to become visible together: seconds, or"
            " `5 min`. Without it, and without `commit_checkpoints`, each is visible at once",
            DURATION,
        ),
    )
    commit_checkpoints: int | None = field(
        default=None,
        metadata=option(
            "How many decided checkpoints become visible together, at most 1000. With"
            " `commit_interval`, whichever comes first",
            COUNT,
        ),
    )

    def __post_init__(self) -> None:
        _ = self.gathering  # raises where the two make no interval

    @property
    @override
    def committed_by(self) -> CommittedBy:
        """Have the driver make the versions, of whole checkpoints."""
        return CommittedBy.DRIVER

    @property
    @override
    def gathering(self) -> CommitInterval | None:
        """What the two settings of commits say."""
        given = self.commit_interval
        seconds = None if given is None else seconds_of(given, setting="commit_interval")
        if seconds is None and self.commit_checkpoints is None:
            return None
        return CommitInterval(self.commit_checkpoints, seconds)
