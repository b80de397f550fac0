"""Notices that a channel's peer is frozen or cut off, although its connection stands.

A connection that nothing crosses breaks by no timeout of its own, and a slow reader is no fault. So
each channel asks its peer's transport, which answers whatever the operators there are doing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from onceflow.core.runtime.transport.data_plane import FlightChannel

_QUESTIONS = 4
"""In the time after which a silent peer is lost, so that one lost packet decides nothing."""


class KeepAlive:
    """Asks on a thread of its own, which a frozen peer may hold up; `check` never waits."""

    def __init__(
        self,
        channels: Sequence[FlightChannel],
        lost: Callable[[str], None],
        *,
        timeout_s: float,
        start_timeout_s: float,
    ) -> None:
        self._channels = channels
        self._lost = lost
        self._timeout_s = timeout_s
        self._start_timeout_s = start_timeout_s
        self._ended = threading.Event()
        threading.Thread(target=self._ask, name="keep alive", daemon=True).start()

    def check(self, now: float) -> None:
        """Report the peer that has been silent for longest, if that is too long."""
        for channel in sorted(self._channels, key=lambda one: one.heard_at):
            silent_s = now - channel.heard_at
            # Before the first answer the peer may still be starting.
            limit_s = self._timeout_s if channel.answered else self._start_timeout_s
            if silent_s > limit_s:
                self._lost(
                    f"slot {channel.target} is lost: channel {channel.name} has had no answer for"
                    f" {silent_s:.0f} s, though its connection stands;"
                    f" heartbeat_timeout_s={self._timeout_s}"
                )
                return

    def end(self) -> None:
        """Ask nothing more."""
        self._ended.set()

    def _ask(self) -> None:
        while not self._ended.wait(self._timeout_s / _QUESTIONS):
            before = time.monotonic() - self._timeout_s / _QUESTIONS
            for channel in self._channels:
                if channel.heard_at < before:
                    channel.ask()
