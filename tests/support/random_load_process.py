"""Runs a job in a process of its own that reads the changes of `original` until it is killed.

    python -m tests.support.random_load_process DIRECTORY --url URL --target TARGET

TARGET is `postgres` for the table `copy` of the same database, `iceberg` for the table `shop.copy`
of a catalog in the directory, or Kafka's bootstrap servers for the topic `copy`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tests.support.ledger import SETTINGS
from tests.support.random_load import SCHEMA

from onceflow import Checkpointing, ExponentialDelay, LocalProcesses, Pipeline
from onceflow.core.runtime.cluster.local_processes import fork_own_host
from onceflow.core.spi import Sink
from onceflow.sinks import IcebergSink, KafkaSink, PostgresSink
from onceflow.sources import PostgresChanges


def catalog_of(directory: Path) -> dict[str, str]:
    """Return the properties of the Iceberg catalog."""
    return {"uri": f"sqlite:///{directory}/catalog.db", "warehouse": f"file://{directory}/lake"}


def _sink(target: str, url: str, directory: Path) -> Sink:
    if target == "postgres":
        return PostgresSink(
            url,
            table="copy",
            write_mode="upsert",
            primary_key=("id",),
            operation_column="_op",
        )
    if target == "iceberg":
        return IcebergSink(
            "shop.copy",
            catalog=catalog_of(directory),
            create=True,
            write_mode="upsert",
            primary_key=("id",),
            operation_column="_op",
        )
    return KafkaSink(target, topic="copy", key="id")


def main() -> None:
    """Run until the process is killed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--url", required=True)
    parser.add_argument("--target", required=True)
    arguments = parser.parse_args()
    directory: Path = arguments.directory
    fork_own_host()
    source = PostgresChanges(
        arguments.url, table="original", schema=SCHEMA, chunk_rows=50, batch_rows=40
    )
    pipeline = Pipeline(
        LocalProcesses(directory / "logs"),
        name="load",
        parallelism=2,
        checkpointing=Checkpointing(storage=str(directory / "checkpoints"), interval=0.2),
        restart=ExponentialDelay(initial_delay_s=0.2, max_delay_s=1.0),
        settings=SETTINGS,
    )
    changes = pipeline.read(source, uid="original")
    changes.write(_sink(arguments.target, arguments.url, directory), uid="copy")
    pipeline.run()


if __name__ == "__main__":
    main()
