"""Spark's types in a DataFrame that a job reads: each value reaches the sink as it was."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession
from tests.support import spark_values
from tests.support.directory_sink import DirectorySink
from tests.support.exact_values import Instant, exact_values, same

from onceflow import Checkpointing, JobState, LocalProcesses, NoRestart, Pipeline
from onceflow.core.errors import ConfigError, DataFrameFailed
from onceflow.core.plan.dataframe_source import DataFrameSource
from onceflow.core.protocol.ids import AttemptId
from onceflow.core.spi import EndOfInput, ReaderContext
from onceflow.core.storage import FileSystemStorage

pytestmark = pytest.mark.spark


@pytest.fixture(autouse=True)
def session(spark: SparkSession) -> Iterator[None]:
    with spark_values.session_zone(spark, spark_values.ZONE):
        yield


def _source(frame: DataFrame, directory: Path) -> DataFrameSource:
    storage = FileSystemStorage(str(directory / "checkpoints"))
    return DataFrameSource.of(frame.coalesce(1), storage, "cells", "rows")


def _read(source: DataFrameSource) -> pa.Table:
    """Return all rows, as one subtask reads them."""
    reader = source.reader(source.splits(), ReaderContext("cells", "rows", 0, 1, AttemptId(1)))
    batches: list[pa.RecordBatch] = []
    while not isinstance(batch := reader.poll(1.0), EndOfInput):
        if isinstance(batch, pa.RecordBatch):
            batches.append(batch)
    reader.close()
    return pa.Table.from_batches(batches, source.schema)


def _require_same(
    rows: pa.Table,
    columns: tuple[spark_values.SparkColumn, ...],
    values: Mapping[str, list[object]],
) -> None:
    places = rows["n"].to_pylist()
    altered: list[str] = []
    for at, column in enumerate(columns):
        read = dict(zip(places, exact_values(rows[f"c{at}"]), strict=True))
        altered += [
            f"{column.name}: {written!r:.90} was read as {read[row]!r:.90}"
            for row, written in enumerate(values[f"c{at}"])
            if not same(read[row], written)
        ]
    assert altered == []


_COLUMNS = (*spark_values.SCALARS, *spark_values.NESTED)


def test_values_of_a_dataframe_are_what_spark_has(spark: SparkSession, tmp_path: Path) -> None:
    table = spark_values.spark_table(spark, spark_values.SHORT)
    _require_same(_read(_source(table.frame, tmp_path)), spark_values.SHORT, table.values)


_TIMES = (
    "DATE",
    "TIMESTAMP",
    "TIMESTAMP beyond INT96",
    "TIMESTAMP_NTZ",
    "DECIMAL(5, 2)",
    "map of TIMESTAMP",
)
_ALTERING = {
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MILLIS",
    "spark.sql.parquet.int96RebaseModeInWrite": "LEGACY",
    "spark.sql.parquet.datetimeRebaseModeInWrite": "LEGACY",
}


def test_a_setting_of_the_session_that_alters_times_is_refused_by_name(
    spark: SparkSession, tmp_path: Path
) -> None:
    source = _source(spark.sql("SELECT 1 AS n, array(DATE'0001-01-01') AS days"), tmp_path)
    for name, value in _ALTERING.items():
        with (
            spark_values.session_setting(spark, name, value),
            pytest.raises(ConfigError, match=f"{name}={value}"),
        ):
            source.splits()


def test_other_settings_of_the_session_alter_no_value(spark: SparkSession, tmp_path: Path) -> None:
    columns = tuple(one for one in (*_COLUMNS, spark_values.BEYOND_INT96) if one.name in _TIMES)
    assert len(columns) == len(_TIMES)
    table = spark_values.spark_table(spark, columns)
    with (
        spark_values.session_setting(
            spark, "spark.sql.parquet.outputTimestampType", "TIMESTAMP_MICROS"
        ),
        spark_values.session_setting(spark, "spark.sql.parquet.writeLegacyFormat", "true"),
    ):
        _require_same(_read(_source(table.frame, tmp_path)), columns, table.values)


def test_a_timestamp_that_int96_does_not_keep_is_refused_by_its_column(
    spark: SparkSession, tmp_path: Path
) -> None:
    at = "timestamp_micros(us)"
    columns = f"{at} AS a, array({at}, NULL) AS b, map(1, array(struct({at}))) AS `it's`"

    def frame(*microseconds: int) -> DataFrame:
        listed = ", ".join(f"(CAST('{us}' AS BIGINT))" for us in microseconds)
        return spark.sql(f"SELECT {columns} FROM VALUES {listed} AS t(us)")

    rows = _read(_source(frame(spark_values.INT96_FIRST, spark_values.INT96_LAST), tmp_path))
    for column in rows.column_names:
        for us in (spark_values.INT96_FIRST, spark_values.INT96_LAST):
            assert repr(Instant(us * 1_000)) in repr(exact_values(rows[column]))
    for column, us in {
        "a": spark_values.INT96_FIRST - 1,
        "b": spark_values.INT96_LAST + 1,
        "it's": -(2**63),
    }.items():
        with pytest.raises(DataFrameFailed, match=f"{column}.* holds a timestamp before"):
            _source(frame(us).select(f"`{column}`"), tmp_path).splits()


@pytest.mark.servers
def test_values_of_a_dataframe_reach_the_sink_as_they_were(
    spark: SparkSession, tmp_path: Path
) -> None:
    table = spark_values.spark_table(spark, _COLUMNS)
    sink = DirectorySink(str(tmp_path / "out"))
    pipeline = Pipeline(
        LocalProcesses(),
        name="cells",
        checkpointing=Checkpointing(storage=str(tmp_path / "checkpoints")),
        restart=NoRestart(),
    )
    pipeline.read(table.frame, uid="rows").write(sink, uid="out")
    assert pipeline.run(90).state is JobState.FINISHED
    paths = (tmp_path / "out" / "committed").iterdir()
    rows = pa.concat_tables(pa.ipc.open_file(path).read_all() for path in paths)
    _require_same(rows, _COLUMNS, table.values)


@pytest.mark.parametrize(
    "expression",
    [
        "INTERVAL '1' DAY",
        "INTERVAL '1-2' YEAR TO MONTH",
        "CAST('12:00:00' AS TIME(6))",
        "parse_json('{\"a\": 1}')",
        "NULL",
        "array(NULL)",
        "named_struct('a', INTERVAL '1' DAY)",
    ],
)
def test_a_type_that_no_batch_holds_is_refused_by_its_column(
    spark: SparkSession, tmp_path: Path, expression: str
) -> None:
    frame = spark.sql(f"SELECT 1 AS n, {expression} AS odd")
    with pytest.raises(ConfigError, match="column 'odd'"):
        _source(frame, tmp_path)


def test_a_field_of_any_name_is_read(spark: SparkSession, tmp_path: Path) -> None:
    names = ["a b", "é", "9", "a:INT,b", "b`c", "not", "A.b", "a"]
    parts = ", ".join(f"'{name}', '{number}'" for number, name in enumerate(names))
    frame = spark.sql(f"SELECT named_struct({parts}) AS s")
    (row,) = _read(_source(frame, tmp_path)).to_pylist()
    assert row == {"s": {name: str(number) for number, name in enumerate(names)}}
