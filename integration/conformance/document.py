"""The tables of docs/conformance.md, made from the clauses themselves.

python -m onceflow.integration.conformance.document docs/conformance.md     brings it up to date
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path

from onceflow.integration.conformance.catalogue import CLAUSES, NOT_OF_SINKS
from onceflow.integration.conformance.report import scenarios_of

SCENARIOS = range(1, 44)


def with_tables(text: str) -> str:
    """Return `text` with what stands between each pair of marks made anew."""
    for name, table in _tables().items():
        begin, end = f"<!-- {name}: made by document.py -->", f"<!-- end of {name} -->"
        pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
        parts = pattern.split(text)
        text = f"{begin}\n\n{table}\n{end}".join(parts)
    return text


def _tables() -> Mapping[str, str]:
    return {"clauses": _clauses(), "scenarios": _scenarios()}


def _clauses() -> str:
    lines = ["| clause | what it says | needs | scenarios |", "|---|---|---|---|"]
    for clause in CLAUSES:
        needs = ", ".join(f"`{name}()`" for name in clause.needs)
        scenarios = scenarios_of({"scenarios": clause.scenarios})
        lines.append(f"| `{clause.id}` | {clause.says} | {needs} | {scenarios} |")
    return "\n".join(lines) + "\n"


def _scenarios() -> str:
    lines = ["| scenario | clauses, or why there is none |", "|---|---|"]
    for number in SCENARIOS:
        found = [f"`{clause.id}`" for clause in CLAUSES if number in clause.scenarios]
        told = ", ".join(found) or f"no rule of a sink: {NOT_OF_SINKS[number]}"
        lines.append(f"| S{number} | {told} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    document = Path(sys.argv[1])
    document.write_text(with_tables(document.read_text(encoding="utf-8")), encoding="utf-8")
