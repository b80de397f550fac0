"""Spark's own sources and sinks beside onceflow's formats: `python -m benchmarks.formats --help`.

One Spark session of two cores; every variant once in a turn, every second turn in reverse, in a
fresh table without index. What is in the table afterwards, or what was read, is compared with the
payments. CPU is that of Spark's JVM with all Python workers; Postgres's and Kafka's are apart.
Theirs have their best settings: reWriteBatchedInserts, batches and fetches of 10,000 rows.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import psycopg
import pyarrow as pa
import typer
from pyarrow.parquet import write_table
from pyspark.sql import DataFrame, Observation, SparkSession
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
)
from pyspark.sql.functions import col, count, from_json, lit
from pyspark.sql.functions import sum as sum_
from pyspark.sql.types import StructType

from benchmarks.cpu import tree_cpu_s
from benchmarks.machine import describe_machine
from benchmarks.spark_jars import spark_jars
from benchmarks.spread import Spread
from benchmarks.stage import ROOT, BenchmarkError, Stage
from onceflow import Checkpointing, Pipeline
from onceflow.clients.postgres.connection import endpoint_of
from onceflow.clients.sql.session import DatabaseAccess
from onceflow.clients.sql.tables import TableName
from onceflow.connectors.spark.arrow_rows import spark_schema
from onceflow.connectors.spark.formats import register
from onceflow.connectors.spark.readers.kafka_stream import BatchLimits, KafkaStreamReader
from onceflow.connectors.spark.readers.postgres_rows import PostgresRows
from onceflow.connectors.spark.readers.sql import sql_reader, sql_schema
from onceflow.integration.workload import (
    AMOUNT_MIN_CENTS,
    DIGEST_ACCOUNT_PRIME,
    DIGEST_AMOUNT_PRIME,
    PAYMENT_SCHEMA,
    Payments,
)
from onceflow.sinks import PostgresSink
from onceflow.sources import KafkaSource

_FIELDS = "id BIGINT, account STRING, amount BIGINT, ts BIGINT"
_TABLE = "CREATE TABLE payments (id bigint, account text, amount bigint, ts bigint)"
_DIGEST = f"""
    SELECT count(*), count(DISTINCT id), count(DISTINCT ts - id),
        sum((id % {DIGEST_AMOUNT_PRIME}) * (amount - {AMOUNT_MIN_CENTS} + 1)
            + (id % {DIGEST_ACCOUNT_PRIME}) * substr(account, 6)::bigint)::bigint
    FROM payments
"""
_JDBC_STREAM, _JDBC_WRITE, _JDBC_READ = "foreachBatch + JDBC", "JDBC write", "JDBC read"
# What of ours stands beside what of theirs; a ratio is theirs / ours of one turn.
_PAIRS = {
    "our Kafka + our sink": _JDBC_STREAM,
    "Pipeline": _JDBC_STREAM,
    "our write": _JDBC_WRITE,
    "our read": _JDBC_READ,
}


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
        return KafkaStreamReader(
            source.settings, schema, BatchLimits(offsets_most=int(given["most"]))
        )


class PaymentsTable(DataSource):
    """The table."""

    @classmethod
    def name(cls) -> str:
        return "bench-table"

    def rows(self) -> PostgresRows:
        access = DatabaseAccess(dict(self.options)["url"])
        return PostgresRows(endpoint_of(access, lock_timeout_s=10.0), TableName.parse("payments"))

    def schema(self) -> StructType:
        return sql_schema(self.rows())

    def reader(self, schema: StructType) -> DataSourceReader:
        return sql_reader(self.rows(), schema, tasks=2)


_READ = "read"


def _observed(frame: DataFrame, by: str | Observation) -> DataFrame:
    rows, ids, amounts = count(lit(1)), sum_("id"), sum_("amount")
    return frame.observe(by, rows.alias("rows"), ids.alias("ids"), amounts.alias("amounts"))


@dataclass(frozen=True, slots=True)
class _Read:
    """A summary of the rows that were read. It costs next to nothing to make."""

    rows: int
    ids: int
    amounts: int

    @classmethod
    def of(cls, row: Any) -> _Read:
        return cls(row["rows"], row["ids"] or 0, row["amounts"] or 0)

    @classmethod
    def of_payments(cls, payments: Payments) -> _Read:
        chunks = list(payments.chunks())
        return cls(
            payments.records,
            sum(int(chunk.ids.sum()) for chunk in chunks),
            sum(int(chunk.amounts.sum()) for chunk in chunks),
        )


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

    def pipeline(self, url: str) -> None:
        """The same job without Spark's engine: a checkpoint a second, two slots."""
        servers = self.stage.kafka.bootstrap_servers
        source = KafkaSource(
            servers, topic=self.topic, schema=PAYMENT_SCHEMA, ending_offsets="latest"
        )
        storage = self.checkpoint()
        pipeline = Pipeline(
            self.spark,
            name=f"bench-{self.runs}",
            parallelism=2,
            checkpointing=Checkpointing(storage=storage, interval="1 s"),
        )
        pipeline.read(source, uid="payments").write(PostgresSink(url, table="payments"), uid="sink")
        pipeline.start().wait()

    def jdbc(self, frame: DataFrame, url: str) -> None:
        (
            frame.write.format("jdbc")
            .options(url=jdbc_url(url), dbtable="payments", driver="org.postgresql.Driver")
            .option("batchsize", 10_000)
            .mode("append")
            .save()
        )

    def jdbc_read(self, url: str) -> None:
        self._read_to_nothing(
            self.spark.read.format("jdbc")
            .options(url=jdbc_url(url), dbtable="payments", driver="org.postgresql.Driver")
            .options(fetchsize=10_000, partitionColumn="id", lowerBound=0, numPartitions=2)
            .option("upperBound", self.stage.payments.records)
            .load()
        )

    def our_write(self, url: str) -> None:
        frame = self.spark.read.parquet(self.parquet)
        frame.write.format("onceflow-postgres").options(url=url, dbtable="payments").mode(
            "append"
        ).save()

    def our_read(self, url: str) -> None:
        self._read_to_nothing(self.spark.read.format("bench-table").option("url", url).load())

    def _read_to_nothing(self, frame: DataFrame) -> None:
        seen = Observation(_READ)
        _observed(frame, seen).write.format("noop").mode("overwrite").save()
        self.require_read(_Read.of(seen.get))

    def require_read(self, found: _Read) -> None:
        """Return when `found` are the payments.

        Raises:
            BenchmarkError: They are not.
        """
        wanted = _Read.of_payments(self.stage.payments)
        if found != wanted:
            raise BenchmarkError(f"read were {found}, and there are {wanted}")


def jdbc_url(url: str) -> str:
    host = url.partition("@")[2]
    return f"jdbc:postgresql://{host}?user=postgres&reWriteBatchedInserts=true"


@dataclass
class Figures:
    """The figures of one variant, one for each turn."""

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


def ratios(found: Mapping[str, Figures]) -> dict[str, dict[str, object]]:
    """Return theirs / ours of each turn: over 1, ours is better."""
    told: dict[str, dict[str, object]] = {}
    for ours, theirs in _PAIRS.items():
        if ours not in found or theirs not in found:
            continue
        one, other = found[ours], found[theirs]
        of_turns = {
            "wall": zip(other.wall_s, one.wall_s, strict=True),
            "cpu": zip(other.cpu_s, one.cpu_s, strict=True),
            "postgres_cpu": zip(other.postgres_cpu_s, one.postgres_cpu_s, strict=True),
        }
        told[f"{theirs} / {ours}"] = {
            name: Spread.of(their / max(our, 0.01) for their, our in turns).as_json()
            for name, turns in of_turns.items()
        }
    return told


Variant = Callable[[str], None]


def variants(bench: Bench) -> dict[str, tuple[Variant, bool]]:
    """Return each variant by its name, and whether the table is full before rather than after."""
    read = bench.spark.read
    return {
        _JDBC_STREAM: (lambda url: bench.into_jdbc(bench.sparks_topic(), url), False),
        "our Kafka + our sink": (lambda url: bench.into_ours(bench.our_topic(), url), False),
        "Pipeline": (bench.pipeline, False),
        _JDBC_WRITE: (lambda url: bench.jdbc(read.parquet(bench.parquet), url), False),
        "our write": (bench.our_write, False),
        _JDBC_READ: (bench.jdbc_read, True),
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
        order = list(chosen.items())
        for name, (run, is_full) in order if turn % 2 else reversed(order):
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
        found = connection.execute(_DIGEST.encode()).fetchone()
    wanted = (payments.records, payments.records, 1, payments.digest())
    if found != wanted:
        raise BenchmarkError(f"{name}: rows, ids, distances and digest are {found}, not {wanted}")


def _write_parquet(payments: Payments, directory: Path) -> None:
    """Write all payments in two files, one a core."""
    directory.mkdir()
    batches = [
        pa.RecordBatch.from_pydict(
            {
                "id": chunk.ids,
                "account": [f"acct-{account:06}" for account in chunk.accounts],
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
        list[str] | None,
        typer.Option(help="Variants with this in their names."),
    ] = None,
) -> None:
    """Print one JSON object with every figure."""

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    spark = session(list(spark_jars(progress=say)))
    register(spark)
    for one in (PaymentsTopic, PaymentsTable):
        spark.dataSource.register(one)
    with Stage(Payments(records)) as stage:
        setting = Bench(spark, stage, stage.fill(), batch_rows)
        _write_parquet(stage.payments, Path(setting.parquet))
        found = measure(setting, runs, only or (), say)
    spark.stop()
    figures = {name: one.as_json(records) for name, one in found.items()}
    print(
        json.dumps(
            {
                "machine": describe_machine(),
                "records": records,
                "figures": figures,
                "ratios": ratios(found),
            }
        )
    )


if __name__ == "__main__":
    typer.run(bench)
