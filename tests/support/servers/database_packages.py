"""`mysqld` and `mariadbd` out of distribution packages, unpacked once into the cache.

MariaDB and MySQL of the machine's own release; Debian has MySQL in its development suite only, from
which it is then taken with all its libraries. For our own tests, the demo and the benchmarks.
"""

from __future__ import annotations

import shutil
import subprocess
from contextlib import closing
from pathlib import Path

from tests.support.servers.debian import PackageArchive, is_debian, own_loader

from onceflow.core.local_files import cache_directory, publish
from onceflow.integration.servers.mysql_programs import (
    DatabaseProgram,
    Flavor,
    Progress,
    add_finder,
    ask_program,
)
from onceflow.integration.servers.process import ServerError, exclusive

_FETCH_TIMEOUT_S = 600.0
_PACKAGES = {Flavor.MYSQL: r"mysql-server-core(-[0-9.]+)?", Flavor.MARIADB: "mariadb-server-core"}
_SUITES: dict[Flavor, tuple[str | None, ...]] = {
    Flavor.MYSQL: (None, "sid"),
    Flavor.MARIADB: (None,),
}


def offer_packages() -> None:
    """Let servers of this process run what a Debian or an Ubuntu has packages of."""
    add_finder(find_in_packages)


def find_in_packages(flavor: Flavor, tell: Progress) -> DatabaseProgram | None:
    """Return the program of `flavor`, fetched by the first call on a machine (20 MB).

    None where there are no packages to be had. Processes that ask at the same time wait for the
    first; a crash leaves no half-filled folder.

    Raises:
        ServerError: It could not be fetched, or what was fetched does not run.
    """
    if not is_debian():
        return None
    target = cache_directory() / f"{flavor.name.lower()}-packages"
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
    failures: list[str] = []
    for suite in _SUITES[flavor]:
        name = "this machine's release" if suite is None else suite
        try:
            with closing(PackageArchive(suite)) as archive:
                packages = archive.names(_PACKAGES[flavor])
                if packages:
                    archive.unpack(packages[-1:], into)
                    return
            failures.append(f"{name}: no package")
        except (ServerError, OSError, subprocess.SubprocessError) as error:
            failures.append(f"{name}: {error}")
            _empty(into)
    raise ServerError(
        f"no {flavor.value} is installed, and none is in the distribution's packages "
        f"({'; '.join(failures)}); install it, or name its server program in"
        f" ONCEFLOW_{flavor.name}D"
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
    return ask_program(
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
