"""Copies of a table in Iceberg and Delta, kept by what Debezium says of it: the driver's process.

    python cdc_lake_driver.py SERVERS TOPIC DIRECTORY

Both are below DIRECTORY, written by one job, which gathers three checkpoints a version.
"""

from __future__ import annotations

import sys
from typing import Any

from onceflow import Checkpointing, FixedDelay, LocalProcesses, Pipeline
from onceflow.sinks import DeltaSink, IcebergSink
from onceflow.sources import KafkaSource

JOB, TABLE = "copies", "shop.orders"
_ORDER = "id BIGINT NOT NULL, state STRING, cents BIGINT"


def catalog_of(directory: str) -> dict[str, str]:
    """Return the properties of the Iceberg catalog."""
    return {"uri": f"sqlite:///{directory}/catalog.db", "warehouse": f"file://{directory}/lake"}


def main(servers: str, topic: str, directory: str) -> None:
    pipeline = Pipeline(
        LocalProcesses(),
        name=JOB,
        parallelism=2,
        checkpointing=Checkpointing(storage=f"{directory}/checkpoints", interval="300 ms"),
        restart=FixedDelay(attempts=20, delay_s=0.01),
    )
    source = KafkaSource(servers, topic=topic, format="debezium-json", schema=_ORDER)
    changes = pipeline.read(source, uid="changes")
    settings: dict[str, Any] = {
        "create": True,
        "write_mode": "upsert",
        "primary_key": ("id",),
        "operation_column": "_op",
        "commit_checkpoints": 3,
    }
    iceberg = IcebergSink(
        TABLE, catalog=catalog_of(directory), partition_by=("bucket(2, id)",), **settings
    )
    changes.write(iceberg, uid="iceberg")
    changes.write(DeltaSink(f"{directory}/delta", **settings), uid="delta")
    pipeline.start().wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
