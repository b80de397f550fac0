"""Messages on their way to one peer: whoever sends never waits for the peer to take them.

A stream's flow control holds a writer for as long as the peer reads nothing, which is for ever when
its process is frozen. So one thread a stream writes, and its owner asks how long that takes.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

import pyarrow as pa


class Outbox:
    """A queue and the thread that writes it to one stream, in order. Methods: any thread.

    What waits is bounded in time and not in length: the owner gives a peer up whose messages have
    waited for too long, and sends little.
    """

    def __init__(self, name: str, write: Callable[[bytes], object]) -> None:
        self._write = write
        self._waiting: deque[tuple[float, bytes]] = deque()
        self._changed = threading.Condition()
        self._ended = False
        self._last = False
        self._thread = threading.Thread(target=self._write_all, name=name, daemon=True)
        self._thread.start()

    def put(self, data: bytes) -> bool:
        """Send `data` after everything before; return False when the stream has ended."""
        with self._changed:
            if self._ended or self._last:
                return False
            self._waiting.append((time.monotonic(), data))
            self._changed.notify()
            return True

    def waiting_s(self, now: float) -> float:
        """Return for how long the peer has not taken the oldest message; 0 when none waits."""
        with self._changed:
            return now - self._waiting[0][0] if self._waiting else 0.0

    def finish(self, timeout_s: float) -> bool:
        """Take nothing more; return whether all is written, and nothing will be, in time."""
        with self._changed:
            self._last = True
            self._changed.notify()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def close(self) -> None:
        """Drop what waits; return when nothing is being written, and nothing will be.

        For streams that have ended: a write to one of them fails at once.
        """
        with self._changed:
            self._ended = True
            self._changed.notify()
        self._thread.join()

    def _write_all(self) -> None:
        while True:
            with self._changed:
                while not (self._waiting or self._last or self._ended):
                    self._changed.wait()
                if self._ended or not self._waiting:
                    self._ended = True
                    return
                _, data = self._waiting[0]
            try:
                self._write(data)
            except (pa.ArrowException, OSError):
                # The peer is gone; whoever reads from it notices and reports that.
                with self._changed:
                    self._ended = True
                    self._waiting.clear()
                return
            with self._changed:
                self._waiting.popleft()
