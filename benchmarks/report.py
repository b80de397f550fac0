"""The tables for a person and the object for a program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from rich.table import Table

from benchmarks.beside_flink import report
from benchmarks.beside_flink.databases import LedgerTurns
from benchmarks.beside_flink.measuring import Turns
from benchmarks.checkpoints import IdleCheckpoints
from benchmarks.durability import Durability
from benchmarks.limits import Figure
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
    limits: list[dict[str, Figure]] = field(default_factory=list[dict[str, Figure]])
    idle: list[IdleCheckpoints] = field(default_factory=list[IdleCheckpoints])
    durability: Durability = field(default_factory=Durability)
    sinks: list[WayFigures] = field(default_factory=list[WayFigures])
    state: dict[str, float] = field(default_factory=dict[str, float])
    beside_flink: list[Turns] = field(default_factory=list[Turns])
    ledgers_beside_flink: list[LedgerTurns] = field(default_factory=list[LedgerTurns])
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
            "jobs": {one.variant.name: _job_as_json(one) for one in self.jobs},
            "limits": {
                name: {part: value.as_json() for part, value in parts.items()}
                for name, parts in limits_spread(self.limits).items()
            },
            "ratios": {
                name: spread.as_json() for name, spread in ratios(self.jobs, self.limits).items()
            },
            "idle_checkpoints": [asdict(one) for one in self.idle],
            **self.durability.as_json(),
            "sinks": sinks_as_json(self.sinks),
            "state": self.state,
            "flink_state": [one.as_json() for one in report.compared(self.beside_flink)],
            "flink_databases": [
                one.as_json() for one in report.compared_ledgers(self.ledgers_beside_flink)
            ],
        }

    def tables(self) -> list[Table]:
        """Return a table for each kind of measurement that was made."""
        tables: list[Table] = []
        if self.jobs:
            tables += [jobs_table(self.jobs, self.records), loaded_checkpoints_table(self.jobs)]
        if self.limits:
            tables.append(limits_table(self.limits))
        if found := ratios(self.jobs, self.limits):
            tables.append(ratios_table(found))
        if self.idle:
            tables.append(idle_table(self.idle))
        tables += self.durability.tables()
        if self.sinks:
            tables.append(sinks_table(self.sinks, self.sinks[0].runs[0].rows))
        if self.state:
            tables.append(state_table(self.state))
        if self.beside_flink:
            tables.append(report.flink_table(self.beside_flink))
        if self.ledgers_beside_flink:
            tables.append(report.ledgers_table(self.ledgers_beside_flink, self.records))
        return tables


def limits_spread(runs: Sequence[dict[str, Figure]]) -> dict[str, dict[str, Spread]]:
    """Return each raw limit over all runs."""
    if not runs:
        return {}
    return {
        name: {part: Spread.of(run[name][part] for run in runs) for part in parts}
        for name, parts in runs[0].items()
    }


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


def limits_table(runs: Sequence[dict[str, Figure]]) -> Table:
    """Return what broker and database allow by themselves."""
    table = figure_table("Raw limits", "loop", "rows/s", "client CPU s/M", "Postgres", "Kafka")
    for name, parts in limits_spread(runs).items():
        table.add_row(
            name,
            parts["rows_per_second"].shown(),
            *(
                parts[f"cpu_s_per_million_{group}"].shown(2)
                for group in ("client", "postgres", "kafka")
            ),
        )
    return table


def ratios_table(found: dict[str, Spread]) -> Table:
    """Return rows/s of one thing over rows/s of another in the same turn."""
    table = figure_table("Ratios of rows/s", "over / under", "ratio")
    for name, spread in found.items():
        table.add_row(name, spread.shown(2))
    return table


def idle_table(idle: Sequence[IdleCheckpoints]) -> Table:
    """Return the percentiles of an idle job's checkpoints."""
    table = figure_table("Checkpoints of an idle job, ms", "backend", "part", "p50", "p99")
    for one in idle:
        for part in one.p50:
            name = part.removesuffix("_ms")
            table.add_row(one.backend, name, f"{one.p50[part]:.1f}", f"{one.p99[part]:.1f}")
    return table


def state_table(state: dict[str, float]) -> Table:
    """Return the figures of benchmarks/state.py."""
    table = figure_table("Keyed state, one thread", "figure", "value")
    for name, value in state.items():
        table.add_row(name, f"{value:,.2f}")
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
