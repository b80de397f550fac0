"""A real server in a container of the official image, on testcontainers.

The verbs are those of `ServerProcess`. The port is chosen here and stays the same over `kill()` and
`start()`: one that Docker chooses changes with every start.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, cast

from docker.errors import NotFound
from docker.models.containers import Container
from testcontainers.core.config import ConnectionMode
from testcontainers.core.container import DockerContainer
from typing_extensions import Self

from onceflow.integration.servers.docker_daemon import REFUSALS, check_socket
from onceflow.integration.servers.server import LOOPBACK, Server, ServerError

_LOG_TAIL_LINES = 40
_POLL_S = 0.02
_KILL_TIMEOUT_S = 20.0


class ContainerServer(Server):
    """A server in a container, which is removed by `stop` with its data."""

    official_image: ClassVar[str]
    _inner_port: ClassVar[int]

    def __init__(self, image: str | None = None, *, proxied: bool = False) -> None:
        """Describe a container; `start` makes it.

        Args:
            image: Another image than `official_image`, with the same interface.
            proxied: As in `Server`.

        Raises:
            ServerError: No Docker daemon answers.
        """
        super().__init__(proxied=proxied)
        self.image = image or self.official_image
        with _spoken(f"{self.image} cannot be used"):
            check_socket()
            self._container = DockerContainer(self.image)
            self._host = _host_of(self._container)
        self._made: Container | None = None

    @property
    def host(self) -> str:
        """Where the container's port is published."""
        return self._host

    @abstractmethod
    def _environment(self) -> Mapping[str, str]:
        """Return the variables that the image understands."""

    @abstractmethod
    def _arguments(self) -> Sequence[str]:
        """Return the options of the server program; none leaves the image's command."""

    @abstractmethod
    def _is_ready(self) -> bool:
        """As in `ServerProcess`."""

    @property
    def running(self) -> bool:
        """Whether the container runs, or is paused."""
        return self._status() in {"running", "paused"}

    def start(self, *, timeout_s: float = 60.0) -> Self:
        """Return once the server answers. Does nothing when it runs already.

        The first start may pull the image, which `timeout_s` does not bound.

        Raises:
            ServerError: The image cannot be had, the server ended, or it was not ready in
                `timeout_s`; the end of its log is quoted.
        """
        if self.running:
            return self
        with _spoken(f"{self.name} cannot be started from the image {self._container.image}"):
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
        """SIGKILL the container's processes; return when none runs. Idempotent.

        A paused container is let go on first, as Docker demands: it may answer for a moment.
        """
        container = self._made
        if container is None:
            return
        with _spoken(f"{self.name} cannot be killed"):
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
        """Freeze every process of the container: connections stay open and nothing answers."""
        with _spoken(f"{self.name} cannot be paused"):
            self._running_container().pause()

    def unpause(self) -> None:
        """Let a paused container go on."""
        with _spoken(f"{self.name} cannot go on"):
            self._running_container().unpause()

    def stop(self, *, timeout_s: float = 30.0) -> None:
        """Kill the server and remove its container with its data. Idempotent.

        Args:
            timeout_s: Not needed: nothing is shut down in order that is removed.
        """
        del timeout_s
        self._close_network()
        try:
            with _spoken(f"the container of {self.name} cannot be removed"):
                self._container.stop()
        finally:
            self._made = None

    def log_tail(self) -> str:
        """Return the end of what the container has printed, over all its starts."""
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
        # On loopback alone where that is where we look: nobody else is to reach a test's database.
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
def _spoken(failure: str) -> Generator[None, None, None]:
    """Turn what Docker refuses into an error that says what it was for."""
    try:
        yield
    except (*REFUSALS, ServerError) as error:
        raise ServerError(
            f"{failure}: {error}. Start a Docker daemon that can pull or has the official images, "
            "let script/integration build local ones, or use embedded servers "
            "(ONCEFLOW_TEST_SERVERS=embedded)"
        ) from error


def _host_of(container: DockerContainer) -> str:
    """Return the host that published ports are reached at, before there is a container."""
    client = container.get_docker_client()
    mode = client.get_connection_mode()
    if mode is ConnectionMode.docker_host:
        host = client.host()
        # Not the name: it may be ::1 first, where nothing is published.
        return LOOPBACK if host in {"localhost", LOOPBACK} else host
    if mode is ConnectionMode.gateway_ip:
        bridge = client.client.networks.get("bridge")
        return str(cast("Any", bridge.attrs)["IPAM"]["Config"][0]["Gateway"])
    raise ServerError(
        f"testcontainers' connection mode {mode.value} has no published ports; "
        "set TESTCONTAINERS_CONNECTION_MODE to docker_host or gateway_ip"
    )


__all__ = ["ContainerServer"]
