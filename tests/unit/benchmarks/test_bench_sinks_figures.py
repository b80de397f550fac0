"""Tests the output of the benchmark of sinks, and its verdicts."""

from __future__ import annotations

import io
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.sinks.alone import Alone, Loaded, write_alone
from benchmarks.sinks.measuring import WayFigures
from benchmarks.sinks.place import Way
from benchmarks.sinks.report import sinks_as_json, sinks_table
from benchmarks.sinks.rows import BATCH_ROWS, Rows
from rich.console import Console

from onceflow.integration.workload import Payments
from onceflow.sinks import FileSink

PAYMENTS = Payments(records=25_000, accounts=60, seed=3)


def figures(
    seconds: float, commit_ms: float, *, ratio_min: float | None = 0.7, max_ms: float | None = 50
) -> WayFigures:
    """A sink that took so long where the bare load took a second."""
    run = Alone(1000, seconds, 0.5, pre_commit_ms=(5.0,), commit_ms=(commit_ms,))
    way = Way(FileSink, ratio_min=ratio_min, commit_ms_max=max_ms)
    return WayFigures("Postgres", "COPY", "insert", way, [Loaded(1000, 1.0, 0.1)], [run], [run])


def test_rows_are_the_payments_with_each_accounts_running_balance() -> None:
    rows = Rows.of(PAYMENTS)
    assert [batch.num_rows for batch in rows.batches] == [BATCH_ROWS, BATCH_ROWS, 5_000]
    balance: defaultdict[str, int] = defaultdict(int)
    n: defaultdict[str, int] = defaultdict(int)
    ids: list[int] = []
    for batch in rows.batches:
        for row in batch.to_pylist():
            balance[row["account"]] += row["amount"]
            n[row["account"]] += 1
            assert (row["balance"], row["n"]) == (balance[row["account"]], n[row["account"]])
            ids.append(row["id"])
    assert ids == list(range(25_000))
    assert rows.latest == (len(balance), sum(n.values()), sum(balance.values()))


def test_every_row_is_committed_at_barriers_of_the_wanted_size(tmp_path: Path) -> None:
    rows = Rows.of(PAYMENTS)
    target = tmp_path / "files"
    run = write_alone(
        FileSink(str(target)), rows.batches, barrier_rows=15_000, directory=tmp_path / "staging"
    )
    assert run.rows == 25_000
    assert len(run.pre_commit_ms) == len(run.commit_ms) == 2, "two batches, and the rest"
    assert len(list(target.glob("*.parquet"))) == 2


def test_figures_are_of_the_same_turn_and_goals_are_judged_at_the_median() -> None:
    met = figures(seconds=1.25, commit_ms=12)
    assert met.ratio.median == pytest.approx(0.8)
    assert met.cpu_s_per_million.median == pytest.approx(500)
    assert met.missed == ()
    assert figures(seconds=2, commit_ms=12).missed == ("ratio 0.50 under 0.7",)
    assert figures(seconds=1, commit_ms=80).missed == ("commit 80 ms over 50 ms",)
    assert figures(seconds=9, commit_ms=999, ratio_min=None, max_ms=None).missed == ()


def test_table_and_object_say_the_same_about_the_goals() -> None:
    chosen = [
        figures(1, 1),
        replace(figures(2, 1), name="slow"),
        replace(figures(9, 9, ratio_min=None, max_ms=None), name="free"),
    ]
    assert [one["missed"] for one in sinks_as_json(chosen)] == [[], ["ratio 0.50 under 0.7"], []]
    console = Console(width=200, file=io.StringIO(), record=True)
    console.print(sinks_table(chosen, 1000))
    lines = console.export_text().splitlines()
    assert sum("0.7, 50 ms: met" in line for line in lines) == 1
    assert sum("slow" in line and "0.7, 50 ms: missed" in line for line in lines) == 1
    assert sum("COPY" in line for line in lines) == 1, "the bare load stands once"
