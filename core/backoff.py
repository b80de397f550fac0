"""The pauses between retries of one call to an unavailable server, up to a deadline.

Connections, requests and reads use it within one operation. Retries of commits are in
`core.commit.retries`. Restarts of a failed job are in `core.protocol.restart`.

A loop calls `pause` between two tries. `pause` returns False when the time is up:

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
"""The first and the longest pause. They are short, so that a server is used soon after it is
available."""
JITTER = random.SystemRandom()
"""A separate generator. Pauses must not change the random numbers of a program that has set a seed,
and forked processes must not draw equal numbers."""


class Backoff:
    """The retries of one call, timed by the monotonic clock. Used by one thread.

    Each pause is twice the previous one, up to `longest_s`, minus a random part of up to a half. So
    clients that wait for the same server do not all retry at the same moment.
    """

    def __init__(
        self, *, until: float, first_s: float = FIRST_S, longest_s: float = LONGEST_S
    ) -> None:
        """Start. `until` is the deadline in the time of `time.monotonic`."""
        self._until = until
        self._pause_s = first_s
        self._longest_s = longest_s

    def call_s(self, longest_s: float) -> float:
        """Return the timeout of the next try: the remaining time, but at most `longest_s`."""
        return max(0.1, min(longest_s, self._until - time.monotonic()))

    def pause(self) -> bool:
        """Sleep and return True, or return False at once if the pause would pass the deadline."""
        pause_s = self._pause_s * JITTER.uniform(0.5, 1.0)
        if time.monotonic() + pause_s > self._until:
            return False
        time.sleep(pause_s)
        self._pause_s = min(self._pause_s * 2, self._longest_s)
        return True
