"""What a query of Structured Streaming has in doubt, and what its own decisions say of it.

A job's decisions are in its checkpoint storage; a query's are in the database that it writes to, or
below its checkpoint. The next batch settles all of it; this is for what cannot wait for that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from onceflow.connectors.spark.batch_identity import staging_area
from onceflow.connectors.spark.checkpoint_location import CheckpointLocation
from onceflow.connectors.spark.decision_keepers import logged_decisions
from onceflow.core.batch_decisions import BatchDecisions
from onceflow.core.in_doubt import (
    InDoubtKind,
    InDoubtTransaction,
    ResourceManager,
    SinkNeeded,
    SinkResourceManager,
    TransactionSettler,
)
from onceflow.core.protocol.batches import BatchClaim
from onceflow.core.protocol.committables import AbortOutcome, CommitOutcome, Committable
from onceflow.core.protocol.ids import TransactionId
from onceflow.core.protocol.in_doubt import Resolution, batch_in_doubt_status, refusal
from onceflow.core.protocol.recovery import commit_order
from onceflow.core.spi import Committer, CommitterContext
from onceflow.core.staging import is_staged, staged_committable
from onceflow.sinks.sql.batch_decisions import SqlBatchDecisions
from onceflow.sinks.sql.connector import SqlResourceManager
from onceflow.sinks.sql.sink import SqlSink


class QueryTransactions(TransactionSettler):
    """All that the query whose checkpoint is at `location` has in doubt at `manager`. One thread.

    Looking changes nothing. `staging` is the query's option stagingLocation, where it has one.
    """

    def __init__(
        self,
        location: CheckpointLocation,
        manager: ResourceManager,
        *,
        sink_id: str = "",
        staging: str = "",
    ) -> None:
        """Read who the query is; connect to nothing yet.

        Raises:
            StorageError: The checkpoint cannot be read.
            ConfigError: `staging` is no place that files can be in.
        """
        self._manager = manager
        self._owner = f"Spark query {location.query_id()}"
        self._sink_id = sink_id or location.sink_id()
        self._directory = staging or f"{location.url}/onceflow"
        self._decisions = self._keeper()
        self._committers: dict[str, Committer] = {}

    def in_doubt(self) -> tuple[InDoubtTransaction, ...]:
        """Return everything in doubt, in the order in which the next batch would commit it.

        Raises:
            ConfigError: The sink id belongs to another query.
            SinkError, StorageError: Target or storage cannot be asked now.
        """
        seen = self._decisions.seen()
        found = {
            (one.transaction, is_staged(one)): self._described(one, seen, held=True)
            for sink_id in self._sink_ids(seen)
            for one in self._held(sink_id)
        }
        return tuple(sorted(found.values(), key=lambda one: commit_order(one.committable)))

    def find(self, transaction: TransactionId) -> InDoubtTransaction | None:
        """Return `transaction` if it is in doubt, or if a decision that is remembered lists it.

        Raises:
            ConfigError, SinkError, StorageError: As `in_doubt`.
        """
        for one in self.in_doubt():
            if one.transaction == transaction:
                return one
        seen = self._decisions.seen()
        decided = _listed(seen).get(transaction)
        return None if decided is None else self._described(decided, seen, held=False)

    def refusal(self, resolution: Resolution, one: InDoubtTransaction) -> str | None:
        """Return why the decisions, as they are now, forbid `resolution`, or None."""
        status = batch_in_doubt_status(one.committable, self._decisions.seen())
        return refusal(resolution, status, None)

    def force_commit(self, one: InDoubtTransaction) -> CommitOutcome:
        """Make its rows visible whatever is decided. Doubles them unless they are decided."""
        return self._settling(one).commit(one.committable)

    def force_abort(self, one: InDoubtTransaction) -> AbortOutcome:
        """Make its rows gone whatever is decided. Loses them if they are decided."""
        return self._settling(one).abort(one.committable)

    def fence(self) -> None:
        """Take the sink id over: no attempt before decides anything more. The query starts again.

        Raises:
            Fenced: Another run claims it at this moment.
        """
        self._decisions.fence()

    def close(self) -> None:
        """Disconnect. Safe to call twice."""
        self._decisions.close()
        for committer in self._committers.values():
            committer.close()
        self._committers.clear()
        self._manager.close()

    # --- steps --------------------------------------------------------------------------------

    def _keeper(self) -> BatchDecisions:
        manager = self._manager
        match manager:
            case SqlResourceManager(sink=sink) | SinkResourceManager(sink=SqlSink() as sink):
                return SqlBatchDecisions(sink.settings, self._sink_id, self._owner)
            case _:
                return logged_decisions(self._directory, self._sink_id)

    def _sink_ids(self, seen: BatchClaim) -> Sequence[str]:
        """Return the query's own sink id, and those of the other sinks of its foreach_batch."""
        claimed = (
            one
            for one in self._manager.sink_ids(None)
            if self._manager.claimed_by(one) == self._owner
        )
        listed = (transaction.sink_id for transaction in _listed(seen))
        return sorted({self._sink_id, *claimed, *listed})

    def _held(self, sink_id: str) -> Sequence[Committable]:
        staging = staging_area(self._directory, sink_id)
        staged = (staged_committable(one) for one in staging.transactions())
        return (*self._committer(sink_id).in_doubt(), *staged)

    def _described(
        self, committable: Committable, seen: BatchClaim, *, held: bool
    ) -> InDoubtTransaction:
        transaction = committable.transaction
        committable = _listed(seen).get(transaction, committable)
        staged = is_staged(committable)
        prepared_at = None
        if held and staged:
            area = staging_area(self._directory, transaction.sink_id)
            prepared_at = area.sealed_at(transaction)
        elif held:
            prepared_at = self._committer(transaction.sink_id).prepared_at(committable)
        return InDoubtTransaction(
            committable=committable,
            kind=InDoubtKind.STAGED if staged else InDoubtKind.PREPARED,
            rows=committable.rows or None,
            held_by=self._manager.name,
            held=held,
            prepared_at=prepared_at,
            status=batch_in_doubt_status(committable, seen),
        )

    def _settling(self, one: InDoubtTransaction) -> Committer:
        if is_staged(one.committable) and not isinstance(self._manager, SinkResourceManager):
            raise SinkNeeded(
                f"the rows of transaction {one.transaction} are staged below {self._directory}, and"
                " only their sink knows where they go: name it (--sink module:name), or start the"
                " query"
            )
        return self._committer(one.transaction.sink_id)

    def _committer(self, sink_id: str) -> Committer:
        committer = self._committers.get(sink_id)
        if committer is None:
            context = CommitterContext(
                job=self._owner,
                uid=sink_id,
                sink_id=sink_id,
                attempt=self._decisions.seen().attempt,
                log_id=self._owner,
                staging=staging_area(self._directory, sink_id),
            )
            committer = self._committers[sink_id] = self._manager.committer(context)
        return committer


def _listed(seen: BatchClaim) -> Mapping[TransactionId, Committable]:
    return {c.transaction: c for one in seen.decisions for c in one.committables}
