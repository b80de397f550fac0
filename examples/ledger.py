"""A ledger: payments from Kafka, a running balance for each account, every row in Postgres once.

Run it, kill it with SIGKILL in the middle, run it again: the table has every payment once, and each
account's balances add up.

    python examples/ledger.py localhost:9092 postgresql://user@localhost/db /var/lib/onceflow
"""

from __future__ import annotations

import sys

import pyarrow as pa

from onceflow import Checkpointing, Pipeline, count, session, sum_
from onceflow.sinks import PostgresSink
from onceflow.sources import KafkaSource

PAYMENT = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("account", pa.string(), nullable=False),
        pa.field("amount", pa.int64(), nullable=False),
        pa.field("ts", pa.timestamp("ms", "UTC")),
    ]
)


def main(servers: str, url: str, storage: str) -> None:
    """Build the pipeline and run it until it is interrupted."""
    spark = session("local[2]")
    pipeline = Pipeline(
        spark,
        name="ledger",
        parallelism=2,
        checkpointing=Checkpointing(storage=storage, interval="1 s"),
    )
    payments = pipeline.read(KafkaSource(servers, topic="payments", schema=PAYMENT), uid="payments")
    balances = payments.key_by("account").running(balance=sum_("amount"), n=count(), uid="balance")
    balances.write(PostgresSink(url, table="ledger", create=True), uid="ledger")
    try:
        print(pipeline.run())  # ^C and SIGTERM stop it with a last checkpoint
    finally:
        spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
