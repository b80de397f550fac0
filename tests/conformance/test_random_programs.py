"""Random pipelines, in one process, come to what a plain model of them says; see `programs`.

ONCEFLOW_TEST_SEED=N runs the program of seed N and those after it. A failure names its seed.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.conformance.programs.mutants import MUTANTS, Mutant
from tests.conformance.programs.run import run_seed

SEED = int(os.environ.get("ONCEFLOW_TEST_SEED", "1"))
SHORT, LONG = 8, 1_000
"""Programs on each backend; all in the short form take some seconds."""


def run_programs(seeds: range, backend: str, directory: Path) -> None:
    for seed in seeds:
        run_seed(seed, directory / str(seed), backend)


@pytest.mark.parametrize("backend", ["heap", "rocksdb"])
def test_random_programs_write_exactly_what_a_plain_model_says(
    backend: str, tmp_path: Path
) -> None:
    run_programs(range(SEED, SEED + SHORT), backend, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(3_600)
@pytest.mark.parametrize("backend", ["heap", "rocksdb"])
def test_two_thousand_random_programs_write_exactly_what_a_plain_model_says(
    backend: str, tmp_path: Path
) -> None:
    run_programs(range(SEED, SEED + LONG), backend, tmp_path)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.undo.__name__)
def test_a_fix_that_is_undone_is_found_by_its_program(mutant: Mutant, tmp_path: Path) -> None:
    run_seed(mutant.seed, tmp_path / "fixed", mutant.backend)
    with mutant.undo(), pytest.raises(mutant.raises):
        run_seed(mutant.seed, tmp_path / "undone", mutant.backend)
