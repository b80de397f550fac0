"""The protocol holds its invariants under seeded fault schedules, and the oracle can fail."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.simulation.explorer import RARE, Exploration, explore, shortest, try_mutant
from tests.simulation.mutants import MUTANTS
from tests.simulation.schedule import run_schedule
from tests.simulation.variant import Variant

ROOT = Path(__file__).parents[2]
SEED = int(os.environ.get("ONCEFLOW_TEST_SEED", "1"))
SCHEDULES = int(os.environ.get("ONCEFLOW_TEST_SCHEDULES", "200"))


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "schedules",
    [
        SCHEDULES // 4,
        pytest.param(SCHEDULES, marks=pytest.mark.servers),
        pytest.param(25 * SCHEDULES, marks=pytest.mark.slow),
    ],
)
def test_every_invariant_holds_in_random_schedules(schedules: int) -> None:
    found = explore(range(SEED, SEED + schedules))
    _fail_of_the_shortest(found)
    # The schedules are no walks in the park: most have restarts, some a loss from outside.
    assert found.attempts > 2 * found.schedules
    assert found.decisions > 3 * found.schedules


@pytest.mark.timeout(600)
def test_every_invariant_holds_in_the_schedules_that_catch_broken_variants() -> None:
    """They reach what few others do."""
    assert len(RARE) > 60
    _fail_of_the_shortest(explore(RARE))


def _fail_of_the_shortest(found: Exploration) -> None:
    if found.failures:
        first = shortest(found.failures)
        pytest.fail(
            f"seed {first.seed}: {first.violation}\n" + "\n".join(first.trace[-40:]), pytrace=False
        )


@pytest.mark.timeout(900)
@pytest.mark.parametrize("variant", MUTANTS, ids=lambda variant: variant.name)
@pytest.mark.servers  # .ci/run has script/simulate --mutants try them
def test_a_broken_variant_is_caught(variant: Variant) -> None:
    verdict = try_mutant(variant, seed=0)
    assert verdict.caught, f"{variant.name} survived {verdict.schedules} schedules"


def test_a_seed_gives_the_same_run_again_in_every_process() -> None:
    """Processes hash text, by which sets are ordered, each in its own way."""
    seeds = (2612, *range(SEED, SEED + 2))  # the first has several requests left at a restart
    here = [run_schedule(seed, Variant()) for seed in seeds]
    assert here == [run_schedule(seed, Variant()) for seed in seeds]
    program = (
        "from tests.simulation.schedule import run_schedule\n"
        "from tests.simulation.variant import Variant\n"
        f"print([run_schedule(seed, Variant()) for seed in {seeds}])"
    )
    for hash_seed in ("0", "7"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        command = [sys.executable, "-c", program]
        said = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
        )
        assert said.stdout.strip() == str(here), said.stderr
