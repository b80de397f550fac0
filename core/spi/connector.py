"""What a package says of a connector of its own: the source or sink, and the tools for its server.

An entry point names such a description, or `connectors.catalog` is given one; the command line then
finds it by its name or by the scheme of a URL. It is loaded only when it is asked for.

A `Diagnosis` answers with `Finding`s: what was found, and what fixes it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from onceflow.core.errors import ConfigError
from onceflow.core.spi import Sink, Source

if TYPE_CHECKING:
    from onceflow.core.commit.by_hand import ResourceManager


class Level(Enum):
    """How bad a finding is."""

    OK = "ok"
    WARNING = "warning"
    """It works, and will not always, or not as well as it could."""
    PROBLEM = "problem"
    """A job cannot run, or not safely."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    area: str
    level: Level
    found: str
    needed: str = ""
    remedy: str = ""
    """The exact statement or command that fixes it."""

    def __str__(self) -> str:
        needed = f"; needed: {self.needed}" if self.needed else ""
        return f"{self.found}{needed}" + (f". Mend: {self.remedy}" if self.remedy else "")

    def as_json(self) -> dict[str, str]:
        """Return what `--json` prints of it."""
        return {
            "area": self.area,
            "level": self.level.value,
            "found": self.found,
            "needed": self.needed,
            "remedy": self.remedy,
        }


@dataclass(frozen=True, slots=True)
class Area:
    """Builds the findings of one area."""

    name: str

    def ok(self, found: str) -> Finding:
        """Say that something is as it should be."""
        return Finding(self.name, Level.OK, found)

    def warning(self, found: str, needed: str, remedy: str) -> Finding:
        """Say that something will do for now."""
        return Finding(self.name, Level.WARNING, found, needed, remedy)

    def problem(self, found: str, needed: str, remedy: str) -> Finding:
        """Say that something must be fixed."""
        return Finding(self.name, Level.PROBLEM, found, needed, remedy)


@dataclass(frozen=True, slots=True)
class ServerAccess:
    """The server that a tool works on, and how long the tool waits for it."""

    url: str = field(repr=False)
    """May hold a password. Brokers: kafka://host:port,host:port."""
    password: str | None = field(default=None, repr=False)
    options: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    """The connector's own options, under the names that it gives them."""
    timeout_s: float = 30.0


Questions: TypeAlias = Callable[[], Sequence[Finding]]
"""Asks a server all of them and returns what it found, within the timeout. Changes nothing.

A server that cannot be reached is a finding, and no error.
"""


class Diagnosis(Protocol):
    """What a server is asked to see whether a job can read or write there exactly once."""

    def __call__(
        self, access: ServerAccess, names: Sequence[str], parallelism: int, /
    ) -> Questions:
        """Return the questions; connect to nothing yet.

        `names` are the tables or topics that a job of `parallelism` will use.

        Raises:
            ConfigError: The URL or an option cannot be understood.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkConnector:
    """One kind of sink."""

    sink: Callable[..., Sink]
    """Its class."""
    resource_manager: Callable[[ServerAccess], ResourceManager] | None = None
    """Returns what lists and settles the transactions of every sink id of a server; connects later.

    None: the target cannot list them by itself, so its sink has to be named.
    """
    diagnosis: Diagnosis | None = None
    examine: Callable[[Any, int], Questions] | None = None
    """Returns the questions to the server of a sink of this class, for a job of a parallelism."""
    read_url: Callable[[str], Mapping[str, object]] | None = None
    """Returns the options that a URL stands for, where the class has no option `url`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceConnector:
    """One kind of source."""

    source: Callable[..., Source]
    """Its class."""
    diagnosis: Diagnosis | None = None
    examine: Callable[[Any, int], Questions] | None = None
    """Returns the questions to the server of a source of this class, for a job of a parallelism."""
    read_url: Callable[[str], Mapping[str, object]] | None = None
    """Returns the options that a URL stands for, where the class has no option `url`."""


def require(findings: Iterable[Finding], about: str, log: logging.Logger) -> None:
    """Raise ConfigError if a problem is among `findings`; log the warnings.

    The error has `about`, and the first problem with its remedy.
    """
    for finding in findings:
        match finding.level:
            case Level.PROBLEM:
                # The first problem alone: later ones are often consequences of it.
                raise ConfigError(f"{about}: {finding}")
            case Level.WARNING:
                log.warning("%s: %s", about, finding)
            case Level.OK:
                pass
