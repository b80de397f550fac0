"""Wall clocks of single processes that jump by an hour. Other clocks stay as they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

LIBRARY = "jumping_clock"
_FOLDER = "clocks"


def describe_clocks(directory: Path) -> dict[str, str]:
    """Return the environment of processes whose clocks may jump."""
    folder = directory / _FOLDER
    folder.mkdir(exist_ok=True)
    return {"CHAOS_CLOCKS": str(folder)}


def move_clocks(directory: Path, pids: Sequence[int], offset_s: int) -> Callable[[], bool]:
    """Move the wall clocks of some processes. Return the function that moves them back.

    That function returns True if one of the processes has looked at its clock in between.
    """
    files = [directory / _FOLDER / str(pid) for pid in pids]
    marks = [file.with_name(f"{file.name}.seen") for file in files]
    for file in files:
        fresh = file.with_name(f"{file.name}.new")
        fresh.write_text(str(offset_s), encoding="ascii")
        fresh.rename(file)

    def heal() -> bool:
        for file in files:
            file.unlink()
        was_seen = any(mark.exists() for mark in marks)
        for mark in marks:
            mark.unlink(missing_ok=True)
        return was_seen

    return heal
