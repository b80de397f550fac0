"""An independent reader: what topics, tables and directories hold, by plain clients.

Nothing here comes from onceflow's sources or sinks. All faults must be over before it reads.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition
from psycopg import sql
from pyiceberg.catalog import load_catalog
from tests.chaos.job import SinkSpec, describe_catalog
from tests.chaos.model import Change, Record, Row
from tests.chaos.schedule import SinkKind
from typing_extensions import assert_never

from onceflow.integration.servers.mysql import MySQLAdmin

_ANSWER_TIMEOUT_S = 20.0
_SILENCE_S = 30.0


class ReaderError(Exception):
    """Raised when a target cannot be read, so there is no verdict."""


def read_records(bootstrap_servers: str, topic: str) -> list[Record]:
    """Return the records of an input topic, partition by partition, in the order of offsets."""
    return [
        Record(**json.loads(message.value() or b""))
        for message in _read_topic(bootstrap_servers, topic)
    ]


def read_changes(url: str) -> list[Change]:
    """Return the committed changes of the table in the database `url`, in their order.

    Rows that were deleted have the `ts` that they had before.
    """
    changes: list[Change] = []
    rows: dict[int, Record] = {}
    query = "SELECT operation, id, account, amount, ts FROM journal ORDER BY ts"
    with psycopg.connect(url) as connection:
        for operation, *values in connection.execute(query):
            row = Record(*values)
            changes.append(Change(operation, rows[row.id] if operation == "d" else row))
            rows[row.id] = row
    return changes


def read_rows(sink: SinkSpec, columns: tuple[str, ...]) -> Counter[Row]:
    """Return the visible rows of a sink, each with its number of copies."""
    match sink.kind:
        case SinkKind.POSTGRES | SinkKind.POSTGRES_LEDGER:
            return _read_postgres(sink, columns)
        case SinkKind.MYSQL | SinkKind.MYSQL_LEDGER:
            names = ", ".join(f"`{column}`" for column in columns)
            with MySQLAdmin.session(sink.address, timeout_s=60) as session:
                return Counter(session.rows(f"SELECT {names} FROM `{sink.target}`"))
        case SinkKind.KAFKA:
            values = (message.value() for message in _read_topic(sink.address, sink.target))
            return Counter(_row_of(json.loads(value or b""), columns) for value in values)
        case SinkKind.ICEBERG:
            return Counter(_read_iceberg(sink, columns))
        case SinkKind.FILES:
            return Counter(_read_files(Path(sink.address), columns))
        case _:
            assert_never(sink.kind)


def count_in_doubt(sink: SinkSpec) -> int:
    """Return the transactions of a sink that are neither committed nor rolled back.

    MySQL lists those of the whole server.
    """
    match sink.kind:
        case SinkKind.POSTGRES | SinkKind.POSTGRES_LEDGER:
            with psycopg.connect(sink.address) as connection:
                counted = connection.execute(
                    "SELECT count(*) FROM pg_prepared_xacts WHERE database = current_database()"
                ).fetchone()
            return int(counted[0]) if counted else 0
        case SinkKind.MYSQL | SinkKind.MYSQL_LEDGER:
            with MySQLAdmin.session(sink.address) as session:
                return len(session.in_doubt())
        case SinkKind.KAFKA:
            return _count_open(sink.address, sink.target)
        case SinkKind.ICEBERG:
            # A data file that no snapshot names is in nobody's way, and is deleted after days.
            return 0
        case SinkKind.FILES:
            return len(list(Path(sink.address).glob("_onceflow/**/staged/**/*.json*")))
        case _:
            assert_never(sink.kind)


def _read_postgres(sink: SinkSpec, columns: tuple[str, ...]) -> Counter[Row]:
    query = sql.SQL("SELECT {} FROM {}").format(
        sql.SQL(", ").join(map(sql.Identifier, columns)), sql.Identifier(sink.target)
    )
    with psycopg.connect(sink.address) as connection:
        return Counter[Row](connection.execute(query).fetchall())


def _read_files(directory: Path, columns: tuple[str, ...]) -> Iterator[Row]:
    for path in directory.rglob("*.json"):
        if "_onceflow" in path.relative_to(directory).parts:
            continue
        with path.open(encoding="utf-8") as lines:
            for line in lines:
                yield _row_of(json.loads(line), columns)


def _read_iceberg(sink: SinkSpec, columns: tuple[str, ...]) -> Iterator[Row]:
    catalog = load_catalog("default", **describe_catalog(sink.address))
    try:
        for row in catalog.load_table(sink.target).scan().to_arrow().to_pylist():
            yield _row_of(row, columns)
    finally:
        catalog.close()


def _row_of(value: dict[str, Any], columns: tuple[str, ...]) -> Row:
    if unknown := value.keys() - set(columns):
        raise ReaderError(f"a row has columns that it must not have: {sorted(unknown)}")
    return tuple(value.get(column) for column in columns)


def _consumer(bootstrap_servers: str, isolation: str) -> Consumer:
    return Consumer(
        {
            "bootstrap.servers": bootstrap_servers,
            "group.id": "chaos-reader",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "isolation.level": isolation,
            "log_level": 0,
        }
    )


def _read_topic(bootstrap_servers: str, topic: str) -> Iterator[Message]:
    with closing(_consumer(bootstrap_servers, "read_committed")) as consumer:
        for partition in _partitions(consumer, topic):
            consumer.assign([TopicPartition(topic, partition, 0)])
            yield from _read_to_end(consumer, f"{topic}-{partition}")


def _read_to_end(consumer: Consumer, name: str) -> Iterator[Message]:
    deadline = time.monotonic() + _SILENCE_S
    while True:
        for message in consumer.consume(5_000, 0.5):
            error = message.error()
            if error is None:
                deadline = time.monotonic() + _SILENCE_S
                yield message
            elif error.code() == KafkaError._PARTITION_EOF:
                return
            elif not error.retriable():
                raise ReaderError(f"{name} cannot be read: {error}")
        if time.monotonic() > deadline:
            raise ReaderError(f"{name} was not read to its end: silence for {_SILENCE_S:g} s")


def _partitions(consumer: Consumer, topic: str) -> list[int]:
    try:
        described = consumer.list_topics(topic, timeout=_ANSWER_TIMEOUT_S).topics[topic]
    except KafkaException as error:
        raise ReaderError(f"the partitions of {topic} are unknown: {error}") from error
    return sorted(described.partitions)


def _count_open(bootstrap_servers: str, topic: str) -> int:
    """Return the number of partitions that end with an open transaction."""
    ends: list[list[int]] = []
    for isolation in ("read_committed", "read_uncommitted"):
        with closing(_consumer(bootstrap_servers, isolation)) as consumer:
            partitions = [TopicPartition(topic, p) for p in _partitions(consumer, topic)]
            ends.append(
                [
                    consumer.get_watermark_offsets(partition, timeout=_ANSWER_TIMEOUT_S)[1]
                    for partition in partitions
                ]
            )
    return sum(stable != last for stable, last in zip(*ends, strict=True))
