"""An outbox: events that programs insert into a table of Postgres, each once in its topic of Kafka.

    python examples/outbox.py localhost:9092 postgresql://localhost/shop /storage

A program inserts its event in the transaction that changes its own tables, so an event is published
if and only if the change is committed. It may delete the row at once: deletes are no events.
Start the job once before programs insert events: it publishes events that are inserted after its
replication slot was created. A first copy would miss an event whose row is already deleted.

    CREATE TABLE outbox (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, topic text NOT NULL,
                         key text, headers jsonb, payload jsonb NOT NULL)
"""

from __future__ import annotations

import json
import sys

import pyarrow as pa
import pyarrow.compute as pc

from onceflow import Checkpointing, LocalProcesses, Pipeline
from onceflow.sinks import KafkaSink
from onceflow.sources import PostgresChanges

TOPICS = ("orders", "payments")
RECORD = pa.schema(
    {
        "topic": pa.string(),
        "key": pa.string(),
        "value": pa.string(),
        "headers": pa.map_(pa.string(), pa.string()),
    }
)


def to_records(changes: pa.RecordBatch) -> pa.RecordBatch:
    """Return a record for each row that was inserted; leave out updates and deletes."""
    events = changes.filter(pc.equal(changes["_op"], "c"))
    headers = [json.loads(text or "{}") for text in events["headers"].to_pylist()]
    columns = [
        events["topic"],
        events["key"],
        events["payload"],
        pa.array([list(header.items()) for header in headers], RECORD.field("headers").type),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=RECORD)


def publish_events(servers: str, url: str, storage: str) -> Pipeline:
    """Describe the job. One subtask reads the slot, so events of a key keep their order."""
    pipeline = Pipeline(
        LocalProcesses(),
        name="outbox",
        parallelism=1,
        checkpointing=Checkpointing(storage=storage, interval="500 ms"),
    )
    outbox = PostgresChanges(url, table="outbox", first_copy="none")
    records = pipeline.read(outbox, uid="outbox").map_batches(
        to_records, schema=RECORD, uid="records"
    )
    # `raw` writes the columns key, value and headers as they are.
    sink = KafkaSink(servers, topic=TOPICS, topic_column="topic", format="raw")
    records.write(sink, uid="events")
    return pipeline


if __name__ == "__main__":
    print(publish_events(*sys.argv[1:]).run())
