"""What the options name: the databases, sinks and storage in which something may be in doubt."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from onceflow.cli.txn.mysql import MySQLResourceManager
from onceflow.cli.txn.postgres import PostgresResourceManager
from onceflow.core.errors import ConfigError
from onceflow.core.in_doubt import (
    InDoubtTransactions,
    ResourceManager,
    SinkResourceManager,
    StagedResourceManager,
)
from onceflow.core.secret_references import followed
from onceflow.core.spi import Sink
from onceflow.core.storage import FileSystemStorage, JobStorage


@dataclass(frozen=True, slots=True)
class DatabaseAccess:
    """A database and how long to wait for it."""

    url: str = field(repr=False)
    password: str | None = field(repr=False)
    bookkeeping: str | None
    """Where onceflow's own tables are, if not where they usually are."""
    timeout_s: float


def _postgres(access: DatabaseAccess) -> ResourceManager:
    return PostgresResourceManager(
        access.url,
        password=access.password,
        ledger_schema=access.bookkeeping or "onceflow",
        timeout_s=access.timeout_s,
    )


def _mysql(access: DatabaseAccess) -> ResourceManager:
    return MySQLResourceManager(
        access.url,
        password=access.password,
        ledger_schema=access.bookkeeping,
        timeout_s=access.timeout_s,
    )


OPENERS: dict[str, Callable[[DatabaseAccess], ResourceManager]] = {
    "postgresql": _postgres,
    "postgres": _postgres,
    "mysql": _mysql,
    "mariadb": _mysql,
}
"""By the scheme of a URL, without a driver's name."""


@dataclass(frozen=True, slots=True)
class Where:
    """The options by which transactions are found."""

    url: str | None = field(default=None, repr=False)
    password_file: Path | None = None
    ledger_schema: str | None = None
    sink: str | None = None
    sink_id: str | None = None
    storage: str | None = None
    job: str | None = None
    timeout_s: float = 10.0

    def open(self) -> InDoubtTransactions:
        """Return what looks there; connects to nothing yet.

        Raises:
            ConfigError: The options name nothing, or not well enough.
        """
        storage = self._storage()
        places: list[ResourceManager] = []
        if self.url:
            places.append(self._database(self.url))
        if self.sink:
            if not self.sink_id:
                raise ConfigError("--sink needs --sink-id, the name by which its job writes")
            places.append(SinkResourceManager(load_sink(self.sink), self.sink_id))
        if storage is not None and not self.sink:
            places.append(StagedResourceManager(storage))
        if not places:
            raise ConfigError(
                "name where to look: --url postgresql://user@host/database (add --password-file),"
                " or --sink module:name --sink-id ID, and --storage DIR [--job NAME] for what the"
                " decision log says"
            )
        return InDoubtTransactions(places, storage)

    def _database(self, given: str) -> ResourceManager:
        url = followed(given, setting="--url")
        scheme = url.partition("://")[0].removeprefix("jdbc:").partition("+")[0]
        opener = OPENERS.get(scheme)
        if opener is None:
            raise ConfigError(
                f"--url must begin with one of {', '.join(f'{name}://' for name in OPENERS)};"
                " for other targets name the sink: --sink module:name --sink-id ID"
            )
        password = read_password(self.password_file) if self.password_file else None
        return opener(DatabaseAccess(url, password, self.ledger_schema, self.timeout_s))

    def _storage(self) -> JobStorage | None:
        if self.storage is None:
            if self.job is not None:
                raise ConfigError("--job needs --storage, where its decision log is")
            return None
        described = FileSystemStorage(self.storage)
        root = Path(described.root)
        if not root.is_dir():
            raise ConfigError(f"--storage {root}: there is no such directory on this machine")
        jobs = sorted(path.parent.name for path in root.glob("*/log") if path.is_dir())
        job = self.job or (jobs[0] if len(jobs) == 1 else "")
        if job not in jobs:
            there = ", ".join(jobs) or "none"
            said = f"has no job {job}" if job else "holds more than one job, or none: add --job"
            raise ConfigError(f"--storage {root} {said} (jobs there: {there})")
        return described.open(job)


def load_sink(name: str) -> Sink:
    """Return the sink that `module:name` is, or that the function of this name returns.

    Modules of the working directory are found, too.

    Raises:
        ConfigError: There is none.
    """
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise ConfigError(f"--sink {name!r} is not module:name")
    if os.getcwd() not in sys.path:  # noqa: PTH109 - sys.path holds text
        sys.path.insert(0, os.getcwd())  # noqa: PTH109
    try:
        found: object = importlib.import_module(module_name)
        for part in attribute.split("."):
            found = getattr(found, part)
        if callable(found) and not isinstance(found, Sink):
            found = cast("Callable[[], object]", found)()
    except ConfigError:
        raise
    except Exception as error:  # the user's own module may raise anything
        raise ConfigError(f"--sink {name}: {type(error).__name__}: {error}") from error
    if not isinstance(found, Sink):
        raise ConfigError(f"--sink {name} is a {type(found).__name__} and not a Sink")
    return found


def read_password(path: Path) -> str:
    """Return what file `path` holds, without the line break at its end.

    Raises:
        ConfigError: It cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8").rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"--password-file {path}: {reason}") from None
