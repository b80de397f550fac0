"""Several measurements of one thing: the median, and how far they lay apart."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, least and greatest of at least one value."""

    median: float
    least: float
    greatest: float
    count: int

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Return the spread of `values`."""
        known = sorted(values)
        return cls(statistics.median(known), known[0], known[-1], len(known))

    def as_json(self) -> dict[str, float]:
        """Return it for `--json`."""
        return {
            "median": round(self.median, 3),
            "min": round(self.least, 3),
            "max": round(self.greatest, 3),
            "runs": self.count,
        }

    def shown(self, digits: int = 0) -> str:
        """Return "median (min-max)"."""
        if self.count == 1:
            return f"{self.median:,.{digits}f}"
        return f"{self.median:,.{digits}f} ({self.least:,.{digits}f}-{self.greatest:,.{digits}f})"


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the smallest value that at least `percent` of `values` do not exceed."""
    ordered = sorted(values)
    return round(ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)], 3)
