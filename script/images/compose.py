"""Docker Compose: the one that is installed, or else Debian's, unpacked for this user."""

from __future__ import annotations

import shutil
import subprocess
from contextlib import closing

from tests.support.servers.debian import PackageArchive

from onceflow.core.local_files import cache_directory, publish

_SUITE = "trixie"
"""The oldest with version 2. Its program runs on older releases, too."""


def find_compose() -> list[str]:
    """Return how Docker Compose 2 is called.

    Raises:
        ServerError: It is not installed, and Debian's could not be fetched.
    """
    installed = ["docker", "compose"]
    if shutil.which("docker"):
        asked = subprocess.run([*installed, "version"], check=False, capture_output=True)
        if asked.returncode == 0:
            return installed
    root = cache_directory() / f"compose-{_SUITE}"
    if not root.is_dir():
        with closing(PackageArchive(_SUITE)) as archive, publish(root) as fresh:
            archive.unpack(["docker-compose"], fresh)
    return [str(root / "usr" / "libexec" / "docker" / "cli-plugins" / "docker-compose")]


__all__ = ["find_compose"]
