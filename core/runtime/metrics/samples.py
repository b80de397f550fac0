"""Values as they are collected for a scrape: samples of a metric, and histograms."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from onceflow.core.runtime.metrics.metric_catalog import Metric


@dataclass(frozen=True, slots=True)
class HistogramValue:
    """A histogram as of now. `counts[i]` values are <= `bounds[i]`; the last is of the rest."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    """One a bucket, not summed up: len(counts) == len(bounds) + 1."""
    total: float

    @property
    def count(self) -> int:
        """How many values there were."""
        return sum(self.counts)


class Histogram:
    """Counts values. Its owner serializes the calls."""

    __slots__ = ("_bounds", "_counts", "_total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._total = 0.0

    def observe(self, value: float) -> None:
        """Count `value`."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    def observe_all(self, values: Iterable[tuple[float, int]], total: float) -> None:
        """Count each (value, how often); `total` is the sum of them all."""
        for value, count in values:
            self._counts[bisect_left(self._bounds, value)] += count
        self._total += total

    def add(self, counts: Sequence[int], total: float) -> None:
        """Count what another histogram of the same bounds has counted."""
        for index, count in enumerate(counts):
            self._counts[index] += count
        self._total += total

    def value(self) -> HistogramValue:
        """Return what was counted up to now."""
        return HistogramValue(self._bounds, tuple(self._counts), self._total)


Value: TypeAlias = float | HistogramValue


@dataclass(frozen=True, slots=True)
class Family:
    """One metric with its samples: values of its labels, and the value.

    An empty value stands for a label that the sample does not have.
    """

    metric: Metric
    samples: tuple[tuple[tuple[str, ...], Value], ...]
