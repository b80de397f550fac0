"""The median and the 99th percentile of the latencies of the last one or two minutes.

They show the current latency: a histogram of the whole run hides that the last minute was slow.
Latencies are counted in buckets, each 5 % wider than the one before, so the error of a percentile
is at most 5 %.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

from onceflow.core.runtime.metrics.samples import Histogram

WINDOW_S = 60.0
_BOUNDS = tuple(0.001 * 1.05**power for power in range(260))
"""The bounds from 1 ms to 307 s, in seconds: `record_times` does not distinguish older times."""


@dataclass(frozen=True, slots=True)
class RecentLatency:
    """The latency of records that became visible in the last one or two windows of 60 s."""

    records: int
    p50_s: float
    p99_s: float


class RecentTimes:
    """Counts latencies in the current window, and keeps the previous window.

    The owner serializes the calls. Times are those of the wall clock; if the clock goes back, a new
    window begins.
    """

    def __init__(self) -> None:
        self._window: int = 0
        self._now = Histogram(_BOUNDS)
        self._before = Histogram(_BOUNDS)

    def add(self, latencies: Iterable[tuple[float, int]], at_s: float) -> None:
        """Count each (seconds, records) at time `at_s`."""
        self._turn(at_s)
        self._now.observe_all(latencies, 0.0)

    def read(self, now_s: float) -> RecentLatency | None:
        """Return the percentiles at `now_s`, or None if no record has become visible recently."""
        self._turn(now_s)
        pairs = zip(self._now.value().counts, self._before.value().counts, strict=True)
        sums = tuple(accumulate(now + before for now, before in pairs))
        if not sums[-1]:
            return None
        return RecentLatency(sums[-1], _find_percentile(sums, 0.5), _find_percentile(sums, 0.99))

    def _turn(self, now_s: float) -> None:
        window = int(now_s // WINDOW_S)
        if window == self._window:
            return
        is_next = window == self._window + 1
        self._before = self._now if is_next else Histogram(_BOUNDS)
        self._now = Histogram(_BOUNDS)
        self._window = window


def _find_percentile(sums: tuple[int, ...], share: float) -> float:
    """Return the upper bound of the bucket that reaches `share` of all latencies.

    `sums[i]` latencies are <= `_BOUNDS[i]`; those above the last bound count as the last bound.
    """
    rank = share * sums[-1]
    reached = next(index for index, count in enumerate(sums) if count >= rank)
    return _BOUNDS[min(reached, len(_BOUNDS) - 1)]
