"""`onceflow txn` on a real MySQL and a real MariaDB: what is prepared there, and by whom."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import pytest
from tests.integration.mysql_sink_kit import FLAVORS, Job, ids_in, ledger_rows, prepared, query, xid
from tests.support.aged_log import AgedLog
from typer.testing import CliRunner

from onceflow.cli.main import app
from onceflow.sinks import MySQLSink

SINK_ID = "payments.out"
PASSWORD = "hunter2-Correct-horse"


def run(*arguments: str) -> tuple[int, str, str]:
    outcome = CliRunner().invoke(app, ["txn", *arguments])
    assert PASSWORD not in outcome.output
    return outcome.exit_code, outcome.stdout, outcome.stderr


def run_json(*arguments: str) -> tuple[int, Any]:
    status, printed, errors = run(*arguments, "--json")
    assert printed, errors
    return status, json.loads(printed)


@pytest.fixture(params=FLAVORS)
def url(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue(f"{request.param}_database"))


@pytest.fixture
def log(tmp_path: Path) -> AgedLog:
    log = AgedLog(tmp_path / "checkpoints")
    log.claim()
    return log


@pytest.fixture
def job(url: str, log: AgedLog) -> Iterator[Job]:
    sink = MySQLSink(url, table="ledger", create=True, commit_mode="two_phase")
    with Job(sink, sink_id=SINK_ID, log_id=log.log_id) as job:
        yield job.check(1)


def where(url: str, log: AgedLog) -> list[str]:
    return ["--url", url, "--storage", str(log.root)]


def test_what_is_in_doubt_is_listed_with_rows_age_and_verdict(
    job: Job, log: AgedLog, url: str
) -> None:
    began = datetime.now(timezone.utc)
    decided, undecided = job.prepare(1, range(5)), job.prepare(2, range(5, 8))
    log.decide(1, [decided])
    status, printed = run_json("list", *where(url, log), "--check")
    assert status == 1
    found = [(one["id"], one["verdict"], one["rows"]) for one in printed["transactions"]]
    # The second one's rows are known to nobody but the transaction itself.
    assert found == [
        (str(decided.transaction), "decided", 5),
        (str(undecided.transaction), "undecided", 3),
    ]
    for one in printed["transactions"]:
        moment = datetime.fromisoformat(one["prepared_at"])
        assert began - timedelta(seconds=2) < moment < began + timedelta(seconds=60)


def test_decided_is_committed_exactly_once_and_undecided_rolled_back(
    job: Job, log: AgedLog, url: str
) -> None:
    decided, undecided = job.prepare(1, range(5)), job.prepare(2, range(5, 8))
    log.decide(1, [decided])
    options = [*where(url, log), "--yes"]
    for command, wrong in (("commit", undecided), ("abort", decided)):
        assert run(command, str(wrong.transaction), *options)[0] == 1
    assert len(prepared(url)) == 2
    outcomes = list[str]()
    for _ in range(2):
        status, printed = run_json("commit", str(decided.transaction), *options)
        outcomes += [result["outcome"] for result in printed["results"]]
        assert status == 0
    assert outcomes == ["committed", "already_committed"]
    assert run("abort", "--all", *options)[0] == 0
    assert prepared(url) == []
    assert ids_in(url) == [0, 1, 2, 3, 4]
    assert ledger_rows(url) == [str(decided.transaction)]


def test_what_somebody_rolled_back_is_reported_lost(job: Job, log: AgedLog, url: str) -> None:
    decided = job.prepare(1, range(5))
    log.decide(1, [decided])
    query(url, f"XA ROLLBACK {xid(url, decided.transaction)}")
    status, text, _ = run("commit", str(decided.transaction), *where(url, log), "--yes")
    assert (status, "cannot be committed any more" in text) == (1, True)
    assert ids_in(url) == []


def test_another_logs_transactions_are_foreign(url: str, log: AgedLog) -> None:
    log.decide(1)
    sink = MySQLSink(url, table="ledger", create=True, commit_mode="two_phase")
    with Job(sink, sink_id=SINK_ID, log_id="another log") as other:
        one = other.check(1).prepare(2, range(3))
    _, printed = run_json("list", *where(url, log))
    assert [found["verdict"] for found in printed["transactions"]] == ["foreign"]
    assert run("abort", str(one.transaction), *where(url, log), "--yes")[0] == 1
    assert prepared(url) == [str(one.transaction)]


def test_a_connected_writer_shows_that_the_job_runs(job: Job, log: AgedLog, url: str) -> None:
    one = job.prepare(2, range(3))
    options = [*where(url, log), "--yes"]
    writer = job.writer(1, subtask=7)
    status, printed = run_json("abort", str(one.transaction), *options)
    assert status == 1
    assert "the writer of subtask 7 is connected" in printed["results"][0]["message"]
    assert prepared(url) == [str(one.transaction)]
    writer.close()
    assert run("abort", str(one.transaction), *options)[0] == 0
    assert prepared(url) == []


def test_a_user_who_may_not_list_is_told_the_grant(mysql_database: str, log: AgedLog) -> None:
    parts = urlsplit(mysql_database)
    name = f"u{parts.path[-12:]}"
    query(
        mysql_database,
        f"CREATE USER {name} IDENTIFIED BY '{PASSWORD}'",
        f"GRANT ALL ON {parts.path[1:]}.* TO {name}",
    )
    try:
        address = f"{name}:{PASSWORD}@{parts.hostname}:{parts.port}"
        status, _, errors = run("list", *where(urlunsplit(parts._replace(netloc=address)), log))
        assert (status, "GRANT XA_RECOVER_ADMIN" in errors) == (3, True)
    finally:
        query(mysql_database, f"DROP USER {name}")


def test_passwords_of_the_environment_are_used_and_not_printed(
    mysql_database: str, log: AgedLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = urlsplit(mysql_database)
    name = f"u{parts.path[-12:]}"
    query(
        mysql_database,
        f"CREATE USER {name} IDENTIFIED BY '{PASSWORD}'",
        f"GRANT ALL ON {parts.path[1:]}.* TO {name}",
        f"GRANT XA_RECOVER_ADMIN ON *.* TO {name}",
    )
    try:
        bare = urlunsplit(parts._replace(netloc=f"{name}@{parts.hostname}:{parts.port}"))
        assert run("list", *where(bare, log))[0] == 3
        monkeypatch.setenv("MYSQL_PWD", PASSWORD)
        status, text, errors = run("list", *where(bare, log))
        assert (status, "nothing is in doubt" in text) == (0, True), errors
    finally:
        query(mysql_database, f"DROP USER {name}")
