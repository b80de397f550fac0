"""The conformance report: a table for people, and JSON for programs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_REASON_LENGTH_MAX = 160


def lines_of(
    clauses: Sequence[Mapping[str, Any]], seed: int, rounds: int
) -> Iterator[tuple[str, str]]:
    """Yield the lines of the table of a sink or source, each with its verdict."""
    width = max(len(facts["clause"]) for facts in clauses)
    scenarios = max(len(scenarios_of(facts)) for facts in clauses)
    scenarios = max(scenarios, len("scenarios"))
    yield f"{'clause':{width}}  {'scenarios':{scenarios}}  {'verdict':10}  seconds", ""
    for facts in clauses:
        reason = " ".join(str(facts["reason"]).split())
        if len(reason) > _REASON_LENGTH_MAX:
            reason = f"{reason[:_REASON_LENGTH_MAX]}…"
        line = (
            f"{facts['clause']:{width}}  {scenarios_of(facts):{scenarios}}  "
            f"{facts['verdict']:10}  {facts['seconds']:7.2f}  {reason}"
        )
        yield line.rstrip(), facts["verdict"]
    counts = Counter(facts["verdict"] for facts in clauses)
    seconds = sum(facts["seconds"] for facts in clauses)
    summary = ", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items()))
    yield f"{summary} in {seconds:.1f} s (--onceflow-seed {seed} --onceflow-rounds {rounds})", ""


def report_of(
    subjects: Mapping[str, Mapping[str, Mapping[str, Any]]], seed: int, rounds: int
) -> dict[str, Any]:
    """Return the whole report as plain values for JSON."""
    report: dict[str, Any] = {"seed": seed, "rounds": rounds, "sinks": {}, "sources": {}}
    for label, clauses in subjects.items():
        kind = next(iter(clauses.values()))["kind"]
        report[kind][label] = {
            "conforms": not any(facts["verdict"] == "FAILED" for facts in clauses.values()),
            "clauses": [
                {name: value for name, value in facts.items() if name not in ("kind", "subject")}
                for facts in clauses.values()
            ],
        }
    return report


def scenarios_of(facts: Mapping[str, Any]) -> str:
    """Return the scenario numbers of a clause as text."""
    return " ".join(f"S{number}" for number in facts["scenarios"])
