"""A cable between two network namespaces that loses all packets of one direction for a while.

This process is at the client's end, and its own network namespace must be new: see `can_have_one`.
A packet is lost because it goes out to a network address that no machine has. Neither end is told.
"""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import TracebackType

from typing_extensions import Self

CLIENT = "10.97.0.1"
SERVER = "10.97.0.2"
PREFIX = ("unshare", "--net")
"""The command before a command that is to have a network namespace of its own."""
_NOBODY = "02:00:00:00:00:99"
_PROBE = "ip link add onceflow0 type veth peer name onceflow1"


class LossyCable:
    """The cable. The server's end lasts as long as the block."""

    def __enter__(self) -> Self:
        """Lay the cable."""
        # It ends with this process, whose end closes the pipe.
        self._holder = subprocess.Popen([*PREFIX, "cat"], stdin=subprocess.PIPE)
        own_namespace = _namespace_of("self")
        deadline = time.monotonic() + 30
        while _namespace_of(str(self._holder.pid)) == own_namespace:
            assert time.monotonic() < deadline, "the second network namespace is missing"
            time.sleep(0.01)
        peer = f"ip link add client type veth peer name server netns {self._holder.pid}"
        for command in (peer, "ip link set lo up", *_set_up("client", CLIENT)):
            _run(command.split())
        for command in ("ip link set lo up", *_set_up("server", SERVER)):
            _run([*self.server_prefix, *command.split()])
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Remove the server's end."""
        self._holder.kill()
        self._holder.wait(30)

    @property
    def server_prefix(self) -> Sequence[str]:
        """The command before a command that is to run at the server's end."""
        return ("nsenter", f"--net=/proc/{self._holder.pid}/ns/net")

    def lose(self, direction: str) -> None:
        """Lose all `requests` (client to server), or all `replies`, until `heal`."""
        address, device = (SERVER, "client") if direction == "requests" else (CLIENT, "server")
        wrong = f"ip neigh replace {address} lladdr {_NOBODY} dev {device} nud permanent"
        self._run_at_sender(direction, wrong)

    def heal(self, direction: str) -> None:
        """Lose no packet any more."""
        address, device = (SERVER, "client") if direction == "requests" else (CLIENT, "server")
        self._run_at_sender(direction, f"ip neigh del {address} dev {device}")

    def _run_at_sender(self, direction: str, command: str) -> None:
        prefix = () if direction == "requests" else self.server_prefix
        _run([*prefix, *command.split()])


@cache
def can_have_one() -> bool:
    """Return whether this user may make network namespaces and a cable between two."""
    if any(shutil.which(name) is None for name in ("unshare", "nsenter", "ip")):
        return False
    command = [*PREFIX, *_PROBE.split()]
    return subprocess.run(command, capture_output=True, timeout=30, check=False).returncode == 0


def _namespace_of(pid: str) -> Path:
    return Path(f"/proc/{pid}/ns/net").readlink()


def _set_up(device: str, address: str) -> tuple[str, str]:
    return f"ip addr add {address}/24 dev {device}", f"ip link set {device} up"


def _run(command: Sequence[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=30)
