"""The targets of `DataFrame.write`, as tests name them: how rows get there, and what is there."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from examples.own_sink import OwnSink
from tests.integration.kafka_sink_kit import decided_ids_in
from tests.integration.postgres_sink_kit import ids_in, query

from onceflow.connectors.spark.batch.identity import MakeSink
from onceflow.connectors.spark.formats import (
    FilesFormat,
    KafkaFormat,
    MySQLFormat,
    PostgresFormat,
    SQLiteFormat,
)
from onceflow.integration.pytest_plugin import DatabaseFactory, KafkaFactory
from onceflow.integration.servers.kinds import Killable
from onceflow.integration.servers.mysql import MySQLAdmin

TOKEN = {"txnappid": "nightly", "txnversion": "20260131"}


@dataclass(frozen=True)
class WriteCase:
    """One table, topic or directory. `options` are a write's, with a token and a staging directory
    that all targets of the test share."""

    make_sink: MakeSink
    options: Mapping[str, str]
    ids: Callable[[], list[int]]
    """Returns the ids that its readers see."""
    format: str = ""
    """The name by which Spark knows it; empty for a sink of the test's own."""

    def without_token(self) -> WriteCase:
        """Return the same target for writes that have no number."""
        kept = {name: value for name, value in self.options.items() if name not in TOKEN}
        return replace(self, options=kept)

    def with_staging(self, directory: Path) -> WriteCase:
        """Return the same target with another staging directory."""
        return replace(self, options={**self.options, "staginglocation": str(directory)})


def sqlite_ids(file: Path, table: str) -> list[int]:
    with closing(sqlite3.connect(file)) as database:
        return [row[0] for row in database.execute(f"SELECT id FROM {table} ORDER BY id")]


def file_ids(directory: Path) -> list[int]:
    files = (
        path
        for path in directory.rglob("*.parquet")
        if not any(part[0] in "._" for part in path.relative_to(directory).parts)
    )
    return sorted(one for path in files for one in pq.read_table(path)["id"].to_pylist())


def own_sink(options: Mapping[str, str]) -> OwnSink:
    return OwnSink(options["path"], table=options["table"], key="id")


def _shared(directory: Path) -> dict[str, str]:
    return {**TOKEN, "staginglocation": str(directory / "staging")}


def sqlite_case(request: pytest.FixtureRequest, directory: Path, name: str) -> WriteCase:
    del request
    file = directory / "a.db"
    options = {"url": str(file), "dbtable": name, "createtable": "true", **_shared(directory)}
    return WriteCase(
        SQLiteFormat.make_sink, options, lambda: sqlite_ids(file, name), SQLiteFormat.format_name
    )


def _of_postgres(url: str, directory: Path, name: str) -> WriteCase:
    query(url, f"CREATE TABLE IF NOT EXISTS {name} (id bigint, account text, amount int)")
    options = {"url": url, "dbtable": name, **_shared(directory)}
    return WriteCase(
        PostgresFormat.make_sink, options, lambda: ids_in(url, name), PostgresFormat.format_name
    )


def postgres_case(request: pytest.FixtureRequest, directory: Path, name: str) -> WriteCase:
    return _of_postgres(request.getfixturevalue("postgres_database"), directory, name)


def _of_mysql(url: str, directory: Path, name: str) -> WriteCase:
    def ids() -> list[int]:
        with MySQLAdmin.session(url) as admin:
            return sorted(int(str(row[0])) for row in admin.rows(f"SELECT id FROM {name}"))

    with MySQLAdmin.session(url) as admin:
        columns = "(id bigint, account varchar(50), amount int)"
        admin.rows(f"CREATE TABLE IF NOT EXISTS {name} {columns}")
    options = {"url": url, "dbtable": name, **_shared(directory)}
    return WriteCase(MySQLFormat.make_sink, options, ids, MySQLFormat.format_name)


def mysql_case(request: pytest.FixtureRequest, directory: Path, name: str) -> WriteCase:
    return _of_mysql(request.getfixturevalue("mysql_database"), directory, name)


def mariadb_case(request: pytest.FixtureRequest, directory: Path, name: str) -> WriteCase:
    return _of_mysql(request.getfixturevalue("mariadb_database"), directory, name)


def files_case(request: pytest.FixtureRequest, directory: Path, name: str) -> WriteCase:
    del request
    path = directory / name
    options = {"path": str(path), **_shared(directory)}
    return WriteCase(
        FilesFormat.make_sink, options, lambda: file_ids(path), FilesFormat.format_name
    )


def _of_kafka(servers: str, directory: Path, topic: str) -> WriteCase:
    options = {
        "kafka.bootstrap.servers": servers,
        "topic": topic,
        "valueformat": "json",
        **_shared(directory),
    }
    return WriteCase(
        KafkaFormat.make_sink,
        options,
        lambda: decided_ids_in(servers, topic),
        KafkaFormat.format_name,
    )


def kafka_case(request: pytest.FixtureRequest, directory: Path, name: str) -> WriteCase:
    del name
    servers: str = request.getfixturevalue("onceflow_kafka").bootstrap_servers
    topic: str = request.getfixturevalue("kafka_topic")(2)
    return _of_kafka(servers, directory, topic)


def own_case(request: pytest.FixtureRequest, directory: Path, name: str) -> WriteCase:
    del request
    file = directory / "own.db"
    options = {"path": str(file), "table": name, "sinkid": f"own-{name}", **_shared(directory)}
    return WriteCase(own_sink, options, lambda: sqlite_ids(file, name))


MakeCase = Callable[[pytest.FixtureRequest, Path, str], WriteCase]
EMBEDDED: tuple[MakeCase, ...] = (sqlite_case, files_case, own_case)
"""Without a server."""
SERVERS: tuple[MakeCase, ...] = (postgres_case, mysql_case, mariadb_case, kafka_case)


def start_own_server(
    make: MakeCase, request: pytest.FixtureRequest
) -> tuple[Killable, Callable[[Path, str], WriteCase]]:
    """Return a server that the test may kill, and what makes targets of `make`'s kind on it."""
    if make is kafka_case:
        start_broker: KafkaFactory = request.getfixturevalue("kafka_server")
        broker = start_broker()

        def kafka(directory: Path, name: str) -> WriteCase:
            return _of_kafka(broker.bootstrap_servers, directory, broker.create_topic(name, 2))

        return broker, kafka
    fixture = f"{make.__name__.removesuffix('_case')}_server"
    start_database: DatabaseFactory = request.getfixturevalue(fixture)
    server = start_database()
    if make is postgres_case:
        return server, partial(_of_postgres, server.url)
    with MySQLAdmin.session(server.url) as admin:
        admin.create_database("killed")
    return server, partial(_of_mysql, server.database_url("killed"))


def on(*quick: MakeCase, but: MakeCase | None = None) -> pytest.MarkDecorator:
    """Return the parameter `make`: every target `but` one, of which `quick` run by default."""
    return pytest.mark.parametrize(
        "make",
        [
            pytest.param(
                make,
                id=make.__name__.removesuffix("_case"),
                marks=[
                    *([pytest.mark.integration] if make in SERVERS else []),
                    *([] if make in quick else [pytest.mark.slow]),
                ],
            )
            for make in (*EMBEDDED, *SERVERS)
            if make is not but
        ],
    )
