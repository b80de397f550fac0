"""Runs a job in a process of its own that calls a service for numbered records.

    python -m tests.support.service_job_process DIRECTORY --url URL [--parallelism N]
        [--unordered] [--unaligned]

The input ends once the file DIRECTORY/end is there. The rows are below DIRECTORY/out.
"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path
from typing import Any

import pyarrow as pa
from tests.support.counting_service import CountingService
from tests.support.counting_source import SCHEMA, CountingSource
from tests.support.directory_sink import DirectorySink
from tests.support.ledger import SETTINGS

from onceflow import (
    AsyncFunction,
    Checkpointing,
    FixedDelay,
    JobState,
    LocalProcesses,
    Pipeline,
    count,
)
from onceflow.core.runtime.cluster.local_processes import fork_own_host

RECORDS = 3_000
DOUBLED = SCHEMA.append(pa.field("doubled", pa.int64()))


class Ask(AsyncFunction):
    """Asks the service by a blocking library."""

    def __init__(self, service: CountingService) -> None:
        self._service = service

    async def __call__(self, record: dict[str, Any], key: str) -> dict[str, Any]:
        doubled = await asyncio.to_thread(self._service.call, record["id"], key)
        return record | {"doubled": doubled}


def make_pipeline(
    directory: Path, service: CountingService, *, parallelism: int, ordered: bool, unaligned: bool
) -> Pipeline:
    """Return the job `ledger`, whose source is faster than the service."""
    pipeline = Pipeline(
        LocalProcesses(directory / "logs"),
        name="ledger",
        parallelism=parallelism,
        checkpointing=Checkpointing(
            storage=str(directory / "checkpoints"), interval=0.1, unaligned=unaligned
        ),
        restart=FixedDelay(attempts=20, delay_s=0.05),
        settings=SETTINGS,
    )
    source = CountingSource(
        RECORDS, splits_count=3, batch_rows=20, pause_s=0.02, ends_with=str(directory / "end")
    )
    asked = pipeline.read(source, uid="records").async_map(
        Ask(service),
        schema=DOUBLED,
        capacity=4,
        ordered=ordered,
        idempotency_key="id",
        uid="asked",
    )
    counted = asked.key_by("account").running(n=count(), uid="counted")
    counted.write(DirectorySink(str(directory / "out")), uid="out")
    return pipeline


def main() -> None:
    """Run until the input is at its end."""
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--url", required=True)
    parser.add_argument("--parallelism", type=int, default=2)
    parser.add_argument("--unordered", action="store_true")
    parser.add_argument("--unaligned", action="store_true")
    arguments = parser.parse_args()
    fork_own_host()
    pipeline = make_pipeline(
        arguments.directory,
        CountingService(arguments.url),
        parallelism=arguments.parallelism,
        ordered=not arguments.unordered,
        unaligned=arguments.unaligned,
    )
    status = pipeline.run()
    assert status.state is JobState.FINISHED, status


if __name__ == "__main__":
    main()
