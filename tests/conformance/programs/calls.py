"""The calls of `async_map` without an event loop on a thread of its own: the same in each run."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from onceflow.core.plan.async_functions import Call, CallLimits
from onceflow.core.runtime.dataflow import async_operator
from onceflow.core.runtime.dataflow.async_calls import PendingCall

_LOOKS_MAX = 2
"""An attempt is quiet after more looks without anything to do."""


async def answer(record: dict[str, Any]) -> dict[str, Any]:
    """Return the record."""
    return record


class StepwiseCalls:
    """Calls that end when the operator has looked for them up to `_LOOKS_MAX` times."""

    cpu_s = 0.0

    def __init__(self, uid: str, function: Call, limits: CallLimits) -> None:
        self._function = function
        self._capacity = limits.capacity
        self._rng = random.Random(uid)
        self._running: list[list[Any]] = []
        self._done: deque[PendingCall] = deque()

    def attach(self, wake: Callable[[], None]) -> None:
        """Do nothing: subtasks are stepped."""

    def open(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Abandon all calls."""
        self._running.clear()

    def start(self, calls: Sequence[PendingCall]) -> None:
        """Begin calls."""
        self._running += [[self._rng.randint(0, _LOOKS_MAX), call] for call in calls]
        assert len(self._running) + len(self._done) <= self._capacity

    @property
    def has_done(self) -> bool:
        """True if a call has ended. Each look is a step of time for the others."""
        for waiting in self._running:
            waiting[0] -= 1
        for _, call in [waiting for waiting in self._running if waiting[0] < 0]:
            call.result = self._complete(call)
            self._done.append(call)
        self._running = [waiting for waiting in self._running if waiting[0] >= 0]
        return bool(self._done)

    def take_done(self) -> list[PendingCall]:
        """Return the calls that have ended."""
        done = list(self._done)
        self._done.clear()
        return done

    def wait(self, timeout_s: float) -> None:
        """Look once."""
        assert timeout_s > 0
        assert self.has_done or self._running

    def _complete(self, call: PendingCall) -> Any:
        coroutine: Any = self._function(*call.arguments)
        try:
            coroutine.send(None)
        except StopIteration as end:
            return end.value
        raise AssertionError("the coroutine waits")


@contextmanager
def with_stepwise_calls() -> Generator[None]:
    """Let operators of this process use `StepwiseCalls`."""
    with patch.object(async_operator, "CallLoop", StepwiseCalls):
        yield
