"""`onceflow txn` on a real Postgres: what is prepared there, under every sink id of ours."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit, urlunsplit

import pytest
from tests.integration.postgres_sink_kit import Job, ids_in, ledger_rows, prepared, query
from tests.support.aged_log import AgedLog
from typer.testing import CliRunner

from onceflow.cli.main import app
from onceflow.integration.servers import EmbeddedPostgres
from onceflow.sinks import PostgresSink

PASSWORD = "hunter2/correct:horse"
SINK_ID = "payments.out"


def run(*arguments: str) -> tuple[int, str, str]:
    outcome = CliRunner().invoke(app, ["txn", *arguments])
    assert PASSWORD not in outcome.output
    assert quote(PASSWORD, safe="") not in outcome.output
    return outcome.exit_code, outcome.stdout, outcome.stderr


def run_json(*arguments: str) -> tuple[int, Any]:
    status, printed, errors = run(*arguments, "--json")
    assert printed, errors
    return status, json.loads(printed)


@pytest.fixture
def log(tmp_path: Path) -> AgedLog:
    log = AgedLog(tmp_path / "checkpoints")
    log.claim()
    return log


@pytest.fixture
def job(postgres_database: str, log: AgedLog) -> Iterator[Job]:
    sink = PostgresSink(postgres_database, table="ledger", create=True, commit_mode="two_phase")
    with Job(sink, sink_id=SINK_ID, log_id=log.log_id) as job:
        yield job.check(1)


def where(url: str, log: AgedLog) -> list[str]:
    return ["--url", url, "--storage", str(log.root)]


def test_what_is_in_doubt_is_listed_with_its_age_and_verdict(
    job: Job, log: AgedLog, postgres_database: str
) -> None:
    began = datetime.now(timezone.utc)
    decided, undecided = job.prepare(1, range(5)), job.prepare(2, range(5, 8))
    log.decide(1, [decided])
    query(postgres_database, "BEGIN; CREATE TABLE x (); PREPARE TRANSACTION 'of somebody else'")
    status, printed = run_json("list", *where(postgres_database, log), "--check")
    assert status == 1
    first, second = printed["transactions"]
    assert (first["id"], first["verdict"], first["rows"]) == (
        str(decided.transaction), "decided", 5,
    )  # fmt: skip
    assert (second["id"], second["verdict"], second["rows"]) == (
        str(undecided.transaction), "undecided", None,
    )  # fmt: skip
    for one in printed["transactions"]:
        moment = datetime.fromisoformat(one["prepared_at"])
        assert began - timedelta(seconds=1) < moment < began + timedelta(seconds=60)
        assert 0 <= one["age_seconds"] < 60


def test_decided_is_committed_exactly_once_and_undecided_rolled_back(
    job: Job, log: AgedLog, postgres_database: str
) -> None:
    decided, undecided = job.prepare(1, range(5)), job.prepare(2, range(5, 8))
    log.decide(1, [decided])
    options = [*where(postgres_database, log), "--yes"]
    for command, wrong in (("commit", undecided), ("abort", decided)):
        status, text, _ = run(command, str(wrong.transaction), *options)
        assert (status, "refused: " in text) == (1, True)
    assert len(prepared(postgres_database)) == 2
    outcomes = list[str]()
    for _ in range(2):
        status, printed = run_json("commit", str(decided.transaction), *options)
        outcomes += [result["outcome"] for result in printed["results"]]
        assert status == 0
    assert outcomes == ["committed", "already_committed"]
    assert run("abort", "--all", *options)[0] == 0
    assert prepared(postgres_database) == []
    assert ids_in(postgres_database) == [0, 1, 2, 3, 4]
    assert ledger_rows(postgres_database) == [str(decided.transaction)]
    # What is committed is never taken back, not even by force.
    status, text, _ = run("abort", str(decided.transaction), *options, "--force")
    assert (status, "was committed before" in text) == (1, True)
    assert ids_in(postgres_database) == [0, 1, 2, 3, 4]


def test_what_somebody_rolled_back_is_reported_lost_and_not_committed(
    job: Job, log: AgedLog, postgres_database: str
) -> None:
    decided = job.prepare(1, range(5))
    log.decide(1, [decided])
    query(postgres_database, f"ROLLBACK PREPARED '{decided.transaction}'")
    options = where(postgres_database, log)
    status, printed = run_json("show", str(decided.transaction), *options)
    assert (status, printed["in_doubt"], printed["verdict"]) == (0, False, "decided")
    status, text, _ = run("commit", str(decided.transaction), *options, "--yes")
    assert status == 1
    assert "cannot be committed any more" in text
    assert ids_in(postgres_database) == []


def test_a_loss_that_was_made_good_by_hand_lets_the_job_go_on(
    job: Job, log: AgedLog, postgres_database: str
) -> None:
    """The steps of docs/operations.md, with the statement as it stands there."""
    decided = job.prepare(1, range(5))
    log.decide(1, [decided])
    query(postgres_database, f"ROLLBACK PREPARED '{decided.transaction}'")
    document = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()
    (statement,) = re.findall(r"```sql\n(.*?)```", document, flags=re.DOTALL)
    attempt, checkpoint = decided.transaction.attempt, decided.transaction.checkpoint
    statement = statement.replace("payments.out/7/41/0/0", str(decided.transaction))
    query(postgres_database, statement.replace("7, 41, 0", f"{attempt}, {checkpoint}, 0"))
    status, printed = run_json(
        "commit", str(decided.transaction), *where(postgres_database, log), "--yes"
    )
    assert (status, printed["results"][0]["outcome"]) == (0, "already_committed")
    assert ids_in(postgres_database) == []


def test_a_sink_id_that_another_log_has_claimed_is_left_alone(
    postgres_database: str, log: AgedLog
) -> None:
    log.decide(1)
    sink = PostgresSink(postgres_database, table="ledger", create=True, commit_mode="two_phase")
    with Job(sink, sink_id=SINK_ID, log_id="another log") as other:
        one = other.check(1).prepare(2, range(3))
    status, printed = run_json("list", *where(postgres_database, log))
    assert [found["verdict"] for found in printed["transactions"]] == ["foreign"]
    assert "another log" in printed["transactions"][0]["reason"]
    for command in ("commit", "abort"):
        status, _, _ = run(command, str(one.transaction), *where(postgres_database, log), "--yes")
        assert status == 1
    assert prepared(postgres_database) == [str(one.transaction)]


def test_a_connected_writer_shows_that_the_job_runs(
    job: Job, log: AgedLog, postgres_database: str
) -> None:
    """The log has been quiet for an hour; the database knows better."""
    one = job.prepare(2, range(3))
    options = [*where(postgres_database, log), "--yes"]
    writer = job.writer(1)
    status, printed = run_json("abort", str(one.transaction), *options)
    assert status == 1
    assert "a writer of attempt 1 is connected" in printed["results"][0]["message"]
    assert printed["results"][0]["verdict"] == "pending"
    assert prepared(postgres_database) == [str(one.transaction)]
    writer.close()
    assert run("abort", str(one.transaction), *options)[0] == 0
    assert prepared(postgres_database) == []


def test_what_another_session_holds_is_not_called_done(
    job: Job, log: AgedLog, postgres_database: str
) -> None:
    """A second helper, or the job itself, is committing the same one at this moment."""
    decided = job.prepare(1, range(5))
    log.decide(1, [decided])
    command = [sys.executable, "-m", "onceflow.cli.main", "txn", "commit", "--all", "--yes"]
    outcomes = list[str]()
    with ExitStack() as running:
        helpers = [
            running.enter_context(
                subprocess.Popen(
                    [*command, *where(postgres_database, log), "--json"],
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            for _ in range(3)
        ]
        for helper in helpers:
            printed, _ = helper.communicate(timeout=120)
            outcomes += [result["outcome"] for result in json.loads(printed)["results"]]
    assert outcomes.count("committed") == 1
    assert set(outcomes) <= {"committed", "already_committed", "retry_later"}
    assert ids_in(postgres_database) == [0, 1, 2, 3, 4]


@pytest.fixture(scope="module")
def guarded() -> Iterator[EmbeddedPostgres]:
    """A server on which the role `writer` needs a password."""
    with EmbeddedPostgres(
        hba_lines=["host all writer 127.0.0.1/32 scram-sha-256"],
    ) as server:
        query(server.url, f"CREATE ROLE writer LOGIN PASSWORD '{PASSWORD}'")
        query(server.url, "GRANT CREATE ON DATABASE postgres TO writer")
        query(server.url, "GRANT ALL ON SCHEMA public TO writer")
        yield server


def _url_of(server: EmbeddedPostgres, password: str | None) -> str:
    parts = urlsplit(server.url)
    secret = "" if password is None else ":" + quote(password, safe="")
    return urlunsplit(parts._replace(netloc=f"writer{secret}@127.0.0.1:{server.port}"))


def test_passwords_come_by_four_ways_and_are_never_printed(
    guarded: EmbeddedPostgres, log: AgedLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_password = _url_of(guarded, PASSWORD)
    sink = PostgresSink(with_password, table="ledger", create=True, commit_mode="two_phase")
    with Job(sink, sink_id=SINK_ID, log_id=log.log_id) as job:
        log.decide(1, [job.check(1).prepare(1, range(5))])
    log_options = ["--storage", str(log.root)]
    secret = tmp_path / "password"
    secret.write_text(f"{PASSWORD}\n")
    bare = _url_of(guarded, None)
    monkeypatch.setenv("PAYMENTS_PASSWORD", quote(PASSWORD, safe=""))
    by_reference = bare.replace("writer@", "writer:${env:PAYMENTS_PASSWORD}@")
    ways = [["--url", with_password], ["--url", bare, "--password-file", str(secret)]]
    ways.append(["--url", by_reference])
    for way in ways:
        status, text, errors = run("list", *way, *log_options)
        assert (status, "decided" in text) == (0, True), errors
    status, _, errors = run("list", "--url", bare)
    assert (status, "writer" in errors) == (3, True)
    monkeypatch.setenv("PGPASSWORD", PASSWORD)
    monkeypatch.setenv("ONCEFLOW_TXN_URL", bare)
    assert run("list", *log_options, "--check")[0] == 1
    assert run("commit", "--all", *log_options, "--yes", "--json")[0] == 0
    assert ids_in(guarded.url) == [0, 1, 2, 3, 4]
    # Wrong in every place in which a password can be wrong.
    for way in (
        ["--url", _url_of(guarded, PASSWORD + "x")],
        ["--url", with_password.replace("postgresql://", "oracle://")],
        ["--url", with_password.replace("@127", "@@127")],
        ["--url", with_password, "--password-file", str(tmp_path / "nowhere")],
    ):
        assert run("list", *way, *log_options)[0] in (2, 3)


def test_a_server_that_does_not_answer_is_reported_in_time(log: AgedLog) -> None:
    status, _, errors = run(
        "list", "--url", "postgresql://u:secret@127.0.0.1:1/db", "--timeout", "2"
    )
    assert status == 3
    assert "127.0.0.1:1" in errors
    assert "secret" not in errors


def test_a_paused_server_is_given_up_after_the_timeout(log: AgedLog) -> None:
    with EmbeddedPostgres() as server:
        server.pause()
        began = datetime.now(timezone.utc)
        try:
            status, _, errors = run("list", "--url", server.url, "--timeout", "2")
        finally:
            server.unpause()
        assert (datetime.now(timezone.utc) - began).total_seconds() < 20
        assert status == 3, errors
