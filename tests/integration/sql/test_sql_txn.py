"""`onceflow txn` on real servers: what is prepared there, under every sink id of ours."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from tests.integration.sql.databases import (
    PASSWORD,
    SECRETS,
    Database,
    MariaDB,
    MySQL,
    Postgres,
    SqlJob,
)
from tests.support.aged_log import HOUR_S, AgedLog
from typer.testing import CliRunner

from onceflow.cli.main import app

SINK_ID = "payments.out"
_OPERATIONS = Path(__file__).parents[3] / "docs" / "operations.md"


@dataclass(frozen=True)
class _Dialect:
    """The messages of one kind of database."""

    rows_of_undecided: int | None
    """How many rows it says a transaction has that no checkpoint lists."""
    said_of_writer: str
    """What is said while the writer of attempt 1 and subtask 7 is connected."""
    password_variable: str
    """Where its own tools look for a password."""


_MYSQL = _Dialect(3, "the writer of subtask 7 is connected", "MYSQL_PWD")
_DIALECTS = {
    "postgres": _Dialect(None, "a writer of attempt 1 is connected", "PGPASSWORD"),
    "mysql": _MYSQL,
    "mariadb": _MYSQL,
}
_slow_but_on_postgres = pytest.mark.parametrize(
    "kind",
    [Postgres, *(pytest.param(kind, marks=pytest.mark.slow) for kind in (MySQL, MariaDB))],
    indirect=True,
    ids=lambda kind: kind.name,
)


def _run(*arguments: str) -> tuple[int, str, str]:
    outcome = CliRunner().invoke(app, ["txn", *arguments])
    assert not [secret for secret in SECRETS if secret in outcome.output]
    return outcome.exit_code, outcome.stdout, outcome.stderr


def _run_json(*arguments: str) -> tuple[int, Any]:
    status, printed, errors = _run(*arguments, "--json")
    assert printed, errors
    return status, json.loads(printed)


@pytest.fixture
def dialect(kind: type[Database]) -> _Dialect:
    return _DIALECTS[kind.name]


@pytest.fixture
def log(tmp_path: Path) -> AgedLog:
    log = AgedLog(tmp_path / "checkpoints")
    log.claim()
    return log


@pytest.fixture
def job(database: Database, log: AgedLog) -> Iterator[SqlJob]:
    with _job(database, log.log_id) as job:
        yield job.check()


def _job(database: Database, log_id: str) -> SqlJob:
    sink = database.sink(table="ledger", create=True, commit_mode="two_phase")
    return SqlJob(sink, sink_id=SINK_ID, log_id=log_id)


def _where(database: Database, log: AgedLog) -> list[str]:
    return ["--url", database.url, "--storage", str(log.root)]


def test_what_is_in_doubt_is_listed_with_rows_age_and_verdict(
    job: SqlJob, log: AgedLog, database: Database, dialect: _Dialect
) -> None:
    began = datetime.now(timezone.utc)
    decided, undecided = job.prepare(1, range(5)), job.prepare(2, range(5, 8))
    log.decide(1, [decided])
    database.prepare("of somebody else", "INSERT INTO ledger (id) VALUES (8)")
    status, printed = _run_json("list", *_where(database, log), "--check")
    assert status == 1
    found = [(one["id"], one["verdict"], one["rows"]) for one in printed["transactions"]]
    # The second one's rows are known to nobody but the transaction itself.
    assert found == [
        (str(decided.transaction), "decided", 5),
        (str(undecided.transaction), "undecided", dialect.rows_of_undecided),
    ]
    for one in printed["transactions"]:
        moment = datetime.fromisoformat(one["prepared_at"])
        assert began - timedelta(seconds=1) < moment < began + timedelta(seconds=60)
        assert 0 <= one["age_seconds"] < 60


def test_decided_is_committed_exactly_once_and_undecided_rolled_back(
    job: SqlJob, log: AgedLog, database: Database
) -> None:
    decided, undecided = job.prepare(1, range(5)), job.prepare(2, range(5, 8))
    log.decide(1, [decided])
    options = [*_where(database, log), "--yes"]
    for command, wrong in (("commit", undecided), ("abort", decided)):
        status, text, _ = _run(command, str(wrong.transaction), *options)
        assert (status, "refused: " in text) == (1, True)
    assert len(database.prepared()) == 2
    outcomes = list[str]()
    for _ in range(2):
        status, printed = _run_json("commit", str(decided.transaction), *options)
        outcomes += [result["outcome"] for result in printed["results"]]
        assert status == 0
    assert outcomes == ["committed", "already_committed"]
    assert _run("abort", "--all", *options)[0] == 0
    assert database.prepared() == []
    assert database.ids_in() == [0, 1, 2, 3, 4]
    assert database.ledger_rows() == [str(decided.transaction)]
    # What is committed is never taken back, not even by force.
    status, text, _ = _run("abort", str(decided.transaction), *options, "--force")
    assert (status, "was already committed" in text) == (1, True)
    assert database.ids_in() == [0, 1, 2, 3, 4]


def test_what_somebody_rolled_back_is_reported_lost_and_not_committed(
    job: SqlJob, log: AgedLog, database: Database
) -> None:
    decided = job.prepare(1, range(5))
    log.decide(1, [decided])
    database.settle(database.words.rollback, decided.transaction)
    options = _where(database, log)
    status, printed = _run_json("show", str(decided.transaction), *options)
    assert (status, printed["in_doubt"], printed["verdict"]) == (0, False, "decided")
    status, text, _ = _run("commit", str(decided.transaction), *options, "--yes")
    assert (status, "can no longer be committed" in text) == (1, True)
    assert database.ids_in() == []


def test_a_loss_that_was_made_good_by_hand_lets_the_job_go_on(
    job: SqlJob, log: AgedLog, database: Database
) -> None:
    """The steps of docs/operations.md, with the statement as it stands there."""
    decided = job.prepare(1, range(5))
    log.decide(1, [decided])
    database.settle(database.words.rollback, decided.transaction)
    statements = re.findall(r"```sql\n(.*?)```", _OPERATIONS.read_text(), flags=re.DOTALL)
    (statement,) = (statement for statement in statements if "INSERT INTO" in statement)
    attempt, checkpoint = decided.transaction.attempt, decided.transaction.checkpoint
    for shown, meant in (
        ("onceflow.onceflow_ledger", database.ledger),
        ("payments.out/7/41/0/0", str(decided.transaction)),
        ("7, 41, 0", f"{attempt}, {checkpoint}, 0"),
    ):
        assert shown in statement
        statement = statement.replace(shown, meant)
    database.query(statement)
    options = [*_where(database, log), "--yes"]
    status, printed = _run_json("commit", str(decided.transaction), *options)
    assert (status, printed["results"][0]["outcome"]) == (0, "already_committed")
    assert database.ids_in() == []


def test_an_older_copy_of_the_log_rolls_nothing_back_and_is_named(
    job: SqlJob, log: AgedLog, database: Database, tmp_path: Path
) -> None:
    log.decide(1, [job.prepare(1, range(5))])
    options = [*_where(database, log), "--yes"]
    assert _run("commit", "--all", *options)[0] == 0
    older = AgedLog(tmp_path / "older copy")
    shutil.copytree(log.root, older.root)
    log.decide(2, [job.prepare(2, range(5, 8))])
    assert _run("commit", "--all", *options)[0] == 0
    decided = job.prepare(3, range(8, 10))
    log.decide(3, [decided])
    older.age(HOUR_S)
    copied = [*_where(database, older), "--yes"]
    for command in ("abort", "commit"):
        status, printed = _run_json(command, str(decided.transaction), *copied)
        assert status == 1
        (result,) = printed["results"]
        assert result["verdict"] == "foreign"
        committed = "has committed checkpoint 2 of attempt 1, and the log ends at checkpoint 1"
        assert committed in result["message"]
        assert "this log is an older copy" in result["message"]
    assert database.prepared() == [str(decided.transaction)]
    assert _run("commit", "--all", *options)[0] == 0
    assert database.ids_in() == list(range(10))


def test_a_sink_id_that_another_log_has_claimed_is_left_alone(
    database: Database, log: AgedLog
) -> None:
    log.decide(1)
    with _job(database, "another log") as other:
        one = other.check().prepare(2, range(3))
    status, printed = _run_json("list", *_where(database, log))
    assert [found["verdict"] for found in printed["transactions"]] == ["foreign"]
    assert "another log" in printed["transactions"][0]["reason"]
    for command in ("commit", "abort"):
        status, _, _ = _run(command, str(one.transaction), *_where(database, log), "--yes")
        assert status == 1
    assert database.prepared() == [str(one.transaction)]


def test_a_connected_writer_shows_that_the_job_runs(
    job: SqlJob, log: AgedLog, database: Database, dialect: _Dialect
) -> None:
    """The log has been quiet for an hour; the database knows better."""
    one = job.prepare(2, range(3))
    options = [*_where(database, log), "--yes"]
    writer = job.writer(1, subtask=7)
    status, printed = _run_json("abort", str(one.transaction), *options)
    assert status == 1
    assert dialect.said_of_writer in printed["results"][0]["message"]
    assert printed["results"][0]["verdict"] == "pending"
    assert database.prepared() == [str(one.transaction)]
    writer.close()
    assert _run("abort", str(one.transaction), *options)[0] == 0
    assert database.prepared() == []


@_slow_but_on_postgres
@pytest.mark.servers
def test_what_another_session_holds_is_not_called_done(
    job: SqlJob, log: AgedLog, database: Database
) -> None:
    """A second helper, or the job itself, is committing the same one at this moment."""
    log.decide(1, [job.prepare(1, range(5))])
    command = [sys.executable, "-m", "onceflow.cli.main", "txn", "commit", "--all", "--yes"]
    command += [*_where(database, log), "--json"]
    outcomes = list[str]()
    with ExitStack() as running:
        helpers = [
            running.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
            for _ in range(3)
        ]
        for helper in helpers:
            printed, _ = helper.communicate(timeout=120)
            outcomes += [result["outcome"] for result in json.loads(printed)["results"]]
    assert outcomes.count("committed") == 1
    assert set(outcomes) <= {"committed", "already_committed", "retry_later"}
    assert database.ids_in() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("kind", [MySQL], indirect=True, ids=["mysql"])
def test_a_user_who_may_not_list_is_told_the_grant(database: Database, log: AgedLog) -> None:
    """In the others everybody may."""
    with database.user("ALL ON *") as limited:
        status, _, errors = _run("list", *_where(limited, log))
        assert (status, "GRANT XA_RECOVER_ADMIN" in errors) == (3, True)


def test_passwords_come_by_four_ways_and_are_never_printed(
    guarded: Database,
    dialect: _Dialect,
    log: AgedLog,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log_options = ["--storage", str(log.root)]
    secret = tmp_path / "password"
    secret.write_text(f"{PASSWORD}\n")
    with guarded.user(*guarded.grants_of_job) as known:
        user = str(urlsplit(known.url).username)
        bare = known.by_login(user).url
        with _job(known, log.log_id) as job:
            log.decide(1, [job.check().prepare(1, range(5))])
        monkeypatch.setenv("PAYMENTS_PASSWORD", SECRETS[1])
        by_reference = bare.replace(f"{user}@", f"{user}:${{env:PAYMENTS_PASSWORD}}@")
        ways = [["--url", known.url], ["--url", bare, "--password-file", str(secret)]]
        ways.append(["--url", by_reference])
        for way in ways:
            status, text, errors = _run("list", *way, *log_options)
            assert (status, "decided" in text) == (0, True), errors
        status, _, errors = _run("list", "--url", bare)
        assert (status, user in errors) == (3, True)
        monkeypatch.setenv(dialect.password_variable, PASSWORD)
        monkeypatch.setenv("ONCEFLOW_TXN_URL", bare)
        assert _run("list", *log_options, "--check")[0] == 1
        assert _run("commit", "--all", *log_options, "--yes", "--json")[0] == 0
        assert guarded.ids_in() == [0, 1, 2, 3, 4]
        assert "nothing is in doubt" in _run("list", *log_options)[1]
        # Wrong in every place in which a password can be wrong.
        for way in (
            ["--url", known.by_login(f"{user}:{SECRETS[1]}x").url],
            ["--url", known.url.replace(f"{known.scheme}://", "oracle://")],
            ["--url", known.url.replace("@127", "@@127")],
            ["--url", known.url, "--password-file", str(tmp_path / "nowhere")],
        ):
            assert _run("list", *way, *log_options)[0] in (2, 3)


def test_a_server_that_does_not_answer_is_reported_in_time(kind: type[Database]) -> None:
    nowhere = f"{kind.scheme}://u:secret@127.0.0.1:1/db"
    status, _, errors = _run("list", "--url", nowhere, "--timeout", "2")
    assert status == 3
    assert "127.0.0.1:1" in errors
    assert "secret" not in errors


@_slow_but_on_postgres
def test_a_paused_server_is_given_up_after_the_timeout(kind: type[Database]) -> None:
    with kind.server() as server:
        database = kind.create(server, "paused")
        server.pause()
        began = datetime.now(timezone.utc)
        try:
            status, _, errors = _run("list", "--url", database.url, "--timeout", "2")
        finally:
            server.unpause()
        assert (datetime.now(timezone.utc) - began).total_seconds() < 60
        assert status == 3, errors
