"""Ratios of the stream of Postgres changes to other programs, in turns on one server."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from rich.table import Table

from benchmarks.changes.baselines import (
    Taken,
    fetch_debezium,
    receive_to_nowhere,
    receive_with_debezium,
)
from benchmarks.changes.job_runs import run_job
from benchmarks.changes.workload import TABLE, changes_server, load
from benchmarks.spread import Spread
from benchmarks.tables import figure_table

CHANGES_MAX = 1_000_000


@dataclass(slots=True)
class ChangesFigures:
    """All turns, in which each side ran once."""

    changes: int
    streamed: list[Taken] = field(default_factory=list[Taken])
    received: list[Taken] = field(default_factory=list[Taken])
    """The runs in which pg_recvlogical read the same changes."""
    engine: list[Taken] = field(default_factory=list[Taken])
    """The runs in which Debezium's embedded engine read the same changes."""

    def as_json(self) -> dict[str, object]:
        """Return the figures for `--json`."""
        return {
            "changes": self.changes,
            "stream_changes_per_second": self._rate(self.streamed, self.changes).as_json(),
            "recvlogical_changes_per_second": self._rate(self.received, self.changes).as_json(),
            "stream_ratio": self.stream_ratio.as_json(),
            "debezium_changes_per_second": self._rate(self.engine, self.changes).as_json(),
            "debezium_ratio": self.engine_ratio.as_json(),
            "debezium_cpu_us": _cpu_us(self.engine, self.changes).as_json(),
            "stream_cpu_us": self.stream_cpu_us.as_json(),
        }

    def table(self) -> Table:
        """Return the figures for a person."""
        table = figure_table(
            f"Changes of Postgres: {self.changes:,} changes",
            *("what", "per second", "CPU us each", "onceflow's rate over it"),
        )
        for name, taken, ratio in (
            ("onceflow", self.streamed, None),
            ("pg_recvlogical", self.received, self.stream_ratio),
            ("Debezium", self.engine, self.engine_ratio),
        ):
            table.add_row(
                name,
                self._rate(taken, self.changes).shown(),
                _cpu_us(taken, self.changes).shown(2),
                "" if ratio is None else ratio.shown(2),
            )
        return table

    @property
    def stream_ratio(self) -> Spread:
        """Changes a second, over those of pg_recvlogical in the same turn."""
        return _ratio(self.received, self.streamed)

    @property
    def engine_ratio(self) -> Spread:
        """Changes a second, over those of Debezium in the same turn."""
        return _ratio(self.engine, self.streamed)

    @property
    def stream_cpu_us(self) -> Spread:
        """CPU of driver and slot for each change."""
        return _cpu_us(self.streamed, self.changes)

    def _rate(self, taken: list[Taken], count: int) -> Spread:
        return Spread.of(count / one_run.seconds for one_run in taken)


def _ratio(theirs: list[Taken], ours: list[Taken]) -> Spread:
    pairs = zip(theirs, ours, strict=True)
    return Spread.of(their.seconds / our.seconds for their, our in pairs)


def _cpu_us(taken: list[Taken], count: int) -> Spread:
    return Spread.of(run.cpu_s / count * 1e6 for run in taken)


def measure_changes(changes: int, runs: int, say: Callable[[str], None]) -> ChangesFigures:
    """Measure the stream `runs` times. Every side reads a slot of its own.

    Raises:
        BenchmarkError: A side failed.
    """
    jars = fetch_debezium(say)
    slots = [f"bench_{side}_{run}" for run in range(runs) for side in ("ours", "theirs", "engine")]
    with (
        changes_server() as server,
        tempfile.TemporaryDirectory(prefix="onceflow-bench-") as directory,
    ):
        say(f"changing a table {min(changes, CHANGES_MAX):,} times")
        count, end_lsn = load(server.url, min(changes, CHANGES_MAX), slots)
        figures = ChangesFigures(count)
        for run in range(runs):
            theirs = receive_to_nowhere(server.url, f"bench_theirs_{run}", end_lsn)
            ours = run_job(
                Path(directory), server.url, f"bench_ours_{run}", TABLE, count, copies=False
            )
            engine = receive_with_debezium(
                jars, server.url, f"bench_engine_{run}", count, Path(directory)
            )
            figures.received.append(theirs)
            figures.streamed.append(ours)
            figures.engine.append(engine)
            say(
                f"run {run + 1} of {runs}: {count / ours.seconds:,.0f} changes/s, pg_recvlogical"
                f" {count / theirs.seconds:,.0f}, Debezium {count / engine.seconds:,.0f}"
            )
    return figures
