"""The calls of `async_map` as tasks, in place of an event loop on a thread of its own."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any

from tests.simulation_runtime.scheduler import do_nothing, scheduler
from tests.simulation_runtime.threads import Event

from onceflow.core.plan.async_functions import AsyncFunction, CallLimits
from onceflow.core.runtime.dataflow.async_calls import PendingCall


class Service(AsyncFunction):
    """Answers each record with the record itself, after a time of up to `longest_s`."""

    def __init__(self, longest_s: float) -> None:
        self.longest_s = longest_s

    async def __call__(self, record: dict[str, Any]) -> dict[str, Any]:
        return record


class CallLoop:
    """Runs each call of one subtask as a task of its slot."""

    cpu_s = 0.0

    def __init__(self, uid: str, function: Service, limits: CallLimits) -> None:
        self._uid = uid
        self._function = function
        self._capacity = limits.capacity
        self._running = 0
        self._done: deque[PendingCall] = deque()
        self._ready = Event()
        self._wake: Callable[[], None] = do_nothing
        self._is_closed = False

    def attach(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    def open(self) -> None:
        pass

    def start(self, calls: Sequence[PendingCall]) -> None:
        run = scheduler()
        self._running += len(calls)
        assert self._running <= self._capacity
        for call in calls:
            process = run.require_alive().process
            run.spawn(process, f"a call of {self._uid}", partial(self._finish, call))

    @property
    def has_done(self) -> bool:
        return bool(self._done)

    def take_done(self) -> list[PendingCall]:
        self._ready.clear()
        done = list(self._done)
        self._done.clear()
        self._running -= len(done)
        return done

    def wait(self, timeout_s: float) -> None:
        self._ready.wait(timeout_s)

    def close(self) -> None:
        self._is_closed = True

    def _finish(self, call: PendingCall) -> None:
        run = scheduler()
        # Most calls are short, and some take as long as a call may take.
        run.sleep(self._function.longest_s * run.rng.random() ** 3)
        if self._is_closed:
            return
        call.result = _complete(self._function(*call.arguments))
        self._done.append(call)
        self._ready.set()
        self._wake()


def _complete(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Return the result of a coroutine that never waits."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError("the coroutine waits")
