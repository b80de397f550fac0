"""Plants mistakes in the code and says which of them no test sees: script/mutate --help."""

from __future__ import annotations

import json
import os
import random
import secrets
import signal
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain
from math import inf
from typing import Annotated

import typer
from tests.mutation import runner
from tests.mutation.journal import (
    Journal,
    add_up,
    format_scores,
    name_for_excuse,
    read_excuses,
    read_scores,
)
from tests.mutation.journal import record as write_scores
from tests.mutation.mutants import Mutant
from tests.mutation.rooms import ROOMS


def mutate(
    room: Annotated[
        list[str] | None, typer.Option(help=f"Only this; may be repeated: {', '.join(ROOMS)}.")
    ] = None,
    file: Annotated[
        list[str] | None,
        typer.Option(
            help="Only files whose path contains this text; may be repeated, and gives the order."
        ),
    ] = None,
    sample: Annotated[
        int, typer.Option(min=0, help="So many mutants, drawn from all rooms; 0: all of them.")
    ] = 0,
    each: Annotated[
        bool, typer.Option("--each", help="Draw the sample from each file instead of all rooms.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Of the sample; 0 draws one, which is printed.")] = 0,
    processes: Annotated[
        int, typer.Option(min=1, help="Mutants that are tried at once.")
    ] = os.cpu_count() or 1,
    at_most_s: Annotated[float, typer.Option(help="End after so many seconds; 0: no limit.")] = 0.0,
    stages: Annotated[
        int, typer.Option(min=0, help="Only so many of the cheapest stages; 0: all.")
    ] = 0,
    recorded: Annotated[
        bool, typer.Option("--recorded", help="Only files that scores.json has.")
    ] = False,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Leave out killed mutants and stages of earlier runs."),
    ] = False,
    again: Annotated[
        bool, typer.Option("--again", help="Only mutants that survived the last run.")
    ] = False,
    record: Annotated[
        bool,
        typer.Option(
            "--record",
            help="Only write the scores to scores.json, and print their table.",
        ),
    ] = False,
    count: Annotated[bool, typer.Option("--count", help="Print the number of mutants.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Plant one mistake after the other and run the tests that look at it.

    The exit status is 3 if a mutant survived that tests/mutation/equivalent.json does not excuse.
    """
    began = time.monotonic()
    drawn = seed or secrets.randbelow(1_000_000) + 1
    journal = Journal()
    if record:
        scores = add_up(journal)
        write_scores(scores)
        print(format_scores(read_scores()), end="")  # noqa: T201
        return
    chosen = _choose(room or list(ROOMS), file or [""], sample, drawn, recorded=recorded, each=each)
    if count:
        for name, number in Counter(name for name, _ in chosen).items():
            print(f"{name:14} {number:6}")  # noqa: T201
        return
    if sample:
        _tell(f"seed {drawn}; --seed {drawn} draws the same mutants")
    excused = read_excuses()
    plans = [
        plan
        for name, mutant in chosen
        if name_for_excuse(mutant) not in excused
        and (plan := _plan(name, mutant, journal, stages, resume=resume, again=again))
    ]
    verdicts = _try(plans, processes, began + at_most_s if at_most_s else inf, journal)
    sys.exit(3 if _report(verdicts, len(plans), drawn, as_json=as_json) else 0)


def _report(verdicts: Sequence[runner.Verdict], planned: int, seed: int, *, as_json: bool) -> bool:
    """Print how many mutants died, and which survived; return True if some did."""
    survivors = [verdict for verdict in verdicts if verdict.stage == 0]
    counts = _count(verdicts)
    if as_json:
        listed = [str(verdict.mutant) for verdict in survivors]
        print(json.dumps({"seed": seed, "scores": counts, "survivors": listed}, indent=1))  # noqa: T201
        return bool(survivors)
    for name, (killed, tried) in counts.items():
        _tell(f"{name}: {killed} of {tried} mutants die ({killed / tried:.0%})")
    if len(verdicts) < planned:
        _tell(f"{planned - len(verdicts)} mutants were not tried: the time was over")
    for verdict in survivors:
        _tell(f"SURVIVED {verdict.tried} stages: {verdict.mutant}")
    return bool(survivors)


def _choose(
    rooms: Sequence[str],
    files: Sequence[str],
    sample: int,
    seed: int,
    *,
    recorded: bool,
    each: bool,
) -> Sequence[tuple[str, Mutant]]:
    unknown = [name for name in rooms if name not in ROOMS]
    if unknown:
        raise typer.BadParameter(f"there is no room {unknown[0]!r}; rooms: {', '.join(ROOMS)}")
    every = [(name, mutant) for name in rooms for mutant in runner.read_mutants(ROOMS[name])]
    chosen = [pair for text in files for pair in every if text in pair[1].file]
    scores = read_scores()
    chosen = [pair for pair in dict.fromkeys(chosen) if not recorded or pair[1].file in scores]
    if not sample:
        return chosen
    groups: dict[str, list[tuple[str, Mutant]]] = {}
    for pair in chosen:
        groups.setdefault(pair[1].file if each else "", []).append(pair)
    drawn = [
        random.Random(seed).sample(group, min(sample, len(group))) for group in groups.values()
    ]
    return list(chain.from_iterable(drawn))


def _plan(
    name: str, mutant: Mutant, journal: Journal, stages: int, *, resume: bool, again: bool
) -> runner.Plan | None:
    """Return the stages to try, or None if earlier runs make the mutant needless."""
    wanted = runner.list_stages(ROOMS[name], mutant)
    wanted = wanted[: stages or len(wanted)]
    known = journal.get(mutant)
    if again and (known is None or known.stage):
        return None
    if resume and known is not None:
        if known.stage or known.tried >= len(wanted):
            return None
        return runner.Plan(name, mutant, wanted, known.tried)
    return runner.Plan(name, mutant, wanted)


def _try(
    plans: Sequence[runner.Plan], processes: int, ends_at: float, journal: Journal
) -> Sequence[runner.Verdict]:
    verdicts: list[runner.Verdict] = []
    signal.signal(signal.SIGTERM, _exit)
    copies = runner.Copies(processes)
    began = time.monotonic()
    try:
        for verdict in runner.try_all(plans, copies, ends_at):
            verdicts.append(verdict)
            journal.add(verdict)
            how = f"killed by stage {verdict.stage}" if verdict.stage else "SURVIVED"
            done, mean_s = len(verdicts), (time.monotonic() - began) / len(verdicts)
            left_s = mean_s * (len(plans) - done)
            _tell(
                f"{done}/{len(plans)}, {left_s / 60:.0f} min left: {how}"
                f" after {verdict.seconds:.1f} s: {verdict.mutant}"
            )
    finally:
        copies.close()
    return verdicts


def _count(verdicts: Sequence[runner.Verdict]) -> Mapping[str, tuple[int, int]]:
    """Return for each room how many mutants died, and how many were tried."""
    counts: dict[str, tuple[int, int]] = {}
    for verdict in verdicts:
        killed, tried = counts.get(verdict.room, (0, 0))
        counts[verdict.room] = (killed + (verdict.stage > 0), tried + 1)
    return counts


def _exit(_signal: int, _frame: object) -> None:
    """Leave by an exception, so that processes and copies are cleaned up."""
    sys.exit(143)


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)  # noqa: T201


if __name__ == "__main__":
    os.chdir(runner.ROOT)
    typer.run(mutate)
