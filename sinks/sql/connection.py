"""How a database is reached, as far as every dialect does it alike."""

from __future__ import annotations

from typing import Protocol, TypeVar


class Connection(Protocol):
    """A driver's connection, of which each dialect knows more."""

    def close(self) -> None:
        """Disconnect, by which the server rolls back what is open. Safe to call twice."""
        ...


ConnectionT = TypeVar("ConnectionT", bound=Connection)
ConnectionT_co = TypeVar("ConnectionT_co", bound=Connection, covariant=True)
ConnectionT_contra = TypeVar("ConnectionT_contra", bound=Connection, contravariant=True)


class Endpoint(Protocol[ConnectionT_co]):
    """A database and how to reach it; prints without a secret."""

    @property
    def connect_timeout_s(self) -> float:
        """How long one connection may take."""
        ...

    def connect(self, name: str) -> ConnectionT_co:
        """Return a new connection in autocommit mode, shown to the server's operator as `name`.

        Raises:
            ConfigError: It is refused for good.
            SinkError: It is refused now.
        """
        ...


def session_name(sink_id: str, attempt: int, role: str) -> str:
    """Return the name under which the server's operator sees a connection."""
    return f"onceflow {sink_id}/{attempt} {role}"
