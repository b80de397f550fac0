"""The interface for authors of sinks: the sink under test, and the rows in its target."""

from __future__ import annotations

import traceback
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar, TypeAlias

import pyarrow as pa

from onceflow.core.protocol.committables import Committable
from onceflow.core.spi import Sink

ROWS: pa.Schema = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("account", pa.string()),
        pa.field("amount", pa.int64()),
    ]
)
"""The default schema of the rows that the kit writes."""

SeenRows: TypeAlias = Sequence[Mapping[str, object]] | pa.Table


class NotTestable(Exception):
    """Raised when a clause cannot be tested here. It is reported as not tested, never as passed."""


class SinkTarget(ABC):
    """A sink and the target that it writes to. Used by one thread. Built anew for each clause.

    Only `sink` and `rows` are required. Each optional method allows more tests. Clauses whose
    methods are missing are listed as "not tested". A target may be shared and contain other rows:
    the kit uses new sink ids and row ids, and ignores all others.
    """

    schema: ClassVar[pa.Schema] = ROWS
    """The schema of written rows. The first column is a 64-bit integer that identifies a row."""

    @abstractmethod
    def sink(self) -> Sink:
        """Return the sink as users build it. It is pickled to other processes."""

    @abstractmethod
    def rows(self) -> SeenRows:
        """Return all rows that a reader of the target sees now.

        Additional columns are ignored. Query the target itself. Do not use the sink's own code.
        """

    def batch(self, ids: Sequence[int]) -> pa.RecordBatch:
        """Return one row for each of `ids`, in this order. Equal ids must give equal rows.

        Override it together with `schema`.
        """
        return pa.record_batch(
            [
                pa.array(ids, pa.int64()),
                pa.array([f"acct-{number % 7}" for number in ids], pa.string()),
                # A prime, so that consecutive ids have small and large amounts.
                pa.array([number * 7919 % 1000 * 10 for number in ids], pa.int64()),
            ],
            schema=ROWS,
        )

    def close(self) -> None:  # noqa: B027 - optional hook
        """Release all resources, and clean up if necessary."""

    # --- optional methods -----------------------------------------------------------------------

    def bad_batch(self, ids: Sequence[int]) -> pa.RecordBatch:
        """Return rows of which the target can never accept one, such as a duplicate key."""
        raise NotTestable("needs bad_batch()")

    def obstruct(self, ids: Sequence[int]) -> None:
        """Make the target refuse the rows of `ids` from now on, by a constraint or a trigger."""
        raise NotTestable("needs obstruct() and remove_obstacle()")

    def remove_obstacle(self) -> None:
        """Make the target accept the rows of `obstruct` again."""
        raise NotTestable("needs obstruct() and remove_obstacle()")

    def secrets(self) -> Sequence[str]:
        """Return the passwords and keys of the sink. Each must be hard to guess."""
        raise NotTestable("needs secrets()")

    def lose(self, committable: Committable) -> None:
        """Roll back a pre-committed transaction outside of the sink, like an administrator.

        Not needed for rows that are staged in checkpoint storage.
        """
        raise NotTestable("needs lose()")

    def kill(self) -> None:
        """Kill the target's server as in a power failure. Return when it is dead."""
        raise NotTestable("needs kill() and start()")

    def start(self) -> None:
        """Start the killed server with its data on disk. Return when it answers."""
        raise NotTestable("needs kill() and start()")

    def pause(self) -> None:
        """Pause the server. Connections stay open, and the server does not answer."""
        raise NotTestable("needs pause() and unpause()")

    def unpause(self) -> None:
        """Resume the paused server."""
        raise NotTestable("needs pause() and unpause()")

    def address(self) -> tuple[str, int]:
        """Return the host and port of the sink's server, which uses TCP without TLS."""
        raise NotTestable("needs address() and sink_at()")

    def sink_at(self, host: str, port: int) -> Sink:
        """Return the same sink, but with another address of its server (that of a proxy)."""
        raise NotTestable("needs address() and sink_at()")


class Violation(AssertionError):
    """Raised when a sink breaks a clause. The message has the actual and the expected result."""


def describe_error(error: BaseException) -> str:
    """Return the error and its line, because the sink's author gets no other traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    at = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{at}"


def expect(holds: object, message: str) -> None:
    """Raise Violation if `holds` is false.

    Raises:
        Violation: `holds` is false. `message` describes the actual result.
    """
    # Hide this frame: authors of sinks look for their own code in a traceback.
    __tracebackhide__ = True
    if not holds:
        raise Violation(message)
