"""What every server of a test can do, as a process of this machine or in a container.

Start, kill, pause, unpause, restart, stop, and a network that can be cut. What the server has made
durable and its address outlive `kill()` and `start()`: a client that retries its old address finds
the same server.

A server is *ready* when it answers in its own protocol and proves to be the one that was started
here (data directory, cluster id, password): an open port is neither.
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
# Below every default ephemeral range (Linux 32768, macOS 49152): while the server is down, a client
# that retries an ephemeral port can be given that very port as its own and connect to itself.
_PORTS = range(15000, 30000)


class ServerError(OnceflowError):
    """Raised when a server cannot be had, started or spoken to."""

    domain = "external"
    retry = "never"


def free_port() -> int:
    """Return a loopback port that nobody listens on, outside the ephemeral ranges."""
    # The system's randomness: plugins of pytest seed the other one alike in parallel processes.
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
    """One server. Used by one thread; `kill` may be called from any."""

    name: ClassVar[str]

    def __init__(self, *, proxied: bool = False) -> None:
        """Choose a port; nothing runs before `start`.

        Args:
            proxied: Clients are given the address of a proxy, which `network` can cut.
        """
        self.port = free_port()
        self._proxied = proxied
        self._proxy: TcpProxy | None = None

    @property
    def host(self) -> str:
        """Where the server itself listens, on `port`."""
        return LOOPBACK

    @property
    def network(self) -> TcpProxy:
        """The network between clients and the server; it stays as it is over `restart`.

        Raises:
            ServerError: The server was not made with `proxied=True`.
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
        """Host and port that clients are given."""
        return (LOOPBACK, self.network.port) if self._proxied else (self.host, self.port)

    @property
    @abstractmethod
    def running(self) -> bool:
        """Whether the server runs, or is paused."""

    @abstractmethod
    def start(self, *, timeout_s: float = 60.0) -> Self:
        """Return once the server answers. Does nothing when it runs already.

        Raises:
            ServerError: It ended, or was not ready in `timeout_s`; the end of its log is quoted.
        """

    @abstractmethod
    def kill(self) -> None:
        """SIGKILL the server with all its processes; return when none runs. Idempotent.

        Leaves on disk what a crash of the server leaves: all it has written, fsynced or not.
        """

    @abstractmethod
    def pause(self) -> None:
        """Freeze every process of the server: connections stay open and nothing answers."""

    @abstractmethod
    def unpause(self) -> None:
        """Let a paused server go on."""

    @abstractmethod
    def stop(self, *, timeout_s: float = 30.0) -> None:
        """End the server and delete what was made for it. Idempotent."""

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
