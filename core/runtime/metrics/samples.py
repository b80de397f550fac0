"""The values collected for a scrape: samples of a metric, and histograms."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from onceflow.core.runtime.metrics.metric_catalog import Metric


@dataclass(frozen=True, slots=True)
class HistogramValue:
    """The current value of a histogram.

    `counts[i]` counts values in the bucket up to `bounds[i]`.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    """The count per bucket, not cumulated: len(counts) == len(bounds) + 1. The last bucket has no
    bound."""
    total: float

    @property
    def count(self) -> int:
        """The number of values."""
        return sum(self.counts)


class Histogram:
    """A histogram that counts values. Its owner serializes the calls."""

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
        """Count each (value, number of times); `total` is the sum of all values."""
        for value, count in values:
            self._counts[bisect_left(self._bounds, value)] += count
        self._total += total

    def add(self, counts: Sequence[int], total: float) -> None:
        """Add the counts of another histogram with the same bounds."""
        for index, count in enumerate(counts):
            self._counts[index] += count
        self._total += total

    def value(self) -> HistogramValue:
        """Return the current value of the histogram."""
        return HistogramValue(self._bounds, tuple(self._counts), self._total)


Value: TypeAlias = float | HistogramValue


@dataclass(frozen=True, slots=True)
class Family:
    """A metric with its samples: the values of its labels, and the value.

    An empty label value means that the sample does not have this label.
    """

    metric: Metric
    samples: tuple[tuple[tuple[str, ...], Value], ...]
