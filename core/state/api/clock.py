"""The clock by which what is kept expires."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeAlias

WallClock: TypeAlias = Callable[[], float]


class StateClock:
    """Milliseconds since 1970 that never go back, though the machine's clock may."""

    def __init__(self, wall_clock: WallClock = time.time) -> None:
        self._wall_clock = wall_clock
        self._latest_ms = 0

    def now_ms(self) -> int:
        """Return the time."""
        self._latest_ms = max(self._latest_ms, int(self._wall_clock() * 1000))
        return self._latest_ms
