"""Spark's types through the formats: each value is read back as it was, or was refused by name.

One DataFrame holds all columns of a test. A session that is not in UTC writes and reads it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from tests.integration.kafka_sink_kit import messages
from tests.integration.sql.databases import DATABASES
from tests.integration.sql.round_trip_columns import MYSQL, POSTGRES, SQLITE, to_decimal
from tests.integration.sql.round_trips import SQLiteFile, Store, StoredAs
from tests.support.exact_values import Day, Instant, Local, exact_values, same
from tests.support.spark_values import (
    ARRAYS,
    BEYOND_INT96,
    NESTED,
    SCALARS,
    SHORT,
    TIMES,
    ZONE,
    SparkColumn,
    SparkTable,
    session_zone,
    spark_table,
)
from tests.support.stream_queries import run_to_end
from tests.unit.sinks.test_kafka_json_round_trips import restore

from onceflow import connectors
from onceflow.integration.servers import KafkaServer

pytestmark = pytest.mark.spark
_ONCE = {"txnAppId": "cells", "txnVersion": "1"}


@pytest.fixture(autouse=True)
def session(spark: SparkSession) -> Iterator[None]:
    connectors.register(spark)
    with session_zone(spark, ZONE):
        yield


def _save(frame: DataFrame, name: str, **options: str) -> None:
    frame.coalesce(1).write.format(name).mode("append").options(**options).save()


def _columns_of(rows: pa.Table) -> dict[str, list[object]]:
    """Return the columns of `rows` in the order of column `n`."""
    ordered = sorted(range(rows.num_rows), key=rows["n"].to_pylist().__getitem__)
    found: dict[str, list[object]] = {}
    for name in rows.column_names:
        values = exact_values(rows[name])
        found[name] = [values[row] for row in ordered]
    return found


def _require_same(table: SparkTable, read: Mapping[str, list[object]]) -> None:
    altered = [
        f"{column.name}: {written!r:.90} was read as {value!r:.90}"
        for at, column in enumerate(table.columns)
        for written, value in zip(table.values[f"c{at}"], read[f"c{at}"], strict=True)
        if not same(value, written)
    ]
    assert altered == []


# --- files --------------------------------------------------------------------------------------


def _read_files(directory: Path) -> dict[str, list[object]]:
    paths = [path for path in directory.rglob("*.parquet") if "_onceflow" not in path.parts]
    return _columns_of(pa.concat_tables(pq.ParquetFile(path).read() for path in paths))


@pytest.mark.parametrize(
    "nested",
    [pytest.param((), id="short"), pytest.param(NESTED, id="whole", marks=pytest.mark.servers)],
)
def test_values_in_files_and_rows_that_are_read_from_them_are_what_was_written(
    spark: SparkSession, tmp_path: Path, nested: tuple[SparkColumn, ...]
) -> None:
    table = spark_table(spark, (*SHORT, BEYOND_INT96, *TIMES, *nested))
    _save(table.frame, "onceflow-files", path=str(tmp_path / "out"), **_ONCE)
    _require_same(table, _read_files(tmp_path / "out"))
    frame = spark.read.format("onceflow-files").load(str(tmp_path / "out"))
    _require_same(table, _columns_of(frame.toArrow()))


@pytest.mark.servers
def test_a_query_writes_values_as_they_were(spark: SparkSession, tmp_path: Path) -> None:
    table = spark_table(spark, (*SCALARS, *NESTED))
    table.frame.coalesce(1).write.parquet(str(tmp_path / "in"))
    rows = spark.readStream.schema(table.frame.schema).parquet(str(tmp_path / "in"))
    writer = rows.writeStream.format("onceflow-files").option("path", str(tmp_path / "out"))
    writer = writer.option("checkpointLocation", str(tmp_path / "checkpoint"))
    run_to_end(writer.trigger(availableNow=True).start)
    _require_same(table, _read_files(tmp_path / "out"))


# --- databases ----------------------------------------------------------------------------------

_FIRST, _AFTER_LAST = -62_135_596_800 * 10**9, 253_402_300_800 * 10**9
_PARSED = {stored.declared: stored for part in POSTGRES.values() for stored in part}
_OF_MYSQL = {stored.declared: stored for part in MYSQL.values() for stored in part}
_OF_SQLITE = {stored.declared: stored for stored in SQLITE}


def _decimals(kind: str) -> dict[str, StoredAs]:
    names = [column.name for column in SCALARS if column.name.startswith("DECIMAL")]
    return {
        name: StoredAs(name.replace("DECIMAL", kind), means=to_decimal)
        for name in names
        if kind == "numeric" or "(38, 38)" not in name
    }


_IN_POSTGRES: dict[str, StoredAs] = {
    **_decimals("numeric"),
    **{
        name: _PARSED[declared]
        for name, declared in (
            *(("TINYINT", "smallint"), ("SMALLINT", "smallint"), ("INT", "integer")),
            *(("BIGINT", "bigint"), ("FLOAT", "real"), ("DOUBLE", "double precision")),
            *(("BOOLEAN", "boolean"), ("STRING", "text"), ("BINARY", "bytea"), ("DATE", "date")),
            *(("TIMESTAMP", "timestamptz"), ("TIMESTAMP_NTZ", "timestamp"), ("TIME(6)", "time")),
            *(("INTERVAL DAY TO SECOND", "interval"), ("array of BIGINT", "bigint[]")),
            *(("array of DOUBLE", "double precision[]"), ("array of STRING", "text[]")),
            *(("array of BINARY", "bytea[]"), ("array of DATE", "date[]")),
            *(("array of TIMESTAMP_NTZ", "timestamp[]"),),
        )
    },
}
_IN_MYSQL: dict[str, StoredAs] = {
    **_decimals("decimal"),
    **{
        name: _OF_MYSQL[declared]
        for name, declared in (
            *(("TINYINT", "tinyint"), ("SMALLINT", "smallint"), ("INT", "int")),
            *(("BIGINT", "bigint"), ("FLOAT", "float"), ("DOUBLE", "double")),
            *(("BOOLEAN", "tinyint(1)"), ("STRING", "longtext"), ("BINARY", "longblob")),
            *(("DATE", "date"), ("TIMESTAMP", "timestamp(6) null"), ("TIME(6)", "time(6)")),
            ("TIMESTAMP_NTZ", "datetime(6)"),
        )
    },
}
_AFFINITIES = {"BINARY": "BLOB", "FLOAT": "REAL", "DOUBLE": "REAL", "BOOLEAN": "INTEGER"}
_IN_SQLITE = {
    column.name: _OF_SQLITE[
        "INTEGER" if column.name.endswith("INT") else _AFFINITIES.get(column.name, "TEXT")
    ]
    for column in (*SCALARS, *TIMES)
    if column.name != "INTERVAL DAY TO SECOND"
}


def _is_in_years(value: object) -> bool:
    """Return whether a date or a time is in the years 1 to 9999, which clients of Python know."""
    match value:
        case Day(days):
            return _FIRST <= days * 86_400 * 10**9 < _AFTER_LAST
        case Local(nanoseconds) | Instant(nanoseconds):
            return _FIRST <= nanoseconds < _AFTER_LAST
        case list():
            return all(map(_is_in_years, cast("list[object]", value)))
        case _:
            return True


def _postgres_takes(value: object) -> bool:
    match value:
        case str():
            return "\0" not in value
        case list():
            return all(map(_is_in_years, cast("list[object]", value))) and all(
                map(_postgres_takes, cast("list[object]", value))
            )
        case Day(days):
            return -2_440_588 <= days < 2_145_031_949
        case Local(nanoseconds) | Instant(nanoseconds):
            return -210_866_803_200 * 10**9 <= nanoseconds < 9_224_318_016_000 * 10**9
        case _:
            return True


def _mysql_takes(value: object) -> bool:
    match value:
        case float():
            return abs(value) != float("inf") and value == value
        case Instant(nanoseconds):
            return 10**9 <= nanoseconds < 2**31 * 10**9
        case _:
            return _is_in_years(value)


def _has_minus_zero(value: object) -> bool:
    return str(value) == "-0.0"


def _mariadb_takes(value: object) -> bool:
    return _mysql_takes(value) and not _has_minus_zero(value)


_YEAR_1_IN_ZONE = _FIRST + 17_762 * 10**9
"""The instant at which the year 1 begins in `ZONE`, by the sun: rows have the session's zone."""


def _sqlite_takes(value: object) -> bool:
    if isinstance(value, Instant) and value.nanoseconds < _YEAR_1_IN_ZONE:
        return False
    return value == value and _is_in_years(value) and not _has_minus_zero(value)


@dataclass(frozen=True)
class _Target:
    format: str
    stored: Mapping[str, StoredAs]
    takes: Callable[[object], bool]
    """Returns whether a value is written; all others are refused."""


_TARGETS = {
    "postgres": _Target("onceflow-postgres", _IN_POSTGRES, _postgres_takes),
    "mysql": _Target("onceflow-mysql", _IN_MYSQL, _mysql_takes),
    "mariadb": _Target("onceflow-mysql", _IN_MYSQL, _mariadb_takes),
    "sqlite": _Target("onceflow-sqlite", _IN_SQLITE, _sqlite_takes),
}


def _open_store(request: pytest.FixtureRequest, name: str, directory: Path) -> tuple[Store, str]:
    """Return the database and its URL."""
    if name == "sqlite":
        return SQLiteFile(directory / "cells.db"), str(directory / "cells.db")
    url: str = request.getfixturevalue(f"{name}_database")
    return next(kind for kind in DATABASES if kind.name == name)(url), url


def _judge(
    store: Store,
    columns: Sequence[SparkColumn],
    target: _Target,
    places: Mapping[int, tuple[int, object]],
) -> list[str]:
    """Return what is wrong with the values in the table."""
    altered: list[str] = []
    for at, column in enumerate(columns):
        stored = target.stored[column.name]
        rows = store.query(f"SELECT n, {stored.reads.format(f'c{at}')} FROM t")
        read = {int(number): value for number, value in rows}
        for number, (place, value) in places.items():
            if place != at:
                continue
            takes = value is None or target.takes(value)
            if not takes or number not in read:
                if takes or number in read:
                    altered.append(f"{column.name}: {value!r:.90} {takes=} {number in read=}")
                continue
            shown = None if read[number] is None else stored.shows(read[number])
            meant = None if value is None else stored.means(value)
            if not same(shown, meant):
                altered.append(f"{column.name}: {meant!r:.90} was read as {shown!r:.90}")
    return altered


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("sqlite", marks=pytest.mark.servers),
        *(
            pytest.param(name, marks=[pytest.mark.integration, pytest.mark.servers])
            for name in ("postgres", "mysql", "mariadb")
        ),
    ],
)
def test_a_value_in_a_database_is_what_was_written_or_its_row_was_dropped(
    request: pytest.FixtureRequest, spark: SparkSession, tmp_path: Path, name: str
) -> None:
    target = _TARGETS[name]
    columns = [one for one in (*SCALARS, *TIMES, *ARRAYS) if one.name in target.stored]
    assert len(columns) == len(target.stored)
    store, url = _open_store(request, name, tmp_path)
    declared = [f"c{at} {target.stored[one.name].declared}" for at, one in enumerate(columns)]
    store.query(f"CREATE TABLE t (n bigint, {', '.join(declared)})")
    rows, places = spark_table(spark, columns).one_value_a_row()
    options = {"url": url, "dbtable": "t", "onBadRow": "drop"}
    _save(rows, target.format, **options, stagingLocation=str(tmp_path / "staging"))
    assert _judge(store, columns, target, places) == []
    if name == "sqlite":
        return
    # Spark's reader has the years 1 to 9999, and text for what is no type of Spark's.
    kept = [number for number, (_, value) in places.items()
            if value is None or (target.takes(value) and _is_in_years(value))]  # fmt: skip
    names = [f"c{at}" for at, one in enumerate(columns) if one not in TIMES]
    within = f"SELECT n, {', '.join(names)} FROM t WHERE n IN ({', '.join(map(str, kept))})"
    frame = spark.read.format("onceflow-postgres" if name == "postgres" else "onceflow-mysql")
    read = _columns_of(frame.options(url=url, query=within).load().toArrow())
    assert read["n"] == kept
    altered = [
        f"{columns[places[number][0]].name}: {places[number][1]!r:.90} was read as {value!r:.90}"
        for row, number in enumerate(kept)
        if (column := f"c{places[number][0]}") in names
        for value in [read[column][row]]
        if not same(value, places[number][1])
    ]
    assert altered == []


# --- Kafka --------------------------------------------------------------------------------------


def _json_takes(value: object) -> bool:
    match value:
        case float():
            return abs(value) != float("inf") and value == value
        case list():
            return all(map(_json_takes, cast("list[object]", value)))
        case dict():
            return all(map(_json_takes, cast("dict[str, object]", value).values()))
        case _:
            return _is_in_years(value)


@pytest.mark.integration
@pytest.mark.servers
def test_a_value_in_json_records_is_what_was_written_or_its_row_was_dropped(
    spark: SparkSession,
    onceflow_kafka: KafkaServer,
    kafka_topic: Callable[[int], str],
    tmp_path: Path,
) -> None:
    servers, topic = onceflow_kafka.bootstrap_servers, kafka_topic(1)
    columns = (*SCALARS, TIMES[1], *NESTED)
    rows, places = spark_table(spark, columns).one_value_a_row()
    options = {"kafka.bootstrap.servers": servers, "topic": topic, "valueFormat": "json"}
    staging = {"stagingLocation": str(tmp_path / "staging"), "onBadRow": "drop", **_ONCE}
    _save(rows, "onceflow-kafka", **options, **staging)
    read = {
        value["n"]: value
        for value in (json.loads(message.value() or b"") for message in messages(servers, topic))
    }
    kept = [number for number, (_, value) in places.items() if value is None or _json_takes(value)]
    assert sorted(read) == kept
    altered: list[str] = []
    for number in kept:
        at, value = places[number]
        text = read[number][f"c{at}"]
        shown = None if text is None else restore(text, value)
        if not same(shown, value):
            altered.append(f"{columns[at].name}: {value!r:.90} was read as {text!r:.90}")
    assert altered == []
    described = ", ".join(
        f"c{at} {column.type}" for at, column in enumerate(columns) if column not in TIMES
    )
    frame = spark.read.format("onceflow-kafka").option("kafka.bootstrap.servers", servers)
    frame = frame.options(subscribe=topic, valueFormat="json", valueSchema=f"n BIGINT, {described}")
    back = _columns_of(frame.load().toArrow())
    assert back["n"] == kept
    for row, number in enumerate(kept):
        at, value = places[number]
        if at != len(SCALARS) and not same(back[f"c{at}"][row], value):
            altered.append(
                f"{columns[at].name}: {value!r:.90}, back as {back[f'c{at}'][row]!r:.90}"
            )
    assert altered == []


# --- refused types ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "expression"),
    [
        ("onceflow-files", "parse_json('1')"),
        ("onceflow-files", "array(INTERVAL '1' YEAR)"),
        pytest.param("onceflow-files", "array(parse_json('1'))", marks=pytest.mark.servers),
        pytest.param("onceflow-sqlite", "parse_json('1')", marks=pytest.mark.servers),
        pytest.param("onceflow-sqlite", "INTERVAL '1' YEAR", marks=pytest.mark.servers),
    ],
)
def test_a_type_that_no_batch_holds_is_refused_by_its_column(
    spark: SparkSession, tmp_path: Path, name: str, expression: str
) -> None:
    frame = spark.sql(f"SELECT 1 AS n, {expression} AS odd")
    where = {"path": str(tmp_path / "out"), **_ONCE}
    if name == "onceflow-sqlite":
        where = {"url": str(tmp_path / "a.db"), "dbtable": "t", "createTable": "true"}
    with pytest.raises(PySparkException, match="column 'odd'"):
        _save(frame, name, **where)
