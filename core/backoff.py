"""Pauses between the tries of one call to a server that is not available, up to a deadline.

Connections, requests and reads use it, inside one operation. It does not decide when a commit is
tried again (`core.commit.retries`), or when a failed job is restarted (`core.protocol.restart`).

A loop asks, and between two tries says `pause`; when that returns False its time is up:

    backoff = Backoff(until=time.monotonic() + timeout_s)
    while True:
        try:
            return ask()
        except Unavailable as error:
            if not backoff.pause():
                raise TimeoutError(...) from error
"""

from __future__ import annotations

import random
import time

FIRST_S = 0.02
LONGEST_S = 1.0
"""The first and the longest pause: short, so that a server is used soon after it is there."""
JITTER = random.SystemRandom()
"""Not the module's own generator: a pause must not change the numbers that a program draws after
it has set a seed, and processes that are forked must not draw alike."""


class Backoff:
    """The tries of one call, by the monotonic clock; used by one thread.

    Each pause is twice the one before, up to `longest_s`, less a random part of up to a half: of
    many who wait for one server, not all come back at one moment.
    """

    def __init__(
        self, *, until: float, first_s: float = FIRST_S, longest_s: float = LONGEST_S
    ) -> None:
        """Begin; `until` is a time of `time.monotonic` at which nobody tries any more."""
        self._until = until
        self._pause_s = first_s
        self._longest_s = longest_s

    def call_s(self, longest_s: float) -> float:
        """Return how long the next try may take: what is left, and `longest_s` at most."""
        return max(0.1, min(longest_s, self._until - time.monotonic()))

    def pause(self) -> bool:
        """Return True when it is time for the next try; False, at once, when there is none left."""
        pause_s = self._pause_s * JITTER.uniform(0.5, 1.0)
        if time.monotonic() + pause_s > self._until:
            return False
        time.sleep(pause_s)
        self._pause_s = min(self._pause_s * 2, self._longest_s)
        return True
