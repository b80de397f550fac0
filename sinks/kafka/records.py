"""Records as Arrow batches, which a writer stages and a committer produces.

    key        binary                       null: no key
    value      binary                       null: a tombstone
    topic      dictionary of strings        only where rows choose their topic
    partition  int32                        only where rows choose it; null: the partitioner does
    headers    list of (key, value)         only where rows have some

The schema's metadata contain the time of staging and the topics that the batch may name, because
both must be known even if the sink's settings have changed since.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.compute as pc

KEY, VALUE, TOPIC, PARTITION, HEADERS = "key", "value", "topic", "partition", "headers"
TOPIC_TYPE = pa.dictionary(pa.int32(), pa.string())
HEADER_TYPE = pa.list_(pa.struct([pa.field("key", pa.string()), pa.field("value", pa.binary())]))

ANY_PARTITION = -1
FRAME_BYTES = 100
"""The largest size of a batch's header (61 bytes) and a record's lengths together."""
_HEADER_BYTES = 10
"""The largest size of the lengths of one header."""
_STAGED_AT = b"onceflow.staged_at"
_TOPICS = b"onceflow.topics"
_POLL_EVERY = 2_000
"""The number of records between two calls of `poll`, which processes delivery reports."""
_FULL_WAIT_S = 0.05
"""The wait for free space if the producer's queue is full."""


class Produces(Protocol):
    """The part of a producer that accepts records."""

    def produce(self, topic: str, /, *arguments: Any, **named: Any) -> None:
        """Enqueue one record: topic, value, key, partition; `headers` by name."""
        ...

    def poll(self, timeout: float, /) -> int:
        """Run the callbacks."""
        ...


@dataclass(frozen=True, slots=True)
class StagedFacts:
    """The facts in the metadata of a staged batch."""

    staged_at_s: float
    topics: tuple[str, ...]


def stamp(batch: pa.RecordBatch, topics: tuple[str, ...]) -> pa.RecordBatch:
    """Return `batch` with the present time in seconds and `topics` in its schema's metadata.

    `topics` are the topics to which the rows of the batch may go.
    """
    # `repr` of a float reads back as the same float. All batches of one second have the same
    # schema, so they are staged as one stream.
    staged_at_s = float(int(time.time()))
    facts = {_STAGED_AT: repr(staged_at_s).encode(), _TOPICS: json.dumps(topics).encode()}
    stamped_batch: pa.RecordBatch = batch.replace_schema_metadata(facts)
    return stamped_batch


def facts_of(batch: pa.RecordBatch) -> StagedFacts:
    """Return the facts that `stamp` has written."""
    metadata: dict[bytes, bytes] = batch.schema.metadata or {}
    return StagedFacts(float(metadata[_STAGED_AT]), tuple(json.loads(metadata[_TOPICS])))


def record_bytes(batch: pa.RecordBatch) -> pa.Array:
    """Return the largest number of bytes that each record takes in the broker's log."""
    sizes: Any = pc.add(_lengths(batch.column(KEY)), _lengths(batch.column(VALUE)))
    if batch.schema.get_field_index(HEADERS) >= 0:
        sizes = pc.add(sizes, _header_bytes(batch.column(HEADERS)))
    total: pa.Array = pc.add(sizes, FRAME_BYTES)
    return total


def produce(producer: Produces, batch: pa.RecordBatch, *, deadline: float, **named: Any) -> None:
    """Enqueue every record of `batch`, in order, waiting while the queue is full.

    Args:
        producer: Takes the records; it reports undelivered ones at the next flush or commit.
        batch: Records.
        deadline: The end of the wait for a full queue, as a time of `time.monotonic`.
        named: Further arguments of `produce`.

    Raises:
        KafkaException: The producer accepts no records: its transaction failed, or it was fenced.
        TimeoutError: The queue was full until the deadline.
    """
    # Looked up once, because this loop runs for every record.
    take = producer.produce
    for count, (topic, value, key, partition, headers) in enumerate(_records(batch)):
        if headers:
            named["headers"] = headers
        else:
            named.pop("headers", None)
        while True:
            try:
                take(topic, value, key, partition, **named)
                break
            except BufferError:
                if time.monotonic() > deadline:
                    raise TimeoutError("the broker takes records too slowly") from None
                # Processing delivery reports frees space in the queue.
                producer.poll(_FULL_WAIT_S)
        if count % _POLL_EVERY == 0:
            producer.poll(0)


def _records(
    batch: pa.RecordBatch,
) -> Iterator[tuple[str, bytes | None, bytes | None, int, list[tuple[str, bytes | None]] | None]]:
    rows = batch.num_rows
    names = batch.schema.names
    keys: list[Any] = batch.column(KEY).to_pylist()
    values: list[Any] = batch.column(VALUE).to_pylist()
    topics: list[Any] = (
        batch.column(TOPIC).to_pylist() if TOPIC in names else [facts_of(batch).topics[0]] * rows
    )
    partitions: list[Any] = (
        pc.fill_null(batch.column(PARTITION), ANY_PARTITION).to_pylist()
        if PARTITION in names
        else [ANY_PARTITION] * rows
    )
    headers: list[Any] = (
        [
            pairs and [(header["key"], header["value"]) for header in pairs]
            for pairs in batch.column(HEADERS).to_pylist()
        ]
        if HEADERS in names
        else [None] * rows
    )
    return zip(topics, values, keys, partitions, headers, strict=True)


def topics_in(batch: pa.RecordBatch) -> set[str]:
    """Return the topics that records of `batch` go to."""
    if TOPIC not in batch.schema.names:
        return {facts_of(batch).topics[0]}
    topics: list[str] = batch.column(TOPIC).unique().to_pylist()
    return set(topics)


def _lengths(column: pa.Array) -> pa.Array:
    lengths: pa.Array = pc.fill_null(pc.binary_length(column), 0)
    return lengths.cast(pa.int64())


def _header_bytes(column: pa.Array) -> pa.Array:
    """Return the bytes of all headers of each row."""
    sizes = [
        sum(
            _HEADER_BYTES + len(header["key"].encode()) + len(header["value"] or b"")
            for header in headers or ()
        )
        for headers in column.to_pylist()
    ]
    return pa.array(sizes, pa.int64())
