"""`foreachBatch` into several tables, by keys, with dead letters: each batch whole, once."""

from __future__ import annotations

import os
import sqlite3
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from tests.integration.postgres_sink_kit import ids_in, prepared, query
from tests.spark_formats.batches import killed_at

from onceflow.connectors import foreach_batch
from onceflow.core.crash_points import CrashPoint
from onceflow.core.errors import ConfigError
from onceflow.core.spi import Sink
from onceflow.sinks import PostgresSink, SQLiteSink

pytestmark = [pytest.mark.spark, pytest.mark.integration]


def feed(spark: SparkSession, directory: Path, first: int, last: int) -> None:
    """Add one file that holds ids from `first` to before `last`, of ten accounts."""
    rows = spark.range(first, last, numPartitions=1).selectExpr("id", "id % 10 AS account")
    rows.write.mode("append").parquet(str(directory))


def rows_of(spark: SparkSession, directory: Path) -> DataFrame:
    files = spark.readStream.schema("id long, account long").option("maxFilesPerTrigger", 1)
    return files.parquet(str(directory))


def run(
    frame: DataFrame, function: Callable[[DataFrame, int], None], checkpoint: Path, mode: str
) -> None:
    query = (
        frame.writeStream.outputMode(mode)
        .foreachBatch(function)
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(100)


def forget_last_batch(checkpoint: Path) -> None:
    """Leave Spark's checkpoint as a driver does that was killed right after the sink's commit."""
    last = max((checkpoint / "commits").glob("[0-9]*"), key=lambda path: int(path.name))
    last.unlink()
    last.with_name(f".{last.name}.crc").unlink()


def counts(url: str, table: str) -> dict[Any, Any]:
    return dict(query(url, f"SELECT account, n FROM {table}"))


@pytest.mark.servers
def test_aggregates_in_update_mode_are_upserted_once_each(
    spark: SparkSession, postgres_database: str, tmp_path: Path
) -> None:
    checkpoint = tmp_path / "checkpoint"
    sink = PostgresSink(
        postgres_database,
        table="totals",
        write_mode="upsert",
        primary_key=("account",),
        create=True,
    )

    def totals() -> DataFrame:
        return (
            rows_of(spark, tmp_path / "in")
            .groupBy("account")
            .count()
            .selectExpr("account", "`count` AS n")
        )

    for first in (0, 100):
        feed(spark, tmp_path / "in", first, first + 100)
    run(totals(), foreach_batch(sink, checkpoint_location=str(checkpoint)), checkpoint, "update")
    assert counts(postgres_database, "totals") == dict.fromkeys(range(10), 20)
    forget_last_batch(checkpoint)
    feed(spark, tmp_path / "in", 200, 205)
    run(totals(), foreach_batch(sink, checkpoint_location=str(checkpoint)), checkpoint, "update")
    assert counts(postgres_database, "totals") == {n: 21 if n < 5 else 20 for n in range(10)}
    assert prepared(postgres_database) == []


def test_two_tables_of_a_database_have_all_rows_of_a_batch_or_none_when_one_refuses_a_row(
    spark: SparkSession, postgres_database: str, tmp_path: Path
) -> None:
    checkpoint = tmp_path / "checkpoint"
    query(
        postgres_database,
        "CREATE TABLE orders (id bigint)",
        "CREATE TABLE paid (id bigint PRIMARY KEY)",
        "INSERT INTO paid VALUES (7)",
    )
    sinks = {
        table: PostgresSink(postgres_database, table=table, commit_mode="ledger")
        for table in ("orders", "paid")
    }

    def split(batch: DataFrame, batch_id: int) -> dict[str, DataFrame]:
        del batch_id
        return {table: batch.select("id") for table in sinks}

    def write() -> None:
        written = foreach_batch(sinks, split, checkpoint_location=str(checkpoint))
        run(rows_of(spark, tmp_path / "in"), written, checkpoint, "append")

    def found(table: str) -> list[int]:
        return [row[0] for row in query(postgres_database, f"SELECT id FROM {table} ORDER BY id")]

    feed(spark, tmp_path / "in", 0, 10)
    with pytest.raises(StreamingQueryException, match=r"not decided.*\(id\)=\(7\)"):
        write()
    assert (found("orders"), found("paid")) == ([], [7])
    query(postgres_database, "DELETE FROM paid")
    write()
    assert found("orders") == found("paid") == list(range(10))


@pytest.mark.only_proof
def test_tables_of_two_databases_and_dead_letters_have_one_decision(
    spark: SparkSession, postgres_database: str, tmp_path: Path
) -> None:
    checkpoint = tmp_path / "checkpoint"
    query(
        postgres_database,
        "CREATE TABLE orders (id bigint NOT NULL, account int NOT NULL, host inet)",
    )
    file = str(tmp_path / "totals.db")
    sinks = {
        "orders": PostgresSink(postgres_database, table="orders"),
        "totals": SQLiteSink(file, table="totals", create=True),
    }
    letters = PostgresSink(postgres_database, table="bad", create=True)
    broken = [True]

    def split(batch: DataFrame, batch_id: int) -> dict[str, DataFrame]:
        totals = batch.groupBy("account").count().selectExpr("account", "`count` AS n")
        if broken[0] and batch_id == 1:
            totals = totals.selectExpr("account", "CAST(raise_error('broken') AS bigint) AS n")
        return {
            # The writer refuses a null at once. The server refuses a host, at the pre-commit.
            "orders": batch.selectExpr(
                "id",
                "IF(id % 50 = 0, NULL, account) AS account",
                "IF(id % 50 = 1, 'nowhere', '10.0.0.1') AS host",
            ),
            "totals": totals,
        }

    def written() -> tuple[list[Any], list[Any]]:
        ids = query(postgres_database, "SELECT id FROM orders ORDER BY id")
        bad = query(postgres_database, "SELECT count(*), count(DISTINCT value) FROM bad")
        return [row[0] for row in ids], list(bad[0])

    for first in (0, 100, 200):
        feed(spark, tmp_path / "in", first, first + 100)
    frame = rows_of(spark, tmp_path / "in")
    function = foreach_batch(
        sinks, split, checkpoint_location=str(checkpoint), dead_letters=letters
    )
    with pytest.raises(StreamingQueryException, match="broken"):
        run(frame, function, checkpoint, "append")
    good = [number for number in range(300) if number % 50 > 1]
    ids, bad = written()
    # The second batch's orders were prepared, and not one of them is there.
    assert len(ids) == 96
    assert bad == [4, 4]
    assert prepared(postgres_database) == []
    broken[0] = False
    run(frame, function, checkpoint, "append")
    forget_last_batch(checkpoint)
    run(frame, function, checkpoint, "append")
    assert written() == (good, [12, 12])
    with sqlite3.connect(file) as database:
        assert database.execute("SELECT sum(n), count(*) FROM totals").fetchone() == (300, 30)


def two_tables(url: str) -> dict[str, Sink]:
    return {table: PostgresSink(url, table=table, create=True) for table in ("orders", "audit")}


def write_two_tables(spark: SparkSession, url: str, directory: Path) -> None:
    checkpoint = directory / "checkpoint"
    sinks = two_tables(url)

    def copy(batch: DataFrame, _: int) -> dict[str, DataFrame]:
        return dict.fromkeys(sinks, batch)

    function = foreach_batch(sinks, copy, checkpoint_location=str(checkpoint))
    run(rows_of(spark, directory / "in"), function, checkpoint, "append")


def write_two_tables_alone(url: str, directory: Path) -> None:
    """Do it with a session of this process, which is to be killed."""
    os.environ["PYSPARK_PYTHON"] = sys.executable
    builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    write_two_tables(builder.getOrCreate(), url, directory)


@pytest.mark.slow
def test_a_worker_that_is_killed_with_prepared_rows_leaves_each_row_once_in_both_tables(
    spark: SparkSession, crash_points: Path, postgres_database: str, tmp_path: Path
) -> None:
    feed(spark, tmp_path / "in", 0, 10)
    (crash_points / "prepared").touch()
    write_two_tables(spark, postgres_database, tmp_path)
    assert not (crash_points / "prepared").exists()
    for table in two_tables(postgres_database):
        assert ids_in(postgres_database, table) == list(range(10))
    assert prepared(postgres_database) == []


@pytest.mark.slow
@pytest.mark.parametrize("point", ["claimed", "logged", "committed"])
def test_a_driver_that_is_killed_leaves_each_row_once_in_both_tables_after_the_next_run(
    spark: SparkSession, postgres_database: str, tmp_path: Path, point: CrashPoint
) -> None:
    feed(spark, tmp_path / "in", 0, 10)
    write_two_tables(spark, postgres_database, tmp_path)
    feed(spark, tmp_path / "in", 10, 20)
    killed_at(point, tmp_path, partial(write_two_tables_alone, postgres_database, tmp_path))
    write_two_tables(spark, postgres_database, tmp_path)
    for table in two_tables(postgres_database):
        assert ids_in(postgres_database, table) == list(range(20))
    assert prepared(postgres_database) == []


def test_a_location_that_is_another_querys_is_refused_before_a_row_is_written(
    spark: SparkSession, postgres_database: str, tmp_path: Path
) -> None:
    feed(spark, tmp_path / "in", 0, 10)
    sink = PostgresSink(postgres_database, table="orders", create=True)
    function = foreach_batch(sink, checkpoint_location=str(tmp_path / "other"))
    with pytest.raises(StreamingQueryException, match="other has no metadata of the query"):
        run(rows_of(spark, tmp_path / "in"), function, tmp_path / "checkpoint", "append")


def test_the_checkpoint_of_another_query_that_has_run_is_refused_and_skips_no_batch(
    spark: SparkSession, tmp_path: Path
) -> None:
    feed(spark, tmp_path / "in", 0, 10)
    sink = SQLiteSink(str(tmp_path / "a.db"), table="rows", create=True)
    first = foreach_batch(sink, checkpoint_location=str(tmp_path / "first"))
    run(rows_of(spark, tmp_path / "in"), first, tmp_path / "first", "append")
    feed(spark, tmp_path / "other", 10, 20)
    with pytest.raises(StreamingQueryException, match="is the checkpoint of query"):
        run(rows_of(spark, tmp_path / "other"), first, tmp_path / "second", "append")
    # With its own checkpoint the query writes the batch, which is no other's.
    second = foreach_batch(sink, checkpoint_location=str(tmp_path / "second"))
    run(rows_of(spark, tmp_path / "other"), second, tmp_path / "second", "append")
    with sqlite3.connect(tmp_path / "a.db") as database:
        ids = [row[0] for row in database.execute("SELECT id FROM rows ORDER BY id")]
    assert ids == list(range(20))


def test_a_function_that_writes_by_itself_and_returns_nothing_is_told_what_to_return(
    spark: SparkSession, tmp_path: Path
) -> None:
    feed(spark, tmp_path / "in", 0, 10)
    checkpoint = tmp_path / "checkpoint"
    sink = SQLiteSink(str(tmp_path / "a.db"), table="rows", create=True)

    def writes(batch: DataFrame, _: int) -> Any:
        batch.count()

    function = foreach_batch(sink, writes, checkpoint_location=str(checkpoint))
    with pytest.raises(StreamingQueryException, match="returned None, but must return the Data"):
        run(rows_of(spark, tmp_path / "in"), function, checkpoint, "append")


@pytest.mark.slow
def test_a_function_that_forgets_a_table_is_told_what_it_returned_and_nothing_is_written(
    spark: SparkSession, tmp_path: Path
) -> None:
    feed(spark, tmp_path / "in", 0, 10)
    file = tmp_path / "a.db"
    sinks = {name: SQLiteSink(str(file), table=name, create=True) for name in ("a", "b")}
    function = foreach_batch(
        sinks, lambda batch, _: {"a": batch}, checkpoint_location=str(tmp_path / "checkpoint")
    )
    with pytest.raises(
        StreamingQueryException,
        match="returned DataFrames for a, but must return a mapping with a DataFrame for each of a",
    ):
        run(rows_of(spark, tmp_path / "in"), function, tmp_path / "checkpoint", "append")
    assert not file.exists()


def test_sinks_without_a_function_that_tells_them_apart_are_refused(tmp_path: Path) -> None:
    sinks = {name: SQLiteSink(f"{tmp_path}/{name}.db", table=name) for name in ("a", "b")}
    with pytest.raises(ConfigError, match="for each of a, b"):
        foreach_batch(sinks, checkpoint_location=str(tmp_path))


def test_another_database_in_the_first_place_is_refused_and_nothing_is_doubled(
    spark: SparkSession, tmp_path: Path
) -> None:
    checkpoint = tmp_path / "checkpoint"
    feed(spark, tmp_path / "in", 0, 10)

    def sink(name: str) -> SQLiteSink:
        return SQLiteSink(str(tmp_path / f"{name}.db"), table="rows", create=True)

    def write(**sinks: SQLiteSink) -> None:
        function = foreach_batch(
            sinks,
            lambda batch, _: dict.fromkeys(sinks, batch),
            checkpoint_location=str(checkpoint),
        )
        run(rows_of(spark, tmp_path / "in"), function, checkpoint, "append")

    def ids(name: str) -> list[int]:
        with sqlite3.connect(tmp_path / f"{name}.db") as database:
            return [row[0] for row in database.execute("SELECT id FROM rows ORDER BY id")]

    write(a=sink("a"), b=sink("b"))
    # The batch comes again: it is decided, as only the first one's database knows.
    forget_last_batch(checkpoint)
    with pytest.raises(StreamingQueryException, match="'b' first, but sink 'a' keeps"):
        write(b=sink("b"), a=sink("a"))
    with pytest.raises(StreamingQueryException, match="another database"):
        write(a=sink("c"), b=sink("b"))
    with pytest.raises(StreamingQueryException, match="another database"):
        write(a=sink("b"), b=sink("a"))
    write(a=sink("a"), b=sink("b"))
    assert ids("a") == ids("b") == list(range(10))
