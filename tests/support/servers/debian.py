"""Programs out of Debian and Ubuntu packages, unpacked for one user and never installed.

apt runs here on state of its own (lists, archive, and a record of installed packages that is
empty), so neither root nor the machine's own lists are needed and nothing of the machine changes.
Sources, proxies and credentials are the machine's; signatures are checked as always. Because
nothing counts as installed, apt names every library down to libc: what is unpacked runs with its
own loader and libraries, even from another release than the machine's.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from onceflow.integration.servers.process import ServerError

_KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
_UPDATE_TIMEOUT_S = 180.0
_DOWNLOAD_TIMEOUT_S = 600.0
# What only maintainer scripts use: none of them runs here.
_UNUSED = re.compile(
    r"perl.*|libperl.*|lib.*-perl|systemd|libsystemd-shared|debconf|cdebconf|adduser|passwd|"
    r"login\.defs|locales|libc-l10n|ucf|sensible-utils|mysql-common|mariadb-common|galera-.*|"
    r"libpam-.*|libmount1|libblkid1|sysvinit-utils|libsemanage.*|libsepol.*|gcc-.*-base|"
    r"libgdbm.*|libdb5.*|netbase|init-system-helpers|psmisc|lsof|rsync|socat|gawk|procps|"
    r"iproute2|debianutils|tzdata|base-files|base-passwd|util-linux.*|coreutils|dpkg|tar|"
    r"postgresql-common.*|postgresql-client-common|ssl-cert|java-common|ca-certificates.*"
)
_UNREAD = ("doc", "man", "locale", "info", "lintian")


def is_debian() -> bool:
    """Return whether this machine has apt and dpkg."""
    return all(shutil.which(program) for program in ("apt-get", "apt-config", "dpkg-deb"))


class PackageArchive:
    """The packages of one suite, as apt sees them. Holds a temporary directory until `close`."""

    def __init__(self, suite: str | None = None) -> None:
        """Fetch the suite's lists of packages.

        Args:
            suite: A Debian suite from the machine's own mirror; the machine's own sources if None.

        Raises:
            ServerError: The lists could not be fetched, or the machine names no Debian mirror.
        """
        self._state = Path(tempfile.mkdtemp(prefix="onceflow-apt-"))
        try:
            self._environment = {**os.environ, "LC_ALL": "C"}
            sources = None if suite is None else self._sources_of(suite)
            self._environment["APT_CONFIG"] = str(self._configuration(sources))
            self._run(["apt-get", "update", "-qq"], _UPDATE_TIMEOUT_S)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Delete lists and downloads. Idempotent."""
        shutil.rmtree(self._state, ignore_errors=True)

    def names(self, pattern: str) -> list[str]:
        """Return the packages whose whole name matches the regular expression, sorted."""
        listed = self._run(["apt-cache", "pkgnames"], _UPDATE_TIMEOUT_S).split()
        return sorted(name for name in listed if re.fullmatch(pattern, name))

    def version(self, package: str) -> str:
        """Return the version of `package` without its epoch, such as 18.1-1; empty if unknown."""
        shown = self._run(["apt-cache", "policy", package], _UPDATE_TIMEOUT_S)
        candidate = re.search(r"Candidate: (?:\d+:)?(\d\S*)", shown)
        return candidate[1] if candidate else ""

    def unpack(self, packages: Sequence[str], into: Path) -> None:
        """Unpack `packages` with every library that they need below the empty directory `into`.

        Raises:
            ServerError: A package does not exist or could not be fetched.
        """
        simulated = self._run(["apt-get", "install", "-s", *packages], _UPDATE_TIMEOUT_S)
        needed = {line.split()[1] for line in simulated.splitlines() if line.startswith("Inst ")}
        needed = {name for name in needed if name in packages or not _UNUSED.fullmatch(name)}
        downloads = self._state / "downloads"
        downloads.mkdir()
        self._run(["apt-get", "download", "-q", *sorted(needed)], _DOWNLOAD_TIMEOUT_S, downloads)
        _merge_usr(into)
        for archive in sorted(downloads.glob("*.deb")):
            _extract(archive, into)
        shutil.rmtree(downloads)

    def _sources_of(self, suite: str) -> str:
        if not _KEYRING.exists():
            raise ServerError(
                f"{_KEYRING} is missing; install it with: apt-get install debian-archive-keyring"
            )
        return f"deb [signed-by={_KEYRING}] {debian_mirror()} {suite} main\n"

    def _configuration(self, sources: str | None) -> Path:
        """Write and return a configuration that shares sources and network settings at most."""
        for part in ("lists/partial", "cache/archives/partial", "empty"):
            (self._state / part).mkdir(parents=True)
        (self._state / "status").touch()
        dump = self._run(["apt-config", "dump"], 30.0).splitlines()
        lines = [
            line
            for line in dump
            if line.startswith("Acquire::")
            and not line.startswith(("Acquire::IndexTargets", "Acquire::Languages"))
        ]
        # The machine's hooks after an update (they empty its package cache) stay out with parts.
        directories = {
            "State::lists": "lists",
            "State::status": "status",
            "Cache": "cache",
            "Etc::parts": "empty",
            "Etc::main": "empty/apt.conf",
        }
        if sources is not None:
            (self._state / "sources.list").write_text(sources)
            directories["Etc::sourcelist"] = "sources.list"
            directories["Etc::sourceparts"] = "empty"
            directories["Etc::preferences"] = "empty/preferences"
            directories["Etc::preferencesparts"] = "empty"
        lines += [f'Dir::{key} "{self._state / value}";' for key, value in directories.items()]
        lines += [
            'Acquire::Languages "none";',
            'Acquire::Retries "3";',
            'APT::Install-Recommends "false";',
            'APT::Sandbox::User "root";',
        ]
        if sources is not None:
            # A frozen mirror serves lists that have outlived their date.
            lines.append('Acquire::Check-Valid-Until "false";')
        path = self._state / "apt.conf"
        path.write_text("\n".join(lines) + "\n")
        return path

    def _run(self, command: Sequence[str], timeout_s: float, directory: Path | None = None) -> str:
        result = subprocess.run(
            command,
            cwd=directory or self._state,
            env=self._environment,
            check=False,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
        if result.returncode != 0:
            raise ServerError(
                f"{' '.join(command[:2])} ended with status {result.returncode}: "
                f"{(result.stderr or result.stdout).strip()[-600:]}"
            )
        return result.stdout


def debian_mirror() -> str:
    """Return the address of the mirror that this machine's apt uses.

    Raises:
        ServerError: Its sources name none of Debian.
    """
    command = ["apt-get", "indextargets", "--format", "$(SITE)"]
    asked = subprocess.run(command, check=True, capture_output=True, text=True, timeout=30)
    mirrors = sorted({site for site in asked.stdout.split() if re.search(r"/debian/?$", site)})
    if not mirrors:
        raise ServerError("apt's sources name no mirror of Debian")
    return mirrors[0]


def own_loader(root: Path) -> tuple[str, ...]:
    """Return what stands before a program of `root` so that it runs with the libraries of `root`.

    Raises:
        ServerError: There is no loader in `root`.
    """
    # Not the link in lib64: in older releases it is absolute, and leads to the machine's loader.
    loaders = sorted(root.glob("usr/lib/*-linux-gnu*/ld-linux*.so.*"))
    if not loaders:
        raise ServerError(f"no loader below {root}; delete that directory to fetch it again")
    return (str(loaders[0]), "--library-path", str(loaders[0].parent))


def _merge_usr(root: Path) -> None:
    for name in ("bin", "sbin", "lib", "lib64"):
        (root / "usr" / name).mkdir(parents=True)
        (root / name).symlink_to(f"usr/{name}")


def _extract(archive: Path, root: Path) -> None:
    """Unpack a package without its documents; links of directories (merged /usr) stay links."""
    exclude = [f"--exclude=./usr/share/{name}/*" for name in _UNREAD]
    with subprocess.Popen(
        ["dpkg-deb", "--fsys-tarfile", str(archive)], stdout=subprocess.PIPE
    ) as reader:
        unpacked = subprocess.run(
            ["tar", "-x", "-C", str(root), "--no-same-owner", "--keep-directory-symlink", *exclude],
            stdin=reader.stdout,
            check=False,
            capture_output=True,
            text=True,
        )
    if unpacked.returncode != 0 or reader.returncode != 0:
        raise ServerError(f"{archive.name} could not be unpacked: {unpacked.stderr.strip()[-600:]}")


__all__ = ["PackageArchive", "debian_mirror", "is_debian", "own_loader"]
