"""Queries on Spark that copy a table and follow its changes, and whose driver is killed."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.rows import TupleRow
from pyspark.sql import SparkSession
from tests.support.program import Program, python
from tests.support.stream_queries import STARVED, run_to_end

from onceflow.clients.postgres.replication import parse_lsn
from onceflow.connectors import register
from onceflow.integration.servers.postgres import EmbeddedPostgres, create_database

pytestmark = [pytest.mark.spark, pytest.mark.integration]

ROOT = Path(__file__).parents[2]
_DEADLINE_S = 240.0
_STARTS_MAX = 4
_ROWS = 3_000


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedPostgres]:
    settings = {"wal_level": "logical", "max_prepared_transactions": "10"}
    with EmbeddedPostgres(settings) as running:
        yield running


@pytest.fixture
def database(server: EmbeddedPostgres) -> Iterator[psycopg.Connection[TupleRow]]:
    with psycopg.connect(server.url, autocommit=True) as connection:
        yield connection


def _example() -> str:
    """Return the example of the page on reading with Spark."""
    text = (ROOT / "docs/spark-reading.md").read_text()
    (code,) = [c for c in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "changesLoc" in c]
    return str(code)


@pytest.mark.only_proof  # that Spark calls the reader as the tests of the protocol do
@pytest.mark.timeout(300)
def test_the_documented_query_keeps_a_copy_and_its_slot_follows_committed_batches(
    spark: SparkSession,
    server: EmbeddedPostgres,
    database: psycopg.Connection[TupleRow],
    tmp_path: Path,
) -> None:
    register(spark)
    create_database(server.url, "reports")
    reports = server.database_url("reports")
    database.execute(
        "CREATE TABLE orders (id bigint PRIMARY KEY, amount numeric(38, 9), at timestamptz,"
        " local timestamp, day date, ratio float8, paid boolean, tags text[], raw bytea, note text)"
    )
    database.execute(
        "INSERT INTO orders SELECT g, 12345678901234567890123456789.000000001 + g, now(),"
        " '9999-12-31 23:59:59.999999', '0001-01-01', g / 3.0, g % 2 = 0,"
        " ARRAY['a', NULL, g::text], '\\x00ff', NULL FROM generate_series(1, 500) AS g"
    )
    code = _example().replace("/var/lib/onceflow", str(tmp_path))
    code = code.replace(".start())", ".trigger(availableNow=True).start())")

    def run() -> None:
        def start() -> Any:
            names: dict[str, Any] = {"spark": spark, "shop": server.url, "reports": reports}
            exec(compile(code, "spark-reading.md", "exec"), names)
            return names["query"]

        run_to_end(start)

    run()
    database.execute(
        "UPDATE orders SET id = -id WHERE id <= 10; UPDATE orders SET amount = 0 WHERE id > 490;"
        " DELETE FROM orders WHERE id = 300"
    )
    run()
    rows = "SELECT * FROM orders ORDER BY id"
    with psycopg.connect(reports) as copies:
        assert copies.execute(rows).fetchall() == database.execute(rows).fetchall()
    ((slot,),) = database.execute(
        "SELECT confirmed_flush_lsn::text FROM pg_replication_slots WHERE slot_name = 'orders_copy'"
    ).fetchall()
    ends = sorted((tmp_path / "orders_copy/offsets").glob("[0-9]*"))
    first, last = (json.loads(end.read_text().splitlines()[-1]) for end in (ends[0], ends[-1]))
    lsns = [parse_lsn(lsn) for lsn in (first["position"]["lsn"], slot, last["position"]["lsn"])]
    assert lsns[0] <= lsns[1] <= lsns[2]
    assert len(list((tmp_path / "changes").rglob("*.arrow"))) == 1


class Driver:
    """The program as a process of its own; each start continues from the checkpoint."""

    def __init__(self, url: str, directory: Path) -> None:
        self.directory, self._arguments = directory, [url, str(directory)]

    def kill_when(self, holds: Callable[[], bool]) -> None:
        """Start the program, and kill it with its JVM and workers as soon as `holds`."""
        process = self._start()
        try:
            until = time.monotonic() + _DEADLINE_S
            while not holds():
                if process.poll() is not None:
                    self._expect_starved(process)
                    process = self._start()
                assert time.monotonic() < until, process.tail()
                time.sleep(0.001)
        finally:
            process.kill_tree()

    def run(self) -> None:
        """Run the program to its end."""
        for _ in range(_STARTS_MAX):
            process = self._start()
            try:
                if process.wait(_DEADLINE_S) == 0:
                    return
            finally:
                process.kill_tree()
            self._expect_starved(process)
        raise AssertionError(f"Spark starved {_STARTS_MAX} times")

    def list_numbers(self, log: str) -> set[int]:
        """Return the numbers of the batches in a log of the query."""
        directory = self.directory / "checkpoint" / log
        if not directory.is_dir():
            return set()
        return {int(file.name) for file in directory.iterdir() if file.name.isdecimal()}

    def list_files(self) -> set[int]:
        """Return the numbers of the ends whose files are there."""
        files = (self.directory / "changes").rglob("*.arrow")
        return {int(file.name.partition("-")[0]) for file in files if file.name[0] != "."}

    def _start(self) -> Program:
        command = python("-m", "tests.spark_formats.changes_to_postgres", *self._arguments)
        return Program(self.directory / "driver.log", *command)

    def _expect_starved(self, process: Program) -> None:
        assert STARVED in process.output(), f"{process.poll()}: {process.tail()}"


@pytest.mark.servers
@pytest.mark.timeout(900)
def test_a_driver_killed_in_the_copy_after_a_file_and_before_a_commit_loses_and_doubles_nothing(
    server: EmbeddedPostgres, database: psycopg.Connection[TupleRow], tmp_path: Path
) -> None:
    database.execute("CREATE TABLE original (id bigint PRIMARY KEY, v text)")
    database.execute("CREATE TABLE copy (id bigint PRIMARY KEY, v text)")
    database.execute(
        "INSERT INTO original SELECT g, 'copied' FROM generate_series(1, %s) AS g", [_ROWS]
    )
    driver = Driver(server.url, tmp_path)

    def equal() -> bool:
        original = database.execute("SELECT * FROM original ORDER BY id").fetchall()
        return original == database.execute("SELECT * FROM copy ORDER BY id").fetchall()

    def change() -> None:
        database.execute("UPDATE original SET v = v || '.' WHERE id % 7 = 0")
        database.execute("DELETE FROM original WHERE id % 11 = 0 AND id % 3 = 0")
        database.execute("UPDATE original SET id = -id WHERE id % 13 = 0 AND id > 0")

    # In the copy: the first batch is committed, and later ones are not.
    driver.kill_when(lambda: 0 in driver.list_numbers("commits"))
    assert not equal()
    change()
    # A file is written whose end Spark has perhaps not logged.
    files = driver.list_files()
    driver.kill_when(lambda: bool(driver.list_files() - files))
    change()
    # The end of a batch is logged, and its commit is not.
    logged = driver.list_numbers("offsets")
    driver.kill_when(lambda: bool(driver.list_numbers("offsets") - logged))
    assert driver.list_numbers("offsets") - driver.list_numbers("commits")
    change()
    driver.run()
    assert equal()
    assert database.execute("SELECT FROM pg_prepared_xacts").fetchall() == []
