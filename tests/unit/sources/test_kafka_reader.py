"""A Kafka reader's snapshot covers the rows that it has returned, whatever its client reports."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka import KafkaError, KafkaException, Message, TopicPartition
from tests.unit.sources.test_kafka_value_formats import settings_of

from onceflow.clients.kafka.topics import TopicFacts
from onceflow.core.errors import (
    InvariantViolation,
    OffsetOutOfRange,
    SourceUnavailable,
    StateIncompatible,
)
from onceflow.core.protocol.ids import AttemptId
from onceflow.core.spi import EndOfInput, OnBadRow, Outage, ReaderContext, Split
from onceflow.sources.kafka import client, intake, reader
from onceflow.sources.kafka.position import PartitionPosition
from onceflow.sources.kafka.reader import KafkaReader
from onceflow.sources.kafka.settings import Latest

TOPIC = "payments"
COLUMNS = pa.schema([("id", pa.int64())])
NO_OFFSET = -1001


@dataclass
class Partition:
    """The log of a partition: its values by offset; other offsets before `end` are markers."""

    values: dict[int, bytes]
    end: int
    low: int = 0
    was_cut: bool = False
    is_silent: bool = False
    """True if no answer of its leader has come yet."""


@dataclass
class Broker:
    """Some partitions of one topic, and the clients that have read them."""

    partitions: dict[int, Partition]
    clients: list[Client] = field(default_factory=list["Client"])
    on_poll: Callable[[], None] | None = None
    on_event: Callable[[], None] | None = None
    refusal: KafkaError | None = None
    watch_failure: Exception | None = None
    watches: list[_Watch] = field(default_factory=list["_Watch"])
    checked: list[list[PartitionPosition]] = field(default_factory=list[list[PartitionPosition]])
    topic_id: str = "A"

    @property
    def client(self) -> Client:
        return self.clients[-1]


class Client:
    """A client of `Broker`. It returns an event once for each end, and each gap."""

    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        self.assigned: list[tuple[int, int, int | None]] = []
        self.next: dict[int, int] = {}
        self.read: dict[int, int] = {}
        self.paused: list[int] = []
        self.told: set[int] = set()
        self.committed: list[list[tuple[int, int]]] = []
        self.events: list[Message] = []
        self.is_open = True

    def assign(self, partitions: Sequence[TopicPartition]) -> None:
        assert self.assigned == []
        self.incremental_assign(partitions)

    def incremental_assign(self, partitions: Sequence[TopicPartition]) -> None:
        for each in partitions:
            self.assigned.append((each.partition, each.offset, each.leader_epoch))
            self.next[each.partition] = each.offset

    def pause(self, partitions: Sequence[TopicPartition]) -> None:
        self.paused += [each.partition for each in partitions]

    def poll(self, _: float) -> Message | None:
        if self.broker.on_poll is not None:
            self.broker.on_poll()
        return next(iter(self.consume(1, 0)), None)

    def consume(self, count: int, _: float) -> list[Message]:
        found: list[Message] = []
        while len(found) < count and (message := self._take()) is not None:
            found.append(message)
        return found

    def _take(self) -> Message | None:
        if self.events:
            if self.broker.on_event is not None:
                self.broker.on_event()
            return self.events.pop(0)
        for number, offset in self.next.items():
            log = self.broker.partitions[number]
            if number in self.paused or log.is_silent:
                continue
            if not log.low <= offset <= log.end or log.was_cut:
                if number not in self.told:
                    self.told.add(number)
                    code = -139 if log.was_cut else KafkaError.OFFSET_OUT_OF_RANGE
                    return self._event(number, offset, code)
                continue
            later = [at for at in log.values if at >= offset]
            if later:
                self.next[number] = self.read[number] = later[0] + 1
                value = log.values[later[0]]
                return Message(topic=TOPIC, partition=number, offset=later[0], value=value)
            if number not in self.told:
                self.told.add(number)
                return self._event(number, log.end, KafkaError._PARTITION_EOF)
        return None

    def _event(self, number: int, offset: int, code: int) -> Message:
        return Message(topic=TOPIC, partition=number, offset=offset, error=KafkaError(code))

    def position(self, asked: Sequence[TopicPartition]) -> list[TopicPartition]:
        return [
            TopicPartition(TOPIC, each.partition, self.read[each.partition], leader_epoch=4)
            if each.partition in self.read
            else TopicPartition(TOPIC, each.partition, NO_OFFSET)
            for each in asked
        ]

    def commit(self, *, offsets: Sequence[TopicPartition], asynchronous: bool) -> None:
        assert self.is_open
        assert asynchronous
        if self.broker.refusal is not None:
            raise KafkaException(self.broker.refusal)
        self.committed.append([(each.partition, each.offset) for each in offsets])

    def get_watermark_offsets(self, asked: TopicPartition, **_: object) -> tuple[int, int]:
        log = self.broker.partitions[asked.partition]
        return log.low, log.end


class _Watch:
    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        self.is_running = False
        broker.watches.append(self)

    @property
    def failure(self) -> Exception | None:
        return self.broker.watch_failure

    def find_outage(self) -> Outage:
        return Outage("Kafka", 1.0)

    def start(self) -> None:
        self.is_running = True

    def stop(self) -> None:
        self.is_running = False


class _Catalog:
    def __init__(self, broker: Broker) -> None:
        self.broker = broker

    def __enter__(self) -> _Catalog:
        return self

    def __exit__(self, *_: object) -> None: ...

    def find_topics(self, names: Sequence[str]) -> dict[str, TopicFacts]:
        return {name: TopicFacts(name, (0,), self.broker.topic_id, "C") for name in names}


@pytest.fixture
def broker(monkeypatch: pytest.MonkeyPatch) -> Broker:
    broker = Broker({0: log(0, 1, 2, 3), 1: log(0, 1)})

    def open_consumer(*_: object, **__: object) -> Client:
        broker.clients.append(Client(broker))
        return broker.client

    def close(consumer: Client) -> None:
        consumer.is_open = False

    def watch(*_: object, **__: object) -> _Watch:
        return _Watch(broker)

    def catalog(_: object) -> _Catalog:
        return _Catalog(broker)

    def check(_: object, ended: list[PartitionPosition]) -> None:
        broker.checked.append(ended)

    monkeypatch.setattr(client, "open_consumer", open_consumer)
    monkeypatch.setattr(client, "close_in_time", close)
    monkeypatch.setattr(client, "LivenessWatch", watch)
    monkeypatch.setattr(reader, "Catalog", catalog)
    monkeypatch.setattr(reader, "check_not_replaced", check)
    return broker


def log(*offsets: int, end: int | None = None, low: int = 0) -> Partition:
    last = max(offsets, default=-1) + 1
    return Partition({at: b'{"id": %d}' % at for at in offsets}, last if end is None else end, low)


def at(number: int, offset: int, stop: int | None = None, epoch: int | None = None) -> Split:
    return PartitionPosition(TOPIC, number, offset, stop, "A", "C", epoch).to_split()


def open_reader(*splits: Split, by_split: bool = False, **settings: Any) -> KafkaReader:
    context = ReaderContext("job", "uid", 0, 1, AttemptId(1), by_split=by_split)
    return KafkaReader(settings_of(COLUMNS, native=False, **settings), splits, context)


def poll(reading: KafkaReader, timeout_s: float = 0.0) -> list[int] | EndOfInput | None:
    returned = reading.poll(timeout_s)
    if isinstance(returned, pa.RecordBatch):
        return returned.column("id").to_pylist()
    return returned


def positions(reading: KafkaReader) -> list[tuple[int, int, int | None]]:
    """Return (partition, next offset, leader epoch) of each split of a snapshot."""
    found = map(PartitionPosition.from_split, reading.snapshot())
    return [(each.partition, each.next, each.leader_epoch) for each in found]


# --- streams -------------------------------------------------------------------------------------


def test_a_snapshot_is_after_the_rows_that_were_returned_and_before_all_others(
    broker: Broker,
) -> None:
    reading = open_reader(at(0, 1, epoch=2), at(1, 0), batch_rows=2)
    assert broker.client.assigned == [(0, 1, 2), (1, 0, None)]
    assert positions(reading) == [(0, 1, 2), (1, 0, None)]
    assert poll(reading) == [1, 2]
    assert positions(reading) == [(0, 3, 4), (1, 0, None)]
    assert poll(reading) == [3, 0]
    assert positions(reading) == [(0, 4, 4), (1, 1, 4)]
    assert poll(reading) == [1]
    assert poll(reading) is None
    assert positions(reading) == [(0, 4, 4), (1, 2, 4)]
    assert reading.list_ended_splits() == ()


def test_a_partition_without_answers_holds_up_no_position_of_another(broker: Broker) -> None:
    broker.partitions[0].is_silent = True
    reading = open_reader(at(0, 0), at(1, 0))
    assert poll(reading) == [0, 1]
    assert positions(reading) == [(0, 0, None), (1, 2, 4)]


def test_a_batch_ends_at_its_bytes(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake, "CHUNK", 1)
    reading = open_reader(at(0, 0), batch_bytes=1)
    assert [poll(reading) for _ in range(4)] == [[0], [1], [2], [3]]


def test_a_snapshot_is_behind_the_markers_at_the_end_of_a_partition(broker: Broker) -> None:
    """Otherwise a job that has read everything looks as if records were left."""
    broker.partitions[0] = log(0, 1, end=5)
    for rows_max in (2, 10):
        # A batch that is full leaves the report of the end to the next poll.
        reading = open_reader(at(0, 0), batch_rows=rows_max)
        assert poll(reading) == [0, 1]
        assert positions(reading) == [(0, 2, 4) if rows_max == 2 else (0, 5, None)]
        assert poll(reading) is None
        assert positions(reading) == [(0, 5, None)]
    broker.partitions[0] = log(0, 1, 6, end=7)
    assert poll(reading) == [6]
    assert positions(reading) == [(0, 7, 4)]


def test_rows_that_wait_for_their_schema_are_behind_the_snapshot(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading = open_reader(at(0, 1, epoch=2), batch_rows=2)
    is_ready = False

    def ready() -> bool:
        return is_ready

    rows = reading._rows  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(rows, "ready", ready)
    for _ in range(2):
        assert poll(reading) is None
        assert positions(reading) == [(0, 1, 2)]
    is_ready = True
    assert poll(reading) == [1, 2]
    assert positions(reading) == [(0, 3, 4)]
    assert poll(reading) == [3]


def test_bad_records_that_are_left_out_are_read(broker: Broker) -> None:
    broker.partitions[0].values.update({0: b"{", 1: b"x", 2: b"{", 3: b"{"})
    reading = open_reader(at(0, 0), on_bad_record=OnBadRow.DEAD_LETTER)
    assert poll(reading) is None
    assert [letter.offset for letter in reading.take_rejected()] == [0, 1, 2, 3]
    assert positions(reading) == [(0, 4, 4)]
    assert reading.take_rejected() == []
    broker.partitions[1].values[0] = b"{"
    reading = open_reader(at(1, 0), on_bad_record=OnBadRow.DROP)
    assert poll(reading) == [1]
    assert reading.dropped_count == 1


def test_the_partitions_of_rows_and_the_times_of_records_are_told_once(broker: Broker) -> None:
    reading = open_reader(at(0, 2), at(1, 0), by_split=True)
    assert poll(reading) == [2, 3, 0, 1]
    assert list(reading.rows_by_split()) == [(f"{TOPIC}-0", 2), (f"{TOPIC}-1", 2)]
    broker.client.events.append(
        Message(
            topic=TOPIC, partition=0, offset=4, value=b'{"id": 4}', timestamp=(1, 1_700_000_000_000)
        )
    )
    assert poll(reading) == [4]
    assert list(reading.take_record_times()) == [(1_700_000_000_000, 1)]
    assert list(reading.take_record_times()) == []


def test_a_poll_that_is_woken_returns_early_and_the_next_one_waits(broker: Broker) -> None:
    reading = open_reader(at(0, 4))
    assert poll(reading) is None
    broker.on_poll = reading.wake
    assert poll(reading, 100.0) is None
    waits: list[float] = []

    def note() -> None:
        waits.append(time.monotonic())

    broker.on_poll = note
    assert poll(reading, 0.01) is None
    assert len(waits) > 1, "the next poll waits as long as it was told"


def test_a_wait_for_native_records_is_ended_by_who_wakes_the_reader(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    woken: list[bool] = []

    def wake(_: intake.MessageIntake) -> None:
        woken.append(True)

    monkeypatch.setattr(intake.MessageIntake, "wake", wake)
    open_reader().wake()
    open_reader(at(0, 0)).wake()
    assert woken == [True]


# --- bounded inputs ------------------------------------------------------------------------------


def test_a_bounded_input_ends_at_its_stops_and_returns_no_row_behind_them(broker: Broker) -> None:
    reading = open_reader(at(0, 1, 3), at(1, 0, 1), ending=Latest())
    assert poll(reading) == [1, 2, 0]
    assert sorted(broker.client.paused) == [0, 1]
    assert reading.list_ended_splits() == [f"{TOPIC}-0", f"{TOPIC}-1"]
    assert [(number, next_) for number, next_, _ in positions(reading)] == [(0, 3), (1, 1)]
    assert poll(reading) == EndOfInput()
    assert poll(reading) == EndOfInput()
    (checked,) = broker.checked
    assert [(each.partition, each.next, each.stop) for each in checked] == [(0, 3, 3), (1, 1, 1)]


def test_a_bounded_input_ends_behind_markers_and_where_nothing_is_left(broker: Broker) -> None:
    broker.partitions[0] = log(0, 1, end=5)
    reading = open_reader(at(0, 0, 5), at(1, 2, 2), ending=Latest())
    assert broker.client.assigned == [(0, 0, None)]
    assert reading.list_ended_splits() == [f"{TOPIC}-1"]
    assert poll(reading) == [0, 1]
    assert poll(reading) == EndOfInput()
    assert [(number, next_) for number, next_, _ in positions(reading)] == [(0, 5), (1, 2)]
    broker.clients.clear()
    reading = open_reader(at(0, 5, 5), ending=Latest())
    assert broker.clients == []
    assert poll(reading) == EndOfInput()
    assert len(broker.checked) == 1, "nothing was read of the second"


def test_a_topic_that_may_be_another_is_not_asked_about_where_loss_is_accepted(
    broker: Broker,
) -> None:
    reading = open_reader(at(1, 0, 2), ending=Latest(), fail_on_data_loss=False)
    assert poll(reading) == [0, 1]
    assert poll(reading) == EndOfInput()
    assert broker.checked == []


def test_a_checkpoint_of_a_stream_without_an_end_cannot_be_read_to_an_end(broker: Broker) -> None:
    with pytest.raises(StateIncompatible, match="is of a stream without an end"):
        open_reader(at(0, 0), ending=Latest())
    with pytest.raises(InvariantViolation, match="payments-0 is in two splits"):
        open_reader(at(0, 0), at(0, 1))


# --- splits that are added -----------------------------------------------------------------------


def test_splits_that_are_added_are_read_and_the_others_go_on(broker: Broker) -> None:
    reading = open_reader(at(0, 0), batch_rows=1)
    assert poll(reading) == [0]
    reading.add_splits([at(1, 1, epoch=3)])
    assert len(broker.clients) == 1
    assert broker.client.assigned == [(0, 0, None), (1, 1, 3)]
    read = [poll(reading) for _ in range(4)]
    assert sorted(row for rows in read for row in rows) == [1, 1, 2, 3]  # type: ignore[union-attr]
    assert positions(reading) == [(0, 4, 4), (1, 2, 4)]


def test_a_reader_without_splits_opens_no_client_until_it_has_one(broker: Broker) -> None:
    reading = open_reader()
    assert poll(reading) is None
    assert reading.find_outage() is None
    reading.add_splits([])
    assert broker.clients == []
    reading.add_splits([at(1, 0)])
    assert poll(reading) == [0, 1]
    assert reading.find_outage() == Outage("Kafka", 1.0)
    reading.close()
    assert reading.find_outage() is None
    closed = open_reader()
    closed.close()
    closed.add_splits([at(0, 0)])
    assert len(broker.clients) == 1


# --- gaps ----------------------------------------------------------------------------------------


def test_records_that_are_gone_end_the_reader(broker: Broker) -> None:
    broker.partitions[0] = log(7, 8, low=7)
    reading = open_reader(at(0, 3))
    with pytest.raises(OffsetOutOfRange, match="offset 3 was to be read next.*earliest one left"):
        poll(reading)
    assert positions(reading) == [(0, 3, None)]


def test_where_loss_is_accepted_a_new_client_reads_what_is_left(broker: Broker) -> None:
    broker.partitions[0] = log(7, 8, low=7)
    reading = open_reader(at(0, 3, epoch=2), at(1, 0), fail_on_data_loss=False, batch_rows=1)
    assert poll(reading) == [7]
    assert [each.is_open for each in broker.clients] == [False, True]
    assert broker.client.assigned == [(0, 7, None), (1, 0, None)]
    assert positions(reading) == [(0, 8, 4), (1, 0, None)]
    assert [poll(reading) for _ in range(3)] == [[8], [0], [1]]


def test_a_log_that_was_cut_off_is_read_from_its_beginning_where_loss_is_accepted(
    broker: Broker,
) -> None:
    broker.partitions[0].was_cut = True
    reading = open_reader(at(0, 2, epoch=2), fail_on_data_loss=False)

    def grow() -> None:
        broker.partitions[0].was_cut = len(broker.clients) == 1

    broker.on_poll = grow
    assert poll(reading, 5.0) == [0, 1, 2, 3]
    assert broker.client.assigned == [(0, 0, None)]


def test_a_gap_over_the_stop_of_a_bounded_input_ends_it_and_is_told_once(
    broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    broker.partitions[0] = log(7, 8, low=7)
    reading = open_reader(at(0, 3, 5), ending=Latest(), fail_on_data_loss=False)
    assert poll(reading, 5.0) == EndOfInput()
    assert [(number, next_) for number, next_, _ in positions(reading)] == [(0, 5)]
    assert [record.args for record in caplog.records if "going on" in record.message][1:] == []


def test_a_partition_that_begins_anew_belongs_to_the_topic_that_is_there_now(
    broker: Broker,
) -> None:
    broker.partitions[0] = log(0, 1)
    broker.topic_id = "B"
    reading = open_reader(at(0, 9), fail_on_data_loss=False)
    assert poll(reading) == [0, 1]
    (split,) = reading.snapshot()
    position = PartitionPosition.from_split(split)
    assert (position.next, position.topic_id, position.cluster_id) == (2, "B", "C")


# --- offsets that are published ------------------------------------------------------------------


def test_only_the_newest_offsets_are_published_by_the_next_poll_or_close(broker: Broker) -> None:
    reading = open_reader(at(0, 0))
    reading.commit([])
    poll(reading)
    assert broker.client.committed == []
    reading.commit([at(0, 1)])
    reading.commit([at(0, 2), at(1, 7)])
    assert broker.client.committed == []
    poll(reading)
    assert broker.client.committed == [[(0, 2), (1, 7)]]
    reading.commit([at(0, 3)])
    reading.close()
    assert broker.client.committed[1:] == [[(0, 3)]]
    assert not broker.client.is_open
    assert poll(reading) is None
    reading.close()


def test_offsets_are_not_published_where_that_is_off_or_denied(broker: Broker) -> None:
    reading = open_reader(at(0, 0), commit_offsets=False)
    reading.commit([at(0, 1)])
    poll(reading)
    assert broker.client.committed == []
    reading = open_reader(at(0, 4))
    denied = KafkaError(KafkaError.GROUP_AUTHORIZATION_FAILED)
    broker.client.events.append(Message(topic=None, partition=-1, offset=0, error=denied))
    # A commit after that would wait for a coordinator that never answers.
    broker.on_event = lambda: reading.commit([at(0, 1)])
    poll(reading)
    reading.commit([at(0, 1)])
    reading.close()
    assert broker.client.committed == []


def test_offsets_that_the_broker_refuses_are_logged_and_do_not_end_the_reader(
    broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    reading = open_reader(at(0, 0))
    broker.refusal = KafkaError(KafkaError.COORDINATOR_NOT_AVAILABLE)
    reading.commit([at(0, 1)])
    assert poll(reading) == [0, 1, 2, 3]
    assert len(caplog.records) == 1
    broker.refusal = None
    reading.commit([at(0, 4)])
    poll(reading)
    assert broker.client.committed == [[(0, 4)]]


def test_brokers_that_were_away_too_long_end_the_reader(broker: Broker) -> None:
    reading = open_reader(at(0, 0))
    (watch,) = broker.watches
    assert watch.is_running
    broker.watch_failure = SourceUnavailable("no broker answered")
    with pytest.raises(SourceUnavailable, match="no broker answered"):
        poll(reading)
    reading.close()
    assert not watch.is_running
