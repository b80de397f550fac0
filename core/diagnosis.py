"""What a look at a server or a machine found, and what mends it."""

from __future__ import annotations

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
