"""The results of the queries, for people and for programs."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import msgspec
from rich.table import Table

from benchmarks.nexmark.job import Result
from benchmarks.tables import figure_table


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one query. Figures are medians; None if nothing was measured."""

    query: str
    difference: str
    """The difference from the right result, or the error of the job; empty if it is right."""
    cpu_s_per_million: float | None = None
    """CPU seconds of all processes of the job for a million events."""
    events_per_second: float | None = None
    state_bytes: int | None = None
    """The size of the largest checkpoint."""

    @classmethod
    def of(cls, query: str, difference: str, runs: Sequence[Result]) -> Measured:
        """Return the medians of `runs`."""
        if not runs:
            return cls(query=query, difference=difference)
        cpu_s = statistics.median(run.cpu_s / run.events * 1e6 for run in runs)
        return cls(
            query=query,
            difference=difference,
            cpu_s_per_million=round(cpu_s, 3),
            events_per_second=round(statistics.median(run.events / run.seconds for run in runs)),
            state_bytes=max(run.state_bytes_max for run in runs),
        )

    @property
    def verdict(self) -> str:
        """The verdict in a word."""
        return "wrong" if self.difference else "right"

    def as_line(self) -> str:
        """Return the result for a person, as progress."""
        verdict = self.difference or self.verdict
        if self.cpu_s_per_million is None:
            return f"{self.query}: {verdict}"
        return (
            f"{self.query}: {verdict}; {self.cpu_s_per_million:.2f} CPU s a million events,"
            f" {self.events_per_second:,} events/s"
        )


def make_table(results: Sequence[Measured], title: str) -> Table:
    """Return a row for each query."""
    table = figure_table(
        f"Nexmark, {title}",
        *("query", "result", "CPU s a million events", "events/s", "state, MB"),
    )
    for one in results:
        table.add_row(
            one.query,
            one.verdict,
            "" if one.cpu_s_per_million is None else f"{one.cpu_s_per_million:.2f}",
            "" if one.events_per_second is None else f"{one.events_per_second:,}",
            "" if one.state_bytes is None else f"{one.state_bytes / 1e6:.2f}",
        )
    return table
