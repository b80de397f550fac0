"""Rows a second through every sink, in turns, so that ratios hold.

In a turn each target takes the bare load first and then each way once. Every load is verified: what
left a wrong row gives no figure.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.sinks.alone import Alone, Loaded, write_alone
from benchmarks.sinks.place import Effect, Place, Way
from benchmarks.sinks.rows import BATCH_ROWS, Rows
from benchmarks.spread import Spread, percentile

BARRIER_ROWS = 200_000
SMALL_ROWS = 1_000
_SMALL_CHECKPOINTS = 100

Say = Callable[[str], None]


@dataclass(slots=True)
class WayFigures:
    """All turns of one way through one sink."""

    place: str
    bare_name: str
    name: str
    way: Way
    bare: list[Loaded] = field(default_factory=list[Loaded])
    """The bare load of the same turn, each."""
    runs: list[Alone] = field(default_factory=list[Alone])
    small: list[Alone] = field(default_factory=list[Alone])
    """Many small checkpoints, for the latency of a commit."""

    @property
    def rows_per_second(self) -> Spread:
        """Through the sink."""
        return Spread.of(run.rows_per_second for run in self.runs)

    @property
    def bare_rows_per_second(self) -> Spread:
        """Around it."""
        return Spread.of(run.rows_per_second for run in self.bare)

    @property
    def ratio(self) -> Spread:
        """The ratio of both in the same turn."""
        return Spread.of(
            run.rows_per_second / bare.rows_per_second
            for run, bare in zip(self.runs, self.bare, strict=True)
        )

    @property
    def pre_commit_ms(self) -> Spread:
        """The time that barriers of large checkpoints waited for pre-commits, in milliseconds."""
        return Spread.of(one for run in self.runs for one in run.pre_commit_ms)

    @property
    def commit_ms(self) -> Spread:
        """The milliseconds from the decision on a large checkpoint until its rows are visible."""
        return Spread.of(one for run in self.runs for one in run.commit_ms)

    def small_commit_ms(self, percent: float) -> float:
        """The same of small checkpoints, as a percentile."""
        return percentile([one for run in self.small for one in run.commit_ms], percent)

    @property
    def cpu_s_per_million(self) -> Spread:
        """The processor seconds of the sink's process for a million rows."""
        return Spread.of(run.cpu_s / run.rows * 1e6 for run in self.runs)

    @property
    def missed(self) -> tuple[str, ...]:
        """The goals that were not reached, in words."""
        way, found = self.way, list[str]()
        if way.ratio_min is not None and self.ratio.median < way.ratio_min:
            found.append(f"ratio {self.ratio.median:.2f} under {way.ratio_min}")
        if way.commit_ms_max is not None and self.commit_ms.median > way.commit_ms_max:
            found.append(f"commit {self.commit_ms.median:.0f} ms over {way.commit_ms_max:g} ms")
        return tuple(found)


def measure_sinks(
    places: Sequence[Place], rows: Rows, runs: int, say: Say, *, barrier_rows: int = BARRIER_ROWS
) -> list[WayFigures]:
    """Return the figures of every way of every place.

    Raises:
        BenchmarkError: What a load left is wrong.
        OnceflowError: A sink failed.
    """
    found = {
        (place.name, name): WayFigures(place.name, place.bare, name, way)
        for place in places
        for name, way in place.ways.items()
    }
    for run in range(runs):
        for place in places:
            with place.empty() as address:
                bare = place.load_bare(address, rows)
                place.verify(address, rows, Effect.EVERY_ROW)
            say(f"run {run + 1} of {runs}: {place.name}, {place.bare}: {_shown(bare)}")
            for name, way in place.ways.items():
                figures = found[place.name, name]
                figures.bare.append(bare)
                figures.runs.append(_through(place, way, rows, barrier_rows))
                figures.small.append(_in_small_checkpoints(place, way, rows))
                say(f"run {run + 1} of {runs}: {place.name}, {name}: {_shown(figures.runs[-1])}")
    return list(found.values())


def _through(place: Place, way: Way, rows: Rows, barrier_rows: int) -> Alone:
    with place.empty() as address, tempfile.TemporaryDirectory() as directory:
        run = write_alone(
            way.sink(address), rows.batches, barrier_rows=barrier_rows, directory=Path(directory)
        )
        place.verify(address, rows, way.effect)
    return run


def _in_small_checkpoints(place: Place, way: Way, rows: Rows) -> Alone:
    pieces = [
        batch.slice(start, SMALL_ROWS)
        for batch in rows.batches[: _SMALL_CHECKPOINTS * SMALL_ROWS // BATCH_ROWS]
        for start in range(0, batch.num_rows, SMALL_ROWS)
    ]
    with place.empty() as address, tempfile.TemporaryDirectory() as directory:
        return write_alone(
            way.sink(address), pieces, barrier_rows=SMALL_ROWS, directory=Path(directory)
        )


def _shown(load: Loaded) -> str:
    return f"{load.rows_per_second:,.0f} rows/s"
