"""A whole job into a lake table: the driver's process, with slots on local processes.

    python lake_driver.py FORMAT DIRECTORY RECORDS

Ends when the file DIRECTORY/end is there and all records are committed. Its commits obey the orders
in DIRECTORY/orders.
"""

from __future__ import annotations

import sys
from pathlib import Path

import deltalake
from tests.support.counting_source import CountingSource
from tests.support.lake_faults import STEPPING_CATALOG, SteppingDeltaTable

from onceflow import Checkpointing, FixedDelay, HeapBackend, JobState, LocalProcesses, Pipeline
from onceflow.core.spi import Sink
from onceflow.sinks import DeltaSink, IcebergSink


def catalog_properties(directory: Path) -> dict[str, str]:
    return {
        "py-catalog-impl": STEPPING_CATALOG,
        "orders": str(directory / "orders"),
        "uri": f"sqlite:///{directory}/catalog.db",
        "warehouse": f"file://{directory}/warehouse",
    }


def make_sink(table_format: str, directory: Path) -> Sink:
    if table_format == "iceberg":
        return IcebergSink(
            "shop.orders",
            catalog=catalog_properties(directory),
            create=True,
            partition_by=("bucket(2, account)",),
        )
    SteppingDeltaTable.orders = str(directory / "orders")
    deltalake.DeltaTable = SteppingDeltaTable  # type: ignore[misc]
    return DeltaSink(str(directory / "table"), create=True)


def main(table_format: str, directory: Path, records: int) -> None:
    pipeline = Pipeline(
        LocalProcesses(),
        name="lake",
        parallelism=2,
        checkpointing=Checkpointing(storage=str(directory / "checkpoints"), interval=0.2),
        state_backend=HeapBackend(),
        restart=FixedDelay(attempts=20, delay_s=0.01),
    )
    source = CountingSource(records, pause_s=0.05, ends_with=str(directory / "end"))
    pipeline.read(source, uid="records").write(make_sink(table_format, directory), uid="lake")
    ended = pipeline.start().wait()
    assert ended.state is JobState.FINISHED, ended.last_error


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
