"""What the broker and the database allow by themselves, with nothing in between.

The consumer loops read the whole topic on one thread and look at nothing but each record's error
and value. COPY sends rows like the ledger's, encoded beforehand, in one transaction a connection.
"""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from typing import cast

import numpy as np
import pgpq
import psycopg
import pyarrow as pa
from confluent_kafka import Consumer, Message, TopicPartition

from benchmarks.cpu import groups_cpu_s
from benchmarks.stage import BenchmarkError, Stage
from onceflow.sources.kafka.settings import TUNED_DEFAULTS

_SILENCE_S = 30.0
_CHUNK_ROWS = 100_000
_TABLE = """
    CREATE TABLE ledger (
        id bigint, account text, amount bigint, ts bigint, balance bigint, n bigint
    )
"""

Figure = dict[str, float]


def limits(stage: Stage, topic: str) -> dict[str, Figure]:
    """Return rows/s and CPU seconds a million rows of each loop, one run each."""
    return {
        "consume, librdkafka's defaults": _consume(stage, topic, {}),
        "consume, tuned": _consume(stage, topic, dict(TUNED_DEFAULTS)),
        "COPY, 1 connection": _copy(stage, 1),
        "COPY, 2 connections": _copy(stage, 2),
    }


def _consume(stage: Stage, topic: str, tuned: dict[str, object]) -> Figure:
    consumer = Consumer(
        {
            **tuned,
            "bootstrap.servers": stage.kafka.bootstrap_servers,
            "group.id": "onceflow-bench-limit",
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
        }
    )
    roots = {"client": os.getpid(), **stage.server_pids}
    partitions = range(stage.payments.partitions)
    before = groups_cpu_s(roots)
    began = time.perf_counter()
    consumer.assign([TopicPartition(topic, partition, 0) for partition in partitions])
    take = _take_tuned if tuned else _take_default
    records = size_bytes = 0
    heard_at = began
    while records < stage.payments.records:
        messages = take(consumer)
        now = time.perf_counter()
        if messages:
            heard_at = now
        elif now - heard_at > _SILENCE_S:
            raise BenchmarkError(f"the broker is silent after {records} records of {topic}")
        for message in messages:
            if message.error() is not None:
                raise BenchmarkError(f"topic {topic}: {message.error()}")
            size_bytes += len(cast("bytes", message.value()))
        records += len(messages)
    seconds = time.perf_counter() - began
    after = groups_cpu_s(roots)
    consumer.close()
    cpu_s = {name: after[name] - before[name] for name in roots}
    figure = _figure(records, seconds, cpu_s)
    return {**figure, "bytes_per_record": round(size_bytes / records, 1)}


def _take_default(consumer: Consumer) -> list[Message]:
    return consumer.consume(10_000, 1.0)


def _take_tuned(consumer: Consumer) -> list[Message]:
    # consume(n, t) would wait up to t to fill n.
    first = consumer.poll(0.2)
    return [] if first is None else [first, *consumer.consume(999, 0)]


def _copy(stage: Stage, connections: int) -> Figure:
    head, rows, tail = _encoded(_CHUNK_ROWS)
    chunks = max(1, stage.payments.records // _CHUNK_ROWS // connections)
    roots = {"client": os.getpid(), **stage.server_pids}
    with stage.database() as url:
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(_TABLE)

        def copy_all(_: int) -> None:
            with psycopg.connect(url) as connection:
                with connection.cursor().copy("COPY ledger FROM STDIN (FORMAT binary)") as copy:
                    copy.write(head)
                    for _chunk in range(chunks):
                        for part in rows:
                            copy.write(part)
                    copy.write(tail)
                connection.commit()

        before = groups_cpu_s(roots)
        began = time.perf_counter()
        with ThreadPoolExecutor(connections) as pool:
            list(pool.map(copy_all, range(connections)))
        seconds = time.perf_counter() - began
        after = groups_cpu_s(roots)
        expected = chunks * connections * _CHUNK_ROWS
        with psycopg.connect(url) as connection:
            found = connection.execute("SELECT count(*) FROM ledger").fetchone()
        if found != (expected,):
            raise BenchmarkError(f"COPY left {found} rows instead of {expected}")
    return _figure(expected, seconds, {name: after[name] - before[name] for name in roots})


def _encoded(rows: int) -> tuple[bytes, list[bytes], bytes]:
    """Return head, rows in pieces of 10,000, and tail of a binary COPY."""
    random = np.random.default_rng(0)
    accounts = [f"acct-{number:06d}" for number in random.integers(0, 100_000, rows).tolist()]
    numbers = pa.array(np.arange(rows, dtype=np.int64))
    amounts = pa.array(random.integers(-500, 1001, rows))
    batch = pa.RecordBatch.from_arrays(
        [numbers, pa.array(accounts), amounts, numbers, amounts, numbers],
        names=["id", "account", "amount", "ts", "balance", "n"],
    )
    encoder = pgpq.ArrowToPostgresBinaryEncoder(batch.schema)
    head = encoder.write_header()
    step = 10_000
    pieces = [encoder.write_batch(batch.slice(start, step)) for start in range(0, rows, step)]
    return head, pieces, encoder.finish()


def _figure(rows: int, seconds: float, cpu_s: dict[str, float]) -> Figure:
    per_million = {f"cpu_s_per_million_{name}": cpu_s[name] / rows * 1e6 for name in cpu_s}
    return {
        "rows_per_second": round(rows / seconds),
        **{name: round(value, 3) for name, value in per_million.items()},
    }
