"""What the writers of topics and of tables share: a thread, and the pace of the input."""

from __future__ import annotations

import math
import threading
from abc import ABC, abstractmethod
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

from typing_extensions import Self

_EVEN_PART = 0.6
_THINNING_PART = 0.3
_THINNING_S = 20.0


class Pace:
    """The pace of an input: an even flow that thins out, and never ends while there are faults.

    So rows are on their way at each fault, however long the job takes to recover.
    """

    def __init__(self, producing_s: float) -> None:
        """Thin out after `producing_s` seconds."""
        self._producing_s = producing_s
        self._released = threading.Event()

    def release(self) -> None:
        """Let all the rest come at once: the faults are over."""
        self._released.set()

    def find_due_part(self, elapsed_s: float) -> float:
        """Return the part of the input that is due."""
        if self._released.is_set():
            return 1.0
        even = min(1.0, elapsed_s / self._producing_s) * _EVEN_PART
        late_s = max(0.0, elapsed_s - self._producing_s)
        return even + _THINNING_PART * (1 - math.exp(-late_s / _THINNING_S))


class InputWriter(ABC):
    """Writes an input on a thread of its own. A context manager whose end abandons the rest."""

    def __init__(self, pace: Pace) -> None:
        """Take the pace. Entering the context begins."""
        self._pace = pace
        self._abandoned = threading.Event()
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="chaos input")
        self._result: Future[None] | None = None

    @property
    def is_done(self) -> bool:
        """True if all is written. Raises the error that ended the thread."""
        if self._result is None or not self._result.done():
            return False
        self._result.result()
        return True

    def __enter__(self) -> Self:
        self._result = self._pool.submit(self._write)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._abandoned.set()
        self._pool.shutdown(wait=True)

    @abstractmethod
    def _write(self) -> None:
        """Write until all is written or abandoned. On the thread."""
