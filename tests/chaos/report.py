"""The report of a run of chaos: as JSON for programs, and as one HTML page for people."""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from tests.chaos.run import Outcome
from tests.chaos.schedule import REACHABLE_POINTS, FaultKind

_NOT_RUN_STATUS = 3
_MISSED_STATUS = 4
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; color: #222; }
table { border-collapse: collapse; margin: 1rem 0; }
th, td { border-bottom: 1px solid #ddd; padding: .3rem .8rem; text-align: left; }
td { vertical-align: top; }
td.number { text-align: right; }
.green { color: #11703a; } .red { color: #b3261e; font-weight: bold; }
code { background: #f4f4f4; padding: .1rem .3rem; }
pre { background: #f4f4f4; padding: .8rem; white-space: pre-wrap; }
"""


@dataclass(frozen=True, slots=True)
class ChaosReport:
    """The results of all schedules of a run."""

    outcomes: tuple[Outcome, ...]
    kinds: tuple[FaultKind, ...]
    """The kinds of faults that were asked for and can run here."""
    seed: int
    seconds: float
    logs: dict[int, str]
    """The directory with the logs of each red schedule, by its seed."""
    not_run: Mapping[FaultKind, str] = field(default_factory=dict[FaultKind, str])
    """The reason for each kind that was asked for and cannot run here."""
    remarks: tuple[str, ...] = ()
    """The variants of faults that this machine lacks."""

    @property
    def planned_faults(self) -> Counter[FaultKind]:
        """The faults of the schedules by kind."""
        return Counter(fault.kind for o in self.outcomes for fault in o.schedule.faults)

    @property
    def delivered_faults(self) -> Counter[FaultKind]:
        """The faults that really struck, by kind."""
        return count_delivered(self.outcomes)

    @property
    def deaths(self) -> Counter[str]:
        """The deaths at each crash point."""
        return sum((outcome.deaths for outcome in self.outcomes), Counter[str]())

    @property
    def missed_kinds(self) -> tuple[FaultKind, ...]:
        """The kinds that were asked for and never struck."""
        return tuple(kind for kind in self.kinds if not self.delivered_faults[kind])

    @property
    def failed_outcomes(self) -> tuple[Outcome, ...]:
        """The schedules that were not exact."""
        return tuple(outcome for outcome in self.outcomes if not outcome.is_exact)

    @property
    def is_ok(self) -> bool:
        """True if every schedule was exact and each kind struck at least once."""
        return bool(self.outcomes) and not self.failed_outcomes and not self.missed_kinds

    @property
    def exit_status(self) -> int:
        """The exit status of the command, which its help describes."""
        if self.failed_outcomes or not self.outcomes:
            return 1
        if self.missed_kinds:
            return _MISSED_STATUS
        return _NOT_RUN_STATUS if self.not_run else 0

    def repeat_command(self, outcome: Outcome) -> str:
        """Return the command that runs the schedule of `outcome` again."""
        kinds = ",".join(kind.value for kind in outcome.schedule.kinds)
        return f"script/chaos --schedules 1 --seed {outcome.schedule.seed} --kinds {kinds}"


def count_delivered(outcomes: Iterable[Outcome]) -> Counter[FaultKind]:
    """Return the number of faults of each kind that really struck."""
    strikes = (strike for outcome in outcomes for strike in outcome.strikes)
    return Counter(strike.fault.kind for strike in strikes if strike.was_delivered)


def to_json(report: ChaosReport) -> dict[str, object]:
    """Return the object that `--json` prints."""
    return {
        "ok": report.is_ok,
        "seed": report.seed,
        "seconds": round(report.seconds, 1),
        "schedules": len(report.outcomes),
        "red": [
            {
                "seed": outcome.schedule.seed,
                "why": describe_failure(outcome),
                "again": report.repeat_command(outcome),
                "logs": report.logs.get(outcome.schedule.seed),
            }
            for outcome in report.failed_outcomes
        ],
        "faults": {
            kind.value: {
                "planned": report.planned_faults[kind],
                "delivered": report.delivered_faults[kind],
            }
            for kind in report.kinds
        },
        "not_run": {kind.value: reason for kind, reason in report.not_run.items()},
        "remarks": list(report.remarks),
        "never_delivered": [kind.value for kind in report.missed_kinds],
        "crash_points": {point: report.deaths[point] for point in REACHABLE_POINTS},
        "recoveries": _total(report, "recoveries"),
        "drivers": _total(report, "drivers"),
        "records": _total(report, "records"),
        **_count_rows(report.outcomes),
        "details": [_detail(outcome) for outcome in report.outcomes],
    }


def describe_failure(outcome: Outcome) -> str:
    """Return what is wrong with a schedule, or an empty text."""
    parts = [outcome.failure] if outcome.failure else []
    for verdict in outcome.sinks:
        difference = verdict.difference
        if not difference.is_exact:
            parts.append(
                f"{verdict.kind.value}: {difference.missing} rows lost, {difference.doubled} "
                f"doubled, {difference.unexpected} never expected, of {difference.expected}"
                f" ({'; '.join(difference.examples)})"
            )
        if verdict.in_doubt:
            parts.append(f"{verdict.kind.value}: {verdict.in_doubt} transactions left")
    if outcome.broken_rules:
        # The line of the rule; the trace is in the directory of the schedule.
        rules = "; ".join(rule.partition("\n")[0] for rule in outcome.broken_rules)
        parts.append(f"forbidden steps: {rules}")
    if outcome.leftovers:
        some = ", ".join(outcome.leftovers[:5])
        parts.append(f"{len(outcome.leftovers)} leftovers: {some}")
    return "; ".join(parts)


def summarize(report: ChaosReport) -> str:
    """Return the last lines for a person."""
    counts = _count_rows(report.outcomes)
    struck = sum(report.delivered_faults.values())
    first = (
        f"{len(report.outcomes)} schedules from seed {report.seed} in {report.seconds:.0f} s: "
        f"{struck} faults, {_total(report, 'recoveries')} recoveries, "
        f"{_total(report, 'drivers')} drivers, {_total(report, 'records'):,} records, "
        f"{counts['rows']:,} rows, {counts['lost']} lost, {counts['doubled']} doubled, "
        f"{counts['leftovers']} leftovers"
    )
    lines = [first]
    for outcome in report.failed_outcomes:
        lines.append(f"RED seed {outcome.schedule.seed}: {describe_failure(outcome)}")
        lines.append(f"    again: {report.repeat_command(outcome)}")
        if logs := report.logs.get(outcome.schedule.seed):
            lines.append(f"    logs:  {logs}")
    lines += [f"NEVER DELIVERED: {kind.value}" for kind in report.missed_kinds]
    lines += [f"NOT RUN: {kind.value}: {reason}" for kind, reason in report.not_run.items()]
    lines += [f"NOTE: {remark}" for remark in report.remarks]
    return "\n".join(lines)


def to_html(report: ChaosReport) -> str:
    """Return the report as one page that needs no other file."""
    colour, word = ("green", "exact") if report.is_ok else ("red", "RED")
    counts = _count_rows(report.outcomes)
    totals = [
        ("schedules", len(report.outcomes)),
        ("minutes", round(report.seconds / 60, 1)),
        ("records", _total(report, "records")),
        ("rows in sinks", counts["rows"]),
        ("rows lost", counts["lost"]),
        ("rows doubled", counts["doubled"]),
        ("rows never expected", counts["unexpected"]),
        ("leftovers", counts["leftovers"]),
        ("recoveries", _total(report, "recoveries")),
        ("drivers started", _total(report, "drivers")),
    ]
    sections = [
        f"<h1>Chaos from seed {report.seed}: <span class={colour}>{word}</span></h1>",
        _table(("", "count"), totals),
        "<h2>Faults</h2>",
        _table(
            ("kind", "planned", "delivered"),
            [
                (kind.value, report.planned_faults[kind], report.delivered_faults[kind])
                for kind in report.kinds
            ],
        ),
        _table(("kind", "not run, because"), [(k.value, why) for k, why in report.not_run.items()])
        if report.not_run
        else "",
        *(f"<p>{html.escape(remark)}</p>" for remark in report.remarks),
        "<h2>Crash points</h2>",
        _table(
            ("point", "processes that died there"),
            [(point, report.deaths[point]) for point in REACHABLE_POINTS],
        ),
        "<h2>Schedules</h2>",
        _table(
            ("seed", "job", "faults", "recoveries", "rows", "seconds", "verdict"),
            [_schedule_row(report, outcome) for outcome in report.outcomes],
        ),
    ]
    return (
        "<!doctype html><html lang=en><meta charset=utf-8><title>Chaos report</title>"
        f"<style>{_STYLE}</style>{''.join(sections)}</html>\n"
    )


def _schedule_row(report: ChaosReport, outcome: Outcome) -> tuple[object, ...]:
    faults = [
        f"{strike.fault}{'' if strike.was_delivered else ' (not delivered)'}"
        for strike in outcome.strikes
    ]
    verdict = "exact"
    if not outcome.is_exact:
        verdict = f"{describe_failure(outcome)}. Again: {report.repeat_command(outcome)}"
    return (
        outcome.schedule.seed,
        str(outcome.schedule),
        "; ".join(faults),
        outcome.recoveries,
        outcome.rows,
        round(outcome.seconds),
        verdict,
    )


def _table(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    head = "".join(f"<th>{html.escape(heading)}</th>" for heading in headings)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def _cell(value: object) -> str:
    if isinstance(value, int | float):
        return f"<td class=number>{value:,}</td>"
    return f"<td>{html.escape(str(value))}</td>"


def _total(report: ChaosReport, field: str) -> int:
    return sum(int(getattr(outcome, field)) for outcome in report.outcomes)


def _count_rows(outcomes: Iterable[Outcome]) -> dict[str, int]:
    counts = Counter[str](rows=0, lost=0, doubled=0, unexpected=0, leftovers=0)
    for outcome in outcomes:
        counts["leftovers"] += len(outcome.leftovers)
        for verdict in outcome.sinks:
            counts["rows"] += verdict.difference.found
            counts["lost"] += verdict.difference.missing
            counts["doubled"] += verdict.difference.doubled
            counts["unexpected"] += verdict.difference.unexpected
            counts["leftovers"] += verdict.in_doubt
    return counts


def _detail(outcome: Outcome) -> dict[str, object]:
    return {
        "seed": outcome.schedule.seed,
        "job": str(outcome.schedule),
        "ok": outcome.is_exact,
        "why": describe_failure(outcome),
        "seconds": round(outcome.seconds, 1),
        "recoveries": outcome.recoveries,
        "drivers": outcome.drivers,
        "broken_rules": list(outcome.broken_rules),
        "gave_up": list(outcome.gave_up),
        "records": outcome.records,
        "crash_points": dict(outcome.deaths),
        "faults": [
            {"fault": str(strike.fault), "delivered": strike.was_delivered}
            for strike in outcome.strikes
        ],
        "sinks": [asdict(verdict) for verdict in outcome.sinks],
    }
