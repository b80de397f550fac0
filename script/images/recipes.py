"""Makes images from distribution packages, by one recipe for each official image.

A recipe says in which suite a package of the right major version is looked for, what is laid beside
it, and what the image declares. An image that is built so answers to the environment variables and
commands that we use of the official one, and to no more.
"""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from onceflow.integration.servers.kafka_jars import KAFKA_VERSION, kafka_jars

_ENTRYPOINTS = Path(__file__).parent / "entrypoints"
# What an entrypoint calls; named, they are unpacked although no server needs them.
_SHELL = ("bash", "coreutils", "dash", "grep", "libc-bin", "sed", "tzdata")
_USERS = {"root": 0, "postgres": 999, "mysql": 998, "appuser": 1000, "nobody": 65534}


def _no_more(_root: Path) -> None:
    pass


@dataclass(frozen=True, slots=True)
class Recipe:
    """One image."""

    name: str
    """The official image's."""
    package: str
    """A regular expression of the package's whole name."""
    major: str
    """What the package's version begins with; another major version is another server."""
    suites: tuple[str | None, ...]
    """Where to look, in this order; None is the machine's own release."""
    entrypoint: str
    changes: tuple[str, ...]
    """Instructions of a Dockerfile."""
    finish: Callable[[Path], None] = _no_more
    """Lays what is no package into the root."""

    def accepts(self, version: str) -> bool:
        """Return whether a package's version is of the right major version."""
        return re.match(rf"{re.escape(self.major)}[.\-+~]", version) is not None

    def packages(self, server: str) -> tuple[str, ...]:
        """Return what to unpack for the server's package `server`."""
        return (server, *_SHELL)

    def complete(self, root: Path) -> None:
        """Make an image's root of unpacked packages."""
        for name in ("etc", "tmp", "run", "var/lib", "root", "proc", "sys", "dev"):
            (root / name).mkdir(parents=True, exist_ok=True)
        root.chmod(0o755)
        (root / "tmp").chmod(0o1777)
        _write_users(root)
        if not (root / "var" / "run").exists():
            (root / "var" / "run").symlink_to("/run")
        entrypoint = root / "usr" / "bin" / "docker-entrypoint.sh"
        shutil.copyfile(_ENTRYPOINTS / self.entrypoint, entrypoint)
        entrypoint.chmod(0o755)
        self.finish(root)

    def fingerprint(self) -> str:
        """Return what changes when the recipe does, so that an image built before is told."""
        parts = [
            repr((self.name, self.package, self.major, self.suites, self.changes, _SHELL)),
            (_ENTRYPOINTS / self.entrypoint).read_text(),
            Path(__file__).read_text(),
        ]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _write_users(root: Path) -> None:
    lines = [f"{name}:x:{uid}:{uid}::/:/bin/bash\n" for name, uid in _USERS.items()]
    (root / "etc" / "passwd").write_text("".join(lines))
    (root / "etc" / "group").write_text("".join(f"{n}:x:{uid}:\n" for n, uid in _USERS.items()))
    (root / "etc" / "nsswitch.conf").write_text("passwd: files\ngroup: files\nhosts: files dns\n")


def _finish_kafka(root: Path) -> None:
    java = min((root / "usr" / "lib" / "jvm").glob("java-21-openjdk-*/bin/java"))
    (root / "usr" / "bin" / "java").symlink_to(f"/{java.relative_to(root)}")
    libs = root / "opt" / "kafka" / "libs"
    libs.mkdir(parents=True)
    # Not the folder itself: the cache's is closed to other users.
    for jar in kafka_jars().iterdir():
        shutil.copyfile(jar, libs / jar.name)
    (root / "etc" / "kafka").mkdir(parents=True)
    shutil.copy(_ENTRYPOINTS / "log4j2.properties", root / "etc" / "kafka")


_ENTRYPOINT = 'ENTRYPOINT ["docker-entrypoint.sh"]'

RECIPES = (
    Recipe(
        name="postgres:18",
        package="postgresql-18",
        major="18",
        suites=(None, "forky", "sid"),
        entrypoint="postgres.sh",
        changes=(
            "ENV PATH=/usr/lib/postgresql/18/bin:/usr/sbin:/usr/bin",
            "ENV PGDATA=/var/lib/postgresql/18/docker",
            "ENV LANG=C.UTF-8",
            "VOLUME /var/lib/postgresql",
            "EXPOSE 5432",
            _ENTRYPOINT,
            'CMD ["postgres"]',
        ),
    ),
    Recipe(
        name="mysql:9",
        package="mysql-server-core(-9[0-9.]*)?",
        major="9",
        suites=(None, "sid"),
        entrypoint="mysql.sh",
        changes=(
            "ENV PATH=/usr/sbin:/usr/bin",
            "VOLUME /var/lib/mysql",
            "EXPOSE 3306",
            _ENTRYPOINT,
        ),
    ),
    Recipe(
        name="mariadb:11",
        package="mariadb-server-core",
        major="11",
        suites=(None, "trixie", "forky", "sid"),
        entrypoint="mysql.sh",
        changes=(
            "ENV PATH=/usr/sbin:/usr/bin",
            "VOLUME /var/lib/mysql",
            "EXPOSE 3306",
            _ENTRYPOINT,
        ),
    ),
    Recipe(
        name=f"apache/kafka:{KAFKA_VERSION}",
        package="openjdk-21-jre-headless",
        major="21",
        suites=(None, "trixie", "forky", "sid"),
        entrypoint="kafka.sh",
        changes=(
            "ENV PATH=/usr/sbin:/usr/bin",
            "VOLUME /var/lib/kafka/data",
            "EXPOSE 9092",
            _ENTRYPOINT,
        ),
        finish=_finish_kafka,
    ),
)

PROMETHEUS = Recipe(
    name="prom/prometheus:v3.5.0",
    package="prometheus",
    major="3",
    suites=(None, "forky", "sid"),
    entrypoint="prometheus.sh",
    changes=(
        "ENV PATH=/usr/sbin:/usr/bin",
        "VOLUME /prometheus",
        "EXPOSE 9090",
        _ENTRYPOINT,
        'CMD ["--config.file=/etc/prometheus/prometheus.yml", "--storage.tsdb.path=/prometheus"]',
    ),
)

DEBIAN = "debian:trixie-slim"
"""What deploy/docker/Dockerfile begins with."""

__all__ = ["DEBIAN", "PROMETHEUS", "RECIPES", "Recipe"]
