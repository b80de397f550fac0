"""Plants mistakes in the code and says which of them no test sees: script/mutate --help."""

from __future__ import annotations

import json
import os
import random
import secrets
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer
from tests.mutation.mutants import Mutant
from tests.mutation.rooms import ROOMS
from tests.mutation.runner import ROOT, Copies, Stages, Verdict, read_mutants, try_all

SCORES = Path(__file__).with_name("scores.json")
EQUIVALENT = Path(__file__).with_name("equivalent.json")


def mutate(
    room: Annotated[
        list[str] | None, typer.Option(help=f"Only this; may be repeated: {', '.join(ROOMS)}.")
    ] = None,
    file: Annotated[
        str, typer.Option(help="Only mutants of files whose path contains this text.")
    ] = "",
    sample: Annotated[
        int, typer.Option(min=0, help="So many mutants, drawn from all rooms; 0: all of them.")
    ] = 0,
    seed: Annotated[int, typer.Option(help="Of the sample; 0 draws one, which is printed.")] = 0,
    processes: Annotated[
        int, typer.Option(min=1, help="Mutants that are tried at once.")
    ] = os.cpu_count() or 1,
    at_most_s: Annotated[
        float, typer.Option(help="Begin no further mutant after so many seconds; 0: no limit.")
    ] = 0.0,
    record: Annotated[
        bool, typer.Option("--record", help="Write the scores of whole rooms to scores.json.")
    ] = False,
    count: Annotated[bool, typer.Option("--count", help="Print the number of mutants.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Plant one mistake after the other and run the tests that look at it.

    The exit status is 1 if a mutant survived that tests/mutation/equivalent.json does not excuse.
    """
    drawn = seed or secrets.randbelow(1_000_000) + 1
    chosen = _choose(room or list(ROOMS), file, sample, drawn)
    if count:
        for name, mutants in chosen.items():
            print(f"{name:14} {len(mutants):6}")  # noqa: T201
        return
    if sample:
        _tell(f"seed {drawn}; --seed {drawn} draws the same mutants")
    verdicts = _try(chosen, processes, time.monotonic() + at_most_s if at_most_s else None)
    excused = _excuses()
    survivors = [one for one in verdicts if one.stage == 0 and _key(one.mutant) not in excused]
    scores = _scores(verdicts, excused)
    if record and not sample and not file and not at_most_s:
        _record(scores)
    if as_json:
        listed = [str(one.mutant) for one in survivors]
        print(json.dumps({"seed": drawn, "scores": scores, "survivors": listed}, indent=1))  # noqa: T201
    else:
        for name, (killed, tried) in scores.items():
            _tell(f"{name}: {killed} of {tried} mutants die ({killed / max(tried, 1):.0%})")
        for one in survivors:
            _tell(f"SURVIVED {one.mutant}")
    sys.exit(1 if survivors else 0)


def _choose(
    rooms: Sequence[str], file: str, sample: int, seed: int
) -> Mapping[str, Sequence[Mutant]]:
    unknown = [name for name in rooms if name not in ROOMS]
    if unknown:
        raise typer.BadParameter(f"there is no room {unknown[0]!r}; rooms: {', '.join(ROOMS)}")
    all_of = {
        name: [one for one in read_mutants(ROOMS[name]) if file in one.file] for name in rooms
    }
    if not sample:
        return all_of
    pairs = [(name, mutant) for name, mutants in all_of.items() for mutant in mutants]
    drawn: defaultdict[str, list[Mutant]] = defaultdict(list)
    for name, mutant in random.Random(seed).sample(pairs, min(sample, len(pairs))):
        drawn[name].append(mutant)
    return drawn


def _try(
    chosen: Mapping[str, Sequence[Mutant]], processes: int, ends_at: float | None
) -> Sequence[Verdict]:
    verdicts: list[Verdict] = []
    copies = Copies(processes)
    stages = Stages(copies)
    try:
        for name, mutants in chosen.items():
            if not mutants:
                continue
            _tell(f"{name}: {len(mutants)} mutants")
            for verdict in try_all(name, ROOMS[name], mutants, stages, copies, ends_at):
                verdicts.append(verdict)
                how = f"killed by stage {verdict.stage}" if verdict.stage else "SURVIVED"
                _tell(f"{name}: {how} after {verdict.seconds:.0f} s: {verdict.mutant}")
    finally:
        copies.close()
    return verdicts


def _scores(verdicts: Sequence[Verdict], excused: Mapping[str, str]) -> dict[str, tuple[int, int]]:
    """Return for each room how many mutants died, and how many were tried without the excused."""
    scores: dict[str, tuple[int, int]] = {}
    for one in verdicts:
        killed, tried = scores.get(one.room, (0, 0))
        if one.stage or _key(one.mutant) not in excused:
            scores[one.room] = (killed + (one.stage > 0), tried + 1)
    return scores


def _excuses() -> Mapping[str, str]:
    """Return the mutants that change nothing, each with the reason."""
    excuses: dict[str, str] = json.loads(EQUIVALENT.read_text(encoding="utf-8"))
    return excuses


def _key(mutant: Mutant) -> str:
    """Name the mutant in a way that outlives changes of other lines of the file."""
    return f"{mutant.file}: {mutant.what}"


def _record(scores: Mapping[str, tuple[int, int]]) -> None:
    kept: dict[str, dict[str, int]] = {}
    if SCORES.exists():
        kept = json.loads(SCORES.read_text(encoding="utf-8"))
    kept |= {name: {"killed": killed, "of": tried} for name, (killed, tried) in scores.items()}
    SCORES.write_text(json.dumps(dict(sorted(kept.items())), indent=1) + "\n", encoding="utf-8")


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)  # noqa: T201


if __name__ == "__main__":
    os.chdir(ROOT)
    typer.run(mutate)
