"""Host names that exist for the processes of a test alone, and that a test can take away."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest

_LINE_START = "127.0.0.1 "
_BIND = (
    'mount --bind "$1" /etc/hosts && mount --bind "$2" /etc/nsswitch.conf && shift 2 && exec "$@"'
)


class OwnNames:
    """A hosts file for processes in a mount namespace of their own, which ask no name server.

    The system's resolver reads the file at each lookup. A name that is away is answered with "Name
    or service not known", as for NXDOMAIN.
    """

    def __init__(self, directory: Path, *names: str) -> None:
        """Write the file; all `names` lead to this machine."""
        self._hosts = directory / "hosts"
        self._services = directory / "nsswitch.conf"
        self._services.write_text("hosts: files\npasswd: files\ngroup: files\n")
        lines = [f"{_LINE_START}{name}\n" for name in ("localhost", *names)]
        self._hosts.write_text("".join(lines))

    @property
    def prefix(self) -> Sequence[str]:
        """The command before a command that is to know these names."""
        return (*_namespace_command(), "sh", "-c", _BIND, "sh", *map(str, self._files))

    def take_away(self, name: str) -> None:
        """Let nobody find `name` any more."""
        self._mark(name, b"#")

    def bring_back(self, name: str) -> None:
        """Let `name` be found again."""
        self._mark(name, _LINE_START[:1].encode())

    @property
    def _files(self) -> tuple[Path, Path]:
        return self._hosts, self._services

    def _mark(self, name: str, first_byte: bytes) -> None:
        # One byte of the same file: no reader sees half a change, and the mount stays.
        position = self._hosts.read_text().index(f"{_LINE_START[1:]}{name}\n") - 1
        with self._hosts.open("r+b") as file:
            os.pwrite(file.fileno(), first_byte, position)


def require_own_names() -> None:
    """Skip the test where no process may have a mount namespace of its own."""
    if not _can_mount():
        pytest.skip("no mount namespace: it takes `unshare`, and root or user namespaces")


def _namespace_command() -> Sequence[str]:
    return ("unshare", "--mount", *(() if os.geteuid() == 0 else ("--map-root-user",)))


@cache
def _can_mount() -> bool:
    if shutil.which("unshare") is None:
        return False
    command = [*_namespace_command(), "mount", "--bind", "/etc/hosts", "/etc/hosts"]
    return subprocess.run(command, capture_output=True, timeout=30, check=False).returncode == 0
