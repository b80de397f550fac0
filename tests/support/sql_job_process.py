"""Runs a job in a process of its own that writes numbered records into a database.

    python -m tests.support.sql_job_process DIRECTORY --url URL [--password P] [--records N]

The input ends once the file DIRECTORY/end is there. The exit status is 1 if the job failed.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tests.support.counting_source import CountingSource
from tests.support.ledger import SETTINGS

from onceflow import Checkpointing, ExponentialDelay, JobState, LocalProcesses, Pipeline
from onceflow.core.runtime.cluster.local_processes import fork_own_host
from onceflow.core.spi import Sink
from onceflow.sinks import MySQLSink, PostgresSink

RECORDS = 4_000


def make_pipeline(directory: Path, sink: Sink, records: int = RECORDS) -> Pipeline:
    """Return the job `ledger`, which reads `records` within about twenty seconds."""
    pipeline = Pipeline(
        LocalProcesses(directory / "logs"),
        name="ledger",
        parallelism=2,
        checkpointing=Checkpointing(storage=str(directory / "checkpoints"), interval=0.2),
        restart=ExponentialDelay(initial_delay_s=0.2, max_delay_s=2.0),
        settings=SETTINGS,
    )
    source = CountingSource(records, batch_rows=5, pause_s=0.05, ends_with=str(directory / "end"))
    pipeline.read(source, uid="records").write(sink, uid="ledger")
    return pipeline


def make_sink(url: str, password: str | None = None) -> Sink:
    """Return a sink into the table `ledger` of the database of `url`."""
    sink_class = PostgresSink if url.startswith("postgres") else MySQLSink
    return sink_class(url, table="ledger", create=True, password=password)


def main() -> None:
    """Run until the input is at its end."""
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--url", required=True)
    parser.add_argument("--password")
    parser.add_argument("--records", type=int, default=RECORDS)
    arguments = parser.parse_args()
    fork_own_host()
    sink = make_sink(arguments.url, arguments.password)
    status = make_pipeline(arguments.directory, sink, arguments.records).run()
    assert status.state is JobState.FINISHED, status


if __name__ == "__main__":
    main()
