"""`onceflow txn --checkpoint-location`: what a query has in doubt, told and settled by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from examples.own_sink import OwnSink
from tests.integration.postgres_sink_kit import ids_in, prepared, query
from tests.spark_formats.batches import SCHEMA, Driver, killed_at, rows
from typer.testing import CliRunner

from onceflow.cli.main import app
from onceflow.connectors.spark.batch.identity import stream_target
from onceflow.connectors.spark.streaming.checkpoint_location import CheckpointLocation
from onceflow.core.errors import Fenced
from onceflow.core.spi import Sink
from onceflow.sinks import PostgresSink

pytestmark = pytest.mark.integration


def driver_at(checkpoint: Path, sink: Sink) -> Driver:
    """Return the driver of a query that Spark has started with `checkpoint`."""
    checkpoint.mkdir()
    (checkpoint / "metadata").write_text('{"id": "q-1"}')
    named = stream_target(lambda _: sink, {}, CheckpointLocation(str(checkpoint)))
    return Driver(named.target, SCHEMA, rows, named.directory)


@pytest.fixture
def driver(postgres_database: str, tmp_path: Path) -> Driver:
    query(postgres_database, "CREATE TABLE ledger (id bigint, account text, amount int)")
    return driver_at(tmp_path / "checkpoint", PostgresSink(postgres_database, table="ledger"))


def run(command: str, *arguments: str) -> tuple[int, Any, str]:
    outcome = CliRunner().invoke(app, ["txn", command, *arguments, "--json"])
    return outcome.exit_code, json.loads(outcome.stdout or "{}"), outcome.stderr


def verdicts(*where: str) -> list[str]:
    status, printed, errors = run("list", *where)
    assert status == 0, errors
    return [one["verdict"] for one in printed["transactions"]]


def test_what_a_query_decided_is_committed_and_the_rest_rolled_back_when_it_is_fenced(
    driver: Driver, postgres_database: str, tmp_path: Path
) -> None:
    where = ["--checkpoint-location", str(tmp_path / "checkpoint"), "--url", postgres_database]
    assert verdicts(*where) == []
    killed_at("logged", tmp_path, lambda: driver.batch(0, range(5), range(5, 10)))
    assert verdicts(*where) == ["decided", "decided"]
    assert run("abort", "--all", "--yes", *where)[1]["results"] == []
    assert run("commit", "--all", "--yes", *where)[0] == 0
    assert ids_in(postgres_database) == list(range(10))

    plan = driver.plan(1)
    report = driver.task(plan, 0, range(10, 15))
    assert verdicts(*where) == ["pending"]
    (one,) = report.committables
    status, printed, _ = run("abort", str(one.transaction), "--yes", *where)
    assert (status, "if the query runs" in printed["results"][0]["message"]) == (1, True)
    assert run("abort", "--all", "--fence", "--yes", *where)[0] == 0
    assert prepared(postgres_database) == []
    with pytest.raises(Fenced):
        driver.commit([report])
    driver.batch(1, range(10, 15))
    assert ids_in(postgres_database) == list(range(15))
    assert verdicts(*where) == []


def test_staged_rows_of_a_query_are_settled_by_their_sink_and_its_log_below_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "own.db"
    driver = driver_at(tmp_path / "checkpoint", OwnSink(str(path), table="rows", key="id"))
    (tmp_path / "mine_of_txn.py").write_text(
        "from examples.own_sink import OwnSink\n"
        f"sink = OwnSink({str(path)!r}, table='rows', key='id')\n"
    )
    monkeypatch.chdir(tmp_path)
    where = ["--checkpoint-location", str(tmp_path / "checkpoint"), "--sink", "mine_of_txn:sink"]
    killed_at("logged", tmp_path, lambda: driver.batch(0, range(5)))
    assert verdicts(*where) == ["decided"]
    assert run("commit", "--all", "--yes", *where)[0] == 0
    assert verdicts(*where) == []
    driver.batch(1, [5])
    assert run("list", *where, "--check")[0] == 0


def test_another_querys_sink_id_and_missing_options_are_named(
    driver: Driver, postgres_database: str, tmp_path: Path
) -> None:
    driver.batch(0, range(3))
    location = ["--checkpoint-location", str(tmp_path / "checkpoint")]
    assert "--url" in run("list", *location)[2]
    (tmp_path / "checkpoint" / "metadata").write_text('{"id": "q-2"}')
    status, _, errors = run("list", *location, "--url", postgres_database)
    assert (status, "belongs to Spark query q-1" in " ".join(errors.split())) == (3, True)
