"""Batches lose and double no row in any schedule, and the check of that can fail."""

from __future__ import annotations

import os

import pytest
from tests.simulation.batch_mutants import BATCH_MUTANTS
from tests.simulation.batch_world import Rules
from tests.simulation.batches import run_batches
from tests.simulation.caught import BATCHES_CAUGHT_BY

from onceflow.core.protocol.batches import RETAINED_ATTEMPTS

SEED = int(os.environ.get("ONCEFLOW_TEST_SEED", "1"))
SCHEDULES = int(os.environ.get("ONCEFLOW_TEST_SCHEDULES", "2000")) // 2
MUTANT_SCHEDULES_MAX = 1_000
"""Every one is caught within some 500."""


def test_no_row_of_a_batch_is_lost_or_doubled_in_random_schedules() -> None:
    outcomes = [run_batches(seed) for seed in range(SEED, SEED + SCHEDULES)]
    failed = [outcome for outcome in outcomes if outcome.violation]
    if failed:
        first = min(failed, key=lambda outcome: len(outcome.trace))
        pytest.fail(
            f"seed {first.seed}: {first.violation}\n" + "\n".join(first.trace[-40:]), pytrace=False
        )
    assert sum(outcome.kills for outcome in outcomes) > SCHEDULES
    assert any(outcome.refused for outcome in outcomes)
    assert any(outcome.lost for outcome in outcomes)
    # Some go on for more attempts than decisions are remembered for.
    assert any(outcome.attempts > RETAINED_ATTEMPTS for outcome in outcomes)
    assert sum(outcome.decisions for outcome in outcomes) > 2 * SCHEDULES


@pytest.mark.parametrize("rules", BATCH_MUTANTS, ids=lambda rules: rules.name)
def test_a_broken_rule_of_batches_is_caught(rules: Rules) -> None:
    seeds = (BATCHES_CAUGHT_BY.get(rules.name, 0), *range(MUTANT_SCHEDULES_MAX))
    if not any(run_batches(seed, rules).violation for seed in seeds):
        pytest.fail(f"{rules.name} survived {MUTANT_SCHEDULES_MAX} schedules")
