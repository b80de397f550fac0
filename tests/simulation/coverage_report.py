"""Which branches of the protocol the schedules reach: `script/simulate --coverage`.

Measured by the coverage library in a process of its own, for it must see the protocol imported.
What no schedule reaches is named here with its reason, or is too much code.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

PROTOCOL = Path(__file__).parents[2] / "core" / "protocol"

REASONS: dict[str, str] = {
    "raise ": "refuses an argument, or what only a bug or damaged storage can bring",
    "case _:": "refuses an argument",
    "return unreachable": "no member of a closed union is left",
}
"""By how a line begins."""

_NAMES = "names are made and read by sinks and people; the model has transactions as values"
_PEOPLE = "asked by `onceflow txn`, not by a job"
_RETIRED = "sinks that are taken out of a pipeline are not modelled"
_GUARD = "an attempt that is over tells its coordinator nothing; this holds if it did"
ELSEWHERE: dict[str, str] = {
    "in_doubt.py": _PEOPLE,
    "assignment.py:default_max_parallelism": "once in a job's life, before it begins",
    "assignment.py:assign_splits": "refuses an argument",
    "ids.py:TransactionId.__post_init__": _NAMES,
    "ids.py:TransactionId.parse": _NAMES,
    "ids.py:sink_id_of": _NAMES,
    "ids.py:TransactionId.name": _NAMES,
    "ids.py:_within": _NAMES,
    "commits.py:require_named": "a pre-commit of the model has one transaction",
    "log.py:owner_of": "for people",
    "log.py:LogView.sinks": _RETIRED,
    "log_memory.py:LogMemory.settled": _RETIRED,
    "log_memory.py:LogMemory.coverage": "takes 129 attempts that decided something",
    "log.py:prunable": "a job prunes after its first decision",
    "recovery.py:plan_recovery": "targets list their own sink's, and no attempt is forgotten",
    "coordinator.py:CheckpointCoordinator.pending": "for tests",
    "coordinator.py:CheckpointCoordinator.acked": _GUARD,
    "coordinator.py:CheckpointCoordinator.logged": _GUARD,
    "coordinator.py:CheckpointCoordinator.append_failed": _GUARD,
}
"""By file, or file and function: why no schedule is to reach all of it."""


def unreached(schedules: int, seed: int) -> list[str]:
    """Return the lines and branches that no schedule reached and no reason excuses."""
    with tempfile.TemporaryDirectory() as directory:
        data = f"--data-file={directory}/data"
        run = ["run", "--branch", f"--source={PROTOCOL}", data, "-m", "tests.simulation"]
        _coverage(*run, "--schedules", str(schedules), "--seed", str(seed))
        report = Path(directory) / "report.json"
        _coverage("json", data, "-q", "-o", str(report))
        files: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))["files"]
    return [text for path, found in sorted(files.items()) for text in _of_file(Path(path), found)]


def _of_file(path: Path, found: dict[str, Any]) -> list[str]:
    lines = path.read_text(encoding="utf-8").splitlines()
    texts: list[str] = []
    functions: dict[str, dict[str, list[Any]]] = found["functions"]
    for name, function in functions.items():
        if path.name in ELSEWHERE or f"{path.name}:{name}" in ELSEWHERE:
            continue
        texts += [
            f"{path.name}:{number} never runs: {lines[number - 1].strip()}"
            for number in _numbers(function["missing_lines"])
            if not _excused(lines, number)
        ]
        for begin, end in map(_numbers, function["missing_branches"]):
            if begin in function["missing_lines"] or (end > 0 and _excused(lines, end)):
                continue
            way = f"goes to {lines[end - 1].strip()}" if end > 0 else "leaves the function"
            texts.append(f"{path.name}:{begin} never {way}: {lines[begin - 1].strip()}")
    return texts


def _numbers(found: list[Any]) -> list[int]:
    return [int(number) for number in found]


def _excused(lines: list[str], number: int) -> bool:
    return any(lines[number - 1].strip().startswith(begin) for begin in REASONS)


def _coverage(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "coverage", *arguments], check=True, stdout=sys.stderr)
