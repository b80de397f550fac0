"""The clock by which state expires and processing-time timers fire."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeAlias

WallClock: TypeAlias = Callable[[], float]


class StateClock:
    """A clock in ms since 1970 that never goes back, even if the machine's clock does."""

    def __init__(self, wall_clock: WallClock = time.time) -> None:
        self._wall_clock = wall_clock
        self._latest_ms = 0

    def now_ms(self) -> int:
        """Return the time in ms since 1970."""
        self._latest_ms = max(self._latest_ms, int(self._wall_clock() * 1000))
        return self._latest_ms
