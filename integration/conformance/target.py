"""What the author of a sink gives the kit: the sink, and what a reader of its target sees."""

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
"""What the kit writes when a target says nothing else."""

SeenRows: TypeAlias = Sequence[Mapping[str, object]] | pa.Table


class NotTestable(Exception):
    """Raised when a clause cannot be tested here; it is then reported as such, never as passed."""


class SinkTarget(ABC):
    """One sink and the target that it writes to. Used by one thread; made anew for each clause.

    Only `sink` and `rows` must be there. Each further method lets more be tested; what is missing
    is listed as "not tested". A target may be shared and full of other rows: the kit uses sink ids
    and row ids of its own, and looks at those alone.
    """

    schema: ClassVar[pa.Schema] = ROWS
    """Of the rows that are written; the first column identifies a row and is a 64-bit integer."""

    @abstractmethod
    def sink(self) -> Sink:
        """Return the sink as a user would build it. It is pickled to other processes."""

    @abstractmethod
    def rows(self) -> SeenRows:
        """Return every row that a reader of the target sees now.

        Further columns are ignored. Must not trust the sink's own code: ask the target itself.
        """

    def batch(self, ids: Sequence[int]) -> pa.RecordBatch:
        """Return one row for each of `ids`, in this order; the same id gives the same row.

        Override it together with `schema`.
        """
        return pa.record_batch(
            [
                pa.array(ids, pa.int64()),
                pa.array([f"acct-{number % 7}" for number in ids], pa.string()),
                # A prime, so that ids that follow one another have amounts small and large.
                pa.array([number * 7919 % 1000 * 10 for number in ids], pa.int64()),
            ],
            schema=ROWS,
        )

    def close(self) -> None:  # noqa: B027 - optional hook
        """Release everything, and clean up if that is wanted."""

    # --- optional: what they make testable ----------------------------------------------------

    def bad_batch(self, ids: Sequence[int]) -> pa.RecordBatch:
        """Return rows of which the target can never take one, such as a key that is there twice."""
        raise NotTestable("needs bad_batch()")

    def obstruct(self, ids: Sequence[int]) -> None:
        """Have the target refuse the rows of `ids` from now on, by a constraint or a trigger."""
        raise NotTestable("needs obstruct() and remove_obstacle()")

    def remove_obstacle(self) -> None:
        """Have the target take the rows again that `obstruct` named."""
        raise NotTestable("needs obstruct() and remove_obstacle()")

    def secrets(self) -> Sequence[str]:
        """Return the passwords and keys that the sink was given; each must be hard to guess."""
        raise NotTestable("needs secrets()")

    def lose(self, committable: Committable) -> None:
        """Make what was pre-committed gone behind the sink's back, as an administrator would.

        Not needed for rows that are staged in checkpoint storage.
        """
        raise NotTestable("needs lose()")

    def kill(self) -> None:
        """End the target's server as a power cut would; return when it is gone."""
        raise NotTestable("needs kill() and start()")

    def start(self) -> None:
        """Start the killed server on what it has on disk; return when it answers."""
        raise NotTestable("needs kill() and start()")

    def pause(self) -> None:
        """Freeze the server: connections stay open and nothing is answered."""
        raise NotTestable("needs pause() and unpause()")

    def unpause(self) -> None:
        """Let the frozen server go on."""
        raise NotTestable("needs pause() and unpause()")

    def address(self) -> tuple[str, int]:
        """Return host and port of the server that the sink talks to, over TCP without TLS."""
        raise NotTestable("needs address() and sink_at()")

    def sink_at(self, host: str, port: int) -> Sink:
        """Return the same sink, which reaches its server at another address (a cut network)."""
        raise NotTestable("needs address() and sink_at()")


class Violation(AssertionError):
    """Raised when a sink breaks a clause; says what was seen and what should have been."""


def describe_error(error: BaseException) -> str:
    """Return what was raised, and at which line: the sink's author has no other trace of it."""
    frames = traceback.extract_tb(error.__traceback__)
    at = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{at}"


def expect(holds: object, message: str) -> None:
    """Raise Violation unless `holds`.

    Raises:
        Violation: It does not; `message` says what was seen.
    """
    # What a sink's author looks for in a traceback is the sink, and not this.
    __tracebackhide__ = True
    if not holds:
        raise Violation(message)
