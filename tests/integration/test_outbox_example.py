"""The outbox of the examples: each event is in its topic once, through kills of slots."""

from __future__ import annotations

import json
import uuid
from collections import Counter
from pathlib import Path
from typing import Any

import psycopg
import pytest
from confluent_kafka import Consumer, TopicPartition
from examples import outbox as example
from psycopg.types.json import Jsonb
from tests.support.waiting import await_true

from onceflow.integration.faults.processes import kill_process
from onceflow.integration.servers.postgres import EmbeddedPostgres
from onceflow.testing import KafkaServer

pytestmark = [pytest.mark.servers, pytest.mark.timeout(600)]

_CREATE = """
    CREATE TABLE outbox (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, topic text NOT NULL,
                         key text, headers jsonb, payload jsonb NOT NULL)
"""


def _read_topic(servers: str, topic: str) -> list[tuple[bytes | None, dict[str, Any], Any]]:
    """Return key, value and headers of each committed record, in their order."""
    settings = {"bootstrap.servers": servers, "group.id": uuid.uuid4().hex}
    consumer = Consumer(
        {**settings, "isolation.level": "read_committed", "enable.partition.eof": True}
    )
    consumer.assign([TopicPartition(topic, 0, 0)])
    records: list[tuple[bytes | None, dict[str, Any], Any]] = []
    while (message := consumer.poll(60)) is not None and message.error() is None:
        value = message.value()
        assert value is not None
        records.append((message.key(), json.loads(value), message.headers()))
    consumer.close()
    return records


def test_each_committed_event_is_in_its_topic_once(
    onceflow_kafka: KafkaServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    suffix = uuid.uuid4().hex[:8]
    topics = tuple(onceflow_kafka.create_topic(f"{name}-{suffix}") for name in example.TOPICS)
    monkeypatch.setattr(example, "TOPICS", topics)
    with EmbeddedPostgres({"wal_level": "logical"}) as server:
        with psycopg.connect(server.url) as connection:
            connection.execute(_CREATE)
        job = example.publish_events(
            onceflow_kafka.bootstrap_servers, server.url, str(tmp_path)
        ).start()
        killed: set[int] = set()
        try:
            await_true(lambda: _count_slots(server.url), "no slot of the server")
            for start in range(0, 200, 50):
                with psycopg.connect(server.url) as connection:
                    _insert(connection, topics, range(1_000, 1_010))
                    connection.rollback()
                    _insert(connection, topics, range(start, start + 50))
                    # An outbox often stays empty. Its deletes are no events.
                    connection.execute("DELETE FROM outbox")
                await_true(lambda: {s.pid for s in job.status().slots} - killed, "no slot")
                (pid,) = {slot.pid for slot in job.status().slots} - killed
                assert kill_process(pid)
                killed.add(pid)

            def count() -> int:
                servers = onceflow_kafka.bootstrap_servers
                return sum(len(_read_topic(servers, topic)) for topic in topics)

            await_true(lambda: count() >= 200, "not all events", timeout_s=120)
        finally:
            job.stop()
    for topic in topics:
        records = _read_topic(onceflow_kafka.bootstrap_servers, topic)
        numbers = [value["number"] for _, value, _ in records]
        assert Counter(numbers) == Counter(range(topics.index(topic), 200, len(topics)))
        assert numbers == sorted(numbers)
        for key, value, headers in records:
            assert key == (None if value["number"] % 10 == 9 else b"key %d" % (value["number"] % 7))
            assert headers == [("number", str(value["number"]).encode())]


def _count_slots(url: str) -> int:
    with psycopg.connect(url) as connection:
        return len(connection.execute("SELECT 1 FROM pg_replication_slots").fetchall())


def _insert(connection: psycopg.Connection[Any], topics: tuple[str, ...], numbers: range) -> None:
    for number in numbers:
        key = None if number % 10 == 9 else f"key {number % 7}"
        connection.execute(
            "INSERT INTO outbox (topic, key, headers, payload) VALUES (%s, %s, %s, %s)",
            [
                topics[number % len(topics)],
                key,
                Jsonb({"number": str(number)}),
                Jsonb({"number": number}),
            ],
        )
