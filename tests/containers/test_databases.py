"""Each database server, of whatever kind, does what tests of crashes rely on."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import psycopg
import pymysql
import pytest

from onceflow.integration import servers
from onceflow.integration.faults import TcpProxy
from onceflow.integration.servers.kinds import MakeDatabase
from onceflow.integration.servers.mysql import MySQLAdmin, connect

GONE = (psycopg.OperationalError, pymysql.err.OperationalError)
"""What both drivers raise when the server is not there."""

_PATIENCE_S = 60
"""How long a server may take to answer on a busy machine."""


class Dialect(ABC):
    """The differences of one kind of server that the tests need."""

    make: MakeDatabase

    @abstractmethod
    def rows(self, url: str, *statements: str) -> list[tuple[Any, ...]]:
        """Run the statements in one session of their own; return what the last answers."""

    @abstractmethod
    def open(self, url: str, timeout_s: int = _PATIENCE_S) -> Any:
        """Return a connection that has answered once.

        `timeout_s` is how long it waits for the server, each time that it asks on MySQL.
        """

    @abstractmethod
    def prepare(self, url: str, name: str, value: int) -> None:
        """Leave the insert of `value` into t prepared, in a session that has ended."""

    @abstractmethod
    def in_doubt(self, url: str) -> list[str]:
        """Return the prepared transactions, each as `commit` takes it."""

    @abstractmethod
    def commit(self, url: str, transaction: str) -> None:
        """Commit a prepared transaction."""


class Postgres(Dialect):
    make = staticmethod(servers.make_postgres)

    def rows(self, url: str, *statements: str) -> list[tuple[Any, ...]]:
        with closing(self.open(url)) as connection:
            cursor = connection.cursor()
            for statement in statements:
                cursor.execute(statement)
            return cursor.fetchall() if cursor.description else []

    def open(self, url: str, timeout_s: int = _PATIENCE_S) -> Any:
        return psycopg.connect(url, autocommit=True, connect_timeout=timeout_s)

    def prepare(self, url: str, name: str, value: int) -> None:
        self.rows(url, "BEGIN", f"INSERT INTO t VALUES ({value})", f"PREPARE TRANSACTION '{name}'")

    def in_doubt(self, url: str) -> list[str]:
        return [row[0] for row in self.rows(url, "SELECT gid FROM pg_prepared_xacts")]

    def commit(self, url: str, transaction: str) -> None:
        self.rows(url, f"COMMIT PREPARED '{transaction}'")


class MySQL(Dialect):
    make = staticmethod(servers.make_mysql)

    def rows(self, url: str, *statements: str) -> list[tuple[Any, ...]]:
        answer: list[tuple[Any, ...]] = []
        with MySQLAdmin.session(url, timeout_s=_PATIENCE_S) as admin:
            for statement in statements:
                answer = admin.rows(statement)
        return answer

    def open(self, url: str, timeout_s: int = _PATIENCE_S) -> Any:
        return connect(url, timeout_s=timeout_s)

    def prepare(self, url: str, name: str, value: int) -> None:
        self.rows(
            url,
            f"XA START '{name}'",
            f"INSERT INTO t VALUES ({value})",
            f"XA END '{name}'",
            f"XA PREPARE '{name}'",
        )

    def in_doubt(self, url: str) -> list[str]:
        with MySQLAdmin.session(url) as admin:
            return sorted(admin.in_doubt())

    def commit(self, url: str, transaction: str) -> None:
        self.rows(url, f"XA COMMIT {transaction}")


class MariaDB(MySQL):
    make = staticmethod(servers.make_mariadb)


DIALECTS: list[Dialect] = [Postgres(), MySQL(), MariaDB()]
NAMES = ["postgres", "mysql", "mariadb"]


@pytest.fixture(scope="module", params=DIALECTS, ids=NAMES)
def dialect(request: pytest.FixtureRequest) -> Dialect:
    chosen: Dialect = request.param
    return chosen


@pytest.fixture(scope="module")
def server(dialect: Dialect) -> Iterator[servers.OwnDatabase]:
    """Runs, with a whole network, when a test ends."""
    with dialect.make(proxied=True) as running:
        yield running


@pytest.fixture
def url(dialect: Dialect, server: servers.OwnDatabase) -> str:
    """URL of a database that is the test's own, with an empty table t."""
    name = f"d{time.monotonic_ns()}"
    dialect.rows(server.url, f"CREATE DATABASE {name}")
    url = server.database_url(name)
    dialect.rows(url, "CREATE TABLE t (i int PRIMARY KEY)")
    return url


def test_server_answers(dialect: Dialect, server: servers.OwnDatabase) -> None:
    assert dialect.rows(server.url, "SELECT 1") == [(1,)]


def test_committed_rows_and_prepared_transactions_survive_kill_and_start(
    dialect: Dialect, server: servers.OwnDatabase, url: str
) -> None:
    dialect.prepare(url, "before the crash", 1)
    dialect.rows(url, "INSERT INTO t VALUES (2)")
    session = dialect.open(url)
    server.kill()
    assert not server.running
    with pytest.raises(GONE):
        session.cursor().execute("SELECT 1")
    with pytest.raises(GONE):
        dialect.open(url)
    server.start()
    (transaction,) = dialect.in_doubt(url)
    assert dialect.rows(url, "SELECT i FROM t") == [(2,)]
    dialect.commit(url, transaction)
    assert dialect.in_doubt(url) == []
    assert dialect.rows(url, "SELECT i FROM t ORDER BY i") == [(1,), (2,)]


def test_paused_server_makes_clients_time_out_and_goes_on_in_the_same_session(
    dialect: Dialect, server: servers.OwnDatabase, url: str
) -> None:
    with closing(dialect.open(url)) as session:
        server.pause()
        assert server.running
        started = time.monotonic()
        with pytest.raises(GONE):
            dialect.open(url, timeout_s=3)
        assert time.monotonic() - started >= 2.5, "it must hang, and not refuse"
        server.unpause()
        cursor = session.cursor()
        cursor.execute("SELECT 1")
        assert cursor.fetchone() == (1,)


def test_paused_server_can_be_killed(
    dialect: Dialect, server: servers.OwnDatabase, url: str
) -> None:
    dialect.rows(url, "INSERT INTO t VALUES (1)")
    server.pause()
    server.restart()
    assert dialect.rows(url, "SELECT i FROM t") == [(1,)]


def test_cut_network_ends_sessions_and_lets_new_ones_in(
    dialect: Dialect, server: servers.OwnDatabase, url: str
) -> None:
    session = dialect.open(url)
    server.network.cut()
    with pytest.raises(GONE):
        session.cursor().execute("SELECT 1")
    assert dialect.rows(url, "SELECT 1") == [(1,)]


def test_refusing_network_keeps_everybody_out_until_it_heals(
    dialect: Dialect, server: servers.OwnDatabase, url: str
) -> None:
    server.network.refuse()
    with pytest.raises(GONE):
        dialect.open(url)
    server.network.heal()
    assert dialect.rows(url, "SELECT 1") == [(1,)]


def test_silent_network_holds_an_answer_that_the_server_has_given(
    dialect: Dialect, server: servers.OwnDatabase, url: str
) -> None:
    """Only the server knows the outcome: the worst case for a commit."""
    with closing(dialect.open(url)) as session:
        cursor = session.cursor()
        network: TcpProxy = server.network
        # Both directions are held: the statement goes out once they flow again.
        network.pause()
        asking = threading.Thread(target=cursor.execute, args=["INSERT INTO t VALUES (1)"])
        asking.start()
        asking.join(0.5)
        assert asking.is_alive()
        network.heal()
        asking.join(60)
        assert not asking.is_alive()
    assert dialect.rows(url, "SELECT i FROM t") == [(1,)]


def test_network_of_a_server_that_is_reached_directly_cannot_be_cut(dialect: Dialect) -> None:
    with pytest.raises(servers.ServerError, match="proxied=True"):
        _ = dialect.make().network


def test_server_that_refuses_its_options_is_quoted(dialect: Dialect) -> None:
    server = dialect.make({"no_such_option": "1"})
    try:
        with pytest.raises(servers.ServerError, match=r"no[-_]such[-_]option"):
            server.start()
        assert not server.running
    finally:
        server.stop()
