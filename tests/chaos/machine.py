"""The abilities of this machine and this user, on which kinds of faults depend.

Root gets namespaces of its own for mounts and processes. So mounts and processes end with the
command, also after Ctrl-C or SIGKILL.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from tests.chaos import clocks, disks, hosts
from tests.chaos.disks import FAILING
from tests.chaos.libraries import build_library, find_compiler, preload
from tests.chaos.schedule import FaultKind, Schedule
from tests.support.small_disk import MountRefused, mount_disk

from onceflow.integration.servers.kafka_jars import kafka_jars
from onceflow.integration.servers.mysql_programs import Flavor, database_program
from onceflow.integration.servers.server import ServerError

_INSIDE = "ONCEFLOW_CHAOS_NAMESPACES"
_NETWORK, _NO_NETWORK = "network", "no network"
_NAMESPACES = (
    *("--mount", "--propagation", "private"),
    *("--pid", "--fork", "--kill-child", "--mount-proc"),
)
_DIES_WITH_US = ("setpriv", "--pdeathsig", "KILL")
_HOST_COMMANDS = ("unshare", "nsenter", "ip", "tc", "iptables")
# The first process of a namespace inherits orphans, and bash reaps them.
_REAPER = ("bash", "-c", '"$@"; exit $?', "bash")


def enter_namespaces(kinds: Sequence[FaultKind]) -> None:
    """Run this command again in namespaces of its own, and exit with its status.

    Return if this process is inside already, or may not have any. `kinds` decide whether it gets a
    network of its own, too.
    """
    has_commands = all(shutil.which(name) for name in ("unshare", "setpriv", "bash"))
    if _INSIDE in os.environ or os.geteuid() != 0 or not has_commands:
        return
    has_network = FaultKind.HOSTS in kinds and not find_missing_commands()
    prefix = ("unshare", *_NAMESPACES, *(("--net",) if has_network else ()), *_REAPER)
    if subprocess.run([*prefix, "true"], capture_output=True, timeout=30, check=False).returncode:
        return
    _fetch_programs()
    os.environ[_INSIDE] = _NETWORK if has_network else _NO_NETWORK
    command = [*_DIES_WITH_US, *prefix, sys.executable, "-m", "tests.chaos", *sys.argv[1:]]
    with subprocess.Popen(command) as inside:
        # `unshare` itself blocks both signals. ^C reaches the command inside, which then cleans up.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, lambda number, frame: inside.kill())
        sys.exit(abs(inside.wait()))


def find_missing_commands() -> list[str]:
    """Return the commands that hosts need and this machine lacks."""
    return [name for name in _HOST_COMMANDS if shutil.which(name) is None]


def _fetch_programs() -> None:
    """Fetch what servers need. A network of our own does not lead to any registry."""
    with suppress(ServerError):
        database_program(Flavor.MYSQL)
    kafka_jars()


@dataclass(frozen=True, slots=True)
class Machine:
    """The kinds of faults that cannot run here, and the libraries for those that can."""

    missing: Mapping[FaultKind, str] = field(default_factory=dict[FaultKind, str])
    """The reason for each kind that cannot run here."""
    libraries: tuple[Path, ...] = ()
    """The libraries for disks that fail and for clocks that jump. Empty without a C compiler."""
    has_netem: bool = False
    """True if cables can delay and reorder packets by themselves."""

    def adapt(self, schedule: Schedule) -> Schedule:
        """Return the schedule with other variants of faults in the place of those missing here."""
        faults = schedule.faults
        if FaultKind.DISK in self.missing:
            # Storage is then no file system that could be filled.
            faults = tuple(
                replace(fault, variant="fails") if fault.variant == "full" else fault
                for fault in faults
            )
        if not self.libraries:
            faults = tuple(
                replace(fault, variant=fault.variant.replace(FAILING, "read-only"))
                if fault.kind is FaultKind.DISK
                else fault
                for fault in faults
            )
        if not self.has_netem:
            faults = tuple(
                replace(fault, variant=fault.variant.replace("reorder", "delay"))
                if fault.kind is FaultKind.HOSTS
                else fault
                for fault in faults
            )
        return replace(schedule, faults=faults)

    @property
    def remarks(self) -> tuple[str, ...]:
        """Say which variants of the kinds that can run are replaced here."""
        found: list[str] = []
        if FaultKind.DISK not in self.missing and not self.libraries:
            found.append("no disk fails: there is no C compiler (cc); disks are read-only instead")
        if FaultKind.HOSTS not in self.missing and not self.has_netem:
            found.append("no cable reorders packets: the kernel has no netem; slow cables instead")
        return tuple(found)

    def prepare(self, schedule: Schedule, directory: Path) -> dict[str, str]:
        """Return the environment of the job's processes, for faults that need the libraries."""
        if not self.libraries or not schedule.needs_libraries:
            return {}
        return {
            **preload(self.libraries),
            **disks.describe_disks(directory),
            **clocks.describe_clocks(directory),
        }

    def choose(self, kinds: Sequence[FaultKind]) -> tuple[FaultKind, ...]:
        """Return the kinds that can run here."""
        return tuple(kind for kind in kinds if kind not in self.missing)


NO_ABILITIES = Machine()
"""A machine without libraries, for schedules that need none."""


def examine_machine(directory: Path) -> Machine:
    """Try what this user may do here. `directory` takes probes and libraries."""
    missing: dict[FaultKind, str] = {}
    if os.environ.get(_INSIDE) == _NETWORK:
        hosts.use_own_network(directory)
    try:
        with mount_disk(directory / "probe", "1m"):
            pass
    except MountRefused as error:
        missing[FaultKind.DISK] = str(error)
    if reason := _find_host_obstacle():
        missing[FaultKind.HOSTS] = reason
    has_netem = FaultKind.HOSTS not in missing and hosts.has_netem()
    compiler = find_compiler()
    if compiler is None:
        missing[FaultKind.CLOCK] = "it needs a C compiler (cc)"
        return Machine(missing, has_netem=has_netem)
    names = (disks.LIBRARY, clocks.LIBRARY)
    libraries = tuple(build_library(compiler, name, directory) for name in names)
    return Machine(missing, libraries, has_netem)


def _find_host_obstacle() -> str:
    """Return the reason why there can be no hosts here, or an empty text."""
    if absent := find_missing_commands():
        return f"hosts need the commands {', '.join(absent)}"
    if os.environ.get(_INSIDE) != _NETWORK:
        return "hosts need root, and a kernel that makes network namespaces"
    try:
        hosts.probe_hosts()
    except (OSError, subprocess.SubprocessError) as error:
        return f"hosts cannot be made here: {error}"
    return ""
