"""The description that a package gives of its connector, and the interfaces of its tools.

The tools are those for the connector's server. An entry point names such a description, or it is
passed to `connectors.catalog`. The command line then finds it by its name or by the scheme of a
URL. It is loaded only when it is needed.

A `Diagnosis` answers with one or more `Finding`: the state of the server, and the fix.

A `ResourceManager` holds transactions in doubt, which it lists and settles.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum
from typing import Any, Protocol, TypeAlias

from onceflow.core.errors import ConfigError
from onceflow.core.protocol.ids import TransactionId
from onceflow.core.protocol.log.target_records import LogFacts, TargetRecord
from onceflow.core.spi import Sink, Source
from onceflow.core.spi.lookups import LookupSource
from onceflow.core.spi.sink import Committer, CommitterContext


class ResourceManager(ABC):
    """A holder of transactions in doubt: a database, one sink's target, a job's storage."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The name for people; contains no secret."""

    @abstractmethod
    def sink_ids(self, log: LogFacts | None) -> Sequence[str]:
        """Return every sink id under which a transaction may be in doubt here.

        Raises:
            SinkError: The resource manager cannot be asked now.
        """

    @abstractmethod
    def committer(self, context: CommitterContext) -> Committer:
        """Return the committer that settles the transactions of `context.sink_id`."""

    def read_claimant(self, sink_id: str) -> str | None:
        """Return the identity of the decision log that claimed `sink_id`, if it is known."""
        del sink_id
        return None

    def target_record(self, context: CommitterContext) -> TargetRecord | None:
        """Return the target's record of `context.sink_id`, or None if it keeps none.

        Raises:
            ConfigError: Another job owns the sink id.
            SinkError: The target cannot be asked now.
        """
        del context
        return None

    def sessions(self, sink_id: str) -> Sequence[str]:
        """Return the writers of `sink_id` that are connected now, if they are known."""
        del sink_id
        return ()

    def find_prepare_time(self, transaction: TransactionId) -> datetime | None:
        """Return the time at which `transaction` was prepared, if only the target knows it."""
        del transaction
        return None

    def rows(self, transaction: TransactionId) -> int | None:
        """Return the number of rows of `transaction`, if it is known."""
        del transaction
        return None

    def close(self) -> None:  # noqa: B027 - optional hook
        """Release all resources. May be called twice."""


class Level(Enum):
    """The severity of a finding."""

    OK = "ok"
    WARNING = "warning"
    """The checked thing works, but not always, or not as well as it could."""
    PROBLEM = "problem"
    """A job cannot run, or not safely."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    area: str
    level: Level
    found: str
    needed: str = ""
    remedy: str = ""
    """The exact statement or command that fixes it."""

    def __str__(self) -> str:
        needed = f"; needed: {self.needed}" if self.needed else ""
        return f"{self.found}{needed}" + (f". Fix: {self.remedy}" if self.remedy else "")

    def as_json(self) -> dict[str, str]:
        """Return the fields that `--json` prints."""
        return {
            "area": self.area,
            "level": self.level.value,
            "found": self.found,
            "needed": self.needed,
            "remedy": self.remedy,
        }


@dataclass(frozen=True, slots=True)
class Area:
    """A builder of the findings of one area."""

    name: str

    def ok(self, found: str) -> Finding:
        """Return a finding that the checked thing is right."""
        return Finding(self.name, Level.OK, found)

    def warning(self, found: str, needed: str, remedy: str) -> Finding:
        """Return a finding that the checked thing is sufficient for now."""
        return Finding(self.name, Level.WARNING, found, needed, remedy)

    def problem(self, found: str, needed: str, remedy: str) -> Finding:
        """Return a finding that the checked thing must be fixed."""
        return Finding(self.name, Level.PROBLEM, found, needed, remedy)


@dataclass(frozen=True, slots=True)
class ServerAccess:
    """The server that a tool uses, and the time that the tool waits for it."""

    url: str = field(repr=False)
    """The URL, which may contain a password. Brokers: kafka://host:port,host:port."""
    password: str | None = field(default=None, repr=False)
    options: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    """The connector's own options, under the names that the connector defines."""
    timeout_s: float = 30.0


Questions: TypeAlias = Callable[[], Sequence[Finding]]
"""A function that asks a server all questions and returns the findings, within the timeout.

It changes nothing. A server that cannot be reached is a finding, not an error.
"""


class Diagnosis(Protocol):
    """The checks that show whether a job can read or write at a server exactly once."""

    def __call__(
        self, access: ServerAccess, names: Sequence[str], parallelism: int, /
    ) -> Questions:
        """Return the questions; connect to nothing yet.

        `names` are the tables or topics that a job of `parallelism` will use.

        Raises:
            ConfigError: The URL or an option is not valid.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkConnector:
    """The description of a kind of sink."""

    sink: Callable[..., Sink]
    """The class of the sink."""
    resource_manager: Callable[[ServerAccess], ResourceManager] | None = None
    """A function that returns the resource manager of a server, which connects later.

    It lists and settles the transactions of every sink id. None: the target cannot list its
    transactions without the sink, so the user has to name the sink.
    """
    diagnosis: Diagnosis | None = None
    examine: Callable[[Any, int], Questions] | None = None
    """A function that returns the questions to the server of a sink of this class, for a job of a
    parallelism."""
    read_url: Callable[[str], Mapping[str, object]] | None = None
    """A function that returns the options in a URL, if the class has no option `url`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceConnector:
    """The description of a kind of source."""

    source: Callable[..., Source]
    """The class of the source."""
    diagnosis: Diagnosis | None = None
    examine: Callable[[Any, int], Questions] | None = None
    """A function that returns the questions to the server of a source of this class, for a job of a
    parallelism."""
    read_url: Callable[[str], Mapping[str, object]] | None = None
    """A function that returns the options in a URL, if the class has no option `url`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LookupConnector:
    """The description of a kind of table that records are joined with."""

    lookup: Callable[..., LookupSource]
    """The class of the table."""


def require(findings: Iterable[Finding], about: str, log: logging.Logger) -> None:
    """Raise ConfigError if a problem is among `findings`; log the warnings.

    The error contains `about`, and the first problem with its remedy.
    """
    for finding in findings:
        match finding.level:
            case Level.PROBLEM:
                # Report only the first problem: later ones are often consequences of it.
                raise ConfigError(f"{about}: {finding}")
            case Level.WARNING:
                log.warning("%s: %s", about, finding)
            case Level.OK:
                pass
