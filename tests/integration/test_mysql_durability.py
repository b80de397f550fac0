"""Servers that forget what they committed when they are killed are not written to."""

from __future__ import annotations

import tempfile
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from tests.integration.doctor_kit import examine
from tests.integration.mysql_sink_kit import Job, query

from onceflow.core.errors import ConfigError
from onceflow.integration.servers import EmbeddedMariaDB, EmbeddedMySQL
from onceflow.integration.servers.mysql import connect
from onceflow.sinks import MySQLSink
from onceflow.sinks.mysql.server import Crash, server_facts, weaknesses

_SETTING = "innodb_flush_log_at_trx_commit"
_Server: TypeAlias = EmbeddedMySQL | EmbeddedMariaDB
_SERVERS: tuple[type[_Server], ...] = (EmbeddedMySQL, EmbeddedMariaDB)


@pytest.fixture(scope="module", params=_SERVERS, ids=lambda kind: kind.__name__)
def careless(request: pytest.FixtureRequest) -> Iterator[_Server]:
    """A server that answers a commit before anything of it has left its process."""
    kind: type[_Server] = request.param
    with kind({_SETTING: "0"}) as server:
        query(server.url, "CREATE DATABASE bank")
        yield server


def _set(server: _Server, value: int) -> None:
    query(server.url, f"SET GLOBAL {_SETTING} = {value}")


def _job(server: _Server, database: str = "bank", **settings: Any) -> Job:
    return Job(MySQLSink(server.database_url(database), table="t", create=True, **settings))


def _forgets_when_killed(server: EmbeddedMariaDB) -> bool:
    """True if a row whose commit was confirmed is gone after a SIGKILL, in one of several tries."""
    url = server.database_url("bank")
    query(url, "CREATE TABLE IF NOT EXISTS kept (id bigint PRIMARY KEY)", "DELETE FROM kept")
    query(url, "DO SLEEP(2)")
    for number in range(3):
        connection = connect(url)
        with connection.cursor() as cursor:
            cursor.execute(f"INSERT INTO kept VALUES ({number})")
            cursor.execute("COMMIT")
        server.kill()
        connection.close()
        server.start()
        if query(url, f"SELECT count(*) FROM kept WHERE id = {number}") == [(0,)]:
            return True
    return False


@pytest.fixture
def on_disk() -> Iterator[Path]:
    """A directory that is not in memory: there MariaDB maps its log, which outlives the process."""
    with tempfile.TemporaryDirectory(prefix="onceflow-mariadb-", dir="/var/tmp") as directory:
        yield Path(directory)


@pytest.mark.only_proof
def test_mariadb_that_flushes_once_a_second_forgets_commits_when_it_is_killed(
    on_disk: Path,
) -> None:
    """Why it is refused; and that the setting which is asked for is enough."""
    with EmbeddedMariaDB({_SETTING: "0"}, on_disk / "once") as server:
        query(server.url, "CREATE DATABASE bank")
        assert _forgets_when_killed(server)
    with EmbeddedMariaDB({_SETTING: "1"}, on_disk / "each") as server:
        query(server.url, "CREATE DATABASE bank")
        assert not _forgets_when_killed(server)


@pytest.mark.parametrize("settings", [{}, {"delivery": "at_least_once"}], ids=str)
def test_server_that_forgets_commits_when_killed_is_refused_with_what_fixes_it(
    careless: _Server, settings: dict[str, Any]
) -> None:
    _set(careless, 0)
    database = f"bank_{uuid.uuid4().hex[:16]}"
    query(careless.url, f"CREATE DATABASE {database}")
    with _job(careless, database, **settings) as job:
        with pytest.raises(
            ConfigError, match=rf"{_SETTING} = 0; needed: .*when its process"
        ) as refused:
            job.check()
        said = str(refused.value)
        assert "managed server" in said
        query(careless.url, said.split("Fix: ")[1])
        job.check()
        # It may be changed at any time, so each attempt looks.
        _set(careless, 0)
        with pytest.raises(ConfigError, match=f"{_SETTING} = 0"):
            job.check(attempt=2)


def test_doctor_says_which_crash_is_not_covered(
    careless: _Server,
) -> None:
    url = careless.database_url("bank")
    for value, level, crash in ((0, "problem", "process is killed"), (2, "warning", "loses power")):
        _set(careless, value)
        by_text = {one["found"]: one for one in examine("--url", url)[1]}
        finding = by_text[f"{_SETTING} = {value}"]
        assert (finding["level"], crash in finding["needed"]) == (level, True)
        query(careless.url, finding["remedy"])
        assert f"{_SETTING} = 1" not in {one["found"] for one in examine("--url", url)[1]}
    assert any("survive a crash" in one["found"] for one in examine("--url", url)[1])


def test_every_setting_that_a_crash_gets_through_is_known(
    careless: _Server,
) -> None:
    _set(careless, 1)
    with MySQLSink(careless.url, table="t").settings.endpoint.connect("test") as session:
        facts = server_facts(session)
    assert weaknesses(facts) == ()
    for change, forgets_when in (
        ({"flush_at_commit": "0"}, Crash.PROCESS),
        ({"flush_at_commit": "2"}, Crash.MACHINE),
        ({"redo_log": False}, Crash.PROCESS),
        ({"binlog_format": "ROW", "sync_binlog": "0"}, Crash.MACHINE),
        ({"doublewrite": "OFF"}, Crash.MACHINE),
    ):
        changed: dict[str, Any] = dict(change)
        (weakness,) = weaknesses(replace(facts, **changed))
        assert weakness.forgets_when is forgets_when
        assert weakness.remedy
    assert weaknesses(replace(facts, binlog_format="", sync_binlog="0")) == ()
