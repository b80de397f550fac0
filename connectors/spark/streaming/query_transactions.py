"""What Spark's batches have in doubt, and what their own decisions say of it.

A job's decisions are in its checkpoint storage; those of a query or of batch writes are in the
database that they write to, or in files below the checkpoint or the staging location. The next
batch settles all of it; this is for what cannot wait for that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from onceflow.connectors.spark.batch.decision_keepers import open_decision_log, resolve_keeper
from onceflow.connectors.spark.batch.identity import is_owner_of_app, staging_area, write_target
from onceflow.connectors.spark.streaming.checkpoint_location import CheckpointLocation
from onceflow.core.commit.by_hand import (
    InDoubtKind,
    InDoubtTransaction,
    ResourceManager,
    SinkNeeded,
    SinkResourceManager,
    TransactionSettler,
)
from onceflow.core.commit.logged_decisions import Resolution, batch_in_doubt_status, refusal
from onceflow.core.errors import ConfigError
from onceflow.core.protocol.batches import BatchClaim
from onceflow.core.protocol.committables import (
    Aborted,
    AbortOutcome,
    AlreadyCommitted,
    CommitOutcome,
    Committable,
    Committed,
)
from onceflow.core.protocol.ids import TransactionId
from onceflow.core.protocol.recovery import commit_order
from onceflow.core.spi import Committer, CommitterContext
from onceflow.core.spi.batch_decisions import BatchDecisions
from onceflow.core.spi.staging import StagingArea, is_staged, make_staged_committable
from onceflow.sinks.sql.batch_table import SqlBatchDecisions
from onceflow.sinks.sql.connector import SqlResourceManager
from onceflow.sinks.sql.sink import SqlSink


def query_transactions(
    location: CheckpointLocation, manager: ResourceManager, *, sink_id: str = "", staging: str = ""
) -> BatchTransactions:
    """Return what the query whose checkpoint is at `location` has in doubt at `manager`.

    Reads who the query is, and connects to nothing yet. `staging` is the query's option
    stagingLocation, where it has one.

    Raises:
        StorageError: The checkpoint cannot be read.
        ConfigError: `staging` is no place that files can be in.
    """
    return BatchTransactions(
        manager,
        owner=f"Spark query {location.query_id()}",
        sink_id=sink_id or location.sink_id(),
        directory=staging or f"{location.url}/onceflow",
    )


def write_transactions(
    app: str, manager: SqlResourceManager | SinkResourceManager, *, staging: str = ""
) -> TransactionSettler:
    """Return what the writes with option txnAppId `app` have in doubt at `manager`.

    In a database that is in all its tables. `staging` is their option stagingLocation.

    Raises:
        ConfigError: Nothing was written with that txnAppId there.
        SinkError: The database cannot be asked now.
    """
    if isinstance(manager, SinkResourceManager):
        options = {"txnappid": app, "txnversion": "0"}
        if staging:
            options["staginglocation"] = staging
        named, _ = write_target(lambda _: manager.sink, options)
        target = named.target
        owned = SinkResourceManager(manager.sink, target.sink_id)
        return BatchTransactions(
            owned,
            owner=target.owner,
            sink_id=target.sink_id,
            directory=named.directory,
            decisions=None if isinstance(manager.sink, SqlSink) else resolve_keeper(named)[1],
        )
    owners = manager.owners()
    written = {one: owner for one, owner in owners.items() if is_owner_of_app(owner, app)}
    if not written:
        manager.close()
        raise ConfigError(f"nothing was written with txnAppId {app!r} at {manager.name}")
    return SeveralBatchTransactions(
        {
            sink_id: BatchTransactions(
                manager, owner=owner, sink_id=sink_id, directory=staging or None
            )
            for sink_id, owner in written.items()
        }
    )


class BatchTransactions(TransactionSettler):
    """All that one owner of batches has in doubt at `manager`. Looking changes nothing. One thread.

    `directory` is where files wait; None without one. `decisions` are those of the owner; without
    them they are in the database, or else in `directory`.
    """

    def __init__(
        self,
        manager: ResourceManager,
        *,
        owner: str,
        sink_id: str,
        directory: str | None,
        decisions: BatchDecisions | None = None,
    ) -> None:
        """Connect to nothing yet.

        Raises:
            ConfigError: `directory` is no place that files can be in, or is needed.
        """
        self._manager = manager
        self._owner = owner
        self._sink_id = sink_id
        self._directory = directory
        self._decisions = self._keeper() if decisions is None else decisions
        self._committers: dict[str, Committer] = {}

    def in_doubt(self) -> tuple[InDoubtTransaction, ...]:
        """Return everything in doubt, in the order in which the next batch would commit it.

        Raises:
            ConfigError: The sink id belongs to another query.
            SinkError, StorageError: Target or storage cannot be asked now.
        """
        seen = self._decisions.read_claim()
        # By name and kind: what is staged is listed by the committer and by the staging area.
        transactions = {
            (one.transaction, is_staged(one)): self._describe(one, seen, held=True)
            for sink_id in self._sink_ids(seen)
            for one in self._list_held(sink_id)
        }
        return tuple(sorted(transactions.values(), key=lambda one: commit_order(one.committable)))

    def find(self, transaction: TransactionId) -> InDoubtTransaction | None:
        """Return `transaction` if it is in doubt, or if a decision that is remembered lists it.

        Raises:
            ConfigError, SinkError, StorageError: As `in_doubt`.
        """
        for one in self.in_doubt():
            if one.transaction == transaction:
                return one
        seen = self._decisions.read_claim()
        decided = _committables_of(seen).get(transaction)
        return None if decided is None else self._describe(decided, seen, held=False)

    def refusal(self, resolution: Resolution, one: InDoubtTransaction) -> str | None:
        """Return why the decisions, as they are now, forbid `resolution`, or None."""
        status = batch_in_doubt_status(one.committable, self._decisions.read_claim())
        return refusal(resolution, status, None)

    def force_commit(self, one: InDoubtTransaction) -> CommitOutcome:
        """Make its rows visible whatever is decided. Doubles them unless they are decided.

        The last one of a batch marks the batch as committed, for views that show whole batches.
        """
        outcome = self._settling(one).commit(one.committable)
        if isinstance(outcome, Committed | AlreadyCommitted):
            self._mark_if_whole(one.transaction)
        return outcome

    def force_abort(self, one: InDoubtTransaction) -> AbortOutcome:
        """Make its rows gone whatever is decided. Loses them if they are decided.

        A decision in a database then lists them no more: the batch counts as written without them,
        or, with nothing else in it, as never written. Repeated after a crash it does the rest.
        """
        # Rows first: a decision that forgot them before could no longer be carried out after a
        # crash.
        outcome = self._settling(one).abort(one.committable)
        if isinstance(outcome, Aborted):
            self._decisions.give_up(one.transaction)
        return outcome

    def fence(self) -> None:
        """Take the sink id over: no attempt before decides anything more. The next run goes on.

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
            case _ if self._directory is None:
                raise ConfigError("--storage is missing: the option stagingLocation of the writes")
            case _:
                return open_decision_log(self._directory, self._sink_id)

    def _sink_ids(self, seen: BatchClaim) -> Sequence[str]:
        """Return the query's own sink id, and those of the other sinks of its foreach_batch."""
        # Sinks of the query's foreach_batch have sink ids of their own, under the same owner.
        claimed = (
            one
            for one in self._manager.sink_ids(None)
            if self._manager.read_claimant(one) == self._owner
        )
        listed = (transaction.sink_id for transaction in _committables_of(seen))
        return sorted({self._sink_id, *claimed, *listed})

    def _mark_if_whole(self, transaction: TransactionId) -> None:
        """Mark the batch of `transaction` as committed, if all that its decision lists is."""
        for decision in self._decisions.read_claim().decisions:
            others = {one.transaction: one for one in decision.committables}
            if decision.is_committed or others.pop(transaction, None) is None:
                continue
            if any(one.transaction in others for one in self.in_doubt()):
                return
            # What is neither in doubt nor proved is lost: the next run says so, and is to look.
            outcomes = [self._committer(name.sink_id).commit(one) for name, one in others.items()]
            if all(isinstance(one, Committed | AlreadyCommitted) for one in outcomes):
                self._decisions.mark_committed(decision)

    def _list_held(self, sink_id: str) -> Sequence[Committable]:
        staging = self._staging(sink_id)
        staged = map(make_staged_committable, staging.transactions() if staging else ())
        return (*self._committer(sink_id).in_doubt(), *staged)

    def _describe(
        self, committable: Committable, seen: BatchClaim, *, held: bool
    ) -> InDoubtTransaction:
        transaction = committable.transaction
        # The decision knows how many rows there are; the target lists names alone.
        committable = _committables_of(seen).get(transaction, committable)
        staged = is_staged(committable)
        prepared_at = None
        if held and staged:
            area = self._staging(transaction.sink_id)
            prepared_at = area.find_seal_time(transaction) if area else None
        elif held:
            prepared_at = self._committer(transaction.sink_id).find_prepare_time(committable)
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
        knows_rows = isinstance(self._manager, (SinkResourceManager, SqlResourceManager))
        if is_staged(one.committable) and not knows_rows:
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
                attempt=self._decisions.read_claim().attempt,
                log_id=self._owner,
                staging=self._staging(sink_id),
            )
            committer = self._committers[sink_id] = self._new_committer(context)
        return committer

    def _new_committer(self, context: CommitterContext) -> Committer:
        if isinstance(self._manager, SqlResourceManager):
            # Staged rows of a database say which table they go to, and are of its types already.
            return self._manager.sink.committer(context)
        return self._manager.committer(context)

    def _staging(self, sink_id: str) -> StagingArea | None:
        return None if self._directory is None else staging_area(self._directory, sink_id)


class SeveralBatchTransactions(TransactionSettler):
    """What several owners of batches have in doubt, each under a sink id of its own. One thread."""

    def __init__(self, by_sink_id: Mapping[str, BatchTransactions]) -> None:
        """Connect to nothing yet; there is at least one, and all are at one resource manager."""
        self._by_sink_id = by_sink_id

    def in_doubt(self) -> tuple[InDoubtTransaction, ...]:
        """Return everything in doubt, table by table."""
        return tuple(one for each in self._by_sink_id.values() for one in each.in_doubt())

    def find(self, transaction: TransactionId) -> InDoubtTransaction | None:
        """Return `transaction` if it is in doubt, or if a decision that is remembered lists it."""
        owner = self._by_sink_id.get(transaction.sink_id)
        return None if owner is None else owner.find(transaction)

    def refusal(self, resolution: Resolution, one: InDoubtTransaction) -> str | None:
        """Return why the decisions, as they are now, forbid `resolution`, or None."""
        return self._owner_of(one).refusal(resolution, one)

    def force_commit(self, one: InDoubtTransaction) -> CommitOutcome:
        """Make its rows visible whatever is decided. Doubles them unless they are decided."""
        return self._owner_of(one).force_commit(one)

    def force_abort(self, one: InDoubtTransaction) -> AbortOutcome:
        """Make its rows gone whatever is decided. Loses them if they are decided."""
        return self._owner_of(one).force_abort(one)

    def fence(self) -> None:
        """Take all sink ids over: no attempt before decides anything more."""
        for each in self._by_sink_id.values():
            each.fence()

    def close(self) -> None:
        """Disconnect. Safe to call twice."""
        for each in self._by_sink_id.values():
            each.close()

    def _owner_of(self, one: InDoubtTransaction) -> BatchTransactions:
        return self._by_sink_id[one.transaction.sink_id]


def _committables_of(seen: BatchClaim) -> Mapping[TransactionId, Committable]:
    return {c.transaction: c for one in seen.decisions for c in one.committables}
