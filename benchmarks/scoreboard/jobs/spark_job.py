"""The driver process of Structured Streaming's contestants: `python -m … SPEC.json`.

Each query has its own checkpoint location. The functions of the executors are plain psycopg.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import msgspec
import psycopg
from pyspark.sql import DataFrame, Row, SparkSession, functions
from typing_extensions import LiteralString

SparkWay = Literal["append", "upsert", "batch-id"]

_SMALL_JVM = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
_SCHEMA = "id BIGINT, account STRING, amount BIGINT, ts BIGINT"
_UPSERT = (
    "INSERT INTO payments (id, account, amount, ts) VALUES (%s, %s, %s, %s) ON CONFLICT (id) DO"
    " UPDATE SET account = EXCLUDED.account, amount = EXCLUDED.amount, ts = EXCLUDED.ts"
)
_UPSERT_TOTAL = (
    "INSERT INTO totals (account, total, n) VALUES (%s, %s, %s) ON CONFLICT (account) DO UPDATE"
    " SET total = EXCLUDED.total, n = EXCLUDED.n"
)


class JobSpec(msgspec.Struct, frozen=True):
    way: SparkWay
    bootstrap_servers: str
    topic: str
    url: str
    jdbc_url: str
    jars: tuple[str, ...]
    directory: str


def main(path: str) -> None:
    """Run both queries until one fails."""
    spec = msgspec.json.decode(Path(path).read_bytes(), type=JobSpec)
    spark = (
        SparkSession.Builder()
        .master("local-cluster[1,2,1024]")
        .appName("scoreboard")
        .config("spark.jars", ",".join(spec.jars))
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.memory", "1g")
        .config("spark.driver.extraJavaOptions", _SMALL_JVM)
        .config("spark.executor.extraJavaOptions", _SMALL_JVM)
        .config("spark.executor.memory", "1g")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.sql.shuffle.partitions", "2")
        .config(
            "spark.sql.streaming.stateStore.providerClass",
            "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider",
        )
        .getOrCreate()
    )
    source = (
        spark.readStream.format("kafka")
        .option("kafka.bootstrap.servers", spec.bootstrap_servers)
        .option("subscribe", spec.topic)
        .option("startingOffsets", "earliest")
        .load()
    )
    payments = source.select(
        functions.from_json(functions.col("value").cast("string"), _SCHEMA).alias("payment")
    ).select("payment.*")
    totals = payments.groupBy("account").agg(
        functions.sum("amount").alias("total"), functions.count("*").alias("n")
    )
    _start(payments, "append", _make_writer(spec), f"{spec.directory}/payments")
    _start(totals, "update", _make_upsert(spec.url, _UPSERT_TOTAL), f"{spec.directory}/totals")
    spark.streams.awaitAnyTermination()
    # Exit, so that the supervisor starts the application again.
    raise SystemExit("a query has ended")


def _start(
    rows: DataFrame, mode: str, write: Callable[[DataFrame, int], None], checkpoints: str
) -> None:
    (
        rows.writeStream.outputMode(mode)
        .option("checkpointLocation", checkpoints)
        .trigger(processingTime="1 second")
        .foreachBatch(write)
        .start()
    )


def _make_writer(spec: JobSpec) -> Callable[[DataFrame, int], None]:
    match spec.way:
        case "append":
            return _make_jdbc_append(spec.jdbc_url)
        case "upsert":
            return _make_upsert(spec.url, _UPSERT)
        case "batch-id":
            return _make_batch_id_append(spec.url)


def _make_jdbc_append(jdbc_url: str) -> Callable[[DataFrame, int], None]:
    def write(rows: DataFrame, _batch_id: int) -> None:
        (
            rows.write.format("jdbc")
            .mode("append")
            .option("url", jdbc_url)
            .option("driver", "org.postgresql.Driver")
            .option("dbtable", "payments")
            .save()
        )

    return write


def _make_upsert(url: str, statement: LiteralString) -> Callable[[DataFrame, int], None]:
    def upsert(partition: Iterator[Row]) -> None:
        with psycopg.connect(url) as connection, connection.cursor() as cursor:
            rows: list[tuple[object, ...]] = [tuple(row) for row in partition]
            cursor.executemany(statement, rows)

    def write(rows: DataFrame, _batch_id: int) -> None:
        rows.foreachPartition(upsert)

    return write


def _make_batch_id_append(url: str) -> Callable[[DataFrame, int], None]:
    """Return a writer that commits the rows of a batch and its id in one transaction."""

    def write(rows: DataFrame, batch_id: int) -> None:
        with psycopg.connect(url) as connection, connection.cursor() as cursor:
            cursor.execute("CREATE TABLE IF NOT EXISTS batches (id bigint PRIMARY KEY)")
            cursor.execute(
                "INSERT INTO batches VALUES (%s) ON CONFLICT (id) DO NOTHING", (batch_id,)
            )
            if cursor.rowcount == 0:
                return
            with cursor.copy("COPY payments (id, account, amount, ts) FROM STDIN") as copy:
                values: list[tuple[object, ...]] = [tuple(row) for row in rows.collect()]
                for value in values:
                    copy.write_row(value)

    return write


if __name__ == "__main__":
    main(sys.argv[1])
