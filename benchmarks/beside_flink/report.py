"""The results of the comparison with Flink, for people and for programs. A ratio is of one turn."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from rich.table import Table

from benchmarks.beside_flink.databases import LedgerTurns
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
    flink: Spread | None
    """None of a part that only ours has, and no ratio either."""
    ratio: Spread | None

    @classmethod
    def of(
        cls,
        title: str,
        backend: str,
        figure: str,
        ours: Sequence[float],
        flink: Sequence[float] | None,
    ) -> Compared:
        """Return it; figures of one turn are at the same index."""
        if flink is None:
            return cls(title, backend, figure, Spread.of(ours), None, None)
        ratio = Spread.of(one / other for one, other in zip(ours, flink, strict=True))
        return cls(title, backend, figure, Spread.of(ours), Spread.of(flink), ratio)

    def as_json(self) -> dict[str, object]:
        """Return it for `--json`."""
        return {
            "work": self.work,
            "backend": self.backend,
            "figure": self.figure,
            "ours": self.ours.as_json(),
            "flink": None if self.flink is None else self.flink.as_json(),
            "ratio": None if self.ratio is None else self.ratio.as_json(),
        }


def compared(found: Sequence[Turns]) -> list[Compared]:
    """Return every figure: rows a second, or of checkpoints where rows come at a pace."""
    return [
        Compared.of(
            turns.work.title,
            turns.backend,
            figure,
            [value(run) for run in turns.ours],
            [value(run) for run in turns.flink],
        )
        for turns in found
        for figure, value in (_CHECKPOINT_FIGURES if turns.work.is_paced else _RATE).items()
    ]


def compared_ledgers(found: Sequence[LedgerTurns]) -> list[Compared]:
    """Return rows a second, and CPU seconds a million records of each group of processes."""
    return [one for turns in found for one in _compared_ledger(turns)]


def _compared_ledger(turns: LedgerTurns) -> Iterator[Compared]:
    work = turns.work
    rates = ([run.rows_per_second for run in runs] for runs in (turns.ours, turns.flink))
    yield Compared.of(work.title, work.backend, "rows/s", *rates)
    for group, figure in {**_ENGINE_GROUPS, work.database: "database", "kafka": "Kafka"}.items():
        ours, flink = (
            [run.cpu_s_per_million[group] for run in runs if group in run.cpu_s_per_million]
            for runs in (turns.ours, turns.flink)
        )
        yield Compared.of(work.title, work.backend, f"CPU s/M: {figure}", ours, flink or None)


def _median_of(value: Callable[[Checkpoint], float]) -> Callable[[Run], float]:
    return lambda run: statistics.median(value(checkpoint) for checkpoint in run.checkpoints)


_ENGINE_GROUPS = {
    "engine": "engine",
    "slots": "of it slots",
    "jvm": "of it JVM of the driver",
    "driver": "of it driver",
}
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
    return _table("The same work in Flink", compared(found))


def ledgers_table(found: Sequence[LedgerTurns], records: int) -> Table:
    """Return a row for each figure."""
    return _table(f"The ledger in Flink, {records:,} records", compared_ledgers(found))


def _table(title: str, figures: Sequence[Compared]) -> Table:
    table = figure_table(
        f"{title}; except rows/s, less is better",
        *("work", "backend", "figure", "ours", "Flink", "ours / Flink"),
    )
    for figure in figures:
        digits = 0 if figure.figure == "rows/s" else 2
        table.add_row(
            *(figure.work, figure.backend, figure.figure, figure.ours.shown(digits)),
            "" if figure.flink is None else figure.flink.shown(digits),
            "" if figure.ratio is None else figure.ratio.shown(2),
        )
    return table
