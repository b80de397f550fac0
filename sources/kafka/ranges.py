"""A reading of existing ranges of offsets, with clients that are kept for later readings.

first <= next <= end. The caller knows the end of a range from the brokers. So a reading stops at
`end`, and a timeout before it is an error. Positions are counted from the records and from
end-of-partition events. They are never read from the client: after an assignment, a client still
reports positions of the previous assignment for a while.

A new client costs connections and a first fetch, so a process keeps its clients (`KeptClients`). If
the next ranges begin at the client's position, its fetched records are used. If not, the client
gets a new assignment, and its messages are trusted from the record at exactly `first` on. A message
before that record may belong to the old assignment, so a new client replaces this one.

Records are taken as buffers if possible (`open_intake`). A chunk of one partition that is in order
and within the range is then taken as a whole. Any other chunk is examined record by record.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field

import pyarrow as pa
from confluent_kafka import Consumer, Message, TopicPartition

from onceflow.clients.kafka.client import make_login_error
from onceflow.core.errors import SourceUnavailable, require
from onceflow.sources.kafka.client import LoggedTroubles, close_in_time, open_consumer
from onceflow.sources.kafka.decoded_rows import Rows
from onceflow.sources.kafka.events import Event, Gaps, classify_error, is_cut
from onceflow.sources.kafka.fetched import FetchedRecords
from onceflow.sources.kafka.intake import Intake, Taken, open_intake
from onceflow.sources.kafka.messages import Records, messages_of
from onceflow.sources.kafka.settings import KafkaSettings
from onceflow.sources.kafka.value_formats import rows_of

_WAIT_S = 0.5
_READY_S = 0.01
"""The pause in seconds between two checks whether the registry has answered."""
_KEPT_MAX = 4
"""The maximum number of idle clients in one process.

Each holds two or more connections, and its fetched records.
"""

_Partition = tuple[str, int]


@dataclass(frozen=True, slots=True)
class OffsetRange:
    """A range of one partition's offsets from `first` (inclusive) to `end` (exclusive)."""

    topic: str
    partition: int
    first: int
    end: int
    topic_id: str = ""

    def __post_init__(self) -> None:
        require(0 <= self.first <= self.end, f"{self.topic}-{self.partition}: {self}")

    def __len__(self) -> int:
        return self.end - self.first

    @property
    def topic_partition(self) -> tuple[str, int]:
        """The topic and the partition."""
        return self.topic, self.partition


@dataclass(slots=True)
class KeptClient:
    """A client with its intake and its position."""

    consumer: Consumer
    troubles: LoggedTroubles
    intake: Intake
    stands_at: Mapping[_Partition, int] = field(default_factory=dict[_Partition, int])
    """The offset of the next record of each assigned partition; empty if it is not known."""
    ends: dict[_Partition, int] = field(default_factory=dict[_Partition, int])
    """The ends of partitions that the client has reported. It reports each once, after all records.
    """

    def close(self) -> None:
        """Close the client within a few seconds."""
        # Close the intake first: otherwise the client's close would wait for ever.
        self.intake.close()
        close_in_time(self.consumer)


class KeptClients:
    """The idle clients of this process, by the settings they were opened with; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: OrderedDict[object, KeptClient] = OrderedDict()

    @property
    def idle(self) -> list[KeptClient]:
        """The idle clients. The one that was unused for longest is first."""
        with self._lock:
            return list(self._idle.values())

    def take(self, key: object) -> KeptClient | None:
        """Remove and return the idle client of `key`, or return None if there is none."""
        with self._lock:
            # Remove it, because a client serves one reading at a time.
            return self._idle.pop(key, None)

    def keep(self, key: object, client: KeptClient) -> None:
        """Keep `client` for the next reading. If there are too many, close the longest unused."""
        with self._lock:
            replaced = [self._idle.pop(key)] if key in self._idle else []
            self._idle[key] = client
            while len(self._idle) > _KEPT_MAX:
                replaced.append(self._idle.popitem(last=False)[1])
        # Close outside the lock, because closing may take seconds.
        for old in replaced:
            old.close()

    def close(self) -> None:
        """Close every idle client."""
        with self._lock:
            idle = list(self._idle.values())
            self._idle.clear()
        for client in idle:
            client.close()


KEPT = KeptClients()
"""The kept clients of this process. They end with the process."""


def read_ranges(
    settings: KafkaSettings,
    ranges: Sequence[OffsetRange],
    *,
    client_id: str,
    kept: KeptClients = KEPT,
) -> Generator[pa.RecordBatch, None, None]:
    """Yield the records of `ranges` as batches in the schema of `settings`, never an empty one.

    The order within a partition is kept. Runs on one thread. If the caller stops early, the client
    is closed.

    Raises:
        BadRecord: A record cannot be decoded, and `on_bad_record` is "fail".
        OffsetOutOfRange: Records were deleted before they were read, and data loss is an error.
        SourceUnavailable: The brokers sent nothing for `deadline_s`.
        ConfigError: The brokers refuse the user, or the client may not receive a record.
    """
    filled = [offsets for offsets in ranges if len(offsets)]
    if not filled:
        return
    reading = _Reading(settings, filled, client_id, kept)
    try:
        yield from reading.read_batches()
    except BaseException:
        reading.give_up()
        raise
    reading.keep()


class _StaleMessages(Exception):
    """Raised if messages of a kept client may belong to its previous assignment."""


class _Reading:
    """A reading of some ranges, from the first record to the last."""

    def __init__(
        self,
        settings: KafkaSettings,
        ranges: Sequence[OffsetRange],
        client_id: str,
        kept: KeptClients,
    ) -> None:
        self._settings = settings
        self._client_id = client_id
        self._kept = kept
        # The consumer group is not part of the key: partitions are assigned, and no offset is
        # committed.
        self._key = (
            settings.bootstrap_servers,
            tuple(sorted(settings.options.items())),
            tuple(sorted({(offset_range.topic, offset_range.topic_id) for offset_range in ranges})),
            # The settings that decide which intake is used, and how it reads.
            (settings.native, settings.format, settings.key_format, settings.include_headers),
        )
        self._next = {offset_range.topic_partition: offset_range.first for offset_range in ranges}
        self._end = {offset_range.topic_partition: offset_range.end for offset_range in ranges}
        self._open = set(self._next)
        # With only one range, records are consecutive, so a whole chunk is checked by its first and
        # last record.
        self._only = ranges[0].topic_partition if len(ranges) == 1 else None
        self._rows: Rows = rows_of(settings)
        self._gaps = Gaps(settings)
        self._overread = False
        """True if records after an end were read and dropped.

        Then the client's position is not known.
        """
        self._unproven: set[_Partition] = set()
        """The partitions whose first record has not arrived yet; see the module docstring about
        trust.
        """
        self._client = self._take_client()
        for partition in tuple(self._open):
            self._reach_end(partition)

    def read_batches(self) -> Generator[pa.RecordBatch, None, None]:
        rows, settings = self._rows, self._settings
        silent_since = time.monotonic()
        while self._open:
            taken = self._take()
            # Check this before the events: the events of the dropped connection say less.
            self._client.troubles.check_answers_received()
            if taken is not None:
                silent_since = time.monotonic()
                try:
                    self._accept(taken)
                except _StaleMessages:
                    self._client = self._reopen_client()
            elif time.monotonic() - silent_since > settings.deadline_s:
                raise self._silence_error()
            if len(rows) >= settings.batch_rows or rows.size_bytes >= settings.batch_bytes:
                yield self._take_batch()
        if len(rows):
            batch = self._take_batch()
            # All rows may have been bad records that were left out.
            if batch.num_rows:
                yield batch

    def _take_batch(self) -> pa.RecordBatch:
        """Return the collected rows, after waiting for the schemas that they need."""
        while not self._rows.ready():
            time.sleep(_READY_S)
        return self._rows.take()

    def keep(self) -> None:
        # If the client's position is not known, it gets a new assignment the next time.
        whole = not self._overread and not self._unproven
        self._client.stands_at = dict(self._next) if whole else {}
        self._kept.keep(self._key, self._client)

    def give_up(self) -> None:
        self._client.close()

    def _take_client(self) -> KeptClient:
        client = self._kept.take(self._key)
        if client is None:
            return self._open_client()
        if client.stands_at != self._next:
            self._unproven = set(self._open)
            client.ends.clear()
            client.intake.close()
            client.consumer.unassign()
            # When librdkafka stops fetching a partition, it resets the forwarding of its queue. It
            # begins this before it answers the following question, so queues that are redirected
            # afterwards stay redirected.
            client.consumer.assignment()
            client.intake = self._assign(client.consumer)
        return client

    def _open_client(self) -> KeptClient:
        troubles = LoggedTroubles(self._settings)
        consumer = open_consumer(
            self._settings,
            troubles,
            group_id=self._settings.group_id or "onceflow-ranges",
            client_id=self._client_id,
        )
        return KeptClient(consumer, troubles, self._assign(consumer))

    def _reopen_client(self) -> KeptClient:
        """Replace the client with a new one, whose messages are trusted from the first one on."""
        self._client.close()
        self._unproven.clear()
        self._overread = False
        return self._open_client()

    def _assign(self, consumer: Consumer) -> Intake:
        """Assign the open partitions to `consumer`, which has none yet, and return its intake."""
        partitions = sorted(self._open)
        intake = open_intake(self._settings, consumer, self._client_id)
        intake.lead(partitions)
        consumer.assign(
            [TopicPartition(*partition, self._next[partition]) for partition in partitions]
        )
        return intake

    def _take(self) -> Taken | None:
        """Return some records or events, or None if none arrived.

        Never read past the end of the only range.
        """
        # Each record has its own offset, so this many records cannot pass the end of one partition.
        left = sum(self._end[partition] - self._next[partition] for partition in self._open)
        count_max = min(left, self._settings.batch_rows - len(self._rows))
        bytes_max = self._settings.batch_bytes - self._rows.size_bytes
        intake = self._client.intake
        # A batch begins with `wait`, which runs the client's callbacks even if records are waiting.
        if len(self._rows):
            taken = intake.take(count_max, bytes_max)
            if len(taken.records) or taken.events:
                return taken
        return intake.wait(_WAIT_S, count_max, bytes_max)

    def _accept(self, taken: Taken) -> None:
        records = taken.records
        if len(records):
            if not self._follow_on(records):
                records = self._keep_new(messages_of(records))
            if len(records):
                self._rows.add(records)
        for event in taken.events:
            self._handle_event(event)

    def _follow_on(self, records: Records) -> bool:
        """Advance past `records` if they are the next ones of the only range, before its end.

        Return True if they are. A trusted client returns records in order. So only the first and
        the last of the client's objects are examined, and there may be no hole between them.
        """
        if self._only is None or self._unproven:
            return False
        if isinstance(records, FetchedRecords):
            bounds = records.find_bounds(self._only)
            if bounds is None:
                return False
            first, last = bounds
            # A hole consists of markers, and of records of aborted transactions.
            follows = first >= self._next[self._only]
        else:
            first, last = records[0].offset() or 0, records[-1].offset() or 0
            follows = first == self._next[self._only] and last - first == len(records) - 1
        if not follows or last >= self._end[self._only]:
            return False
        self._advance(self._only, last + 1)
        return True

    def _keep_new(self, records: list[Message]) -> list[Message]:
        """Return those of `records` that belong to open ranges and have not been read yet."""
        if self._unproven:
            self._prove(records)
        taken: list[Message] = []
        for message in records:
            partition = (message.topic() or "", message.partition() or 0)
            offset = message.offset() or 0
            if partition not in self._open:
                # The client's position is after the end of this range, so it differs from
                # `self._next`.
                self._overread = self._overread or partition in self._end
                continue
            # The record was read before, under the previous assignment. A new assignment returns it
            # again.
            if offset < self._next[partition]:
                continue
            # There is a hole at the end: only markers, or records of aborted transactions, are
            # missing.
            if offset >= self._end[partition]:
                self._overread = True
                self._advance(partition, self._end[partition])
                continue
            taken.append(message)
            self._advance(partition, offset + 1)
        return taken

    def _prove(self, records: list[Message]) -> None:
        """Trust the client for each partition whose very next record is among `records`.

        Raises:
            _StaleMessages: A later record of a partition arrived before its next one.
        """
        for message in records:
            partition, offset = (
                (message.topic() or "", message.partition() or 0),
                message.offset() or 0,
            )
            if partition in self._unproven and offset >= self._next[partition]:
                if offset > self._next[partition]:
                    raise _StaleMessages
                self._unproven.discard(partition)

    def _advance(self, partition: _Partition, offset: int) -> None:
        self._next[partition] = offset
        if offset >= self._end[partition]:
            self._open.discard(partition)
            if self._open:
                # Unassign it, because its further records would arrive between those of the other
                # partitions.
                self._client.consumer.incremental_unassign([TopicPartition(*partition)])
                self._overread = True

    def _handle_event(self, event: Message) -> None:
        error, partition = event.error(), (event.topic() or "", event.partition() or 0)
        if error is None:
            return
        kind = classify_error(
            error,
            self._settings,
            self._client.troubles,
            topic=partition[0],
            partition=event.partition(),
            offset_next=self._next.get(partition),
        )
        if partition not in self._open or kind not in (Event.END, Event.GAP):
            return
        if partition in self._unproven:
            raise _StaleMessages
        if kind is Event.GAP:
            self._meet_gap(partition, was_cut=is_cut(error))
        else:
            self._client.ends[partition] = event.offset() or 0
            self._reach_end(partition)

    def _reach_end(self, partition: _Partition) -> None:
        """Close a range in which only markers and records of aborted transactions are left."""
        if self._client.ends.get(partition, -1) >= self._end[partition]:
            self._advance(partition, self._end[partition])

    def _meet_gap(self, partition: _Partition, *, was_cut: bool) -> None:
        offset_next = self._next[partition]
        resumed = self._gaps.find_resume_offset(
            self._client.consumer, *partition, offset_next, was_cut=was_cut
        )
        # If the end of the log was cut off, the records at these offsets do not belong to this
        # range.
        self._next[partition] = self._end[partition] if resumed < offset_next else resumed
        if self._next[partition] >= self._end[partition]:
            self._next[partition] = self._end[partition]
            self._open.discard(partition)
        self._client = self._reopen_client()

    def _silence_error(self) -> Exception:
        settings, troubles = self._settings, self._client.troubles
        if troubles.authentication:
            return make_login_error(settings, troubles.authentication)
        partition = min(self._open)
        return SourceUnavailable(
            f"{partition[0]}-{partition[1]}: Kafka at {settings.bootstrap_servers} gave nothing for"
            f" {settings.deadline_s:g} s (deadline_s), and offsets {self._next[partition]} to"
            f" {self._end[partition] - 1} were there when they were asked for"
            f"{f'; {troubles.last}' if troubles.last else ''}. Nothing is lost: what was not"
            " written is read again"
        )
