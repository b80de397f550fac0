"""The tables for a person and the object for a program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.table import Table

from benchmarks.beside_flink import report
from benchmarks.beside_flink.databases import LedgerTurns
from benchmarks.beside_flink.measuring import Turns
from benchmarks.changes.copies import CopyFigures, copies_table
from benchmarks.changes.measuring import ChangesFigures
from benchmarks.durability import Durability
from benchmarks.ratios import ratios
from benchmarks.sinks.measuring import WayFigures
from benchmarks.sinks.report import sinks_as_json, sinks_table
from benchmarks.spread import Spread
from benchmarks.tables import figure_table
from benchmarks.throughput import Measured

CHECKPOINT_PARTS = (
    "duration_ms",
    "alignment_ms",
    "sync_ms",
    "async_ms",
    "append_ms",
    "committed_ms",
)


@dataclass(slots=True)
class Report:
    """Everything that was measured in one call."""

    records: int
    runs: int
    machine: dict[str, object]
    jobs: list[Measured] = field(default_factory=list[Measured])
    durability: Durability = field(default_factory=Durability)
    sinks: list[WayFigures] = field(default_factory=list[WayFigures])
    beside_flink: list[Turns] = field(default_factory=list[Turns])
    ledgers_beside_flink: list[LedgerTurns] = field(default_factory=list[LedgerTurns])
    changes: ChangesFigures | None = None
    copies: Sequence[CopyFigures] = ()
    load_average_end: tuple[float, ...] = ()
    error: str = ""

    def as_json(self) -> dict[str, object]:
        """Return the one object that `--json` prints."""
        return {
            "ok": not self.error,
            "error": self.error,
            "records": self.records,
            "runs": self.runs,
            "machine": self.machine,
            "load_average_end": self.load_average_end,
            "jobs": {job.variant.name: _job_as_json(job) for job in self.jobs},
            "ratios": {name: spread.as_json() for name, spread in ratios(self.jobs).items()},
            **self.durability.as_json(),
            "sinks": sinks_as_json(self.sinks),
            "flink_state": [one.as_json() for one in report.compared(self.beside_flink)],
            "changes": None if self.changes is None else self.changes.as_json(),
            "first_copies": [figures.as_json() for figures in self.copies],
            "flink_databases": [
                ledger.as_json() for ledger in report.compared_ledgers(self.ledgers_beside_flink)
            ],
        }

    def tables(self) -> list[Table]:
        """Return a table for each kind of measurement that was made."""
        tables: list[Table] = []
        if self.jobs:
            tables += [jobs_table(self.jobs, self.records), loaded_checkpoints_table(self.jobs)]
        if found := ratios(self.jobs):
            tables.append(ratios_table(found))
        tables += self.durability.tables()
        if self.sinks:
            tables.append(sinks_table(self.sinks, self.sinks[0].runs[0].rows))
        if self.changes is not None:
            tables.append(self.changes.table())
        if self.copies:
            tables.append(copies_table(self.copies))
        if self.beside_flink:
            tables.append(report.flink_table(self.beside_flink))
        if self.ledgers_beside_flink:
            tables.append(report.ledgers_table(self.ledgers_beside_flink, self.records))
        return tables


def jobs_table(jobs: Sequence[Measured], records: int) -> Table:
    """Return rows a second and CPU of the whole jobs."""
    table = figure_table(
        f"Whole jobs, {records:,} records; CPU in seconds a million records",
        *("job", "rows/s", "engine", "of it slots", "JVM", "driver", "database", "Kafka"),
        *("by chain, CPU us a record", "slot RSS MB"),
    )
    for job in jobs:
        stages = ", ".join(
            f"{chain} {spread.median:.2f}" for chain, spread in job.stage_cpu_us().items()
        )
        rss = max(result.slot_rss_bytes_max for result in job.results) / 1e6
        table.add_row(
            job.variant.name,
            job.rows_per_second.shown(),
            *(
                job.cpu_s_per_million(name).shown(2)
                for name in ("engine", "slots", "jvm", "driver", job.database, "kafka")
            ),
            stages,
            f"{rss:,.0f}",
        )
    return table


def loaded_checkpoints_table(jobs: Sequence[Measured]) -> Table:
    """Return the parts of the checkpoints that the jobs took while they ran."""
    names = [part.removesuffix("_ms") for part in CHECKPOINT_PARTS]
    table = figure_table("Checkpoints under load, ms", "job", "number", *names)
    for job in jobs:
        spreads = [job.checkpoint_ms(part) for part in CHECKPOINT_PARTS]
        table.add_row(
            job.variant.name,
            str(sum(len(result.checkpoints) for result in job.results)),
            *("" if spread is None else spread.shown(1) for spread in spreads),
        )
    return table


def ratios_table(found: dict[str, Spread]) -> Table:
    """Return rows/s of one thing over rows/s of another in the same turn."""
    table = figure_table("Ratios of rows/s", "over / under", "ratio")
    for name, spread in found.items():
        table.add_row(name, spread.shown(2))
    return table


def _job_as_json(job: Measured) -> dict[str, object]:
    parts = {part: job.checkpoint_ms(part) for part in CHECKPOINT_PARTS}
    return {
        "scenario": job.variant.scenario,
        "rows_per_second": job.rows_per_second.as_json(),
        "cpu_s_per_million": {
            name: job.cpu_s_per_million(name).as_json() for name in job.results[0].cpu_s
        },
        "engine_life_cpu_s": job.engine_life_cpu_s.as_json(),
        "stage_cpu_us": {chain: one.as_json() for chain, one in job.stage_cpu_us().items()},
        "slot_rss_bytes_max": max(result.slot_rss_bytes_max for result in job.results),
        "checkpoints": {part: one.as_json() for part, one in parts.items() if one is not None},
    }
