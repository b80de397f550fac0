"""The arithmetic of event time windows: which contain a moment, and when they are due and over.

Time is cut into panes. Each pane lies wholly inside or outside of any window: pane p holds offset +
p * pane <= t < offset + (p + 1) * pane, in milliseconds since 1970. The state of a key is stored
once per pane, even if many windows overlap there.

Invariants, for a window start <= t < end and a watermark w:
    it is due   <=>  end - 1 <= w;  it is over  <=>  end - 1 + lateness <= w
    a record is late  <=>  all windows that it is in are over
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import gcd


@dataclass(frozen=True, slots=True)
class PaneWindows:
    """Windows of `size_ms`, one beginning every `slide_ms`, which is at most `size_ms`."""

    size_ms: int
    slide_ms: int
    offset_ms: int = 0
    lateness_ms: int = 0

    @property
    def pane_ms(self) -> int:
        """The length of a pane."""
        return gcd(self.size_ms, self.slide_ms)

    @property
    def overlap(self) -> bool:
        """True if a moment is in more than one window."""
        return self.slide_ms < self.size_ms

    def start_of(self, pane: int) -> int:
        """Return the time at which a pane begins."""
        return self.offset_ms + pane * self.pane_ms

    def ends_of(self, pane: int) -> range:
        """Return the ends of the windows that contain a pane, in order."""
        since = self.start_of(pane) - self.offset_ms
        last = self.offset_ms + since // self.slide_ms * self.slide_ms + self.size_ms
        windows = (last - self.start_of(pane) - 1) // self.slide_ms + 1
        return range(last - (windows - 1) * self.slide_ms, last + 1, self.slide_ms)

    def panes_of(self, end_ms: int) -> range:
        """Return the panes of the window that ends at `end_ms`."""
        stop = (end_ms - self.offset_ms) // self.pane_ms
        return range(stop - self.size_ms // self.pane_ms, stop)

    def last_over(self, watermark: int) -> int:
        """Return the last pane whose windows are all over. Records up to this pane are late."""
        ended = (watermark + 1 - self.lateness_ms - self.size_ms - self.offset_ms) // self.slide_ms
        return (ended + 1) * (self.slide_ms // self.pane_ms) - 1

    def due(self, panes: Iterable[int], after: int, watermark: int) -> list[int]:
        """Return the ends of the windows of `panes` that are due at `watermark`, not at `after`."""
        ends = {end for pane in panes for end in self.ends_of(pane)}
        return sorted(end for end in ends if after < end - 1 <= watermark)

    def next_ms(self, panes: Iterable[int], watermark: int) -> int | None:
        """Return the watermark at which the next window of `panes` is due, or a pane is over."""
        moments: list[int] = []
        for pane in panes:
            ends = self.ends_of(pane)
            moments += [end - 1 for end in ends if end - 1 > watermark][:1]
            moments.append(ends[-1] - 1 + self.lateness_ms)
        return min(moments, default=None)
