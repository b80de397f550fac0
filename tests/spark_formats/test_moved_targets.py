"""A query that is started again with another table, database, directory or topic than before."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from tests.integration.kafka_sink_kit import ids_in
from tests.spark_formats.test_stream_sink import feed, input_of
from tests.spark_formats.write_cases import (
    MakeCase,
    WriteCase,
    files_case,
    kafka_case,
    mysql_case,
    postgres_case,
    sqlite_case,
    sqlite_ids,
)

from onceflow import connectors
from onceflow.integration.servers.kinds import make_kafka
from onceflow.sinks import SQLiteSink

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]
SLOW = pytest.mark.slow
REFUSED = "the earlier rows would be in one target and the later rows in another"


@pytest.fixture(autouse=True)
def formats(spark: SparkSession) -> None:
    connectors.register(spark)


def run(frame: DataFrame, case: WriteCase, checkpoint: Path) -> None:
    kept = {name: value for name, value in case.options.items() if not name.startswith("txn")}
    started = (
        frame.selectExpr("id", "'a' AS account", "part AS amount")
        .writeStream.format(case.format)
        .options(**kept, checkpointLocation=str(checkpoint))
        .trigger(availableNow=True)
        .start()
    )
    assert started.awaitTermination(120)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(sqlite_case, id="sqlite", marks=pytest.mark.only_proof),
        pytest.param(postgres_case, id="postgres", marks=[pytest.mark.integration, SLOW]),
        pytest.param(mysql_case, id="mysql", marks=[pytest.mark.integration, SLOW]),
        pytest.param(kafka_case, id="kafka", marks=[pytest.mark.integration, SLOW]),
    ],
)
def test_a_query_that_comes_with_another_table_or_topic_is_refused_until_the_note_is_deleted(
    request: pytest.FixtureRequest, tmp_path: Path, spark: SparkSession, make: MakeCase
) -> None:
    checkpoint = tmp_path / "checkpoint"
    former, other = (make(request, tmp_path, name) for name in ("former", "other"))
    feed(spark, tmp_path / "in", 0, 10)
    run(input_of(spark, tmp_path / "in"), former, checkpoint)
    feed(spark, tmp_path / "in", 10, 20)
    for _ in range(2):
        with pytest.raises(StreamingQueryException, match=REFUSED):
            run(input_of(spark, tmp_path / "in"), other, checkpoint)
    run(input_of(spark, tmp_path / "in"), former, checkpoint)
    assert former.ids() == list(range(20))
    (checkpoint / "onceflow" / "targets.json").unlink()
    feed(spark, tmp_path / "in", 20, 30)
    run(input_of(spark, tmp_path / "in"), other, checkpoint)
    assert former.ids() == list(range(20))
    assert other.ids() == list(range(20, 30))


@pytest.mark.servers
def test_a_query_that_comes_with_another_database_is_refused_and_one_that_was_moved_goes_on(
    request: pytest.FixtureRequest, tmp_path: Path, spark: SparkSession
) -> None:
    checkpoint, moved = tmp_path / "checkpoint", tmp_path / "moved.db"
    former = sqlite_case(request, tmp_path, "orders")
    other = replace(former, options={**former.options, "url": str(moved)})
    feed(spark, tmp_path / "in", 0, 10)
    run(input_of(spark, tmp_path / "in"), former, checkpoint)
    feed(spark, tmp_path / "in", 10, 20)
    for _ in range(2):
        with pytest.raises(StreamingQueryException, match=REFUSED):
            run(input_of(spark, tmp_path / "in"), other, checkpoint)
    with closing(sqlite3.connect(former.options["url"])) as database:
        # Not by the file's name: Spark's processes have it open, and part of it is in its log.
        database.execute(f"VACUUM INTO '{moved}'")
    run(input_of(spark, tmp_path / "in"), other, checkpoint)
    assert sqlite_ids(moved, "orders") == list(range(20))


@pytest.mark.servers
def test_a_moved_checkpoint_is_refused_until_its_query_has_its_old_sink_id(
    request: pytest.FixtureRequest, tmp_path: Path, spark: SparkSession
) -> None:
    """A directory does not tell which query a sink id belongs to."""
    case = files_case(request, tmp_path, "out")
    feed(spark, tmp_path / "in", 0, 10)
    run(input_of(spark, tmp_path / "in"), case, tmp_path / "checkpoint")
    (tmp_path / "checkpoint").rename(tmp_path / "moved")
    feed(spark, tmp_path / "in", 10, 20)
    with pytest.raises(StreamingQueryException, match="give it option sinkId=") as refused:
        run(input_of(spark, tmp_path / "in"), case, tmp_path / "moved")
    sink_id = re.findall(r"sinkId=(checkpoint-\w+)", str(refused.value))[0]
    again = replace(case, options={**case.options, "sinkid": sink_id})
    run(input_of(spark, tmp_path / "in"), again, tmp_path / "moved")
    assert case.ids() == list(range(20))


@pytest.mark.servers
def test_a_mistaken_target_that_took_no_rows_may_be_corrected(
    request: pytest.FixtureRequest, tmp_path: Path, spark: SparkSession
) -> None:
    mistaken, meant = (sqlite_case(request, tmp_path, name) for name in ("mistaken", "meant"))
    too_few = replace(mistaken, options={**mistaken.options, "createtable": "false"})
    feed(spark, tmp_path / "in", 0, 10)
    with pytest.raises(StreamingQueryException, match="mistaken"):
        run(input_of(spark, tmp_path / "in"), too_few, tmp_path / "checkpoint")
    run(input_of(spark, tmp_path / "in"), meant, tmp_path / "checkpoint")
    assert meant.ids() == list(range(10))


@pytest.mark.servers
@pytest.mark.integration
def test_a_query_that_comes_with_another_kafka_cluster_is_refused_and_writes_nothing_there(
    request: pytest.FixtureRequest, tmp_path: Path, spark: SparkSession
) -> None:
    former = kafka_case(request, tmp_path, "former")
    feed(spark, tmp_path / "in", 0, 10)
    run(input_of(spark, tmp_path / "in"), former, tmp_path / "checkpoint")
    feed(spark, tmp_path / "in", 10, 20)
    with make_kafka() as elsewhere:
        elsewhere.create_topic(former.options["topic"], 1)
        servers = elsewhere.bootstrap_servers
        options = {**former.options, "kafka.bootstrap.servers": servers}
        with pytest.raises(StreamingQueryException, match=REFUSED):
            run(
                input_of(spark, tmp_path / "in"),
                replace(former, options=options),
                tmp_path / "checkpoint",
            )
        assert ids_in(servers, former.options["topic"]) == []
    run(input_of(spark, tmp_path / "in"), former, tmp_path / "checkpoint")
    assert former.ids() == list(range(20))


@pytest.mark.servers
def test_a_query_that_comes_with_another_directory_is_refused_and_one_that_was_moved_goes_on(
    request: pytest.FixtureRequest, tmp_path: Path, spark: SparkSession
) -> None:
    checkpoint = tmp_path / "checkpoint"
    former, other, moved = (files_case(request, tmp_path, one) for one in ("out", "other", "moved"))
    feed(spark, tmp_path / "in", 0, 10)
    run(input_of(spark, tmp_path / "in"), former, checkpoint)
    feed(spark, tmp_path / "in", 10, 20)
    with pytest.raises(StreamingQueryException, match=REFUSED):
        run(input_of(spark, tmp_path / "in"), other, checkpoint)
    (tmp_path / "out").rename(tmp_path / "moved")
    run(input_of(spark, tmp_path / "in"), moved, checkpoint)
    assert moved.ids() == list(range(20))


@pytest.mark.servers
def test_a_mistaken_table_of_foreach_batch_that_took_no_rows_may_be_corrected(
    tmp_path: Path, spark: SparkSession
) -> None:
    checkpoint, file = tmp_path / "checkpoint", tmp_path / "a.db"

    def run_into(table: str, rows: Callable[[DataFrame, int], DataFrame]) -> None:
        sink = SQLiteSink(str(file), table=table, create=True)
        started = (
            input_of(spark, tmp_path / "in")
            .writeStream.foreachBatch(
                connectors.foreach_batch(sink, rows, checkpoint_location=str(checkpoint))
            )
            .option("checkpointLocation", str(checkpoint))
            .trigger(availableNow=True)
            .start()
        )
        assert started.awaitTermination(120)

    feed(spark, tmp_path / "in", 0, 10)
    with pytest.raises(StreamingQueryException, match="DIVIDE_BY_ZERO"):
        run_into("mistaken", lambda batch, _: batch.selectExpr("id / (id - id) AS id"))
    run_into("meant", lambda batch, _: batch)
    assert sqlite_ids(file, "meant") == list(range(10))


@pytest.mark.servers
def test_each_sink_of_foreach_batch_keeps_its_table_and_others_may_be_added(
    tmp_path: Path, spark: SparkSession
) -> None:
    checkpoint, file = tmp_path / "checkpoint", tmp_path / "a.db"

    def run_into(tables: Mapping[str, str]) -> None:
        sinks = {
            name: SQLiteSink(str(file), table=table, create=True) for name, table in tables.items()
        }
        function = connectors.foreach_batch(
            sinks,
            lambda batch, _: dict.fromkeys(sinks, batch),
            checkpoint_location=str(checkpoint),
        )
        started = (
            input_of(spark, tmp_path / "in")
            .writeStream.foreachBatch(function)
            .option("checkpointLocation", str(checkpoint))
            .trigger(availableNow=True)
            .start()
        )
        assert started.awaitTermination(120)

    feed(spark, tmp_path / "in", 0, 10)
    run_into({"a": "table_a", "b": "table_b"})
    feed(spark, tmp_path / "in", 10, 20)
    with pytest.raises(StreamingQueryException, match=REFUSED):
        run_into({"a": "table_a", "b": "another"})
    run_into({"a": "table_a", "b": "table_b", "c": "table_c"})
    assert sqlite_ids(file, "table_a") == sqlite_ids(file, "table_b") == list(range(20))
    assert sqlite_ids(file, "table_c") == list(range(10, 20))
