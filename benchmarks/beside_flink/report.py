"""What the comparison with Flink found, for a person and for a program. A ratio is of one turn."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.table import Table

from benchmarks.beside_flink.measuring import Checkpoint, Run, Turns
from benchmarks.spread import Spread
from benchmarks.tables import figure_table


@dataclass(frozen=True, slots=True)
class Compared:
    """One figure of both engines; `ratio` is ours by Flink's."""

    work: str
    backend: str
    figure: str
    ours: Spread
    flink: Spread
    ratio: Spread

    def as_json(self) -> dict[str, object]:
        """Return it for `--json`."""
        return {
            "work": self.work,
            "backend": self.backend,
            "figure": self.figure,
            "ours": self.ours.as_json(),
            "flink": self.flink.as_json(),
            "ratio": self.ratio.as_json(),
        }


def compared(found: Sequence[Turns]) -> list[Compared]:
    """Return every figure: rows a second, or of checkpoints where rows come at a pace."""
    return [
        _compared(turns, figure, value)
        for turns in found
        for figure, value in (_CHECKPOINT_FIGURES if turns.work.is_paced else _RATE).items()
    ]


def _compared(turns: Turns, figure: str, value: Callable[[Run], float]) -> Compared:
    ours, flink = ([value(run) for run in runs] for runs in (turns.ours, turns.flink))
    ratio = Spread.of(one / other for one, other in zip(ours, flink, strict=True))
    spreads = Spread.of(ours), Spread.of(flink), ratio
    return Compared(turns.work.title, turns.backend, figure, *spreads)


def _median_of(value: Callable[[Checkpoint], float]) -> Callable[[Run], float]:
    return lambda run: statistics.median(value(one) for one in run.checkpoints)


_RATE: dict[str, Callable[[Run], float]] = {
    "rows/s": lambda run: run.rows_per_second,
    "CPU us a row": lambda run: run.cpu_us_per_row,
}
_CHECKPOINT_FIGURES: dict[str, Callable[[Run], float]] = {
    "checkpoint, ms": _median_of(lambda one: one.duration_ms),
    # Flink tells whole milliseconds: of less than one it says 0.
    "its synchronous part, ms": _median_of(lambda one: max(one.sync_ms, 0.5)),
}


def flink_table(found: Sequence[Turns]) -> Table:
    """Return a row for each figure."""
    table = figure_table(
        "The same work in Flink; except rows/s, less is better",
        *("work", "backend", "figure", "ours", "Flink", "ours / Flink"),
    )
    for one in compared(found):
        digits = 0 if one.figure == "rows/s" else 2
        spreads = one.ours.shown(digits), one.flink.shown(digits), one.ratio.shown(2)
        table.add_row(one.work, one.backend, one.figure, *spreads)
    return table
