"""Ranges of offsets read by clients that are kept: every record once, wherever a client stood."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import pytest
from tests.integration import kafka_feed
from tests.integration.each_reader import require_native
from tests.integration.kafka_feed import (
    SCHEMA,
    Transactions,
    delete_before,
    produce,
    record,
    recreate_topic,
)
from tests.support.drawn_seeds import draw_random

from onceflow.core.errors import ConfigError, OffsetOutOfRange, SourceUnavailable
from onceflow.integration.pytest_plugin import TopicFactory
from onceflow.integration.servers.kinds import KafkaServer
from onceflow.sources import KafkaSource
from onceflow.sources.kafka.intake import MessageIntake, NativeIntake
from onceflow.sources.kafka.ranges import KeptClients, OffsetRange, read_ranges

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("each_reader")]


@pytest.fixture
def kept() -> Iterator[KeptClients]:
    clients = KeptClients()
    yield clients
    clients.close()


class Ranges:
    """Reads ranges of one topic; all readings share the clients that are kept."""

    def __init__(self, server: KafkaServer, topic: str, kept: KeptClients) -> None:
        self.server, self.topic, self.kept = server, topic, kept

    def read(
        self,
        *ranges: tuple[int, int, int],
        deadline_s: float = 20.0,
        fails: bool = True,
        options: Mapping[str, int] | None = None,
    ) -> list[int]:
        """Return the ids in (partition, first, end), in the order in which they came."""
        source = KafkaSource(
            self.server.bootstrap_servers,
            topic=self.topic,
            schema=SCHEMA,
            deadline_s=deadline_s,
            fail_on_data_loss=fails,
            batch_rows=700,
            native=kafka_feed.NATIVE,
            options=options,
        )
        asked = [OffsetRange(self.topic, *one) for one in ranges]
        batches = read_ranges(source.settings, asked, client_id="test", kept=self.kept)
        return [one["id"] for batch in batches for one in batch.to_pylist()]


def _split(ids: Sequence[int], size: int) -> tuple[list[int], list[int]]:
    """Return what of `ids` is below `size`, and what is not."""
    return [one for one in ids if one < size], [one for one in ids if one >= size]


@pytest.mark.only_proof
def test_ranges_are_read_whole_and_in_order_wherever_the_client_stood_before(
    onceflow_kafka: KafkaServer, kafka_topic: TopicFactory, kept: KeptClients
) -> None:
    """A client is sent on, back, and to several partitions at once, in a random order."""
    topic = kafka_topic(2)
    for partition in range(2):
        values = map(record, range(partition * 5000, partition * 5000 + 5000))
        produce(onceflow_kafka.bootstrap_servers, topic, values, partition=partition)
    ranges = Ranges(onceflow_kafka, topic, kept)
    # On from where it stands, twice; the rest of the topic is fetched beside.
    assert ranges.read((0, 0, 1000)) == list(range(1000))
    assert ranges.read((0, 1000, 1001)) == [1000]
    assert ranges.read((0, 1001, 1001)) == []
    assert ranges.read((0, 1001, 3000)) == list(range(1001, 3000))
    draw = draw_random()
    for _ in range(10):
        first, second = draw.randrange(4990), draw.randrange(4990)
        ends = [draw.choice([one + 1, one + 9, 5000]) for one in (first, second)]
        asked = [(0, first, ends[0]), (1, second, ends[1])][: draw.choice([1, 2, 2])]
        low, high = _split(ranges.read(*asked), 5000)
        assert low == list(range(first, ends[0]))
        if len(asked) == 2:
            assert high == list(range(5000 + second, 5000 + ends[1]))


def test_ranges_are_read_natively_and_a_client_goes_back_to_a_partition_that_it_left(
    onceflow_kafka: KafkaServer, kafka_topic: TopicFactory, kept: KeptClients
) -> None:
    """The native reader keeps its part of the records only until the partition is unassigned."""
    require_native()
    topic = kafka_topic(2)
    for partition in range(2):
        values = map(record, range(partition * 3000, partition * 3000 + 3000))
        produce(onceflow_kafka.bootstrap_servers, topic, values, partition=partition)
    ranges = Ranges(onceflow_kafka, topic, kept)
    for partition, first, end in ((0, 0, 9), (1, 0, 2500), (0, 9, 3000), (0, 5, 10), (0, 5, 10)):
        ids = [partition * 3000 + offset for offset in range(first, end)]
        assert ranges.read((partition, first, end), deadline_s=5.0) == ids
        (client,) = kept.idle
        is_native = kafka_feed.NATIVE is None
        assert isinstance(client.intake, NativeIntake if is_native else MessageIntake)
        # The end of the range was kept to, so the client can go on from there.
        assert client.stands_at == {(topic, partition): end}


def test_a_client_reads_on_after_several_ranges_of_which_one_ended_before_the_other(
    onceflow_kafka: KafkaServer, kafka_topic: TopicFactory, kept: KeptClients
) -> None:
    """The partition that ended first was taken from the client, which must get it again."""
    topic, servers = kafka_topic(2), onceflow_kafka.bootstrap_servers
    produce(servers, topic, map(record, range(10)), partition=0)
    produce(servers, topic, map(record, range(3000, 6000)), partition=1)
    ranges = Ranges(onceflow_kafka, topic, kept)
    first, last = _split(ranges.read((0, 0, 10), (1, 0, 3000)), 3000)
    assert (first, last) == (list(range(10)), list(range(3000, 6000)))
    produce(servers, topic, map(record, range(10, 20)), partition=0)
    produce(servers, topic, map(record, range(6000, 6010)), partition=1)
    first, last = _split(ranges.read((0, 10, 20), (1, 3000, 3010)), 3000)
    assert (first, last) == (list(range(10, 20)), list(range(6000, 6010)))


def test_a_range_ends_where_only_markers_and_aborted_records_are_left(
    onceflow_kafka: KafkaServer, kafka_topic: TopicFactory, kept: KeptClients
) -> None:
    topic = kafka_topic()
    transactions = Transactions(onceflow_kafka.bootstrap_servers)
    for first in (0, 10, 20):
        transactions.write(topic, map(record, range(first, first + 10)))
        transactions.commit() if first == 10 else transactions.abort()
    ranges = Ranges(onceflow_kafka, topic, kept)
    # Eleven offsets each: ten records and a marker.
    assert ranges.read((0, 0, 11)) == []
    assert ranges.read((0, 11, 22)) == list(range(10, 20))
    assert ranges.read((0, 22, 33)) == []
    assert ranges.read((0, 0, 33)) == list(range(10, 20))


def test_what_was_deleted_is_named_or_passed_over(
    onceflow_kafka: KafkaServer, kafka_topic: TopicFactory, kept: KeptClients
) -> None:
    topic = kafka_topic()
    produce(onceflow_kafka.bootstrap_servers, topic, map(record, range(100)))
    ranges = Ranges(onceflow_kafka, topic, kept)
    assert ranges.read((0, 0, 10)) == list(range(10))
    delete_before(onceflow_kafka.bootstrap_servers, topic, 50)
    with pytest.raises(OffsetOutOfRange, match=r"40 offsets \(5 to 44\)|45 offsets \(5 to 49\)"):
        ranges.read((0, 5, 100))
    assert ranges.read((0, 5, 100), fails=False) == list(range(50, 100))
    assert ranges.read((0, 5, 40), fails=False) == []


def test_a_range_that_is_not_there_any_more_ends_in_an_error_and_not_in_waiting(
    onceflow_kafka: KafkaServer, kafka_topic: TopicFactory, kept: KeptClients
) -> None:
    topic = kafka_topic()
    produce(onceflow_kafka.bootstrap_servers, topic, map(record, range(100)))
    ranges = Ranges(onceflow_kafka, topic, kept)
    assert ranges.read((0, 0, 10)) == list(range(10))
    recreate_topic(onceflow_kafka, topic, 1)
    produce(onceflow_kafka.bootstrap_servers, topic, map(record, range(100, 120)))
    # What the client has fetched of the topic that was would be the records that are asked for.
    kept.close()
    with pytest.raises((SourceUnavailable, OffsetOutOfRange), match=f"{topic}-0"):
        ranges.read((0, 10, 100), deadline_s=3.0)


def test_range_with_a_record_that_the_client_may_not_receive_is_refused_by_name(
    onceflow_kafka: KafkaServer, kafka_topic: TopicFactory, kept: KeptClients
) -> None:
    topic = kafka_topic()
    large = b'{"id": 1, "account": "%s"}' % (b"x" * 300_000)
    produce(onceflow_kafka.bootstrap_servers, topic, [record(0), large, record(2)])
    ranges = Ranges(onceflow_kafka, topic, kept)
    sizes = {"receive.message.max.bytes": 100_000, "fetch.max.bytes": 50_000}
    options = {**sizes, "message.max.bytes": 50_000}
    with pytest.raises(ConfigError, match=r"receive\.message\.max\.bytes=100000"):
        ranges.read((0, 0, 3), options=options)
    assert ranges.read((0, 0, 3)) == [0, 1, 2]
