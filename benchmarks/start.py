"""Measures the time of a new job until its first visible row, by the kind of its Spark session.

    python -m benchmarks.start [--runs 5]

Spark's own builder and `onceflow.session` in turns, each in a process of its own; the archive of
classes, which the first session of a machine has made, is there before. Seconds: median
(least-greatest).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.spread import Spread
from benchmarks.stage import BenchmarkError
from onceflow.connectors.spark.class_archive import archive_classes

_KINDS = {"builder": "SparkSession.builder", "session": "onceflow.session"}
_TIMEOUT_S = 300.0


def start(
    runs: Annotated[int, typer.Option(help="Turns; medians are shown.", min=1)] = 5,
) -> None:
    """Measure both starts in turns, and print a row for each step."""
    console = Console(stderr=True, highlight=False)
    archive_classes()
    measured: dict[str, list[dict[str, float]]] = {kind: [] for kind in _KINDS}
    for run in range(runs):
        for kind in _KINDS if run % 2 == 0 else reversed(_KINDS):
            measured[kind].append(_measure(kind))
            console.print(f"run {run + 1} of {runs}: {kind} {measured[kind][-1]}", markup=False)
    table = Table("seconds from the start of the process", *_KINDS.values())
    for step in measured["builder"][0]:
        figures = (Spread.of(turn[step] for turn in measured[kind]) for kind in _KINDS)
        table.add_row(step, *(figure.shown(1) for figure in figures))
    load = ", ".join(f"{one:.1f}" for one in os.getloadavg())
    Console(highlight=False).print(table, f"load average {load}")


def _measure(kind: str) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.first_row", kind, str(time.time())],
        capture_output=True,
        check=False,
        timeout=_TIMEOUT_S,
    )
    if done.returncode != 0:
        raise BenchmarkError(f"benchmarks.first_row failed: {done.stderr.decode()[-2000:]}")
    seconds: dict[str, float] = json.loads(done.stdout)
    return seconds


if __name__ == "__main__":
    typer.run(start)
