"""The arithmetic of the benchmark: ratios of the same turn, spreads, CPU of whole trees."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import msgspec
import pytest
from benchmarks.cpu import tree_cpu_s
from benchmarks.job_spec import AttemptStart, JobResult, JobSpec
from benchmarks.ratios import ratios
from benchmarks.report import Report
from benchmarks.spread import Spread, percentile
from benchmarks.throughput import Measured, Variant, variants


def ran(seconds: float) -> JobResult:
    """Return a driver process's report of a run, as it is decoded from JSON."""
    told: dict[str, object] = {
        "state": "finished",
        "imported_at_s": 0.0,
        "session_at_s": 0.0,
        "start": dict.fromkeys(AttemptStart.__struct_fields__, 0.0),
        "reading_at_s": 1.0,
        "committed_at_s": 1.0 + seconds,
        "cpu_s": {
            "engine": 3.0,
            "driver": 0.5,
            "jvm": 0.5,
            "slots": 2.0,
            "postgres": 1.0,
            "kafka": 0.5,
        },
        "engine_life_cpu_s": 9.0,
        "stage_cpu_us": {"payments": 0.4},
        "slot_rss_bytes_max": 1,
        "checkpoints": [],
    }
    return msgspec.convert(told, JobResult)


def measured(name: str, *seconds: float) -> Measured:
    spec = JobSpec(records=1_000_000)
    return Measured(Variant("ledger", name, spec), tuple(ran(second) for second in seconds))


def test_a_ratio_compares_runs_of_the_same_turn() -> None:
    """The second turn was twice as slow for both: the ratio is the same in each."""
    jobs = [measured("ledger, heap", 2.0, 4.0), measured("ledger at least once, heap", 1.8, 3.6)]
    (name,) = (found := ratios(jobs))
    assert name == "exactly once / at least once, heap"
    assert found[name].least == pytest.approx(0.9)
    assert found[name].greatest == pytest.approx(0.9)


def test_a_ratio_needs_both_sides() -> None:
    assert ratios([measured("ledger, rocksdb", 2.0)]) == {}
    assert ratios([]) == {}


def test_every_ratio_names_variants_that_are_measured() -> None:
    """A variant that is renamed must not silently drop its ratios."""
    scenarios = ("ledger", "delivery", "databases", "storage", "unaligned")
    found = [
        variant
        for backend in ("heap", "rocksdb")
        for variant in variants(scenarios, 1, [backend], "payments")
    ]
    jobs = [Measured(variant, (ran(1.0),)) for variant in found]
    assert len(ratios(jobs)) == 2 * 7 + 1


@pytest.mark.parametrize("scenario", ["delivery", "databases", "storage", "unaligned"])
def test_what_is_compared_with_the_ledger_runs_it_too(scenario: str) -> None:
    found = variants([scenario], 1, ["heap"], "payments")
    assert [variant.name for variant in found].count("ledger, heap") == 1
    assert {variant.scenario for variant in found} == {scenario}


def test_the_report_shows_the_same_figures_to_people_and_programs() -> None:
    jobs = [measured("ledger, heap", 2.0), measured("ledger at least once, heap", 1.0)]
    report = Report(records=1_000_000, runs=1, machine={}, jobs=jobs)
    titles = [str(table.title) for table in report.tables()]
    assert any(title.startswith("Whole jobs") for title in titles)
    assert "Ratios of rows/s" in titles
    found = report.as_json()
    assert found["ok"] is True
    assert found["ratios"] == {
        "exactly once / at least once, heap": {"median": 0.5, "min": 0.5, "max": 0.5, "runs": 1}
    }


def test_cpu_of_a_tree_counts_children_that_live_and_that_have_ended() -> None:
    """A shell whose first child has burned and ended, and whose second one sleeps."""
    burn = "import time\nwhile time.process_time() < 0.3: pass"
    script = f'"{sys.executable}" -c "{burn}"; echo burned; exec sleep 60'
    with subprocess.Popen(["bash", "-c", script], stdout=subprocess.PIPE) as shell:
        try:
            assert shell.stdout is not None
            assert shell.stdout.readline() == b"burned\n"
            assert tree_cpu_s(shell.pid) >= 0.29
        finally:
            shell.kill()
    assert tree_cpu_s(shell.pid) == 0.0


def test_cpu_of_this_process_grows_as_it_works() -> None:
    before = tree_cpu_s(os.getpid())
    until = time.process_time() + 0.2
    while time.process_time() < until:
        pass
    assert tree_cpu_s(os.getpid()) - before >= 0.18


def test_spread_and_percentiles_are_of_the_values_themselves() -> None:
    assert Spread.of([3.0, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0, 3)
    assert percentile([5.0, 1.0, 3.0], 50) == 3.0
    assert percentile([float(value) for value in range(1, 101)], 99) == 99.0
    assert percentile([7.0], 99) == 7.0
