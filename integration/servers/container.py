"""The four servers in containers of the official images, configured like the embedded servers.

The methods are those of `ServerProcess`. The port is chosen here and stays the same across `kill()`
and `start()`. A port that Docker chooses would change with every start.
"""

from __future__ import annotations

import secrets
import time
from abc import abstractmethod
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, cast

import docker
import psycopg
import pymysql
from docker.errors import DockerException, NotFound
from docker.models.containers import Container
from testcontainers.core.config import ConnectionMode
from testcontainers.core.container import DockerContainer
from testcontainers.core.docker_client import DockerClient, get_docker_host
from typing_extensions import Self

from onceflow.integration.servers import kafka, mysql, postgres
from onceflow.integration.servers.kafka import KafkaAdmin, admin_client, create_topic
from onceflow.integration.servers.kafka_jars import KAFKA_VERSION
from onceflow.integration.servers.mysql import ACCESS_DENIED, connect
from onceflow.integration.servers.server import LOOPBACK, Server, ServerError

DEFAULT_TIMEOUT_S = 60
_DEFAULT_SOCKET = "unix:///var/run/docker.sock"
# The error of a read timeout comes from requests, below docker. Both are OSErrors.
REFUSALS = (DockerException, OSError)
"""The exceptions that Docker raises."""


def check_socket() -> None:
    """Raise ServerError if the daemon's socket is local and does not exist.

    Called before the client is created, because the client leaks a socket if no daemon runs.

    Raises:
        ServerError: The socket does not exist.
    """
    host = get_docker_host() or _DEFAULT_SOCKET
    path = host.removeprefix("unix://")
    if path != host and not Path(path).exists():
        raise ServerError(f"no Docker daemon answers: {path} does not exist")


@contextmanager
def docker_client(
    *, timeout_s: int = DEFAULT_TIMEOUT_S
) -> Generator[docker.DockerClient, None, None]:
    """Yield a client of the daemon.

    Raises:
        ServerError: The daemon does not answer, or refuses a request in the block.
    """
    check_socket()
    try:
        client = DockerClient(timeout=timeout_s).client
        try:
            client.ping()
            yield client
        finally:
            client.close()
    except REFUSALS as error:
        raise ServerError(f"the Docker daemon does not do it: {error}") from error


_LOG_TAIL_LINES = 40
_POLL_S = 0.02
_KILL_TIMEOUT_S = 20.0


class ContainerServer(Server):
    """A server in a container. `stop` removes the container with its data."""

    official_image: ClassVar[str]
    _inner_port: ClassVar[int]

    def __init__(self, image: str | None = None, *, proxied: bool = False) -> None:
        """Describe a container. `start` creates it.

        Args:
            image: An image to use instead of `official_image`, with the same interface.
            proxied: As in `Server`.

        Raises:
            ServerError: No Docker daemon answers.
        """
        super().__init__(proxied=proxied)
        self.image = image or self.official_image
        with _convert_errors(f"{self.image} cannot be used"):
            check_socket()
            self._container = DockerContainer(self.image)
            self._host = _find_host(self._container)
        self._made: Container | None = None

    @property
    def host(self) -> str:
        """The host on which the container's port is published."""
        return self._host

    @abstractmethod
    def _environment(self) -> Mapping[str, str]:
        """Return the variables that the image understands."""

    @abstractmethod
    def _arguments(self) -> Sequence[str]:
        """Return the options of the server program. If empty, the image's command is used."""

    @abstractmethod
    def _is_ready(self) -> bool:
        """Return True if the server answers, as in `ServerProcess`."""

    @property
    def running(self) -> bool:
        """True if the container runs or is paused."""
        return self._status() in {"running", "paused"}

    def start(self, *, timeout_s: float = 60.0) -> Self:
        """Start the server and wait until it answers. Does nothing if it already runs.

        The first start may pull the image. `timeout_s` does not limit the pull.

        Raises:
            ServerError: The image is not available, the server ended, or it was not ready in
                `timeout_s`. The message quotes the end of its log.
        """
        if self.running:
            return self
        with _convert_errors(
            f"{self.name} cannot be started from the image {self._container.image}"
        ):
            if self._made is None:
                self._made = self._create()
            else:
                self._made.start()
        deadline = time.monotonic() + timeout_s
        try:
            self._await_ready(deadline, timeout_s)
        except BaseException:
            self.kill()
            raise
        return self

    def kill(self) -> None:
        """SIGKILL the container's processes. Return when none runs. Idempotent.

        A paused container is resumed first, because Docker requires it. It may answer for a moment.
        """
        container = self._made
        if container is None:
            return
        with _convert_errors(f"{self.name} cannot be killed"):
            if self._status() == "paused":
                container.unpause()
            if self._status() == "running":
                container.kill("SIGKILL")
            deadline = time.monotonic() + _KILL_TIMEOUT_S
            while self.running:
                if time.monotonic() > deadline:
                    raise ServerError(f"{self.name} still runs {_KILL_TIMEOUT_S:g} s after SIGKILL")
                time.sleep(_POLL_S)

    def pause(self) -> None:
        """Pause all processes. Connections stay open, and the server does not answer."""
        with _convert_errors(f"{self.name} cannot be paused"):
            self._running_container().pause()

    def unpause(self) -> None:
        """Resume a paused container."""
        with _convert_errors(f"{self.name} cannot go on"):
            self._running_container().unpause()

    def stop(self, *, timeout_s: float = 30.0) -> None:
        """Kill the server and remove its container with its data. Idempotent.

        Args:
            timeout_s: Not used, because the server is not shut down in order.
        """
        del timeout_s
        self._close_network()
        try:
            with _convert_errors(f"the container of {self.name} cannot be removed"):
                self._container.stop()
        finally:
            self._made = None

    def log_tail(self) -> str:
        """Return the end of the container's output, over all its starts."""
        if self._made is None:
            return "(no container)"
        try:
            return self._made.logs(tail=_LOG_TAIL_LINES).decode(errors="replace")
        except REFUSALS as error:
            return f"(no log: {error})"

    def _create(self) -> Container:
        container = self._container
        container.env.update(self._environment())
        arguments = list(self._arguments())
        if arguments:
            container.with_command(arguments)
        # If Docker is local, publish on loopback only, so that other machines cannot reach the
        # test's database.
        published = (LOOPBACK, self.port) if self._host == LOOPBACK else self.port
        cast("dict[str, Any]", container.ports)[f"{self._inner_port}/tcp"] = published
        container.start()
        return container.get_wrapped_container()

    def _status(self) -> str:
        if self._made is None:
            return "none"
        try:
            self._made.reload()
        except NotFound:
            return "removed"
        return self._made.status

    def _running_container(self) -> Container:
        if self._made is None or not self.running:
            raise ServerError(f"{self.name} on port {self.port} does not run; call start() first")
        return self._made

    def _await_ready(self, deadline: float, timeout_s: float) -> None:
        while not self._is_ready():
            status = self._status()
            if status != "running":
                raise ServerError(
                    f"{self.name} on port {self.port} is {status} instead of starting; "
                    f"its log ends:\n{self.log_tail()}"
                )
            if time.monotonic() > deadline:
                raise ServerError(
                    f"{self.name} on port {self.port} did not answer in {timeout_s:g} s; "
                    f"its log ends:\n{self.log_tail()}"
                )
            time.sleep(_POLL_S)


@contextmanager
def _convert_errors(failure: str) -> Generator[None, None, None]:
    """Convert errors of Docker to a ServerError that starts with `failure`."""
    try:
        yield
    except (*REFUSALS, ServerError) as error:
        raise ServerError(
            f"{failure}: {error}. Start a Docker daemon that can pull or has the official images, "
            "let script/integration build local ones, or use embedded servers "
            "(ONCEFLOW_TEST_SERVERS=embedded)"
        ) from error


def _find_host(container: DockerContainer) -> str:
    """Return the host of published ports. Works before the container exists."""
    client = container.get_docker_client()
    mode = client.get_connection_mode()
    if mode is ConnectionMode.docker_host:
        host = client.host()
        # Use the address: the name localhost may resolve to ::1 first, where no port is published.
        return LOOPBACK if host in {"localhost", LOOPBACK} else host
    if mode is ConnectionMode.gateway_ip:
        bridge = client.client.networks.get("bridge")
        return str(cast("Any", bridge.attrs)["IPAM"]["Config"][0]["Gateway"])
    raise ServerError(
        f"testcontainers' connection mode {mode.value} has no published ports; "
        "set TESTCONTAINERS_CONNECTION_MODE to docker_host or gateway_ip"
    )


_NO_OPTIONS: Mapping[str, str] = MappingProxyType({})


class _ContainerDatabase(ContainerServer):
    """A database in a container. Its superuser's password proves that it was started here."""

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
        """Describe a server. `start` or `with` runs it.

        Args:
            options: As in the embedded server.
            image: As in `ContainerServer`.
            proxied: As in `Server`.
        """
        super().__init__(image, proxied=proxied)
        self._options = options
        self._password = secrets.token_hex(8)

    @property
    def url(self) -> str:
        """The superuser's URL of a database that always exists."""
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
        """Run a query on the server, with a timeout of two seconds."""

    @abstractmethod
    def _refuses_the_password(self, error: Exception) -> bool: ...


class ContainerPostgres(_ContainerDatabase):
    """A PostgreSQL server. `postgres` is its superuser."""

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
    """A MySQL server. `root` has all privileges."""

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
    """A MariaDB server. `root` has all privileges."""

    name: ClassVar[str] = "mariadb"
    official_image: ClassVar[str] = "mariadb:11"
    _prefix: ClassVar[str] = "MARIADB"


class ContainerKafka(ContainerServer):
    """A Kafka broker that is also its controller."""

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
        """Describe a broker. `start` or `with` runs it.

        Args:
            options: Settings of server.properties, as in `EmbeddedKafka`.
            image: As in `ContainerServer`.
            proxied: As in `EmbeddedKafka`.
        """
        super().__init__(image, proxied=proxied)
        self._options = options
        self._cluster_id = kafka.new_cluster_id()
        self._admin: KafkaAdmin | None = None

    @property
    def bootstrap_servers(self) -> str:
        """The broker's address for clients."""
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
        """Create a topic, and wait until every partition has a leader. Return `name`.

        Raises:
            ServerError: The topic already exists, or was not ready in time.
        """
        create_topic(self.bootstrap_servers, name, partitions, config=config, timeout_s=timeout_s)
        return name

    def _environment(self) -> Mapping[str, str]:
        # The broker connects to itself inside the container. The published address leads outside.
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


__all__ = [
    "REFUSALS",
    "ContainerKafka",
    "ContainerMariaDB",
    "ContainerMySQL",
    "ContainerPostgres",
    "ContainerServer",
    "check_socket",
    "docker_client",
]
