"""The sources and targets that all processes of a schedule share, although programs are pickled."""

from __future__ import annotations

from typing import Any

_shared: dict[int, Any] = {}


class Shared:
    """Unpickles as itself: it stands for a server outside of all processes."""

    def __reduce__(self) -> tuple[Any, ...]:
        _shared[id(self)] = self
        return _find_shared, (id(self),)


def _find_shared(key: int) -> Any:
    return _shared[key]


def forget_shared() -> None:
    """Forget what the schedules before have shared."""
    _shared.clear()
