"""Staged rows of a batch become visible by its decision itself, in one transaction."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import pytest
from tests.integration import mysql_sink_kit, postgres_sink_kit
from tests.spark_formats.batches import Driver, driver_of, killed_at
from tests.spark_formats.test_batch_kills import POINTS

from onceflow.core.crash_points import CrashPoint
from onceflow.core.errors import BadRow
from onceflow.sinks import MySQLSink, PostgresSink, SQLiteSink

pytestmark = pytest.mark.integration
TABLE = "CREATE TABLE ledger (id bigint PRIMARY KEY, account varchar(50) NOT NULL, amount int)"
Query: TypeAlias = Callable[[str], Sequence[Sequence[object]]]


@dataclass(frozen=True)
class Target:
    """A table of one database, into which a driver writes staged rows."""

    driver: Driver
    query: Query

    def ids(self) -> list[int]:
        return [int(str(row[0])) for row in self.query("SELECT id FROM ledger ORDER BY id")]

    def count(self) -> int:
        return int(str(self.query("SELECT count(*) FROM ledger")[0][0]))

    def count_during(self, work: Callable[[], object]) -> set[int]:
        """Return every number of rows that a reader saw before, while and after `work` ran."""
        seen, began, ended = {self.count()}, threading.Event(), threading.Event()

        def read() -> None:
            while not ended.is_set():
                seen.add(self.count())
                began.set()

        with ThreadPoolExecutor(1) as pool:
            reader = pool.submit(read)
            try:
                assert began.wait(30)
                work()
            finally:
                ended.set()
            reader.result()
        return seen | {self.count()}


def target_of(kind: str, request: pytest.FixtureRequest, directory: Path) -> Target:
    """Return an empty table in a database of `kind`, and its driver in ledger mode."""
    sink: PostgresSink | MySQLSink | SQLiteSink
    if kind == "sqlite":
        path = str(directory / "out.db")

        def query(statement: str) -> Sequence[Sequence[object]]:
            with closing(sqlite3.connect(path, timeout=30, isolation_level=None)) as database:
                return database.execute(statement).fetchall()

        sink = SQLiteSink(path, table="ledger")
    else:
        url: str = request.getfixturevalue(f"{kind}_database")
        kit = postgres_sink_kit if kind == "postgres" else mysql_sink_kit

        def query(statement: str) -> Sequence[Sequence[object]]:
            found: Sequence[Sequence[object]] = kit.query(url, statement)
            return found

        sink_class = PostgresSink if kind == "postgres" else MySQLSink
        sink = sink_class(url, table="ledger", commit_mode="ledger")
    query(TABLE)
    return Target(driver_of(sink, directory), query)


SLOW = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("mysql", "mariadb", "sqlite")]
on_all = pytest.mark.parametrize("kind", ["postgres", *SLOW])


@on_all
@pytest.mark.parametrize("point", POINTS)
def test_a_killed_batch_of_staged_rows_is_visible_whole_or_not_at_all(
    kind: str, point: CrashPoint, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Also before anybody runs it again, which writes each row once."""
    target = target_of(kind, request, tmp_path)
    driver = target.driver
    driver.batch(0, range(5))
    killed_at(point, tmp_path, lambda: driver.batch(1, range(5, 10), range(10, 15)))
    assert target.ids() in (list(range(5)), list(range(15)))
    driver.batch(1, range(5, 15), [], fingerprint="offsets of 1")
    assert target.ids() == list(range(15))
    assert not driver.in_doubt()


@on_all
def test_a_reader_never_sees_part_of_a_batch_of_staged_rows(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    target = target_of(kind, request, tmp_path)
    driver, count = target.driver, 8_000
    plan = driver.plan(0)
    parts = (range(first, first + count // 4) for first in range(0, count, count // 4))
    reports = [driver.task(plan, index, part) for index, part in enumerate(parts)]
    assert target.count_during(lambda: driver.commit(reports)) == {0, count}


@on_all
@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param([100], [3], id="a-key-that-is-there"),
        pytest.param([100, 101], [101], id="a-key-in-two-tasks"),
    ],
)
def test_a_row_that_breaks_a_constraint_is_found_before_its_batch_is_decided(
    kind: str,
    first: list[int],
    second: list[int],
    request: pytest.FixtureRequest,
    tmp_path: Path,
) -> None:
    """Nothing of the batch is there then, and nothing of it waits: other rows may come instead."""
    target = target_of(kind, request, tmp_path)
    driver = target.driver
    driver.batch(0, range(5))
    plan = driver.plan(1)
    reports = [driver.task(plan, 0, first), driver.task(plan, 1, second)]
    with pytest.raises(BadRow, match="batch 1 of q is not decided") as refused:
        driver.commit(reports)
    assert len(str(refused.value)) < 1_000
    driver.abort()
    assert target.ids() == list(range(5))
    assert not driver.in_doubt()
    driver.batch(1, [100], [101])
    assert target.ids() == [*range(5), 100, 101]
