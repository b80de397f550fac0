"""The committer: it produces each staged transaction once, from any process and at any repetition.

    1. Take the lane of the transaction's subtask: every other committer of it is fenced, and its
       open transaction is ended.
    2. Read the commit offset. If it names the transaction, that was committed before: write the
       commit record, done.
    3. In one Kafka transaction: produce the staged rows, set the commit offset to the transaction.
    4. Write the commit record, delete the staged rows.

If the lane is already open here, `begin_commit` does steps 2 and 3 before the decision, except for
the transaction's end. What it has read stays true while no other process takes the lane. If another
process has taken it, the end fails.

The proof that each transaction is produced once. Let T be committed by some call, and consider any
later call for T that comes to step 3. It holds the lane, and T was committed before it took the
lane, because a commit by another owner fails after that. The commit offset then named T, or a later
transaction of the lane. In the second case, an owner of the lane produced the later transaction.
After taking the lane it had found the commit offset at T and written T's commit record (or had
written it itself) before it went on. A commit record is written before the rows are deleted. So
either step 2 ends this call, or the commit record exists, and taking the lane has deleted the
staged rows, so that there is nothing to produce. This proof depends neither on order, nor on time,
nor on the transaction's timeout: a transaction that the broker aborts leaves no commit offset, and
is produced again.

The proof depends on the existence of the commit offset. A broker forgets the offsets of an unused
group. Rows that waited longer than that, without a commit record, are not produced: `Unknown`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from itertools import chain

from confluent_kafka import KafkaException

from onceflow.core.backoff import Backoff
from onceflow.core.errors import ConfigError, SinkError, StateCorrupt, StorageError
from onceflow.core.protocol.committables import (
    Aborted,
    AbortOutcome,
    AlreadyCommitted,
    CommitOutcome,
    Committable,
    Committed,
    Lost,
    RetryLater,
    Unknown,
)
from onceflow.core.protocol.ids import CheckpointId, TransactionId
from onceflow.core.spi import Committer, CommitterContext
from onceflow.core.spi.staging import make_staged_committable, require_staging
from onceflow.sinks.kafka.fence import Fence
from onceflow.sinks.kafka.preflight import is_proof_expired
from onceflow.sinks.kafka.records import facts_of
from onceflow.sinks.kafka.settings import STAGED, KafkaSinkSettings, StaleRows
from onceflow.sinks.kafka.transactional_lane import (
    CommitRecords,
    LaneFailed,
    TransactionalLane,
    TransactionalLanes,
    lane_name,
    last_commit_offsets,
    list_proven,
    proof_of,
    read_decided_commit_offsets,
)

_logger = logging.getLogger("onceflow.sinks.kafka")


class KafkaCommitter(Committer):
    """A committer that works by name alone; see above. Used by one thread at a time."""

    def __init__(self, settings: KafkaSinkSettings, context: CommitterContext) -> None:
        """Connect to nothing yet.

        Raises:
            ConfigError: There is no checkpoint storage for staged rows.
        """
        self._settings = settings
        self._context = context
        self._area = require_staging(context.staging, context.sink_id, STAGED)
        self._commit_records = CommitRecords(self._area)
        self._lanes = TransactionalLanes(settings, context, self._area, self._commit_records)
        self._fence = Fence(settings, context)

    def commit(self, committable: Committable) -> CommitOutcome:
        """Return the outcome; after a lost reply, read the commit offset until a deadline.

        An error that lasts until a person changes something is returned at once.

        Raises:
            StateCorrupt: The staged rows differ from the sealed ones.
        """
        transaction = committable.transaction
        deadline = time.monotonic() + self._settings.deadline_s
        sent = False
        backoff = Backoff(until=deadline)
        while True:
            try:
                if self._end_if_begun(transaction):
                    return Committed()
                return self._commit(transaction, sent=sent, deadline=deadline)
            except LaneFailed as failure:
                # A new lane reads the commit offset, which tells whether the transaction was
                # committed.
                self._lanes.drop(transaction.subtask)
                sent, reason = sent or failure.sent, str(failure)
                if failure.fenced:
                    return self._after_fencing(transaction, reason, sent=sent)
                waits_for_person = failure.waits_for_person
            except ConfigError as error:
                reason, waits_for_person = str(error), True
            except (SinkError, StorageError) as error:
                reason, waits_for_person = str(error), False
            if waits_for_person or not backoff.pause():
                return self._retry_or_unknown(
                    transaction, reason, sent=sent, waits_for_person=waits_for_person
                )

    def begin_commit(self, committable: Committable) -> bool:
        """Produce the rows and the commit offset in a transaction that `commit` only ends.

        Does so only in a lane that is already open here. Only a decision may take a lane, because
        an overtaken attempt may still call this.
        """
        transaction = committable.transaction
        if not self._lanes.has(transaction.subtask):
            return False
        try:
            return self._begin(transaction)
        except (LaneFailed, SinkError, ConfigError, StorageError, StateCorrupt) as error:
            # This is no failure yet: `commit` tries again and reports an error that stays.
            _logger.debug(
                "the early commit of transaction %s could not be started: %s", transaction, error
            )
            self._lanes.drop(transaction.subtask)
            return False

    def withdraw_commit(self, committable: Committable) -> None:
        """Abort the transaction that `begin_commit` has begun; the rows stay staged."""
        transaction = committable.transaction
        lane = self._lanes.find_open(transaction.subtask)
        if lane is None or not lane.has_begun(self._proof(transaction)):
            return
        try:
            lane.withdraw()
        except LaneFailed as failure:
            _logger.debug(
                "the early commit of transaction %s could not be undone: %s", transaction, failure
            )
            self._lanes.drop(transaction.subtask)

    def abort(self, committable: Committable) -> AbortOutcome:
        """Delete the staged rows, then check that no process has committed or still commits them.

        The order matters. After the deletion, a process that opens the lane finds no rows to
        produce. Opening the lane here then fences a process that was committing them. The commit
        offset is read once before the deletion: if no broker replies, nothing is deleted.
        """
        transaction = committable.transaction
        deadline = time.monotonic() + self._settings.deadline_s
        try:
            topics = self._topics(transaction)
            if self._is_settled(transaction):
                return AlreadyCommitted()
            name = lane_name(transaction.sink_id, transaction.subtask)
            last_commit_offsets(self._settings, name, topics, deadline=deadline)
            self._area.discard(transaction)
            self._lanes.drop(transaction.subtask)
            lane = self._lanes.open_lane(transaction.subtask, deadline=deadline)
            lane.look_at(topics, deadline=deadline)
        except (LaneFailed, SinkError, ConfigError, StorageError) as error:
            self._lanes.drop(transaction.subtask)
            return RetryLater(f"aborting {transaction}: {error}")
        if lane.proves(self._proof(transaction)):
            # The rows are gone, and the lane's next commit overwrites this proof.
            self._lanes.settle(transaction)
            return AlreadyCommitted()
        return Aborted()

    def in_doubt(self) -> Sequence[Committable]:
        """Return the staged transactions that are not committed; delete rows of committed ones.

        Raises:
            SinkError: Kafka cannot be asked now.
        """
        listing = self._commit_records.list_transactions()
        for transaction in listing.leftovers:
            self._area.discard(transaction)
        proofs: dict[int, frozenset[TransactionId]] = {}
        committables: list[Committable] = []
        for transaction in listing.open:
            subtask = transaction.subtask
            # One query for each subtask, however many of its transactions are staged.
            if subtask not in proofs:
                proofs[subtask] = self._read_proven(subtask)
            if transaction in proofs[subtask]:
                self._commit_records.settle(transaction)
            else:
                committables.append(make_staged_committable(transaction))
        return tuple(committables)

    def prune(self, before: CheckpointId) -> None:
        """Delete the commit records of checkpoints before `before`.

        A failure is only logged: commit records do no harm, and the next call comes soon.
        """
        try:
            self._commit_records.prune(before)
            self._fence.refresh()
        except (StorageError, SinkError, ConfigError) as error:
            _logger.warning(
                "sink %s: commit records before checkpoint %s are not all deleted: %s",
                self._context.sink_id,
                before,
                error,
            )

    def close(self) -> None:
        """Disconnect."""
        self._lanes.close()

    def _begin(self, transaction: TransactionId) -> bool:
        deadline = time.monotonic() + self._settings.deadline_s
        # This writes due commit records of the lane, as for a commit.
        lane = self._lanes.open_lane(transaction.subtask, deadline=deadline)
        proof = self._proof(transaction)
        if lane.has_begun() or lane.proves(proof):
            return False
        # Read after the lane was taken, as for a commit. Rows that another process committed or
        # aborted before are gone by now, and a process that commits or aborts them later takes the
        # lane.
        rows = self._area.read(transaction)
        if rows is None:
            return False
        first = next(rows)[1]
        facts = facts_of(first)
        is_plain = self._rule_for(transaction, lane, facts.staged_at_s) is StaleRows.PRODUCE
        if not is_plain or not lane.has_read(facts.topics):
            return False
        lane.begin(proof, transaction.checkpoint, chain([first], (batch for _, batch in rows)))
        return True

    def _commit(self, transaction: TransactionId, *, sent: bool, deadline: float) -> CommitOutcome:
        """Try once; `sent` is True if an earlier try may have committed."""
        # An open lane already has its commit offsets. Without one, looking into storage may avoid
        # taking the lane from another process.
        if not self._lanes.has(transaction.subtask) and self._is_settled(transaction):
            return AlreadyCommitted()
        lane = self._lanes.open_lane(transaction.subtask, deadline=deadline)
        proof = self._proof(transaction)
        rows = self._area.read(transaction)
        # The first batch contains the topics and the age of all; it is produced first.
        first = None if rows is None else next(rows)[1]
        # Include the topics of the staged rows: the settings may name others by now.
        if rows is not None and first is not None:
            lane.look_at(facts_of(first).topics, deadline=deadline)
        elsewhere = first is not None and self._was_committed_elsewhere(transaction, lane)
        if elsewhere or lane.proves(proof):
            self._lanes.settle(transaction)
            return Committed() if sent else AlreadyCommitted()
        if rows is None or first is None:
            return self._resolve_gone(transaction, deadline)
        rule = self._rule_for(transaction, lane, facts_of(first).staged_at_s)
        if rule is StaleRows.FAIL:
            return self._stale(transaction)
        if rule is StaleRows.DISCARD:
            # This commit offset shows that later transactions are not committed.
            lane.prove(proof, transaction.checkpoint, facts_of(first).topics)
            self._lanes.settle(transaction)
            return Committed()
        batches = chain([first], (batch for _, batch in rows))
        lane.commit(proof, transaction.checkpoint, batches)
        self._lanes.settle(transaction)
        return Committed()

    def _end_if_begun(self, transaction: TransactionId) -> bool:
        """Commit `transaction` if it is begun, and return True; withdraw another begun transaction.

        `_begin` has made all checks of a commit. They are still valid: only the owner of the lane
        can change the facts, and a former owner fails here.
        """
        lane = self._lanes.find_open(transaction.subtask)
        if lane is None or not lane.has_begun():
            return False
        if not lane.has_begun(self._proof(transaction)):
            lane.withdraw()
            return False
        lane.end()
        self._lanes.settle(transaction)
        return True

    def _rule_for(
        self, transaction: TransactionId, lane: TransactionalLane, staged_at_s: float
    ) -> StaleRows:
        """Return the rule for staged rows that no commit offset names: they are not committed.

        The user's rule applies only if Kafka may have forgotten the commit offset. It does not
        apply while the lane has a proof: the proof of the commit before would be older, and
        forgotten as well. So if several checkpoints have waited, only the first of a subtask is in
        doubt.
        """
        has_proof = bool(list_proven(lane.commit_offsets.values(), self._context.log_id))
        if has_proof or not is_proof_expired(self._settings, staged_at_s):
            return StaleRows.PRODUCE
        return self._settings.stale_rows.rule_for(transaction)

    def _was_committed_elsewhere(self, transaction: TransactionId, lane: TransactionalLane) -> bool:
        """Return True if rows from a savepoint were committed by the job that took the savepoint.

        That job wrote its commit record into its own storage. Within one attempt a subtask's
        transactions are committed in order, so a later transaction's commit offset proves the
        earlier ones.
        """
        later = [
            proof
            for proof in list_proven(lane.commit_offsets.values(), self._context.log_id)
            if proof.attempt == transaction.attempt and _order(proof) > _order(transaction)
        ]
        return bool(later) and self._area.is_imported(transaction)

    def _is_settled(self, transaction: TransactionId) -> bool:
        """Return True if there is a commit record; needs no lane, and fences no process."""
        if not self._commit_records.has(transaction):
            return False
        self._area.discard(transaction)
        return True

    def _resolve_gone(self, transaction: TransactionId, deadline: float) -> AlreadyCommitted | Lost:
        """Tell committed from lost if nothing is staged: by commit record, then commit offset.

        A commit record is written before rows are deleted. So a commit record whose writing had
        begun when the rows were looked for exists by now. The commit offset decides if an abort has
        deleted the rows of a running commit.
        """
        if self._commit_records.has(transaction):
            return AlreadyCommitted()
        self._lanes.drop(transaction.subtask)
        if self._lanes.open_lane(transaction.subtask, deadline=deadline).proves(
            self._proof(transaction)
        ):
            return AlreadyCommitted()
        if self._settings.stale_rows.rule_for(transaction) is StaleRows.DISCARD:
            self._lanes.settle(transaction)
            return AlreadyCommitted()
        return Lost(
            f"nothing is staged for transaction {transaction} of checkpoint"
            f" {transaction.checkpoint}, and neither a commit record in checkpoint storage nor"
            f" the commit offset of group {lane_name(transaction.sink_id, transaction.subtask)!r}"
            f" in {self._settings.where} says that it was committed: its staged rows were deleted"
            " outside onceflow. Check whether its records are in the topic. If they are not,"
            " write them by hand, or accept their loss. Then start the job with"
            f" KafkaSink(stale_rows='discard {transaction}'), which counts them as committed"
        )

    def _stale(self, transaction: TransactionId) -> Unknown:
        return Unknown(
            f"transaction {transaction} has waited in checkpoint storage for longer than"
            f" {self._settings.where} keeps proofs of commits (offsets.retention.minutes), so it"
            " is no longer known whether its records are already in the topic. Check the topic."
            " If they are not there, start the job with KafkaSink(stale_rows='produce"
            f" {transaction}'), which produces them. If they are there, start it with"
            f" stale_rows='discard {transaction}', which counts them as committed. Separate"
            " several transactions by commas",
            until_fixed=True,
        )

    def _after_fencing(
        self, transaction: TransactionId, reason: str, *, sent: bool
    ) -> CommitOutcome:
        """Return the outcome without taking the lane back: two committers would never end."""
        deadline = time.monotonic() + self._settings.deadline_s
        try:
            if self._is_settled(transaction):
                return AlreadyCommitted()
            topics = self._topics(transaction)
            name = lane_name(transaction.sink_id, transaction.subtask)
            texts = read_decided_commit_offsets(self._settings, name, topics, deadline=deadline)
        except (LaneFailed, SinkError, ConfigError, StorageError) as error:
            return self._retry_or_unknown(
                transaction, f"{reason}; then {error}", sent=sent, waits_for_person=False
            )
        if self._proof(transaction) in texts.values():
            return AlreadyCommitted()
        # After fencing, our transaction is ended, and the commit offsets show that it is not
        # committed.
        return RetryLater(f"another committer has taken over: {reason}")

    def _retry_or_unknown(
        self, transaction: TransactionId, reason: str, *, sent: bool, waits_for_person: bool
    ) -> RetryLater | Unknown:
        if not sent:
            return RetryLater(
                f"transaction {transaction} was not produced: {reason}",
                until_fixed=waits_for_person,
            )
        return Unknown(
            f"the commit of transaction {transaction} was sent to {self._settings.where} and not"
            f" answered, and its commit offset could not be read within"
            f" {self._settings.deadline_s:g} s: {reason}",
            until_fixed=waits_for_person,
        )

    def _read_proven(self, subtask: int) -> frozenset[TransactionId]:
        name = lane_name(self._context.sink_id, subtask)
        deadline = time.monotonic() + self._settings.deadline_s
        try:
            # Do not wait: a transaction that a dead committer has left open is in doubt, and may
            # last.
            texts = last_commit_offsets(
                self._settings, name, self._settings.topics, deadline=deadline
            )
        except (LaneFailed, KafkaException) as error:
            raise SinkError(
                f"sink {self._context.sink_id}: cannot list its transactions in doubt at"
                f" {self._settings.where}: {error}"
            ) from error
        return frozenset(list_proven(texts.values(), self._context.log_id))

    def _topics(self, transaction: TransactionId) -> tuple[str, ...]:
        """Return the topics that may have the commit offset of `transaction`."""
        try:
            rows = self._area.read(transaction)
        except StateCorrupt:
            # An abort does not need the rows.
            return self._settings.topics
        return self._settings.topics if rows is None else facts_of(next(rows)[1]).topics

    def _proof(self, transaction: TransactionId) -> str:
        return proof_of(transaction, self._context.log_id)


def _order(transaction: TransactionId) -> tuple[int, int]:
    return transaction.checkpoint, transaction.sequence


class IdleCommitter(Committer):
    """The committer for at-least-once delivery without checkpoint storage. Nothing is in doubt."""

    def commit(self, committable: Committable) -> CommitOutcome:
        """Return Lost, because nothing of the name is staged."""
        return Lost(
            f"nothing is staged for {committable.transaction}: the sink writes at least once and"
            " has no checkpoint storage"
        )

    def abort(self, committable: Committable) -> AbortOutcome:
        """Return Aborted, because there is nothing to abort."""
        return Aborted()

    def in_doubt(self) -> Sequence[Committable]:
        """Return nothing."""
        return ()

    def close(self) -> None:
        """Release nothing."""
