"""Ratios of the first copy of a Postgres table to ADBC and to binary COPYs, in turns.

ADBC has two connections, each with a COPY of half of the table, and makes Arrow columns in C++
without Python's global lock. The source has two connections, too, but it reads chunks that a crash
can continue, and its figures include the engine and a checkpoint each second.

On a machine with other programs the CPU of both sides, clients and server apart, says more than
the rates do.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from rich.table import Table

from benchmarks.changes.baselines import Taken, copy_to_nowhere, copy_with_adbc
from benchmarks.changes.job_runs import run_job
from benchmarks.changes.workload import changes_server, load_copies
from benchmarks.cpu import tree_cpu_s
from benchmarks.spread import Spread
from benchmarks.tables import figure_table

ROWS_MAX = 2_000_000


@dataclass(frozen=True, slots=True)
class CopyFigures:
    """All turns of one table, in which each side ran once."""

    table: str
    rows: int
    ours: list[Taken] = field(default_factory=list[Taken])
    adbc: list[Taken] = field(default_factory=list[Taken])
    bare: list[Taken] = field(default_factory=list[Taken])
    """The runs in which the bytes of two COPYs were dropped."""

    def as_json(self) -> dict[str, object]:
        """Return the figures for `--json`."""
        return {
            "table": self.table,
            "rows": self.rows,
            "ratio_to_adbc": self.ratio_to(self.adbc).as_json(),
            "ratio_to_bare_copy": self.ratio_to(self.bare).as_json(),
            "cpu_ratio_to_adbc": self.cpu_ratio_to(self.adbc).as_json(),
            **{
                name: {
                    "rows_per_second": self._rate(runs).as_json(),
                    "client_cpu_us": self._client_us(runs).as_json(),
                    "server_cpu_us": self._server_us(runs).as_json(),
                }
                for name, runs in (("ours", self.ours), ("adbc", self.adbc), ("bare", self.bare))
            },
        }

    def ratio_to(self, others: Sequence[Taken]) -> Spread:
        """Return our rows a second, over those of another side in the same turn."""
        pairs = zip(others, self.ours, strict=True)
        return Spread.of(other.seconds / own.seconds for other, own in pairs)

    def cpu_ratio_to(self, others: Sequence[Taken]) -> Spread:
        """Return the CPU of another side and its server, over ours in the same turn."""
        pairs = zip(others, self.ours, strict=True)
        return Spread.of(_whole_cpu_s(other) / _whole_cpu_s(own) for other, own in pairs)

    def add_to(self, table: Table) -> None:
        """Add a line for each side."""
        for name, runs, is_ours in (
            ("onceflow", self.ours, True),
            ("two COPYs by ADBC", self.adbc, False),
            ("two COPYs without decoding", self.bare, False),
        ):
            table.add_row(
                f"{self.table}, {self.rows:,} rows: {name}",
                self._rate(runs).shown(),
                self._client_us(runs).shown(2),
                self._server_us(runs).shown(2),
                "" if is_ours else self.ratio_to(runs).shown(2),
                "" if is_ours else self.cpu_ratio_to(runs).shown(2),
            )

    def _rate(self, runs: Sequence[Taken]) -> Spread:
        return Spread.of(self.rows / run.seconds for run in runs)

    def _client_us(self, runs: Sequence[Taken]) -> Spread:
        return Spread.of(run.cpu_s / self.rows * 1e6 for run in runs)

    def _server_us(self, runs: Sequence[Taken]) -> Spread:
        return Spread.of(run.server_cpu_s / self.rows * 1e6 for run in runs)


def _whole_cpu_s(run: Taken) -> float:
    return run.cpu_s + run.server_cpu_s


def copies_table(copies: Sequence[CopyFigures]) -> Table:
    """Return the figures for a person."""
    table = figure_table(
        "First copies of Postgres tables",
        *("what", "rows/s", "client CPU us", "server CPU us"),
        *("onceflow's rate over it", "its CPU over onceflow's"),
    )
    for figures in copies:
        figures.add_to(table)
    return table


def measure_copies(rows: int, runs: int, say: Callable[[str], None]) -> Sequence[CopyFigures]:
    """Copy each table `runs` times with each side.

    Raises:
        BenchmarkError: A side failed.
    """
    with (
        changes_server() as server,
        tempfile.TemporaryDirectory(prefix="onceflow-bench-") as directory,
    ):
        assert server.pid is not None
        pid = server.pid
        say(f"loading tables of up to {min(rows, ROWS_MAX):,} rows")
        counts = load_copies(server.url, min(rows, ROWS_MAX))
        copies = [CopyFigures(table, count) for table, count in counts.items()]
        for run in range(runs):
            for figures in copies:
                table, count = figures.table, figures.rows
                slot = f"bench_{table}_{run}"
                copy = partial(
                    run_job, Path(directory), server.url, slot, table, count, copies=True
                )
                ours = _add_server_cpu(pid, copy)
                adbc = _add_server_cpu(pid, partial(copy_with_adbc, server.url, table))
                bare = _add_server_cpu(pid, partial(copy_to_nowhere, server.url, table))
                figures.ours.append(ours)
                figures.adbc.append(adbc)
                figures.bare.append(bare)
                say(
                    f"run {run + 1} of {runs}, {table}: {count / ours.seconds:,.0f} rows/s, ADBC"
                    f" {count / adbc.seconds:,.0f}, bare COPY {count / bare.seconds:,.0f}; CPU of"
                    f" client and server {ours.cpu_s:.2f} + {ours.server_cpu_s:.2f} s, ADBC"
                    f" {adbc.cpu_s:.2f} + {adbc.server_cpu_s:.2f} s"
                )
    return copies


def _add_server_cpu(pid: int, run: Callable[[], Taken]) -> Taken:
    """Return the times of `run`, and the CPU that the server's processes had meanwhile."""
    before = tree_cpu_s(pid)
    taken = run()
    return Taken(taken.seconds, taken.cpu_s, tree_cpu_s(pid) - before)
