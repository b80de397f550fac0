"""The creation times of the records that a source has read between two barriers, summarized.

Times are those of the source, in milliseconds since 1970. A summary counts records in intervals of
one width. The width is a power of two, so the intervals of two summaries merge without an error.

Bounds: len(RecordTimes.counts) <= INTERVALS_MAX. A time is off by at most half the width: 16 ms for
live records and a checkpoint every 5 s. A record older than AGE_MAX_MS is counted as that old, but
the sum of times is exact.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

INTERVALS_MAX = 256
"""The maximum number of intervals, which keeps a source subtask's part of an ack below 2 KB."""
AGE_MAX_MS = 301_000
"""The maximum age that is counted: above 300 s, the largest finite bound of the final histogram."""


@dataclass(frozen=True, slots=True)
class RecordTimes:
    """The number of records that were created in each interval."""

    width_ms: int
    counts: dict[int, int] = field(default_factory=dict[int, int])
    """The number of records by interval number, which is a time // `width_ms`."""
    total_ms: int = 0
    """The sum of all times."""

    def list_latencies_s(self, visible_at_ms: float) -> Iterator[tuple[float, int]]:
        """Yield (seconds until `visible_at_ms`, records); 0 s if a record's clock is ahead."""
        for interval, count in self.counts.items():
            made_at_ms = (interval + 0.5) * self.width_ms
            yield max(0.0, visible_at_ms - made_at_ms) / 1000, count

    def sum_latencies_s(self, visible_at_ms: float) -> float:
        """Return the sum of all records' seconds until `visible_at_ms`."""
        count = sum(self.counts.values())
        return max(0.0, count * visible_at_ms - self.total_ms) / 1000


class RecordTimesCounter:
    """A counter of record times. Its owner serializes the calls."""

    def __init__(self) -> None:
        self._reset()

    def add(self, times: Iterable[tuple[int, int]], now_ms: int) -> None:
        """Count `times`, which are pairs (time in ms, number of records)."""
        oldest_ms = now_ms - AGE_MAX_MS
        for time_ms, count in times:
            self._total_ms += time_ms * count
            self._count(max(time_ms, oldest_ms) // self._width_ms, count)
        self._bound()

    def merge(self, times: RecordTimes) -> None:
        """Add the counts of `times`."""
        self._widen(times.width_ms)
        factor = self._width_ms // times.width_ms
        self._total_ms += times.total_ms
        for interval, count in times.counts.items():
            self._count(interval // factor, count)
        self._bound()

    def take(self) -> RecordTimes | None:
        """Return the counts since the last call and reset; None if there are none."""
        taken = RecordTimes(self._width_ms, self._counts, self._total_ms)
        self._reset()
        return taken if taken.counts else None

    def _reset(self) -> None:
        self._width_ms = 1
        self._counts: dict[int, int] = {}
        self._total_ms = 0

    def _count(self, interval: int, count: int) -> None:
        self._counts[interval] = self._counts.get(interval, 0) + count

    def _bound(self) -> None:
        while len(self._counts) > INTERVALS_MAX:
            self._widen(2 * self._width_ms)

    def _widen(self, width_ms: int) -> None:
        """Make intervals at least `width_ms` wide."""
        if width_ms <= self._width_ms:
            return
        factor, self._width_ms = width_ms // self._width_ms, width_ms
        counts, self._counts = self._counts, {}
        for interval, count in counts.items():
            self._count(interval // factor, count)
