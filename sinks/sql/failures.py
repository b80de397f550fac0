"""What a driver's errors mean in onceflow's terms: the part that every dialect must know."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Generic, TypeVar

from onceflow.core.errors import BadRow, SinkError
from onceflow.sinks.sql.connection import ConnectionT

ErrorT = TypeVar("ErrorT", bound=Exception)


class Failures(ABC, Generic[ConnectionT, ErrorT]):
    """Tells errors apart by their codes. Holds nothing."""

    @property
    @abstractmethod
    def errors(self) -> type[ErrorT]:
        """The class that all errors of the driver have."""

    @abstractmethod
    def described(self, error: ErrorT) -> str:
        """Return what the server said, on one line, with its code."""

    @abstractmethod
    def is_lost(self, connection: ConnectionT, error: ErrorT) -> bool:
        """Return whether the connection is gone, so that the reply never came."""

    @abstractmethod
    def is_row_refused(self, error: ErrorT) -> bool:
        """Return whether a row is refused for what is in it: every new attempt would fail."""

    @abstractmethod
    def is_duplicate_key(self, error: ErrorT) -> bool:
        """Return whether a row of the same unique key is there."""

    @abstractmethod
    def is_lock_timeout(self, error: ErrorT) -> bool:
        """Return whether a lock was waited for in vain."""

    @abstractmethod
    def is_denied(self, error: ErrorT) -> bool:
        """Return whether the user lacks a privilege."""

    @abstractmethod
    def is_table_missing(self, error: ErrorT) -> bool:
        """Return whether there is no such table."""

    def refusal(self, error: ErrorT, doing: str) -> SinkError:
        """Return `error` as a `BadRow` when the data is at fault, else as a `SinkError`."""
        kind = BadRow if self.is_row_refused(error) else SinkError
        return kind(f"{doing}: {self.described(error)}")
