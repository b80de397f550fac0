"""Two revisions side by side: `script/bench --compare REV`.

Both are measured in turns on one machine, in one environment: the other revision is checked out
beside this one and imported from there. A ratio is this revision's figure divided by the other's
of the same turn. Every second turn runs in reverse, so that a machine that warms up favours none.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.spread import Spread
from benchmarks.stage import ROOT, BenchmarkError
from benchmarks.tables import figure_table

MEDIAN_MIN = 0.97
"""A figure whose median is below it, and that was worse in every turn, has fallen."""

Figures = dict[str, float]
"""By name: rates, or the reciprocals of costs, so that more is better in all of them."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Ratios of this revision to another one, a spread for each figure that both have."""

    base: str
    ratios: dict[str, Spread]

    @property
    def fallen(self) -> tuple[str, ...]:
        """The figures that are worse by more than their spread."""
        return tuple(name for name, ratio in self.ratios.items() if has_fallen(ratio))

    def as_json(self) -> dict[str, object]:
        """Return it for `--json`."""
        return {
            "base": self.base,
            "ratios": {name: ratio.as_json() for name, ratio in self.ratios.items()},
            "fallen": self.fallen,
        }

    def table(self) -> Table:
        """Return a row for each figure; what has fallen is marked."""
        table = figure_table(
            f"This revision / {self.base}; over 1 is better", "figure", "ratio", ""
        )
        for name, ratio in self.ratios.items():
            table.add_row(name, ratio.shown(2), "fallen" if has_fallen(ratio) else "")
        return table


def has_fallen(ratio: Spread) -> bool:
    """True if the ratio is below `MEDIAN_MIN`, and below 1 in every turn."""
    return ratio.median < MEDIAN_MIN and ratio.greatest < 1


def compare_revisions(
    revision: str, arguments: Sequence[str], runs: int, say: Callable[[str], None]
) -> Comparison:
    """Measure both revisions `runs` times with the benchmark's own `arguments`.

    Raises:
        BenchmarkError: There is no such revision, or a run of either failed.
    """
    with _check_out(revision) as (base, directory):
        turns: list[tuple[Figures, Figures]] = []
        for run in range(runs):
            measured: dict[Path, Figures] = {}
            for root in (ROOT, directory) if run % 2 else (directory, ROOT):
                which = "this revision" if root == ROOT else base
                say(f"turn {run + 1} of {runs}: {which}")
                measured[root] = _measure(root, arguments)
            turns.append((measured[ROOT], measured[directory]))
    return Comparison(base, compute_ratios(turns))


def compute_ratios(turns: Sequence[tuple[Figures, Figures]]) -> dict[str, Spread]:
    """Return the spread of this by other of each figure that every turn has on both sides."""
    names = [name for name in turns[0][0] if all(name in one for turn in turns for one in turn)]
    return {name: Spread.of(this[name] / other[name] for this, other in turns) for name in names}


def read_figures(report: dict[str, Any]) -> Figures:
    """Return the figures of one report of `--json`; costs as their reciprocals."""
    figures: Figures = {}
    for name, job in report["jobs"].items():
        figures[f"{name}: rows/s"] = job["rows_per_second"]["median"]
        figures[f"{name}: rows by engine CPU"] = 1 / job["cpu_s_per_million"]["engine"]["median"]
    for way in report["sinks"]:
        figures[f"{way['target']}, {way['way']}: rows/s"] = way["rows_per_second"]["median"]
    return {name: value for name, value in figures.items() if value > 0}


def _measure(root: Path, arguments: Sequence[str]) -> Figures:
    command = [sys.executable, "-m", "benchmarks", "--json", "--runs", "1", *arguments]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), str(root / "src")])}
    done = subprocess.run(command, cwd=root, env=environment, stdout=subprocess.PIPE, check=False)
    if done.returncode != 0:
        raise BenchmarkError(f"the benchmark of {root} failed: its error stands above")
    return read_figures(json.loads(done.stdout))


@contextmanager
def _check_out(revision: str) -> Generator[tuple[str, Path]]:
    """Yield the short name of `revision`, and a directory with its files."""
    named = _git("rev-parse", "--short", "--verify", f"{revision}^{{commit}}")
    with tempfile.TemporaryDirectory(prefix="onceflow-bench-") as parent:
        directory = Path(parent) / named
        _git("worktree", "add", "--detach", str(directory), named)
        try:
            yield named, directory
        finally:
            _git("worktree", "remove", "--force", str(directory))


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, check=False)
    if done.returncode != 0:
        raise BenchmarkError(f"git {' '.join(arguments)}: {done.stderr.decode().strip()}")
    return done.stdout.decode().strip()
