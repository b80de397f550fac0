"""Tests that Spark reads a pipeline's published files as a table, by whole checkpoints."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from tests.integration.file_sink_kit import FileJob
from tests.support.stream_queries import run_to_end

from onceflow import connectors
from onceflow.core.protocol.committables import Committable, Committed
from onceflow.core.protocol.ids import CheckpointId
from onceflow.sinks import FileSink

pytestmark = pytest.mark.spark
SCHEMA = pa.schema([("id", pa.int64()), ("day", pa.date32()), ("note", pa.string())])
_FORMAT = "onceflow-files"


@pytest.fixture(autouse=True)
def registered(spark: SparkSession) -> None:
    connectors.register(spark)


def _batch(*ids: int) -> pa.RecordBatch:
    days = pa.array(ids, pa.int32()).cast(pa.date32())
    return pa.record_batch(
        [pa.array(ids, pa.int64()), days, [f"n {n}" for n in ids]], schema=SCHEMA
    )


def _ids(spark: SparkSession, path: Path, **options: str | int) -> list[int]:
    frame = spark.read.format(_FORMAT).options(**options).load(str(path))
    return sorted(row["id"] for row in frame.collect())


class Writing:
    """Two subtasks of a job, a checkpoint at a time."""

    def __init__(self, job: FileJob) -> None:
        self.job = job.check()
        self.committer = job.committer()
        self._writers = [job.writer(subtask=subtask) for subtask in range(2)]

    def prepared(self, checkpoint: int) -> list[Committable]:
        """Pre-commit rows 10 n and 10 n + 1, one a subtask."""
        found: list[Committable] = []
        for subtask, writer in enumerate(self._writers):
            writer.write(_batch(10 * checkpoint + subtask))
            found += writer.pre_commit(CheckpointId(checkpoint))
        return found


@pytest.mark.only_proof
def test_exactly_the_committed_files_are_read_and_as_of_a_checkpoint(
    spark: SparkSession, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    with FileJob(FileSink(str(out), partition_by=("day",)), schema=SCHEMA) as job:
        writing = Writing(job)
        for checkpoint in (1, 2, 3):
            committables = writing.prepared(checkpoint)
            # Of checkpoint 3 only one subtask has committed.
            for committable in committables if checkpoint < 3 else committables[:1]:
                assert writing.committer.commit(committable) == Committed()
        writing.committer.prune(CheckpointId(3))
        assert _ids(spark, out) == [10, 11, 20, 21, 30]
        assert _ids(spark, out, sinkId="job.files") == [10, 11, 20, 21, 30]
        assert _ids(spark, out, asOfCheckpoint=1) == [10, 11]
        assert _ids(spark, out, asOfCheckpoint="latest") == [10, 11, 20, 21]
        with pytest.raises(Exception, match="published only up to checkpoint 2"):
            _ids(spark, out, asOfCheckpoint=3)
        with pytest.raises(Exception, match="'other' has not written to .*; job.files have"):
            _ids(spark, out, sinkId="other")
        with pytest.raises(Exception, match="did you mean 'asOfCheckpoint'"):
            _ids(spark, out, asOfCheckpont=3)
        frame = spark.read.schema("id BIGINT, day DATE, more INT").format(_FORMAT).load(str(out))
        first = min(frame.collect())
        assert (first["id"], str(first["day"]), first["more"]) == (10, "1970-01-11", None)


@pytest.mark.servers
def test_a_stream_reads_each_checkpoint_once_when_all_subtasks_have_published_it(
    spark: SparkSession, tmp_path: Path
) -> None:
    out, copy = tmp_path / "out", str(tmp_path / "copy")
    with FileJob(FileSink(str(out)), schema=SCHEMA) as job:
        writing = Writing(job)

        def publish(*checkpoints: int) -> None:
            for checkpoint in checkpoints:
                for committable in writing.prepared(checkpoint):
                    writing.committer.commit(committable)
            writing.committer.prune(CheckpointId(checkpoints[-1]))

        def copied() -> list[int]:
            frame = spark.readStream.format(_FORMAT).load(str(out))
            writer = frame.writeStream.format("parquet").option("path", copy)
            writer = writer.option("checkpointLocation", str(tmp_path / "query"))
            run_to_end(writer.trigger(availableNow=True).start)
            return sorted(row["id"] for row in spark.read.parquet(copy).collect())

        publish(1, 2)
        assert copied() == [10, 11]
        publish(3, 4)
        assert copied() == [10, 11, 20, 21, 30, 31]
        assert copied() == [10, 11, 20, 21, 30, 31]
