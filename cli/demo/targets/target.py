"""What the demo asks of any target."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

from onceflow.cli.demo.observers import Observer
from onceflow.integration.oracle import Verdict
from onceflow.integration.workload import Payments


class KillableServer(Protocol):
    """A server, as far as a killer needs it."""

    @property
    def pid(self) -> int | None:
        """Its main process."""
        ...

    def kill(self) -> None:
        """SIGKILL it with all its processes."""
        ...

    def start(self) -> object:
        """Start it again on the same data and port."""
        ...


class Target(ABC):
    """A running server with a place for the rows; used by the demo's loop alone.

    Closed: `TableTarget` (Postgres, MySQL and MariaDB) and `TopicTarget`.
    """

    @property
    @abstractmethod
    def server(self) -> KillableServer:
        """What a kill of the target kills."""

    @property
    @abstractmethod
    def address(self) -> str:
        """What the sink is given to find the server; of a server of the demo's own, no secret."""

    @property
    @abstractmethod
    def place(self) -> str:
        """The table or topic."""

    @abstractmethod
    def visible_rows(self) -> Observer:
        """Return what counts the rows that anybody sees; entering its context begins."""

    @abstractmethod
    def judge(self, payments: Payments) -> Verdict:
        """Return what the target says of itself after a run over `payments`.

        Raises:
            ConfigError: There is no such table or topic.
            NoVerdict: The server does not answer.
        """
