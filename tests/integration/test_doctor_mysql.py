"""`onceflow doctor` on a real MySQL and a real MariaDB: set up right, and set up wrong."""

from __future__ import annotations

import json
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import pytest
from tests.integration.mysql_sink_kit import FLAVORS, query
from typer.testing import CliRunner

from onceflow.cli.main import app
from onceflow.integration.servers import EmbeddedMySQL

PASSWORD = "hunter2-Correct-horse"

Findings = list[dict[str, str]]


def examine(*arguments: str) -> tuple[int, Findings]:
    outcome = CliRunner().invoke(app, ["doctor", "--json", "--no-spark", *arguments])
    assert PASSWORD not in outcome.output
    assert outcome.stdout, outcome.stderr
    printed: Any = json.loads(outcome.stdout)
    found: Findings = printed["findings"]
    return outcome.exit_code, [one for one in found if one["area"] not in ("java", "python")]


def worst(findings: Findings) -> Findings:
    return [finding for finding in findings if finding["level"] != "ok"]


@pytest.fixture(params=FLAVORS)
def url(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue(f"{request.param}_database"))


@contextmanager
def user_of(url: str, *grants: str) -> Generator[str, None, None]:
    """The URL for a new user with a password and no privileges but `grants`."""
    parts = urlsplit(url)
    name = f"u{parts.path[-12:]}"
    query(url, f"CREATE USER {name} IDENTIFIED BY '{PASSWORD}'")
    try:
        for grant in grants:
            query(url, f"GRANT {grant} TO {name}")
        yield urlunsplit(parts._replace(netloc=f"{name}:{PASSWORD}@{parts.hostname}:{parts.port}"))
    finally:
        query(url, f"DROP USER {name}")


def test_a_database_that_is_set_up_right_has_no_problem(url: str) -> None:
    query(url, "CREATE TABLE payments (id bigint PRIMARY KEY)")
    status, findings = examine("--url", url, "--table", "payments")
    assert status == 0
    # How the server flushes is its owner's affair and only warned of.
    about_disks = ("innodb_flush_log", "sync_binlog", "local_infile", "of others", "connections")
    others = [one for one in worst(findings) if not any(w in one["found"] for w in about_disks)]
    assert others == []
    said = " ".join(finding["found"] for finding in findings)
    for part in ("XA transactions can be prepared", "may keep the ledger", "may insert", "clock"):
        assert part in said
    assert query(url, "SHOW TABLES") == [("payments",)]


def test_what_a_user_lacks_is_named_and_the_grants_mend_it(url: str) -> None:
    database = urlsplit(url).path[1:]
    query(url, "CREATE TABLE payments (id bigint PRIMARY KEY)")
    with user_of(url) as unknown:
        status, findings = examine("--url", unknown)
        (finding,) = worst(findings)
        (grant,) = [one for one in finding["remedy"].split(": ") if one.startswith("GRANT")]
        query(url, grant)
        _, findings = examine("--url", unknown)
        assert [one for one in worst(findings) if one["level"] == "problem"] == []
    with user_of(url, f"SELECT ON {database}.*") as limited:
        status, findings = examine(
            "--url", limited, "--table", "payments", "--commit-mode", "two_phase"
        )
        assert status == 1
        remedies = [one["remedy"] for one in worst(findings) if "GRANT" in one["remedy"]]
        # Whatever database the administrator is in.
        assert any(f"ON `{database}`.`payments`" in remedy for remedy in remedies)
        assert any(f"ON `{database}`.*" in remedy for remedy in remedies)
        for remedy in remedies:
            query(url, remedy)
        status, findings = examine(
            "--url", limited, "--table", "payments", "--commit-mode", "two_phase"
        )
        assert (status, [one for one in worst(findings) if "GRANT" in one["remedy"]]) == (0, [])


def test_a_wrong_password_and_a_closed_port_are_told_apart(url: str) -> None:
    with user_of(url) as limited:
        wrong = limited.replace(PASSWORD, "not-" + PASSWORD)
        status, findings = examine("--url", wrong, "--timeout", "10")
        (finding,) = worst(findings)
        assert (status, "Access denied" in finding["found"]) == (1, True)
        assert f"ALTER USER '{urlsplit(limited).username}'@'%'" in finding["remedy"]
    nowhere = urlunsplit(urlsplit(url)._replace(path="/nowhere"))
    assert worst(examine("--url", nowhere)[1])[0]["remedy"].endswith("CREATE DATABASE `nowhere`")
    status, findings = examine("--url", f"mysql://u:{PASSWORD}@127.0.0.1:1/db", "--timeout", "10")
    (finding,) = worst(findings)
    assert (status, "start it" in finding["remedy"]) == (1, True)


def test_a_table_without_transactions_is_a_problem(url: str) -> None:
    query(url, "CREATE TABLE payments (id bigint) ENGINE = MyISAM")
    status, findings = examine("--url", url, "--table", "payments")
    (finding,) = [one for one in findings if one["area"] == "table payments"]
    assert (status, finding["found"]) == (1, "its engine is MyISAM")
    query(url, finding["remedy"])
    assert examine("--url", url, "--table", "payments")[0] == 0


def test_a_server_that_is_set_up_wrong_and_then_paused() -> None:
    with EmbeddedMySQL({"xa-detach-on-prepare": "OFF", "local-infile": "OFF"}) as server:
        query(server.url, "CREATE DATABASE bank")
        bank = server.database_url("bank")
        for mode, level in (("two_phase", "problem"), ("auto", "warning")):
            _, findings = examine("--url", bank, "--commit-mode", mode)
            by_text = {one["found"]: one for one in worst(findings)}
            assert by_text["xa_detach_on_prepare = OFF"]["level"] == level
            assert any("local_infile = OFF" in text for text in by_text)
        query(server.url, by_text["xa_detach_on_prepare = OFF"]["remedy"])
        query(server.url, "SET GLOBAL super_read_only = ON")
        status, findings = examine("--url", bank)
        assert status == 1
        assert any("is read-only" in one["found"] for one in worst(findings))
        assert not any("xa_detach" in one["found"] for one in worst(findings))
        server.pause()
        began = time.monotonic()
        try:
            status, findings = examine("--url", bank, "--timeout", "4")
        finally:
            server.unpause()
        assert time.monotonic() - began < 30
        assert (status, [one["level"] for one in findings]) == (1, ["problem"])
