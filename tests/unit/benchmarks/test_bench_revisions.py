"""Tests the verdicts of `script/bench --compare` and `--check` about measured figures."""

from __future__ import annotations

import json

from benchmarks.promises import PATH, find_broken, read_promises
from benchmarks.revisions import Comparison, compute_ratios, has_fallen, read_figures
from benchmarks.spread import Spread


def test_a_figure_has_fallen_only_if_it_was_worse_in_every_turn() -> None:
    assert has_fallen(Spread.of([0.9, 0.95, 0.99]))
    assert not has_fallen(Spread.of([0.9, 0.95, 1.01]))
    assert not has_fallen(Spread.of([0.97, 0.98, 0.99]))


def test_ratios_divide_figures_of_the_same_turn_and_skip_what_one_revision_lacks() -> None:
    turns = [({"a": 2.0, "new": 1.0}, {"a": 1.0}), ({"a": 6.0, "new": 1.0}, {"a": 2.0})]
    assert compute_ratios(turns) == {"a": Spread(2.5, 2.0, 3.0, 2)}


def test_less_processor_time_is_better_as_more_rows_are() -> None:
    def report(rows: float, cpu_s: float) -> dict[str, object]:
        job = {
            "rows_per_second": {"median": rows},
            "cpu_s_per_million": {"engine": {"median": cpu_s}},
        }
        return {"jobs": {"ledger, heap": job}, "sinks": []}

    ratios = compute_ratios([(read_figures(report(100, 1)), read_figures(report(200, 4)))])
    assert {name: ratio.median for name, ratio in ratios.items()} == {
        "ledger, heap: rows/s": 0.5,
        "ledger, heap: rows by engine CPU": 4.0,
    }
    assert Comparison("abc", ratios).fallen == ("ledger, heap: rows/s",)


def test_a_promise_is_broken_by_a_ratio_that_is_below_it_in_every_turn() -> None:
    promises = {"a": 0.9, "b": 0.9, "not measured": 1.0}
    measured = {"a": Spread.of([0.7, 0.8]), "b": Spread.of([0.8, 0.95]), "c": Spread.of([0.1])}
    assert find_broken(measured, promises) == ["a: 0.75 (0.70-0.80) where 0.90 is promised"]
    assert read_promises() == json.loads(PATH.read_text())
