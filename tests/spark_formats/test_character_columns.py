"""Columns of Spark that have no type of their own in a DataFrame: CHAR, VARCHAR, and void."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from pyspark.sql import DataFrame, SparkSession

from onceflow import connectors

pytestmark = pytest.mark.spark


@pytest.fixture
def characters(spark: SparkSession, tmp_path: Path) -> Iterator[DataFrame]:
    """A table's rows: Spark pads its CHAR column."""
    location = f"LOCATION '{tmp_path / 'table'}'"
    spark.sql(f"CREATE TABLE letters (n BIGINT, c CHAR(5), v VARCHAR(3)) USING parquet {location}")
    spark.sql("INSERT INTO letters VALUES (1, 'ab', 'xyz'), (2, NULL, ''), (3, 'üñß', ' x ')")
    yield spark.table("letters")
    spark.sql("DROP TABLE letters")


def _write(frame: DataFrame, path: Path, file_format: str) -> list[dict[str, object]]:
    """Write `frame` by the format, and return what another reader finds, by column `n`."""
    connectors.register(frame.sparkSession)
    options = {"path": str(path), "fileFormat": file_format, "txnAppId": "c", "txnVersion": "1"}
    frame.write.format("onceflow-files").mode("append").options(**options).save()
    rows: list[dict[str, object]] = []
    for file in path.glob(f"part-*.{file_format}"):
        if file_format == "parquet":
            rows += pq.ParquetFile(file).read().to_pylist()
        else:
            rows += map(json.loads, file.read_text().splitlines())
    return sorted(rows, key=lambda row: str(row["n"]))


@pytest.mark.parametrize("file_format", ["parquet", "json"])
def test_padded_and_short_text_is_read_back_as_spark_has_it(
    characters: DataFrame, file_format: str, tmp_path: Path
) -> None:
    assert _write(characters, tmp_path / "out", file_format) == [
        {"n": 1, "c": "ab   ", "v": "xyz"},
        {"n": 2, "c": None, "v": ""},
        {"n": 3, "c": "üñß  ", "v": " x "},
    ]


@pytest.mark.parametrize("file_format", ["parquet", "json"])
def test_void_column_is_read_back_as_nulls(
    spark: SparkSession, file_format: str, tmp_path: Path
) -> None:
    frame = spark.sql("SELECT n, NULL AS e FROM VALUES (1L), (2L) AS t(n)")
    written = _write(frame, tmp_path / "out", file_format)
    assert written == [{"n": 1, "e": None}, {"n": 2, "e": None}]
