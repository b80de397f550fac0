"""Rows a second and CPU a million rows of whole jobs, in turns, so that ratios hold.

Every variant runs once before any runs again: a machine that slows down slows all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from benchmarks.job_spec import Backend, Database, JobResult, JobSpec
from benchmarks.spread import Spread
from benchmarks.stage import Stage

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Variant:
    """One job to measure and what it is called."""

    scenario: str
    name: str
    spec: JobSpec


@dataclass(frozen=True, slots=True)
class Measured:
    """All runs of one variant."""

    variant: Variant
    results: tuple[JobResult, ...]

    @property
    def records(self) -> int:
        """Records of one run."""
        return self.variant.spec.records

    @property
    def database(self) -> Database:
        """The server whose CPU is shown; the one that idles, where none is written to."""
        sink = self.variant.spec.sink
        return "postgres" if sink == "discard" else sink

    @property
    def rates(self) -> tuple[float, ...]:
        """Rows a second of each run, from the start of reading to the last row committed."""
        return tuple(self.records / result.seconds for result in self.results)

    @property
    def rows_per_second(self) -> Spread:
        """The same over all runs."""
        return Spread.of(self.rates)

    def cpu_s_per_million(self, group: str) -> Spread:
        """CPU seconds of a group of processes in the same time, a million records."""
        return Spread.of(result.cpu_s[group] / self.records * 1e6 for result in self.results)

    @property
    def engine_life_cpu_s(self) -> Spread:
        """CPU seconds of the engine from the start of its process, not a million records."""
        return Spread.of(result.engine_life_cpu_s for result in self.results)

    def stage_cpu_us(self) -> dict[str, Spread]:
        """CPU microseconds a record of each chain's threads."""
        return {
            chain: Spread.of(result.stage_cpu_us.get(chain, 0.0) for result in self.results)
            for chain in self.results[0].stage_cpu_us
        }

    def checkpoint_ms(self, part: str) -> Spread | None:
        """One part of all completed checkpoints of all runs."""
        values = [
            getattr(checkpoint, part) for run in self.results for checkpoint in run.checkpoints
        ]
        known = [float(value) for value in values if value is not None]
        return Spread.of(known) if known else None


def variants(
    scenarios: Sequence[str], records: int, backends: Sequence[Backend], topic: str
) -> list[Variant]:
    """Return what is to be measured for `scenarios`."""
    found: list[Variant] = []

    def add(scenario: str, name: str, spec: JobSpec) -> None:
        if scenario in scenarios:
            found.append(Variant(scenario, name, spec))

    for backend in backends:
        spec = JobSpec(records=records, topic=topic, backend=backend)
        add("ledger", f"ledger, {backend}", spec)
    spec = JobSpec(records=records, topic=topic, backend=backends[0])
    of = _replacing(spec)
    if "ledger" not in scenarios:
        compared_in = ("delivery", "databases", "storage", "unaligned")
        compared = next((one for one in compared_in if one in scenarios), "")
        add(compared, f"ledger, {backends[0]}", spec)
    nowhere = of(sink="discard", source="generated")
    add("unaligned", f"generated to nowhere, {backends[0]}", nowhere)
    overtaking = f"with barriers that overtake, {backends[0]}"
    add("unaligned", f"ledger {overtaking}", of(barriers="overtaking"))
    add(
        "unaligned",
        f"generated to nowhere {overtaking}",
        of(sink="discard", source="generated", barriers="overtaking"),
    )
    add("storage", f"ledger with state in a bucket, {backends[0]}", of(storage="bucket"))
    add("delivery", f"ledger at least once, {backends[0]}", of(delivery="at_least_once"))
    add("databases", f"ledger by staged rows, {backends[0]}", of(commit_mode="ledger"))
    add("databases", f"ledger into MySQL, {backends[0]}", of(sink="mysql"))
    add("databases", f"ledger into MariaDB, {backends[0]}", of(sink="mariadb"))
    return found


def measure(stage: Stage, chosen: Sequence[Variant], runs: int, say: Say) -> list[Measured]:
    """Run every variant `runs` times, in turns.

    Raises:
        BenchmarkError: A run failed, or what it wrote is wrong.
    """
    results: dict[str, list[JobResult]] = {variant.name: [] for variant in chosen}
    for run in range(runs):
        for variant in chosen:
            result = stage.run(variant.spec)
            results[variant.name].append(result)
            rate = variant.spec.records / result.seconds
            say(f"run {run + 1} of {runs}: {variant.name}: {rate:,.0f} rows/s")
    return [Measured(variant, tuple(results[variant.name])) for variant in chosen]


def _replacing(spec: JobSpec) -> Callable[..., JobSpec]:
    def replaced(**changes: str) -> JobSpec:
        return msgspec.structs.replace(spec, **changes)

    return replaced
