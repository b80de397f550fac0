"""Where transactions may be in doubt, and who can settle them there."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from typing_extensions import override

from onceflow.core.errors import ConfigError, StateCorrupt, StorageError
from onceflow.core.protocol.committables import AbortOutcome, CommitOutcome, Committable
from onceflow.core.protocol.ids import TransactionId
from onceflow.core.protocol.in_doubt import LogFacts
from onceflow.core.spi import Committer, CommitterContext, Sink
from onceflow.core.staging import StagingArea, staged_committable
from onceflow.core.storage import JobStorage


class SinkNeeded(ConfigError):
    """Raised when rows are staged and what is given does not know where they go."""


class Place(ABC):
    """Where transactions may be in doubt: a database, one sink's target, a job's storage."""

    @property
    @abstractmethod
    def name(self) -> str:
        """What it is, for people; holds no secret."""

    @abstractmethod
    def sink_ids(self, log: LogFacts | None) -> Sequence[str]:
        """Return every sink id of which something may be in doubt here.

        Raises:
            SinkError: The place cannot be asked now.
        """

    @abstractmethod
    def committer(self, context: CommitterContext) -> Committer:
        """Return what settles the transactions of `context.sink_id`."""

    def claimed_by(self, sink_id: str) -> str | None:
        """Return the identity of the decision log that claimed `sink_id`, when the place tells."""
        del sink_id
        return None

    def sessions(self, sink_id: str) -> Sequence[str]:
        """Return the writers of `sink_id` that are connected now, where the place tells."""
        del sink_id
        return ()

    def prepared_at(self, transaction: TransactionId) -> datetime | None:
        """Return when `transaction` was prepared, where the place tells and its sink does not."""
        del transaction
        return None

    def rows(self, transaction: TransactionId) -> int | None:
        """Return how many rows `transaction` has, where the place tells."""
        del transaction
        return None

    def close(self) -> None:  # noqa: B027 - optional hook
        """Release everything. Safe to call twice."""


@dataclass(frozen=True)
class SinkPlace(Place):
    """The target of any sink, under the sink id by which its job writes."""

    sink: Sink
    sink_id: str

    @property
    @override
    def name(self) -> str:
        return type(self.sink).__name__

    @override
    def sink_ids(self, log: LogFacts | None) -> Sequence[str]:
        return (self.sink_id,)

    @override
    def committer(self, context: CommitterContext) -> Committer:
        return self.sink.committer(context)


@dataclass(frozen=True)
class StagedPlace(Place):
    """What a job's sinks have staged in its checkpoint storage; to look at, not to settle.

    Only the sink can apply rows, or tell whether they are applied already.
    """

    storage: JobStorage

    @property
    @override
    def name(self) -> str:
        return f"storage {self.storage}"

    @override
    def sink_ids(self, log: LogFacts | None) -> Sequence[str]:
        return self.storage.staged_sinks(log.sink_ids if log else ())

    @override
    def committer(self, context: CommitterContext) -> Committer:
        return _StagedOnly(context)

    @override
    def claimed_by(self, sink_id: str) -> str | None:
        return self.storage.log_id if self.storage.log.sequences() else None


class _StagedOnly(Committer):
    def __init__(self, context: CommitterContext) -> None:
        self._context = context

    @override
    def commit(self, committable: Committable) -> CommitOutcome:
        raise self._needs_sink(committable)

    @override
    def abort(self, committable: Committable) -> AbortOutcome:
        raise self._needs_sink(committable)

    @override
    def in_doubt(self) -> Sequence[Committable]:
        staging = self._context.staging
        if staging is None:
            return []
        counted = [(one, _rows_staged(staging, one)) for one in staging.transactions()]
        # What is there without rows is a sink's own mark and waits for nobody.
        return [staged_committable(one, rows or 0) for one, rows in counted if rows != 0]

    @override
    def close(self) -> None:
        pass

    def _needs_sink(self, committable: Committable) -> SinkNeeded:
        return SinkNeeded(
            f"the rows of transaction {committable.transaction} are staged in checkpoint storage,"
            " and only their sink knows where they go and whether they are there: name it"
            f" (--sink module:name --sink-id {self._context.sink_id}), or start the job"
        )


def _rows_staged(staging: StagingArea, transaction: TransactionId) -> int | None:
    """Return how many rows wait under `transaction`; None when they cannot be read."""
    try:
        return sum(batch.num_rows for _, batch in staging.read(transaction) or ())
    except (StateCorrupt, StorageError):
        # Its sink says what is wrong with them; they are in doubt all the same.
        return None
