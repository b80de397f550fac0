"""The four servers in containers, with the settings of their embedded counterparts."""

from __future__ import annotations

import secrets
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import ClassVar

import psycopg
import pymysql

from onceflow.integration.servers import kafka, mysql, postgres
from onceflow.integration.servers.container import ContainerServer
from onceflow.integration.servers.kafka_admin import KafkaAdmin, admin_client, create_topic
from onceflow.integration.servers.kafka_jars import KAFKA_VERSION
from onceflow.integration.servers.mysql_admin import ACCESS_DENIED, connect
from onceflow.integration.servers.server import LOOPBACK, ServerError

_NO_OPTIONS: Mapping[str, str] = MappingProxyType({})


class _ContainerDatabase(ContainerServer):
    """A database whose superuser's password proves that it is the one started here."""

    _scheme: ClassVar[str]
    _superuser: ClassVar[str]
    _database: ClassVar[str]

    def __init__(
        self,
        options: Mapping[str, str] = _NO_OPTIONS,
        *,
        image: str | None = None,
        proxied: bool = False,
    ) -> None:
        """Describe a server; `start` or `with` runs it.

        Args:
            options: As of the embedded server.
            image: As in `ContainerServer`.
            proxied: As in `Server`.
        """
        super().__init__(image, proxied=proxied)
        self._options = options
        self._password = secrets.token_hex(8)

    @property
    def url(self) -> str:
        """The superuser's URL of a database that is always there."""
        return self.database_url(self._database)

    def database_url(self, database: str) -> str:
        """Return the superuser's URL of `database`, whether it exists or not."""
        return self._url(*self.client_address, database)

    def _url(self, host: str, port: int, database: str) -> str:
        return f"{self._scheme}://{self._superuser}:{self._password}@{host}:{port}/{database}"

    def _is_ready(self) -> bool:
        url = self._url(self.host, self.port, self._database)
        try:
            self._ask(url)
        except (psycopg.OperationalError, pymysql.err.OperationalError) as error:
            if self._refuses_the_password(error):
                raise ServerError(
                    f"port {self.port} is answered by another server than this {self.name}: "
                    f"it refuses the password ({error})"
                ) from error
            return False
        return True

    @abstractmethod
    def _ask(self, url: str) -> None:
        """Return once the server has answered something, in two seconds at most."""

    @abstractmethod
    def _refuses_the_password(self, error: Exception) -> bool: ...


class ContainerPostgres(_ContainerDatabase):
    """One PostgreSQL server; `postgres` is its superuser."""

    name: ClassVar[str] = "postgres"
    official_image: ClassVar[str] = "postgres:18"
    _inner_port: ClassVar[int] = 5432
    _scheme: ClassVar[str] = "postgresql"
    _superuser: ClassVar[str] = "postgres"
    _database: ClassVar[str] = "postgres"

    def _environment(self) -> Mapping[str, str]:
        return {"POSTGRES_PASSWORD": self._password}

    def _arguments(self) -> Sequence[str]:
        options = {**postgres.DEFAULT_OPTIONS, **self._options}
        return [part for key, value in options.items() for part in ("-c", f"{key}={value}")]

    def _ask(self, url: str) -> None:
        with psycopg.connect(url, connect_timeout=2) as connection:
            connection.execute("SELECT 1")

    def _refuses_the_password(self, error: Exception) -> bool:
        return "password authentication failed" in str(error)


class ContainerMySQL(_ContainerDatabase):
    """One MySQL server; `root` may do everything."""

    name: ClassVar[str] = "mysql"
    official_image: ClassVar[str] = "mysql:9"
    _inner_port: ClassVar[int] = 3306
    _scheme: ClassVar[str] = "mysql"
    _superuser: ClassVar[str] = "root"
    _database: ClassVar[str] = "mysql"
    _prefix: ClassVar[str] = "MYSQL"

    def _environment(self) -> Mapping[str, str]:
        return {
            f"{self._prefix}_ROOT_PASSWORD": self._password,
            f"{self._prefix}_ROOT_HOST": "%",
        }

    def _arguments(self) -> Sequence[str]:
        given = {key.replace("_", "-"): value for key, value in self._options.items()}
        options = {**mysql.DEFAULT_OPTIONS, **given}
        return [f"--{key}={value}" for key, value in options.items()]

    def _ask(self, url: str) -> None:
        connect(url, timeout_s=2).close()

    def _refuses_the_password(self, error: Exception) -> bool:
        return bool(error.args[0] == ACCESS_DENIED)


class ContainerMariaDB(ContainerMySQL):
    """One MariaDB server; `root` may do everything."""

    name: ClassVar[str] = "mariadb"
    official_image: ClassVar[str] = "mariadb:11"
    _prefix: ClassVar[str] = "MARIADB"


class ContainerKafka(ContainerServer):
    """One broker that is its own controller."""

    name: ClassVar[str] = "kafka"
    official_image: ClassVar[str] = f"apache/kafka:{KAFKA_VERSION}"
    _inner_port: ClassVar[int] = 9092

    def __init__(
        self,
        options: Mapping[str, str] = _NO_OPTIONS,
        *,
        image: str | None = None,
        proxied: bool = False,
    ) -> None:
        """Describe a broker; `start` or `with` runs it.

        Args:
            options: Settings of server.properties, as of `EmbeddedKafka`.
            image: As in `ContainerServer`.
            proxied: As in `EmbeddedKafka`.
        """
        super().__init__(image, proxied=proxied)
        self._options = options
        self._cluster_id = kafka.new_cluster_id()
        self._admin: KafkaAdmin | None = None

    @property
    def bootstrap_servers(self) -> str:
        """The broker's address, for any client."""
        host, port = self.client_address
        return f"{host}:{port}"

    def create_topic(
        self,
        name: str,
        partitions: int = 1,
        *,
        config: Mapping[str, str] = _NO_OPTIONS,
        timeout_s: float = 20.0,
    ) -> str:
        """Return `name` once every partition of the new topic has a leader.

        Raises:
            ServerError: The topic exists already, or was not there in time.
        """
        create_topic(self.bootstrap_servers, name, partitions, config=config, timeout_s=timeout_s)
        return name

    def _environment(self) -> Mapping[str, str]:
        # Inside the container the broker speaks to itself: the published address leads outside.
        settings = {
            "process.roles": "broker,controller",
            "node.id": "1",
            "controller.quorum.voters": f"1@{LOOPBACK}:9093",
            "listeners": (
                f"PLAINTEXT://:{self._inner_port},BROKER://{LOOPBACK}:19092,"
                f"CONTROLLER://{LOOPBACK}:9093"
            ),
            "advertised.listeners": (
                f"PLAINTEXT://{self.bootstrap_servers},BROKER://{LOOPBACK}:19092"
            ),
            **kafka.OWN_LISTENERS,
            **kafka.DEFAULT_OPTIONS,
            **self._options,
        }
        variables = {f"KAFKA_{_variable(key)}": value for key, value in settings.items()}
        heap = " ".join(kafka.DEFAULT_JVM_OPTIONS)
        return {**variables, "CLUSTER_ID": self._cluster_id, "KAFKA_HEAP_OPTS": heap}

    def _arguments(self) -> Sequence[str]:
        return ()

    def _is_ready(self) -> bool:
        if self._admin is None:
            self._admin = admin_client(self.bootstrap_servers)
        if not kafka.broker_is_ready(self._admin, self._cluster_id, self.bootstrap_servers):
            return False
        self._admin = None
        return True


def _variable(setting: str) -> str:
    return setting.replace("_", "__").replace("-", "___").replace(".", "_").upper()


__all__ = ["ContainerKafka", "ContainerMariaDB", "ContainerMySQL", "ContainerPostgres"]
