"""The distance of a source from the end of its server's data, in bytes and seconds.

Some servers cannot count the records that are still to be read. They know how many bytes these
have, when they were written, and how much the server keeps for the source.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CopyProgress:
    """The progress of the first copy of one table."""

    table: str
    rows: int
    """The number of copied rows."""
    chunks: int
    """The number of copied chunks."""
    rows_expected: int | None = None
    """The number of rows that the server expects in the table; None if it has no estimate."""
    chunks_expected: int | None = None

    @property
    def share(self) -> float | None:
        """The copied share, from 0 to 1; None if the server has no estimate."""
        if self.rows_expected is None:
            return None
        return min(1.0, self.rows / max(1, self.rows, self.rows_expected))


@dataclass(frozen=True, slots=True)
class SourceWarning:
    """A state of the server that a person should change before the source fails."""

    state: str
    """The stable name of the state. The engine logs a warning once for each state."""
    text: str
    """The finding and the advice, without secrets. Its numbers may change while it lasts."""


@dataclass(frozen=True, slots=True)
class SourceProgress:
    """The distance of a source from the end of its server's data. None stands for unknown."""

    lag_bytes: int | None = None
    """The number of bytes that the server wrote after the position."""
    lag_s: float | None = None
    """The age in seconds of the position, by the server's clock; 0 if nothing was written since."""
    retained_bytes: int | None = None
    """The number of bytes that the server keeps for the source."""
    retained_from: str = ""
    """The position from which on the server keeps data for the source, as the server writes it."""
    moved_at_s: float | None = None
    """The time at which `retained_from` was seen to change, in seconds since the epoch.

    A source leaves it out: the engine sets it. Before the first change it is the time at which the
    engine first asked.
    """
    copies: tuple[CopyProgress, ...] = ()
    """The first copies that are not finished."""
    warnings: tuple[SourceWarning, ...] = ()
