"""The example of a table's copy: equal to the table after its job was killed in the middle."""

from __future__ import annotations

import json
import os
import random
import signal
import uuid
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from examples.cdc_upsert import copy_of_orders
from tests.integration import postgres_sink_kit as postgres
from tests.support.debezium import debezium
from tests.support.waiting import await_true
from typing_extensions import LiteralString

from onceflow import LocalProcesses
from onceflow.integration.pytest_plugin import TopicFactory
from onceflow.integration.servers.kinds import KafkaServer
from onceflow.integration.servers.postgres import EmbeddedPostgres

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


def test_copy_equals_its_table_after_a_slot_was_killed(
    tmp_path: Path,
    postgres_database: str,
    onceflow_kafka: KafkaServer,
    kafka_topic: TopicFactory,
) -> None:
    seed = int(os.environ.get("ONCEFLOW_TEST_SEED", random.randrange(2**32)))
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
        await_true(
            lambda: job.status().checkpoints_completed > 1, f"none; ONCEFLOW_TEST_SEED={seed}"
        )
        os.kill(job.status().slots[0].pid, signal.SIGKILL)
        orders.change(300)
        await_true(lambda: rows("orders_copy") == rows("orders"), f"ONCEFLOW_TEST_SEED={seed}")
        assert job.status().restores >= 1
    finally:
        job.stop()
    assert rows("orders_copy") == rows("orders")


@pytest.mark.slow
@pytest.mark.parametrize("schemas", [True, False], ids=["with schemas", "bare"])
def test_copy_equals_a_table_that_debezium_itself_follows(
    tmp_path: Path, onceflow_kafka: KafkaServer, schemas: bool
) -> None:
    """Rows that were there before, changes of every kind, also of keys, and a slot killed."""
    seed = int(os.environ.get("ONCEFLOW_TEST_SEED", random.randrange(2**32)))
    said = f"ONCEFLOW_TEST_SEED={seed}"
    draw = random.Random(seed)
    servers, prefix = onceflow_kafka.bootstrap_servers, f"shop{uuid.uuid4().hex[:8]}"
    with EmbeddedPostgres({"wal_level": "logical"}) as server:
        url = server.url
        postgres.query(url, "CREATE TABLE orders (id bigint PRIMARY KEY, state text, cents bigint)")

        change = partial(change_rows, url, draw)

        def same() -> bool:
            copy, table = (
                postgres.query(url, f"SELECT id, state, cents FROM {name} ORDER BY id")
                for name in ("orders_copy", "orders")
            )
            return bool(copy == table)

        change(100)
        tables = {"table": "public.orders", "prefix": prefix}
        with debezium(tmp_path, url, servers, **tables, schemas=schemas):
            admin, topic = AdminClient({"bootstrap.servers": servers}), f"{prefix}.public.orders"
            await_true(lambda: topic in admin.list_topics(timeout=30).topics, "no topic")
            cluster, storage = LocalProcesses(tmp_path / "logs"), str(tmp_path / "checkpoints")
            job = copy_of_orders(cluster, servers, topic, url, storage).start()
            try:
                await_true(lambda: job.status().checkpoints_completed > 1, f"none; {said}")
                change(150)
                os.kill(job.status().slots[0].pid, signal.SIGKILL)
                change(150)
                await_true(same, said, timeout_s=120)
                assert job.status().restores >= 1
            finally:
                job.stop()
        assert same(), said


def change_rows(url: str, draw: random.Random, count: int) -> None:
    """Make `count` transactions of one to three changes of `orders`."""
    with psycopg.connect(url, autocommit=True) as connection:
        for _ in range(count):
            with connection.transaction():
                for _ in range(draw.randrange(1, 4)):
                    connection.execute(*_draw_change(draw))


def _draw_change(draw: random.Random) -> tuple[LiteralString, tuple[object, ...]]:
    """Return a statement that changes a row of `orders`, if it is there."""
    key, other = draw.randrange(60), draw.randrange(60, 90)
    kind = draw.random()
    if kind < 0.25:
        return "DELETE FROM orders WHERE id = %s", (key,)
    if kind < 0.35:  # of a new key Debezium makes a delete, a tombstone and a put
        unless = "NOT EXISTS (SELECT FROM orders WHERE id = %s)"
        return f"UPDATE orders SET id = %s WHERE id = %s AND {unless}", (other, key, other)
    cents = draw.choice([None, draw.randrange(10**12)])
    row = (key, draw.choice(["new", "paid"]), cents)
    anew = "ON CONFLICT (id) DO UPDATE SET state = excluded.state, cents = excluded.cents"
    return f"INSERT INTO orders VALUES (%s, %s, %s) {anew}", row
