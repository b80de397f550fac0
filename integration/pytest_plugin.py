"""Fixtures with real servers: one server a test run, one database and one topic a test.

`--onceflow-servers` (or ONCEFLOW_TEST_SERVERS) chooses between processes of this machine and
containers. ONCEFLOW_TEST_POSTGRES_URL, ONCEFLOW_TEST_MYSQL_URL, ONCEFLOW_TEST_MARIADB_URL and
ONCEFLOW_TEST_KAFKA name servers that run already. A server starts when the first test asks for it;
one that cannot be had is an error and no skip: a skipped proof looks like a passed one.

Loaded by pytest through its entry point in every project that has onceflow installed: what is heavy
is imported by the fixtures.
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
    """What the fixture `kafka_topic` gives."""

    def __call__(self, partitions: int = 1) -> str:
        """Return the name of a new topic."""
        ...


class DatabaseFactory(Protocol):
    """What the fixtures `postgres_server`, `mysql_server` and `mariadb_server` give."""

    def __call__(self, options: Mapping[str, str] = ..., *, proxied: bool = ...) -> OwnDatabase:
        """Return a running server that is this test's own; stopped after the test.

        Args:
            options: Settings of the server.
            proxied: Its URLs lead through a network that `server.network` can cut.
        """
        ...


class KafkaFactory(Protocol):
    """What the fixture `kafka_server` gives."""

    def __call__(self, options: Mapping[str, str] = ..., *, proxied: bool = ...) -> OwnKafka:
        """Return a running broker that is this test's own, as `DatabaseFactory` does."""
        ...


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the switch."""
    parser.getgroup("onceflow", "onceflow: real servers").addoption(
        "--onceflow-servers",
        choices=_KINDS,
        help="What the test servers are (default: ONCEFLOW_TEST_SERVERS, else embedded).",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Tell the switch to this process and its children."""
    chosen = config.getoption("--onceflow-servers")
    if chosen:
        os.environ["ONCEFLOW_TEST_SERVERS"] = chosen


@pytest.fixture(scope="session")
def onceflow_postgres() -> Iterator[PostgresServer]:
    """The run's Postgres. Not to be killed: `postgres_server` gives one for that."""
    from onceflow.integration.servers.kinds import share_postgres

    with share_postgres() as (_, server):
        yield server


@pytest.fixture(scope="session")
def onceflow_mysql() -> Iterator[MySQLServer]:
    """The run's MySQL. Not to be killed: `mysql_server` gives one for that."""
    from onceflow.integration.servers.kinds import share_mysql

    with share_mysql() as (_, server):
        yield server


@pytest.fixture(scope="session")
def onceflow_mariadb() -> Iterator[MySQLServer]:
    """The run's MariaDB. Not to be killed: `mariadb_server` gives one for that."""
    from onceflow.integration.servers.kinds import share_mariadb

    with share_mariadb() as (_, server):
        yield server


@pytest.fixture(scope="session")
def onceflow_kafka() -> Iterator[KafkaServer]:
    """The run's Kafka. Not to be killed: `kafka_server` gives one for that."""
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
    """URL of a database that is this test's alone; dropped with all it has in doubt."""
    from onceflow.integration.servers import postgres

    name = _database_name()
    postgres.create_database(onceflow_postgres.url, name)
    url = onceflow_postgres.database_url(name)
    yield url
    postgres.roll_back_prepared(url)
    postgres.drop_database(onceflow_postgres.url, name)


@pytest.fixture
def mysql_database(onceflow_mysql: MySQLServer) -> Iterator[str]:
    """URL of a MySQL database that is this test's alone; dropped with all it has in doubt."""
    yield from _mysql_database(onceflow_mysql)


@pytest.fixture
def mariadb_database(onceflow_mariadb: MySQLServer) -> Iterator[str]:
    """URL of a MariaDB database that is this test's alone; dropped with all it has in doubt."""
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
        # The server lists prepared transactions without their databases: what is prepared now is
        # not this test's. An external server must therefore serve one test run at a time.
        of_others = admin.in_doubt()
        admin.create_database(name)
    yield server.database_url(name)
    with MySQLAdmin.session(server.url) as admin:
        # A session keeps what it has prepared for itself until it ends.
        admin.end_sessions_of(name)
        admin.roll_back(admin.in_doubt() - of_others)
        admin.drop_database(name)


def _database_name() -> str:
    return f"onceflow_{uuid.uuid4().hex[:16]}"
