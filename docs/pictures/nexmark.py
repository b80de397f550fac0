"""Nexmark in the documents: the chart, the table of results, and the code of the queries.

nexmark.json is what `python -m benchmarks.nexmark --json` has printed.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypedDict

from docs.pictures.drawing import Box, Picture

DATA = Path(__file__).with_name("nexmark.json")
PAGE = Path(__file__).resolve().parents[1] / "reference" / "nexmark-queries.md"
QUERIES = Path(__file__).resolve().parents[2] / "benchmarks" / "nexmark" / "queries.py"
PUBLISHED = (
    *(155, 158, 175, 152, 34.3, 22.1, None, 12.3, 146, 14.2, 57.8, 39.7),
    *(75.7, 131, 161, 72.4, 18.7, 117, 53.7, 44.0, 19.0, 98.5, 130),
)
"""Thousand events a second and core of Flink, by query, as the benchmark's repository publishes."""

_PART = re.compile(r"^<!-- nexmark: (\w+) -->\n.*?^<!-- end -->\n", re.MULTILINE | re.DOTALL)
_WIDTH = 960
_LEFT = 90
_BARS_WIDTH = 620
_PITCH = 22
_TOP = 74


class _Query(TypedDict):
    query: str
    difference: str
    cpu_s_per_million: float
    events_per_second: int
    state_bytes: int


class _File(TypedDict):
    date: str
    events: int
    load_average: list[float]
    queries: list[_Query]


def read_results() -> _File:
    """Return the measured results."""
    results: _File = json.loads(DATA.read_text(encoding="utf-8"))
    return results


def draw_results() -> Picture:
    """Draw the processor time of each query."""
    results = read_results()
    queries = results["queries"]
    title = f"Nexmark: processor time of a million events, {results['events']:,} events"
    words = " ".join(f"{one['query']}: {one['cpu_s_per_million']:.2f} s." for one in queries)
    picture = Picture(title, words, _WIDTH, _TOP + _PITCH * len(queries) + 40)
    picture.text(24, 34, title, size=16, bold=True)
    picture.text(24, 58, "seconds of one core; a shorter bar is better", muted=True)
    scale = _BARS_WIDTH / max(one["cpu_s_per_million"] for one in queries)
    for number, one in enumerate(queries):
        top = _TOP + number * _PITCH
        width = round(one["cpu_s_per_million"] * scale, 1)
        picture.text(24, top + 13, one["query"])
        label = f"{one['cpu_s_per_million']:.2f} s, {one['events_per_second']:,} events/s"
        picture.text(_LEFT + width + 8, top + 13, label, size=12)
        picture.bar(Box(_LEFT, top, width, 17), filled=True)
    note = f"Measured on 2 virtual cores that other programs used, {results['date']}."
    picture.text(24, picture.height - 14, note, size=12, muted=True)
    return picture


def fill_page(page: str) -> str:
    """Return the text of a page with the results or the code of the queries filled in."""
    parts: Mapping[str, Callable[[], str]] = {"results": _make_table, "queries": _make_code}
    return _PART.sub(
        lambda match: f"<!-- nexmark: {match[1]} -->\n{parts[match[1]]()}<!-- end -->\n", page
    )


def _make_table() -> str:
    columns = (
        *("query", "CPU s a million events", "events/s", "largest checkpoint"),
        *("thousand events a second and core", "Flink's, as published"),
    )
    lines = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    for one in read_results()["queries"]:
        published = PUBLISHED[int(one["query"][1:])]
        cells = (
            one["query"],
            f"{one['cpu_s_per_million']:.2f}",
            f"{one['events_per_second']:,}",
            f"{one['state_bytes'] / 1e6:.1f} MB",
            f"{1_000 / one['cpu_s_per_million']:,.0f}",
            "–" if published is None else f"{published:g}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _make_code() -> str:
    """Return the code of the queries, without the imports and the table of queries."""
    text = QUERIES.read_text(encoding="utf-8")
    first, last = (
        next(
            node.lineno
            for node in ast.parse(text).body
            if isinstance(node, ast.Assign | ast.AnnAssign) and name in ast.unparse(node)[:20]
        )
        for name in ("SECOND = ", "QUERIES: ")
    )
    code = "\n".join(text.splitlines()[first - 1 : last - 1]).strip()
    return f"```python\n{code}\n```\n"
