"""The native reader returns what the other one does, and trusts no client that it does not know."""

from __future__ import annotations

import random
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka import Consumer, Producer
from tests.integration import kafka_feed
from tests.integration.each_reader import require_native
from tests.support.ledger import SETTINGS

from onceflow import Checkpointing, LocalProcesses, Pipeline
from onceflow.core.errors import ConfigError
from onceflow.core.spi import EndOfInput
from onceflow.core.spi.dead_letters import DeadLetter
from onceflow.integration.pytest_plugin import TopicFactory
from onceflow.integration.servers.kafka import delete_topics
from onceflow.integration.servers.kinds import KafkaServer
from onceflow.sinks import FileSink
from onceflow.sources import KafkaSource
from onceflow.sources.kafka.intake import MessageIntake, NativeIntake, open_intake

SEED = 20_261_126
YESTERDAY_MS = int(time.time() - 86_400) * 1_000
"""A broker deletes records that are older than a week at any moment, between two readings, too."""
WAIT_S = 30.0
"""Of a poll without records: a test that waits for one to end by itself fails."""
CONSUMER_BYTES = Consumer.__basicsize__
ODD_VALUES = (
    *(None, b"", b" ", b"\n", b"{}", b"{}{}", b"{}\n{}", b"[]", b"null", b"\0\xff", b"}{", b"{}}"),
    # Halves of one record, which are none by themselves: in an array, an object and a text.
    *(b'{"id":1,"account":"a","more":[{}', b"{}]}", b'{"id":1,"account":"a}', b'{"}'),
    *(
        b'{"id": 2, "account": "b"}\n',
        b' {"id": 3, "account": "c"}',
        b'{"id": 4,\n "account": "d"}',
    ),
    *(b'{"id": 5, "account": "\\n}\\n{"}', '{"id": 6, "account": "ä€𝄞"}'.encode()),
    b'{"id": 7, "account": "' + b"x" * 900_000 + b'"}',
)
ODD_KEYS = (None, b"", b"k", b"\0\xff" * 100)


@pytest.fixture(autouse=True)
def native() -> None:
    require_native()


def _produce_odd(servers: str, topic: str, count: int) -> None:
    """Write `count` records, of which a quarter is odd, between records of transactions."""
    chosen = random.Random(SEED)
    transactions = kafka_feed.Transactions(servers)
    producer = Producer({"bootstrap.servers": servers, "linger.ms": 5})
    for number in range(count):
        odd = chosen.random() < 0.25
        producer.produce(
            topic,
            value=chosen.choice(ODD_VALUES) if odd else kafka_feed.record(number),
            key=chosen.choice(ODD_KEYS),
            partition=chosen.randrange(2),
            headers=[("a", b"\xff"), ("a", None), ("", b"")] if odd else None,
            timestamp=chosen.choice([0, YESTERDAY_MS + number]),
        )
        if number % (count // 4) == 0:
            assert producer.flush(60) == 0
            transactions.write(topic, map(kafka_feed.record, range(10)), partition=number % 2)
            transactions.abort() if chosen.random() < 0.5 else transactions.commit()
    assert producer.flush(60) == 0


def _read_all(
    servers: str, topic: str, **settings: Any
) -> tuple[pa.Table, Sequence[DeadLetter], Sequence[bytes]]:
    """Return rows and dead letters, each sorted by position, and the positions at the end."""
    described = KafkaSource(servers, topic=topic, ending_offsets="latest", **settings)
    batches: list[pa.RecordBatch] = []
    letters: list[DeadLetter] = []
    with kafka_feed.reading(described) as reader:
        while not isinstance(batch := reader.poll(0.2), EndOfInput):
            letters += reader.take_rejected()
            if isinstance(batch, pa.RecordBatch):
                batches.append(batch)
        positions = [split.position for split in reader.snapshot()]
    prefix = "" if settings.get("format") == "raw" else "_"
    order = [(f"{prefix}partition", "ascending"), (f"{prefix}offset", "ascending")]
    letters.sort(key=lambda one: (one.partition or 0, one.offset or 0))
    return pa.Table.from_batches(batches).sort_by(order), letters, positions


@pytest.fixture(scope="module")
def odd_topic(onceflow_kafka: KafkaServer) -> Iterator[tuple[str, str]]:
    servers = onceflow_kafka.bootstrap_servers
    topic = onceflow_kafka.create_topic(f"onceflow-{uuid.uuid4().hex[:16]}", 2)
    _produce_odd(servers, topic, 2000)
    yield servers, topic
    delete_topics(servers, [topic])


@pytest.mark.parametrize(
    "settings",
    [
        {"format": "raw"},
        {"format": "raw", "batch_rows": 7},
        {"schema": kafka_feed.SCHEMA, "include_metadata": True, "on_bad_record": "dead_letter"},
        {
            "schema": kafka_feed.SCHEMA,
            "include_metadata": True,
            "on_bad_record": "dead_letter",
            "batch_rows": 3,
        },
        {
            "schema": "id DECIMAL(3,0), account STRING",
            "include_metadata": True,
            "on_bad_record": "drop",
        },
    ],
    ids=["raw", "raw in small batches", "json", "json in small batches", "json with late checks"],
)
def test_odd_records_are_the_same_to_both_readers(
    odd_topic: tuple[str, str], settings: Mapping[str, Any]
) -> None:
    rows, letters, positions = _read_all(*odd_topic, native=False, **settings)
    natively = _read_all(*odd_topic, native=True, **settings)
    assert natively[0].equals(rows)
    assert natively[1:] == (letters, positions)
    assert rows.num_rows > 500


def test_the_native_reader_is_used_where_it_can_be_and_refused_by_name_where_not(
    onceflow_kafka: KafkaServer, kafka_topic: TopicFactory
) -> None:
    topic = kafka_topic()

    def open_one(**given: Any) -> object:
        described = KafkaSource(onceflow_kafka.bootstrap_servers, topic=topic, **given)
        consumer = Consumer(
            {
                "bootstrap.servers": onceflow_kafka.bootstrap_servers,
                "group.id": "g",
                "client.id": "c",
            }
        )
        intake = open_intake(described.settings, consumer, "c")
        intake.close()
        consumer.close()
        return type(intake)

    assert open_one(schema=kafka_feed.SCHEMA) is NativeIntake
    assert open_one(format="raw") is NativeIntake
    assert open_one(schema=kafka_feed.SCHEMA, native=False) is MessageIntake
    assert open_one(schema=kafka_feed.SCHEMA, format="csv") is MessageIntake
    assert open_one(schema=kafka_feed.SCHEMA, key_format="string") is MessageIntake
    with pytest.raises(ConfigError, match="native=True: it reads no columns of keys"):
        open_one(schema=kafka_feed.SCHEMA, key_format="string", native=True)
    described = KafkaSource(
        "nowhere:1", topic=topic, schema=kafka_feed.SCHEMA, format="csv", native=True
    )
    with pytest.raises(ConfigError, match="format='csv' gains nothing by it"):
        described.reader(
            KafkaSource(onceflow_kafka.bootstrap_servers, topic=topic, format="raw").splits(),
            kafka_feed.CONTEXT,
        )


def test_a_client_that_is_not_known_is_refused_and_a_closed_one_is_not_read() -> None:
    reader_type = import_module("onceflow_kafka_native").Reader
    settings = {"bootstrap.servers": "127.0.0.1:1", "log_level": 0}
    consumer = Consumer({**settings, "group.id": "g", "client.id": "known"})
    producer = Producer(settings)
    for what, client_id, size in (
        (object(), "known", CONSUMER_BYTES),
        (producer, "known", CONSUMER_BYTES),
        (consumer, "known", CONSUMER_BYTES + 8),
        (consumer, "other", CONSUMER_BYTES),
        (consumer, "know", CONSUMER_BYTES),
    ):
        with pytest.raises((TypeError, RuntimeError)):
            reader_type(what, client_id, size)
    unmade = reader_type.__new__(reader_type)
    with pytest.raises(RuntimeError, match="closed"):
        unmade.read(1, 1, 0, b"")
    reader = reader_type(consumer, "known", CONSUMER_BYTES)
    reader.take_over("nothing", 0)
    for wrong in (
        (0, 1, 0, b""),
        (1, 0, 0, b""),
        (1, 1, -1, b""),
        (1, 1, 0, b"ab"),
        (2**40, 1, 0, b""),
    ):
        with pytest.raises(ValueError, match="out of range"):
            reader.read(*wrong)
    assert reader.read(10, 10, 0, b"")[0] == 0
    reader.close()
    reader.close()
    with pytest.raises(RuntimeError, match="closed"):
        reader.read(1, 1, 0, b"")
    with pytest.raises(RuntimeError, match="closed"):
        reader.take_over("nothing", 1)
    consumer.close()
    with pytest.raises(RuntimeError, match="closed"):
        reader_type(consumer, "known", CONSUMER_BYTES)


def test_a_reader_that_is_dropped_without_being_closed_lets_its_client_go() -> None:
    reader_type = import_module("onceflow_kafka_native").Reader
    for number in range(3):
        client_id = f"dropped-{number}"
        settings = {"bootstrap.servers": "127.0.0.1:1", "log_level": 0, "group.id": "g"}
        consumer = Consumer({**settings, "client.id": client_id})
        reader = reader_type(consumer, client_id, CONSUMER_BYTES)
        reader.take_over("nothing", 0)
        del consumer, reader


def test_a_read_ends_when_it_is_woken_from_another_thread(onceflow_kafka: KafkaServer) -> None:
    """By itself: a poll waits in short pieces, and would end soon without it, too."""
    servers = onceflow_kafka.bootstrap_servers
    consumer = Consumer({"bootstrap.servers": servers, "client.id": "woken", "group.id": "g"})
    settings = KafkaSource(servers, topic="nothing", schema=kafka_feed.SCHEMA).settings
    intake = NativeIntake(settings, consumer, "woken")
    began = time.monotonic()
    for wake_s in (0.3, 0.0):
        timer = threading.Timer(wake_s, intake.wake)
        timer.start()
        if not wake_s:
            # Nobody waits at that moment, so it is the next read that returns.
            timer.join()
        assert intake.wait(WAIT_S, 10, 10) is None
    assert time.monotonic() - began < WAIT_S
    intake.close()
    intake.wake()
    consumer.close()


def test_a_poll_that_waits_for_records_ends_when_it_is_woken(
    onceflow_kafka: KafkaServer, kafka_topic: TopicFactory
) -> None:
    servers, topic = onceflow_kafka.bootstrap_servers, kafka_topic(1)
    with kafka_feed.reading(kafka_feed.source(servers, topic)) as reader:
        timer = threading.Timer(0.3, reader.wake)
        timer.start()
        began = time.monotonic()
        assert reader.poll(WAIT_S) is None
        reader.wake()
        # Nobody waits at that moment, so it is the next poll that returns.
        assert reader.poll(WAIT_S) is None
        assert time.monotonic() - began < WAIT_S
        kafka_feed.produce(servers, topic, [kafka_feed.record(1)])
        assert isinstance(reader.poll(WAIT_S), pa.RecordBatch)
    timer.join()
    reader.wake()


def test_checkpoints_do_not_wait_for_records(
    tmp_path: Path, onceflow_kafka: KafkaServer, kafka_topic: TopicFactory
) -> None:
    pipeline = Pipeline(
        LocalProcesses(tmp_path / "logs"),
        name="idle",
        parallelism=2,
        checkpointing=Checkpointing(storage=str(tmp_path / "checkpoints"), interval=0.05),
        settings=replace(SETTINGS, poll_timeout_s=WAIT_S),
    )
    records = pipeline.read(
        kafka_feed.source(onceflow_kafka.bootstrap_servers, kafka_topic(2)), uid="records"
    )
    records.write(FileSink(str(tmp_path / "out")), uid="out")
    job = pipeline.start()
    began = time.monotonic()
    job.wait_for(checkpoints=10, timeout_s=10 * WAIT_S)
    job.stop()
    assert time.monotonic() - began < 2 * WAIT_S, "each checkpoint would have waited for a poll"
