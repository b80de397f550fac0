"""The transactions in doubt of Spark's batches, and their own decisions about them.

The decisions of a job are in its checkpoint storage. Those of a query or of batch writes are in the
target database, or in files below the checkpoint or the staging location. The next batch commits or
rolls back all of these transactions. This module is for users who cannot wait for the next batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from onceflow.connectors.spark.batch.decision_keepers import open_decision_log, resolve_keeper
from onceflow.connectors.spark.batch.identity import is_owner_of_app, staging_area, write_target
from onceflow.connectors.spark.streaming.checkpoint_location import CheckpointLocation
from onceflow.core.commit import by_hand
from onceflow.core.commit.logged_decisions import batch_in_doubt_status, refusal
from onceflow.core.errors import ConfigError
from onceflow.core.protocol import committables
from onceflow.core.protocol.batches import BatchClaim
from onceflow.core.protocol.checkpoints.snapshots import commit_order
from onceflow.core.protocol.ids import TransactionId
from onceflow.core.protocol.log.target_records import Resolution
from onceflow.core.spi import Committer, CommitterContext
from onceflow.core.spi.batch_decisions import BatchDecisions
from onceflow.core.spi.connector import ResourceManager
from onceflow.core.spi.staging import StagingArea, is_staged, make_staged_committable
from onceflow.sinks.sql.batch_table import SqlBatchDecisions
from onceflow.sinks.sql.connector import SqlResourceManager
from onceflow.sinks.sql.sink import SqlSink


def query_transactions(
    location: CheckpointLocation, manager: ResourceManager, *, sink_id: str = "", staging: str = ""
) -> BatchTransactions:
    """Return the transactions in doubt at `manager` of the query with its checkpoint at `location`.

    Reads the query's id; opens no connection yet. `staging` is the query's option stagingLocation,
    if it has one.

    Raises:
        StorageError: The checkpoint cannot be read.
        ConfigError: `staging` cannot hold files.
    """
    return BatchTransactions(
        manager,
        owner=f"Spark query {location.query_id()}",
        sink_id=sink_id or location.sink_id(),
        directory=staging or f"{location.url}/onceflow",
    )


def write_transactions(
    app: str, manager: SqlResourceManager | by_hand.SinkResourceManager, *, staging: str = ""
) -> by_hand.TransactionSettler:
    """Return the transactions in doubt at `manager` of the writes with option txnAppId `app`.

    For a database, these are the transactions of all its tables. `staging` is the writes' option
    stagingLocation.

    Raises:
        ConfigError: Nothing was written there with that txnAppId.
        SinkError: The database does not answer now.
    """
    if isinstance(manager, by_hand.SinkResourceManager):
        options = {"txnappid": app, "txnversion": "0"}
        if staging:
            options["staginglocation"] = staging
        named, _ = write_target(lambda _: manager.sink, options)
        target = named.target
        owned = by_hand.SinkResourceManager(manager.sink, target.sink_id)
        return BatchTransactions(
            owned,
            owner=target.owner,
            sink_id=target.sink_id,
            directory=named.directory,
            decisions=None if isinstance(manager.sink, SqlSink) else resolve_keeper(named)[1],
        )
    owners = manager.owners()
    written = {owned_id: owner for owned_id, owner in owners.items() if is_owner_of_app(owner, app)}
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


class BatchTransactions(by_hand.TransactionSettler):
    """The transactions in doubt of one owner of batches at `manager`. One thread may use it.

    Reading changes nothing. `directory` has the staged files; None without one. `decisions` are
    those of the owner. Without them, the decisions are in the database, or else in `directory`.
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
        """Open no connection yet.

        Raises:
            ConfigError: `directory` cannot hold files, or is needed and missing.
        """
        self._manager = manager
        self._owner = owner
        self._sink_id = sink_id
        self._directory = directory
        self._decisions = self._keeper() if decisions is None else decisions
        self._committers: dict[str, Committer] = {}

    def in_doubt(self) -> tuple[by_hand.InDoubtTransaction, ...]:
        """Return all transactions in doubt, in the order in which the next batch would commit them.

        Raises:
            ConfigError: The sink id belongs to another query.
            SinkError, StorageError: The target or the storage does not answer now.
        """
        seen = self._decisions.read_claim()
        # Key by name and kind: both the committer and the staging area list a staged transaction.
        transactions = {
            (committable.transaction, is_staged(committable)): self._describe(
                committable, seen, held=True
            )
            for sink_id in self._sink_ids(seen)
            for committable in self._list_held(sink_id)
        }
        return tuple(
            sorted(transactions.values(), key=lambda entry: commit_order(entry.committable))
        )

    def find(self, transaction: TransactionId) -> by_hand.InDoubtTransaction | None:
        """Return `transaction` if it is in doubt, or if a remembered decision contains it.

        Raises:
            ConfigError, SinkError, StorageError: See `in_doubt`.
        """
        for entry in self.in_doubt():
            if entry.transaction == transaction:
                return entry
        seen = self._decisions.read_claim()
        decided = _list_committables(seen).get(transaction)
        return None if decided is None else self._describe(decided, seen, held=False)

    def refusal(self, resolution: Resolution, in_doubt: by_hand.InDoubtTransaction) -> str | None:
        """Return why the current decisions forbid `resolution`, or None if they do not."""
        status = batch_in_doubt_status(in_doubt.committable, self._decisions.read_claim())
        return refusal(resolution, status, None)

    def force_commit(self, in_doubt: by_hand.InDoubtTransaction) -> committables.CommitOutcome:
        """Commit the transaction, whatever is decided.

        If it is not decided, its rows may be duplicated.

        The last transaction of a batch marks the batch as committed, for views of whole batches.
        """
        outcome = self._settling(in_doubt).commit(in_doubt.committable)
        if isinstance(outcome, committables.Committed | committables.AlreadyCommitted):
            self._mark_if_whole(in_doubt.transaction)
        return outcome

    def force_abort(self, in_doubt: by_hand.InDoubtTransaction) -> committables.AbortOutcome:
        """Roll back the transaction, whatever is decided. If it is decided, its rows are lost.

        A decision in a database then no longer contains it. The batch counts as written without
        these rows, or as never written if it has no other rows. If this call is repeated after a
        crash, it does the remaining steps.
        """
        # Roll back the rows first. If the decision lost them first, the rest could not be done
        # after a crash.
        outcome = self._settling(in_doubt).abort(in_doubt.committable)
        if isinstance(outcome, committables.Aborted):
            self._decisions.give_up(in_doubt.transaction)
        return outcome

    def fence(self) -> None:
        """Claim the sink id, so that no earlier attempt can decide. The next run continues.

        Raises:
            Fenced: Another run is claiming the sink id at this moment.
        """
        self._decisions.fence()

    def close(self) -> None:
        """Disconnect. A second call does nothing."""
        self._decisions.close()
        for committer in self._committers.values():
            committer.close()
        self._committers.clear()
        self._manager.close()

    # --- steps --------------------------------------------------------------------------------

    def _keeper(self) -> BatchDecisions:
        manager = self._manager
        match manager:
            case (
                SqlResourceManager(sink=sink) | by_hand.SinkResourceManager(sink=SqlSink() as sink)
            ):
                return SqlBatchDecisions(sink.settings, self._sink_id, self._owner)
            case _ if self._directory is None:
                raise ConfigError(
                    "--storage is missing: give the option stagingLocation of the writes"
                )
            case _:
                return open_decision_log(self._directory, self._sink_id)

    def _sink_ids(self, seen: BatchClaim) -> Sequence[str]:
        """Return the query's own sink id, and those of the other sinks of its foreach_batch."""
        # Sinks of the query's foreach_batch have sink ids of their own, under the same owner.
        claimed = (
            sink_id
            for sink_id in self._manager.sink_ids(None)
            if self._manager.read_claimant(sink_id) == self._owner
        )
        listed = (transaction.sink_id for transaction in _list_committables(seen))
        return sorted({self._sink_id, *claimed, *listed})

    def _mark_if_whole(self, transaction: TransactionId) -> None:
        """Mark the batch of `transaction` as committed if all its transactions are committed."""
        for decision in self._decisions.read_claim().decisions:
            others = {committable.transaction: committable for committable in decision.committables}
            if decision.is_committed or others.pop(transaction, None) is None:
                continue
            if any(entry.transaction in others for entry in self.in_doubt()):
                return
            # A transaction that is neither in doubt nor proven is lost. The next run reports it.
            outcomes = [
                self._committer(name.sink_id).commit(committable)
                for name, committable in others.items()
            ]
            if all(
                isinstance(outcome, committables.Committed | committables.AlreadyCommitted)
                for outcome in outcomes
            ):
                self._decisions.mark_committed(decision)

    def _list_held(self, sink_id: str) -> Sequence[committables.Committable]:
        staging = self._staging(sink_id)
        staged = map(make_staged_committable, staging.transactions() if staging else ())
        return (*self._committer(sink_id).in_doubt(), *staged)

    def _describe(
        self, committable: committables.Committable, seen: BatchClaim, *, held: bool
    ) -> by_hand.InDoubtTransaction:
        transaction = committable.transaction
        # The decision has the number of rows; the target lists only names.
        committable = _list_committables(seen).get(transaction, committable)
        staged = is_staged(committable)
        prepared_at = None
        if held and staged:
            area = self._staging(transaction.sink_id)
            prepared_at = area.find_seal_time(transaction) if area else None
        elif held:
            prepared_at = self._committer(transaction.sink_id).find_prepare_time(committable)
        return by_hand.InDoubtTransaction(
            committable=committable,
            kind=by_hand.InDoubtKind.STAGED if staged else by_hand.InDoubtKind.PREPARED,
            rows=committable.rows or None,
            held_by=self._manager.name,
            held=held,
            prepared_at=prepared_at,
            status=batch_in_doubt_status(committable, seen),
        )

    def _settling(self, entry: by_hand.InDoubtTransaction) -> Committer:
        knows_rows = isinstance(self._manager, (by_hand.SinkResourceManager, SqlResourceManager))
        if is_staged(entry.committable) and not knows_rows:
            raise by_hand.SinkNeeded(
                f"the rows of transaction {entry.transaction} are staged below"
                f" {self._directory}, and only their sink knows their table: name the sink"
                " (--sink module:name), or start the query"
            )
        return self._committer(entry.transaction.sink_id)

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
            # The committer needs no schema: staged rows name their table and have its types.
            return self._manager.sink.committer(context)
        return self._manager.committer(context)

    def _staging(self, sink_id: str) -> StagingArea | None:
        return None if self._directory is None else staging_area(self._directory, sink_id)


class SeveralBatchTransactions(by_hand.TransactionSettler):
    """The transactions in doubt of several owners, each with its own sink id.

    One thread may use it.
    """

    def __init__(self, by_sink_id: Mapping[str, BatchTransactions]) -> None:
        """Open no connection yet. At least one owner is needed, all at one resource manager."""
        self._by_sink_id = by_sink_id

    def in_doubt(self) -> tuple[by_hand.InDoubtTransaction, ...]:
        """Return all transactions in doubt, table by table."""
        return tuple(entry for each in self._by_sink_id.values() for entry in each.in_doubt())

    def find(self, transaction: TransactionId) -> by_hand.InDoubtTransaction | None:
        """Return `transaction` if it is in doubt, or if a remembered decision contains it."""
        owner = self._by_sink_id.get(transaction.sink_id)
        return None if owner is None else owner.find(transaction)

    def refusal(self, resolution: Resolution, in_doubt: by_hand.InDoubtTransaction) -> str | None:
        """Return why the current decisions forbid `resolution`, or None if they do not."""
        return self._find_owner(in_doubt).refusal(resolution, in_doubt)

    def force_commit(self, in_doubt: by_hand.InDoubtTransaction) -> committables.CommitOutcome:
        """Commit the transaction, whatever is decided.

        If it is not decided, its rows may be duplicated.
        """
        return self._find_owner(in_doubt).force_commit(in_doubt)

    def force_abort(self, in_doubt: by_hand.InDoubtTransaction) -> committables.AbortOutcome:
        """Roll back the transaction, whatever is decided. If it is decided, its rows are lost."""
        return self._find_owner(in_doubt).force_abort(in_doubt)

    def fence(self) -> None:
        """Claim all sink ids, so that no earlier attempt can decide."""
        for each in self._by_sink_id.values():
            each.fence()

    def close(self) -> None:
        """Disconnect. A second call does nothing."""
        for each in self._by_sink_id.values():
            each.close()

    def _find_owner(self, entry: by_hand.InDoubtTransaction) -> BatchTransactions:
        return self._by_sink_id[entry.transaction.sink_id]


def _list_committables(seen: BatchClaim) -> Mapping[TransactionId, committables.Committable]:
    return {c.transaction: c for decision in seen.decisions for c in decision.committables}
