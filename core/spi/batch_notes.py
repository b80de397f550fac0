"""What a target notes of its numbered batches, where decisions stand in files beside it.

The files may be cleaned, or another directory given: then the note alone tells what is written.

    begun     before the decision, under the newest claim of the sink id
    written   after the last of its transactions is committed
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from onceflow.core.protocol.ids import AttemptId

NOTED_MAX = 16
"""Batches; as many as a log of decisions retains."""


@dataclass(frozen=True, slots=True)
class NotedBatches:
    """What a target says of one sink id."""

    attempt: AttemptId
    """The newest that has claimed it; 0: none has."""
    begun: int | None
    """The batch whose decision was begun last, unless it is known to be written."""
    written: tuple[int, ...]
    """The last ones that are, oldest first."""


class BatchNotes(ABC):
    """The note of one sink id in its target. Any process, any number of times."""

    @abstractmethod
    def read(self) -> NotedBatches:
        """Return what is noted.

        Raises:
            SinkError: The target cannot be asked now.
        """

    @abstractmethod
    def write(self, attempt: AttemptId, *, begun: int | None, written: tuple[int, ...]) -> None:
        """Replace the note, if `attempt` is the newest that has claimed the sink id.

        Raises:
            Fenced: It is not. Nothing is changed.
            SinkError: The target cannot be written to now.
        """
