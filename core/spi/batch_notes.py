"""The note about numbered batches in a target, for decisions that are kept in files outside it.

The files may be deleted, or another directory given. Then only the note shows which batches are
written.

    begun     before the decision, under the newest claim of the sink id
    written   after the last of its transactions is committed
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from onceflow.core.protocol.ids import AttemptId

NOTED_MAX = 16
"""The number of noted batches: as many as a log of decisions retains."""


@dataclass(frozen=True, slots=True)
class NotedBatches:
    """The content of a target's note for one sink id."""

    attempt: AttemptId
    """The newest attempt that has claimed the sink id; 0 if none has."""
    begun: int | None
    """The batch whose decision was begun last, unless it is known to be written."""
    written: tuple[int, ...]
    """The last batches that are written, oldest first."""


class BatchNotes(ABC):
    """The note of one sink id in its target. Used by any process, any number of times."""

    @abstractmethod
    def read(self) -> NotedBatches:
        """Return the content of the note.

        Raises:
            SinkError: The target cannot be asked now.
        """

    @abstractmethod
    def write(self, attempt: AttemptId, *, begun: int | None, written: tuple[int, ...]) -> None:
        """Replace the note, if `attempt` is the newest that has claimed the sink id.

        Raises:
            Fenced: `attempt` is not the newest. Nothing is changed.
            SinkError: The target cannot be written to now.
        """
