"""The check that is always on: unlike `assert`, it also runs under `python -O`."""

from __future__ import annotations

from typing import NoReturn


class InvariantViolation(AssertionError):
    """The error for a bug in onceflow. It is never caught, and ends the subtask or the driver."""


def require(condition: bool, message: str) -> None:
    """Raise InvariantViolation, with the broken rule as `message`, unless `condition` holds."""
    if not condition:
        raise InvariantViolation(message)


def unreachable(value: NoReturn) -> NoReturn:
    """Raise: type checkers prove that a `match` before it covers every case of `value`.

    Raises:
        InvariantViolation: Always (a value of no known type came from outside the type checker).
    """
    raise InvariantViolation(f"no case for {value!r}")
