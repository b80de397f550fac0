"""The base class of all broken sinks of the gallery."""

from __future__ import annotations

from typing import ClassVar

from tests.conformance.reference_sink import ReferenceSink


class BrokenSink(ReferenceSink):
    """Wrong in one way."""

    breaks: ClassVar[str]
    """The clause on which it must fail."""
    rounds: ClassVar[int] = 2
    """How much is tried: one that is wrong at a single line needs every line."""
