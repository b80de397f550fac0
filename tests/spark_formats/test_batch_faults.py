"""A server dies, and replies are lost, in the middle of a batch: each row is there once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from tests.integration.postgres_sink_kit import ids_in, prepared, query
from tests.integration.word_proxy import WordProxy
from tests.spark_formats.batches import driver_of, rows

from onceflow.connectors.spark.batch.task_writer import TaskIdentity, write_task
from onceflow.core.errors import PreCommitFailed
from onceflow.integration.pytest_plugin import DatabaseFactory
from onceflow.integration.servers.kinds import OwnDatabase
from onceflow.sinks import PostgresSink

pytestmark = pytest.mark.integration
TABLE = "CREATE TABLE ledger (id bigint PRIMARY KEY, account text, amount int)"


@pytest.fixture
def server(postgres_server: DatabaseFactory) -> OwnDatabase:
    server = postgres_server()
    query(server.url, TABLE)
    return server


@pytest.fixture
def proxy(server: OwnDatabase) -> Iterator[WordProxy]:
    proxy = WordProxy((server.host, server.port))
    yield proxy
    proxy.close()


def test_a_database_that_is_killed_between_the_steps_of_a_batch_has_every_row_once(
    server: OwnDatabase, tmp_path: Path
) -> None:
    driver = driver_of(PostgresSink(server.url, table="ledger"), tmp_path)
    plan = driver.plan(0)
    server.restart()
    reports = [driver.task(plan, 0, range(5)), driver.task(plan, 1, range(5, 10))]
    server.restart()
    driver.commit(reports)
    server.restart()
    assert driver.plan(0).decided
    driver.batch(1, range(10, 12))
    assert ids_in(server.url) == list(range(12))
    assert prepared(server.url) == []


@pytest.mark.parametrize("word", ["onceflow_batches", "COMMIT PREPARED", "UPDATE"])
def test_a_reply_that_is_lost_on_the_way_from_the_database_does_no_harm(
    server: OwnDatabase, proxy: WordProxy, tmp_path: Path, word: str
) -> None:
    url = server.url.replace(f":{server.port}/", f":{proxy.port}/")
    driver = driver_of(PostgresSink(url, table="ledger"), tmp_path)
    driver.batch(0, range(5))
    plan = driver.plan(1)
    reports = [driver.task(plan, 0, range(5, 10)), driver.task(plan, 1, range(10, 15))]
    proxy.lose_reply(word)
    driver.commit(reports)
    assert proxy.resets == 1
    assert ids_in(server.url) == list(range(15))
    driver.batch(2, [15])
    assert ids_in(server.url) == list(range(16))
    assert prepared(server.url) == []


def test_one_key_in_two_tasks_of_a_batch_is_refused_by_name(
    server: OwnDatabase, tmp_path: Path
) -> None:
    sink = PostgresSink(
        server.url,
        table="ledger",
        write_mode="upsert",
        primary_key=("id",),
        commit_mode="two_phase",
        lock_timeout_s=0.5,
    )
    driver = driver_of(sink, tmp_path)
    plan = driver.plan(0)
    driver.task(plan, 0, [1, 2])
    with pytest.raises(PreCommitFailed, match=r"repartition\('id'\)"):
        driver.task(plan, 1, [2, 3])
    driver.abort(plan)
    driver.batch(0, [1, 2], [3])
    assert ids_in(server.url) == [1, 2, 3]
    assert prepared(server.url) == []


def test_a_task_of_upserts_that_loses_its_server_is_not_told_to_repartition(
    server: OwnDatabase, tmp_path: Path
) -> None:
    sink = PostgresSink(server.url, table="ledger", write_mode="upsert", primary_key=("id",))
    driver = driver_of(sink, tmp_path)
    plan = driver.plan(0)

    def parts() -> Iterator[pa.RecordBatch]:
        yield rows([1])
        server.kill()

    with pytest.raises(PreCommitFailed) as lost:
        write_task(plan, TaskIdentity(0, 0, 0, batch=0), parts())
    assert "repartition" not in str(lost.value)
    server.start()
    driver.batch(0, [1, 2])
    assert ids_in(server.url) == [1, 2]
