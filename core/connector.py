"""What a package says of a connector of its own: the source or sink, and the tools for its server.

An entry point names such a description, or `connectors.catalog` is given one; the command line then
finds it by its name or by the scheme of a URL. It is loaded only when it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeAlias

from onceflow.core.diagnosis import Finding
from onceflow.core.spi import Sink, Source

if TYPE_CHECKING:  # a slot does not pay for it
    from onceflow.core.in_doubt import ResourceManager


@dataclass(frozen=True, slots=True)
class ServerAccess:
    """Which server a tool works on, and how long it waits for it."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceConnector:
    """One kind of source."""

    source: Callable[..., Source]
    """Its class."""
    diagnosis: Diagnosis | None = None
