"""A Postgres with PostGIS out of distribution packages, unpacked once into the cache.

The embedded server has no PostGIS.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import ClassVar

from tests.support.servers.debian import PackageArchive

from onceflow.core.local_files import cache_directory, publish
from onceflow.integration.servers.postgres import EmbeddedPostgres, Launcher, default_launcher
from onceflow.integration.servers.process import ServerError, exclusive

_FETCH_TIMEOUT_S = 600.0
_PACKAGES = r"postgresql-\d+-postgis-3"


def find_postgis() -> Path:
    """Return the root of a Postgres with PostGIS. The first call on a machine fetches it (100 MB).

    Raises:
        ServerError: The packages could not be fetched, or do not exist.
    """
    target = cache_directory() / "postgis-packages"
    if not target.is_dir():
        with exclusive(target.with_name(f"{target.name}.lock"), _FETCH_TIMEOUT_S):
            if not target.is_dir():
                with publish(target) as fresh, closing(PackageArchive()) as archive:
                    packages = archive.names(_PACKAGES)
                    if not packages:
                        raise ServerError("the distribution has no package of PostGIS")
                    archive.unpack(packages[-1:], fresh)
                    _choose_version(fresh)
    return target


def _choose_version(root: Path) -> None:
    """Link the extension under its name without the version, like the package's own script."""
    for control in root.glob("usr/share/postgresql/*/extension/postgis-3.control"):
        control.with_name("postgis.control").symlink_to(control.name)


class _UnpackedLauncher(Launcher):
    """A launcher of programs that take their libraries from a directory of unpacked packages."""

    # The cached data directory of the embedded server has the format of another version.
    keeps_owner: ClassVar[bool] = False

    def __init__(self, root: Path) -> None:
        self._user = default_launcher()
        libraries = sorted(root.glob("usr/lib/*-linux-gnu*"))
        if not libraries:
            raise ServerError(f"no libraries below {root}; delete that directory to fetch it again")
        self._environment = f"LD_LIBRARY_PATH={libraries[0]}"

    def prefix(self) -> tuple[str, ...]:
        """Return the words that change the user and set the directory of the libraries."""
        return (*self._user.prefix(), "env", self._environment)

    def own(self, directory: Path) -> None:
        """Make `directory` writable for the command."""
        self._user.own(directory)


class UnpackedPostgres(EmbeddedPostgres):
    """A Postgres server of `root`, with the extensions that `root` has."""

    def __init__(self, root: Path, options: Mapping[str, str]) -> None:
        super().__init__(options, launcher=_UnpackedLauncher(root))
        programs = sorted(root.glob("usr/lib/postgresql/*/bin"))
        if not programs:
            raise ServerError(f"no server below {root}; delete that directory to fetch it again")
        self._binaries = programs[-1]


__all__ = ["UnpackedPostgres", "find_postgis"]
