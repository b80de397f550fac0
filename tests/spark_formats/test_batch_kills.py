"""Processes of a batch are killed at every step, on every kind of target: each row is there once.

The next run partitions its rows otherwise, as Spark may.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import pyarrow.parquet as pq
import pytest
from examples.own_sink import OwnSink
from tests.integration.kafka_sink_kit import decided_ids_in
from tests.integration.postgres_sink_kit import ids_in, query
from tests.spark_formats.batches import Driver, driver_of, killed_at

from onceflow.core.crash_points import CRASH_POINTS, CrashPoint
from onceflow.integration.pytest_plugin import TopicFactory
from onceflow.integration.servers.mysql import MySQLAdmin
from onceflow.sinks import FileSink, KafkaSink, MySQLSink, PostgresSink

pytestmark = pytest.mark.integration

POINTS: tuple[CrashPoint, ...] = (
    "claimed",
    "settled",
    *(point for point in CRASH_POINTS if point != "acked"),
)
TABLE = "CREATE TABLE ledger (id bigint, account varchar(50), amount int)"


@dataclass
class Target:
    driver: Driver
    ids: Callable[[], list[int]]


def postgres(request: pytest.FixtureRequest, directory: Path) -> Target:
    url: str = request.getfixturevalue("postgres_database")
    query(url, TABLE)
    return Target(driver_of(PostgresSink(url, table="ledger"), directory), lambda: ids_in(url))


def of_mysql(url: str, directory: Path) -> Target:
    def ids() -> list[int]:
        with MySQLAdmin.session(url) as admin:
            return sorted(int(str(row[0])) for row in admin.rows("SELECT id FROM ledger"))

    with MySQLAdmin.session(url) as admin:
        admin.rows(TABLE)
    return Target(driver_of(MySQLSink(url, table="ledger"), directory), ids)


def mysql(request: pytest.FixtureRequest, directory: Path) -> Target:
    return of_mysql(request.getfixturevalue("mysql_database"), directory)


def mariadb(request: pytest.FixtureRequest, directory: Path) -> Target:
    return of_mysql(request.getfixturevalue("mariadb_database"), directory)


def files(request: pytest.FixtureRequest, directory: Path) -> Target:
    del request
    found = directory / "out"

    def ids() -> list[int]:
        tables = [pq.read_table(one) for one in found.rglob("*.parquet") if is_public(one)]
        return sorted(one for table in tables for one in table["id"].to_pylist())

    def is_public(path: Path) -> bool:
        return not any(part[0] in "._" for part in path.relative_to(found).parts)

    return Target(driver_of(FileSink(str(found)), directory), ids)


def kafka(request: pytest.FixtureRequest, directory: Path) -> Target:
    servers: str = request.getfixturevalue("onceflow_kafka").bootstrap_servers
    make_topic: TopicFactory = request.getfixturevalue("kafka_topic")
    topic = make_topic(2)
    sink = KafkaSink(servers, topic=topic)
    return Target(driver_of(sink, directory), lambda: decided_ids_in(servers, topic))


def own(request: pytest.FixtureRequest, directory: Path) -> Target:
    del request
    path = str(directory / "own.db")

    def ids() -> list[int]:
        with closing(sqlite3.connect(path)) as db:
            return sorted(row[0] for row in db.execute("SELECT id FROM rows"))

    return Target(driver_of(OwnSink(path, table="rows", key="id"), directory), ids)


Case: TypeAlias = tuple[Callable[[pytest.FixtureRequest, Path], Target], CrashPoint]
CASES: list[Case] = [
    *[(postgres, point) for point in POINTS],
    (files, "prepared"),
    (files, "logged"),
    (own, "prepared"),
]
LONG: list[Case] = [
    (make, point) for make in (mysql, mariadb, files, own, kafka) for point in POINTS
]


def named(case: Case) -> str:
    make, point = case
    return f"{make.__name__}-{point}"


@pytest.mark.parametrize(
    ("make", "point"),
    [
        *[pytest.param(*case, id=named(case)) for case in CASES],
        *[
            pytest.param(*case, id=named(case), marks=pytest.mark.slow)
            for case in LONG
            if case not in CASES
        ],
    ],
)
def test_a_batch_that_is_killed_is_there_once_after_the_next(
    make: Callable[[pytest.FixtureRequest, Path], Target],
    point: CrashPoint,
    request: pytest.FixtureRequest,
    tmp_path: Path,
) -> None:
    target = make(request, tmp_path)
    driver = target.driver
    driver.batch(0, range(5), range(5, 10))
    killed_at(point, tmp_path, lambda: driver.batch(1, range(10, 15), range(15, 20)))
    after_kill = target.ids()
    driver.batch(1, range(10, 20), [], fingerprint="offsets of 1")
    assert target.ids() == list(range(20)), f"after the kill there were {after_kill}"
    driver.batch(2, [20])
    assert target.ids() == list(range(21))
    assert not driver.in_doubt()
