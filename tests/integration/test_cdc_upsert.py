"""The example of a table's copy: equal to the table after its job was killed in the middle."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from confluent_kafka import Producer
from examples.cdc_upsert import copy_of_orders
from tests.integration import postgres_sink_kit as postgres

from onceflow import LocalProcesses
from onceflow.integration.pytest_plugin import TopicFactory
from onceflow.integration.servers.kinds import KafkaServer

_PARTITIONS = 2


class Orders:
    """A table that changes at random, and the envelopes that Debezium sends of each change."""

    def __init__(self, url: str, servers: str, topic: str, seed: int) -> None:
        self._url = url
        self._producer = Producer({"bootstrap.servers": servers, "linger.ms": 5})
        self._topic = topic
        self._random = random.Random(seed)
        self._rows: dict[int, dict[str, Any]] = {}
        postgres.query(url, "CREATE TABLE orders (id bigint PRIMARY KEY, state text, cents bigint)")

    def change(self, count: int) -> None:
        """Make `count` changes; return when the table has them, and Kafka what is said of them."""
        for _ in range(count):
            key = self._random.randrange(60)
            before = self._rows.get(key)
            if before is not None and self._random.random() < 0.3:
                # Of a deleted row Postgres tells the key alone, unless it is told otherwise.
                self._send(key, {"op": "d", "before": {"id": key}, "after": None})
                self._send(key, None)
                del self._rows[key]
                continue
            cents = self._random.choice([None, self._random.randrange(10**12)])
            row = {"id": key, "state": self._random.choice(["new", "paid"]), "cents": cents}
            operation = "u" if before is not None else self._random.choice("cr")
            self._send(key, {"op": operation, "before": before, "after": row})
            self._rows[key] = row
        rows = [tuple(row.values()) for row in self._rows.values()]
        values = ", ".join(f"({one}, '{state}', {cents or 'NULL'})" for one, state, cents in rows)
        postgres.query(self._url, "DELETE FROM orders")
        postgres.query(self._url, f"INSERT INTO orders VALUES {values}")
        assert self._producer.flush(60) == 0

    def _send(self, key: int, envelope: dict[str, Any] | None) -> None:
        # With the schema beside it and without: converters do either.
        shape = self._random.random() < 0.5
        value = {"schema": {"type": "struct"}, "payload": envelope} if shape else envelope
        self._producer.produce(
            self._topic,
            key=json.dumps({"id": key}).encode(),
            value=None if envelope is None else json.dumps(value).encode(),
            partition=key % _PARTITIONS,
        )


def _await(condition: Callable[[], bool], what: str, *, timeout_s: float = 90) -> None:
    until = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until, what
        time.sleep(0.02)


def test_copy_equals_its_table_after_a_slot_was_killed(
    tmp_path: Path,
    postgres_database: str,
    onceflow_kafka: KafkaServer,
    kafka_topic: TopicFactory,
) -> None:
    seed = int(os.environ.get("ONCEFLOW_SEED", random.randrange(2**32)))
    servers, topic = onceflow_kafka.bootstrap_servers, kafka_topic(_PARTITIONS)
    orders = Orders(postgres_database, servers, topic, seed)

    def rows(table: str) -> list[Any]:
        return postgres.query(
            postgres_database, f"SELECT id, state, cents FROM {table} ORDER BY id"
        )

    orders.change(300)
    cluster = LocalProcesses(tmp_path / "logs")
    storage = str(tmp_path / "checkpoints")
    job = copy_of_orders(cluster, servers, topic, postgres_database, storage).start()
    try:
        _await(lambda: job.status().checkpoints_completed > 1, f"none; ONCEFLOW_SEED={seed}")
        os.kill(job.status().slots[0].pid, signal.SIGKILL)
        orders.change(300)
        _await(lambda: rows("orders_copy") == rows("orders"), f"ONCEFLOW_SEED={seed}")
        assert job.status().restores >= 1
    finally:
        job.stop()
    assert rows("orders_copy") == rows("orders")
