"""The catalogs that find connectors by name or by the scheme of a URL.

They contain our own connectors and those of installed packages. A package describes its connector
(`SinkConnector`, `SourceConnector`, `LookupConnector`, a
`StateBackend` class). It names the description by an entry
point, once for each name and each scheme of a URL:

    [project.entry-points."onceflow.sinks"]
    redis = "acme.redis_sink:CONNECTOR"

A program that is not a package calls `SINKS.register("redis", CONNECTOR)`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar, cast

from onceflow.core.errors import ConfigError, MissingExtra
from onceflow.core.imports import naming_extras
from onceflow.core.spi.connector import LookupConnector, SinkConnector, SourceConnector

if TYPE_CHECKING:  # what only a look-up needs is imported by the first one
    from importlib.metadata import EntryPoint

    from onceflow.core.state import StateBackend

T = TypeVar("T")


def _list_installed(group: str) -> Iterable[EntryPoint]:
    return _read_entry_points(group, tuple((path, _find_change_ns(path)) for path in sys.path))


@lru_cache(maxsize=8)
def _read_entry_points(group: str, _folders: tuple[tuple[str, int], ...]) -> tuple[EntryPoint, ...]:
    """Return the entry points of `group`. Reads a file of each distribution in `_folders`."""
    from importlib.metadata import entry_points

    return tuple(entry_points(group=group))


def _find_change_ns(folder: str) -> int:
    """Return the time at which a folder last got or lost an entry; 0 if it does not exist."""
    try:
        return Path(folder).stat().st_mtime_ns
    except OSError:
        return 0


@dataclass(slots=True)
class ConnectorCatalog(Generic[T]):
    """A catalog of all connectors of one kind. Each is loaded when it is first asked for."""

    kind: str
    group: str
    """The group of entry points."""
    accepts: Callable[[object], bool]
    """A function that returns True if its argument is a description of this kind."""
    entry_points: Callable[[str], Iterable[EntryPoint]] = _list_installed
    _registered: dict[str, T] = field(default_factory=dict[str, T])

    def names(self) -> tuple[str, ...]:
        """Return every name, sorted. Loads no connector."""
        installed = {point.name for point in self.entry_points(self.group)}
        return tuple(sorted(installed | self._registered.keys()))

    def find(self, name: str) -> T:
        """Load and return the connector that is called `name`.

        Raises:
            ConfigError: There is no such connector (the message names the nearest one), there are
                two (it names both), or it cannot be loaded (it names its distribution).
        """
        if name in self._registered:
            return self._registered[name]
        points = {
            (point.value, _origin(point)): point
            for point in self.entry_points(self.group)
            if point.name == name
        }
        if not points:
            raise ConfigError(self._unknown(name))
        if len(points) > 1:
            both = " and ".join(f"{value} of {origin}" for value, origin in sorted(points))
            raise ConfigError(
                f"{self.kind} {name!r} is brought by {both} (entry points of group {self.group}):"
                " uninstall all but one"
            )
        return self._load(*points.values())

    def find_by_url(self, url: str) -> T:
        """Return the connector that the scheme of `url` names; x for jdbc:x+driver://….

        The error never repeats more of the URL than its scheme.

        Raises:
            ConfigError: The URL has no scheme, or `find` raises.
        """
        scheme, separator, _ = url.partition("://")
        if not separator:
            raise ConfigError(
                f"this URL has no scheme; it must begin with one of {self._list_names('://')}"
            )
        return self.find(scheme.removeprefix("jdbc:").partition("+")[0])

    def register(self, name: str, described: T) -> None:
        """Register `described` as `name` in this process. Repeating the same call does nothing.

        Raises:
            ConfigError: Another connector has that name, or `described` is not a description.
        """
        if not self.accepts(described):
            raise ConfigError(f"{self.kind} {name!r} {self._unfit(described)}")
        taken = self._registered.get(name)
        if taken is described:
            return
        if taken is not None or name in self.names():
            raise ConfigError(
                f"there is a {self.kind} {name!r} already; names: {', '.join(self.names())}"
            )
        self._registered[name] = described

    def _load(self, point: EntryPoint) -> T:
        text = f"{self.kind} {point.name!r} ({point.value} of {_origin(point)})"
        try:
            with naming_extras():
                value: object = point.load()
        except MissingExtra as error:
            raise MissingExtra(f"{self.kind} {point.name!r}: {error}") from error
        except Exception as error:  # another package's module may raise anything
            raise ConfigError(
                f"{text} cannot be loaded: {type(error).__name__}: {error}; repair or uninstall"
                " that distribution"
            ) from error
        if not self.accepts(value):
            raise ConfigError(f"{text} {self._unfit(value)}")
        return cast("T", value)

    def _unfit(self, value: object) -> str:
        return f"is of type {type(value).__name__}, which does not describe a {self.kind}"

    def _unknown(self, name: str) -> str:
        near = get_close_matches(name, self.names(), n=1)
        meant = f"did you mean {near[0]!r}? " if near else ""
        return (
            f"{self.kind} {name!r} is not installed: {meant}installed are"
            f" {self._list_names('') or 'none'}; a package adds its own by entry points of group"
            f" {self.group}"
        )

    def _list_names(self, suffix: str) -> str:
        return ", ".join(f"{name}{suffix}" for name in self.names())


def _origin(point: EntryPoint) -> str:
    """Return the distribution of `point`, for errors."""
    if point.dist is None:
        return "an unknown distribution"
    return f"distribution {point.dist.name} {point.dist.version}"


def _is_backend(value: object) -> bool:
    from onceflow.core.state import StateBackend

    return isinstance(value, type) and issubclass(value, StateBackend)


SINKS: ConnectorCatalog[SinkConnector] = ConnectorCatalog(
    "sink connector", "onceflow.sinks", lambda value: isinstance(value, SinkConnector)
)
SOURCES: ConnectorCatalog[SourceConnector] = ConnectorCatalog(
    "source connector", "onceflow.sources", lambda value: isinstance(value, SourceConnector)
)
LOOKUPS: ConnectorCatalog[LookupConnector] = ConnectorCatalog(
    "lookup connector", "onceflow.lookups", lambda value: isinstance(value, LookupConnector)
)
STATE_BACKENDS: ConnectorCatalog[type[StateBackend]] = ConnectorCatalog(
    "state backend", "onceflow.state_backends", _is_backend
)
