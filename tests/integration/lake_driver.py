"""A whole job into a lake table: the driver's process, with slots on local processes.

    python lake_driver.py FORMAT DIRECTORY RECORDS GATHERED

Makes a version of every GATHERED checkpoints; 0: of each. Ends when the file DIRECTORY/end is there
and all records are committed. Its commits obey the orders in DIRECTORY/orders.
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


def make_sink(table_format: str, directory: Path, gathered: int) -> Sink:
    if table_format == "iceberg":
        return IcebergSink(
            "shop.orders",
            catalog=catalog_properties(directory),
            create=True,
            commit_checkpoints=gathered or None,
            partition_by=("bucket(2, account)",),
        )
    SteppingDeltaTable.orders = str(directory / "orders")
    deltalake.DeltaTable = SteppingDeltaTable  # type: ignore[misc]
    return DeltaSink(str(directory / "table"), create=True, commit_checkpoints=gathered or None)


def main(table_format: str, directory: Path, records: int, gathered: int) -> None:
    pipeline = Pipeline(
        LocalProcesses(),
        name="lake",
        parallelism=2,
        checkpointing=Checkpointing(storage=str(directory / "checkpoints"), interval=0.2),
        state_backend=HeapBackend(),
        restart=FixedDelay(attempts=20, delay_s=0.01),
    )
    source = CountingSource(records, pause_s=0.05, ends_with=str(directory / "end"))
    sink = make_sink(table_format, directory, gathered)
    pipeline.read(source, uid="records").write(sink, uid="lake")
    ended = pipeline.start().wait()
    assert ended.state is JobState.FINISHED, ended.last_error


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
