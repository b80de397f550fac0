"""The Kafka source while its broker is killed, hung, gone, or refuses it."""

from __future__ import annotations

import ast
import logging
import re
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol, cast

import pyarrow as pa
import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._acl import AclBinding, AclOperation, AclPermissionType
from confluent_kafka.admin._resource import ResourcePatternType, ResourceType
from tests.integration.kafka_feed import (
    CONTEXT,
    delete_topic,
    group_offsets,
    ids,
    produce,
    read_rows,
    read_to_end,
    reading,
    record,
    source,
)
from tests.integration.kafka_sink_kit import KafkaJob

from onceflow.core.errors import ConfigError, SettingsRefused, SourceUnavailable
from onceflow.integration.servers.kafka import EmbeddedKafka
from onceflow.integration.servers.process import LOOPBACK, free_port
from onceflow.sinks import KafkaSink

pytestmark = pytest.mark.usefixtures("each_reader")


class _GuardedKafka(EmbeddedKafka):
    """A broker with a second listener that wants a password and keeps to ACLs."""

    def __init__(self) -> None:
        super().__init__(
            {
                "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
                "super.users": "User:ANONYMOUS",
                "sasl.enabled.mechanisms": "PLAIN",
                "listener.name.sasl.plain.sasl.jaas.config": (
                    "org.apache.kafka.common.security.plain.PlainLoginModule required"
                    ' user_reader="right" user_outsider="right" user_onlooker="right";'
                ),
                "auto.create.topics.enable": "true",
            }
        )
        self.guarded = f"{LOOPBACK}:{free_port()}"
        self._options["listeners"] = (
            f"PLAINTEXT://{self.bootstrap_servers},SASL://{self.guarded},"
            f"CONTROLLER://{LOOPBACK}:{self._controller_port}"
        )
        self._options["listener.security.protocol.map"] = (
            "CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT,SASL:SASL_PLAINTEXT"
        )


@pytest.fixture(scope="module")
def guarded() -> Iterator[_GuardedKafka]:
    """A broker of this module's own, which its tests may kill but must leave running."""
    with _GuardedKafka() as server:
        yield server


@pytest.fixture(scope="module")
def broker(guarded: _GuardedKafka) -> EmbeddedKafka:
    """The same, for clients that say no password."""
    return guarded


@pytest.fixture
def topic(broker: EmbeddedKafka) -> str:
    return broker.create_topic(f"faults-{uuid.uuid4().hex[:8]}", 2)


def _options(user: str, password: str = "right") -> Mapping[str, str]:
    return {
        "kafka.security.protocol": "SASL_PLAINTEXT",
        "kafka.sasl.mechanism": "PLAIN",
        "kafka.sasl.username": user,
        "kafka.sasl.password": password,
    }


@pytest.mark.only_proof
def test_reader_goes_on_without_loss_when_the_broker_is_killed_and_comes_back(
    broker: EmbeddedKafka, topic: str
) -> None:
    total = 20_000
    producer = Producer({"bootstrap.servers": broker.bootstrap_servers, "log_level": 2})
    for number in range(total):
        producer.produce(topic, record(number), partition=number % 2)
    assert producer.flush(30) == 0
    # Little is fetched ahead, so that most of the topic is read after the broker's death.
    described = source(
        broker.bootstrap_servers,
        topic,
        batch_rows=200,
        options={"queued.min.messages": 500, "fetch.message.max.bytes": 16_000},
    )
    with reading(described) as reader:
        found = ids(read_rows(reader, 1000))
        broker.kill()
        before = len(found)
        while (batch := reader.poll(0.3)) is not None:
            assert isinstance(batch, pa.RecordBatch)
            found += ids(batch.to_pylist())
        assert len(found) < total, f"{before} rows before the kill, and no more to read after it"
        broker.restart()
        found += ids(read_rows(reader, total - len(found)))
        produce(broker.bootstrap_servers, topic, [record(total)])
        found += ids(read_rows(reader, 1))
    assert sorted(found) == list(range(total + 1))


def test_hung_broker_does_not_hold_poll_and_reading_goes_on_after_it(
    broker: EmbeddedKafka, topic: str
) -> None:
    produce(broker.bootstrap_servers, topic, [record(0)])
    with reading(source(broker.bootstrap_servers, topic)) as reader:
        assert ids(read_rows(reader, 1)) == [0]
        broker.pause()
        try:
            started = time.monotonic()
            for _ in range(10):
                assert reader.poll(0.05) is None
            assert time.monotonic() - started < 60.0
        finally:
            broker.unpause()
        produce(broker.bootstrap_servers, topic, [record(1)])
        assert ids(read_rows(reader, 1)) == [1]


@pytest.mark.only_proof
def test_broker_silent_for_the_deadline_is_unavailable_and_close_returns(
    broker: EmbeddedKafka, topic: str
) -> None:
    reader = source(broker.bootstrap_servers, topic, deadline_s=2.0).reader(
        source(broker.bootstrap_servers, topic).splits(), CONTEXT
    )
    assert reader.poll(0.5) is None
    broker.pause()
    try:
        reader.commit(reader.snapshot())
        with pytest.raises(SourceUnavailable) as caught:
            _poll_for(reader.poll, 90.0)
        started = time.monotonic()
        reader.close()
        assert time.monotonic() - started < 60.0
    finally:
        broker.unpause()
    assert broker.bootstrap_servers in str(caught.value)
    assert topic in str(caught.value)
    assert "deadline_s=2" in str(caught.value)


def test_unreachable_broker_fails_the_check_at_its_deadline() -> None:
    address = f"{LOOPBACK}:{free_port()}"
    started = time.monotonic()
    with pytest.raises(SourceUnavailable, match=address):
        source(address, "payments", deadline_s=1.0).validate()
    assert time.monotonic() - started < 60.0


def test_reader_whose_broker_was_never_there_is_unavailable_at_its_deadline(
    broker: EmbeddedKafka, topic: str
) -> None:
    splits = source(broker.bootstrap_servers, topic).splits()
    nobody = source(f"{LOOPBACK}:{free_port()}", topic, deadline_s=1.0)
    with reading(nobody, splits) as reader, pytest.raises(SourceUnavailable, match=r"refused|down"):
        _poll_for(reader.poll, 90.0)


def test_topic_deleted_under_a_reader_is_unavailable_and_says_so(broker: EmbeddedKafka) -> None:
    name = broker.create_topic(f"gone-{uuid.uuid4().hex[:8]}", 1)
    produce(broker.bootstrap_servers, name, [record(0)])
    with reading(source(broker.bootstrap_servers, name, deadline_s=2.0)) as reader:
        assert ids(read_rows(reader, 1)) == [0]
        delete_topic(broker.bootstrap_servers, name)
        with pytest.raises(SourceUnavailable, match=f"topic {name}: .*[Uu]nknown topic"):
            _poll_for(reader.poll, 90.0)


@pytest.mark.servers
def test_idle_topic_on_a_healthy_broker_is_never_taken_for_an_outage(
    broker: EmbeddedKafka, topic: str
) -> None:
    with reading(source(broker.bootstrap_servers, topic, deadline_s=6.0)) as reader:
        _poll_for(reader.poll, 8.0)
        produce(broker.bootstrap_servers, topic, [record(7)])
        assert ids(read_rows(reader, 1)) == [7]


@pytest.mark.servers
def test_outage_shorter_than_the_deadline_is_borne_however_long_the_reader_has_run(
    broker: EmbeddedKafka, topic: str
) -> None:
    with reading(source(broker.bootstrap_servers, topic, deadline_s=8.0)) as reader:
        _poll_for(reader.poll, 8.5)
        # Longer than a probe waits for its answer, shorter than the deadline.
        broker.pause()
        try:
            _poll_for(reader.poll, 2.5)
        finally:
            broker.unpause()
        produce(broker.bootstrap_servers, topic, [record(7)])
        assert ids(read_rows(reader, 1)) == [7]
        _poll_for(reader.poll, 2.0)


def test_reader_may_be_closed_by_another_thread_while_it_polls(
    broker: EmbeddedKafka, topic: str
) -> None:
    described = source(broker.bootstrap_servers, topic)
    reader = described.reader(described.splits(), CONTEXT)
    closing = threading.Timer(0.3, reader.close)
    closing.start()
    until = time.monotonic() + 90
    while closing.is_alive():
        assert time.monotonic() < until
        assert reader.poll(0.05) is None
    closing.join()
    assert reader.poll(0.05) is None
    reader.commit(reader.snapshot())


@pytest.mark.servers
def test_wrong_password_is_a_config_error_that_names_the_mechanism_and_not_the_password(
    guarded: _GuardedKafka,
) -> None:
    name = guarded.create_topic(f"secret-{uuid.uuid4().hex[:8]}", 1)
    refused = source(guarded.guarded, name, options=_options("reader", "wr0ng-pass"))
    started = time.monotonic()
    with pytest.raises(ConfigError) as caught:
        refused.validate()
    assert time.monotonic() - started < 60.0
    assert "refuses to authenticate user 'reader'" in str(caught.value)
    assert "sasl.mechanism=PLAIN" in str(caught.value)
    assert "wr0ng-pass" not in str(caught.value) + repr(refused)


@pytest.mark.servers
def test_topic_that_may_not_be_read_is_a_config_error_with_the_command_that_grants_it(
    guarded: _GuardedKafka,
) -> None:
    name = guarded.create_topic(f"denied-{uuid.uuid4().hex[:8]}", 1)
    with pytest.raises(ConfigError, match=r"kafka-acls\.sh .*User:outsider .*--topic " + name):
        source(guarded.guarded, name, options=_options("outsider")).validate()


def test_sink_of_a_refused_user_says_who_is_refused_long_before_its_deadline(
    guarded: _GuardedKafka, tmp_path: Path
) -> None:
    name = guarded.create_topic(f"secret-{uuid.uuid4().hex[:8]}", 1)
    given: dict[str, Any] = {"topic": name, "deadline_s": 120}
    stranger = KafkaSink(guarded.guarded, options=_options("reader", "wr0ng-pass"), **given)
    started = time.monotonic()
    with KafkaJob(stranger, directory=tmp_path) as job, pytest.raises(ConfigError) as caught:
        job.check()
    assert time.monotonic() - started < 60.0
    assert "refuses to authenticate user 'reader'" in str(caught.value)
    assert "wr0ng-pass" not in str(caught.value) + repr(stranger)
    outsider = KafkaSink(guarded.guarded, options=_options("outsider"), **given)
    granted = (
        rf"forbids writing .*kafka-acls\.sh .*User:outsider --operation Write .*--topic {name}"
    )
    with KafkaJob(outsider, directory=tmp_path) as job, pytest.raises(ConfigError, match=granted):
        job.check()


def test_topic_that_may_be_described_but_not_read_stops_the_reader(
    guarded: _GuardedKafka,
) -> None:
    name = guarded.create_topic(f"denied-{uuid.uuid4().hex[:8]}", 1)
    _grant(guarded, "onlooker", name, AclOperation.DESCRIBE)
    produce(guarded.bootstrap_servers, name, [record(0)])
    described = source(guarded.guarded, name, options=_options("onlooker"))
    described.validate()
    with reading(described) as reader, pytest.raises(ConfigError, match="forbids reading"):
        _poll_for(reader.poll, 20.0)


@pytest.mark.servers
def test_group_that_may_not_be_used_costs_lag_numbers_and_nothing_else(
    guarded: _GuardedKafka, caplog: pytest.LogCaptureFixture
) -> None:
    name = guarded.create_topic(f"group-{uuid.uuid4().hex[:8]}", 1)
    _grant(guarded, "reader", name, AclOperation.READ)
    produce(guarded.bootstrap_servers, name, map(record, range(5)))
    described = source(guarded.guarded, name, options=_options("reader"), group_id="not-mine")
    with caplog.at_level(logging.WARNING), reading(described) as reader:
        assert ids(read_rows(reader, 5)) == [0, 1, 2, 3, 4]
        reader.commit(reader.snapshot())
        produce(guarded.bootstrap_servers, name, map(record, range(5, 8)))
        assert ids(read_rows(reader, 3)) == [5, 6, 7]
        reader.commit(reader.snapshot())
        for _ in range(20):
            reader.poll(0.05)
    assert "roup authorization failed" in caplog.text
    assert group_offsets(guarded.bootstrap_servers, "not-mine", name, 1) == [-1001]


@pytest.mark.servers
def test_record_that_the_client_may_not_receive_stops_reading_by_name(
    broker: EmbeddedKafka, topic: str
) -> None:
    """The broker answers and the client drops each answer, so no outage is seen."""
    small = {"receive.message.max.bytes": 100_000, "fetch.max.bytes": 50_000}
    options = {**small, "message.max.bytes": 50_000}
    large = b'{"id": 1, "account": "%s"}' % (b"x" * 300_000)
    produce(broker.bootstrap_servers, topic, [record(0), large, record(2)])
    described = source(broker.bootstrap_servers, topic, options=options, ending_offsets="latest")
    with reading(described) as reader, pytest.raises(ConfigError) as caught:
        _poll_for(reader.poll, 20.0)
    assert not isinstance(caught.value, SettingsRefused), "a restart would get the same answer"
    text = str(caught.value)
    assert re.search(r"an answer of 30\d,\d{3} bytes", text)
    assert "receive.message.max.bytes=100000" in text
    advised = re.search(r"options=(\{'receive\.message\.max\.bytes': \d+\})", text)
    assert advised is not None
    options |= ast.literal_eval(advised[1])
    raised = source(broker.bootstrap_servers, topic, options=options, ending_offsets="latest")
    with reading(raised) as reader:
        assert ids(read_to_end(reader)) == [0, 1, 2]


@pytest.mark.servers
def test_check_of_a_missing_topic_does_not_create_it(guarded: _GuardedKafka) -> None:
    name = f"never-{uuid.uuid4().hex[:8]}"
    for _ in range(2):
        with pytest.raises(ConfigError, match="does not exist"):
            source(guarded.bootstrap_servers, name).validate()


class _Poll(Protocol):
    def __call__(self, timeout_s: float) -> object: ...


def _poll_for(poll: _Poll, limit_s: float) -> None:
    until = time.monotonic() + limit_s
    while time.monotonic() < until:
        poll(0.1)


class _AclAdmin(Protocol):
    def create_acls(self, acls: list[AclBinding]) -> dict[AclBinding, Future[None]]: ...


def _grant(server: _GuardedKafka, user: str, topic: str, operation: AclOperation) -> None:
    admin = cast("_AclAdmin", AdminClient({"bootstrap.servers": server.bootstrap_servers}))
    binding = AclBinding(
        ResourceType.TOPIC,
        topic,
        ResourcePatternType.LITERAL,
        f"User:{user}",
        "*",
        operation,
        AclPermissionType.ALLOW,
    )
    for future in admin.create_acls([binding]).values():
        future.result(60)
