"""The event loop on which an operator calls a service, and the calls that it runs.

The chain's thread starts calls and takes finished ones. The loop has a thread of its own.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pyarrow as pa

from onceflow.core.backoff import JITTER
from onceflow.core.plan.async_functions import AsyncFunction, Call, CallLimits

T = TypeVar("T")

_OPEN_TIMEOUT_S = 60.0
_CLOSE_TIMEOUT_S = 5.0
"""The time that a function has for releasing its resources. The slot waits longer for a subtask."""


class CallAborted(Exception):
    """The error of a call that was cancelled, or that raised what would end its thread.

    The service has not answered, so the record is not at fault.
    """


_THREADS_MAX = 1_000
"""The maximum number of threads for blocking calls of one subtask."""


@dataclass(eq=False, slots=True)
class PendingCall:
    """A call to the service for one or several rows of a batch, with its result."""

    rows: pa.RecordBatch
    first: int
    count: int
    arguments: tuple[Any, ...]
    segment: Any = None
    """The records between two watermarks to which the rows belong."""
    result: Any = None
    error: Exception | None = None
    is_done: bool = field(default=False)


class CallLoop:
    """Runs the calls of one subtask. Its methods are called by the chain's thread."""

    def __init__(self, uid: str, function: Call, limits: CallLimits) -> None:
        self._function = function
        self._limits = limits
        self._done: deque[PendingCall] = deque()
        self._ready = threading.Event()
        self._wake: Callable[[], None] = lambda: None
        self._tasks: set[asyncio.Task[None]] = set()
        self._next_start_s = 0.0
        self.cpu_s = 0.0
        self._loop = asyncio.new_event_loop()
        # For `asyncio.to_thread`. The default number of threads would run fewer calls at once.
        threads = ThreadPoolExecutor(min(limits.capacity, _THREADS_MAX), f"{uid} call")
        self._loop.set_default_executor(threads)
        self._thread = threading.Thread(target=self._run, name=f"{uid} calls", daemon=True)
        self._is_open = False

    def attach(self, wake: Callable[[], None]) -> None:
        """Set the callback for finished calls. The loop's thread calls it."""
        self._wake = wake

    def open(self) -> None:
        """Start the thread and open the function. Raises the function's own errors."""
        self._thread.start()
        if isinstance(self._function, AsyncFunction):
            self._await(_guard(self._function.open()), _OPEN_TIMEOUT_S)
        self._is_open = True

    def start(self, calls: Sequence[PendingCall]) -> None:
        """Start calls. The caller must not start more than the capacity allows."""
        self._loop.call_soon_threadsafe(self._create_tasks, calls)

    @property
    def has_done(self) -> bool:
        """True if a call has finished that `take_done` has not returned yet."""
        return bool(self._done)

    def take_done(self) -> list[PendingCall]:
        """Return the calls that have finished since the last `take_done`."""
        self._ready.clear()
        done: list[PendingCall] = []
        while self._done:
            done.append(self._done.popleft())
        return done

    def wait(self, timeout_s: float) -> None:
        """Wait until a call has finished, for a limited time."""
        self._ready.wait(timeout_s)

    def close(self) -> None:
        """Abandon all calls, close the function and end the thread. Idempotent."""
        if self._loop.is_closed():
            return
        if not self._thread.is_alive():
            self._loop.close()
            return
        try:
            self._await(self._end(), _CLOSE_TIMEOUT_S)
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_CLOSE_TIMEOUT_S)

    def _await(self, coroutine: Coroutine[Any, Any, None], timeout_s: float) -> None:
        future: Future[None] = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            future.result(timeout_s)
        except TimeoutError:
            future.cancel()
            raise

    async def _end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        # Let the calls of the cancelled tasks end, too.
        await asyncio.sleep(0)
        if self._is_open and isinstance(self._function, AsyncFunction):
            await _guard(self._function.close())

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()

    def _create_tasks(self, calls: Sequence[PendingCall]) -> None:
        for call in calls:
            task = self._loop.create_task(self._finish(call))
            # The loop itself has only weak references to tasks.
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _finish(self, call: PendingCall) -> None:
        try:
            call.result = await self._try(call.arguments)
        except asyncio.CancelledError:
            raise  # `close` abandons the call
        except Exception as error:  # the operator decides what happens to the record
            call.error = error
        self._done.append(call)
        self.cpu_s = time.thread_time()
        self._ready.set()
        # Further calls that finish before the operator has taken this one need no wake-up.
        if len(self._done) <= 1:
            self._wake()

    async def _try(self, arguments: tuple[Any, ...]) -> Any:
        retries, tries = self._limits.retries, 0
        while True:
            tries += 1
            await self._wait_for_turn()
            try:
                return await self._call(arguments, tries)
            except retries.on:
                if tries >= retries.tries:
                    raise
            # A random part of the pause, so that calls that failed together do not repeat together.
            await asyncio.sleep(retries.pause_s(tries) * JITTER.uniform(0.5, 1.0))

    async def _call(self, arguments: tuple[Any, ...], tries: int) -> Any:
        timeout_s = self._limits.timeout_s
        task = asyncio.ensure_future(_guard(self._function(*arguments)))
        try:
            done, _ = await asyncio.wait({task}, timeout=timeout_s)
        finally:
            # Does nothing if the task is done. `wait` leaves the task alone if it is itself
            # cancelled.
            task.cancel()
        if not done:
            raise TimeoutError(f"no answer within {timeout_s:g} s, in try {tries}")
        if task.cancelled():
            raise CallAborted("the call raised asyncio.CancelledError")
        return task.result()

    async def _wait_for_turn(self) -> None:
        """Wait until the rate limit allows another try."""
        if self._limits.calls_per_s is None:
            return
        now_s = self._loop.time()
        start_s = max(now_s, self._next_start_s)
        self._next_start_s = start_s + 1 / self._limits.calls_per_s
        if start_s > now_s:
            await asyncio.sleep(start_s - now_s)


async def _guard(call: Awaitable[T]) -> T:
    """Return the result of `call`.

    Raises:
        CallAborted: The call raised a BaseException that would end the loop's thread.
    """
    try:
        return await call
    except (Exception, asyncio.CancelledError):
        raise
    except BaseException as error:
        raise CallAborted(f"the call raised {error!r}") from error
