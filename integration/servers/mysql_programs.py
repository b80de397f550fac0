"""Where the programs `mysqld` and `mariadbd` come from.

In this order: the file that ONCEFLOW_MYSQLD or ONCEFLOW_MARIADBD names; one that is installed; on
Debian and Ubuntu one out of distribution packages, unpacked once into the cache (MariaDB and MySQL
of the machine's own release; Debian has MySQL in its development suite only, which is then taken
with all its libraries). The two call each other's names, so that what a program is, is what it says
it is.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from onceflow.core.cache import cache_directory, publish
from onceflow.integration.servers.cache import exclusive
from onceflow.integration.servers.debian import PackageArchive, is_debian, own_loader
from onceflow.integration.servers.process import ServerError

_FETCH_TIMEOUT_S = 600.0
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
    """Which of the two servers."""

    MYSQL = "MySQL"
    MARIADB = "MariaDB"


@dataclass(frozen=True, slots=True)
class _Search:
    variable: str
    names: tuple[str, ...]
    keg: str
    package: str
    suites: tuple[str | None, ...]


_SEARCHES = {
    Flavor.MYSQL: _Search(
        "ONCEFLOW_MYSQLD", ("mysqld",), "mysql", r"mysql-server-core(-[0-9.]+)?", (None, "sid")
    ),
    Flavor.MARIADB: _Search(
        "ONCEFLOW_MARIADBD", ("mariadbd", "mysqld"), "mariadb", r"mariadb-server-core", (None,)
    ),
}


@dataclass(frozen=True, slots=True)
class DatabaseProgram:
    """A server program that has been asked what it is."""

    flavor: Flavor
    version: str
    command: tuple[str, ...]
    """What runs it; options come after."""
    share: Path
    """The folder with its SQL scripts."""


def database_program(flavor: Flavor, *, progress: Progress | None = None) -> DatabaseProgram:
    """Return the program of `flavor`; on its first call on a Debian this may fetch it (20 MB).

    Processes that ask at the same time wait for the first; a crash leaves no half-filled folder.

    Raises:
        ServerError: There is none, or the environment names one that is something else.
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
    if not is_debian():
        raise ServerError(f"no {flavor.value} found; {_advice(flavor)}")
    return _of_packages(flavor, progress or _ignore)


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
    return _ask((str(real), "--no-defaults"), share)


def _holds_scripts(folder: Path) -> bool:
    return any(folder.glob("*_system_tables.sql"))


def _ask(command: tuple[str, ...], share: Path) -> DatabaseProgram | None:
    """Return what the program says it is; None if it cannot be run, or is neither server."""
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


def _of_packages(flavor: Flavor, tell: Progress) -> DatabaseProgram:
    search = _SEARCHES[flavor]
    target = cache_directory() / f"{search.keg}-packages"
    if not target.is_dir():
        with exclusive(target.with_name(f"{target.name}.lock"), _FETCH_TIMEOUT_S):
            if not target.is_dir():
                tell(f"fetching {flavor.value} (20 MB, once) into {target}")
                with publish(target) as fresh:
                    _fetch(flavor, fresh)
    program = _ask_unpacked(target)
    if program is None or program.flavor is not flavor:
        raise ServerError(f"{target} holds no working {flavor.value}; delete it to fetch it again")
    return program


def _fetch(flavor: Flavor, into: Path) -> None:
    search = _SEARCHES[flavor]
    failures: list[str] = []
    for suite in search.suites:
        name = "this machine's release" if suite is None else suite
        try:
            with closing(PackageArchive(suite)) as archive:
                packages = archive.names(search.package)
                if packages:
                    archive.unpack(packages[-1:], into)
                    return
            failures.append(f"{name}: no package")
        except (ServerError, OSError, subprocess.SubprocessError) as error:
            failures.append(f"{name}: {error}")
            _empty(into)
    raise ServerError(
        f"no {flavor.value} found, and none in the distribution's packages "
        f"({'; '.join(failures)}); {_advice(flavor)}"
    )


def _empty(directory: Path) -> None:
    for entry in directory.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def _ask_unpacked(root: Path) -> DatabaseProgram | None:
    """Return the program of an unpacked root, run by the root's own loader."""
    shares = [root / "usr" / "share" / name for name in ("mysql", "mariadb")]
    share = next((path for path in shares if (path / "charsets").is_dir()), shares[0])
    binaries = [root / "usr" / "sbin" / name for name in ("mariadbd", "mysqld")]
    binary = next((path for path in binaries if path.exists()), binaries[-1])
    # Its own paths are compiled in, and those are the machine's.
    return _ask(
        (
            *own_loader(root),
            str(binary),
            "--no-defaults",
            f"--basedir={root / 'usr'}",
            f"--lc-messages-dir={share}",
            f"--character-sets-dir={share / 'charsets'}",
            f"--plugin-dir={_plugins(root)}",
        ),
        share,
    )


def _plugins(root: Path) -> Path:
    directories = sorted(root.glob("usr/lib/**/plugin"))
    return directories[0] if directories else root / "usr" / "lib" / "mysql" / "plugin"


def _advice(flavor: Flavor) -> str:
    search = _SEARCHES[flavor]
    debian = "mysql-server-core-8.0 (Ubuntu)" if flavor is Flavor.MYSQL else "mariadb-server-core"
    return (
        f"install it (macOS: brew install {search.keg}; Debian, Ubuntu: apt-get install {debian}), "
        f"or name its server program in {search.variable}"
    )


def _ignore(_message: str) -> None:
    pass


__all__ = ["DatabaseProgram", "Flavor", "Progress", "database_program"]
