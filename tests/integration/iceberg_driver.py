"""A whole job into an Iceberg table: the driver's process, with slots on local processes.

    python iceberg_driver.py DIRECTORY RECORDS

Ends when the file DIRECTORY/end is there and all records are committed.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.support.counting_source import CountingSource

from onceflow import Checkpointing, FixedDelay, HeapBackend, JobState, LocalProcesses, Pipeline
from onceflow.sinks import IcebergSink


def catalog_properties(directory: Path) -> dict[str, str]:
    return {
        "py-catalog-impl": "tests.support.faulty_catalog.SteppingCatalog",
        "orders": str(directory / "orders"),
        "uri": f"sqlite:///{directory}/catalog.db",
        "warehouse": f"file://{directory}/warehouse",
    }


def main(directory: Path, records: int) -> None:
    pipeline = Pipeline(
        LocalProcesses(),
        name="lake",
        parallelism=2,
        checkpointing=Checkpointing(storage=str(directory / "checkpoints"), interval=0.2),
        state_backend=HeapBackend(),
        restart=FixedDelay(attempts=20, delay_s=0.01),
    )
    source = CountingSource(records, pause_s=0.05, ends_with=str(directory / "end"))
    sink = IcebergSink(
        "shop.orders",
        catalog=catalog_properties(directory),
        create=True,
        partition_by=("bucket(2, account)",),
    )
    pipeline.read(source, uid="records").write(sink, uid="lake")
    ended = pipeline.start().wait()
    assert ended.state is JobState.FINISHED, ended.last_error


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
