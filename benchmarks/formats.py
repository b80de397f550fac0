"""Spark's own sources and sinks beside onceflow's formats: `python -m benchmarks.formats --help`.

One Spark session of two cores; every variant once in a turn, in a fresh table without index, which
is counted afterwards. CPU is that of Spark's JVM with all Python workers; Postgres's is apart.
Theirs have their best settings: reWriteBatchedInserts, batches and fetches of 10,000 rows.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import psycopg
import pyarrow as pa
import typer
from pyarrow.parquet import write_table
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamWriter,
    WriterCommitMessage,
)
from pyspark.sql.functions import col, from_json
from pyspark.sql.types import StructType

from benchmarks.cpu import tree_cpu_s
from benchmarks.machine import describe_machine
from benchmarks.spread import Spread
from benchmarks.stage import ROOT, BenchmarkError, Stage
from onceflow.connectors.spark.arrow_rows import spark_schema
from onceflow.connectors.spark.formats import register
from onceflow.connectors.spark.kafka_stream import BatchLimits, KafkaStreamReader
from onceflow.connectors.spark.postgres_rows import PostgresRows
from onceflow.connectors.spark.sql_reader import sql_reader, sql_schema
from onceflow.integration.servers.kafka_jars import spark_jars
from onceflow.integration.workload import PAYMENT_SCHEMA, Payments
from onceflow.sinks.postgres.connection import endpoint_of
from onceflow.sinks.sql.tables import TableName
from onceflow.sources import KafkaSource

_FIELDS = "id BIGINT, account STRING, amount BIGINT, ts BIGINT"
_TABLE = "CREATE TABLE payments (id bigint, account text, amount bigint, ts bigint)"
_SMALL_BATCH_ROWS = 1000
_SMALL_BATCHES = 25
_IMPORTS = (
    "onceflow.connectors.spark.stream_writer",
    "onceflow.connectors.spark.kafka_stream",
    "onceflow.sinks.postgres.sink",
)


class PaymentsTopic(DataSource):
    """The topic, decoded as it is read."""

    @classmethod
    def name(cls) -> str:
        return "bench-topic"

    def schema(self) -> StructType:
        return spark_schema(PAYMENT_SCHEMA)

    def streamReader(self, schema: StructType) -> KafkaStreamReader:  # noqa: N802
        given = dict(self.options)
        source = KafkaSource(given["servers"], topic=given["topic"], schema=PAYMENT_SCHEMA)
        return KafkaStreamReader(source.settings, schema, BatchLimits(int(given["most"])))


class PaymentsTable(DataSource):
    """The table."""

    @classmethod
    def name(cls) -> str:
        return "bench-table"

    def rows(self) -> PostgresRows:
        waits: dict[str, Any] = {
            "user": None,
            "password": None,
            "connect_timeout_s": 10.0,
            "reply_timeout_s": 60.0,
            "lock_timeout_s": 10.0,
        }
        return PostgresRows(
            endpoint_of(dict(self.options)["url"], **waits), TableName.parse("payments")
        )

    def schema(self) -> StructType:
        return sql_schema(self.rows())

    def reader(self, schema: StructType) -> DataSourceReader:
        return sql_reader(self.rows(), schema, tasks=2)


class _DrainingWriter(DataSourceStreamWriter):
    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        for _ in iterator:
            pass
        return WriterCommitMessage()


class Drain(DataSource):
    """A bare Python sink."""

    @classmethod
    def name(cls) -> str:
        return "bench-drain"

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802
        return _DrainingWriter()


@dataclass
class Bench:
    """The session and the servers."""

    spark: SparkSession
    stage: Stage
    topic: str
    batch_rows: int
    runs: int = 0

    def checkpoint(self) -> str:
        self.runs += 1
        return str(self.stage.directory / f"checkpoint-{self.runs}")

    @property
    def parquet(self) -> str:
        return str(self.stage.directory / "payments.parquet")

    def sparks_topic(self) -> DataFrame:
        read = (
            self.spark.readStream.format("kafka")
            .option("kafka.bootstrap.servers", self.stage.kafka.bootstrap_servers)
            .option("subscribe", self.topic)
            .option("startingOffsets", "earliest")
            .option("maxOffsetsPerTrigger", self.batch_rows)
            .load()
        )
        return read.select(from_json(col("value").cast("string"), _FIELDS).alias("v")).select("v.*")

    def our_topic(self) -> DataFrame:
        return (
            self.spark.readStream.format("bench-topic")
            .options(servers=self.stage.kafka.bootstrap_servers, topic=self.topic)
            .option("most", self.batch_rows)
            .load()
        )

    def _run(self, writer: Any) -> None:
        query = (
            writer.option("checkpointLocation", self.checkpoint())
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()

    def into_jdbc(self, frame: DataFrame, url: str) -> None:
        self._run(frame.writeStream.foreachBatch(lambda batch, _: self.jdbc(batch, url)))

    def into_ours(self, frame: DataFrame, url: str) -> None:
        self._run(
            frame.writeStream.format("onceflow-postgres").options(url=url, dbtable="payments")
        )

    def into_nothing(self, frame: DataFrame) -> None:
        self._run(frame.writeStream.format("noop"))

    def jdbc(self, frame: DataFrame, url: str) -> None:
        (
            frame.write.format("jdbc")
            .options(url=jdbc_url(url), dbtable="payments", driver="org.postgresql.Driver")
            .option("batchsize", 10_000)
            .mode("append")
            .save()
        )

    def jdbc_read(self, url: str) -> None:
        frame = (
            self.spark.read.format("jdbc")
            .options(url=jdbc_url(url), dbtable="payments", driver="org.postgresql.Driver")
            .options(fetchsize=10_000, partitionColumn="id", lowerBound=0, numPartitions=2)
            .option("upperBound", self.stage.payments.records)
            .load()
        )
        frame.write.format("noop").mode("overwrite").save()

    def our_write(self, url: str) -> None:
        frame = self.spark.read.parquet(self.parquet)
        frame.write.format("onceflow-postgres").options(url=url, dbtable="payments").mode(
            "append"
        ).save()

    def our_read(self, url: str) -> None:
        frame = self.spark.read.format("bench-table").option("url", url).load()
        frame.write.format("noop").mode("overwrite").save()


def jdbc_url(url: str) -> str:
    host = url.partition("@")[2]
    return f"jdbc:postgresql://{host}?user=postgres&reWriteBatchedInserts=true"


@dataclass
class Figures:
    """What one variant took, a turn each."""

    wall_s: list[float] = field(default_factory=list[float])
    cpu_s: list[float] = field(default_factory=list[float])
    postgres_cpu_s: list[float] = field(default_factory=list[float])

    def as_json(self, rows: int) -> dict[str, object]:
        return {
            "rows_per_second": Spread.of(rows / one for one in self.wall_s).as_json(),
            "cpu_s_per_million": Spread.of(one / rows * 1e6 for one in self.cpu_s).as_json(),
            "postgres_cpu_s_per_million": Spread.of(
                one / rows * 1e6 for one in self.postgres_cpu_s
            ).as_json(),
        }


Variant = Callable[[str], None]


def variants(bench: Bench) -> dict[str, tuple[Variant, bool]]:
    """Return each variant by its name, and whether the table is full before rather than after."""
    read = bench.spark.read
    return {
        "foreachBatch + JDBC": (lambda url: bench.into_jdbc(bench.sparks_topic(), url), False),
        "Spark's Kafka + our sink": (lambda url: bench.into_ours(bench.sparks_topic(), url), False),
        "our Kafka + our sink": (lambda url: bench.into_ours(bench.our_topic(), url), False),
        "Spark's Kafka to nothing": (lambda _: bench.into_nothing(bench.sparks_topic()), True),
        "our Kafka to nothing": (lambda _: bench.into_nothing(bench.our_topic()), True),
        "JDBC write": (lambda url: bench.jdbc(read.parquet(bench.parquet), url), False),
        "our write": (bench.our_write, False),
        "JDBC read": (bench.jdbc_read, True),
        "our read": (bench.our_read, True),
    }


def measure(
    bench: Bench, runs: int, only: Sequence[str], say: Callable[[str], None]
) -> dict[str, Figures]:
    found: dict[str, Figures] = {}
    chosen = {
        name: one
        for name, one in variants(bench).items()
        if not only or any(part in name for part in only)
    }
    for turn in range(runs + 1):
        for name, (run, is_full) in chosen.items():
            with bench.stage.database() as url:
                _prepare(url, bench.stage.payments if is_full else None)
                wall_s, cpu_s, server_s = _timed(bench, run, url)
                _require_whole(url, bench.stage.payments, name)
            # The first turn warms the JVM.
            if turn:
                figures = found.setdefault(name, Figures())
                figures.wall_s.append(wall_s)
                figures.cpu_s.append(cpu_s)
                figures.postgres_cpu_s.append(server_s)
            say(f"turn {turn} of {runs}: {name}: {wall_s:.1f} s, {cpu_s:.1f} s of CPU")
    return found


def _timed(bench: Bench, run: Variant, url: str) -> tuple[float, float, float]:
    server = bench.stage.server_pids["postgres"]
    before, server_before, began = _spark_cpu_s(bench), tree_cpu_s(server), time.monotonic()
    run(url)
    wall_s = time.monotonic() - began
    return wall_s, _spark_cpu_s(bench) - before, tree_cpu_s(server) - server_before


def _spark_cpu_s(bench: Bench) -> float:
    """Return what this process and all below it used, but for the servers, which it started."""
    servers = sum(tree_cpu_s(pid) for pid in bench.stage.server_pids.values())
    return tree_cpu_s(os.getpid()) - servers


def _prepare(url: str, full: Payments | None) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(_TABLE)
        if full is not None:
            with connection.cursor().copy("COPY payments FROM STDIN") as copy:
                for chunk in full.chunks():
                    rows = zip(chunk.ids, chunk.accounts, chunk.amounts, strict=True)
                    copy.write("".join(f"{i}\tacct-{a:06}\t{m}\t{i}\n" for i, a, m in rows))
            connection.execute("VACUUM (FREEZE) payments")


def _require_whole(url: str, payments: Payments, name: str) -> None:
    with psycopg.connect(url) as connection:
        found = connection.execute("SELECT count(*), count(DISTINCT id) FROM payments").fetchone()
    if found != (payments.records, payments.records):
        raise BenchmarkError(f"{name}: {found} rows and ids in place of {payments.records} each")


def small_batches(bench: Bench, say: Callable[[str], None]) -> dict[str, float]:
    """Return the median milliseconds of `addBatch` with 1,000 rows."""
    found: dict[str, float] = {}
    for name in ("noop", "bench-drain", "onceflow-postgres"):
        with bench.stage.database() as url:
            frame = (
                bench.spark.readStream.format("rate-micro-batch")
                .options(rowsPerBatch=_SMALL_BATCH_ROWS, numPartitions=2)
                .load()
            )
            writer = frame.writeStream.format(name).option("checkpointLocation", bench.checkpoint())
            if name == "onceflow-postgres":
                writer = writer.options(url=url, dbtable="small", createTable="true")
            query = writer.start()
            took: dict[int, int] = {}
            until = time.monotonic() + 120
            while len(took) < _SMALL_BATCHES and time.monotonic() < until and query.isActive:
                for progress in query.recentProgress:
                    took[progress.batchId] = progress.durationMs.get("addBatch", 0)
                time.sleep(0.1)
            query.stop()
            # The first ones import and connect.
            found[name] = statistics.median([took[one] for one in sorted(took)[5:]])
        say(f"addBatch of {_SMALL_BATCH_ROWS} rows, {name}: {found[name]:.0f} ms")
    return found


def import_ms() -> dict[str, float]:
    """Return what a Python worker takes to import what tasks use, after Spark's own modules."""
    program = (
        "import time, pyspark.worker, pyarrow, pyspark.sql.datasource, pyspark.sql.pandas.types\n"
        "began, cpu = time.perf_counter(), time.process_time()\n"
        "import importlib, sys\n"
        "for name in sys.argv[1:]: importlib.import_module(name)\n"
        "print(time.perf_counter() - began, time.process_time() - cpu)"
    )
    path = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    found: dict[str, float] = {}
    for name in _IMPORTS:
        took: list[float] = []
        for _ in range(3):
            command = [sys.executable, "-c", program, name]
            done = subprocess.run(
                command, capture_output=True, check=True, env={**os.environ, "PYTHONPATH": path}
            )
            took.append(float(done.stdout.split()[1]) * 1000)
        found[name] = min(took)
    return found


def _write_parquet(payments: Payments, directory: Path) -> None:
    """Write all payments in two files, one a core."""
    directory.mkdir()
    batches = [
        pa.RecordBatch.from_pydict(
            {
                "id": chunk.ids,
                "account": [f"acct-{one:06}" for one in chunk.accounts],
                "amount": chunk.amounts,
                "ts": chunk.ids,
            }
        )
        for chunk in payments.chunks()
    ]
    for index in range(2):
        write_table(pa.Table.from_batches(batches[index::2]), directory / f"{index}.parquet")


def session(jars: list[Path]) -> SparkSession:
    paths = [str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    os.environ["PYSPARK_PYTHON"] = sys.executable
    return (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.jars", ",".join(map(str, jars)))
        .config("spark.driver.memory", "3g")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.log.level", "ERROR")
        .getOrCreate()
    )


def bench(
    records: Annotated[int, typer.Option(help="Payments in the topic.", min=1)] = 2_000_000,
    runs: Annotated[int, typer.Option(help="Turns after the one that warms up.", min=1)] = 3,
    batch_rows: Annotated[int, typer.Option(help="Records a micro-batch.", min=1)] = 500_000,
    only: Annotated[
        list[str] | None, typer.Option(help="Variants whose names have this in them.")
    ] = None,
) -> None:
    """Print one JSON object with every figure."""

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    spark = session(list(spark_jars(progress=say)))
    register(spark)
    for one in (PaymentsTopic, PaymentsTable, Drain):
        spark.dataSource.register(one)
    with Stage(Payments(records)) as stage:
        setting = Bench(spark, stage, stage.fill(), batch_rows)
        _write_parquet(stage.payments, Path(setting.parquet))
        found = measure(setting, runs, only or (), say)
        small = {} if only else small_batches(setting, say)
    spark.stop()
    figures = {name: one.as_json(records) for name, one in found.items()}
    print(
        json.dumps(
            {
                "machine": describe_machine(),
                "records": records,
                "figures": figures,
                "add_batch_ms": small,
                "import_cpu_ms": import_ms(),
            }
        )
    )


if __name__ == "__main__":
    typer.run(bench)
