"""`onceflow txn --sink` with real sinks whose rows wait in checkpoint storage, or in files."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.dataset as ds
import pytest
from tests.integration.kafka_sink_kit import ids_in as ids_in_topic
from tests.integration.mysql_sink_kit import ids_in as ids_in_mysql
from tests.integration.postgres_sink_kit import ids_in as ids_in_postgres
from tests.integration.sink_kit import SCHEMA, rows
from tests.support.aged_log import AgedLog
from typer.testing import CliRunner

from onceflow.cli.main import app
from onceflow.core.protocol.committables import Committable
from onceflow.core.protocol.ids import AttemptId, CheckpointId
from onceflow.core.spi import CommitterContext, Sink, WriterContext
from onceflow.integration.pytest_plugin import TopicFactory
from onceflow.integration.servers.kinds import KafkaServer
from onceflow.sinks import FileSink, KafkaSink, MySQLSink, PostgresSink, SQLiteSink

SINK_ID = "payments.out"


@dataclass
class Target:
    """A sink, its construction as text, and what its readers see."""

    sink: Sink
    source: str
    ids: Callable[[], list[int]]
    kind: str = "staged"
    url: str = ""


@pytest.fixture(params=["postgres", "mysql", "mariadb", "kafka", "files"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Target:
    if request.param == "files":
        files = str(tmp_path / "out")
        return Target(
            FileSink(files),
            f"FileSink({files!r})",
            lambda: _ids_in_files(files),
            "prepared",
            f"file://{files}",
        )
    if request.param == "kafka":
        server: KafkaServer = request.getfixturevalue("onceflow_kafka")
        make: TopicFactory = request.getfixturevalue("kafka_topic")
        servers, topic = server.bootstrap_servers, make(1)
        return Target(
            KafkaSink(servers, topic=topic),
            f"KafkaSink({servers!r}, topic={topic!r})",
            lambda: ids_in_topic(servers, topic),
            url=f"kafka://{servers}",
        )
    url = str(request.getfixturevalue(f"{request.param}_database"))
    options = "table='ledger', create=True, commit_mode='ledger'"
    if request.param in ("mysql", "mariadb"):
        return Target(
            MySQLSink(url, table="ledger", create=True, commit_mode="ledger"),
            f"MySQLSink({url!r}, {options})",
            lambda: ids_in_mysql(url),
        )
    return Target(
        PostgresSink(url, table="ledger", create=True, commit_mode="ledger"),
        f"PostgresSink({url!r}, {options})",
        lambda: ids_in_postgres(url),
    )


def _ids_in_files(directory: str) -> list[int]:
    found = ds.dataset(directory, format="parquet").to_table()
    return sorted(found["id"].to_pylist()) if found.num_rows else []


@pytest.fixture
def log(tmp_path: Path) -> AgedLog:
    log = AgedLog(tmp_path / "checkpoints")
    log.claim()
    return log


def pre_commit(log: AgedLog, sink: Sink, checkpoint: int, ids: range) -> Committable:
    writer = sink.writer(
        WriterContext(
            "payments", "out", SINK_ID, 0, 1, AttemptId(1), CheckpointId(checkpoint), SCHEMA,
            staging=log.storage.staging(SINK_ID),
        )
    )  # fmt: skip
    writer.write(rows(ids))
    (committable,) = writer.pre_commit(CheckpointId(checkpoint))
    writer.close()
    return committable


def run(*arguments: str) -> tuple[int, Any]:
    outcome = CliRunner().invoke(app, ["txn", *arguments, "--json"])
    assert outcome.stdout, outcome.stderr
    return outcome.exit_code, json.loads(outcome.stdout)


def test_staged_rows_are_applied_or_dropped_as_the_log_says(
    target: Target, log: AgedLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    staging = log.storage.staging(SINK_ID)
    context = CommitterContext("payments", "out", SINK_ID, AttemptId(1), log.log_id, staging)
    target.sink.open(context, SCHEMA)
    decided = pre_commit(log, target.sink, 1, range(5))
    undecided = pre_commit(log, target.sink, 2, range(5, 8))
    log.decide(1, [decided])
    # The job has died; somebody has its sink in a module.
    (tmp_path / "staged_job.py").write_text(
        f"from onceflow.sinks import *\n\nsink = {target.source}\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "staged_job", raising=False)
    options = ["--sink", "staged_job:sink", "--sink-id", SINK_ID, "--storage", str(log.root)]

    status, printed = run("list", *options)
    found = [(one["id"], one["kind"], one["verdict"]) for one in printed["transactions"]]
    assert found == [
        (str(decided.transaction), target.kind, "decided"),
        (str(undecided.transaction), target.kind, "undecided"),
    ]
    assert all(one["age_seconds"] < 60 for one in printed["transactions"])
    # What lies in files is not in the job's storage.
    _, by_storage = run("list", "--storage", str(log.root))
    counted = [one["rows"] for one in by_storage["transactions"]]
    assert counted == ([5, 3] if target.kind == "staged" else [])
    for command, wrong in (("commit", undecided), ("abort", decided)):
        assert run(command, str(wrong.transaction), *options, "--yes")[0] == 1
    assert target.ids() == []

    outcomes = list[str]()
    for _ in range(2):
        status, printed = run("commit", str(decided.transaction), *options, "--yes")
        outcomes += [result["outcome"] for result in printed["results"]]
        assert status == 0, printed
    assert outcomes == ["committed", "already_committed"]
    status, printed = run("abort", "--all", *options, "--yes")
    assert (status, [result["outcome"] for result in printed["results"]]) == (0, ["aborted"])
    assert target.ids() == [0, 1, 2, 3, 4]
    assert run("list", *options, "--check") == (0, {"transactions": []})
    # Nor by storage alone, where the Kafka sink keeps a commit record of what it has committed.
    assert run("list", "--storage", str(log.root), "--check") == (0, {"transactions": []})


@pytest.mark.parametrize("target", ["kafka", "files"], indirect=True)
def test_what_brokers_and_directories_hold_is_settled_by_their_address_alone(
    target: Target, log: AgedLog, tmp_path: Path
) -> None:
    context = CommitterContext(
        "payments", "out", SINK_ID, AttemptId(1), log.log_id, log.storage.staging(SINK_ID)
    )
    target.sink.open(context, SCHEMA)
    decided = pre_commit(log, target.sink, 1, range(5))
    undecided = pre_commit(log, target.sink, 2, range(5, 8))
    log.decide(1, [decided])
    options = ["--url", target.url, "--storage", str(log.root)]
    _, printed = run("list", *options)
    found = [(one["id"], one["verdict"]) for one in printed["transactions"]]
    assert found == [
        (str(decided.transaction), "decided"),
        (str(undecided.transaction), "undecided"),
    ]
    assert run("abort", str(decided.transaction), *options, "--yes")[0] == 1
    for command, outcome in (("commit", "committed"), ("abort", "aborted")):
        status, printed = run(command, "--all", *options, "--yes")
        results = [result["outcome"] for result in printed["results"]]
        assert (status, results) == (0, [outcome]), printed
    assert target.ids() == [0, 1, 2, 3, 4]
    assert run("list", *options, "--check") == (0, {"transactions": []})


def test_a_sqlite_file_tells_whose_its_rows_are_and_asks_for_the_sink(
    log: AgedLog, tmp_path: Path
) -> None:
    url = f"sqlite:///{tmp_path}/books.db"
    sink = SQLiteSink(url, table="ledger", create=True)
    context = CommitterContext(
        "payments", "out", SINK_ID, AttemptId(1), log.log_id, log.storage.staging(SINK_ID)
    )
    sink.open(context, SCHEMA)
    decided = pre_commit(log, sink, 1, range(5))
    log.decide(1, [decided])
    options = ["--url", url, "--storage", str(log.root)]
    _, printed = run("list", *options)
    assert [one["id"] for one in printed["transactions"]] == [str(decided.transaction)]
    outcome = CliRunner().invoke(app, ["txn", "commit", "--all", *options, "--yes"])
    assert "--sink" in outcome.output
    missing = CliRunner().invoke(app, ["txn", "list", "--url", f"sqlite:///{tmp_path}/no.db"])
    assert (missing.exit_code, (tmp_path / "no.db").exists()) == (2, False)
