"""A query of Spark from a topic of payments into a table, as a user would write it.

    python -m benchmarks.first_query SPECIFICATION

Runs until its standard input ends, and then writes its `QueryTimes` to a file; see
`benchmarks.query_start`.
"""

from __future__ import annotations

import json
import sys
import time
from enum import Enum
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

_MASTER = "local[2]"
_FIELDS = "id BIGINT, account STRING, amount BIGINT, ts BIGINT"


class Kind(str, Enum):
    """The kind of query and session."""

    SPARK = "spark"
    """Spark's Kafka source, `from_json`, and `foreachBatch` with JDBC. At least once."""
    BUILDER = "builder"
    """The formats of onceflow, registered in a session of Spark's own builder."""
    SESSION = "session"
    """The formats of onceflow in a session of `onceflow.session`."""


class QuerySpec(msgspec.Struct, frozen=True, kw_only=True):
    """The things that a query is started with."""

    kind: Kind
    servers: str
    topic: str
    url: str
    checkpoint: str
    batch_rows: int
    began_s: float
    """The time at which the process was started."""
    jars: str
    """The jars of Spark's Kafka source and of the JDBC driver, with commas between them."""
    result: str
    """The file for the times."""


class QueryTimes(msgspec.Struct, frozen=True, kw_only=True):
    """The times that the query's process knows."""

    imported_s: float
    session_s: float
    """The seconds from the start of the process until the session is there."""
    started_s: float
    """The seconds from the start of the process until `start` of the query has returned."""
    batches: dict[int, dict[str, int]]
    """The milliseconds of each part of a micro-batch, by its number; from Spark's progress."""


def main(spec: QuerySpec) -> None:
    """Run the query of `spec` until the standard input ends, and write its times."""
    _import_as_programs_do(spec.kind)
    imported_s = time.time() - spec.began_s
    spark = _start_session(spec)
    session_s = time.time() - spec.began_s
    query = _start_query(spark, spec)
    started_s = time.time() - spec.began_s
    sys.stdin.read()
    # The progress of the last batch is known only after its commit.
    query.processAllAvailable()
    times = QueryTimes(
        imported_s=imported_s,
        session_s=session_s,
        started_s=started_s,
        batches=_batch_times(query, spec.batch_rows),
    )
    query.stop()
    spark.stop()
    Path(spec.result).write_bytes(msgspec.json.encode(times))


def _import_as_programs_do(kind: Kind) -> None:
    """Import the modules that a program of this kind begins with."""
    import_module("pyspark.sql.functions")
    if kind is not Kind.SPARK:
        import_module("onceflow.connectors")


def _start_session(spec: QuerySpec) -> SparkSession:
    from pyspark.sql import SparkSession

    builder = SparkSession.Builder().master(_MASTER)
    match spec.kind:
        case Kind.SPARK:
            return builder.config("spark.jars", spec.jars).getOrCreate()
        case Kind.BUILDER:
            return builder.getOrCreate()
        case Kind.SESSION:
            import onceflow

            return onceflow.session(_MASTER)


def _start_query(spark: SparkSession, spec: QuerySpec) -> StreamingQuery:
    match spec.kind:
        case Kind.SPARK:
            frame = _sparks_rows(spark, spec)
            into_jdbc = _jdbc_writer(spec.url)
            writer = frame.writeStream.foreachBatch(into_jdbc)
        case Kind.BUILDER | Kind.SESSION:
            from onceflow import connectors

            connectors.register(spark)
            writer = _our_rows(spark, spec).writeStream.format("onceflow-postgres")
            writer = writer.options(url=spec.url, dbtable="payments")
    return writer.option("checkpointLocation", spec.checkpoint).start()


def _source_options(spec: QuerySpec) -> Mapping[str, Any]:
    return {
        "kafka.bootstrap.servers": spec.servers,
        "subscribe": spec.topic,
        "startingOffsets": "earliest",
        # A batch waits until the topic has all of its rows. There are never more.
        "minOffsetsPerTrigger": spec.batch_rows,
    }


def _sparks_rows(spark: SparkSession, spec: QuerySpec) -> DataFrame:
    from pyspark.sql.functions import col, from_json

    records = spark.readStream.format("kafka").options(**_source_options(spec)).load()
    value = from_json(col("value").cast("string"), _FIELDS)
    return records.select(value.alias("value")).select("value.*")


def _our_rows(spark: SparkSession, spec: QuerySpec) -> DataFrame:
    reader = spark.readStream.format("onceflow-kafka").options(**_source_options(spec))
    return reader.options(valueFormat="json", valueSchema=_FIELDS).load()


def _jdbc_writer(url: str) -> Any:
    """Return a function for `foreachBatch` that writes with the fastest settings of JDBC."""
    host = url.partition("@")[2]
    jdbc_url = f"jdbc:postgresql://{host}?user=postgres&reWriteBatchedInserts=true"

    def write(batch: DataFrame, _: int) -> None:
        (
            batch.write.format("jdbc")
            .options(url=jdbc_url, dbtable="payments", driver="org.postgresql.Driver")
            .option("batchsize", 10_000)
            .mode("append")
            .save()
        )

    return write


def _batch_times(query: StreamingQuery, batch_rows: int) -> dict[int, dict[str, int]]:
    """Return the times of each batch, and require that each has `batch_rows` rows."""
    times: dict[int, dict[str, int]] = {}
    for progress in query.recentProgress:
        batch = json.loads(progress.json)
        # Spark reports a query that waits for rows, too.
        if not batch["numInputRows"]:
            continue
        if batch["numInputRows"] != batch_rows:
            raise ValueError(f"a batch of {batch['numInputRows']} rows instead of {batch_rows}")
        times[batch["batchId"]] = batch["durationMs"]
    return times


if __name__ == "__main__":
    main(msgspec.json.decode(sys.argv[1], type=QuerySpec))
