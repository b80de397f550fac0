"""Columns of Spark that have no type of their own in a DataFrame: CHAR, VARCHAR, and void."""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from tests.integration.kafka_sink_kit import messages
from tests.integration.sql.databases import DATABASES
from tests.support.stream_queries import run_to_end

from onceflow import connectors
from onceflow.integration.servers import KafkaServer

pytestmark = pytest.mark.spark

_COLUMNS = (
    "n BIGINT, c CHAR(5), v VARCHAR(3), a ARRAY<CHAR(2)>, s STRUCT<c: CHAR(2), v: VARCHAR(3)>"
)
_VALUES = """
    (1, 'ab', 'xyz', array('a', 'bc', NULL), named_struct('c', 'd', 'v', ' e ')),
    (2, NULL, '', array(), NULL),
    (3, 'üñß', ' x ', NULL, named_struct('c', NULL, 'v', NULL)),
    (4, 'abcde', '😀 ', array(''), named_struct('c', '😀', 'v', ''))
"""
_ROWS: list[dict[str, object]] = [
    {"n": 1, "c": "ab   ", "v": "xyz", "a": ["a ", "bc", None], "s": {"c": "d ", "v": " e "}},
    {"n": 2, "c": None, "v": "", "a": [], "s": None},
    {"n": 3, "c": "üñß  ", "v": " x ", "a": None, "s": {"c": None, "v": None}},
    {"n": 4, "c": "abcde", "v": "😀 ", "a": ["  "], "s": {"c": "😀 ", "v": ""}},
]
"""The rows as Spark shows them: it pads CHAR to its length, inside of arrays and structs, too."""
_ONCE = {"txnAppId": "c", "txnVersion": "1"}


@pytest.fixture
def letters(spark: SparkSession, tmp_path: Path) -> Iterator[str]:
    """The name of a table with the rows."""
    spark.sql(f"CREATE TABLE letters ({_COLUMNS}) USING parquet LOCATION '{tmp_path / 'table'}'")
    spark.sql(f"INSERT INTO letters VALUES {_VALUES}")
    connectors.register(spark)
    yield "letters"
    spark.sql("DROP TABLE letters")


def _read_files(directory: Path) -> list[dict[str, Any]]:
    """Return what another reader finds in the files of a sink, by column `n`."""
    rows: list[dict[str, Any]] = []
    for file in directory.glob("part-*"):
        if file.suffix == ".parquet":
            rows += pq.ParquetFile(file).read().to_pylist()
        else:
            rows += map(json.loads, file.read_text().splitlines())
    return sorted(rows, key=lambda row: str(row["n"]))


def _save(frame: DataFrame, name: str, **options: str) -> None:
    connectors.register(frame.sparkSession)
    frame.write.format(name).mode("append").options(**options).save()


@pytest.mark.parametrize("file_format", ["parquet", "json"])
def test_padded_and_short_text_is_read_back_as_spark_has_it(
    spark: SparkSession, letters: str, file_format: str, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    _save(spark.table(letters), "onceflow-files", path=str(out), fileFormat=file_format, **_ONCE)
    assert _read_files(out) == _ROWS


@pytest.mark.parametrize("file_format", ["parquet", "json"])
def test_void_column_is_read_back_as_nulls(
    spark: SparkSession, file_format: str, tmp_path: Path
) -> None:
    frame = spark.sql("SELECT n, NULL AS e FROM VALUES (1L), (2L) AS t(n)")
    out = tmp_path / "out"
    _save(frame, "onceflow-files", path=str(out), fileFormat=file_format, **_ONCE)
    assert _read_files(out) == [{"n": 1, "e": None}, {"n": 2, "e": None}]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["onceflow-files", "onceflow-sqlite"])
def test_a_query_writes_padded_and_short_text_as_spark_has_it(
    spark: SparkSession, letters: str, name: str, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    files = name == "onceflow-files"
    where = {"path": str(out)} if files else {"url": str(out), "dbtable": "t"}
    rows = spark.readStream.table(letters).select("n", "c", "v")
    writer = rows.writeStream.format(name).options(**where)
    writer = writer.option("checkpointLocation", str(tmp_path / "checkpoint"))
    if not files:
        with closing(sqlite3.connect(out)) as database:
            database.execute("CREATE TABLE t (n INTEGER, c CHAR(5), v VARCHAR(3))")
    run_to_end(writer.trigger(availableNow=True).start)
    if files:
        found = [(row["n"], row["c"], row["v"]) for row in _read_files(out)]
    else:
        with closing(sqlite3.connect(out)) as database:
            found = database.execute("SELECT n, c, v FROM t ORDER BY n").fetchall()
    assert found == [(row["n"], row["c"], row["v"]) for row in _ROWS]


@pytest.mark.slow
@pytest.mark.parametrize("declared", ["text", "char(5)"])
@pytest.mark.parametrize(
    "name",
    [
        "sqlite",
        *(
            pytest.param(name, marks=pytest.mark.integration)
            for name in ("postgres", "mysql", "mariadb")
        ),
    ],
)
def test_padded_text_is_in_a_database_as_spark_has_it_or_its_row_was_dropped(
    request: pytest.FixtureRequest,
    spark: SparkSession,
    letters: str,
    name: str,
    declared: str,
    tmp_path: Path,
) -> None:
    """A database takes the blanks at the end of a char(n) for padding, SQLite does not."""
    create = f"CREATE TABLE t (n bigint, c {declared}, v varchar(3))"
    select = "SELECT n, c, v FROM t ORDER BY n"
    frame = spark.table(letters).select("n", "c", "v")
    options = {"dbtable": "t", "onBadRow": "drop", "stagingLocation": str(tmp_path / "staging")}
    if name == "sqlite":
        with closing(sqlite3.connect(tmp_path / "a.db")) as database:
            database.execute(create)
            _save(frame, "onceflow-sqlite", url=str(tmp_path / "a.db"), **options)
            found = database.execute(select).fetchall()
    else:
        url: str = request.getfixturevalue(f"{name}_database")
        store = next(kind for kind in DATABASES if kind.name == name)(url)
        store.query(create)
        kind = "postgres" if name == "postgres" else "mysql"
        _save(frame, f"onceflow-{kind}", url=url, **options)
        found = store.query(select)
    pads = declared == "char(5)" and name != "sqlite"
    kept = [row for row in _ROWS if not (pads and str(row["c"]).endswith(" "))]
    assert [tuple(row) for row in found] == [(row["n"], row["c"], row["v"]) for row in kept]


@pytest.mark.integration
@pytest.mark.slow
def test_padded_and_short_text_in_json_records_is_as_spark_has_it(
    spark: SparkSession,
    onceflow_kafka: KafkaServer,
    kafka_topic: Callable[[int], str],
    letters: str,
    tmp_path: Path,
) -> None:
    servers, topic = onceflow_kafka.bootstrap_servers, kafka_topic(1)
    frame = spark.table(letters)
    options = {"kafka.bootstrap.servers": servers, "topic": topic, "valueFormat": "json"}
    _save(frame, "onceflow-kafka", **options, stagingLocation=str(tmp_path / "staging"), **_ONCE)
    written = [json.loads(one.value() or b"") for one in messages(servers, topic)]
    assert sorted(written, key=lambda row: str(row["n"])) == _ROWS
    reader = spark.read.format("onceflow-kafka").option("kafka.bootstrap.servers", servers)
    reader = reader.options(subscribe=topic, valueFormat="json")
    as_text = reader.option("valueSchema", re.sub(r"(VAR)?CHAR\(\d\)", "STRING", _COLUMNS)).load()
    assert sorted(as_text.toArrow().to_pylist(), key=lambda row: str(row["n"])) == _ROWS
    with pytest.raises(PySparkException, match="the type 'char' is not one of"):
        reader.option("valueSchema", _COLUMNS).load()
