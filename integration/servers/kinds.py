"""Where the shared servers of a test run come from, behind one face for each server.

A server that a test may kill is always its own (`EmbeddedPostgres()`, `EmbeddedKafka()`): these are
shared, and one that was given from outside cannot be killed at all.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Protocol
from urllib.parse import urlsplit, urlunsplit

from onceflow.integration.servers.kafka import EmbeddedKafka
from onceflow.integration.servers.kafka_admin import create_topic
from onceflow.integration.servers.mysql import EmbeddedMariaDB, EmbeddedMySQL
from onceflow.integration.servers.postgres import EmbeddedPostgres

POSTGRES_VARIABLE = "ONCEFLOW_TEST_POSTGRES_URL"
MYSQL_VARIABLE = "ONCEFLOW_TEST_MYSQL_URL"
MARIADB_VARIABLE = "ONCEFLOW_TEST_MARIADB_URL"
KAFKA_VARIABLE = "ONCEFLOW_TEST_KAFKA"


class ServerKind(Enum):
    """How a server of the test run is obtained."""

    EMBEDDED = "embedded"
    """A process of this machine."""
    EXTERNAL = "external"
    """A server that runs already, named by an environment variable."""


class DatabaseServer(Protocol):
    """A database server on which databases may be created."""

    @property
    def url(self) -> str:
        """URL of a database to which one may always connect."""
        ...

    def database_url(self, database: str) -> str:
        """URL of `database` on the same server."""
        ...


class PostgresServer(DatabaseServer, Protocol):
    """A Postgres."""


class MySQLServer(DatabaseServer, Protocol):
    """A MySQL or a MariaDB."""


class KafkaServer(Protocol):
    """A Kafka on which topics may be created."""

    @property
    def bootstrap_servers(self) -> str:
        """Its address."""
        ...

    def create_topic(
        self, name: str, partitions: int = 1, *, config: Mapping[str, str] = ...
    ) -> str:
        """Return `name` once it can be written to."""
        ...


@dataclass(frozen=True, slots=True, repr=False)
class ExternalDatabase:
    """A server given by its URL, which may hold a password and is therefore never printed."""

    url: str

    def database_url(self, database: str) -> str:
        """Return the URL with another database."""
        return urlunsplit(urlsplit(self.url)._replace(path=f"/{database}"))


@dataclass(frozen=True, slots=True)
class ExternalKafka:
    """A broker given by its address."""

    bootstrap_servers: str

    def create_topic(
        self,
        name: str,
        partitions: int = 1,
        *,
        config: Mapping[str, str] = MappingProxyType({}),
    ) -> str:
        """Return `name` once every partition of the new topic has a leader."""
        create_topic(self.bootstrap_servers, name, partitions, config=config)
        return name


@contextmanager
def shared_postgres() -> Generator[tuple[ServerKind, PostgresServer], None, None]:
    """Yield the Postgres that the environment names, else an embedded one for the block."""
    url = os.environ.get(POSTGRES_VARIABLE)
    if url:
        yield ServerKind.EXTERNAL, ExternalDatabase(url)
        return
    with EmbeddedPostgres() as server:
        yield ServerKind.EMBEDDED, server


@contextmanager
def shared_mysql() -> Generator[tuple[ServerKind, MySQLServer], None, None]:
    """Yield the MySQL that the environment names, else an embedded one for the block."""
    url = os.environ.get(MYSQL_VARIABLE)
    if url:
        yield ServerKind.EXTERNAL, ExternalDatabase(url)
        return
    with EmbeddedMySQL() as server:
        yield ServerKind.EMBEDDED, server


@contextmanager
def shared_mariadb() -> Generator[tuple[ServerKind, MySQLServer], None, None]:
    """Yield the MariaDB that the environment names, else an embedded one for the block."""
    url = os.environ.get(MARIADB_VARIABLE)
    if url:
        yield ServerKind.EXTERNAL, ExternalDatabase(url)
        return
    with EmbeddedMariaDB() as server:
        yield ServerKind.EMBEDDED, server


@contextmanager
def shared_kafka() -> Generator[tuple[ServerKind, KafkaServer], None, None]:
    """Yield the Kafka that the environment names, else an embedded one for the block."""
    address = os.environ.get(KAFKA_VARIABLE)
    if address:
        yield ServerKind.EXTERNAL, ExternalKafka(address)
        return
    with EmbeddedKafka() as server:
        yield ServerKind.EMBEDDED, server
