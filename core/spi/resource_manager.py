"""The interface to a holder of transactions in doubt, by which they are listed and settled."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from datetime import datetime

from onceflow.core.protocol.ids import TransactionId
from onceflow.core.protocol.log.in_doubt import LogFacts
from onceflow.core.protocol.log.target_records import TargetRecord
from onceflow.core.spi.sink import Committer, CommitterContext


class ResourceManager(ABC):
    """A holder of transactions in doubt: a database, one sink's target, a job's storage."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The name for people; contains no secret."""

    @abstractmethod
    def sink_ids(self, log: LogFacts | None) -> Sequence[str]:
        """Return every sink id under which a transaction may be in doubt here.

        Raises:
            SinkError: The resource manager cannot be asked now.
        """

    @abstractmethod
    def committer(self, context: CommitterContext) -> Committer:
        """Return the committer that settles the transactions of `context.sink_id`."""

    def read_claimant(self, sink_id: str) -> str | None:
        """Return the identity of the decision log that claimed `sink_id`, if it is known."""
        del sink_id
        return None

    def target_record(self, context: CommitterContext) -> TargetRecord | None:
        """Return the target's record of `context.sink_id`, or None if it keeps none.

        Raises:
            ConfigError: Another job owns the sink id.
            SinkError: The target cannot be asked now.
        """
        del context
        return None

    def sessions(self, sink_id: str) -> Sequence[str]:
        """Return the writers of `sink_id` that are connected now, if they are known."""
        del sink_id
        return ()

    def find_prepare_time(self, transaction: TransactionId) -> datetime | None:
        """Return the time at which `transaction` was prepared, if only the target knows it."""
        del transaction
        return None

    def rows(self, transaction: TransactionId) -> int | None:
        """Return the number of rows of `transaction`, if it is known."""
        del transaction
        return None

    def close(self) -> None:  # noqa: B027 - optional hook
        """Release all resources. May be called twice."""
