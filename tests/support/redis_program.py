"""Finds `redis-server` on the PATH, or on Debian and Ubuntu in an unpacked package."""

from __future__ import annotations

import shutil
from contextlib import closing

from tests.support.servers.debian import PackageArchive, is_debian, own_loader

from onceflow.core.local_files import cache_directory, publish
from onceflow.integration.servers.process import exclusive

_FETCH_TIMEOUT_S = 600.0


def redis_command() -> tuple[str, ...] | None:
    """Return what runs the server, fetched once into the cache; None where there is none."""
    found = shutil.which("redis-server")
    if found is not None:
        return (found,)
    if not is_debian():
        return None
    target = cache_directory() / "redis-packages"
    with exclusive(target.with_name(f"{target.name}.lock"), _FETCH_TIMEOUT_S):
        if not target.is_dir():
            with publish(target) as fresh, closing(PackageArchive()) as archive:
                archive.unpack(["redis-server"], fresh)
    return (*own_loader(target), str(target / "usr" / "bin" / "redis-server"))
