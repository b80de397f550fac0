"""The runtime keeps each row exactly once in random schedules, and the simulator sees mistakes."""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Generator, Iterable

import pytest
from tests.simulation_runtime.cluster import simulate_runtime
from tests.simulation_runtime.mutants import CAUGHT_BY, MUTANTS, Mutant
from tests.simulation_runtime.world import Outcome, run_schedule

SEED = int(os.environ.get("ONCEFLOW_TEST_SEED", "1"))
SCHEDULES = int(os.environ.get("ONCEFLOW_TEST_RUNTIME_SCHEDULES", "22"))
MUTANT_SCHEDULES_MAX = 150


@pytest.fixture(autouse=True, scope="module")
def _simulate_runtime() -> Generator[None]:
    gc.collect()
    gc.freeze()
    with simulate_runtime():
        yield
    gc.unfreeze()


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "schedules",
    [
        SCHEDULES,
        pytest.param(4 * SCHEDULES, marks=pytest.mark.servers),
        pytest.param(100 * SCHEDULES, marks=pytest.mark.slow),
    ],
)
def test_each_row_is_in_each_sink_once_in_random_schedules(schedules: int) -> None:
    outcomes = _run(range(SEED, SEED + schedules))
    # Most schedules have restarts, and checkpoints to restart from.
    assert sum(outcome.attempts for outcome in outcomes) > 1.5 * schedules
    assert sum(outcome.checkpoints for outcome in outcomes) > 2 * schedules
    assert sum(outcome.kills for outcome in outcomes) > 0.5 * schedules
    assert any(outcome.savepoints for outcome in outcomes)


def test_each_row_is_in_each_sink_once_in_the_schedules_that_have_caught_mistakes() -> None:
    _run(dict.fromkeys(CAUGHT_BY.values()))


def test_each_row_is_in_each_sink_once_in_schedules_of_today() -> None:
    first = random.SystemRandom().randrange(1 << 40)
    print(f"seeds {first} to {first + SCHEDULES // 3}")  # noqa: T201 - pytest shows it at a failure
    _run(range(first, first + SCHEDULES // 3))


def test_a_schedule_is_drawn_by_its_seed_alone() -> None:
    before, after = run_schedule(SEED), run_schedule(SEED)
    assert (before.steps, before.virtual_s) == (after.steps, after.virtual_s)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mistake_of_the_runtime_is_caught(mutant: Mutant) -> None:
    seeds = (CAUGHT_BY.get(mutant.name, 0), *range(MUTANT_SCHEDULES_MAX))
    with mutant.apply():
        if not any(run_schedule(seed).violation for seed in seeds):
            pytest.fail(f"{mutant.name} survived {MUTANT_SCHEDULES_MAX} schedules")


def _run(seeds: Iterable[int]) -> list[Outcome]:
    outcomes = [run_schedule(seed) for seed in seeds]
    failed = [outcome for outcome in outcomes if outcome.violation]
    if failed:
        first = min(failed, key=lambda outcome: len(outcome.trace))
        pytest.fail(
            f"seed {first.seed}: {first.violation}\n" + "\n".join(first.trace[-60:]), pytrace=False
        )
    return outcomes
