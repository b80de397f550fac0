"""What is said of a sink that breaks a clause."""

from __future__ import annotations

import traceback


class Violation(AssertionError):
    """Raised when a sink breaks a clause; says what was seen and what should have been."""


def told(error: BaseException) -> str:
    """Return what was raised, and at which line: the sink's author has no other trace of it."""
    frames = traceback.extract_tb(error.__traceback__)
    at = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{at}"


def expect(holds: object, message: str) -> None:
    """Return when `holds`.

    Raises:
        Violation: It does not; `message` says what was seen.
    """
    # What a sink's author looks for in a traceback is the sink, and not this.
    __tracebackhide__ = True
    if not holds:
        raise Violation(message)
