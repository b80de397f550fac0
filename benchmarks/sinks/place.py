"""The measurements of one kind of target."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum

from benchmarks.sinks.alone import Loaded
from benchmarks.sinks.rows import Rows
from onceflow.core.spi import Sink


class Effect(Enum):
    """The effect that the rows have in the target."""

    EVERY_ROW = "every row"
    LAST_OF_EACH_ACCOUNT = "the last row of each account"


@dataclass(frozen=True, slots=True)
class Way:
    """One way through a sink."""

    sink: Callable[[str], Sink]
    """Of the address of an empty place."""
    effect: Effect = Effect.EVERY_ROW
    ratio_min: float | None = None
    """To the bare load: what was set as a goal before."""
    commit_ms_max: float | None = None
    """From the decision to rows that everybody sees, at the median: the same."""


class Place(ABC):
    """A server that runs, or a directory; gives an empty place to each measurement."""

    name: str
    bare: str
    """The plain load that the ways are compared with."""

    @property
    @abstractmethod
    def ways(self) -> Mapping[str, Way]:
        """The ways of writing that are measured, by name."""

    @abstractmethod
    def empty(self) -> AbstractContextManager[str]:
        """Return the address of an empty place for the block."""

    @abstractmethod
    def load_bare(self, address: str, rows: Rows) -> Loaded:
        """Return what the plain load of `rows` took, from Arrow to the end of its commit.

        In one transaction, where there are any, into a table of the same columns.
        """

    @abstractmethod
    def verify(self, address: str, rows: Rows, effect: Effect) -> None:
        """Return when the place has what `effect` says, whichever way the rows came.

        Raises:
            BenchmarkError: It has not.
        """
