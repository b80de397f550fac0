"""The sinks' figures as a table and as an object."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from benchmarks.sinks.measuring import BARRIER_ROWS, SMALL_ROWS, WayFigures


def sinks_table(figures: Sequence[WayFigures], rows: int) -> Table:
    """Return every way of every sink, each target's beside its bare load."""
    table = Table(
        title=f"Sinks alone, {rows:,} rows; checkpoints of {BARRIER_ROWS:,} rows, "
        f"small ones of {SMALL_ROWS:,}; ms",
        title_justify="left",
    )
    table.add_column("target")
    table.add_column("way")
    for heading in ("rows/s", "of bare", "wanted", "pre-commit", "commit", "small commit p50, p99"):
        table.add_column(heading, justify="right")
    table.add_column("CPU s/M", justify="right")
    shown = ""
    for figure in figures:
        if figure.place != shown:
            shown = figure.place
            table.add_row(figure.place, figure.bare_name, figure.bare_rows_per_second.shown(), "1")
        table.add_row(
            "",
            figure.name,
            figure.rows_per_second.shown(),
            figure.ratio.shown(2),
            _wanted(figure),
            figure.pre_commit_ms.shown(1),
            figure.commit_ms.shown(1),
            f"{figure.small_commit_ms(50):.1f}, {figure.small_commit_ms(99):.1f}",
            figure.cpu_s_per_million.shown(2),
        )
    return table


def sinks_as_json(figures: Sequence[WayFigures]) -> list[dict[str, object]]:
    """Return the same, an object a way."""
    return [
        {
            "target": figure.place,
            "way": figure.name,
            "rows_per_second": figure.rows_per_second.as_json(),
            "bare": figure.bare_name,
            "bare_rows_per_second": figure.bare_rows_per_second.as_json(),
            "ratio": figure.ratio.as_json(),
            "ratio_min": figure.way.ratio_min,
            "pre_commit_ms": figure.pre_commit_ms.as_json(),
            "commit_ms": figure.commit_ms.as_json(),
            "commit_ms_max": figure.way.commit_ms_max,
            "small_commit_ms": {
                "p50": figure.small_commit_ms(50),
                "p99": figure.small_commit_ms(99),
            },
            "cpu_s_per_million": figure.cpu_s_per_million.as_json(),
            "missed": list(figure.missed),
        }
        for figure in figures
    ]


def _wanted(one: WayFigures) -> str:
    goals: list[str] = []
    if one.way.ratio_min is not None:
        goals.append(f"{one.way.ratio_min}")
    if one.way.commit_ms_max is not None:
        goals.append(f"{one.way.commit_ms_max:g} ms")
    if not goals:
        return ""
    return ", ".join(goals) + (": [bold red]missed[/bold red]" if one.missed else ": met")
