"""A topic of Kafka with the events of Nexmark, and the streams of a job that reads it.

The topic has the records of all three kinds, in the order of the events. A record has the columns
of its kind, `event_type`, and no others. Times are milliseconds since 1970.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec
import pyarrow as pa

from onceflow import Pipeline, Stream, WatermarkStrategy
from onceflow.sources import KafkaSource, NexmarkSource

EVENT_TYPES: Final = {"person": 0, "auction": 1, "bid": 2}
"""The value of `event_type` in the records of each table."""
TABLES: Final = NexmarkSource().outputs
"""The schema of each table."""


def is_time(column: pa.Field) -> bool:
    """Return True if the column is a time, so its records have milliseconds."""
    return bool(pa.types.is_timestamp(column.type))


def _make_schema() -> pa.Schema:
    columns = {
        column.name: pa.int64() if is_time(column) else column.type
        for schema in TABLES.values()
        for column in schema
    }
    always = ("event_type", "date_time", "extra")
    fields = [pa.field(name, kind, name not in always) for name, kind in columns.items()]
    return pa.schema([pa.field("event_type", pa.int64(), nullable=False), *fields])


RECORDS: Final = _make_schema()
"""The columns of the topic's records."""


class Topic(msgspec.Struct, frozen=True, kw_only=True):
    """A topic of Kafka with the events."""

    bootstrap_servers: str
    name: str


def read_topic(pipeline: Pipeline, topic: Topic) -> Callable[[str], Stream]:
    """Add a source of a topic up to its end. Return a function that returns a table's stream."""
    source = KafkaSource(
        bootstrap_servers=topic.bootstrap_servers,
        topic=topic.name,
        schema=RECORDS,
        ending_offsets="latest",
    )
    records = pipeline.read(source, uid="nexmark", watermarks=WatermarkStrategy("date_time", "4 s"))

    def select(table: str) -> Stream:
        columns = ", ".join(map(_select, TABLES[table]))
        return records.sql(f"SELECT {columns} FROM stream WHERE event_type = {EVENT_TYPES[table]}")

    return select


def _select(column: pa.Field) -> str:
    if not is_time(column):
        return column.name
    return f"arrow_cast({column.name}, 'Timestamp(Millisecond, None)') AS {column.name}"
