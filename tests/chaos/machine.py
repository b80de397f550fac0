"""The abilities of this machine and this user, on which kinds of faults depend.

Root gets namespaces of its own for mounts and processes. So mounts and processes end with the
command, also after Ctrl-C or SIGKILL.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from tests.chaos import clocks, disks
from tests.chaos.disks import FAILING
from tests.chaos.libraries import build_library, find_compiler, preload
from tests.chaos.schedule import FaultKind, Schedule
from tests.support.small_disk import MountRefused, mount_disk

_INSIDE = "ONCEFLOW_CHAOS_NAMESPACES"
_NAMESPACES = (
    "--mount",
    "--propagation",
    "private",
    "--pid",
    "--fork",
    "--kill-child",
    "--mount-proc",
)
# The first process of a namespace inherits orphans, and bash reaps them.
_REAPER = ("bash", "-c", '"$@"; exit $?', "bash")


def enter_namespaces() -> None:
    """Run this command again in namespaces of its own. Return if that is done, or refused."""
    if os.environ.get(_INSIDE) or os.geteuid() != 0 or shutil.which("unshare") is None:
        return
    prefix = ("unshare", *_NAMESPACES, *_REAPER)
    if subprocess.run([*prefix, "true"], capture_output=True, timeout=30, check=False).returncode:
        return
    os.environ[_INSIDE] = "1"
    sys.stderr.flush()
    os.execvp("unshare", [*prefix, sys.executable, "-m", "tests.chaos", *sys.argv[1:]])


@dataclass(frozen=True, slots=True)
class Machine:
    """The kinds of faults that cannot run here, and the libraries for those that can."""

    missing: Mapping[FaultKind, str] = field(default_factory=dict)
    """The reason for each kind that cannot run here."""
    libraries: tuple[Path, ...] = ()
    """The libraries for disks that fail and for clocks that jump. Empty without a C compiler."""

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
        return replace(schedule, faults=faults)

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
    try:
        with mount_disk(directory / "probe", "1m"):
            pass
    except MountRefused as error:
        missing[FaultKind.DISK] = str(error)
    compiler = find_compiler()
    if compiler is None:
        missing[FaultKind.CLOCK] = "it needs a C compiler (cc)"
        return Machine(missing)
    names = (disks.LIBRARY, clocks.LIBRARY)
    return Machine(missing, tuple(build_library(compiler, name, directory) for name in names))
