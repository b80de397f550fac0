"""Whole jobs on Spark that write files, while slots are killed; Spark reads the files back."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pyarrow.dataset as ds
import pytest
from pyspark.sql import SparkSession
from tests.support.counting_source import CountingSource, amount_of

from onceflow import Checkpointing, FixedDelay, Pipeline
from onceflow.sinks import FileSink
from onceflow.sinks.files import list_committed_files

pytestmark = pytest.mark.spark

_RECORDS = 20_000
_ACCOUNTS = 5


def _pipeline(spark: SparkSession, tmp_path: Path, sink: FileSink) -> Pipeline:
    pipeline = Pipeline(
        spark,
        name="files",
        parallelism=2,
        checkpointing=Checkpointing(storage=str(tmp_path / "checkpoints"), interval="200 ms"),
        restart=FixedDelay(attempts=10, delay_s=0.0),
    )
    source = CountingSource(
        _RECORDS, accounts=_ACCOUNTS, pause_s=0.003, ends_with=str(tmp_path / "all killed")
    )
    pipeline.read(source, uid="numbers").write(sink, uid="files")
    return pipeline


@pytest.mark.parametrize("layout", [pytest.param("flat", marks=pytest.mark.slow), "partitioned"])
def test_job_whose_slots_are_killed_writes_each_row_once_and_spark_reads_them(
    spark: SparkSession, tmp_path: Path, layout: str
) -> None:
    out = tmp_path / "out"
    sink = FileSink(str(out), partition_by=("account",) if layout == "partitioned" else ())
    job = _pipeline(spark, tmp_path, sink).start()
    for kill in range(2):
        job.wait_for(checkpoints=2 * (kill + 1))
        listed = list_committed_files(str(out), "files.files")
        os.kill(job.status().slots[kill].pid, signal.SIGKILL)
        deadline = time.monotonic() + 90
        while job.status().restores <= kill:
            assert time.monotonic() < deadline, job.status()
            time.sleep(0.01)
        # What was published before the kill is there after it: never taken back.
        assert set(listed.paths()) <= set(list_committed_files(str(out), "files.files").paths())
    (tmp_path / "all killed").touch()
    status = job.wait(90)
    assert status.restores == 2
    expected = [(one, str(one % _ACCOUNTS), amount_of(one)) for one in range(_RECORDS)]
    frame = spark.read.parquet(str(out)).selectExpr("id", "string(account) account", "amount")
    assert sorted((row[0], row[1], row[2]) for row in frame.collect()) == expected
    read = ds.dataset(str(out), format="parquet", partitioning="hive").to_table()
    assert sorted(read.column("id").to_pylist()) == list(range(_RECORDS))
    assert len(list_committed_files(str(out), "files.files").paths()) == len(
        list(out.rglob("*.parquet"))
    )


def test_spark_reads_json_and_odd_partitions_back(spark: SparkSession, tmp_path: Path) -> None:
    """The sink and Spark use the same names of directories."""
    import pyarrow as pa
    from tests.integration.file_sink_kit import FileJob

    from onceflow.core.protocol.committables import Committed
    from onceflow.core.protocol.ids import CheckpointId

    odd = ["a/b", "a=b", "100%", "?*[x]", "with space", "ü-日本", 'quo"ted', "a:b", "#", "^", None]
    schema = pa.schema([pa.field("id", pa.int64()), pa.field("name", pa.string())])
    rows = [{"id": number, "name": name} for number, name in enumerate(odd)]
    out = tmp_path / "out"
    with FileJob(FileSink(str(out), format="json", partition_by=("name",)), schema=schema) as job:
        writer = job.check().writer()
        writer.write(pa.RecordBatch.from_pylist(rows, schema))
        (committable,) = writer.pre_commit(CheckpointId(1))
        assert job.committer().commit(committable) == Committed()
    frame = spark.read.schema("id long, name string").json(str(out))
    assert sorted((row["id"], row["name"]) for row in frame.collect()) == [
        (row["id"], row["name"]) for row in rows
    ]
