"""Ratios of the source of Postgres changes to other programs, in turns on one server."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from rich.table import Table

from benchmarks.changes.baselines import (
    Taken,
    copy_to_nowhere,
    fetch_debezium,
    receive_to_nowhere,
    receive_with_debezium,
)
from benchmarks.changes.job import ChangesResult, ChangesSpec
from benchmarks.changes.workload import changes_server, count_rows, load
from benchmarks.spread import Spread
from benchmarks.stage import ROOT, BenchmarkError
from benchmarks.tables import figure_table

CHANGES_MAX = 1_000_000
_TIMEOUT_S = 900.0


@dataclass(slots=True)
class ChangesFigures:
    """All turns, in which each side ran once."""

    changes: int
    rows: int
    """The number of rows in the table that was copied."""
    streamed: list[Taken] = field(default_factory=list[Taken])
    received: list[Taken] = field(default_factory=list[Taken])
    """The runs in which pg_recvlogical read the same changes."""
    engine: list[Taken] = field(default_factory=list[Taken])
    """The runs in which Debezium's embedded engine read the same changes."""
    copied: list[Taken] = field(default_factory=list[Taken])
    bare_copied: list[Taken] = field(default_factory=list[Taken])

    def as_json(self) -> dict[str, object]:
        """Return the figures for `--json`."""
        return {
            "changes": self.changes,
            "rows": self.rows,
            "stream_changes_per_second": self._rate(self.streamed, self.changes).as_json(),
            "recvlogical_changes_per_second": self._rate(self.received, self.changes).as_json(),
            "stream_ratio": self.stream_ratio.as_json(),
            "debezium_changes_per_second": self._rate(self.engine, self.changes).as_json(),
            "debezium_ratio": self.engine_ratio.as_json(),
            "debezium_cpu_us": _cpu_us(self.engine, self.changes).as_json(),
            "stream_cpu_us": self.stream_cpu_us.as_json(),
            "copy_rows_per_second": self._rate(self.copied, self.rows).as_json(),
            "bare_copy_rows_per_second": self._rate(self.bare_copied, self.rows).as_json(),
            "copy_ratio": self.copy_ratio.as_json(),
            "copy_cpu_us": self.copy_cpu_us.as_json(),
        }

    def table(self) -> Table:
        """Return the figures for a person."""
        table = figure_table(
            f"Changes of Postgres: {self.changes:,} changes, {self.rows:,} rows",
            *("what", "per second", "CPU us each", "onceflow's rate over it"),
        )
        for name, taken, count, ratio in (
            ("changes, onceflow", self.streamed, self.changes, None),
            ("changes, pg_recvlogical", self.received, self.changes, self.stream_ratio),
            ("changes, Debezium", self.engine, self.changes, self.engine_ratio),
            ("first copy, onceflow", self.copied, self.rows, None),
            ("first copy, COPY without decoding", self.bare_copied, self.rows, self.copy_ratio),
        ):
            table.add_row(
                name,
                self._rate(taken, count).shown(),
                _cpu_us(taken, count).shown(2),
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
    def copy_ratio(self) -> Spread:
        """Rows a second, over those of bare COPYs in the same turn."""
        return _ratio(self.bare_copied, self.copied)

    @property
    def stream_cpu_us(self) -> Spread:
        """CPU of driver and slot for each change."""
        return _cpu_us(self.streamed, self.changes)

    @property
    def copy_cpu_us(self) -> Spread:
        """CPU of driver and slot for each copied row."""
        return _cpu_us(self.copied, self.rows)

    def _rate(self, taken: list[Taken], count: int) -> Spread:
        return Spread.of(count / one_run.seconds for one_run in taken)


def _ratio(theirs: list[Taken], ours: list[Taken]) -> Spread:
    pairs = zip(theirs, ours, strict=True)
    return Spread.of(their.seconds / our.seconds for their, our in pairs)


def _cpu_us(taken: list[Taken], count: int) -> Spread:
    return Spread.of(run.cpu_s / count * 1e6 for run in taken)


def measure_changes(changes: int, runs: int, say: Callable[[str], None]) -> ChangesFigures:
    """Measure both directions `runs` times. Every side reads a slot of its own.

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
        figures = ChangesFigures(count, count_rows(server.url))
        for run in range(runs):
            theirs = receive_to_nowhere(server.url, f"bench_theirs_{run}", end_lsn)
            ours = _run_job(directory, run, server.url, f"bench_ours_{run}", count, copies=False)
            engine = receive_with_debezium(
                jars, server.url, f"bench_engine_{run}", count, Path(directory)
            )
            bare = copy_to_nowhere(server.url)
            copied = _run_job(
                directory, run, server.url, f"bench_copy_{run}", figures.rows, copies=True
            )
            figures.received.append(theirs)
            figures.streamed.append(ours)
            figures.engine.append(engine)
            figures.bare_copied.append(bare)
            figures.copied.append(copied)
            say(
                f"run {run + 1} of {runs}: {count / ours.seconds:,.0f} changes/s, pg_recvlogical"
                f" {count / theirs.seconds:,.0f}, Debezium {count / engine.seconds:,.0f};"
                f" copy {figures.rows / copied.seconds:,.0f} rows/s,"
                f" bare COPY {figures.rows / bare.seconds:,.0f}"
            )
    return figures


def _run_job(directory: str, run: int, url: str, slot: str, rows: int, *, copies: bool) -> Taken:
    own = Path(directory, f"{'copy' if copies else 'stream'}-{run}")
    own.mkdir()
    spec, result, log = own / "spec.json", own / "result.json", own / "log"
    spec.write_bytes(
        msgspec.json.encode(
            ChangesSpec(url=url, slot=slot, rows=rows, copies=copies, directory=str(own))
        )
    )
    command = [sys.executable, "-m", "benchmarks.changes.job", str(spec), str(result)]
    with log.open("wb") as output:
        status = subprocess.run(
            command, cwd=ROOT, stdout=output, stderr=output, check=False, timeout=_TIMEOUT_S
        ).returncode
    if not result.exists():
        tail = log.read_text(errors="replace")[-2_000:]
        raise BenchmarkError(f"the job of {slot} ended with {status}:\n{tail}")
    measured = msgspec.json.decode(result.read_bytes(), type=ChangesResult)
    return Taken(measured.seconds, measured.cpu_s)
