"""Reads ranges of offsets that are there, with clients that outlive one reading.

first <= next <= end. Who asks for a range knows its end from the brokers; so a range ends with its
`end`, and silence is an error. Positions are counted from the records themselves and from events of
partitions' ends, never asked from the client: one that was given another place still tells
positions of the one before, for a while.

A client costs connections and a first fetch, so a process keeps it (`KeptClients`). If the next
ranges begin where it stands, what it has fetched since is used. If not, it is sent elsewhere, and
what it then says is believed from the record at exactly `first` on: until that came, anything else
may still be of the old place, and a new client is asked instead.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field

import pyarrow as pa
from confluent_kafka import Consumer, KafkaError, Message, TopicPartition

from onceflow.connectors.kafka.client import ClientTroubles, authentication_refused
from onceflow.core.errors import SourceUnavailable
from onceflow.core.protocol.invariant import require
from onceflow.sources.kafka.client import LoggedTroubles, close_in_time, open_consumer
from onceflow.sources.kafka.decoded_rows import Rows
from onceflow.sources.kafka.events import Event, Gaps, judged
from onceflow.sources.kafka.rows import CHUNK, rows_of
from onceflow.sources.kafka.settings import KafkaSettings

_WAIT_S = 0.5
_READY_S = 0.01
_KEPT_MAX = 4
"""Clients of one process; each holds two connections or more, and what it has fetched."""

_Partition = tuple[str, int]
_ERROR: Callable[[Message], KafkaError | None] = Message.error


@dataclass(frozen=True, slots=True)
class OffsetRange:
    """The records of one partition from `first`, inclusive, to `end`, exclusive."""

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
    def place(self) -> tuple[str, int]:
        """Topic and partition."""
        return self.topic, self.partition


@dataclass(slots=True)
class KeptClient:
    """A client, and where it stands."""

    consumer: Consumer
    troubles: ClientTroubles
    stands_at: Mapping[_Partition, int] = field(default_factory=dict[_Partition, int])
    """The offset that it hands out next, of each partition assigned to it; empty: unknown."""
    ends: dict[_Partition, int] = field(default_factory=dict[_Partition, int])
    """Where it has told that a partition ends: it does so once, behind all records before."""


class KeptClients:
    """The idle clients of this process, by what they were opened with; any thread may ask."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: OrderedDict[object, KeptClient] = OrderedDict()

    def take(self, key: object) -> KeptClient | None:
        """Return the idle client of `key`, which is the caller's then; None where there is none."""
        with self._lock:
            return self._idle.pop(key, None)

    def keep(self, key: object, client: KeptClient) -> None:
        """Keep `client` for the next reading; the one unused for longest gives way."""
        with self._lock:
            replaced = [self._idle.pop(key)] if key in self._idle else []
            self._idle[key] = client
            while len(self._idle) > _KEPT_MAX:
                replaced.append(self._idle.popitem(last=False)[1])
        for old in replaced:
            close_in_time(old.consumer)

    def close(self) -> None:
        """Close every idle client."""
        with self._lock:
            idle = list(self._idle.values())
            self._idle.clear()
        for client in idle:
            close_in_time(client.consumer)


KEPT = KeptClients()
"""Those of this process. They end with it."""


def read_ranges(
    settings: KafkaSettings,
    ranges: Sequence[OffsetRange],
    *,
    client_id: str,
    kept: KeptClients = KEPT,
) -> Generator[pa.RecordBatch, None, None]:
    """Yield the records of `ranges` as batches in the schema of `settings`, none empty.

    The order within a partition is kept. Runs on one thread; when it is left early, its client is
    closed.

    Raises:
        BadRecord: A record cannot be decoded and `on_bad_record` is "fail".
        OffsetOutOfRange: Records were deleted before they were read, and data loss is an error.
        SourceUnavailable: The brokers gave nothing for `deadline_s`.
        ConfigError: The brokers refuse us.
    """
    asked = [one for one in ranges if len(one)]
    if not asked:
        return
    reading = _Reading(settings, asked, client_id, kept)
    try:
        yield from reading.batches()
    except BaseException:
        reading.give_up()
        raise
    reading.keep()


class _Misled(Exception):
    """What a kept client says may be of the place where it was before."""


class _Reading:
    """One reading of some ranges, from its first record to its last."""

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
        # The consumer group says nothing here: partitions are assigned, and offsets not committed.
        self._key = (
            settings.bootstrap_servers,
            tuple(sorted(settings.options.items())),
            tuple(sorted({(one.topic, one.topic_id) for one in ranges})),
        )
        self._next = {one.place: one.first for one in ranges}
        self._end = {one.place: one.end for one in ranges}
        self._open = set(self._next)
        self._only = ranges[0].place if len(ranges) == 1 else None
        self._rows: Rows = rows_of(settings)
        self._gaps = Gaps(settings)
        self._overread = False
        """Whether records behind an end were taken from the client and thrown away."""
        self._unproven: set[_Partition] = set()
        self._client = self._client_taken()
        for place in tuple(self._open):
            self._reach_end(place)

    def batches(self) -> Generator[pa.RecordBatch, None, None]:
        rows, settings = self._rows, self._settings
        silent_since = time.monotonic()
        while self._open:
            messages = self._messages()
            if messages:
                silent_since = time.monotonic()
                try:
                    self._accept(messages)
                except _Misled:
                    self._client = self._reopened()
            elif time.monotonic() - silent_since > settings.deadline_s:
                raise self._silence()
            if len(rows) >= settings.batch_rows or rows.size_bytes >= settings.batch_bytes:
                yield self._taken()
        if len(rows):
            batch = self._taken()
            # Left out as bad, one by one, they may all be gone.
            if batch.num_rows:
                yield batch

    def _taken(self) -> pa.RecordBatch:
        """Return what is collected, once what that needs is there."""
        while not self._rows.ready():
            time.sleep(_READY_S)
        return self._rows.take()

    def keep(self) -> None:
        whole = not self._overread and not self._unproven
        self._client.stands_at = dict(self._next) if whole else {}
        self._kept.keep(self._key, self._client)

    def give_up(self) -> None:
        close_in_time(self._client.consumer)

    def _client_taken(self) -> KeptClient:
        client = self._kept.take(self._key)
        if client is None:
            return self._opened()
        if client.stands_at != self._next:
            self._unproven = set(self._open)
            client.ends.clear()
            client.consumer.assign(self._places())
        return client

    def _opened(self) -> KeptClient:
        troubles = LoggedTroubles(self._settings)
        consumer = open_consumer(
            self._settings,
            troubles,
            group_id=self._settings.group_id or "onceflow-ranges",
            client_id=self._client_id,
        )
        consumer.assign(self._places())
        return KeptClient(consumer, troubles)

    def _reopened(self) -> KeptClient:
        """Return a new client in place of the one there is; what it says is believed at once."""
        close_in_time(self._client.consumer)
        self._unproven.clear()
        self._overread = False
        return self._opened()

    def _places(self) -> list[TopicPartition]:
        return [TopicPartition(*one, self._next[one]) for one in sorted(self._open)]

    def _messages(self) -> list[Message]:
        """Return some messages, of which none is behind the only range's end; none after a wait."""
        consumer = self._client.consumer
        # An offset a message at most: so many of one partition cannot pass its end.
        left = sum(self._end[one] - self._next[one] for one in self._open)
        wanted = min(CHUNK, left, self._settings.batch_rows - len(self._rows))
        messages = consumer.consume(wanted, 0)
        if messages:
            return messages
        # To ask for more than one would wait until there are as many.
        first = consumer.poll(_WAIT_S)
        return [] if first is None else [first]

    def _accept(self, messages: list[Message]) -> None:
        if any(map(_ERROR, messages)):
            records = [message for message in messages if message.error() is None]
            events = [message for message in messages if message.error() is not None]
        else:
            records, events = messages, []
        if records:
            taken = records if self._follow_on(records) else self._in_ranges(records)
            if taken:
                self._rows.add(taken)
        for event in events:
            self._hear(event)

    def _follow_on(self, records: list[Message]) -> bool:
        """Take note of `records` if they are the only range's next ones without a hole.

        Looks at the first and the last one only: from a client that is believed, those between
        them lie between them.
        """
        if self._only is None or self._unproven:
            return False
        first, last = records[0].offset() or 0, records[-1].offset() or 0
        if first != self._next[self._only] or last - first != len(records) - 1:
            return False
        if last >= self._end[self._only]:
            return False
        self._advance(self._only, last + 1)
        return True

    def _in_ranges(self, records: list[Message]) -> list[Message]:
        """Return those of `records` that are of open ranges and were not there yet."""
        if self._unproven:
            self._prove(records)
        taken: list[Message] = []
        for message in records:
            place = (message.topic() or "", message.partition() or 0)
            offset = message.offset() or 0
            if place not in self._open:
                self._overread = self._overread or place in self._end
                continue
            if offset < self._next[place]:
                continue
            if offset >= self._end[place]:
                self._overread = True
                self._advance(place, self._end[place])
                continue
            taken.append(message)
            self._advance(place, offset + 1)
        return taken

    def _prove(self, records: list[Message]) -> None:
        """Believe the client about partitions whose very next record is among `records`.

        Raises:
            _Misled: Later records of one come before it. Nothing is taken note of.
        """
        for message in records:
            place, offset = (message.topic() or "", message.partition() or 0), message.offset() or 0
            if place in self._unproven and offset >= self._next[place]:
                if offset > self._next[place]:
                    raise _Misled
                self._unproven.discard(place)

    def _advance(self, place: _Partition, offset: int) -> None:
        self._next[place] = offset
        if offset >= self._end[place]:
            self._open.discard(place)
            if self._open:
                # Its records would come among those of the others.
                self._client.consumer.incremental_unassign([TopicPartition(*place)])
                self._overread = True

    def _hear(self, event: Message) -> None:
        error, place = event.error(), (event.topic() or "", event.partition() or 0)
        if error is None:
            return
        told = judged(
            error,
            self._settings,
            self._client.troubles,
            topic=place[0],
            partition=event.partition(),
            wanted=self._next.get(place),
        )
        if place not in self._open or told not in (Event.END, Event.GAP):
            return
        if place in self._unproven:
            raise _Misled
        if told is Event.GAP:
            self._meet_gap(place)
        else:
            self._client.ends[place] = event.offset() or 0
            self._reach_end(place)

    def _reach_end(self, place: _Partition) -> None:
        """End a range of which only markers and records of aborted transactions are left."""
        if self._client.ends.get(place, -1) >= self._end[place]:
            self._advance(place, self._end[place])

    def _meet_gap(self, place: _Partition) -> None:
        wanted = self._next[place]
        resumed = self._gaps.resume_at(self._client.consumer, *place, wanted)
        # Behind an end that was cut off are other records: they are not those of this range.
        self._next[place] = self._end[place] if resumed < wanted else resumed
        if self._next[place] >= self._end[place]:
            self._next[place] = self._end[place]
            self._open.discard(place)
        self._client = self._reopened()

    def _silence(self) -> Exception:
        settings, troubles = self._settings, self._client.troubles
        if troubles.authentication:
            return authentication_refused(settings, troubles.authentication)
        place = min(self._open)
        return SourceUnavailable(
            f"{place[0]}-{place[1]}: Kafka at {settings.bootstrap_servers} gave nothing for"
            f" {settings.deadline_s:g} s (deadline_s), and offsets {self._next[place]} to"
            f" {self._end[place] - 1} were there when they were asked for"
            f"{f'; {troubles.last}' if troubles.last else ''}. Nothing is lost: what was not"
            " written is read again"
        )
