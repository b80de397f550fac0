"""The always-on check: unlike `assert`, it also runs under `python -O`."""

from __future__ import annotations


class InvariantViolation(AssertionError):
    """Raised when onceflow itself is wrong. Never caught: it ends the subtask or the driver."""


def require(condition: bool, message: str) -> None:
    """Return when `condition` holds.

    Raises:
        InvariantViolation: It does not; `message` says which rule broke.
    """
    if not condition:
        raise InvariantViolation(message)
