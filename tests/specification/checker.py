"""Runs SPIN: translates the model, compiles the checker of a world, and reads what it prints."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from shutil import copy
from typing import Final

from tests.specification.worlds import MODEL, Mistake, World

TIMEOUT_S: Final = 300.0
"""The deadline of one call, for machines under load. On a quiet one each takes seconds."""
_MEMORY_MAX_MB: Final = 2_000
_DEPTHS: Final = (150, 250, 400, 100_000)
"""The lengths to which runs are searched for a mistake, one after the other: the first violation
that is found is then a short one."""

_ERRORS = re.compile(r"errors: (\d+)")
_STATES = re.compile(r"^ *(\S+) states, stored", re.MULTILINE)
_DEPTH = re.compile(r"depth reached (\d+)")
_TOO_SMALL = re.compile(r"max search depth too small|out of memory|hash-table full", re.IGNORECASE)
_LAW = re.compile(r"^VIOLATED: (.*)$", re.MULTILINE)


class CheckerFailed(Exception):
    """Raised if SPIN, the compiler or the checker gives no verdict."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of one check."""

    world: str
    mistake: str
    """The name of the mistake that was tried, or "" for the protocol as it is."""
    states: int
    depth: int
    seconds: float
    violation: str
    """The broken law, or "" if the checker has visited all states and found none."""
    trace: tuple[str, ...]
    """The steps to the violation, for people; empty without one."""

    @property
    def is_expected(self) -> bool:
        """True if the protocol as it is has no violation, or a mistake has one."""
        return bool(self.violation) == bool(self.mistake)


def build(world: World, directory: Path) -> Path:
    """Return the checker of `world`, compiled in `directory`.

    Raises:
        CheckerFailed: SPIN refuses the model, or the compiler its translation.
    """
    copy(MODEL, directory)
    constants = [f"-D{name}={value}" for name, value in world.constants.items()]
    _run(["spin", "-a", *constants, MODEL.name], directory)
    # More optimization would take longer than it saves.
    options = ["-O1", "-w", "-DCOLLAPSE", "-DVECTORSZ=2048", f"-DMEMLIM={_MEMORY_MAX_MB}"]
    search = ["-DNFAIR=3"] if world.is_of_progress else ["-DSAFETY"]
    _run(["cc", *options, *search, "-o", "pan", "pan.c"], directory)
    return directory / "pan"


def check(world: World, checker: Path, mistake: Mistake | None, directory: Path) -> Verdict:
    """Run `checker` in the empty `directory`, for the protocol as it is or with `mistake`.

    Raises:
        CheckerFailed: The checker did not visit all states.
    """
    environment = {"MISTAKE": str(mistake.number if mistake else 0)}
    search = ["-a", "-f"] if world.is_of_progress else []
    began, printed = time.monotonic(), ""
    for depth_max in _DEPTHS if mistake else _DEPTHS[-1:]:
        printed = _run([str(checker), *search, f"-m{depth_max}", "-w20"], directory, environment)
        if _read(_ERRORS, printed) or not _TOO_SMALL.search(printed):
            break
    seconds = time.monotonic() - began
    violation, trace = "", tuple[str, ...]()
    if _read(_ERRORS, printed):
        violation, trace = _replay(checker, directory, environment)
    elif _TOO_SMALL.search(printed):
        raise CheckerFailed(f"world {world.name!r} was not visited as a whole:\n{printed}")
    name = mistake.name if mistake else ""
    states, depth = _read(_STATES, printed), _read(_DEPTH, printed)
    return Verdict(world.name, name, states, depth, seconds, violation, trace)


def _read(pattern: re.Pattern[str], printed: str) -> int:
    match = pattern.search(printed)
    if match is None:
        raise CheckerFailed(f"the checker gave no verdict:\n{printed}")
    return int(float(match[1]))


def _replay(
    checker: Path, directory: Path, environment: dict[str, str]
) -> tuple[str, tuple[str, ...]]:
    """Return the broken law and the steps that lead to it."""
    trail = f"{MODEL.name}.trail"
    printed = _run([str(checker), "-S", trail], directory, environment)
    steps, _, _ = printed.partition("spin: trail ends")
    law = _LAW.search(steps)
    lines = (line.rstrip() for line in steps.splitlines())
    trace = [line for line in lines if line and not line.startswith(("pan:", "VIOLATED", "MSC"))]
    return law[1] if law else "the job never ends", tuple(trace)


def _run(command: Sequence[str], directory: Path, environment: dict[str, str] | None = None) -> str:
    try:
        ended = subprocess.run(
            command,
            cwd=directory,
            env=os.environ | (environment or {}),
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise CheckerFailed(f"{command[0]} did not end within {TIMEOUT_S:.0f} s") from None
    printed = ended.stdout + ended.stderr
    # The checker exits with the number of errors that it has found, and a replay with 1.
    if ended.returncode and not command[0].endswith("pan"):
        raise CheckerFailed(f"{' '.join(command)} failed:\n{printed}")
    return printed
