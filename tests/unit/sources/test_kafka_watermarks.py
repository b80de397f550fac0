"""Tests the split of each row, by which watermarks are kept for each partition."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka import Message
from tests.unit.sources.test_kafka_value_formats import settings_of

from onceflow.clients.kafka.settings import KeyFormat
from onceflow.core.spi import OnBadRow
from onceflow.sources.kafka.messages import split_runs_of
from onceflow.sources.kafka.settings import ValueFormat
from onceflow.sources.kafka.value_formats import rows_of

COLUMNS = pa.schema([("amount", pa.int64())])


def message(topic: str, partition: int, value: bytes, offset: int = 0) -> Message:
    return Message(topic=topic, partition=partition, offset=offset, key=b"k", value=value)


def test_runs_of_messages_are_told_by_partition_and_topic() -> None:
    where = [("a", 0), ("a", 0), ("a", 1), ("b", 1), ("b", 1), ("a", 1)]
    messages = [message(topic, partition, b"") for topic, partition in where]
    assert split_runs_of(messages, ("a", "b")) == [("a-0", 2), ("a-1", 1), ("b-1", 2), ("a-1", 1)]
    # Of a pattern no topic is known beforehand.
    assert split_runs_of(messages, ()) == split_runs_of(messages, ("a", "b"))
    assert split_runs_of(messages[:3], ("a",)) == [("a-0", 2), ("a-1", 1)]
    assert split_runs_of([], ()) == []


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"include_metadata": True},
        {"key_format": KeyFormat.STRING},
        {"format": ValueFormat.CSV},
        {"format": ValueFormat.RAW},
    ],
    ids=str,
)
def test_rows_tell_their_partitions_whatever_the_format_and_columns(
    settings: dict[str, Any],
) -> None:
    given = {"on_bad_record": OnBadRow.DROP, **settings}
    rows = rows_of(settings_of(COLUMNS, **given), by_split=True)
    csv = settings.get("format") is ValueFormat.CSV
    good, bad = (b"7", b"x") if csv else (b'{"amount": 7}', b"{")
    # Of a bad record there is no row; raw ones are never bad.
    rows.add([message("payments", 0, good), message("payments", 1, bad)])
    rows.add([message("payments", 1, good), message("payments", 2, good)])
    taken = rows.take()
    of_1 = 2 if settings.get("format") is ValueFormat.RAW else 1
    counts: dict[str, int] = {}
    for split, count in rows.runs:
        counts[split] = counts.get(split, 0) + count
    assert counts == {"payments-0": 1, "payments-1": of_1, "payments-2": 1}
    assert sum(counts.values()) == taken.num_rows
    rows.add([message("payments", 3, good)])
    rows.take()
    assert rows.runs == [("payments-3", 1)]
