"""Which servers outside a sink's threads wait for, and since when; for people alone."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager

from onceflow.core.protocol.messages import Wait

SHOWN_AFTER_S = 3.0
"""A call that lasts longer is told: far more than a healthy target needs, and less than a
deadline."""


class OutsideCalls:
    """The calls to one target that are under way. Any thread; one call a kind at a time."""

    def __init__(self, uid: str, target: str) -> None:
        """Take the sink's uid, and where its target is; empty if the sink does not say."""
        self._uid = uid
        self._target = target or f"the target of sink {uid}"
        self._began_at: dict[str, float] = {}

    @contextmanager
    def during(self, kind: str) -> Generator[None]:
        """Count the block as a call of that `kind`."""
        self.begin(kind)
        try:
            yield
        finally:
            self.end(kind)

    def begin(self, kind: str) -> None:
        """Record that a call has begun; a repeated one keeps the time of the first."""
        self._began_at.setdefault(kind, time.monotonic())

    def end(self, kind: str) -> None:
        """Record that the target has answered."""
        self._began_at.pop(kind, None)

    def list_waits(self) -> tuple[Wait, ...]:
        """Return the calls that have lasted for long."""
        now = time.monotonic()
        return tuple(
            Wait(self._uid, f"{self._target} ({kind})", round(now - began_at, 3))
            for kind, began_at in sorted([*self._began_at.items()])
            if now - began_at > SHOWN_AFTER_S
        )
