"""The search for the programs `mysqld` and `mariadbd`.

The search order is: the file that ONCEFLOW_MYSQLD or ONCEFLOW_MARIADBD names, installed programs,
the finders of `add_finder`. Either server may be installed under the other's name, so a program is
identified by its version output.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from onceflow.integration.servers.process import ServerError

_ANSWER_TIMEOUT_S = 30.0
_FOLDERS = (
    "/usr/sbin",
    "/usr/libexec",
    "/usr/local/sbin",
    "/usr/local/bin",
    "/usr/local/mysql/bin",
    "/opt/homebrew/bin",
)

Progress = Callable[[str], None]


class Flavor(Enum):
    """The two kinds of servers."""

    MYSQL = "MySQL"
    MARIADB = "MariaDB"


@dataclass(frozen=True, slots=True)
class _Search:
    variable: str
    names: tuple[str, ...]
    keg: str
    package: str


_SEARCHES = {
    Flavor.MYSQL: _Search(
        "ONCEFLOW_MYSQLD", ("mysqld",), "mysql", "mysql-server-core-8.0 (Ubuntu)"
    ),
    Flavor.MARIADB: _Search(
        "ONCEFLOW_MARIADBD", ("mariadbd", "mysqld"), "mariadb", "mariadb-server-core"
    ),
}


@dataclass(frozen=True, slots=True)
class DatabaseProgram:
    """A server program whose version output was read."""

    flavor: Flavor
    version: str
    command: tuple[str, ...]
    """The command that runs the program. Options are appended."""
    share: Path
    """The folder with its SQL scripts."""


FindProgram = Callable[[Flavor, Progress], "DatabaseProgram | None"]
"""A function that finds a program elsewhere. It reports progress if it fetches one."""

_finders: list[FindProgram] = []


def add_finder(find: FindProgram) -> None:
    """Register `find` in this process for programs that are not installed. Idempotent."""
    if find not in _finders:
        _finders.append(find)


def database_program(flavor: Flavor, *, progress: Progress | None = None) -> DatabaseProgram:
    """Return the program of `flavor`.

    Raises:
        ServerError: No program was found, or the environment names another program.
    """
    search = _SEARCHES[flavor]
    chosen = os.environ.get(search.variable)
    if chosen:
        program = _ask_installed(Path(chosen))
        if program is None or program.flavor is not flavor:
            actual = "no such server program" if program is None else program.flavor.value
            raise ServerError(
                f"{search.variable}={chosen} must name a {flavor.value}: it is {actual}"
            )
        return program
    for candidate in _candidates(search):
        program = _ask_installed(candidate)
        if program is not None and program.flavor is flavor:
            return program
    for find in _finders:
        program = find(flavor, progress or _ignore)
        if program is not None:
            return program
    raise ServerError(f"no {flavor.value} found; {_advice(flavor)}")


def _candidates(search: _Search) -> Iterator[Path]:
    kegs = [f"{prefix}/opt/{search.keg}/bin" for prefix in ("/opt/homebrew", "/usr/local")]
    for name in search.names:
        on_path = shutil.which(name)
        if on_path:
            yield Path(on_path)
        for folder in (*kegs, *_FOLDERS):
            path = Path(folder) / name
            if os.access(path, os.X_OK):
                yield path


def _ask_installed(binary: Path) -> DatabaseProgram | None:
    real = binary.resolve()
    prefix = real.parent.parent
    shares = (prefix / "share" / name for name in ("mysql", "mariadb", "."))
    share = next((path for path in shares if _holds_scripts(path)), prefix / "share")
    return ask_program((str(real), "--no-defaults"), share)


def _holds_scripts(folder: Path) -> bool:
    return any(folder.glob("*_system_tables.sql"))


def ask_program(command: tuple[str, ...], share: Path) -> DatabaseProgram | None:
    """Identify a program by its version output. Return None if it is neither server."""
    try:
        answer = subprocess.run(
            [*command, "--version"],
            check=False,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_ANSWER_TIMEOUT_S,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    version = re.search(r"Ver (\d+\.\d+\.\d+)", answer)
    if version is None:
        return None
    flavor = Flavor.MARIADB if "MariaDB" in answer else Flavor.MYSQL
    return DatabaseProgram(flavor, version[1], command, share)


def _advice(flavor: Flavor) -> str:
    search = _SEARCHES[flavor]
    return (
        f"install it (macOS: brew install {search.keg}; Debian, Ubuntu: apt-get install "
        f"{search.package}), name its server program in {search.variable}, or use a container: "
        "ONCEFLOW_TEST_SERVERS=containers"
    )


def _ignore(_message: str) -> None:
    pass


__all__ = [
    "DatabaseProgram",
    "FindProgram",
    "Flavor",
    "Progress",
    "add_finder",
    "ask_program",
    "database_program",
]
