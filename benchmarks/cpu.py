"""CPU seconds of process trees, from /proc: exact to a clock tick (10 ms).

A process's figure includes its ended children once it has waited for them, so the sum over a tree
only grows; what a killed and orphaned process had used is lost with it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from onceflow.integration.faults.processes import process_tree

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_UTIME, _STIME, _CSTIME = (
    11,
    12,
    14,
)  # places after the closing parenthesis of the command; see proc(5)


def tree_cpu_s(root: int) -> float:
    """Return user and system seconds of `root` and all its descendants, ended ones included."""
    return sum(_process_cpu_s(pid) for pid in process_tree(root))


def own_cpu_s(pid: int) -> float:
    """Return user and system seconds of `pid` alone, without any child."""
    return _process_cpu_s(pid, _STIME)


def groups_cpu_s(roots: Mapping[str, int]) -> dict[str, float]:
    """Return the seconds of each named tree."""
    return {name: tree_cpu_s(root) for name, root in roots.items()}


def _process_cpu_s(pid: int, last_field: int = _CSTIME) -> float:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    fields = stat.rpartition(")")[2].split()
    return sum(int(field) for field in fields[_UTIME : last_field + 1]) / _TICKS_PER_S
