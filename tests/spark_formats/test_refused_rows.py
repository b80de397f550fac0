"""A row that breaks a constraint, met by `save()` in ledger mode, as its user sees it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from tests.integration.postgres_sink_kit import ids_in, query

from onceflow import connectors

pytestmark = [pytest.mark.spark, pytest.mark.integration]


def test_save_names_a_row_that_breaks_a_constraint_at_once_and_the_corrected_rows_are_written(
    spark: SparkSession, postgres_database: str, tmp_path: Path
) -> None:
    connectors.register(spark)
    query(
        postgres_database,
        "CREATE TABLE ledger (id bigint PRIMARY KEY)",
        "INSERT INTO ledger VALUES (7)",
    )

    def save(ids: str) -> None:
        (
            spark.range(1000, 1004, numPartitions=2)
            .selectExpr(f"{ids} AS id")
            .write.format("onceflow-postgres")
            .mode("append")
            .options(url=postgres_database, dbtable="ledger", commitMode="ledger")
            .options(txnAppId="nightly", txnVersion="1", stagingLocation=str(tmp_path))
            .save()
        )

    began = time.monotonic()
    with pytest.raises(PySparkException, match=r"Key \(id\)=\(7\) already exists") as refused:
        save("id - 1000 + 7")
    assert time.monotonic() - began < 40
    text = str(refused.value)
    assert (text.count("already exists"), len(text) < 2_500) == (1, True), text
    assert ids_in(postgres_database) == [7]
    save("id - 1000 + 8")
    save("id - 1000 + 8")
    assert ids_in(postgres_database) == [7, 8, 9, 10, 11]
