"""The command behind script/simulate."""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Sequence

from rich.console import Console
from rich.progress import track
from rich.table import Table
from tests.simulation import explorer
from tests.simulation.batch_mutants import BATCH_MUTANTS
from tests.simulation.batches import run_batches
from tests.simulation.coverage_report import unreached


def main() -> int:
    """Run schedules or mutants; return 1 when an invariant broke or a mutant survived."""
    parser = argparse.ArgumentParser(
        prog="script/simulate",
        description="Runs the protocol under seeded schedules of faults, in virtual time.",
    )
    parser.add_argument("--schedules", type=int, default=5_000, metavar="N")
    parser.add_argument("--seed", type=int, default=None, help="of the first schedule")
    parser.add_argument("--mutants", action="store_true", help="try the broken variants instead")
    parser.add_argument(
        "--batches", action="store_true", help="schedules of batches that Spark writes, not of jobs"
    )
    parser.add_argument(
        "--rare",
        action="store_true",
        help="run the schedules by which broken variants were caught, instead of --schedules",
    )
    parser.add_argument(
        "--coverage", action="store_true", help="tell what of the protocol no schedule reaches"
    )
    parser.add_argument("--json", action="store_true", help="print one object on stdout")
    arguments = parser.parse_args()
    seed = random.randrange(10**6) if arguments.seed is None else arguments.seed
    if arguments.batches:
        if arguments.mutants:
            return _batch_mutants(0 if arguments.seed is None else seed)
        return _batches(arguments.schedules, seed)
    if arguments.mutants:
        return _mutants(0 if arguments.seed is None else seed, as_json=arguments.json)
    if arguments.coverage:
        return _coverage(arguments.schedules, seed)
    seeds = explorer.RARE if arguments.rare else range(seed, seed + arguments.schedules)
    return _schedules(seeds, as_json=arguments.json)


def _schedules(seeds: Sequence[int], *, as_json: bool) -> int:
    console = Console(stderr=True)
    began = time.monotonic()
    seed = next(iter(seeds), 0)
    numbers = track(seeds, f"schedules from seed {seed}", console=console)
    # At once: whoever ends a run of hours early has what it found.
    found = explorer.explore(
        numbers, tell=lambda one: console.print(f"seed {one.seed}: {one.violation}")
    )
    seconds = round(time.monotonic() - began, 1)
    if as_json:
        report = {
            "schedules": found.schedules,
            "seed": seed,
            "seconds": seconds,
            "checkpoints_decided": found.decisions,
            "attempts": found.attempts,
            "lost_and_reported": found.lost,
            "violations": [[failure.seed, failure.violation] for failure in found.failures],
            "ok": not found.failures,
        }
        sys.stdout.write(json.dumps(report) + "\n")
    else:
        sys.stdout.write(
            f"{found.schedules} schedules from seed {seed} in {seconds} s: {found.decisions}"
            f" checkpoints decided in {found.attempts} attempts, {found.lost} runs with a loss"
            f" caused from outside and reported, {len(found.failures)} violations\n"
        )
    if not found.failures:
        return 0
    first = explorer.shortest(found.failures)
    sys.stdout.write(f"\nseed {first.seed}: {first.violation}\n" + "\n".join(first.trace[-40:]))
    sys.stdout.write(f"\n\nagain: script/simulate --schedules 1 --seed {first.seed}\n")
    return 1


def _batches(count: int, seed: int) -> int:
    console = Console(stderr=True)
    numbers = track(range(seed, seed + count), f"schedules from seed {seed}", console=console)
    outcomes = [run_batches(number) for number in numbers]
    failures = [outcome for outcome in outcomes if outcome.violation]
    decided, attempts = sum(o.decisions for o in outcomes), sum(o.attempts for o in outcomes)
    sys.stdout.write(
        f"{count} schedules of batches from seed {seed}: {decided} decided in {attempts} attempts,"
        f" {sum(o.kills for o in outcomes)} kills, {len(failures)} violations\n"
    )
    if not failures:
        return 0
    first = min(failures, key=lambda outcome: len(outcome.trace))
    sys.stdout.write(f"\nseed {first.seed}: {first.violation}\n" + "\n".join(first.trace[-40:]))
    sys.stdout.write(f"\n\nagain: script/simulate --batches --schedules 1 --seed {first.seed}\n")
    return 1


def _batch_mutants(seed: int) -> int:
    survivors = 0
    for rules in BATCH_MUTANTS:
        tried = range(seed, seed + explorer.MUTANT_SCHEDULES_MAX)
        found = next((n for n in tried if run_batches(n, rules).violation), None)
        survivors += found is None
        state = "SURVIVED" if found is None else f"caught by seed {found}"
        sys.stdout.write(f"{state:22}  {rules.name}\n")
    return 1 if survivors else 0


def _coverage(schedules: int, seed: int) -> int:
    found = unreached(schedules, seed)
    for text in found:
        sys.stdout.write(f"{text}\n")
    sys.stdout.write(
        f"{len(found)} lines and branches of the protocol are reached by none of {schedules}"
        f" schedules from seed {seed}\n"
    )
    return 1 if found else 0


def _mutants(seed: int, *, as_json: bool) -> int:
    verdicts: list[explorer.MutantVerdict] = []
    for verdict in explorer.try_mutants(seed):
        verdicts.append(verdict)
        state = "caught" if verdict.caught else "SURVIVED"
        sys.stderr.write(f"{state:9} after {verdict.schedules:5} schedules  {verdict.name}\n")
    survivors = [verdict.name for verdict in verdicts if verdict.caught is None]
    if as_json:
        report = [[v.name, v.schedules, v.caught.violation if v.caught else None] for v in verdicts]
        sys.stdout.write(json.dumps({"mutants": report, "ok": not survivors}) + "\n")
    else:
        table = Table("broken variant", "schedules", "caught by")
        for verdict in verdicts:
            text = verdict.caught.violation[:70] if verdict.caught else "SURVIVED"
            table.add_row(verdict.name, str(verdict.schedules), text)
        Console().print(table)
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
