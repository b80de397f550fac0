"""Text for people about points in time and durations of a job."""

from __future__ import annotations

from datetime import datetime, timezone


def describe_moment(at_s: float, now_s: float | None) -> str:
    """Return " at …", with the age if `now_s` is given; empty if `at_s` is 0.

    Both are in seconds since the epoch; the text is in UTC.
    """
    if not at_s:
        return ""
    text = f" at {datetime.fromtimestamp(at_s, timezone.utc):%Y-%m-%d %H:%M:%S} UTC"
    return text if now_s is None else f"{text}, {describe_age(now_s - at_s)} ago"


def describe_age(seconds: float) -> str:
    """Return a duration as text in seconds, minutes, hours or days, depending on its length."""
    left = max(0, int(seconds))
    if left < 60:
        return f"{left} s"
    minutes, left = divmod(left, 60)
    if minutes < 60:
        return f"{minutes} min {left} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 48 else f"{hours // 24} days"
