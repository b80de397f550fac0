"""Fixtures with real servers: one server a test run, one database and one topic a test.

ONCEFLOW_TEST_POSTGRES_URL, ONCEFLOW_TEST_MYSQL_URL, ONCEFLOW_TEST_MARIADB_URL and
ONCEFLOW_TEST_KAFKA name servers that run already; without them the servers are started as
processes of this machine when the first test asks for one. A server that cannot be had is an error
and no skip: a skipped proof looks like a passed one.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator
from typing import Protocol

import psycopg
import pytest
from psycopg import sql

from onceflow.integration.servers.kafka_admin import delete_topics
from onceflow.integration.servers.kinds import (
    KafkaServer,
    MySQLServer,
    PostgresServer,
    shared_kafka,
    shared_mariadb,
    shared_mysql,
    shared_postgres,
)
from onceflow.integration.servers.mysql_admin import MySQLAdmin


class TopicFactory(Protocol):
    """What the fixture `kafka_topic` gives."""

    def __call__(self, partitions: int = 1) -> str:
        """Return the name of a new topic."""
        ...


@pytest.fixture(scope="session")
def onceflow_postgres() -> Iterator[PostgresServer]:
    """The run's Postgres. Not to be killed: start your own `EmbeddedPostgres` for that."""
    with shared_postgres() as (_, server):
        yield server


@pytest.fixture(scope="session")
def onceflow_mysql() -> Iterator[MySQLServer]:
    """The run's MySQL. Not to be killed: start your own `EmbeddedMySQL` for that."""
    with shared_mysql() as (_, server):
        yield server


@pytest.fixture(scope="session")
def onceflow_mariadb() -> Iterator[MySQLServer]:
    """The run's MariaDB. Not to be killed: start your own `EmbeddedMariaDB` for that."""
    with shared_mariadb() as (_, server):
        yield server


@pytest.fixture(scope="session")
def onceflow_kafka() -> Iterator[KafkaServer]:
    """The run's Kafka. Not to be killed: start your own `EmbeddedKafka` for that."""
    with shared_kafka() as (_, server):
        yield server


@pytest.fixture
def postgres_database(onceflow_postgres: PostgresServer) -> Iterator[str]:
    """URL of a database that is this test's alone; dropped with all it has in doubt."""
    name = _database_name()
    identifier = sql.Identifier(name)
    with psycopg.connect(onceflow_postgres.url, autocommit=True) as connection:
        connection.execute(sql.SQL("CREATE DATABASE {}").format(identifier))
    url = onceflow_postgres.database_url(name)
    yield url
    _roll_back_prepared(url)
    with psycopg.connect(onceflow_postgres.url, autocommit=True) as connection:
        # A dropped database is refused while anything in it is prepared; FORCE ends sessions only.
        connection.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(identifier))


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
    made: list[str] = []

    def make(partitions: int = 1) -> str:
        name = onceflow_kafka.create_topic(f"onceflow-{uuid.uuid4().hex[:16]}", partitions)
        made.append(name)
        return name

    yield make
    if made:
        delete_topics(onceflow_kafka.bootstrap_servers, made)


def _mysql_database(server: MySQLServer) -> Iterator[str]:
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


def _roll_back_prepared(url: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        # Sessions that the test forgot may hold locks for which the rollback would wait.
        connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
        listed = connection.execute(
            "SELECT gid FROM pg_prepared_xacts WHERE database = current_database()"
        ).fetchall()
        for (gid,) in listed:
            # Somebody else may decide it at the same moment.
            with contextlib.suppress(psycopg.errors.UndefinedObject):
                connection.execute(sql.SQL("ROLLBACK PREPARED {}").format(sql.Literal(gid)))
