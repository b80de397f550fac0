"""`mode("overwrite")` and output mode `complete`: old rows, or new ones, and nothing in between."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from tests.integration.postgres_sink_kit import query
from tests.spark_formats.batches import SCHEMA, Driver, killed_at
from tests.spark_formats.test_batch_kills import POINTS
from tests.spark_formats.test_decided_rows import SLOW, Target, on_all, target_of

from onceflow import connectors
from onceflow.connectors.spark.arrow_rows import spark_schema
from onceflow.connectors.spark.batch.writer import batch_writer
from onceflow.connectors.spark.formats import FilesFormat, KafkaFormat, PostgresFormat
from onceflow.core.crash_points import CrashPoint
from onceflow.core.errors import ConfigError

OLD, NEW = list(range(5)), list(range(3, 9))


def replacing(target: Target) -> Driver:
    """Return the driver of batches that replace the rows of the target's table."""
    return replace(target.driver, target=replace(target.driver.target, replaces=True))


@pytest.mark.integration
@on_all
@pytest.mark.parametrize("point", POINTS)
def test_a_killed_batch_that_replaces_a_table_leaves_the_old_rows_or_the_new(
    kind: str, point: CrashPoint, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """When it comes again it has replaced them once: what others added since is there."""
    target = target_of(kind, request, tmp_path)
    driver = replacing(target)
    driver.batch(0, OLD)
    killed_at(point, tmp_path, lambda: driver.batch(1, NEW[:3], NEW[3:]))
    after_kill = target.ids()
    assert after_kill in (OLD, NEW)
    decided = driver.plan(1).decided
    assert decided == (after_kill == NEW)
    if decided:
        target.query("INSERT INTO ledger VALUES (99, 'another', 1)")
    driver.batch(1, NEW, [], fingerprint="offsets of 1")
    assert target.ids() == (NEW + [99] * decided)
    assert not driver.in_doubt()


@pytest.mark.integration
@on_all
def test_a_reader_never_sees_a_table_empty_that_is_replaced(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    target = target_of(kind, request, tmp_path)
    driver, old, new = replacing(target), 3_000, 8_000
    driver.batch(0, range(old))
    plan = driver.plan(1)
    reports = [driver.task(plan, index, range(index, new, 4)) for index in range(4)]
    assert target.count_during(lambda: driver.commit(reports)) == {old, new}


@pytest.mark.integration
@pytest.mark.parametrize("kind", ["postgres", *SLOW[:2]])
def test_a_table_whose_rows_take_those_of_others_with_them_is_not_replaced(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    target = target_of(kind, request, tmp_path)
    driver = replacing(target)
    driver.batch(0, OLD)
    target.query(
        "CREATE TABLE items (id bigint PRIMARY KEY, ledger bigint, CONSTRAINT of_ledger"
        " FOREIGN KEY (ledger) REFERENCES ledger (id) ON DELETE CASCADE)"
    )
    target.query("INSERT INTO items VALUES (1, 1)")
    with pytest.raises(ConfigError, match="foreign key of_ledger of items. Nothing was changed"):
        driver.batch(1, NEW)
    assert target.ids() == OLD
    assert len(target.query("SELECT * FROM items")) == 1


@pytest.mark.spark
@pytest.mark.integration
@pytest.mark.only_proof
def test_overwrite_and_complete_replace_the_rows_as_with_sparks_own_formats(
    spark: SparkSession, postgres_database: str, tmp_path: Path
) -> None:
    connectors.register(spark)
    url, staging = postgres_database, str(tmp_path / "staging")

    def overwrite(rows: str, version: int) -> list[tuple[str, int]]:
        (
            spark.sql(rows)
            .write.format("onceflow-postgres")
            .mode("overwrite")
            .options(url=url, dbtable="totals", createTable="true", truncate="true")
            .options(txnAppId="totals", txnVersion=str(version), stagingLocation=staging)
            .save()
        )
        return query(url, "SELECT account, n FROM totals ORDER BY account")

    first = "SELECT * FROM VALUES ('a', 1L), ('b', 2L) AS t(account, n)"
    assert overwrite(first, 1) == [("a", 1), ("b", 2)]
    query(url, "INSERT INTO totals VALUES ('c', 3)")
    assert overwrite(first, 1) == [("a", 1), ("b", 2), ("c", 3)], "the same write, repeated"
    assert overwrite("SELECT 'd' AS account, 4L AS n", 2) == [("d", 4)]
    assert overwrite(f"{first} WHERE n > 9", 3) == []

    for turn in range(2):
        spark.range(turn * 10, turn * 10 + 10).selectExpr(
            "concat('acct-', id % 3) AS account"
        ).write.parquet(str(tmp_path / f"in/{turn}"))
        read = spark.readStream.schema("account string").parquet(str(tmp_path / "in/*"))
        started = (
            read.groupBy("account")
            .count()
            .withColumnRenamed("count", "n")
            .writeStream.format("onceflow-postgres")
            .outputMode("complete")
            .options(url=url, dbtable="totals", checkpointLocation=str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        assert started.awaitTermination(100)
        found = query(url, "SELECT account, n FROM totals ORDER BY account")
        assert sum(int(n) for _, n in found) == (turn + 1) * 10
        assert [account for account, _ in found] == ["acct-0", "acct-1", "acct-2"]


@pytest.mark.parametrize(
    ("made", "more", "said"),
    [
        (
            KafkaFormat,
            {"kafka.bootstrap.servers": "h:9", "topic": "t"},
            "A topic keeps its records",
        ),
        (FilesFormat, {"path": "/tmp/none"}, "Write to a new directory"),
        (PostgresFormat, {"commitmode": "two_phase"}, "Leave commitMode out"),
        (PostgresFormat, {"writemode": "update", "primarykey": "id"}, "insert or upsert"),
        (PostgresFormat, {"tablecolumn": "account"}, "each table by itself"),
        (PostgresFormat, {"staginglocation": ""}, "Give option stagingLocation"),
    ],
)
def test_what_cannot_be_replaced_in_one_step_is_refused_by_name(
    made: type[KafkaFormat | FilesFormat | PostgresFormat],
    more: dict[str, str],
    said: str,
    tmp_path: Path,
) -> None:
    options = {"staginglocation": str(tmp_path), "txnappid": "a", "txnversion": "1"}
    if made is PostgresFormat:
        options |= {"url": "postgresql://nobody@nowhere/none", "dbtable": "t"}
    with pytest.raises(ConfigError, match=rf"mode\('overwrite'\).*{said}"):
        given = {name: value for name, value in (options | more).items() if value}
        batch_writer(made.make_sink, given, spark_schema(SCHEMA), overwrite=True)
