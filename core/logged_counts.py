"""The rule for warnings that count: a log line at 1, 10, 100 and so on."""

from __future__ import annotations


def gains_digit(before: int, now: int) -> bool:
    """Return True if a count that rises from `before` to `now` is worth a log line.

    So a stream of many bad or late records does not fill the disk with log lines.
    """
    return not before or len(str(before)) < len(str(now))
