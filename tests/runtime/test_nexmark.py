"""The queries of Nexmark, in one job, have the results that DuckDB has."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from benchmarks.nexmark.expected import Judge
from benchmarks.nexmark.job import JobSpec
from benchmarks.nexmark.processes import run_job, run_killed_job
from benchmarks.nexmark.queries import QUERIES

BY_DAY = ("q14", "q15", "q16", "q17")
"""The queries whose result depends on the time of day."""


def find_differences(spec: JobSpec) -> dict[str, str]:
    judge = Judge(replace(spec.source, splits_count=1, events_per_second=None))
    return {
        query: judge.find_difference(query, Path(spec.directory, query)) for query in spec.queries
    }


def test_every_query_of_nexmark_is_exact(tmp_path: Path) -> None:
    spec = JobSpec(
        queries=tuple(QUERIES),
        events=20_000,
        event_interval_us=5_000,
        parallelism=2,
        directory=str(tmp_path),
    )
    run_job(spec)
    assert find_differences(spec) == dict.fromkeys(QUERIES, "")


def test_queries_by_day_are_exact_over_many_days(tmp_path: Path) -> None:
    spec = JobSpec(
        queries=BY_DAY, events=5_000, event_interval_us=60_000_000, directory=str(tmp_path)
    )
    run_job(spec)
    assert find_differences(spec) == dict.fromkeys(BY_DAY, "")


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "parallelism"), [("heap", 2), ("rocksdb", 3)])
def test_every_query_of_nexmark_is_exact_after_a_slot_and_the_driver_are_killed(
    tmp_path: Path, backend: Any, parallelism: int
) -> None:
    spec = JobSpec(
        queries=tuple(QUERIES),
        events=20_000,
        event_interval_us=5_000,
        directory=str(tmp_path),
        backend=backend,
        parallelism=parallelism,
        events_per_second=4_000,
        checkpoint_interval_s=0.2,
        restarts=True,
    )
    run_killed_job(spec)
    assert find_differences(spec) == dict.fromkeys(QUERIES, "")
