"""Queries on Spark that copy a table and follow its changes, and whose driver is killed."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.rows import TupleRow, dict_row
from pyspark.sql import SparkSession
from tests.integration.postgres_changes_kit import drop_slots
from tests.spark_formats.changes_to_postgres import Target
from tests.support.program import Program, python
from tests.support.random_load import RandomLoad, create_original, replay
from tests.support.stream_queries import STARVED, run_to_end

from onceflow.clients.postgres.replication import parse_lsn
from onceflow.connectors import register
from onceflow.core.spi import Split
from onceflow.integration.faults import processes
from onceflow.integration.servers.postgres import EmbeddedPostgres, create_database
from onceflow.sources.postgres.position import SlotPosition

pytestmark = [pytest.mark.spark, pytest.mark.integration]

ROOT = Path(__file__).parents[2]
_DEADLINE_S = 600.0
_STARTS_MAX = 4
_ROWS = 3_000
_KILLS = 5
_NOT_EMPTY = "STATE_STORE_CHECKPOINT_LOCATION_NOT_EMPTY"
"""The error of Spark if the first start was killed while it logged the first end."""
_SETTINGS = {"wal_level": "logical", "max_prepared_transactions": "10"}


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedPostgres]:
    with EmbeddedPostgres(_SETTINGS) as running:
        yield running


@pytest.fixture
def database(server: EmbeddedPostgres) -> Iterator[psycopg.Connection[TupleRow]]:
    with psycopg.connect(server.url, autocommit=True) as connection:
        yield connection
        drop_slots(connection)


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

    def __init__(self, url: str, directory: Path, target: Target = "copy") -> None:
        self.directory, self._url, self._target = directory, url, target

    def kill_when(self, holds: Callable[[], bool], *, only_jvm: bool = False) -> None:
        """Start the program without an end, and kill its processes as soon as `holds`.

        If only its JVM is killed, the other processes notice that and end by themselves.
        """
        process = self._start("endless")
        try:
            until = time.monotonic() + _DEADLINE_S
            while not holds():
                if process.poll() is not None:
                    self._accept_end(process)
                    process = self._start("endless")
                    until = time.monotonic() + _DEADLINE_S
                assert time.monotonic() < until, process.tail()
                time.sleep(0.001)
            assert process.poll() is None
            if only_jvm:
                (jvm,) = processes.children_of(process.pid)
                processes.kill_process(jvm)
                assert process.wait(_DEADLINE_S) != 0
        finally:
            process.kill_tree()

    def kill_after(self, steps: int, then_s: float, *, only_jvm: bool) -> None:
        """Kill the program `then_s` after it has changed its files `steps` times.

        With no steps, kill it `then_s` after it has connected to the server.
        """
        with psycopg.connect(self._url, autocommit=True) as connection:
            connected = "SELECT FROM pg_stat_activity WHERE application_name LIKE 'onceflow%'"
            seen: list[object] = []

            def has_gone_on() -> bool:
                if not seen and not connection.execute(connected).fetchall():
                    return False
                stored = *map(self.list_numbers, ("offsets", "commits")), self.list_files()
                if not seen or stored != seen[-1]:
                    seen.append(stored)
                if len(seen) <= steps:
                    return False
                time.sleep(then_s)
                return True

            self.kill_when(has_gone_on, only_jvm=only_jvm)

    def run(self) -> None:
        """Run the program to its end."""
        for _ in range(_STARTS_MAX):
            process = self._start("availableNow")
            try:
                if process.wait(_DEADLINE_S) == 0:
                    return
            finally:
                process.kill_tree()
            self._accept_end(process)
        raise AssertionError(f"Spark starved {_STARTS_MAX} times")

    def list_numbers(self, log: str) -> set[int]:
        """Return the numbers of the batches in a log of the query."""
        directory = self.directory / "checkpoint" / log
        if not directory.is_dir():
            return set()
        return {int(file.name) for file in directory.iterdir() if file.name.isdecimal()}

    def is_copying(self) -> bool:
        """Return True if the last logged end is in the first copy."""
        ends = self.directory / "checkpoint" / "offsets"
        last = (ends / str(max(self.list_numbers("offsets")))).read_text().splitlines()[-1]
        position = json.dumps(json.loads(last)["position"]).encode()
        return SlotPosition.from_split(Split("s", position)).is_copying

    def list_files(self) -> set[int]:
        """Return the numbers of the ends whose files are there."""
        files = (self.directory / "changes").rglob("*.arrow")
        return {int(file.name.partition("-")[0]) for file in files if file.name[0] != "."}

    def _start(self, trigger: str) -> Program:
        module = "tests.spark_formats.changes_to_postgres"
        command = python("-m", module, self._url, self.directory, trigger, self._target)
        return Program(self.directory / "driver.log", *command)

    def _accept_end(self, process: Program) -> None:
        """Fail unless the program has ended in a way that the documents name; do what they say."""
        if _NOT_EMPTY in process.output():
            assert not self.list_numbers("offsets")
            shutil.rmtree(self.directory / "checkpoint")
        else:
            assert STARVED in process.output(), f"{process.poll()}: {process.tail()}"


def _create_tables(database: psycopg.Connection[TupleRow]) -> None:
    database.execute("DROP TABLE IF EXISTS original, copy")
    columns = "id bigint PRIMARY KEY, v text, n numeric(10, 2), big text"
    for table in ("original", "copy"):
        database.execute(f"CREATE TABLE {table} ({columns})".encode())
    database.execute(
        "INSERT INTO original SELECT g, 'copied' FROM generate_series(1, %s) AS g", [_ROWS]
    )


def _hash(database: psycopg.Connection[TupleRow], table: str) -> tuple[int, str]:
    """Return the number of rows of `table`, and a hash of all rows."""
    statement = f"SELECT count(*), md5(string_agg(t::text, ',' ORDER BY id)) FROM {table} AS t"
    ((count, digest),) = database.execute(statement.encode()).fetchall()
    return int(count), str(digest)


@pytest.mark.servers
@pytest.mark.timeout(900)
def test_a_driver_killed_in_the_copy_after_a_file_and_before_a_commit_loses_and_doubles_nothing(
    server: EmbeddedPostgres, database: psycopg.Connection[TupleRow], tmp_path: Path
) -> None:
    _create_tables(database)
    driver = Driver(server.url, tmp_path)

    def change() -> None:
        database.execute("UPDATE original SET v = v || '.' WHERE id % 7 = 0")
        database.execute("DELETE FROM original WHERE id % 11 = 0 AND id % 3 = 0")
        database.execute("UPDATE original SET id = -id WHERE id % 13 = 0 AND id > 0")

    # In the copy: a batch with rows is committed, and later ones are not. The first batch may be
    # without rows.
    driver.kill_when(lambda: 1 in driver.list_numbers("commits"))
    assert driver.is_copying()
    change()
    # A file is written whose end Spark has perhaps not logged.
    files = driver.list_files()
    driver.kill_when(lambda: bool(driver.list_files() - files))
    assert driver.list_files() - files
    change()
    # The end of a batch is logged. The lock keeps the batch from its commit.
    with psycopg.connect(server.url) as locking:
        locking.execute("LOCK TABLE copy IN SHARE MODE")
        waiting = "SELECT FROM pg_locks WHERE relation = 'copy'::regclass AND NOT granted"
        driver.kill_when(lambda: bool(database.execute(waiting).fetchall()))
    assert driver.list_numbers("offsets") - driver.list_numbers("commits")
    change()
    driver.run()
    assert _hash(database, "copy") == _hash(database, "original")
    assert database.execute("SELECT FROM pg_prepared_xacts").fetchall() == []


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_a_driver_killed_at_random_moments_passes_each_change_on_once(tmp_path: Path) -> None:
    seed = int(os.environ.get("ONCEFLOW_TEST_SEED", random.randrange(2**32)))
    print(f"seed {seed}; ONCEFLOW_TEST_SEED sets it")  # noqa: T201
    draw = random.Random(seed)
    with (
        EmbeddedPostgres(_SETTINGS) as server,
        psycopg.connect(server.url, autocommit=True) as database,
    ):
        create_original(server.url)
        database.execute(
            "CREATE TABLE log (at bigint GENERATED ALWAYS AS IDENTITY, id bigint, v text,"
            " n numeric(10, 2), big text, _op text)"
        )
        driver = Driver(server.url, tmp_path, "log")
        load = RandomLoad(server.url, seed)
        try:
            for _ in range(_KILLS):
                only_jvm = draw.random() < 0.3
                driver.kill_after(draw.randrange(8), draw.uniform(0, 1), only_jvm=only_jvm)
        finally:
            load.stop()
        assert load.transactions > 50
        driver.run()
        with database.cursor(row_factory=dict_row) as cursor:
            changes = cursor.execute("SELECT * FROM log ORDER BY at").fetchall()
        rows = database.execute("SELECT id, v, n, big FROM original").fetchall()
        assert replay(changes) == {key: tuple(row) for key, *row in rows}, f"seed {seed}"
        assert database.execute("SELECT FROM pg_prepared_xacts").fetchall() == []
