"""A job whose checkpoint is aborted after one of its subtasks has prepared its transaction."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from tests.integration import postgres_sink_kit as postgres
from tests.integration.postgres_changes_kit import wait_until
from tests.support.ledger import SETTINGS

from onceflow import Checkpointing, ExponentialDelay, LocalProcesses, Pipeline
from onceflow.integration.servers.postgres import EmbeddedPostgres
from onceflow.sinks import PostgresSink
from onceflow.sources import PostgresChanges


@pytest.fixture
def server() -> Iterator[EmbeddedPostgres]:
    with EmbeddedPostgres({"wal_level": "logical"}) as running:
        yield running


@pytest.mark.servers
@pytest.mark.timeout(300)
def test_deletes_that_wait_for_an_aborted_checkpoint_delay_the_job_and_stop_it_not(
    server: EmbeddedPostgres, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The delete waits for a transaction that waits for the delete's own checkpoint.

    The attempt ends. Recovery rolls the transaction back, so the next attempt does not wait again.
    """
    caplog.set_level(logging.INFO)
    postgres.query(
        server.url,
        "CREATE TABLE original (id bigint PRIMARY KEY, v text)",
        "CREATE TABLE copy (id bigint PRIMARY KEY, v text)",
        "INSERT INTO original VALUES (1, 'old')",
    )
    source = PostgresChanges(server.url, table="original")
    sink = PostgresSink(
        server.url,
        table="copy",
        write_mode="upsert",
        primary_key=("id",),
        operation_column="_op",
        commit_mode="two_phase",
        lock_timeout_s=12.0,
    )
    pipeline = Pipeline(
        LocalProcesses(tmp_path / "logs"),
        name="changes",
        parallelism=2,
        checkpointing=Checkpointing(
            storage=str(tmp_path / "checkpoints"),
            interval=0.3,
            timeout=2.0,
            tolerable_failures=1_000,
        ),
        restart=ExponentialDelay(initial_delay_s=0.2, max_delay_s=1.0),
        settings=SETTINGS,
    )
    pipeline.read(source, uid="original").write(sink, uid="copy")
    job = pipeline.start()
    try:
        wait_until(lambda: _rows(server, "copy") == [(1, "old")])
        with psycopg.connect(server.url) as other:
            # One subtask waits for this lock, so its checkpoint is aborted after `timeout`.
            other.execute("SELECT FROM copy WHERE id = 1 FOR UPDATE")
            postgres.query(
                server.url,
                "UPDATE original SET v = 'new' WHERE id = 1",
                "INSERT INTO original SELECT i, 'short' FROM generate_series(2, 30) AS i",
            )
            # The other one has prepared its rows by then.
            wait_until(lambda: bool(_prepared(server)) and "was abandoned" in caplog.text)
            orphans = _prepared(server)
            postgres.query(server.url, "DELETE FROM original WHERE id BETWEEN 2 AND 29")
            # The barriers of two more checkpoints come after the deletes.
            abandoned = caplog.text.count("was abandoned")
            wait_until(lambda: caplog.text.count("was abandoned") >= abandoned + 2)
        expected = [(1, "new"), (30, "short")]
        wait_until(lambda: _rows(server, "copy") == expected)
        assert _prepared(server).isdisjoint(orphans)
    finally:
        job.stop()
    assert "Do not commit or roll them back by hand" in caplog.text


def _rows(server: EmbeddedPostgres, table: str) -> list[tuple[int, str]]:
    return [
        (int(key), str(value))
        for key, value in postgres.query(server.url, f"SELECT id, v FROM {table} ORDER BY id")
    ]


def _prepared(server: EmbeddedPostgres) -> set[str]:
    return {str(gid) for (gid,) in postgres.query(server.url, "SELECT gid FROM pg_prepared_xacts")}
