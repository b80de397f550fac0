"""Tries mutants: each in a copy of the project, by the tests that look at its room."""

from __future__ import annotations

import contextlib
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.mutation.mutants import Mutant, list_mutants
from tests.mutation.rooms import Room

ROOT = Path(__file__).parents[2]
_PATIENCE_S = 20.0
"""What a stage with a mutant may take besides three times what it takes without one."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of one mutant: the stage that killed it, from 1, or 0 if it survived."""

    room: str
    mutant: Mutant
    stage: int
    seconds: float


def read_mutants(room: Room) -> Sequence[Mutant]:
    """Return all mutants of a room, in the order of its files."""
    files = sorted({path for pattern in room.files for path in ROOT.glob(pattern)})
    return [
        mutant
        for path in files
        for mutant in list_mutants(str(path.relative_to(ROOT)), path.read_text(encoding="utf-8"))
    ]


class Copies:
    """Copies of the project: one without mutants, and one for each process that tries them."""

    def __init__(self, count: int) -> None:
        """Copy the files that git lists, as they are in the working tree."""
        self._directory = tempfile.TemporaryDirectory(prefix="onceflow-mutants-")
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            capture_output=True,
            check=True,
            text=True,
        )
        self._free: queue.SimpleQueue[Path] = queue.SimpleQueue()
        self.whole = Path(self._directory.name) / "whole"
        """The copy in which no mutant is planted."""
        for copy in (self.whole, *(self.whole.with_name(str(n)) for n in range(count))):
            for name in filter(None, listed.stdout.split("\0")):
                _copy_file(ROOT / name, copy / name)
            if copy != self.whole:
                self._free.put(copy)

    def close(self) -> None:
        """Delete the copies."""
        self._directory.cleanup()

    @contextlib.contextmanager
    def one(self) -> Generator[Path, None, None]:
        """Yield a copy that no other thread uses."""
        copy = self._free.get()
        try:
            yield copy
        finally:
            self._free.put(copy)


def _copy_file(source: Path, target: Path) -> None:
    if source.is_symlink() or source.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target, follow_symlinks=False)


class Stages:
    """The stages of a mutant, and how long each takes without one. Any thread."""

    def __init__(self, copies: Copies) -> None:
        self._copies = copies
        self._took_s: dict[tuple[str, ...], float] = {}
        self._lock = threading.Lock()

    def list_for(self, room: Room, mutant: Mutant) -> Sequence[Sequence[str]]:
        """Return the stages of `room`, after the unit tests that are named for the module."""
        stem = Path(mutant.file).stem
        named = sorted(
            str(one.relative_to(ROOT)) for one in ROOT.glob(f"tests/unit/**/test_*{stem}*.py")
        )
        return [named, *room.stages] if named else room.stages

    def time_s(self, stage: Sequence[str]) -> float:
        """Return how long the stage takes without a mutant. Runs it once, in a copy of its own.

        Raises:
            RuntimeError: It fails, or has no tests: it could kill nothing.
        """
        key = tuple(stage)
        with self._lock:
            if key not in self._took_s:
                began = time.monotonic()
                status, printed = _run_stage(
                    self._copies.whole, stage, timeout_s=900.0, caches=True
                )
                if status != 0:
                    raise RuntimeError(f"without a mutant, {stage} fails:\n{printed[-4000:]}")
                self._took_s[key] = time.monotonic() - began
            return self._took_s[key]


def try_all(
    name: str,
    room: Room,
    mutants: Sequence[Mutant],
    stages: Stages,
    copies: Copies,
    ends_at: float | None = None,
) -> Iterator[Verdict]:
    """Yield the verdict on each mutant, in the order of `mutants`.

    Mutants that would begin after `ends_at`, by the monotonic clock, are left out.
    """

    def try_one(mutant: Mutant) -> Verdict | None:
        with copies.one() as copy:
            if ends_at is not None and time.monotonic() > ends_at:
                return None
            return try_in(copy, mutant)

    def try_in(copy: Path, mutant: Mutant) -> Verdict:
        began = time.monotonic()
        with _planted(copy, mutant):
            for number, stage in enumerate(stages.list_for(room, mutant), start=1):
                timeout_s = 3 * stages.time_s(stage) + _PATIENCE_S
                status, _ = _run_stage(copy, stage, timeout_s=timeout_s)
                if status != 0:
                    return Verdict(name, mutant, number, time.monotonic() - began)
        return Verdict(name, mutant, 0, time.monotonic() - began)

    with ThreadPoolExecutor(max_workers=32) as threads:
        yield from filter(None, threads.map(try_one, mutants))


@contextlib.contextmanager
def _planted(copy: Path, mutant: Mutant) -> Generator[None, None, None]:
    path = copy / mutant.file
    source = path.read_text(encoding="utf-8")
    # The cache goes by size and whole seconds, which may be the same for a mutant.
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        compiled.unlink()
    path.write_text(mutant.apply(source), encoding="utf-8")
    try:
        yield
    finally:
        path.write_text(source, encoding="utf-8")


def _run_stage(
    copy: Path, stage: Sequence[str], *, timeout_s: float, caches: bool = False
) -> tuple[int, str]:
    """Run the tests of a stage; return the exit status of pytest, and what it printed.

    A stage that takes longer than `timeout_s` is killed with all processes of its session; its
    status is 1.
    """
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(copy / "src"), str(copy)]),
        "PYTHONDONTWRITEBYTECODE": "" if caches else "1",
    }
    command = [
        *(
            sys.executable,
            "-m",
            "pytest",
            "-x",
            "-q",
            "-p",
            "no:randomly",
            "-p",
            "no:cacheprovider",
        ),
        *("-m", "not slow and not servers", "--onceflow-rounds=2", *stage),
    ]
    with tempfile.TemporaryFile("w+") as printed:
        process = subprocess.Popen(
            command,
            cwd=copy,
            env=environment,
            stdout=printed,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            status = 1
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        printed.seek(0)
        return status, printed.read()
