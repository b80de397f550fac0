"""What a check says, and how checks are run: side by side, each with a deadline."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum


class Level(Enum):
    """How bad a finding is."""

    OK = "ok"
    WARNING = "warning"
    """It works, and will not always, or not as well as it could."""
    PROBLEM = "problem"
    """A job cannot run, or not safely."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    area: str
    level: Level
    found: str
    needed: str = ""
    remedy: str = ""
    """The exact statement or command that mends it."""

    def as_json(self) -> dict[str, str]:
        """Return what `--json` prints of it."""
        return {
            "area": self.area,
            "level": self.level.value,
            "found": self.found,
            "needed": self.needed,
            "remedy": self.remedy,
        }


@dataclass(frozen=True, slots=True)
class Check:
    """One area, and what looks at it. What it raises becomes a problem of that area."""

    area: str
    look: Callable[[], Sequence[Finding]]


@dataclass(frozen=True, slots=True)
class Area:
    """Builds the findings of one area."""

    name: str

    def ok(self, found: str) -> Finding:
        """Say that something is as it should be."""
        return Finding(self.name, Level.OK, found)

    def warning(self, found: str, needed: str, remedy: str) -> Finding:
        """Say that something will do for now."""
        return Finding(self.name, Level.WARNING, found, needed, remedy)

    def problem(self, found: str, needed: str, remedy: str) -> Finding:
        """Say that something must be mended."""
        return Finding(self.name, Level.PROBLEM, found, needed, remedy)


def examine(checks: Sequence[Check], timeout_s: float) -> tuple[Finding, ...]:
    """Return what all checks find, in the order of `checks`; none is waited for any longer.

    A check that hangs is left behind on its thread, which ends with the process.
    """
    running = [_Running(check) for check in checks]
    deadline = time.monotonic() + timeout_s
    return tuple(finding for one in running for finding in one.findings(deadline, timeout_s))


class _Running:
    def __init__(self, check: Check) -> None:
        self._check = check
        self._found: Sequence[Finding] = ()
        self._thread = threading.Thread(target=self._run, name=f"doctor {check.area}", daemon=True)
        self._thread.start()

    def findings(self, deadline: float, timeout_s: float) -> Sequence[Finding]:
        """Return what it found, or that it has not answered by `deadline`."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            return (
                Area(self._check.area).problem(
                    f"no answer within {timeout_s:g} s",
                    "an answer",
                    "see whether it hangs or is overloaded; or give it longer: --timeout",
                ),
            )
        return self._found

    def _run(self) -> None:
        try:
            self._found = self._check.look()
        except Exception as error:  # the edge: one failure must not hide the other checks
            self._found = (
                Area(self._check.area).problem(
                    f"the check failed: {type(error).__name__}: {error}", "", ""
                ),
            )
