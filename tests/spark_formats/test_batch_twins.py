"""A task is tried again while an older try of it is prepared, whose report was lost.

The table has a unique key, so the same rows written again would wait for the older try's locks.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.integration import mysql_sink_kit, postgres_sink_kit
from tests.spark_formats.batches import driver_of, killed_at

from onceflow.core.errors import PreCommitFailed, SinkError
from onceflow.core.spi import Committer, CommitterContext, Sink, SinkWriter, WriterContext
from onceflow.sinks import MySQLSink, PostgresSink

pytestmark = pytest.mark.integration
TABLE = "CREATE TABLE ledger (id bigint PRIMARY KEY, account varchar(50), amount int)"


@dataclass(frozen=True)
class Database:
    """An empty table with a unique key in one of the servers."""

    url: str
    kind: type[PostgresSink] | type[MySQLSink]

    def sink(self, **settings: Any) -> PostgresSink | MySQLSink:
        return self.kind(self.url, table="ledger", **settings)

    def ids(self) -> list[int]:
        if self.kind is PostgresSink:
            return postgres_sink_kit.ids_in(self.url)
        return mysql_sink_kit.ids_in(self.url)

    def prepared(self) -> Sequence[object]:
        if self.kind is PostgresSink:
            return postgres_sink_kit.prepared(self.url)
        return mysql_sink_kit.prepared(self.url)


_MYSQL_SLOW = pytest.param("mysql", marks=pytest.mark.slow)
_MARIADB = pytest.param("mariadb", marks=pytest.mark.slow)
on_both = pytest.mark.parametrize("database", ["postgres", "mysql", _MARIADB], indirect=True)
on_postgres = pytest.mark.parametrize(
    "database", ["postgres", _MYSQL_SLOW, _MARIADB], indirect=True
)
"""On the others only where all is run."""


@pytest.fixture
def database(request: pytest.FixtureRequest) -> Database:
    url: str = request.getfixturevalue(f"{request.param}_database")
    if request.param == "postgres":
        postgres_sink_kit.query(url, TABLE)
        return Database(url, PostgresSink)
    mysql_sink_kit.query(url, TABLE)
    return Database(url, MySQLSink)


@on_both
def test_a_task_tried_again_beside_its_prepared_twin_waits_for_no_lock(
    database: Database, tmp_path: Path
) -> None:
    """Its twin's report was lost; its rows come again, by a unique key."""
    driver = driver_of(database.sink(), tmp_path)
    plan = driver.plan(0)
    driver.task(plan, 0, range(5))
    began = time.monotonic()
    again = driver.task(plan, 0, range(5), task_attempt=1)
    assert time.monotonic() - began < 30, "it waited for its twin's locks"
    other = driver.task(plan, 1, range(5, 10))
    assert len(database.prepared()) == 2
    driver.commit([again, other])
    assert database.ids() == list(range(10))
    assert database.prepared() == []
    assert not driver.in_doubt()


@on_both
@pytest.mark.parametrize("decided", [False, True])
def test_a_batch_with_a_task_beside_its_twin_is_settled_by_the_next_run(
    database: Database, tmp_path: Path, decided: bool
) -> None:
    sink = database.sink(write_mode="upsert", primary_key=("id",))
    driver = driver_of(sink, tmp_path)
    plan = driver.plan(0)
    driver.task(plan, 0, range(5))
    again = driver.task(plan, 0, range(5), task_attempt=1)
    assert again.beside
    if decided:
        killed_at("logged", tmp_path, lambda: driver.commit([again]))
    assert driver.plan(0).decided == decided
    assert database.ids() == (list(range(5)) if decided else [])
    assert not driver.in_doubt()


@pytest.mark.untraced("decides a batch twice in one attempt")
@on_postgres
def test_rows_that_are_staged_where_the_driver_does_not_look_are_not_decided(
    database: Database, tmp_path: Path
) -> None:
    driver = driver_of(database.sink(), tmp_path / "shared")
    plan = driver.plan(0)
    twin = driver.task(plan, 0, range(5))
    elsewhere = driver_of(database.sink(), tmp_path / "elsewhere")
    away = replace(plan, target=replace(plan.target, staging=elsewhere.target.staging))
    again = driver.task(away, 0, range(5), task_attempt=1)
    with pytest.raises(SinkError, match="that the driver does not see"):
        driver.commit([again])
    # Nothing is decided: the twin's report may count still.
    driver.commit([twin])
    assert database.ids() == list(range(5))


@on_postgres
def test_a_task_that_must_wait_for_its_twin_names_it(database: Database, tmp_path: Path) -> None:
    driver = driver_of(database.sink(lock_timeout_s=0.2), tmp_path)
    plan = driver.plan(0)
    (twin,) = driver.task(plan, 0, range(5)).committables
    alone = replace(plan, target=replace(plan.target, staging=None))
    with pytest.raises(PreCommitFailed, match=f"{twin.transaction}.*stagingLocation"):
        driver.task(alone, 0, range(5), task_attempt=1)


@dataclass(frozen=True)
class _OwnSink(Sink):
    """A sink of a user's, who has built it around ours: the engine knows its contract alone."""

    inner: PostgresSink

    def routing_key(self) -> tuple[str, ...]:
        return self.inner.routing_key()

    def open(self, context: CommitterContext, schema: pa.Schema) -> None:
        self.inner.open(context, schema)

    def to_staging(self) -> Sink:
        staging = self.inner.to_staging()
        assert isinstance(staging, PostgresSink)
        return replace(self, inner=staging)

    def writer(self, context: WriterContext) -> SinkWriter:
        return self.inner.writer(context)

    def committer(self, context: CommitterContext) -> Committer:
        return self.inner.committer(context)


@pytest.mark.parametrize("database", ["postgres"], indirect=True)
def test_a_task_of_a_sink_of_ones_own_waits_for_no_twin_where_the_sink_can_stage(
    database: Database, tmp_path: Path
) -> None:
    inner = database.sink(lock_timeout_s=2.0)
    assert isinstance(inner, PostgresSink)
    driver = driver_of(_OwnSink(inner), tmp_path)
    plan = driver.plan(0)
    driver.task(plan, 0, range(5))
    again = driver.task(plan, 0, range(5), task_attempt=1)
    assert again.beside
    driver.commit([again])
    assert database.ids() == list(range(5))
    assert database.prepared() == []
    assert not driver.in_doubt()
