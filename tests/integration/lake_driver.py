"""A whole job into a lake table: the driver's process, with slots on local processes.

    python lake_driver.py FORMAT DIRECTORY RECORDS GATHERED [POSTGRES]

Makes a version of every GATHERED checkpoints; 0: of each. Ends when the file DIRECTORY/end is there
and all records are committed. Its commits obey the orders in DIRECTORY/orders. FORMAT is `iceberg`
or `delta`, and after a `+` the key by which the rows change others, as `op` says. With the URL of a
Postgres, the same rows go into a second Iceberg table, `shop.copies`, and into the table `orders`
of that database. DIRECTORY/catalog.json has the properties of the Iceberg catalog, if it is there;
else the catalog is a SQLite file.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import deltalake
from tests.support.changing_source import ChangingSource
from tests.support.counting_source import CountingSource
from tests.support.lake_faults import STEPPING_CATALOG, SteppingDeltaTable

from onceflow import Checkpointing, FixedDelay, HeapBackend, JobState, LocalProcesses, Pipeline
from onceflow.core.spi import Sink
from onceflow.sinks import DeltaSink, IcebergSink, PostgresSink


def catalog_properties(directory: Path) -> dict[str, str]:
    given = directory / "catalog.json"
    if given.exists():
        properties: dict[str, str] = json.loads(given.read_text())
        return properties
    return {
        "py-catalog-impl": STEPPING_CATALOG,
        "orders": str(directory / "orders"),
        "uri": f"sqlite:///{directory}/catalog.db",
        "warehouse": f"file://{directory}/warehouse",
    }


def make_sink(
    table_format: str, directory: Path, gathered: int, table: str = "shop.orders"
) -> Sink:
    table_format, _, key = table_format.partition("+")
    changes: dict[str, Any] = {"write_mode": "upsert", "primary_key": (key,)}
    settings: dict[str, Any] = {
        "create": True,
        "commit_checkpoints": gathered or None,
        **({**changes, "operation_column": "op"} if key else {}),
    }
    if table_format == "iceberg":
        return IcebergSink(
            table,
            catalog=catalog_properties(directory),
            partition_by=("bucket(2, account)",),
            **settings,
        )
    SteppingDeltaTable.orders = str(directory / "orders")
    deltalake.DeltaTable = SteppingDeltaTable  # type: ignore[misc]
    return DeltaSink(str(directory / "table"), **settings)


def main(
    table_format: str, directory: Path, records: int, gathered: int, postgres: str = ""
) -> None:
    pipeline = Pipeline(
        LocalProcesses(),
        name="lake",
        parallelism=2,
        checkpointing=Checkpointing(storage=str(directory / "checkpoints"), interval=0.2),
        state_backend=HeapBackend(),
        restart=FixedDelay(attempts=20, delay_s=0.01),
    )
    kind = ChangingSource if "+" in table_format else CountingSource
    source = kind(records, pause_s=0.05, ends_with=str(directory / "end"))
    sink = make_sink(table_format, directory, gathered)
    rows = pipeline.read(source, uid="records")
    rows.write(sink, uid="lake")
    if postgres:
        copies = make_sink(table_format, directory, gathered, "shop.copies")
        rows.write(copies, uid="copies")
        rows.write(PostgresSink(postgres, table="orders", create=True), uid="database")
    ended = pipeline.start().wait()
    assert ended.state is JobState.FINISHED, ended.last_error


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), *sys.argv[5:])
