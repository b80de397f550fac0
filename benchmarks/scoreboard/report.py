"""The table of a run: for the terminal, as JSON, and as a Markdown page."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import msgspec

from benchmarks.scoreboard.contestant import Contestant
from benchmarks.scoreboard.run import Outcome
from benchmarks.scoreboard.schedule import StrikeKind

_KILLS = (StrikeKind.WORKER, StrikeKind.COORDINATOR)
_COLUMNS = ("engine", "sink", "runs", "lost", "twice", "altered", "totals wrong", "left over")
_RECOVERY = "s to rows"


class Results(msgspec.Struct, frozen=True, kw_only=True):
    """The outcomes of all runs, as a file of JSON keeps them."""

    machine: Mapping[str, object]
    date: str
    outcomes: tuple[Outcome, ...]


@dataclass(frozen=True, slots=True)
class Row:
    """The sums of all runs of a contestant."""

    contestant: Contestant
    outcomes: tuple[Outcome, ...]

    @property
    def judged(self) -> tuple[Outcome, ...]:
        """The runs with a verdict."""
        return tuple(outcome for outcome in self.outcomes if outcome.verdict is not None)

    @property
    def reason(self) -> str:
        """The reason why a run has no verdict, or empty."""
        return next((o.not_run or o.failure for o in self.outcomes if o.verdict is None), "")

    @property
    def is_exact(self) -> bool:
        """True if there was a run, and all runs were exact."""
        return bool(self.judged) and all(
            outcome.verdict is not None and outcome.verdict.is_exact for outcome in self.outcomes
        )

    @property
    def recovery_s(self) -> float | None:
        """The median of the seconds from a SIGKILL of the engine until a new row was visible."""
        times = [
            blow.recovery_s
            for outcome in self.judged
            for blow in outcome.blows
            if blow.kind in _KILLS and blow.recovery_s is not None
        ]
        return round(median(times), 1) if times else None

    def add_up(self, name: str) -> int:
        """Return the sum of a count of the verdicts."""
        return sum(getattr(outcome.verdict, name) or 0 for outcome in self.judged)


def make_rows(contestants: Iterable[Contestant], outcomes: Sequence[Outcome]) -> list[Row]:
    """Return a row for each contestant that has outcomes, in the order of the contestants."""
    rows = [
        Row(contestant, tuple(o for o in outcomes if o.contestant == contestant.name))
        for contestant in contestants
    ]
    return [row for row in rows if row.outcomes]


def read_results(path: Path) -> Results:
    """Return the results in a file that `--json` has written."""
    return msgspec.json.decode(path.read_bytes(), type=Results)


def make_results(machine: Mapping[str, object], outcomes: Iterable[Outcome]) -> Results:
    """Return the results as of today."""
    today = dt.datetime.now(dt.timezone.utc).date().isoformat()
    return Results(machine=machine, date=today, outcomes=tuple(outcomes))


def to_terminal(rows: Sequence[Row]) -> str:
    """Return the table with aligned columns."""
    cells = [(*_COLUMNS, _RECOVERY, "result"), *map(_fill, rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in cells
    ]
    return "\n".join(lines)


def to_markdown(rows: Sequence[Row]) -> str:
    """Return the table of results as Markdown."""
    head = (*_COLUMNS, _RECOVERY, "result")
    return "\n".join(
        (_join(head), _join("---" for _ in head), *(_join(_fill(row)) for row in rows))
    )


def describe_settings(rows: Sequence[Row]) -> str:
    """Return the settings and sources of each engine and the promise of each row, as Markdown."""
    engines: dict[str, list[Contestant]] = {}
    for row in rows:
        engines.setdefault(row.contestant.engine, []).append(row.contestant)
    return "\n".join(_describe(engine, contestants) for engine, contestants in engines.items())


def _describe(engine: str, contestants: Sequence[Contestant]) -> str:
    first = contestants[0]
    shared = [s for s in first.settings if all(s in other.settings for other in contestants)]
    links = [
        f"[{number}]({link})"
        for number, link in enumerate(first.links, 1)
        if link.startswith("http")
    ]
    lines = [f"- **{engine}**{''.join(f' {link}' for link in links)}: {'; '.join(shared)}."]
    for contestant in contestants:
        own = [setting for setting in contestant.settings if setting not in shared]
        parts = "; ".join([f"promises {contestant.claim}", *own])
        lines.append(f"  - `{contestant.name}`: {parts}.")
    return "\n".join(lines)


def _join(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _fill(row: Row) -> tuple[str, ...]:
    contestant = row.contestant
    if not row.judged:
        first = row.reason.strip().splitlines()[0][:80] if row.reason else ""
        word = f"not run: {first}"
        return (contestant.engine, contestant.sink, "0", *("" for _ in range(6)), word)
    totals = "not run" if contestant.no_totals else f"{row.add_up('wrong_totals'):,}"
    recovery = "" if row.recovery_s is None else f"{row.recovery_s:g}"
    missing = len(row.outcomes) - len(row.judged)
    result = "exact" if row.is_exact else "no verdict in a run" if missing else "not exact"
    return (
        contestant.engine,
        contestant.sink,
        str(len(row.judged)),
        *(f"{row.add_up(name):,}" for name in ("lost", "doubled", "altered")),
        totals,
        f"{row.add_up('prepared'):,}",
        recovery,
        result,
    )
