"""The selection of the servers of a test run, with one interface for each server.

ONCEFLOW_TEST_SERVERS selects for all servers: `embedded` (local processes, the default) or
`containers` (official images with Docker). All tests use the *shared* servers and must not kill
them. For each shared server, an environment variable may name one that already runs. A server that
a test may kill belongs to this test only (`make_postgres` and the others).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType, TracebackType
from typing import Protocol
from urllib.parse import urlsplit, urlunsplit

from typing_extensions import Self

from onceflow.integration.faults.network import TcpProxy
from onceflow.integration.servers.kafka import EmbeddedKafka, archive_classes, create_topic
from onceflow.integration.servers.mysql import EmbeddedMariaDB, EmbeddedMySQL
from onceflow.integration.servers.postgres import EmbeddedPostgres
from onceflow.integration.servers.server import ServerError

SWITCH_VARIABLE = "ONCEFLOW_TEST_SERVERS"
POSTGRES_VARIABLE = "ONCEFLOW_TEST_POSTGRES_URL"
MYSQL_VARIABLE = "ONCEFLOW_TEST_MYSQL_URL"
MARIADB_VARIABLE = "ONCEFLOW_TEST_MARIADB_URL"
KAFKA_VARIABLE = "ONCEFLOW_TEST_KAFKA"

_NO_OPTIONS: Mapping[str, str] = MappingProxyType({})


class ServerKind(Enum):
    """The way in which a server of the test run is provided."""

    EMBEDDED = "embedded"
    """A process of this machine."""
    CONTAINERS = "containers"
    """A container of the official image."""
    EXTERNAL = "external"
    """A server that already runs, named by an environment variable."""


class DatabaseServer(Protocol):
    """A database server on which databases may be created."""

    @property
    def url(self) -> str:
        """The URL of a database that always exists."""
        ...

    def database_url(self, database: str) -> str:
        """Return the URL of `database` on the same server."""
        ...


class PostgresServer(DatabaseServer, Protocol):
    """A Postgres server."""


class MySQLServer(DatabaseServer, Protocol):
    """A MySQL or MariaDB server."""


class KafkaServer(Protocol):
    """A Kafka broker on which topics may be created."""

    @property
    def bootstrap_servers(self) -> str:
        """The address of the broker."""
        ...

    def create_topic(
        self, name: str, partitions: int = 1, *, config: Mapping[str, str] = ...
    ) -> str:
        """Create a topic, and wait until it can be written to. Return `name`."""
        ...


class Killable(Protocol):
    """The methods of `Server`, which all embedded and container servers have."""

    port: int

    @property
    def host(self) -> str:
        """The host on which the server itself listens, at `port`."""
        ...

    @property
    def network(self) -> TcpProxy:
        """The proxy in front of a server that was created with `proxied=True`."""
        ...

    @property
    def running(self) -> bool:
        """True if the server runs or is paused."""
        ...

    def start(self, *, timeout_s: float = ...) -> Self:
        """Start the server and wait until it answers."""
        ...

    def kill(self) -> None:
        """SIGKILL the server. Return when no process of it runs."""
        ...

    def restart(self, *, timeout_s: float = ...) -> Self:
        """Kill the server and start it with the same data on the same port."""
        ...

    def pause(self) -> None:
        """Pause the server. Connections stay open, and the server does not answer."""
        ...

    def unpause(self) -> None:
        """Resume a paused server."""
        ...

    def stop(self, *, timeout_s: float = ...) -> None:
        """End the server and delete everything that was created for it."""
        ...

    def log_tail(self) -> str:
        """Return the end of the server's log."""
        ...

    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...


class OwnDatabase(Killable, DatabaseServer, Protocol):
    """A database server that only one test uses."""


class OwnKafka(Killable, KafkaServer, Protocol):
    """A broker that only one test uses."""


class MakeDatabase(Protocol):
    """The type of `make_postgres`, `make_mysql` and `make_mariadb`."""

    def __call__(self, options: Mapping[str, str] = ..., *, proxied: bool = ...) -> OwnDatabase:
        """Return a server that `start` runs."""
        ...


def find_kind() -> ServerKind:
    """Return the kind in ONCEFLOW_TEST_SERVERS. Default: embedded.

    Raises:
        ServerError: The variable has another value.
    """
    chosen = os.environ.get(SWITCH_VARIABLE) or ServerKind.EMBEDDED.value
    for kind in (ServerKind.EMBEDDED, ServerKind.CONTAINERS):
        if chosen == kind.value:
            return kind
    raise ServerError(f"{SWITCH_VARIABLE}={chosen} is neither `embedded` nor `containers`")


# Import the container module only if it is selected. The demo, for example, does not need it.


def make_postgres(
    options: Mapping[str, str] = _NO_OPTIONS, *, proxied: bool = False
) -> OwnDatabase:
    """Return a Postgres of the selected kind. `options` are settings of postgresql.conf."""
    if find_kind() is ServerKind.EMBEDDED:
        return EmbeddedPostgres(options, proxied=proxied)
    from onceflow.integration.servers.container import ContainerPostgres

    return ContainerPostgres(options, proxied=proxied)


def make_mysql(options: Mapping[str, str] = _NO_OPTIONS, *, proxied: bool = False) -> OwnDatabase:
    """Return a MySQL of the selected kind. `options` are options of its server program."""
    if find_kind() is ServerKind.EMBEDDED:
        return EmbeddedMySQL(options, proxied=proxied)
    from onceflow.integration.servers.container import ContainerMySQL

    return ContainerMySQL(options, proxied=proxied)


def make_mariadb(options: Mapping[str, str] = _NO_OPTIONS, *, proxied: bool = False) -> OwnDatabase:
    """Return a MariaDB of the selected kind. `options` are options of its server program."""
    if find_kind() is ServerKind.EMBEDDED:
        return EmbeddedMariaDB(options, proxied=proxied)
    from onceflow.integration.servers.container import ContainerMariaDB

    return ContainerMariaDB(options, proxied=proxied)


def make_kafka(options: Mapping[str, str] = _NO_OPTIONS, *, proxied: bool = False) -> OwnKafka:
    """Return a Kafka of the selected kind. `options` are settings of server.properties."""
    if find_kind() is ServerKind.EMBEDDED:
        archive_classes()
        return EmbeddedKafka(options, proxied=proxied)
    from onceflow.integration.servers.container import ContainerKafka

    return ContainerKafka(options, proxied=proxied)


@dataclass(frozen=True, slots=True, repr=False)
class ExternalDatabase:
    """A database server given by its URL. The URL may contain a password and is never printed."""

    url: str

    def database_url(self, database: str) -> str:
        """Return the server's URL of `database`."""
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
        config: Mapping[str, str] = _NO_OPTIONS,
    ) -> str:
        """Create a topic, and wait until every partition has a leader. Return `name`."""
        create_topic(self.bootstrap_servers, name, partitions, config=config)
        return name


@contextmanager
def share_postgres() -> Generator[tuple[ServerKind, PostgresServer], None, None]:
    """Yield the Postgres that the environment names, or else run one for the block."""
    with _share_database(POSTGRES_VARIABLE, make_postgres) as shared:
        yield shared


@contextmanager
def share_mysql() -> Generator[tuple[ServerKind, MySQLServer], None, None]:
    """Yield the MySQL that the environment names, or else run one for the block."""
    with _share_database(MYSQL_VARIABLE, make_mysql) as shared:
        yield shared


@contextmanager
def share_mariadb() -> Generator[tuple[ServerKind, MySQLServer], None, None]:
    """Yield the MariaDB that the environment names, or else run one for the block."""
    with _share_database(MARIADB_VARIABLE, make_mariadb) as shared:
        yield shared


@contextmanager
def share_kafka() -> Generator[tuple[ServerKind, KafkaServer], None, None]:
    """Yield the Kafka that the environment names, or else run one for the block."""
    address = os.environ.get(KAFKA_VARIABLE)
    if address:
        yield ServerKind.EXTERNAL, ExternalKafka(address)
        return
    with make_kafka() as server:
        yield find_kind(), server


@contextmanager
def _share_database(
    variable: str, make: Callable[[], OwnDatabase]
) -> Generator[tuple[ServerKind, DatabaseServer], None, None]:
    url = os.environ.get(variable)
    if url:
        yield ServerKind.EXTERNAL, ExternalDatabase(url)
        return
    with make() as server:
        yield find_kind(), server
