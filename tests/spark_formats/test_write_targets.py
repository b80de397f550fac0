"""`write` into several tables, directories and topics, by one token and by several, and repeated.

Each write goes the way of a format's writer, from its options to its commit, in this process.
"""

from __future__ import annotations

import sqlite3
import uuid
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from pyspark.sql import SparkSession
from tests.integration.kafka_sink_kit import decided_ids_in
from tests.integration.postgres_sink_kit import ids_in, prepared, query
from tests.spark_formats.batches import SCHEMA, Driver, rows
from tests.spark_formats.write_cases import (
    TOKEN,
    MakeCase,
    file_ids,
    files_case,
    mysql_case,
    on,
    own_case,
    own_sink,
    postgres_case,
    sqlite_case,
    sqlite_ids,
)
from tests.spark_formats.writes import Write, save

from onceflow.connectors.spark.batch.identity import stream_target, write_target
from onceflow.connectors.spark.formats import FilesFormat, KafkaFormat, PostgresFormat, SQLiteFormat
from onceflow.connectors.spark.streaming.checkpoint_location import CheckpointLocation
from onceflow.core.errors import ConfigError


def sqlite_options(file: Path, table: str, **more: str) -> dict[str, str]:
    """Return what every write to `table` of `file` says; all tables share a staging directory."""
    staging = str(file.parent / "staging")
    where = {"url": str(file), "dbtable": table, "createtable": "true", "locktimeout": "60 s"}
    return {**where, "staginglocation": staging, **more}


@pytest.mark.parametrize("tables", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_one_token_writes_each_of_several_tables_once_however_often_it_is_repeated(
    tmp_path: Path, tables: int
) -> None:
    for _ in range(2):
        for index in range(tables):
            part = range(index * 100, index * 100 + 50)
            for file in (tmp_path / "a.db", tmp_path / "b.db"):
                save(SQLiteFormat.make_sink, sqlite_options(file, f"t_{index}", **TOKEN), part)
    for file in (tmp_path / "a.db", tmp_path / "b.db"):
        for index in range(tables):
            assert sqlite_ids(file, f"t_{index}") == list(range(index * 100, index * 100 + 50))


@pytest.mark.parametrize(
    ("make", "schema"),
    [
        pytest.param(sqlite_case, "main", id="sqlite"),
        pytest.param(postgres_case, "public", id="postgres", marks=pytest.mark.integration),
        pytest.param(mysql_case, "{database}", id="mysql", marks=pytest.mark.integration),
    ],
)
def test_a_token_is_written_once_however_its_table_is_spelled(
    request: pytest.FixtureRequest, tmp_path: Path, make: MakeCase, schema: str
) -> None:
    case = make(request, tmp_path, "orders")
    database = urlsplit(case.options["url"]).path.rpartition("/")[2]
    qualified = {**case.options, "dbtable": f"{schema.format(database=database)}.orders"}
    for options in (case.options, qualified, case.options):
        save(case.make_sink, options, range(5), range(5, 9))
    assert case.ids() == list(range(9))


@on(sqlite_case, files_case, own_case, postgres_case)
@pytest.mark.parametrize("parts", [pytest.param(1, id="one-task"), pytest.param(2, id="two-tasks")])
def test_a_token_counts_as_written_though_its_batch_has_no_rows(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    make: MakeCase,
    parts: int,
) -> None:
    """As in Delta Lake: what a token has written does not depend on when it is repeated."""
    case = make(request, tmp_path, "orders")
    save(case.make_sink, case.options, *(range(0) for _ in range(parts)))
    save(case.make_sink, case.options, range(5), range(5, 9))
    assert case.ids() == []
    assert "is already written, so the 9 rows of this write are dropped" in caplog.text
    save(case.make_sink, {**case.options, "txnversion": "20260201"}, range(9, 12))
    save(case.make_sink, case.options, range(5))
    assert case.ids() == list(range(9, 12))


def test_a_token_is_written_once_however_its_directory_is_spelled(tmp_path: Path) -> None:
    """By a link, by `..`, and as Spark writes a path."""
    real, link = tmp_path / "real", tmp_path / "link"
    real.mkdir()
    link.symlink_to(real)
    token = {**TOKEN, "staginglocation": str(tmp_path / "staging")}
    for directory in (real, link, tmp_path / "link" / ".." / "real", f"file:{real}"):
        save(FilesFormat.make_sink, {"path": str(directory), **token}, range(5))
        save(SQLiteFormat.make_sink, sqlite_options(_file_in(directory), "orders", **token), [1])
    assert file_ids(real) == list(range(5))
    assert sqlite_ids(real / "shop.db", "orders") == [1]


def _file_in(directory: Path | str) -> Path:
    return Path(str(directory).removeprefix("file:")) / "shop.db"


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(sqlite_case, id="sqlite"),
        pytest.param(postgres_case, id="postgres", marks=pytest.mark.integration),
    ],
)
def test_a_token_whose_table_was_dropped_does_not_pass_for_written(
    request: pytest.FixtureRequest, tmp_path: Path, make: MakeCase
) -> None:
    """Else `save` would return, with the table created anew and empty."""
    case = make(request, tmp_path, "orders")
    options = {**case.options, "createtable": "true"}
    save(case.make_sink, options, range(5))
    if make is sqlite_case:
        with closing(sqlite3.connect(case.options["url"])) as database:
            database.execute("DROP TABLE orders")
    else:
        query(case.options["url"], "DROP TABLE orders")
    for _ in range(2):
        with pytest.raises(ConfigError, match="table orders no longer exists: it was dropped"):
            save(case.make_sink, options, range(5))
    save(case.make_sink, {**options, "txnversion": "20260201"}, range(5, 7))
    assert case.ids() == [5, 6]


@pytest.mark.integration
def test_a_token_writes_each_table_of_one_name_that_search_paths_lead_to(
    postgres_database: str,
) -> None:
    query(
        postgres_database,
        "CREATE SCHEMA north",
        "CREATE TABLE north.orders (id bigint, account text, amount int)",
    )
    in_north = f"{postgres_database}?options=-csearch_path%3Dnorth,public"
    options = {"dbtable": "orders", "createtable": "true", **TOKEN}
    for _ in range(2):
        save(PostgresFormat.make_sink, {"url": in_north, **options}, [1])
        save(PostgresFormat.make_sink, {"url": postgres_database, **options}, [2])
    save(
        PostgresFormat.make_sink,
        {"url": postgres_database, **options, "dbtable": "north.orders"},
        [1],
    )
    assert ids_in(postgres_database, "north.orders") == [1]
    assert ids_in(postgres_database, "public.orders") == [2]


def test_several_tables_without_a_token_take_turns_under_ids_of_their_own_and_given_ones(
    tmp_path: Path,
) -> None:
    file = tmp_path / "a.db"
    for turn in range(2):
        for table in ("t_a", "t_b"):
            options = sqlite_options(file, table)
            save(SQLiteFormat.make_sink, options, [turn * 2])
            save(SQLiteFormat.make_sink, {**options, "sinkid": f"mine-{table}"}, [turn * 2 + 1])
    assert sqlite_ids(file, "t_a") == sqlite_ids(file, "t_b") == [0, 1, 2, 3]


def test_several_tables_are_written_at_once_by_one_token_and_without(tmp_path: Path) -> None:
    file = tmp_path / "a.db"
    writes: list[Mapping[str, str]] = [
        sqlite_options(file, table, **token)
        for table in ("t_a", "t_b", "t_c")
        for token in ({}, TOKEN)
    ]
    for table in ("t_a", "t_b", "t_c"):
        save(SQLiteFormat.make_sink, sqlite_options(file, table), [0])
    with ThreadPoolExecutor(len(writes)) as threads:
        started = [
            threads.submit(save, SQLiteFormat.make_sink, write, range(1, 20)) for write in writes
        ]
        for one in started:
            one.result()
    for table in ("t_a", "t_b", "t_c"):
        assert sqlite_ids(file, table) == sorted([0, *range(1, 20), *range(1, 20)])


@pytest.mark.parametrize("token", [{}, TOKEN], ids=["without-token", "token"])
def test_a_sink_id_of_another_table_is_refused_and_takes_no_rows(
    tmp_path: Path, token: Mapping[str, str]
) -> None:
    file = tmp_path / "a.db"
    save(SQLiteFormat.make_sink, sqlite_options(file, "t_a", sinkid="mine", **token), [1])
    with pytest.raises(ConfigError, match="to t_a .*this is batch writes .*to t_b") as refused:
        save(SQLiteFormat.make_sink, sqlite_options(file, "t_b", sinkid="mine", **token), [2])
    # What it says is to be done writes the rows.
    assert "a sink id of its own (option sinkId)" in str(refused.value)
    save(SQLiteFormat.make_sink, sqlite_options(file, "t_b", sinkid="yours", **token), [2])
    assert (sqlite_ids(file, "t_a"), sqlite_ids(file, "t_b")) == ([1], [2])


def test_a_token_under_another_sink_id_is_refused_for_its_table_has_the_rows(
    tmp_path: Path,
) -> None:
    file = tmp_path / "a.db"
    save(SQLiteFormat.make_sink, sqlite_options(file, "t_a", sinkid="mine", **TOKEN), [1])
    with pytest.raises(ConfigError, match="sinkId=mine"):
        save(SQLiteFormat.make_sink, sqlite_options(file, "t_a", **TOKEN), [1])
    assert sqlite_ids(file, "t_a") == [1]


def test_an_empty_staging_location_is_refused_when_a_write_is_planned(tmp_path: Path) -> None:
    options = sqlite_options(tmp_path / "a.db", "t_a", txnappid="nightly", txnversion="1")
    with pytest.raises(ConfigError, match="option stagingLocation is empty"):
        save(SQLiteFormat.make_sink, {**options, "staginglocation": " "}, [1])
    save(SQLiteFormat.make_sink, options, [1])
    assert sqlite_ids(tmp_path / "a.db", "t_a") == [1]


def test_a_lower_version_is_refused_with_the_name_under_which_a_backfill_is_written(
    tmp_path: Path,
) -> None:
    options = sqlite_options(tmp_path / "a.db", "t_a", txnappid="nightly")
    for version in (20260110, 20260131):
        save(SQLiteFormat.make_sink, {**options, "txnversion": str(version)}, [version])
    with pytest.raises(
        ConfigError, match="20260120 is below 20260131.* not written earlier"
    ) as told:
        save(SQLiteFormat.make_sink, {**options, "txnversion": "20260120"}, [20260120])
    assert "give the backfill a txnAppId of its own" in str(told.value)
    with pytest.raises(ConfigError, match="no record of writes before 20260110 .* Check whether"):
        save(SQLiteFormat.make_sink, {**options, "txnversion": "20260101"}, [20260101])
    # What it says is to be done writes the rows, once.
    for version in (20260101, 20260120, 20260120):
        backfill = {**options, "txnappid": "nightly-backfill", "txnversion": str(version)}
        save(SQLiteFormat.make_sink, backfill, [version])
    assert sqlite_ids(tmp_path / "a.db", "t_a") == [20260101, 20260110, 20260120, 20260131]


def test_a_write_to_files_needs_a_name_and_one_that_it_is_told_will_do(tmp_path: Path) -> None:
    options = {"path": str(tmp_path / "out")}
    with pytest.raises(
        ConfigError, match="give options txnAppId and txnVersion, or sinkId"
    ) as told:
        save(FilesFormat.make_sink, options, [1])
    assert options["path"] in str(told.value)
    save(FilesFormat.make_sink, {**options, **TOKEN}, [1])
    save(FilesFormat.make_sink, {**options, "sinkid": "mine"}, [2])
    assert file_ids(tmp_path / "out") == [1, 2]


@pytest.mark.parametrize("option", ["txnappid", "txnversion"])
def test_a_token_is_no_option_of_a_query(tmp_path: Path, option: str) -> None:
    options = {**sqlite_options(tmp_path / "a.db", "t_a"), option: "1"}
    with pytest.raises(ConfigError, match="option txn.* is for `write`. A query"):
        stream_target(SQLiteFormat.make_sink, options, CheckpointLocation(str(tmp_path)))


def test_a_checkpoint_has_one_sink_id_by_whatever_way_its_directory_is_named(
    tmp_path: Path,
) -> None:
    (tmp_path / "queries" / "orders").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "queries")
    ways = ["queries/orders", "queries/../queries/orders", "link/orders", "link/orders/"]
    names = [f"{scheme}{tmp_path}/{way}" for way in ways for scheme in ("", "file://", "file:")]
    assert len({CheckpointLocation(name).sink_id() for name in names}) == 1


def write_schemas(url: str, **more: str) -> None:
    for schema in ("north", "south", "public"):
        query(
            url,
            f"CREATE SCHEMA IF NOT EXISTS {schema}",
            f"CREATE TABLE {schema}.orders (id bigint, account text, amount int)",
        )
    for token in ({}, TOKEN, TOKEN):
        for schema in ("north", "south", "public"):
            options = {"url": url, "dbtable": f"{schema}.orders", **token, **more}
            save(PostgresFormat.make_sink, options, range(5), range(5, 9))
    for schema in ("north", "south", "public"):
        assert ids_in(url, f"{schema}.orders") == sorted([*range(9), *range(9)])
    assert prepared(url) == []


@pytest.mark.integration
def test_one_token_writes_tables_of_several_schemas_of_postgres_once(
    postgres_database: str,
) -> None:
    write_schemas(postgres_database)


@pytest.mark.integration
@pytest.mark.slow
def test_staged_rows_of_several_schemas_of_postgres_share_one_directory(
    postgres_database: str, tmp_path: Path
) -> None:
    write_schemas(postgres_database, commitmode="ledger", staginglocation=str(tmp_path))


def test_jobs_and_directories_of_files_share_one_staging_directory(tmp_path: Path) -> None:
    staging = str(tmp_path / "staging")
    for _ in range(2):
        for app in ("nightly", "hourly"):
            for name in ("a", "b"):
                token = {**TOKEN, "txnappid": app, "staginglocation": staging}
                options = {"path": str(tmp_path / name), **token}
                save(FilesFormat.make_sink, options, range(5), range(5, 9))
    for name in ("a", "b"):
        assert file_ids(tmp_path / name) == sorted([*range(9), *range(9)])


def test_jobs_of_an_own_sink_share_one_staging_directory_and_targets_are_told_apart(
    tmp_path: Path,
) -> None:
    file = tmp_path / "own.db"
    shared = {**TOKEN, "path": str(file), "staginglocation": str(tmp_path / "staging")}
    for _ in range(2):
        save(own_sink, {**shared, "table": "a"}, [1])
        save(own_sink, {**shared, "txnappid": "hourly", "table": "a"}, [2])
    with pytest.raises(ConfigError, match="another value of table.*option sinkId"):
        save(own_sink, {**shared, "table": "b"}, [3])
    save(own_sink, {**shared, "table": "b", "sinkid": "b"}, [3])
    assert (sqlite_ids(file, "a"), sqlite_ids(file, "b")) == ([1, 2], [3])


def test_a_new_password_of_an_own_sink_is_the_same_target(tmp_path: Path) -> None:
    file = tmp_path / "own.db"
    shared = {**TOKEN, "path": str(file), "staginglocation": str(tmp_path / "staging")}
    for password in ("one-of-many", "two-of-many"):
        save(own_sink, {**shared, "table": "a", "password": password}, [1])
    assert sqlite_ids(file, "a") == [1]
    assert not any(
        b"of-many" in path.read_bytes()
        for path in (tmp_path / "staging").rglob("*")
        if path.is_file()
    )


@pytest.mark.integration
@pytest.mark.slow
def test_one_token_writes_two_topics_once_with_one_staging_directory(
    request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    servers: str = request.getfixturevalue("onceflow_kafka").bootstrap_servers
    topics = [request.getfixturevalue("kafka_topic")(2) for _ in range(2)]
    for _ in range(2):
        for app in ("nightly", "hourly"):
            for topic in topics:
                token = {**TOKEN, "txnappid": app, "staginglocation": str(tmp_path)}
                options = {"kafka.bootstrap.servers": servers, "topic": topic, **token}
                save(KafkaFormat.make_sink, {**options, "valueformat": "json"}, range(9))
    for topic in topics:
        assert decided_ids_in(servers, topic) == sorted([*range(9), *range(9)])


@pytest.mark.integration
def test_a_write_without_keys_to_a_compacted_topic_is_refused_before_its_tasks(
    request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    kafka = request.getfixturevalue("onceflow_kafka")
    name = f"compacted-{uuid.uuid4().hex[:8]}"
    topic = kafka.create_topic(name, 1, config={"cleanup.policy": "compact"})
    token = {**TOKEN, "staginglocation": str(tmp_path)}
    options = {"kafka.bootstrap.servers": kafka.bootstrap_servers, "topic": topic, **token}
    with pytest.raises(ConfigError, match=r"cleanup\.policy=compact, .*no key"):
        Write(KafkaFormat.make_sink, {**options, "valueformat": "json"})
    save(KafkaFormat.make_sink, {**options, "valueformat": "json", "keycolumns": "id"}, range(9))
    assert decided_ids_in(kafka.bootstrap_servers, topic) == list(range(9))


@pytest.mark.spark
def test_a_dataframe_is_saved_into_two_tables_by_one_token(
    spark: SparkSession, tmp_path: Path
) -> None:
    file = tmp_path / "a.db"
    for table in ("t_a", "t_b", "t_b"):
        writer = spark.range(0, 100, numPartitions=2).write.format("onceflow-sqlite")
        writer.option("txnAppId", "nightly").option("txnVersion", "1")
        writer.options(**sqlite_options(file, table)).mode("append").save()
    assert sqlite_ids(file, "t_a") == sqlite_ids(file, "t_b") == list(range(100))


def test_queries_share_one_staging_directory_in_turns(tmp_path: Path) -> None:
    drivers: list[Driver] = []
    for name in ("a", "b"):
        checkpoint = tmp_path / name
        checkpoint.mkdir()
        (checkpoint / "metadata").write_text(f'{{"id": "query-{name}"}}')
        named = stream_target(
            FilesFormat.make_sink,
            {"path": str(tmp_path / f"out-{name}"), "staginglocation": str(tmp_path / "staging")},
            CheckpointLocation(str(checkpoint)),
        )
        drivers.append(Driver(named.target, SCHEMA, rows, named.directory))
    for number in range(3):
        for driver in drivers:
            driver.batch(number, [number * 2], [number * 2 + 1])
            assert driver.plan(number).decided
    assert file_ids(tmp_path / "out-a") == file_ids(tmp_path / "out-b") == list(range(6))


@pytest.mark.spark
@pytest.mark.slow
def test_two_queries_share_one_staging_directory(spark: SparkSession, tmp_path: Path) -> None:
    def run(name: str) -> None:
        events = spark.readStream.schema("id long").parquet(str(tmp_path / "in"))
        writer = events.writeStream.format("onceflow-files").option("path", str(tmp_path / name))
        writer.option("stagingLocation", str(tmp_path / "staging"))
        writer.option("checkpointLocation", str(tmp_path / f"checkpoint-{name}"))
        assert writer.trigger(availableNow=True).start().awaitTermination(100)

    for first in (0, 10):
        part = spark.range(first, first + 10, numPartitions=1)
        part.write.mode("append").parquet(str(tmp_path / "in"))
        for name in ("a", "b"):
            run(name)
    assert file_ids(tmp_path / "a") == file_ids(tmp_path / "b") == list(range(20))


def test_a_token_has_one_identity_for_each_topic_and_broker_lists_in_any_order(
    tmp_path: Path,
) -> None:
    def identity(topic: str, servers: str) -> tuple[str, str, object]:
        options = {"kafka.bootstrap.servers": servers, "topic": topic, "valueformat": "json"}
        shared = {**TOKEN, "staginglocation": str(tmp_path)}
        named, number = write_target(KafkaFormat.make_sink, {**options, **shared})
        assert number == int(TOKEN["txnversion"])
        return named.target.sink_id, named.target.source, named.noted

    assert identity("a", "x:1,y:2") == identity("a", "Y:2, x:1")
    one, other = identity("a", "x:1"), identity("b", "x:1")
    assert all(part != another for part, another in zip(one, other, strict=True))
