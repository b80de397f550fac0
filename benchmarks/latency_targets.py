"""The targets of the jobs of `python -m benchmarks.latency`, and the time of each row there."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import psycopg
import pyarrow as pa
from confluent_kafka import Consumer, Message
from psycopg import sql

from benchmarks.beside_flink.jdbc import create_table
from benchmarks.flink_latency import FlinkSink
from onceflow.core.spi import Sink
from onceflow.integration.servers import EmbeddedKafka, EmbeddedPostgres
from onceflow.sinks import KafkaSink, PostgresSink

PARTITIONS = 2
"""Of every topic; jobs run in as many subtasks."""
SENT = pa.schema([("account", pa.string()), ("amount", pa.int64()), ("sent_us", pa.int64())])
"""What a record holds; a row has the balance besides."""
_ROW = SENT.append(pa.field("balance", pa.int64()))
_TIMEOUT_S = 120.0

Latencies = npt.NDArray[np.float64]
"""Rows of two columns: when a record was sent, and how long it took from then on, both in us."""


class Target:
    """The target of the rows, and the clock that says when they were there."""

    def sink(self, topic: str) -> Sink:
        """Return the sink of one job."""
        raise NotImplementedError

    def flink_sink(self, topic: str) -> FlinkSink:
        """Return the sink of one job of Flink's."""
        raise NotImplementedError

    @contextmanager
    def watch(self, topic: str) -> Generator[list[Latencies]]:
        """Note each row's latency; what is yielded is filled at the end. Begins before the job."""
        raise NotImplementedError


class PostgresTarget(Target):
    """A table; the server says when each row's transaction was committed."""

    def __init__(self, server: EmbeddedPostgres) -> None:
        self._url = server.url

    def sink(self, topic: str) -> Sink:
        """Return the sink of one job."""
        return PostgresSink(self._url, table=_table(topic), create=True)

    def flink_sink(self, topic: str) -> FlinkSink:
        """Return the sink of one job of Flink's; create its table, with the columns of ours."""
        create_table(self._url, _table(topic), _ROW)
        return FlinkSink.of_table(self._url, _table(topic))

    @contextmanager
    def watch(self, topic: str) -> Generator[list[Latencies]]:
        """Ask the table when the job has ended."""
        latencies: list[Latencies] = []
        yield latencies
        query = sql.SQL(
            "SELECT sent_us, extract(epoch FROM pg_xact_commit_timestamp(xmin)) * 1e6 - sent_us"
            " FROM {}"
        ).format(sql.Identifier(_table(topic)))
        with psycopg.connect(self._url) as connection:
            rows = np.array(connection.execute(query).fetchall(), np.float64).reshape(-1, 2)
        latencies.append(rows)


class KafkaTarget(Target):
    """A topic; a consumer of committed records looks at its clock."""

    def __init__(self, server: EmbeddedKafka) -> None:
        self._server = server

    def sink(self, topic: str) -> Sink:
        """Return the sink of one job."""
        return KafkaSink(self._server.bootstrap_servers, topic=f"{topic}-out")

    def flink_sink(self, topic: str) -> FlinkSink:
        """Return the sink of one job of Flink's."""
        return FlinkSink.of_topic(f"{topic}-out")

    @contextmanager
    def watch(self, topic: str) -> Generator[list[Latencies]]:
        """Create the topic, and read it while the job runs."""
        self._server.create_topic(f"{topic}-out", PARTITIONS)
        latencies: list[Latencies] = []
        ended = threading.Event()
        rows: list[tuple[float, float]] = []
        consumer = Consumer(
            {
                "bootstrap.servers": self._server.bootstrap_servers,
                "group.id": topic,
                "auto.offset.reset": "earliest",
                "isolation.level": "read_committed",
            }
        )
        consumer.subscribe([f"{topic}-out"])

        def read() -> None:
            messages: list[Message] = []
            # To the end of the topic, once the job has ended.
            while messages or not ended.is_set():
                messages = consumer.consume(5_000, 1.0 if ended.is_set() else 0.005)
                now_us = time.time_ns() / 1000
                for message in messages:
                    value = message.value()
                    if value is not None and message.error() is None:
                        sent_us = json.loads(value)["sent_us"]
                        rows.append((sent_us, now_us - sent_us))

        thread = threading.Thread(target=read, name="latency-consumer", daemon=True)
        thread.start()
        try:
            yield latencies
        finally:
            ended.set()
            thread.join(_TIMEOUT_S)
            consumer.close()
        latencies.append(np.array(rows, np.float64).reshape(-1, 2))


def _table(topic: str) -> str:
    return topic.replace("-", "_")
