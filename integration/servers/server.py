"""The interface of test servers, which run as local processes or in containers.

A server can be started, killed, paused, resumed, restarted and stopped, and its network can be cut.
Its durable data and its address survive `kill()` and `start()`. So a client that retries the old
address finds the same server.

A server is *ready* when it answers in its own protocol and proves that it was started here (by data
directory, cluster id or password). An open port is not enough.
"""

from __future__ import annotations

import random
import socket
from abc import ABC, abstractmethod
from types import TracebackType
from typing import ClassVar

from typing_extensions import Self

from onceflow.core.errors import OnceflowError
from onceflow.integration.faults.network import TcpProxy

LOOPBACK = "127.0.0.1"
# Below the default ephemeral ranges (Linux 32768, macOS 49152). While the server is down, a client
# that retries an ephemeral port could get this port as its own source port and connect to itself.
_PORTS = range(15000, 30000)


class ServerError(OnceflowError):
    """Raised when a server cannot be found, started or reached."""

    domain = "external"
    retry = "never"


def free_port() -> int:
    """Return a free loopback port outside the ephemeral ranges."""
    # Use the system's randomness: pytest plugins seed `random` equally in parallel processes.
    for port in random.SystemRandom().sample(_PORTS, 200):
        with socket.socket() as candidate:
            candidate.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                candidate.bind((LOOPBACK, port))
            except OSError:
                continue
            return port
    raise ServerError(f"no free port in 200 tries between {_PORTS.start} and {_PORTS.stop}")


class Server(ABC):
    """A server. Used by one thread, but any thread may call `kill`."""

    name: ClassVar[str]

    def __init__(self, *, proxied: bool = False) -> None:
        """Choose a port. `start` runs the server.

        Args:
            proxied: If True, clients get the address of a proxy, which `network` can cut.
        """
        self.port = free_port()
        self._proxied = proxied
        self._proxy: TcpProxy | None = None

    @property
    def host(self) -> str:
        """The host on which the server itself listens, at `port`."""
        return LOOPBACK

    @property
    def network(self) -> TcpProxy:
        """The proxy between clients and the server. Its faults stay across `restart`.

        Raises:
            ServerError: The server was not created with `proxied=True`.
        """
        if not self._proxied:
            raise ServerError(
                f"the clients of {self.name} on port {self.port} reach it directly; "
                "make the server with proxied=True to cut its network"
            )
        if self._proxy is None:
            self._proxy = TcpProxy(self.host, self.port)
        return self._proxy

    @property
    def client_address(self) -> tuple[str, int]:
        """The host and port for clients."""
        return (LOOPBACK, self.network.port) if self._proxied else (self.host, self.port)

    @property
    @abstractmethod
    def running(self) -> bool:
        """True if the server runs or is paused."""

    @abstractmethod
    def start(self, *, timeout_s: float = 60.0) -> Self:
        """Start the server and wait until it answers. Does nothing if it already runs.

        Raises:
            ServerError: The server ended, or was not ready in `timeout_s`. The message quotes the
                end of its log.
        """

    @abstractmethod
    def kill(self) -> None:
        """SIGKILL the server with all its processes. Return when none runs. Idempotent.

        The disk has the same content as after a crash of the server: all written data, fsynced or
        not.
        """

    @abstractmethod
    def pause(self) -> None:
        """Pause all processes. Connections stay open, and the server does not answer."""

    @abstractmethod
    def unpause(self) -> None:
        """Resume a paused server."""

    @abstractmethod
    def stop(self, *, timeout_s: float = 30.0) -> None:
        """End the server and delete everything that was created for it. Idempotent."""

    @abstractmethod
    def log_tail(self) -> str:
        """Return the end of the server's log."""

    def restart(self, *, timeout_s: float = 60.0) -> Self:
        """Kill the server and start it again with the same data on the same port."""
        self.kill()
        return self.start(timeout_s=timeout_s)

    def __enter__(self) -> Self:
        """Start the server."""
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Stop the server."""
        self.stop()

    def _close_network(self) -> None:
        if self._proxy is not None:
            self._proxy.close()
            self._proxy = None


__all__ = ["LOOPBACK", "Server", "ServerError", "free_port"]
