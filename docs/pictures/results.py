"""The measured results of results.json, and the tables of benchmark-results.md that show them.

results.json is the only place of each figure. `ours` and `theirs` hold one value a turn, or one
median where the turns were not kept. `ratio` holds a median, and then the least and the greatest.
It is computed from the turns where it is left out.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from typing_extensions import NotRequired

DATA = Path(__file__).with_name("results.json")
PAGE = Path(__file__).resolve().parents[1] / "reference" / "benchmark-results.md"
HEADER = "| measured | onceflow | compared with | its figure | ratio | date |\n"
NO_BREAK = "\u2011"
"""A hyphen at which a line does not break."""
RULE = "|---|---|---|---|---|---|\n"
_TABLE = re.compile(r"^<!-- results: (\w+) -->\n(?:\|.*\n)*", re.MULTILINE)


class _Entry(TypedDict):
    """One object of the list `figures` in results.json."""

    name: str
    group: str
    what: str
    other: str
    unit: str
    ours: list[float]
    theirs: list[float]
    ratio: NotRequired[list[float]]
    machine: str
    date: str
    command: str


class _File(TypedDict):
    """The object in results.json."""

    machines: dict[str, str]
    figures: list[_Entry]


@dataclass(frozen=True)
class Figure:
    """A figure of onceflow and the same figure of another system."""

    name: str
    group: str
    what: str
    other: str
    unit: str
    ours: float
    theirs: float | None
    """None if there is no figure of another system, or if it was not kept."""
    ratios: Sequence[float]
    """A median, the least and the greatest; one ratio; or empty. Over 1, onceflow is better."""
    date: str

    def format(self, value: float) -> str:
        """Return a value of this figure with three digits and its unit."""
        rounded = float(f"{value:.3g}")
        return f"{rounded:,.0f} {self.unit}" if rounded >= 100 else f"{rounded:g} {self.unit}"

    def line(self) -> str:
        """Return the figure as a line of a table in Markdown, without the unit of rates."""
        figures = self._cell(self.ours), self.other, self._cell(self.theirs), self._ratio()
        return f"| {' | '.join((self.what, *figures, self.date.replace('-', NO_BREAK)))} |\n"

    def _cell(self, value: float | None) -> str:
        return "" if value is None else self.format(value).removesuffix(" rows/s")

    def _ratio(self) -> str:
        if not self.ratios:
            return ""
        median, *spread = (format_ratio(ratio) for ratio in self.ratios)
        shown = f"**{median}**" if self.ratios[0] < 1 else median
        return f"{shown} ({NO_BREAK.join(spread)})" if spread else shown


def format_ratio(ratio: float) -> str:
    """Return a ratio with two decimals under 1, with one from 1 on, and with none from 10 on."""
    return f"{ratio:.{2 if ratio < 1 else 1 if ratio < 10 else 0}f}"


def read_figures() -> dict[str, Figure]:
    """Return all figures of results.json by name."""
    data: _File = json.loads(DATA.read_text(encoding="utf-8"))
    figures = [_to_figure(entry) for entry in data["figures"]]
    return {figure.name: figure for figure in figures}


def _to_figure(entry: _Entry) -> Figure:
    turns = sorted(
        ours / theirs if entry["unit"] == "rows/s" else theirs / ours
        for ours, theirs in zip(entry["ours"], entry["theirs"], strict=bool(entry["theirs"]))
    )
    computed = (statistics.median(turns), turns[0], turns[-1]) if len(turns) > 1 else turns
    return Figure(
        name=entry["name"],
        group=entry["group"],
        what=entry["what"],
        other=entry["other"],
        unit=entry["unit"],
        ours=statistics.median(entry["ours"]),
        theirs=statistics.median(entry["theirs"]) if entry["theirs"] else None,
        ratios=entry.get("ratio", computed),
        date=entry["date"],
    )


def fill_tables(page: str) -> str:
    """Return the text of a page with the lines of the data under each comment `results: GROUP`."""
    figures = read_figures().values()

    def fill(match: re.Match[str]) -> str:
        lines = [figure.line() for figure in figures if figure.group == match[1]]
        return f"<!-- results: {match[1]} -->\n{HEADER}{RULE}{''.join(lines)}"

    return _TABLE.sub(fill, page)
