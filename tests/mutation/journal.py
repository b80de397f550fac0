"""The verdicts of all runs on this machine, and the scores that they add up to.

A verdict holds for one text of one file: a change of the file asks for new ones. A change of tests
does not, so that a run can be resumed; `script/mutate --again` tries survivors anew.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tests.mutation.mutants import Mutant
from tests.mutation.rooms import ROOMS
from tests.mutation.runner import ROOT, Verdict, list_stages, read_mutants

JOURNAL = ROOT / ".cache" / "mutation.jsonl"
SCORES = Path(__file__).with_name("scores.json")
EQUIVALENT = Path(__file__).with_name("equivalent.json")
_SAMPLE_MIN = 20
"""A file of which fewer mutants were tried has no score, unless these are all of its mutants."""


@dataclass(frozen=True, slots=True)
class Known:
    """The results of earlier runs for a mutant."""

    stage: int
    """The stage that killed it, or 0."""
    tried: int
    """The number of stages that it was given to."""


class Journal:
    """A file of verdicts, one JSON object a line; the last one of a mutant holds."""

    def __init__(self, path: Path = JOURNAL) -> None:
        self._path = path
        self._known: dict[str, Known] = {}
        if path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                entry: dict[str, Any] = json.loads(line)
                self._known[entry["mutant"]] = Known(entry["stage"], entry["tried"])

    def get(self, mutant: Mutant) -> Known | None:
        """Return what is known of the mutant, or None."""
        return self._known.get(_identify(mutant))

    def add(self, verdict: Verdict) -> None:
        """Append a verdict to the file."""
        known = Known(verdict.stage, verdict.tried)
        self._known[_identify(verdict.mutant)] = known
        self._path.parent.mkdir(exist_ok=True)
        entry = {"mutant": _identify(verdict.mutant), **asdict(known)}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")


def add_up(journal: Journal) -> Mapping[str, Mapping[str, int]]:
    """Return the scores of all files of which enough mutants have a verdict.

    `survived` counts those that every stage of the room let pass, `unsure` those that survived the
    stages that were tried, and `of` all mutants of the file.
    """
    excuses = read_excuses()
    scores: dict[str, Mapping[str, int]] = {}
    for room in ROOMS.values():
        by_file: dict[str, list[Mutant]] = {}
        for mutant in read_mutants(room):
            by_file.setdefault(mutant.file, []).append(mutant)
        for file, mutants in by_file.items():
            score = {"killed": 0, "excused": 0, "survived": 0, "unsure": 0}
            for mutant in mutants:
                known = journal.get(mutant)
                if name_for_excuse(mutant) in excuses:
                    score["excused"] += 1
                elif known is not None and known.stage:
                    score["killed"] += 1
                elif known is not None:
                    whole = known.tried >= len(list_stages(room, mutant))
                    score["survived" if whole else "unsure"] += 1
            if sum(score.values()) >= min(_SAMPLE_MIN, len(mutants)):
                scores[file] = score | {"of": len(mutants)}
    return scores


def format_scores(scores: Mapping[str, Mapping[str, int]]) -> str:
    """Return the table that docs/internals/mutation.md has."""
    columns = ("killed", "excused", "survived", "unsure")
    lines = [f"| file | tried | {' | '.join(columns)} |", f"|---|---|{'---|' * len(columns)}"]
    for file, score in sorted(scores.items()):
        tried, every = sum(score[name] for name in columns), score["of"]
        extent = "all" if tried == every else f"sampled {tried} of {every}"
        counts = " | ".join(str(score[name]) for name in columns)
        lines.append(f"| `{file}` | {extent} | {counts} |")
    return "\n".join(lines) + "\n"


def record(scores: Mapping[str, Mapping[str, int]]) -> None:
    """Write scores to the file of scores, besides those of other files that still exist."""
    kept = read_scores()
    kept |= scores
    there = {file: score for file, score in sorted(kept.items()) if (ROOT / file).exists()}
    lines = ",\n".join(f" {json.dumps(file)}: {json.dumps(there[file])}" for file in there)
    SCORES.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")


def read_scores() -> dict[str, Mapping[str, int]]:
    """Return the recorded scores of each file."""
    if not SCORES.exists():
        return {}
    scores: dict[str, Mapping[str, int]] = json.loads(SCORES.read_text(encoding="utf-8"))
    return scores


def read_excuses() -> Mapping[str, str]:
    """Return the mutants that change nothing, each with the reason."""
    excuses: dict[str, str] = json.loads(EQUIVALENT.read_text(encoding="utf-8"))
    return excuses


def name_for_excuse(mutant: Mutant) -> str:
    """Name the mutant in a way that outlives changes of other lines of the file."""
    line = _read_lines(mutant.file)[mutant.line - 1].strip()
    return f"{mutant.file}: {line}: {mutant.what}"


@cache
def _read_lines(file: str) -> Sequence[str]:
    return (ROOT / file).read_text(encoding="utf-8").split("\n")


def _identify(mutant: Mutant) -> str:
    return f"{_hash_file(mutant.file)} {mutant.start} {mutant.end} {mutant.text[:200]}"


@cache
def _hash_file(file: str) -> str:
    return hashlib.sha256(file.encode() + (ROOT / file).read_bytes()).hexdigest()[:20]
