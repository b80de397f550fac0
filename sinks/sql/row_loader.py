"""How the rows between two barriers get into a transaction."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import pyarrow as pa

from onceflow.core.spi import RejectedRows


class RowLoader(ABC):
    """Takes rows now and has all of them in the open transaction when it is asked to finish.

    Used by one writer. Errors of the server are `SqlError`s and end the transaction.
    """

    @property
    @abstractmethod
    def rows(self) -> int:
        """How many rows were taken and not rejected since the last `finish`."""

    @abstractmethod
    def write(self, batch: pa.RecordBatch) -> None:
        """Take `batch`, which has rows.

        Raises:
            BadRow: The target cannot take a row, and bad rows fail the job.
        """

    @abstractmethod
    def finish(self) -> int:
        """Return how many rows of this transaction the server has taken, which is all of them."""

    def rejected(self) -> Sequence[RejectedRows]:
        """Return the bad rows left out since the last call."""
        return ()

    @abstractmethod
    def close(self) -> None:
        """Give up what is under way, without waiting long. Safe to call twice."""
