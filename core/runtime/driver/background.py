"""What is done beside a thread that must not wait: in order, and waited for within a deadline."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class Background:
    """One thread that does what it is asked to, in order. All methods: one thread, another one.

    It is a daemon: work that hangs for ever must not keep the process from ending.
    """

    def __init__(self, name: str) -> None:
        self._asked: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = (
            queue.SimpleQueue()
        )
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Do `work` after everything asked for before; the future holds how it ended."""
        future: Future[T] = Future()
        self._asked.put((work, future))
        return future

    def finish(self, timeout_s: float) -> bool:
        """Return whether all that was asked for is done within `timeout_s`."""
        done = threading.Event()
        self.submit(done.set)
        return done.wait(timeout_s)

    def end(self, last: Callable[[], object], timeout_s: float) -> bool:
        """Drop what has not begun, do `last` after what has; return whether that is in time."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._asked.get_nowait()
        self.submit(last)
        self._asked.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _work(self) -> None:
        while (asked := self._asked.get()) is not None:
            work, future = asked
            try:
                result = work()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)
