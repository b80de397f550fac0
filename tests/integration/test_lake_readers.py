"""Spark, with each format's own jars, reads what the lake sinks write."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.integration.lake_sink_kit import DeltaJob, IcebergJob, LakeJob
from tests.support.lake_reader import DELTA, iceberg_settings, query_by_spark

from onceflow.core.protocol.committables import Committed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

_SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("small", pa.int32()),
        pa.field("flag", pa.bool_()),
        pa.field("price", pa.decimal128(12, 2)),
        pa.field("day", pa.date32()),
        pa.field("at", pa.timestamp("us", "UTC")),
        pa.field("raw", pa.binary()),
        pa.field("tags", pa.list_(pa.string())),
        pa.field("who", pa.struct([("name", pa.string()), ("age", pa.int32())])),
        pa.field("kind", pa.string()),
    ]
)
_ROW: dict[str, Any] = {
    "id": 1,
    "small": -5,
    "flag": True,
    "price": Decimal("-12.50"),
    "day": datetime(2026, 2, 28).date(),
    "at": datetime(2026, 2, 28, 23, 59, 59, 999_999, timezone.utc),
    "raw": b"\x00\xff",
    "tags": ["a", None],
    "who": {"name": "Ada", "age": 36},
    "kind": "x/y=ü %",
}


@pytest.mark.parametrize("table_format", ["iceberg", "delta"])
def test_spark_reads_values_of_all_types_and_prunes_partitions(
    table_format: str, tmp_path: Path
) -> None:
    job: LakeJob
    settings: Mapping[str, str]
    if table_format == "iceberg":
        job = IcebergJob(tmp_path, schema=_SCHEMA, partition_by=("day(at)", "kind"))
        settings, table = iceberg_settings(job.properties), "`default`.shop.orders"
    else:
        job = DeltaJob(tmp_path, schema=_SCHEMA, partition_by=("day", "kind"))
        settings, table = DELTA, f"delta.`{job.path}`"
    job.open()
    nulls = {"id": 2, **dict.fromkeys(_SCHEMA.names[1:])}
    assert job.commit(1, job.prepare(1, [_ROW])) == Committed()
    assert job.commit(2, job.prepare(2, [nulls], first_checkpoint=2)) == Committed()
    columns = "* EXCEPT (at, raw), CAST(at AS STRING) AS at, hex(raw) AS raw"
    (filled,) = query_by_spark(
        settings, f"SELECT {columns} FROM {table} WHERE kind = 'x/y=ü %' AND day = '2026-02-28'"
    )
    assert filled == {
        **_ROW,
        "price": -12.5,
        "day": "2026-02-28",
        "at": "2026-02-28 23:59:59.999999",
        "raw": "00FF",
    }
    assert query_by_spark(settings, f"SELECT * FROM {table} WHERE kind IS NULL") == [{"id": 2}]


@pytest.mark.parametrize("table_format", ["iceberg", "delta"])
def test_spark_reads_what_upserts_and_deletes_have_left(table_format: str, tmp_path: Path) -> None:
    schema = pa.schema([("id", pa.int64()), ("v", pa.string()), ("op", pa.string())])
    settings: dict[str, Any] = {
        "write_mode": "upsert",
        "primary_key": ("id",),
        "operation_column": "op",
    }
    job: LakeJob
    by_spark: Mapping[str, str]
    if table_format == "iceberg":
        job = IcebergJob(tmp_path, schema=schema, **settings)
        by_spark, table = iceberg_settings(job.properties), "`default`.shop.orders"
    else:
        job = DeltaJob(tmp_path, schema=schema, **settings)
        by_spark, table = DELTA, f"delta.`{job.path}`"
    job.open()
    first = [{"id": key, "v": "old", "op": "c"} for key in range(5)]
    second = [{"id": 1, "v": "new", "op": "u"}, {"id": 2, "op": "d"}, {"id": 9, "op": "d"}]
    assert job.commit(1, job.prepare(1, first)) == Committed()
    assert job.commit(2, job.prepare(2, second, first_checkpoint=2)) == Committed()
    expected = [{"id": key, "v": "new" if key == 1 else "old"} for key in (0, 1, 3, 4)]
    assert query_by_spark(by_spark, f"SELECT * FROM {table} ORDER BY id") == expected
