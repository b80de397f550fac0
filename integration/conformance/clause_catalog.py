"""The catalog of the clauses of sinks in run order: each comes after the clauses that it rests on.

The tables of docs/reference/conformance-clauses.md and docs/scenarios.md are made from them:

python -m onceflow.integration.conformance.clause_catalog PAGES updates these pages.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType

from onceflow.integration.conformance.clause import Clause
from onceflow.integration.conformance.clauses import (
    batching,
    beginning,
    breaking,
    deciding,
    gathering,
    killing,
    listing,
    overtaking,
    recovering,
    running,
    writing,
)
from onceflow.integration.conformance.source_catalog import SOURCE_CLAUSES

CLAUSES: tuple[Clause, ...] = (
    *writing.CLAUSES,
    *deciding.CLAUSES,
    *listing.CLAUSES,
    *gathering.CLAUSES,
    *recovering.CLAUSES,
    *breaking.CLAUSES,
    *killing.CLAUSES,
    *overtaking.CLAUSES,
    *beginning.CLAUSES,
    *running.CLAUSES,
    *batching.CLAUSES,
)

NOT_OF_SINKS: Mapping[int, str] = MappingProxyType(
    {
        5: "no transaction of ours times out; its age is a metric",
        6: "the coordinator decides only when every subtask has acked",
        8: "retries are `CommitQueue`'s",
        9: "the end of bounded input is the engine's",
        10: "the end of bounded input is the engine's",
        12: "committables never travel in data channels",
        34: "there is one way of naming transactions",
        39: "which transactions are whose is the decision log's to say, never a writer's state",
    }
)
"""The scenarios S1-S43 that have no clause, with the reason. The engine's own tests cover them."""


SCENARIOS = range(1, 44)


def with_tables(text: str) -> str:
    """Return `text` with the tables between each pair of marks generated again."""
    for name, table in _tables().items():
        begin, end = f"<!-- {name}: made by clause_catalog.py -->", f"<!-- end of {name} -->"
        pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
        parts = pattern.split(text)
        text = f"{begin}\n\n{table}\n{end}".join(parts)
    return text


def _tables() -> Mapping[str, str]:
    return {
        "clauses": _clauses(CLAUSES),
        "clauses of sources": _clauses(SOURCE_CLAUSES),
        "scenarios": _scenarios(),
    }


def _clauses(clauses: Iterable[Clause]) -> str:
    lines = ["| clause | what it says | needs |", "|---|---|---|"]
    for clause in clauses:
        needs = ", ".join(f"`{name}()`" for name in clause.needs)
        lines.append(f"| `{clause.id}` | {clause.says} | {needs} |")
    return "\n".join(lines) + "\n"


def _scenarios() -> str:
    lines = ["| scenario | clauses, or why there is none |", "|---|---|"]
    for number in SCENARIOS:
        clauses = [f"`{clause.id}`" for clause in CLAUSES if number in clause.scenarios]
        proof = ", ".join(clauses) or f"no rule of a sink: {NOT_OF_SINKS[number]}"
        lines.append(f"| S{number} | {proof} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    for document in map(Path, sys.argv[1:]):
        document.write_text(with_tables(document.read_text(encoding="utf-8")), encoding="utf-8")
