"""Tests the Kafka source on logs whose end was cut off and has grown again."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.integration import kafka_feed

from onceflow.core.errors import OffsetOutOfRange
from onceflow.integration.servers.kafka import EmbeddedKafka

pytestmark = [pytest.mark.servers, pytest.mark.usefixtures("each_reader")]

_SAID = "offset 100 was to be read next, but the end of the log was cut off before it"


@pytest.fixture(scope="module")
def broker() -> Iterator[EmbeddedKafka]:
    """A broker of this module's own, which its tests may kill but must leave running."""
    with EmbeddedKafka() as server:
        yield server


@pytest.fixture
def topic(broker: EmbeddedKafka) -> str:
    """A topic with the records 0 to 99, in ten batches."""
    name = broker.create_topic(f"cut-{uuid.uuid4().hex[:8]}")
    for first in range(0, 100, 10):
        kafka_feed.produce(
            broker.bootstrap_servers, name, map(kafka_feed.record, range(first, first + 10))
        )
    return name


def _cut(broker: EmbeddedKafka, topic: str) -> None:
    """Take half of the records from the end of the log, as an unclean election does."""
    broker.kill()
    folder = Path(broker.directory) / "data" / f"{topic}-0"
    log = folder / f"{0:020}.log"
    os.truncate(log, log.stat().st_size // 2)
    for index in folder.glob("*index"):
        index.unlink()
    broker.start()


def test_a_position_in_records_that_were_written_anew_is_refused(
    broker: EmbeddedKafka, topic: str
) -> None:
    described = kafka_feed.source(broker.bootstrap_servers, topic)
    with kafka_feed.reading(described) as reader:
        assert kafka_feed.ids(kafka_feed.read_rows(reader, 100)) == list(range(100))
        known = reader.snapshot()
    _cut(broker, topic)
    kafka_feed.produce(broker.bootstrap_servers, topic, map(kafka_feed.record, range(1000, 1100)))
    with (
        kafka_feed.reading(described, described.discover(known)) as reader,
        pytest.raises(OffsetOutOfRange, match=_SAID),
    ):
        kafka_feed.read_rows(reader, 1)
    accepting = kafka_feed.source(broker.bootstrap_servers, topic, fail_on_data_loss=False)
    with kafka_feed.reading(accepting, accepting.discover(known)) as reader:
        found = kafka_feed.ids(kafka_feed.read_rows(reader, 101))
        while found[-1] != 1099:
            found += kafka_feed.ids(kafka_feed.read_rows(reader, 1))
    assert found[-100:] == list(range(1000, 1100))
    assert found[:-100] == list(range(len(found) - 100))


def test_a_reader_under_which_records_were_written_anew_is_stopped(
    broker: EmbeddedKafka, topic: str
) -> None:
    with kafka_feed.reading(kafka_feed.source(broker.bootstrap_servers, topic)) as reader:
        assert kafka_feed.ids(kafka_feed.read_rows(reader, 100)) == list(range(100))
        _cut(broker, topic)
        kafka_feed.produce(
            broker.bootstrap_servers, topic, map(kafka_feed.record, range(1000, 1100))
        )
        with pytest.raises(OffsetOutOfRange, match=_SAID):
            kafka_feed.read_rows(reader, 1)


def test_a_log_that_is_whole_is_read_on_after_each_death_of_its_broker(
    broker: EmbeddedKafka, topic: str
) -> None:
    """Also behind markers of transactions, and where the position is the end of an epoch."""
    described = kafka_feed.source(broker.bootstrap_servers, topic)
    known = described.splits()
    found: list[int] = []
    for number in range(100, 103):
        transactions = kafka_feed.Transactions(broker.bootstrap_servers)
        transactions.write(topic, [kafka_feed.record(number)])
        transactions.commit()
        with kafka_feed.reading(described, described.discover(known)) as reader:
            found += kafka_feed.ids(kafka_feed.read_rows(reader, number + 1 - len(found)))
            # Behind the marker, once the client has come to the end.
            assert reader.poll(0.3) is None
            known = reader.snapshot()
        broker.kill()
        broker.start()
    kafka_feed.produce(broker.bootstrap_servers, topic, [kafka_feed.record(103)])
    with kafka_feed.reading(described, described.discover(known)) as reader:
        found += kafka_feed.ids(kafka_feed.read_rows(reader, 1))
    assert found == list(range(104))
