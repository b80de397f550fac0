"""A job that has run outlasts a database that its workers cannot reach or log in to for a while.

Each job runs in a process of its own, and the test looks at it by `onceflow status`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import unquote, urlsplit, urlunsplit

import psycopg
import pymysql
import pytest
from tests.integration.sql.databases import Database, MySQL, Postgres
from tests.support.job_process import JobProcess
from tests.support.own_names import OwnNames, require_own_names
from tests.support.sql_job_process import RECORDS

from onceflow.cli.jobs.client import Answer

pytestmark = [pytest.mark.servers, pytest.mark.timeout(300)]
MODULE = "tests.support.sql_job_process"
OUTAGE_S = 15.0
NEW_PASSWORD = "a/new:one"

on_both = pytest.mark.parametrize(
    "kind", [Postgres, MySQL], indirect=True, ids=lambda kind: kind.name
)


@on_both
def test_a_job_outlasts_a_database_whose_name_is_gone_for_a_while(
    database: Database, tmp_path: Path
) -> None:
    require_own_names()
    names = OwnNames(tmp_path, "database.test")
    url = _at_host(database.url, "database.test")
    with JobProcess(tmp_path, MODULE, "--url", url, prefix=names.prefix) as job:
        job.await_checkpoints(2)
        names.take_away("database.test")
        _end_sessions(database)
        away = _await_failures(job, OUTAGE_S)
        names.bring_back("database.test")
        job.await_checkpoints(2)
        job.finish()
    _assert_says(away, "SettingsRefused: cannot connect to", "database.test", "not known")
    _assert_all_rows_once(database)


@on_both
def test_a_job_outlasts_a_password_that_its_server_has_before_its_secret(
    guarded: Database, tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    with guarded.user(*guarded.grants_of_job) as login:
        user, old_password = _login_of(login.url)
        secret.write_text(old_password)
        url = _without_password(login.url)
        reference = f"${{file:{secret}}}"
        with JobProcess(tmp_path, MODULE, "--url", url, "--password", reference) as job:
            job.await_checkpoints(2)
            word = "PASSWORD" if isinstance(guarded, Postgres) else "IDENTIFIED BY"
            guarded.query(f"ALTER USER {user} {word} '{NEW_PASSWORD}'")
            _end_sessions(guarded)
            away = _await_failures(job, OUTAGE_S)
            secret.write_text(NEW_PASSWORD)
            job.await_checkpoints(2)
            job.finish()
        _assert_says(away, "SettingsRefused: cannot connect to", user)
        assert old_password not in str(away)
        log = (tmp_path / "driver.log").read_text()
        assert old_password not in log
        assert NEW_PASSWORD not in log
        _assert_all_rows_once(guarded)


def _await_failures(job: JobProcess, outage_s: float) -> Answer:
    """Return the status after `outage_s` and at least three failures in a row."""
    ends = time.monotonic() + outage_s
    started: Callable[[Answer], bool] = lambda now: (  # noqa: E731
        now["state"] != "running" and "without a checkpoint" in now["last_error"]
    )
    return job.await_status(
        lambda now: time.monotonic() >= ends and started(now) and _count_failures(now) >= 3
    )


def _count_failures(status: Answer) -> int:
    return int(status["last_error"].partition("(failure ")[2].partition(" ")[0] or 0)


def _assert_says(status: Answer, *words: str) -> None:
    """Check that the status names the newest error, the first one, and how long it has failed."""
    error = status["last_error"].partition("\n")[0]
    assert error in status["summary"]
    for word in words:
        assert word in error
    assert "; the first was " in error
    seconds = int(error.partition(" in ")[2].partition(" s without")[0])
    assert seconds >= OUTAGE_S - 5, error


def _assert_all_rows_once(database: Database) -> None:
    assert database.ids_in() == list(range(RECORDS))
    assert database.prepared() == []


def _end_sessions(database: Database) -> None:
    """End the job's sessions, of which some may end by themselves at the same moment."""
    for session in database.sessions():
        with contextlib.suppress(psycopg.Error, pymysql.MySQLError):
            if isinstance(database, Postgres):
                database.query(f"SELECT pg_terminate_backend({session})")
            else:
                database.query(f"KILL {session}")


def _at_host(url: str, host: str) -> str:
    parts = urlsplit(url)
    login, at, _ = parts.netloc.rpartition("@")
    return urlunsplit(parts._replace(netloc=f"{login}{at}{host}:{parts.port}"))


def _login_of(url: str) -> tuple[str, str]:
    parts = urlsplit(url)
    return unquote(parts.username or ""), unquote(parts.password or "")


def _without_password(url: str) -> str:
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=f"{parts.username}@{parts.hostname}:{parts.port}"))
