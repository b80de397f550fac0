"""DataFrames of more partitions than a Postgres server has prepared transactions."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import psycopg
import pyarrow as pa
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from tests.integration.postgres_sink_kit import ids_in, prepared, query
from tests.spark_formats.batches import SCHEMA, Driver, driver_of, killed_at, rows

from onceflow import connectors
from onceflow.connectors.spark.batch.commits import BatchTarget, TaskReport
from onceflow.connectors.spark.batch.identity import staging_area
from onceflow.connectors.spark.batch.sink_group import SinkGroup, group_schema
from onceflow.connectors.spark.batch.task_writer import TaskIdentity, write_task
from onceflow.core.crash_points import CrashPoint
from onceflow.core.errors import SinkError
from onceflow.core.spi import OnBadRow
from onceflow.core.spi.dead_letters import DEAD_LETTERS
from onceflow.core.spi.staging import is_staged
from onceflow.integration.servers import EmbeddedPostgres
from onceflow.integration.servers.postgres import create_database
from onceflow.sinks import PostgresSink

pytestmark = [pytest.mark.spark, pytest.mark.integration]


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedPostgres]:
    """Return a server that holds three prepared transactions."""
    with EmbeddedPostgres({"max_prepared_transactions": "3"}) as server:
        yield server


@pytest.fixture
def url(server: EmbeddedPostgres) -> str:
    """Return the url of a new database with an empty table `ledger`."""
    name = f"room_{uuid.uuid4().hex[:8]}"
    create_database(server.url, name)
    url = server.database_url(name)
    query(url, "CREATE TABLE ledger (id bigint PRIMARY KEY, account text, amount int)")
    return url


def save(spark: SparkSession, url: str, ids: str, **options: str) -> None:
    """Write eight rows in as many partitions."""
    connectors.register(spark)
    (
        spark.range(8, numPartitions=8)
        .selectExpr(f"{ids} AS id")
        .write.format("onceflow-postgres")
        .mode("append")
        .options(url=url, dbtable="ledger", **options)
        .save()
    )


def test_save_of_more_partitions_than_can_be_prepared_names_what_to_do(
    spark: SparkSession, url: str
) -> None:
    with pytest.raises(PySparkException) as refused:
        save(spark, url, "id")
    text = str(refused.value)
    assert "max_prepared_transactions = 3, 0 in use by others" in text
    assert "Give option stagingLocation" in text
    assert ".coalesce(3)" in text
    assert (text.count("PreparedLimitReached: "), len(text) < 2_000) == (1, True), text
    assert (ids_in(url), prepared(url)) == ([], [])


def test_save_with_a_staging_location_takes_any_number_of_partitions_all_or_nothing(
    spark: SparkSession, url: str, tmp_path: Path
) -> None:
    """The row that the table refuses is in a partition that finds no room."""
    query(url, "INSERT INTO ledger VALUES (7)")
    token = {"txnAppId": "nightly", "txnVersion": "1", "stagingLocation": str(tmp_path)}
    with pytest.raises(PySparkException, match=r"Key \(id\)=\(7\) already exists"):
        save(spark, url, "id", **token)
    assert (ids_in(url), prepared(url)) == ([7], [])
    for _ in range(2):
        save(spark, url, "id + 10", **token)
    assert (ids_in(url), prepared(url)) == ([7, *range(10, 18)], [])


def test_tasks_leave_alone_the_room_that_others_use(url: str, tmp_path: Path) -> None:
    driver = driver_of(PostgresSink(url, table="ledger"), tmp_path)
    plan = driver.plan(0)
    with psycopg.connect(url, autocommit=True) as other:
        other.execute("BEGIN; INSERT INTO ledger VALUES (99); PREPARE TRANSACTION 'of another'")
        reports = [driver.task(plan, index, [index]) for index in range(4)]
        other.execute("ROLLBACK PREPARED 'of another'")
    staged = [is_staged(committable) for report in reports for committable in report.committables]
    assert staged == [False, False, True, True]
    driver.commit(reports)
    assert (ids_in(url), prepared(url)) == ([0, 1, 2, 3], [])


@pytest.mark.parametrize("point", ["logged", "committed"])
def test_a_killed_batch_of_prepared_and_staged_rows_is_completed_by_the_next_run(
    url: str, tmp_path: Path, point: CrashPoint
) -> None:
    driver = driver_of(PostgresSink(url, table="ledger"), tmp_path)
    killed_at(point, tmp_path, lambda: driver.batch(0, *([index] for index in range(5))))
    assert driver.plan(0).decided
    assert (ids_in(url), prepared(url)) == ([0, 1, 2, 3, 4], [])
    assert not driver.in_doubt()


def test_rows_staged_for_want_of_room_where_the_driver_does_not_look_are_not_decided(
    url: str, tmp_path: Path
) -> None:
    driver = driver_of(PostgresSink(url, table="ledger"), tmp_path / "shared")
    plan = driver.plan(0)
    elsewhere = driver_of(PostgresSink(url, table="ledger"), tmp_path / "elsewhere").target.staging
    away = replace(plan, target=replace(plan.target, staging=elsewhere))
    reports = [driver.task(away, index, [index]) for index in range(4)]
    with pytest.raises(SinkError, match="a directory or URL that driver and executors share"):
        driver.commit(reports)
    driver.abort(plan)
    assert (ids_in(url), prepared(url)) == ([], [])


def test_dead_letters_count_where_the_server_has_room_for_some_of_a_batch(
    url: str, tmp_path: Path
) -> None:
    """Both tasks have opened all of their transactions before the first one is prepared."""
    staging = partial(staging_area, str(tmp_path))
    group = SinkGroup(
        {
            "rows": PostgresSink(url, table="ledger"),
            "letters": PostgresSink(url, table="letters", create=True),
        },
        staging,
    )
    target = BatchTarget(group, "events-1", "Spark query q", "q", staging("events-1"))
    schema = group_schema({"rows": SCHEMA, "letters": DEAD_LETTERS})
    driver = Driver(target, schema, rows)
    plan = driver.plan(0)
    parts = {
        name: replace(
            plan.target,
            sink=sink,
            sink_id=group.part_id("events-1", name),
            staging=group.staging(group.part_id("events-1", name)),
            on_bad_row=OnBadRow.DEAD_LETTER,
        )
        for name, sink in group.parts.items()
    }
    told = replace(plan, target=parts["rows"], dead_letters=parts["letters"])
    reports: list[TaskReport] = []

    def task(number: int) -> None:
        place = TaskIdentity(number, 0, number, batch=0)
        reports.append(write_task(told, place, parts_of(number)))

    def parts_of(number: int) -> Iterator[pa.RecordBatch]:
        too_large = pa.array([1, 2**40], pa.int64())
        yield rows([number, number + 10]).set_column(2, SCHEMA.field(2), too_large)
        if number == 0:
            task(1)

    task(0)
    committables = [committable for report in reports for committable in report.committables]
    assert [is_staged(committable) for committable in committables].count(True) == 1
    assert len(prepared(url)) == 3
    driver.commit(reports)
    assert (ids_in(url), prepared(url)) == ([0, 1], [])
    assert len(query(url, "SELECT * FROM letters")) == 2
