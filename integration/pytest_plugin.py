"""The pytest fixtures with real servers: one server for each run, new databases for each test.

`--onceflow-servers` (or ONCEFLOW_TEST_SERVERS) selects local processes or containers.
ONCEFLOW_TEST_POSTGRES_URL, ONCEFLOW_TEST_MYSQL_URL, ONCEFLOW_TEST_MARIADB_URL and
ONCEFLOW_TEST_KAFKA name servers that are already running. A server starts when the first test uses
it. If it cannot start, the test fails and is not skipped, because a skipped proof looks like a
passed one.

pytest loads this module by its entry point in every project that has onceflow installed. So the
fixtures import heavy modules only when they are used.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Protocol

import pytest

if TYPE_CHECKING:
    from onceflow.integration.servers.kinds import (
        KafkaServer,
        MakeDatabase,
        MySQLServer,
        OwnDatabase,
        OwnKafka,
        PostgresServer,
    )

_KINDS = ("embedded", "containers")


class TopicFactory(Protocol):
    """The value of the fixture `kafka_topic`."""

    def __call__(self, partitions: int = 1) -> str:
        """Return the name of a new topic."""
        ...


class DatabaseFactory(Protocol):
    """The value of the fixtures `postgres_server`, `mysql_server` and `mariadb_server`."""

    def __call__(self, options: Mapping[str, str] = ..., *, proxied: bool = ...) -> OwnDatabase:
        """Return a new running server for this test. It is stopped after the test.

        Args:
            options: Settings of the server.
            proxied: The server's URLs lead through a proxy that `server.network` can cut.
        """
        ...


class KafkaFactory(Protocol):
    """The value of the fixture `kafka_server`."""

    def __call__(self, options: Mapping[str, str] = ..., *, proxied: bool = ...) -> OwnKafka:
        """Return a new running broker for this test, like `DatabaseFactory`."""
        ...


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option."""
    parser.getgroup("onceflow", "onceflow: real servers").addoption(
        "--onceflow-servers",
        choices=_KINDS,
        help="What the test servers are (default: ONCEFLOW_TEST_SERVERS, else embedded).",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Pass the option to this process and its children by an environment variable."""
    chosen = config.getoption("--onceflow-servers")
    if chosen:
        os.environ["ONCEFLOW_TEST_SERVERS"] = chosen


@pytest.fixture(scope="session")
def onceflow_postgres() -> Iterator[PostgresServer]:
    """The run's Postgres. Tests must not kill it: use `postgres_server` for that."""
    from onceflow.integration.servers.kinds import share_postgres

    with share_postgres() as (_, server):
        yield server


@pytest.fixture(scope="session")
def onceflow_mysql() -> Iterator[MySQLServer]:
    """The run's MySQL. Tests must not kill it: use `mysql_server` for that."""
    from onceflow.integration.servers.kinds import share_mysql

    with share_mysql() as (_, server):
        yield server


@pytest.fixture(scope="session")
def onceflow_mariadb() -> Iterator[MySQLServer]:
    """The run's MariaDB. Tests must not kill it: use `mariadb_server` for that."""
    from onceflow.integration.servers.kinds import share_mariadb

    with share_mariadb() as (_, server):
        yield server


@pytest.fixture(scope="session")
def onceflow_kafka() -> Iterator[KafkaServer]:
    """The run's Kafka. Tests must not kill it: use `kafka_server` for that."""
    from onceflow.integration.servers.kinds import share_kafka

    with share_kafka() as (_, server):
        yield server


@pytest.fixture
def postgres_server() -> Iterator[DatabaseFactory]:
    """A factory of Postgres servers that the test may kill, pause and cut off."""
    from onceflow.integration.servers.kinds import make_postgres

    yield from _databases(make_postgres)


@pytest.fixture
def mysql_server() -> Iterator[DatabaseFactory]:
    """A factory of MySQL servers that the test may kill, pause and cut off."""
    from onceflow.integration.servers.kinds import make_mysql

    yield from _databases(make_mysql)


@pytest.fixture
def mariadb_server() -> Iterator[DatabaseFactory]:
    """A factory of MariaDB servers that the test may kill, pause and cut off."""
    from onceflow.integration.servers.kinds import make_mariadb

    yield from _databases(make_mariadb)


@pytest.fixture
def kafka_server() -> Iterator[KafkaFactory]:
    """A factory of brokers that the test may kill, pause and cut off."""
    from onceflow.integration.servers.kinds import make_kafka

    with contextlib.ExitStack() as running:

        def make(options: Mapping[str, str] | None = None, *, proxied: bool = False) -> OwnKafka:
            return running.enter_context(make_kafka(options or {}, proxied=proxied))

        yield make


@pytest.fixture
def postgres_database(onceflow_postgres: PostgresServer) -> Iterator[str]:
    """The URL of a new database for this test, dropped with its prepared transactions."""
    from onceflow.integration.servers import postgres

    name = _database_name()
    postgres.create_database(onceflow_postgres.url, name)
    url = onceflow_postgres.database_url(name)
    yield url
    postgres.drop_database_in_doubt(onceflow_postgres.url, url, name)


@pytest.fixture
def mysql_database(onceflow_mysql: MySQLServer) -> Iterator[str]:
    """The URL of a new MySQL database for this test, dropped with its prepared transactions."""
    yield from _mysql_database(onceflow_mysql)


@pytest.fixture
def mariadb_database(onceflow_mariadb: MySQLServer) -> Iterator[str]:
    """The URL of a new MariaDB database for this test, dropped with its prepared transactions."""
    yield from _mysql_database(onceflow_mariadb)


@pytest.fixture
def kafka_topic(onceflow_kafka: KafkaServer) -> Iterator[TopicFactory]:
    """A factory of topics that are deleted after the test."""
    from onceflow.integration.servers.kafka import delete_topics

    made: list[str] = []

    def make(partitions: int = 1) -> str:
        name = onceflow_kafka.create_topic(f"onceflow-{uuid.uuid4().hex[:16]}", partitions)
        made.append(name)
        return name

    yield make
    if made:
        delete_topics(onceflow_kafka.bootstrap_servers, made)


def _databases(make_server: MakeDatabase) -> Iterator[DatabaseFactory]:
    with contextlib.ExitStack() as running:

        def make(options: Mapping[str, str] | None = None, *, proxied: bool = False) -> OwnDatabase:
            return running.enter_context(make_server(options or {}, proxied=proxied))

        yield make


def _mysql_database(server: MySQLServer) -> Iterator[str]:
    from onceflow.integration.servers.mysql import MySQLAdmin

    name = _database_name()
    with MySQLAdmin.session(server.url) as admin:
        # The server lists prepared transactions without their databases. Those that exist now are
        # not from this test. So an external server must serve only one test run at a time.
        of_others = admin.in_doubt()
        admin.create_database(name)
    yield server.database_url(name)
    with MySQLAdmin.session(server.url) as admin:
        # A session owns its prepared transactions until it ends.
        admin.end_sessions_of(name)
        admin.roll_back(admin.in_doubt() - of_others)
        admin.drop_database(name)


def _database_name() -> str:
    return f"onceflow_{uuid.uuid4().hex[:16]}"
