"""The reader of the partitions that one subtask is assigned.

Positions come from two places. The consumer counts what it has returned, which includes transaction
markers and aborted records. Its end-of-partition events let a partition reach its end even if the
last offset is a marker. Both are read just before a batch is returned, so `snapshot` covers exactly
the rows that `poll` has returned.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import pyarrow as pa
from confluent_kafka import Consumer, KafkaException, Message, TopicPartition

from onceflow.clients.kafka.client import ClientTroubles, error_of
from onceflow.core.errors import InvariantViolation, StateIncompatible, require
from onceflow.core.spi import EndOfInput, Outage, ReaderContext, SourceReader, Split
from onceflow.core.spi.dead_letters import DeadLetter
from onceflow.sources.kafka import client
from onceflow.sources.kafka.catalog import Catalog, check_not_replaced, with_ids
from onceflow.sources.kafka.events import Event, Gaps, classify_error, is_cut
from onceflow.sources.kafka.intake import Intake, Taken, open_intake
from onceflow.sources.kafka.messages import Records, messages_of, sample_times
from onceflow.sources.kafka.position import PartitionPosition
from onceflow.sources.kafka.settings import READER_DEFAULTS, KafkaSettings
from onceflow.sources.kafka.value_formats import rows_of


class PublishedOffsets:
    """The offsets to publish. Any thread adds them; the polling thread sends them.

    A client admits one thread at a time; see `client`.
    """

    def __init__(self, settings: KafkaSettings, troubles: ClientTroubles) -> None:
        self._troubles = troubles
        self._allowed = settings.commit_offsets
        # The deque has one place: newer offsets replace older ones. Append and popleft need no
        # lock.
        self._newest: deque[list[TopicPartition]] = deque(maxlen=1)

    def ask(self, splits: Sequence[Split]) -> None:
        """Queue the positions of `splits` for sending. They replace queued positions."""
        if self._allowed and splits:
            offsets = [
                TopicPartition(position.topic, position.partition, position.next)
                for position in map(PartitionPosition.from_split, splits)
            ]
            self._newest.append(offsets)

    def send(self, consumer: Consumer) -> None:
        """Send the queued offsets, if any. A failure is logged once."""
        if not self._newest:
            return
        try:
            consumer.commit(offsets=self._newest.popleft(), asynchronous=True)
        except KafkaException as error:
            self._troubles.note(error_of(error))

    def forbid(self) -> None:
        """Stop sending because the broker does not allow it."""
        self._allowed = False
        self._newest.clear()


_NO_STOP = 2**63 - 1
_WAIT_S = 0.5
"""The maximum time of one wait inside `poll`. A `close` on another thread may wait as long."""

_TIMES_MAX = 10_000
"""The maximum number of kept record times, because a reader around this one may never take them."""

_Partition = tuple[str, int]


class KafkaReader(SourceReader):
    """A reader of some partitions, each from its offset up to a stop offset or for ever."""

    def __init__(
        self, settings: KafkaSettings, splits: Sequence[Split], context: ReaderContext
    ) -> None:
        self._settings = settings
        self._rows = rows_of(settings, by_split=context.by_split)
        self._bounded = settings.ending is not None
        self._began: dict[_Partition, PartitionPosition] = {}
        self._next: dict[_Partition, int] = {}
        self._epochs: dict[_Partition, int | None] = {}
        """The leader epoch of the record before each position, or None if it is not known."""
        self._stop: dict[_Partition, int] = {}
        self._unreturned: dict[_Partition, tuple[int, int | None]] = {}
        """The positions before the collected rows that still wait for a schema."""
        self._open = self._add_positions(splits)
        self._asked = [TopicPartition(*partition) for partition in self._open]
        self._unproven = list(self._open)
        """The partitions of a bounded input whose topic may have been replaced since the start."""
        self._ends: dict[_Partition, int] = {}
        """The current ends of partitions, as the broker reported them."""
        self._polling = threading.Lock()
        self._closed = threading.Event()
        self._is_woken = False
        """True if `wake` was called since the last `poll` ended."""
        self._troubles = client.LoggedTroubles(settings)
        self._published = PublishedOffsets(settings, self._troubles)
        self._gaps = Gaps(settings)
        self._times: deque[tuple[int, int]] = deque(maxlen=_TIMES_MAX)
        self._group_id = client.group_id_of(settings, job=context.job, uid=context.uid)
        self._client_id = f"onceflow-{context.job}-{context.uid}-{context.subtask}"
        self._consumer: Consumer | None = None
        self._intake: Intake | None = None
        self._watch: client.LivenessWatch | None = None
        if self._open:
            self._begin()

    @property
    def dropped_count(self) -> int:
        """The number of bad records that this reader has left out."""
        return self._rows.refusals.dropped_count

    def poll(self, timeout_s: float) -> pa.RecordBatch | EndOfInput | None:
        """Return up to `batch_rows` rows at once if there are any, else wait for the first.

        Raises:
            BadRecord: A record cannot be decoded, and `on_bad_record` is "fail".
            OffsetOutOfRange: Records were deleted before they were read.
            SourceUnavailable: The brokers did not answer for `deadline_s`.
            ConfigError: The brokers refuse the user, or the client may not receive a record.
        """
        with self._polling:
            if self._closed.is_set():
                return None
            # Rows that wait for their schema must still be returned.
            if self._bounded and not self._open and len(self._rows) == 0:
                return self._end()
            if self._consumer is None or self._watch is None:
                self._closed.wait(timeout_s)
                return None
            if self._watch.failure is not None:
                raise self._watch.failure
            self._published.send(self._consumer)
            try:
                return self._read(timeout_s)
            finally:
                # The caller of `wake` can act now.
                self._is_woken = False

    def wake(self) -> None:
        """Make a waiting `poll` return early, if records are read natively."""
        # Set the flag first: a `poll` that returns early reads it.
        self._is_woken = True
        intake = self._intake
        if intake is not None:
            intake.wake()

    def find_outage(self) -> Outage | None:
        """Return the current outage of the partitions' brokers, or None if there is none."""
        watch = self._watch
        return None if watch is None else watch.find_outage()

    def rows_by_split(self) -> Sequence[tuple[str, int]]:
        """Return the partitions of the rows that `poll` returned last."""
        return self._rows.runs

    def list_ended_splits(self) -> Sequence[str]:
        """Return the ids of the splits that are read up to their stop."""
        if not self._bounded:
            return ()
        ended = [
            partition for partition, stop in self._stop.items() if self._next[partition] >= stop
        ]
        return [self._began[partition].to_split().id for partition in ended]

    def take_rejected(self) -> Sequence[DeadLetter]:
        """Return the dead letters of records that could not be decoded, and forget them."""
        return self._rows.refusals.take_letters()

    def take_record_times(self) -> Sequence[tuple[int, int]]:
        """Return (timestamp, number of records) samples: of one in 250 records of a large fetch."""
        times = tuple(self._times)
        self._times.clear()
        return times

    def snapshot(self) -> Sequence[Split]:
        """Return every split at its position after the rows that `poll` has returned."""
        return [position.to_split() for position in self._positions(self._next)]

    def add_splits(self, splits: Sequence[Split]) -> None:
        """Add `splits` to those that are read. Records that are already fetched are kept."""
        with self._polling:
            added = self._add_positions(splits)
            self._open = self._open + added
            self._asked += [TopicPartition(*partition) for partition in added]
            self._unproven += added
            if self._consumer is not None:
                self._require_intake().lead(added)
                # `assign` would drop the fetched records of the other partitions.
                self._consumer.incremental_assign(self._assignment(added))
            elif added and not self._closed.is_set():
                self._begin()

    def commit(self, splits: Sequence[Split]) -> None:
        """Queue the positions of `splits` for the consumer group. Never raises.

        Lag tools read them. The next `poll` sends them. A failure is logged once, and the next
        checkpoint tries again.
        """
        self._published.ask(splits)

    def close(self) -> None:
        """Close the client. Queued offsets are sent first."""
        # Set this before taking the lock: a waiting `poll` checks it and releases the lock.
        self._closed.set()
        with self._polling:
            if self._watch is not None:
                self._watch.stop()
                self._watch = None
            if self._consumer is not None:
                self._published.send(self._consumer)
                self._close_client()

    def _positions(self, partitions: Iterable[_Partition]) -> Iterator[PartitionPosition]:
        """Yield the positions of `partitions`. Rows that `poll` has returned count as read."""
        for partition in partitions:
            stop = None if self._stop[partition] == _NO_STOP else self._stop[partition]
            following, epoch = self._unreturned.get(
                partition, (self._next[partition], self._epochs[partition])
            )
            yield replace(self._began[partition], next=following, stop=stop, leader_epoch=epoch)

    def _find_stop(self, position: PartitionPosition) -> int:
        """Return the stop of `position`. For a stream, return a number that is never reached."""
        if not self._bounded:
            return _NO_STOP
        if position.stop is None:
            raise StateIncompatible(
                f"{position}: the checkpoint is of a stream without an end, and ending_offsets="
                " was given since. Omit it, or start a new job"
            )
        return position.stop

    def _add_positions(self, splits: Sequence[Split]) -> list[_Partition]:
        """Add `splits` to those that are read, and return the partitions that have records left."""
        taken: list[_Partition] = []
        for position in map(PartitionPosition.from_split, splits):
            partition = (position.topic, position.partition)
            require(partition not in self._next, f"{position} is in two splits")
            self._began[partition] = position
            self._next[partition] = position.next
            self._epochs[partition] = position.leader_epoch
            self._stop[partition] = self._find_stop(position)
            if self._next[partition] < self._stop[partition]:
                taken.append(partition)
        return taken

    def _begin(self) -> None:
        self._consumer = self._open_client()
        self._watch = client.LivenessWatch(
            self._settings,
            lambda: tuple(self._open),
            group_id=self._group_id,
            client_id=f"{self._client_id}-watch",
        )
        self._watch.start()

    def _open_client(self) -> Consumer:
        """Return a client that reads the open partitions from their positions."""
        consumer = client.open_consumer(
            self._settings,
            self._troubles,
            group_id=self._group_id,
            client_id=self._client_id,
            defaults=READER_DEFAULTS,
        )
        self._intake = open_intake(self._settings, consumer, self._client_id)
        self._intake.lead(self._open)
        consumer.assign(self._assignment(self._open))
        return consumer

    def _close_client(self) -> None:
        self._require_intake().close()
        client.close_in_time(self._require_client())
        self._consumer = self._intake = None

    def _assignment(self, partitions: Sequence[_Partition]) -> list[TopicPartition]:
        # With an epoch, the client asks the leader whether its log still has the records before the
        # position.
        return [
            TopicPartition(*partition, self._next[partition])
            if self._epochs[partition] is None
            else TopicPartition(
                *partition, self._next[partition], leader_epoch=self._epochs[partition]
            )
            for partition in partitions
        ]

    def _require_client(self) -> Consumer:
        if self._consumer is None:
            raise InvariantViolation("a Kafka reader without open partitions was asked to read")
        return self._consumer

    def _require_intake(self) -> Intake:
        if self._intake is None:
            raise InvariantViolation("a Kafka reader without a client was asked to read")
        return self._intake

    def _read(self, timeout_s: float) -> pa.RecordBatch | EndOfInput | None:
        deadline = time.monotonic() + timeout_s
        began = {
            partition: (self._next[partition], self._epochs[partition]) for partition in self._next
        }
        if self._drain() and len(self._rows) == 0:
            # There are no rows, but perhaps an end after markers, which the next snapshot must
            # contain.
            self._advance()
        while len(self._rows) == 0:
            if self._bounded and not self._open:
                return self._end()
            wait_s = deadline - time.monotonic()
            wait_s_now = min(max(wait_s, 0.0), _WAIT_S)
            first = self._require_intake().wait(
                wait_s_now, self._settings.batch_rows, self._settings.batch_bytes
            )
            # Check this before the events: the events of the dropped connection say less.
            self._troubles.check_answers_received()
            if first is not None:
                self._accept(first)
                self._drain()
                self._advance()
            is_over = wait_s <= 0 or self._is_woken or self._closed.is_set()
            if len(self._rows) == 0 and is_over:
                if self._rows.refusals.letters:
                    # The letters are sent after this poll, so the snapshot must be past these
                    # records.
                    self._advance()
                return None
        if not self._rows.ready():
            # Keep the older position of each partition: these rows are collected, but not yet
            # returned.
            self._unreturned = began | self._unreturned
            self._closed.wait(max(0.0, deadline - time.monotonic()))
            return None
        self._unreturned = {}
        self._advance()
        returned = self._rows.take()
        # All rows may have been bad records that were left out.
        return returned if returned.num_rows else None

    def _end(self) -> EndOfInput:
        """Return the end of the input, after checking that no topic was replaced.

        If a topic is deleted and created again while it is read, reading continues at the old
        offset, and no broker reports it. A stream notices it when it looks for new partitions.

        Raises:
            OffsetOutOfRange: A topic was replaced, and data loss is an error.
            SourceUnavailable: The brokers did not answer within `deadline_s`.
        """
        if self._unproven and self._settings.fail_on_data_loss:
            check_not_replaced(self._settings, list(self._positions(self._unproven)))
        self._unproven = []
        return EndOfInput()

    def _drain(self) -> bool:
        """Collect fetched records, up to a full batch. Return True if the client had anything."""
        rows, settings = self._rows, self._settings
        had_any = False
        while len(rows) < settings.batch_rows and rows.size_bytes < settings.batch_bytes:
            taken = self._require_intake().take(
                settings.batch_rows - len(rows), settings.batch_bytes - rows.size_bytes
            )
            self._accept(taken)
            had_any = had_any or bool(taken.events) or len(taken.records) > 0
            if not taken.has_more:
                return had_any
        return had_any

    def _accept(self, taken: Taken) -> None:
        gaps = [event for event in taken.events if self._is_gap(event)]
        records = self._before_stops(taken.records) if self._bounded else taken.records
        if len(records) > 0:
            self._times += sample_times(records)
            self._rows.add(records)
        for event in gaps:
            # Do this after the rows are counted: the client that counts them may be replaced.
            self._meet_gap(event)

    def _advance(self) -> list[_Partition]:
        """Update the positions, and return the partitions that went past their stop."""
        passed: list[_Partition] = []
        for reported in self._require_client().position(self._asked):
            partition = (reported.topic, reported.partition)
            # The client does not return markers at the end, so its own position stays before them.
            offset = reported.offset
            epoch: int | None = reported.leader_epoch
            end = self._ends.get(partition, -1)
            if end > offset:
                # The epoch of the marker before the end is not known.
                offset, epoch = end, None
            if offset < 0:
                # The client has not returned a record of this partition yet.
                continue
            if offset > self._stop[partition]:
                passed.append(partition)
                offset, epoch = self._stop[partition], None
            if offset != self._next[partition]:
                self._next[partition], self._epochs[partition] = offset, epoch
        return passed

    def _before_stops(self, records: Records) -> Records:
        """Return the records before their stops. Pause the partitions that reached their stop."""
        passed = self._advance()
        if passed:
            stops = self._stop
            records = [
                message
                for message in messages_of(records)
                if (message.offset() or 0) < stops[message.topic() or "", message.partition() or 0]
            ]
        done = [item for item in self._open if self._next[item] >= self._stop[item]]
        if done:
            self._require_client().pause([TopicPartition(*partition) for partition in done])
            self._open = [item for item in self._open if item not in done]
        return records

    def _is_gap(self, event: Message) -> bool:
        """Handle `event`, and return True if it reports missing records.

        Raises:
            ConfigError: The user may not read the topic.
            SourceError: The log is damaged, or the client cannot go on.
        """
        error = event.error()
        if error is None:
            return False
        topic, partition, offset = event.topic() or "", event.partition(), event.offset()
        offset_next = self._next.get((topic, partition or 0))
        match classify_error(
            error,
            self._settings,
            self._troubles,
            topic=topic,
            partition=partition,
            offset_next=offset_next,
        ):
            case Event.END:
                if partition is not None and offset is not None:
                    self._ends[topic, partition] = offset
            case Event.GAP:
                return True
            case Event.GROUP_DENIED:
                # A commit, and `close` after it, would wait for a coordinator that never answers.
                self._published.forbid()
            case Event.TROUBLE:
                # `LivenessWatch` ends the reader if the trouble lasts too long.
                pass
        return False

    def _meet_gap(self, event: Message) -> None:
        """Continue after the gap that `event` reports, if data loss is accepted.

        Raises:
            OffsetOutOfRange: Data loss is an error.
            SourceUnavailable: Kafka does not say what is left, or its answers contradict each
                other.
        """
        self._advance()
        topic, partition = event.topic() or "", event.partition() or 0
        offset_next = event.offset()
        if offset_next is None or offset_next < 0:
            offset_next = self._next[topic, partition]
        resumed = self._gaps.find_resume_offset(
            self._require_client(),
            topic,
            partition,
            offset_next,
            was_cut=is_cut(event.error()),
        )
        # The old client may have reported ends of the log that is gone.
        self._ends.clear()
        self._next[topic, partition] = min(resumed, self._stop[topic, partition])
        self._epochs[topic, partition] = None
        # A partition whose remaining records are gone is at its stop, and is not opened again.
        self._open = [item for item in self._open if self._next[item] < self._stop[item]]
        if resumed < offset_next:
            # The end of the topic was cut off, or the topic was replaced. The new position belongs
            # to the topic that exists now.
            with Catalog(self._settings) as catalog:
                facts = catalog.find_topics([topic]).get(topic)
            if facts is not None:
                began = self._began[topic, partition]
                self._began[topic, partition] = with_ids(began, facts)
        # Open a new client rather than a new assignment. After an assignment, the old client still
        # reports older positions for a while, and such a position could skip records.
        self._close_client()
        self._consumer = self._open_client()
