"""The right to commit the transactions of one subtask, and the commit offset that proves a commit.

A lane is a transactional id, `onceflow/<sink id>/<subtask>`, and a consumer group of the same name.
Opening it (`init_transactions`) fences every other owner of the lane. It returns only after that
owner's open transaction has ended, committed or aborted. The commit offset is an offset of that
group, committed inside the transaction that it proves, with partition 0 of every topic that the
records go to: offset = checkpoint, metadata = "<transaction id> <id of the decision log>".

    T is committed  <=>  a commit offset of the lane names T, or named T until T had a commit record
    lane is open    =>   if another process commits in the lane, this owner's next commit fails

The commit offset on a topic lives as long as the records that it proves: when the topic is deleted,
so are its records.

The next commit of a lane overwrites the commit offset. Before that, the transaction that it names
must have its commit record. Otherwise no process could tell any more that it was committed.
`TransactionalLanes` ensures this when it opens a lane, and again if storage failed after a commit.

A commit record in checkpoint storage marks a transaction that Kafka has committed. Kafka forgets a
group's offsets (`offsets.retention.minutes`, a week by default) and so the commit offset that
proves a commit. A job that was stopped by its user must be able to start again after a month,
although its last checkpoint lists transactions for which no rows are staged any more. Therefore a
committer that knows of a commit seals an empty staged file next to the rows before it deletes them:
the commit record, as durable as the decision log that needs it.

    staged  recorded  the transaction is
    yes     no        open: the commit offset in Kafka says whether it is committed
    yes     yes       committed; a process died before the rows were deleted
    no      yes       committed
    no      no        aborted, or lost, or committed and pruned

A commit record has the name of its transaction with the sequence raised by 9000.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import pyarrow as pa
from confluent_kafka import KafkaException, Producer, TopicPartition

from onceflow.clients.kafka import client
from onceflow.clients.kafka.client import describe_error
from onceflow.core.errors import StorageError
from onceflow.core.protocol.ids import CheckpointId, TransactionId
from onceflow.core.spi import CommitterContext
from onceflow.core.spi.staging import StagingArea
from onceflow.sinks.kafka import clients
from onceflow.sinks.kafka.clients import advise, is_rejected
from onceflow.sinks.kafka.records import Produces, produce, topics_in
from onceflow.sinks.kafka.settings import KafkaSinkSettings

_RAISED_BY = 9000
"""The number added to the sequence in a commit record's name; no writer has so many sequences."""
_NOTHING = pa.RecordBatch.from_arrays([], schema=pa.schema([]))


@dataclass(frozen=True, slots=True)
class Listing:
    """The transactions in a staging area at one moment."""

    staged: Sequence[TransactionId]
    committed: frozenset[TransactionId]
    """The transactions that are known to be committed."""

    @property
    def leftovers(self) -> list[TransactionId]:
        """The transactions that are committed and still staged."""
        return [transaction for transaction in self.staged if transaction in self.committed]

    @property
    def open(self) -> list[TransactionId]:
        """The transactions that are staged and not known to be committed."""
        return [transaction for transaction in self.staged if transaction not in self.committed]


class CommitRecords:
    """The commit records of one sink id. Every call may be repeated, also by another process."""

    def __init__(self, area: StagingArea) -> None:
        self._area = area
        self._written: set[TransactionId] | None = None
        """The records not pruned yet, as far as this process knows; None before it has read
        storage."""

    def list_transactions(self) -> Listing:
        """Return the staged and the committed transactions.

        Raises:
            StorageError: Storage cannot be read.
        """
        staged: list[TransactionId] = []
        committed: list[TransactionId] = []
        for name in self._area.transactions():
            if name.sequence < _RAISED_BY:
                staged.append(name)
            else:
                committed.append(replace(name, sequence=name.sequence - _RAISED_BY))
        return Listing(staged, frozenset(committed))

    def has(self, transaction: TransactionId) -> bool:
        """Return True if `transaction` is known to be committed."""
        return self._area.contains(_name_of_record(transaction))

    def settle(self, transaction: TransactionId) -> None:
        """Record that `transaction` is committed, then delete its rows.

        Raises:
            StorageError: The record was not written, or the rows were not deleted.
        """
        rows = self._area.open()
        try:
            rows.write(_NOTHING, part="receipt")
            # The record is durable before the rows are deleted. In between both exist, which is
            # unambiguous.
            rows.seal(_name_of_record(transaction))
        except StorageError:
            # Another process may have sealed the same record.
            if not self.has(transaction):
                raise
        finally:
            rows.close()
        self._area.discard(transaction)
        if self._written is not None:
            self._written.add(transaction)

    def prune(self, before: CheckpointId) -> None:
        """Delete the commit records of checkpoints before `before`.

        The first call finds the records of all attempts and subtasks in storage. Later calls know
        the records that this process has written since.

        Raises:
            StorageError: Some records were not deleted.
        """
        known = self.list_transactions().committed if self._written is None else self._written
        old = [transaction for transaction in known if transaction.checkpoint < before]
        for transaction in old:
            self._forget(transaction)
        self._written = set(known).difference(old)

    def _forget(self, transaction: TransactionId) -> None:
        """Delete the rows of `transaction`, then its commit record, which is not needed any more.

        In this order: rows without their commit record would look as if they were open.
        """
        self._area.discard(transaction)
        self._area.discard(_name_of_record(transaction))


def _name_of_record(transaction: TransactionId) -> TransactionId:
    return replace(transaction, sequence=transaction.sequence + _RAISED_BY)


# Short, because both calls are optional. Without the abort the broker ends the transaction after
# its timeout; without the second read an error names one reason less.
_ABORT_S = 2.0
_LOOK_S = 2.0


class LaneFailed(Exception):
    """Raised if a lane cannot be opened or used any more; it is closed, and can be opened again.

    Attributes:
        fenced: Another owner has taken the lane.
        sent: The commit was requested, so only the commit offset tells whether it succeeded.
        waits_for_person: Each try fails until a person makes the change that the reason names.
    """

    def __init__(
        self,
        reason: str,
        *,
        fenced: bool = False,
        sent: bool = False,
        waits_for_person: bool = False,
    ) -> None:
        super().__init__(reason)
        self.fenced = fenced
        self.sent = sent
        self.waits_for_person = waits_for_person


def lane_name(sink_id: str, subtask: int) -> str:
    """Return the transactional id and group of a subtask's commits; sink ids contain no slash."""
    return f"onceflow/{sink_id}/{subtask}"


def proof_of(transaction: TransactionId, log_id: str) -> str:
    """Return the commit offset's text.

    The log id distinguishes a restarted job with equal numbers.
    """
    return f"{transaction} {log_id}"


def list_proven(texts: Iterable[str], log_id: str) -> list[TransactionId]:
    """Return the transactions of this job that the commit offsets `texts` prove to be committed."""
    transactions: list[TransactionId] = []
    for text in texts:
        name, _, log = text.partition(" ")
        transaction = TransactionId.parse(name)
        # The log of another job may have used the same sink id and numbers before.
        if transaction is not None and log == log_id:
            transactions.append(transaction)
    return transactions


def read_decided_commit_offsets(
    settings: KafkaSinkSettings, name: str, topics: Sequence[str], *, deadline: float
) -> Mapping[str, str]:
    """Return the commit offsets of lane `name` by topic, without fencing any process.

    Waits until no transaction of the lane is open, at most until `deadline`.

    Raises:
        LaneFailed: There was no reply.
    """
    return _commit_offsets(settings, name, topics, clients.Isolation.DECIDED, deadline)


def last_commit_offsets(
    settings: KafkaSinkSettings, name: str, topics: Sequence[str], *, deadline: float
) -> Mapping[str, str]:
    """Return the last commit offsets without waiting; more transactions may be committed.

    Raises:
        LaneFailed: There was no reply.
    """
    return _commit_offsets(settings, name, topics, clients.Isolation.LAST, deadline)


def _commit_offsets(
    settings: KafkaSinkSettings,
    name: str,
    topics: Sequence[str],
    isolation: clients.Isolation,
    deadline: float,
) -> Mapping[str, str]:
    reader = clients.open_group_reader(settings, name, isolation)
    try:
        return clients.read_committed_metadata(reader, topics, deadline=deadline)
    except KafkaException as error:
        advice = advise(client.error_of(error))
        reason = _unread(settings, name, topics, error)
        raise LaneFailed(
            f"{reason}{advice and f'; {advice}'}", waits_for_person=bool(advice)
        ) from error
    finally:
        reader.close()


def _unread(
    settings: KafkaSinkSettings, name: str, topics: Sequence[str], error: KafkaException
) -> str:
    """Return why commit offsets were not read: a silent broker, or a transaction that never ends.

    Source: KAFKA-20734.
    """
    reason = f"the commit offset of {name} was not read: {describe_error(error, settings)}"
    reader = clients.open_group_reader(settings, name, clients.Isolation.LAST)
    try:
        clients.read_committed_metadata(reader, topics, deadline=time.monotonic() + _LOOK_S)
    except KafkaException:
        return reason
    finally:
        reader.close()
    return (
        f"{reason}. The broker answers, and a transaction over the offsets of group {name} stays"
        " open. It ends by itself, except for a defect of Kafka 4.3.0 to 4.4.0 after a restart"
        " that follows a crash (KAFKA-20734): see 'A transaction that is never closed' in"
        " docs/sinks/kafka.md"
    )


@dataclass(frozen=True, slots=True)
class _Begun:
    """An open transaction that only has to be ended."""

    proof: str
    topics: frozenset[str]
    deadline: float


class TransactionalLane:
    """An open lane: a producer that is not yet fenced, and the commit offsets."""

    def __init__(self, settings: KafkaSinkSettings, name: str, *, deadline: float) -> None:
        """Take the lane from its present owner, and read its commit offsets, in this order.

        Raises:
            LaneFailed: It was not opened before `deadline`, or another owner has taken it
                meanwhile.
            ConfigError: librdkafka refuses a setting.
        """
        self._settings = settings
        self.name = name
        self._calls = clients.BoundedCalls()
        self._troubles = client.ClientTroubles(settings)
        self._producer: Producer = clients.open_producer(
            settings,
            client_id=name.replace("/", "."),
            transactional_id=name,
            troubles=self._troubles,
        )
        # First: commit offsets that are read after this can be changed only by this owner.
        self._call_repeatedly(self._producer.init_transactions, "was not opened", deadline)
        try:
            self._group = _group_of(settings, name)
            self.commit_offsets = dict(
                read_decided_commit_offsets(settings, name, settings.topics, deadline=deadline)
            )
        except BaseException:
            self.abandon()
            raise
        self._read = set(settings.topics)
        self._begun: _Begun | None = None

    def look_at(self, topics: Sequence[str], *, deadline: float) -> None:
        """Also read the commit offsets on `topics`, to which the sink may have written before.

        Raises:
            LaneFailed: There was no reply.
        """
        further = [topic for topic in topics if topic not in self._read]
        if further:
            self.commit_offsets |= read_decided_commit_offsets(
                self._settings, self.name, further, deadline=deadline
            )
            self._read |= set(further)

    def proves(self, proof: str) -> bool:
        """Return True if a commit offset has the text `proof`."""
        return proof in self.commit_offsets.values()

    def has_read(self, topics: Iterable[str]) -> bool:
        """Return True if the commit offsets of all `topics` are known here."""
        return self._read.issuperset(topics)

    def has_begun(self, proof: str | None = None) -> bool:
        """Return True if a transaction is open in the lane: that of `proof`, or any."""
        return self._begun is not None and proof in (None, self._begun.proof)

    def commit(self, proof: str, offset: int, batches: Iterable[pa.RecordBatch]) -> None:
        """Make the records of `batches` and the commit offset visible, all at once.

        This overwrites the previous commit offset, whose transaction must have its commit record.

        Raises:
            LaneFailed: They are not visible, or, if `sent`, only the commit offset tells.
        """
        self.begin(proof, offset, batches)
        self.end()

    def begin(self, proof: str, offset: int, batches: Iterable[pa.RecordBatch]) -> None:
        """Send the records and the commit offset, in a transaction that stays open.

        Until `end` or `withdraw`, read_committed consumers see neither these records nor later
        records of these partitions, of any producer. So one of the two must follow soon.

        Raises:
            LaneFailed: Nothing is begun.
        """
        deadline = time.monotonic() + self._settings.transaction_timeout_s
        topics: set[str] = set()
        try:
            self._producer.begin_transaction()
            for batch in batches:
                produce(cast("Produces", self._producer), batch, deadline=deadline)
                topics |= topics_in(batch)
        except KafkaException as error:
            raise self._to_failure(error, "records were not produced") from error
        except TimeoutError as error:
            self.abandon()
            raise LaneFailed(
                f"{self.name}: the records were not produced within transaction_timeout_s="
                f"{self._settings.transaction_timeout_s:g}: {error}. Raise it, up to the broker's"
                " transaction.max.timeout.ms"
            ) from error
        except BaseException:
            self.abandon()
            raise
        self._send_commit_offset(topics, proof, offset, deadline)
        self._begun = _Begun(proof, frozenset(topics), deadline)

    def end(self) -> None:
        """Commit the transaction that `begin` has begun.

        Raises:
            LaneFailed: It is not committed, or, if `sent`, only the commit offset tells.
        """
        begun, self._begun = self._begun, None
        assert begun is not None, "nothing is begun"
        self._call_repeatedly(
            self._producer.commit_transaction, "may be committed", begun.deadline, sent=True
        )
        # Only now, after the confirmed commit: `proves` must never claim more than Kafka has.
        self.commit_offsets |= dict.fromkeys(begun.topics, begun.proof)

    def withdraw(self) -> None:
        """Abort the transaction that `begin` has begun; the lane may be used again.

        Raises:
            LaneFailed: The abort is not confirmed; the next owner of the lane ends the transaction.
        """
        self._begun = None
        deadline = time.monotonic() + _ABORT_S
        self._call_repeatedly(self._producer.abort_transaction, "was not aborted", deadline)

    def prove(self, proof: str, offset: int, topics: Iterable[str]) -> None:
        """Commit only the commit offset, on `topics`, for records that are already in the topic.

        Raises:
            LaneFailed: It is not committed, or, if `sent`, only the commit offset tells.
        """
        deadline = time.monotonic() + self._settings.transaction_timeout_s
        try:
            self._producer.begin_transaction()
        except KafkaException as error:
            raise self._to_failure(error, "no transaction was begun") from error
        self._send_commit_offset(set(topics), proof, offset, deadline)
        self._begun = _Begun(proof, frozenset(topics), deadline)
        self.end()

    def abandon(self) -> None:
        """Abort an open transaction, so that no consumer waits for it, and close the lane."""
        self._begun = None
        with contextlib.suppress(KafkaException):
            self._producer.abort_transaction(_ABORT_S)
        self.close()

    def close(self) -> None:
        """Close the lane; its next owner ends an open transaction."""
        self._begun = None
        self._calls.close()
        self._producer.purge(blocking=False)

    def _send_commit_offset(
        self, topics: set[str], proof: str, offset: int, deadline: float
    ) -> None:
        offsets = [TopicPartition(topic, 0, offset, proof) for topic in sorted(topics)]

        def send(timeout_s: float) -> None:
            self._producer.send_offsets_to_transaction(offsets, self._group, timeout_s)

        self._call_repeatedly(send, "the commit offset was not written", deadline)

    def _call_repeatedly(
        self,
        call: Callable[[float], object],
        failure: str,
        deadline: float,
        *,
        sent: bool = False,
    ) -> None:
        """Call with a short timeout; repeat after each error that Kafka calls retriable."""
        try:
            self._calls.call_repeatedly(call, deadline=deadline)
        except TimeoutError as error:
            # The call is still running, so this producer must not be used any more.
            raise LaneFailed(f"{self.name}: {failure}: {error}", sent=sent) from error
        except KafkaException as error:
            raise self._to_failure(error, failure, sent=sent) from error

    def _to_failure(self, error: KafkaException, failure: str, *, sent: bool = False) -> LaneFailed:
        # A commit that was sent may have succeeded: do not abort; the commit offset will tell.
        # Otherwise an abort saves consumers the wait for the timeout. The client requests the
        # commit only after the broker has accepted all records.
        sent = sent and not is_rejected(client.error_of(error))
        # Runs the error callback, which alone receives a refused password: the call only timed out.
        # It raises a fatal error, such as a fence, which is the same as `error`.
        with contextlib.suppress(KafkaException):
            self._producer.poll(0)
        if sent:
            self.close()
        else:
            self.abandon()
        if refused := self._troubles.authentication:
            login = client.make_login_error(self._settings, refused)
            return LaneFailed(f"{self.name}: {failure}: {login}", sent=sent, waits_for_person=True)
        reason, advice = describe_error(error, self._settings), advise(client.error_of(error))
        return LaneFailed(
            f"{self.name}: {failure}: {reason}{advice and f'; {advice}'}",
            fenced=clients.is_fenced(client.error_of(error)),
            sent=sent,
            waits_for_person=bool(advice),
        )


def _group_of(settings: KafkaSinkSettings, name: str) -> Any:
    """Return the lane's group as the opaque value that `send_offsets_to_transaction` requires."""
    reader = clients.open_group_reader(settings, name, clients.Isolation.DECIDED)
    try:
        return cast("Any", reader).consumer_group_metadata()
    finally:
        reader.close()


_logger = logging.getLogger("onceflow.sinks.kafka")

_LANES_MAX = 4
"""The limit of open lanes. A slot commits for one subtask; the driver in recovery for all, in
turn."""


class TransactionalLanes:
    """A cache of the last open lanes, because a ready producer commits in milliseconds."""

    def __init__(
        self,
        settings: KafkaSinkSettings,
        context: CommitterContext,
        area: StagingArea,
        commit_records: CommitRecords,
    ) -> None:
        self._settings = settings
        self._context = context
        self._area = area
        self._commit_records = commit_records
        self._open: OrderedDict[int, TransactionalLane] = OrderedDict()
        self._unsettled: set[TransactionId] = set()

    def has(self, subtask: int) -> bool:
        """Return True if the lane of `subtask` is open here; it may be fenced by now."""
        return subtask in self._open

    def open_lane(self, subtask: int, *, deadline: float) -> TransactionalLane:
        """Return the lane of `subtask`; take it over now if it is not open here.

        Rows staged in it are not committed, unless its own commit offset names them. Every other
        transaction that was ever committed in it has its commit record.

        Raises:
            LaneFailed: It cannot be opened before `deadline`.
            StorageError: A due commit record cannot be written, so the lane must not commit.
        """
        lane = self._open.get(subtask)
        if lane is None:
            lane = TransactionalLane(
                self._settings, lane_name(self._context.sink_id, subtask), deadline=deadline
            )
            try:
                # Before the lane is used, because its next commit overwrites the commit offset.
                self._settle_commit_offsets(subtask, lane)
                self._settle_due(subtask)
            except BaseException:
                lane.close()
                raise
            self._open[subtask] = lane
            while len(self._open) > _LANES_MAX:
                _release(self._open.popitem(last=False)[1])
        else:
            self._settle_due(subtask)
            self._open.move_to_end(subtask)
        return lane

    def settle(self, transaction: TransactionId) -> None:
        """Write the commit record of `transaction`, which is committed even if storage fails.

        A failed write is repeated before the next commit of the lane.
        """
        try:
            self._commit_records.settle(transaction)
        except StorageError as error:
            self._unsettled.add(transaction)
            _logger.warning(
                "transaction %s is committed, without commit record: %s", transaction, error
            )

    def drop(self, subtask: int) -> None:
        """Close the lane of `subtask`, if it is open, so that the next use takes it again."""
        lane = self._open.pop(subtask, None)
        if lane is not None:
            lane.close()

    def find_open(self, subtask: int) -> TransactionalLane | None:
        """Return the lane of `subtask` if it is open here, or None; it may be fenced by now."""
        return self._open.get(subtask)

    def close(self) -> None:
        """Close every lane; abort begun transactions, so that no consumer waits for them."""
        while self._open:
            _release(self._open.popitem()[1])

    def _settle_commit_offsets(self, subtask: int, lane: TransactionalLane) -> None:
        # After the lane was taken, no other process can commit in it.
        listing = self._commit_records.list_transactions()
        for transaction in listing.leftovers:
            if transaction.subtask == subtask:
                self._area.discard(transaction)
        for transaction in list_proven(lane.commit_offsets.values(), self._context.log_id):
            if transaction not in listing.committed:
                self._commit_records.settle(transaction)

    def _settle_due(self, subtask: int) -> None:
        for transaction in [
            unsettled for unsettled in self._unsettled if unsettled.subtask == subtask
        ]:
            self._commit_records.settle(transaction)
            self._unsettled.discard(transaction)


def _release(lane: TransactionalLane) -> None:
    if lane.has_begun():
        lane.abandon()
    else:
        lane.close()
