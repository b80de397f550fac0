"""A gallery of sinks that are each wrong in one way, most of them as some real system is.

Each is the reference sink with one step done wrong, and names the one clause on which it must fail.
"""

from __future__ import annotations

from tests.conformance import (
    broken_beginners,
    broken_committers,
    broken_latecomers,
    broken_writers,
)
from tests.conformance.broken_sink import BrokenSink

GALLERY: tuple[type[BrokenSink], ...] = tuple(
    found
    for module in (broken_writers, broken_committers, broken_latecomers, broken_beginners)
    for found in vars(module).values()
    if isinstance(found, type) and issubclass(found, BrokenSink) and found is not BrokenSink
)
