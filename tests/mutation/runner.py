"""Tries mutants: each in a copy of the project, by the tests that look at its room."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from math import inf
from pathlib import Path

from tests.mutation.mutants import Mutant, list_mutants
from tests.mutation.rooms import Room

ROOT = Path(__file__).parents[2]
_PATIENCE_S = 10.0
"""What a stage with a mutant may take besides three times what it takes without one."""
_PATIENCE_CPU_S = 2.0
"""The same for the processor time of the tests' own process."""
_FAST_S = 3.0
"""A stage that takes no longer is not timed a second time."""
_OPTIONS = (
    *("-x", "-q", "-p", "no:randomly", "-p", "no:cacheprovider"),
    *("-W", "ignore::pytest.PytestAssertRewriteWarning"),
    *("-m", "not slow and not servers", "--onceflow-rounds=2"),
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The fate of one mutant: the stage that killed it, from 1, or 0 if it survived."""

    room: str
    mutant: Mutant
    stage: int
    seconds: float
    tried: int
    """The number of stages that were tried."""


def read_mutants(room: Room) -> Sequence[Mutant]:
    """Return all mutants of a room, in the order of its files."""
    files = sorted({path for pattern in room.files for path in ROOT.glob(pattern)})
    return [
        mutant
        for path in files
        for mutant in list_mutants(str(path.relative_to(ROOT)), path.read_text(encoding="utf-8"))
    ]


class Copies:
    """Copies of the project, one for each process that tries mutants."""

    def __init__(self, count: int) -> None:
        """Copy the files that git lists, as they are in the working tree."""
        self.count = count
        self._directory = tempfile.TemporaryDirectory(prefix="onceflow-mutants-")
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            capture_output=True,
            check=True,
            text=True,
        )
        self._free: queue.SimpleQueue[Copy] = queue.SimpleQueue()
        self._all: list[Copy] = []
        for number in range(count):
            path = Path(self._directory.name) / str(number)
            for name in filter(None, listed.stdout.split("\0")):
                _copy_file(ROOT / name, path / name)
            self._all.append(Copy(path))
            self._free.put(self._all[-1])

    def stop(self) -> None:
        """Stop the processes that run tests."""
        for copy in self._all:
            copy.stop()

    def close(self) -> None:
        """Delete the copies."""
        self._directory.cleanup()

    @contextlib.contextmanager
    def one(self) -> Generator[Copy, None, None]:
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


class Copy:
    """A copy of the project, and a process that runs tests in it. One thread at a time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._took_s: dict[tuple[str, ...], tuple[float, float]] = {}
        self._compiled: set[tuple[str, ...]] = set()
        self._process: subprocess.Popen[str] | None = None

    def stop(self) -> None:
        """Stop the process, and the tests that it runs."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait()

    def fails(self, stage: Sequence[str], mutant: Mutant, ends_at: float) -> bool | None:
        """Return True if a test of the stage fails with the mutant, or takes too long.

        None if the clock reached `ends_at` before the tests ended.

        Raises:
            RuntimeError: The stage fails without a mutant, too, or has no tests.
        """
        if not self._time(stage, ends_at):
            return None
        alone_s, alone_cpu_s = self._took_s[tuple(stage)]
        timeout_s = min(3 * alone_s + _PATIENCE_S, ends_at - time.monotonic())
        with _planted(self._path, mutant):
            status, _, _ = self._run(
                stage, timeout_s=timeout_s, cpu_max_s=3 * alone_cpu_s + _PATIENCE_CPU_S
            )
        return None if status != 0 and time.monotonic() >= ends_at else status != 0

    def _time(self, stage: Sequence[str], ends_at: float) -> bool:
        """Measure how long the stage takes without a mutant; False if `ends_at` was reached."""
        key = tuple(stage)
        # Twice, unless the whole run is bounded: the first run compiles and imports, and a hanging
        # mutant is waited for thrice as long as the second one takes.
        while key not in self._took_s:
            began = time.monotonic()
            caches = key not in self._compiled
            left_s = min(900.0, ends_at - began)
            status, cpu_s, printed = self._run(stage, timeout_s=left_s, caches=caches)
            if status != 0:
                if time.monotonic() >= ends_at:
                    return False
                raise RuntimeError(f"without a mutant, {stage} fails:\n{printed[-4000:]}")
            took_s = time.monotonic() - began
            if not caches or took_s < _FAST_S or ends_at < inf:
                self._took_s[key] = took_s, cpu_s
            self._compiled.add(key)
        return True

    def _run(
        self,
        stage: Sequence[str],
        *,
        timeout_s: float,
        cpu_max_s: float = 900.0,
        caches: bool = False,
    ) -> tuple[int, float, str]:
        """Run the tests of a stage.

        Return the exit status of pytest, its processor time, and what it printed.
        """
        output = self._path.with_suffix(".output")
        request = {
            "arguments": [*_OPTIONS, *stage],
            "output": str(output),
            "timeout_s": timeout_s,
            "cpu_max_s": cpu_max_s,
            "caches": caches,
        }
        process = self._process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
        status, cpu_s = json.loads(process.stdout.readline())
        return status, cpu_s, output.read_text(encoding="utf-8", errors="replace")

    def _start(self) -> subprocess.Popen[str]:
        path = [str(self._path / "src"), str(self._path)]
        return subprocess.Popen(
            [sys.executable, str(self._path / "tests" / "mutation" / "warm.py")],
            cwd=self._path,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )


def list_stages(room: Room, mutant: Mutant) -> Sequence[Sequence[str]]:
    """Return the stages of `room`, after the unit tests that are named for the module."""
    named = _find_named_tests(Path(mutant.file).stem)
    return [named, *room.stages] if named else room.stages


@cache
def _find_named_tests(stem: str) -> Sequence[str]:
    # Whole words only: the tests of `restore` are not those of `store`.
    named = re.compile(rf"test_(.*_)?{stem}(_.*)?\.py")
    found = ROOT.glob(f"tests/unit/**/test_*{stem}*.py")
    return sorted(str(path.relative_to(ROOT)) for path in found if named.fullmatch(path.name))


@dataclass(frozen=True, slots=True)
class Plan:
    """A mutant to try, and which of its stages."""

    room: str
    mutant: Mutant
    stages: Sequence[Sequence[str]]
    survived: int = 0
    """The number of stages that it is known to survive."""


def try_all(plans: Sequence[Plan], copies: Copies, ends_at: float = inf) -> Iterator[Verdict]:
    """Yield the verdict on each mutant, in the order of `plans`.

    Mutants whose tests have not ended at `ends_at`, by the monotonic clock, are left out.
    """

    def try_one(plan: Plan) -> Verdict | None:
        with copies.one() as copy:
            began = time.monotonic()
            for number, stage in enumerate(plan.stages, start=1):
                if number <= plan.survived:
                    continue
                fails = copy.fails(stage, plan.mutant, ends_at) if began < ends_at else None
                if fails is None:
                    return None
                if fails:
                    return Verdict(plan.room, plan.mutant, number, time.monotonic() - began, number)
            tried = len(plan.stages)
            return Verdict(plan.room, plan.mutant, 0, time.monotonic() - began, tried)

    threads = ThreadPoolExecutor(max_workers=copies.count)
    try:
        yield from filter(None, threads.map(try_one, plans))
    finally:
        threads.shutdown(wait=False, cancel_futures=True)
        copies.stop()
        threads.shutdown()


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
