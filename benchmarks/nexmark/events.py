"""The events of Nexmark in DuckDB, from where they are written to a topic of Kafka."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

import duckdb
import pyarrow as pa
from confluent_kafka import KafkaError, Producer

from benchmarks.nexmark.topic import EVENT_TYPES, TABLES, Topic, is_time
from benchmarks.stage import BenchmarkError
from onceflow.core.protocol.ids import AttemptId
from onceflow.core.spi import ReaderContext
from onceflow.integration.servers import EmbeddedKafka
from onceflow.sources import NexmarkSource

_NUMBERS: Final = {
    "person": "50 * n",
    "auction": "n // 3 * 50 + 1 + n % 3",
    "bid": "n // 46 * 50 + 4 + n % 46",
}
"""The number of the event of row n of each table: of 50 events one is a person, three auctions."""
_FLUSH_TIMEOUT_S: Final = 60.0


def load_events(source: NexmarkSource) -> Any:
    """Return a database with a table for each kind of events; the column n numbers its rows.

    `source` has an end and one split, so the events come in their order.
    """
    context = ReaderContext("nexmark", "nexmark", 0, 1, AttemptId(1))
    reader = source.reader(source.splits(), context)
    batches: dict[str, list[pa.RecordBatch]] = {name: [] for name in source.outputs}
    while isinstance(polled := reader.poll(1.0), tuple):
        for part in polled:
            batches[part.output].append(part.rows)
    database: Any = duckdb.connect()
    for name, rows in batches.items():
        events = pa.Table.from_batches(rows, source.outputs[name])
        numbered = events.append_column("n", pa.array(range(events.num_rows)))
        database.register("events", numbered)
        database.execute(f"CREATE TABLE {name} AS FROM events")
    return database


def fill_topic(kafka: EmbeddedKafka, name: str, source: NexmarkSource) -> Topic:
    """Return a new topic with the events of `source`: a partition for each split.

    Raises:
        BenchmarkError: The broker refused a record or did not answer.
    """
    partitions = source.splits_count
    kafka.create_topic(name, partitions)
    errors: list[KafkaError] = []

    def note_refusal(error: KafkaError | None, _message: object) -> None:
        if error is not None:
            errors.append(error)

    producer = Producer(
        {
            "bootstrap.servers": kafka.bootstrap_servers,
            "enable.idempotence": True,
            "linger.ms": 50,
            "delivery.report.only.error": True,
            "on_delivery": note_refusal,
            "log_level": 2,
        }
    )
    for number, record in make_records(load_events(replace(source, splits_count=1))):
        partition = number // 50 % partitions
        while True:
            try:
                producer.produce(name, record, partition=partition)
            except BufferError:
                producer.poll(0.1)
                continue
            break
    unsent = producer.flush(_FLUSH_TIMEOUT_S)
    if errors or unsent:
        raise BenchmarkError(f"{unsent} events were not written to topic {name}: {errors[:1]}")
    return Topic(bootstrap_servers=kafka.bootstrap_servers, name=name)


def make_records(database: Any) -> Iterator[tuple[int, str]]:
    """Yield the number and the record of each event, in their order."""
    selects: list[str] = []
    for table, schema in TABLES.items():
        values = [
            f"{column.name} := epoch_ms({column.name}::TIMESTAMP)"
            if is_time(column)
            else f"{column.name} := {column.name}"
            for column in schema
        ]
        members = ", ".join([f"event_type := {EVENT_TYPES[table]}", *values])
        record = f"to_json(struct_pack({members}))::VARCHAR"
        selects.append(f"SELECT {_NUMBERS[table]} AS number, {record} AS record FROM {table}")
    rows = database.execute(f"FROM ({' UNION ALL '.join(selects)}) ORDER BY number")
    while batch := rows.fetchmany(10_000):
        yield from batch
