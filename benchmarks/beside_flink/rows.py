"""Counts the rows that went into a job over time, and those that must have come out at its end."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.beside_flink.works import ACCOUNTS, JOIN_MS, PARALLELISM, WINDOW_MS

# Where only chance says how many exactly.
_TOLERANCE = 0.02


class Progress:
    """The number of rows that each source's subtask had read over time, by its files."""

    def __init__(self, directory: Path) -> None:
        paths = sorted(directory.glob("progress-*"))
        self._subtasks = [noted for path in paths if (noted := _noted(path))[0]]

    def is_known_of(self, subtasks: int, until_s: float) -> bool:
        """True if enough subtasks have reported a time of `until_s` or later."""
        return sum(times[-1] >= until_s for times, _ in self._subtasks) >= subtasks

    def rows(self) -> list[int]:
        """Return how many each has read, by source and subtask."""
        return [int(rows[-1]) for _, rows in self._subtasks]

    def rows_at(self, at_s: float) -> float:
        """Return how many all had read at a time, between two lines in proportion."""
        return sum(float(np.interp(at_s, *noted, left=0)) for noted in self._subtasks)

    def passed_s(self, rows: float) -> float | None:
        """Return when all together had read `rows`, or more than none; None if they have not."""
        noted_at = sorted({at for times, _ in self._subtasks for at in times})
        return next((at for at in noted_at if self.rows_at(at) >= max(rows, 1)), None)


def _noted(path: Path) -> tuple[list[float], list[float]]:
    # The last line may be half written.
    lines = [line.split() for line in path.read_text().rpartition("\n")[0].splitlines()]
    return [float(line[0]) for line in lines], [float(line[1]) for line in lines]


def rows_out(work: str, read: Sequence[int]) -> tuple[float, float]:
    """Return the least and the most rows that come out of `read`, by source and subtask."""
    match work:
        case "windows":
            # Those that have come out: the slower subtask's event time says how many.
            windows = min(read) * PARALLELISM // WINDOW_MS
            keys = ACCOUNTS * (1 - (1 - 1 / ACCOUNTS) ** WINDOW_MS)
            return (windows - 1 - _TOLERANCE) * keys, (windows + _TOLERANCE) * keys
        case "join":
            pairs = pairs_near(read[:PARALLELISM], read[PARALLELISM:], JOIN_MS) / ACCOUNTS
            return pairs * (1 - _TOLERANCE), pairs * (1 + _TOLERANCE)
        case _:
            return sum(read), sum(read)


def pairs_near(left: Sequence[int], right: Sequence[int], apart_ms: int) -> float:
    """Return how many pairs of two streams are near in time, whatever their keys.

    Row n of split k of s is of the millisecond n * s + k.
    """
    splits = len(left)

    def right_until(at_ms: npt.NDArray[np.int64]) -> Any:
        each = [np.clip((at_ms - split) // splits + 1, 0, rows) for split, rows in enumerate(right)]
        return np.sum(each, axis=0)

    found = 0.0
    for split, rows in enumerate(left):
        times = np.arange(rows) * splits + split
        found += float((right_until(times + apart_ms) - right_until(times - apart_ms - 1)).sum())
    return found
