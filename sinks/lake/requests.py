"""Requests to a store, several at a time if each answer is slow."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")

AT_ONCE = 16
_SLOW_S = 0.001


class Requests:
    """A set of threads for requests, started when they are needed. Used by one thread."""

    def __init__(self) -> None:
        """Start no thread yet."""
        self._threads: ThreadPoolExecutor | None = None

    def ask(self, question: Callable[[T], R], items: Sequence[T]) -> list[R]:
        """Return the answers to `items`, in order; raise the exception of the first failed one.

        While answers are faster than a thread would be, the requests stay on the calling thread.
        """
        answers: list[R] = []
        for number, item in enumerate(items):
            began = time.perf_counter()
            answers.append(question(item))
            if time.perf_counter() - began > _SLOW_S:
                return answers + self._ask_at_once(question, items[number + 1 :])
        return answers

    def _ask_at_once(self, question: Callable[[T], R], items: Sequence[T]) -> list[R]:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(AT_ONCE, "onceflow-lake")
        return list(self._threads.map(question, items))

    def close(self) -> None:
        """End the threads. May be called twice; a further request starts them again."""
        if self._threads is not None:
            self._threads.shutdown()
            self._threads = None
