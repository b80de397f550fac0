"""Runs a job in a process of its own that copies two tables of one slot into one table.

    python -m tests.support.two_tables_job_process DIRECTORY --url URL

It reads the tables `a` and `b`, and writes the table `copy` of the same database until it is
killed. One subtask writes, so each checkpoint is one transaction of the target.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
from tests.support.ledger import SETTINGS

from onceflow import Checkpointing, ExponentialDelay, LocalProcesses, Pipeline
from onceflow.core.runtime.cluster.local_processes import fork_own_host
from onceflow.sinks import PostgresSink
from onceflow.sources import PostgresChanges

_SCHEMA = "t STRING, id INT, v INT, _op STRING"


def _name_rows(table: str) -> Callable[[pa.RecordBatch], pa.RecordBatch]:
    """Return a function that adds the name of the table to its rows."""

    def name_rows(batch: pa.RecordBatch) -> pa.RecordBatch:
        names = pa.array([table] * batch.num_rows, pa.string())
        columns = [names, *(batch.column(name) for name in ("id", "v", "_op"))]
        return pa.RecordBatch.from_arrays(columns, names=["t", "id", "v", "_op"])

    return name_rows


def main() -> None:
    """Run until the process is killed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--url", required=True)
    arguments = parser.parse_args()
    fork_own_host()
    pipeline = Pipeline(
        LocalProcesses(arguments.directory / "logs"),
        name="changes",
        parallelism=1,
        checkpointing=Checkpointing(
            storage=str(arguments.directory / "checkpoints"), interval=0.05
        ),
        restart=ExponentialDelay(initial_delay_s=0.2, max_delay_s=1.0),
        settings=SETTINGS,
    )
    source = PostgresChanges(
        arguments.url, tables=["a", "b"], chunk_rows=40, batch_rows=15, copy_parallelism=3
    )
    tables = pipeline.read_outputs(source, uid="shop")
    named = [
        tables[name].map_batches(_name_rows(name), schema=_SCHEMA, uid=f"name_{name}")
        for name in ("a", "b")
    ]
    named[0].union(named[1]).write(
        PostgresSink(
            arguments.url,
            table="copy",
            write_mode="upsert",
            primary_key=("t", "id"),
            operation_column="_op",
        ),
        uid="copy",
    )
    pipeline.run()


if __name__ == "__main__":
    main()
