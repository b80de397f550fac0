"""Nexmark in the documents: the chart, the table of results, and the code of the queries.

nexmark.json is the output of `python -m benchmarks.nexmark --json`, and nexmark-flink.json that of
`python -m benchmarks.nexmark --beside flink --json`.
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
FLINK_DATA = Path(__file__).with_name("nexmark-flink.json")
PAGE = Path(__file__).resolve().parents[1] / "reference" / "nexmark-queries.md"
QUERIES = Path(__file__).resolve().parents[2] / "benchmarks" / "nexmark" / "queries.py"
PUBLISHED = (
    *(155, 158, 175, 152, 34.3, 22.1, None, 12.3, 146, 14.2, 57.8, 39.7),
    *(75.7, 131, 161, 72.4, 18.7, 117, 53.7, 44.0, 19.0, 98.5, 130),
)
"""Thousand events a second and core of Flink, by query, as the benchmark's repository publishes."""

_PART = re.compile(r"^<!-- nexmark: (\w+) -->\n.*?^<!-- end -->\n", re.MULTILINE | re.DOTALL)
_WIDTH = 960
_LEFT = 70
_BARS_WIDTH = 620
_BAR = 13
_PITCH = 38
_TOP = 74


class _Query(TypedDict):
    query: str
    difference: str
    cpu_s_per_million: float
    events_per_second: int
    state_bytes: int


class _Spread(TypedDict):
    median: float
    min: float
    max: float
    runs: int


class _Runs(TypedDict):
    cpu_s_per_million: _Spread
    events_per_second: _Spread


class _Turns(TypedDict):
    query: str
    difference: str
    flink_difference: str | None
    ours: _Runs
    flink: _Runs
    ratio: _Spread


class _File(TypedDict):
    date: str
    events: int
    load_average: list[float]
    queries: list[_Query]


class _FlinkFile(TypedDict):
    date: str
    events: int
    flink: str
    load_average: list[float]
    load_average_end: list[float]
    runs: int
    warm_up_cpu_s: float
    queries: list[_Turns]


def read_results() -> _File:
    """Return the measured results."""
    results: _File = json.loads(DATA.read_text(encoding="utf-8"))
    return results


def read_flink_results() -> _FlinkFile:
    """Return the measured results of both engines."""
    results: _FlinkFile = json.loads(FLINK_DATA.read_text(encoding="utf-8"))
    return results


def draw_results() -> Picture:
    """Draw the processor time of each query in both engines."""
    results = read_flink_results()
    queries = sorted(results["queries"], key=lambda turns: int(turns["query"][1:]))
    title = f"Nexmark: processor time of a million events, onceflow and Flink {results['flink']}"
    words = " ".join(
        f"{turns['query']}: onceflow {_cpu_s(turns['ours']):.2f} s,"
        f" Flink {_cpu_s(turns['flink']):.2f} s."
        for turns in queries
    )
    picture = Picture(title, words, _WIDTH, _TOP + _PITCH * len(queries) + 40)
    picture.text(24, 34, title, size=16, bold=True)
    picture.text(24, 58, "seconds of one core; a shorter bar is better", muted=True)
    longest = max(_cpu_s(runs) for turns in queries for runs in (turns["ours"], turns["flink"]))
    for number, turns in enumerate(queries):
        top = _TOP + number * _PITCH
        picture.text(24, top + 18, turns["query"])
        for line, (name, runs) in enumerate(
            (("onceflow", turns["ours"]), ("Flink", turns["flink"]))
        ):
            width = round(_cpu_s(runs) * _BARS_WIDTH / longest, 1)
            bar_top = top + line * (_BAR + 2)
            label = f"{name} {_cpu_s(runs):.2f} s"
            picture.text(_LEFT + width + 8, bar_top + 11, label, size=12)
            picture.bar(Box(_LEFT, bar_top, width, _BAR), filled=name == "onceflow")
    note = f"{results['events']:,} events, one slot, heap, exactly once, {results['date']}."
    picture.text(24, picture.height - 14, note, size=12, muted=True)
    return picture


def _cpu_s(runs: _Runs) -> float:
    return runs["cpu_s_per_million"]["median"]


def fill_page(page: str) -> str:
    """Return the text of a page with the results or the code of the queries filled in."""
    parts: Mapping[str, Callable[[], str]] = {"results": _make_table, "queries": _make_code}
    return _PART.sub(
        lambda match: f"<!-- nexmark: {match[1]} -->\n{parts[match[1]]()}<!-- end -->\n", page
    )


def _make_table() -> str:
    columns = (
        *("query", "CPU s a million events", "Flink's", "ours / Flink"),
        *("generated events: CPU s a million", "events/s", "largest checkpoint"),
        "Flink, published: thousand events a second and core",
    )
    lines = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    turns_of = {turns["query"]: turns for turns in read_flink_results()["queries"]}
    for result in read_results()["queries"]:
        published = PUBLISHED[int(result["query"][1:])]
        cells = (
            result["query"],
            *_make_turns(turns_of.get(result["query"])),
            f"{result['cpu_s_per_million']:.2f}",
            f"{result['events_per_second']:,}",
            f"{result['state_bytes'] / 1e6:.1f} MB",
            "–" if published is None else f"{published:g}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", *_describe_turns()]) + "\n"


def _describe_turns() -> tuple[str, str]:
    """Return the conditions of the comparison with Flink, in two lines."""
    results = read_flink_results()
    loads = f"{results['load_average'][0]:g} at the start and {results['load_average_end'][0]:g}"
    facts = (
        f"Beside Flink {results['flink']}: {results['events']:,} events, turns: {results['runs']},"
        f" CPU seconds of warm-up for each query: {results['warm_up_cpu_s']:g}."
    )
    return facts, f"Measured on {results['date']}. The load average was {loads} at the end."


def _make_turns(turns: _Turns | None) -> tuple[str, str, str]:
    """Return the cells of both engines. Flink SQL cannot run one query."""
    if turns is None:
        return "–", "–", "–"
    ratio = turns["ratio"]
    spread = f" ({ratio['min']:.2f} to {ratio['max']:.2f})" if ratio["runs"] > 1 else ""
    return (
        f"{_cpu_s(turns['ours']):.2f}",
        f"{_cpu_s(turns['flink']):.2f}",
        f"**{ratio['median']:.2f}**{spread}",
    )


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
