"""Runs a job in a process of its own that copies a table and follows its changes.

    python -m tests.support.changes_job_process DIRECTORY --url URL [--append] [--keeps MODE]
        [--name NAME] [--first-copy COPY]

With `--append` it appends, otherwise it upserts. With `--keeps` it upserts in that commit mode, and
keeps the values that updates leave as they were and do not send.

It reads the table `original`, and writes the table `copy` of the same database until it is killed.
With `--first-copy only` it ends after the copy.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tests.support.ledger import SETTINGS

from onceflow import Checkpointing, ExponentialDelay, LocalProcesses, Pipeline
from onceflow.core.runtime.cluster.local_processes import fork_own_host
from onceflow.sinks import PostgresSink
from onceflow.sources import PostgresChanges


def main() -> None:
    """Run until the process is killed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--url", required=True)
    parser.add_argument("--append", action="store_true")
    parser.add_argument("--keeps", default="")
    parser.add_argument("--name", default="changes")
    parser.add_argument("--first-copy", default="all")
    arguments = parser.parse_args()
    fork_own_host()
    source = PostgresChanges(
        arguments.url,
        table="original",
        first_copy=arguments.first_copy,
        chunk_rows=40,
        batch_rows=15,
        metadata=["_unchanged"] if arguments.keeps else (),
    )
    if arguments.append:
        sink = PostgresSink(arguments.url, table="copy")
    else:
        sink = PostgresSink(
            arguments.url,
            table="copy",
            write_mode="upsert",
            primary_key=("id",),
            operation_column="_op",
            unchanged_column="_unchanged" if arguments.keeps else None,
            commit_mode=arguments.keeps or "auto",
        )
    pipeline = Pipeline(
        LocalProcesses(arguments.directory / "logs"),
        name=arguments.name,
        parallelism=2,
        checkpointing=Checkpointing(storage=str(arguments.directory / "checkpoints"), interval=0.1),
        restart=ExponentialDelay(initial_delay_s=0.2, max_delay_s=1.0),
        settings=SETTINGS,
    )
    pipeline.read(source, uid="original").write(sink, uid="copy")
    pipeline.run()


if __name__ == "__main__":
    main()
