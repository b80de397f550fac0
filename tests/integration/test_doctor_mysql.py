"""`onceflow doctor` on real MySQL and MariaDB: privileges that lack, a server set up wrong."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager
from urllib.parse import urlsplit, urlunsplit

import pytest
from tests.integration.doctor_kit import PASSWORD, examine, worst
from tests.integration.mysql_sink_kit import FLAVORS, query

from onceflow.integration.servers import EmbeddedMySQL


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


def test_what_a_user_lacks_is_named_and_the_grants_fix_it(url: str) -> None:
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
        assert time.monotonic() - began < 90
        assert (status, [finding["level"] for finding in findings]) == (1, ["problem"])
