"""CPU seconds of process trees, and when processes began, from /proc: exact to 10 ms.

A process's figure includes its ended children once it has waited for them, so the sum over a tree
only grows; what a killed and orphaned process had used is lost with it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

from onceflow.integration.faults.processes import process_tree

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
# Places after the closing parenthesis of the command; see proc(5).
_UTIME, _STIME, _CSTIME, _STARTTIME = 11, 12, 14, 19


def tree_cpu_s(root: int) -> float:
    """Return user and system seconds of `root` and all its descendants, ended ones included."""
    return sum(_process_cpu_s(pid) for pid in process_tree(root))


def own_cpu_s(pid: int) -> float:
    """Return user and system seconds of `pid` alone, without any child."""
    return _process_cpu_s(pid, _STIME)


def groups_cpu_s(roots: Mapping[str, int]) -> dict[str, float]:
    """Return the seconds of each named tree."""
    return {name: tree_cpu_s(root) for name, root in roots.items()}


def began_at_s(pid: int) -> float:
    """Return when `pid` was started or forked; 0 when it has ended."""
    if not (fields := _fields_of(pid)):
        return 0.0
    since_boot_s = int(fields[_STARTTIME]) / _TICKS_PER_S
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + since_boot_s


def _process_cpu_s(pid: int, last_field: int = _CSTIME) -> float:
    return sum(int(field) for field in _fields_of(pid)[_UTIME : last_field + 1]) / _TICKS_PER_S


def _fields_of(pid: int) -> list[str]:
    """Return what follows the command, nothing when the process is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []
