"""The embedded MySQL and MariaDB do what tests of crashes rely on."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pymysql
import pytest

from onceflow.integration.faults import is_alive
from onceflow.integration.servers import (
    EmbeddedMariaDB,
    EmbeddedMySQL,
    MySQLServer,
    ServerError,
)
from onceflow.integration.servers.mysql import MySQLAdmin, connect

Embedded = EmbeddedMySQL | EmbeddedMariaDB

XID = "X'6f6e63652700ff',X'62',7"
"""Both parts and the format are given; a quote, a zero and a byte that is no text are in it."""


@pytest.fixture(scope="module", params=[EmbeddedMySQL, EmbeddedMariaDB])
def server(request: pytest.FixtureRequest) -> Iterator[Embedded]:
    """Runs when a test ends; the tests of this file may do everything else to it."""
    with request.param() as running:
        yield running


@pytest.fixture
def database(server: Embedded) -> Iterator[str]:
    name = f"d{time.monotonic_ns()}"
    with MySQLAdmin.session(server.url) as admin:
        admin.create_database(name)
    yield server.database_url(name)
    with MySQLAdmin.session(server.url) as admin:
        admin.drop_database(name)


def _rows(url: str, statement: str) -> list[tuple[object, ...]]:
    with MySQLAdmin.session(url) as admin:
        return admin.rows(statement)


def _prepare(url: str, xid: str, value: int) -> None:
    with MySQLAdmin.session(url) as admin:
        admin.rows(f"XA START {xid}")
        admin.rows(f"INSERT INTO t VALUES ({value})")
        admin.rows(f"XA END {xid}")
        admin.rows(f"XA PREPARE {xid}")


def test_committed_rows_and_prepared_xa_survive_kill_and_start(
    server: Embedded, database: str
) -> None:
    _rows(database, "CREATE TABLE t (i int PRIMARY KEY)")
    _prepare(database, XID, 1)
    _rows(database, "INSERT INTO t VALUES (2)")
    pid = server.pid
    assert pid is not None
    server.kill()
    assert not is_alive(pid)
    assert server.pid is None
    with pytest.raises(pymysql.err.OperationalError):
        connect(database, timeout_s=2)
    server.start()
    with MySQLAdmin.session(database) as admin:
        (in_doubt,) = admin.in_doubt()
        assert admin.rows("SELECT i FROM t") == [(2,)]
        admin.rows(f"XA COMMIT {in_doubt}")
        assert admin.in_doubt() == set()
        assert admin.rows("SELECT i FROM t ORDER BY i") == [(1,), (2,)]


def test_prepared_xa_without_changes_is_rolled_back_after_its_session(
    server: Embedded, database: str
) -> None:
    """MariaDB ends it with its session, and says so only when it is asked to roll it back."""
    with MySQLAdmin.session(database) as admin:
        for statement in ("XA START {}", "XA END {}", "XA PREPARE {}"):
            admin.rows(statement.format(XID))
    with MySQLAdmin.session(server.url) as admin:
        admin.roll_back(prepared := admin.in_doubt())
        assert len(prepared) == 1
        assert admin.in_doubt() == set()


def test_server_is_durable_strict_and_takes_local_files(server: Embedded) -> None:
    names = (
        "@@innodb_flush_log_at_trx_commit, @@sync_binlog, @@innodb_doublewrite, @@local_infile, "
        "@@sql_mode LIKE '%%STRICT_TRANS_TABLES%%', @@character_set_server"
    )
    (settings,) = _rows(server.url, f"SELECT {names}")
    doublewrite = settings[2]
    assert settings[:2] == (1, 1)
    assert doublewrite in {1, "ON"}
    assert settings[3:] == (1, 1, "utf8mb4")


def test_the_program_is_the_server_that_its_class_names() -> None:
    with EmbeddedMySQL() as mysql, EmbeddedMariaDB() as mariadb:
        for server in (mysql, mariadb):
            (version,) = _rows(server.url, "SELECT VERSION()")[0]
            assert str(version).startswith(server.version)
            assert ("MariaDB" in str(version)) == isinstance(server, EmbeddedMariaDB)


def test_paused_server_answers_nothing_and_goes_on_in_the_same_session(server: Embedded) -> None:
    with MySQLAdmin.session(server.url) as admin:
        session = admin.rows("SELECT CONNECTION_ID()")
        server.pause()
        started = time.monotonic()
        with pytest.raises(pymysql.err.OperationalError):
            connect(server.url, timeout_s=2)
        assert time.monotonic() - started >= 1.9, "it must hang, and not refuse"
        server.unpause()
        assert admin.rows("SELECT CONNECTION_ID()") == session


def test_paused_server_can_be_killed(server: Embedded) -> None:
    server.pause()
    server.restart()
    assert _rows(server.url, "SELECT 1") == [(1,)]


def test_options_reach_the_server_over_the_defaults(tmp_path: Path) -> None:
    options = {"local_infile": "OFF", "max-connections": "37"}
    with EmbeddedMariaDB(options, tmp_path) as server:
        assert _rows(server.url, "SELECT @@local_infile, @@max_connections") == [(0, 37)]
    assert (tmp_path / "data").is_dir(), "a directory of the caller's is kept"


@pytest.mark.parametrize(
    "make", [pytest.param(EmbeddedMySQL, marks=pytest.mark.slow), EmbeddedMariaDB]
)
def test_directory_of_the_caller_outlives_an_orderly_stop(
    make: type[Embedded], tmp_path: Path
) -> None:
    with make(directory=tmp_path) as server, MySQLAdmin.session(server.url) as admin:
        admin.create_database("d")
        admin.rows("CREATE TABLE d.kept AS SELECT 7 AS i")
    assert "hutdown complete" in server.log_tail()
    with make(directory=tmp_path) as server:
        assert _rows(server.url, "SELECT i FROM d.kept") == [(7,)]
    with make() as server:
        own = server.directory
        assert own.is_dir()
    assert not own.exists()


def test_two_servers_are_two_even_as_copies_of_one_template() -> None:
    with EmbeddedMySQL() as one, EmbeddedMySQL() as other:
        assert one.port != other.port
        assert _rows(one.url, "SELECT @@server_uuid") != _rows(other.url, "SELECT @@server_uuid")


def test_a_server_that_starts_leaves_alone_what_another_has_for_the_moment() -> None:
    with EmbeddedMariaDB() as one, MySQLAdmin.session(one.url, timeout_s=30) as session:
        session.rows("CREATE TEMPORARY TABLE kept (n int) ENGINE=Aria")
        with EmbeddedMariaDB():
            session.rows("INSERT INTO kept VALUES (1)")
            assert session.rows("SELECT n FROM kept") == [(1,)]
            session.rows("DROP TABLE kept")


def test_options_that_shape_the_data_files_are_there_from_their_creation() -> None:
    with EmbeddedMySQL({"innodb-page-size": "4096"}) as server:
        assert _rows(server.url, "SELECT @@innodb_page_size") == [(4096,)]


def test_server_that_cannot_start_is_refused_with_its_own_words(tmp_path: Path) -> None:
    server = EmbeddedMariaDB({"no-such-option": "1"}, tmp_path)
    with pytest.raises(ServerError, match=r"no-such-option"):
        server.start()
    assert server.pid is None


def test_server_on_a_port_of_somebody_else_is_refused(server: Embedded) -> None:
    other = type(server)()
    other.port = server.port
    try:
        with pytest.raises(ServerError, match=r"another process took the port|ended with status"):
            other.start()
    finally:
        other.stop()
    assert _rows(server.url, "SELECT 1") == [(1,)]


@pytest.fixture
def left_behind(request: pytest.FixtureRequest) -> Iterator[list[str]]:
    """Yield a list for the URLs of a test's databases.

    They are checked after the fixtures of the test have cleaned up.
    """
    servers: dict[str, MySQLServer] = {
        "mysql": request.getfixturevalue("onceflow_mysql"),
        "mariadb": request.getfixturevalue("onceflow_mariadb"),
    }
    kept = dict[str, set[str]]()
    for name, server in servers.items():
        with MySQLAdmin.session(server.url) as admin:
            admin.create_database("of_another_test")
        url = server.database_url("of_another_test")
        _rows(url, "CREATE TABLE t (i int PRIMARY KEY)")
        _prepare(url, "'of another test'", 1)
        with MySQLAdmin.session(server.url) as admin:
            kept[name] = admin.in_doubt()
            assert len(kept[name]) == 1
    urls: list[str] = []
    yield urls
    assert len(urls) == 2
    for name, url in zip(("mysql", "mariadb"), urls, strict=True):
        with MySQLAdmin.session(servers[name].url) as admin:
            assert admin.in_doubt() == kept[name], "the other test's transaction, and no other"
            assert (url.rsplit("/", 1)[1],) not in admin.rows("SHOW DATABASES")
            admin.roll_back(kept[name])
            admin.drop_database("of_another_test")


def test_fixtures_drop_their_database_with_what_it_has_in_doubt_and_open(
    left_behind: list[str], mysql_database: str, mariadb_database: str
) -> None:
    for url in (mysql_database, mariadb_database):
        assert _rows(url, "SHOW TABLES") == []
        _rows(url, "CREATE TABLE t (i int PRIMARY KEY)")
        _prepare(url, XID, 1)
        # Prepared in a session that stays open, and one that has not come so far.
        for xid, value in (("'held'", 2), ("'open'", 3)):
            held = connect(url).cursor()
            held.execute(f"XA START {xid}")
            held.execute(f"INSERT INTO t VALUES ({value})")
            if xid == "'held'":
                held.execute(f"XA END {xid}")
                held.execute(f"XA PREPARE {xid}")
            _forgotten.append(held)
        left_behind.append(url)


_forgotten: list[object] = []
"""Keeps the sessions open until the process ends, as a test would that has lost them."""
