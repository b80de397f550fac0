"""The calls to a target that a sink's threads are making, and their start times."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import Literal, TypeAlias

from onceflow.core.protocol.messages import Wait

SHOWN_AFTER_S = 3.0
"""The duration after which a call is reported: longer than most calls to a healthy target take, and
shorter than a deadline.
"""

OutsideCall: TypeAlias = Literal["write", "pre-commit", "commit"]


class OutsideCalls:
    """The current calls to one target. Any thread; at most one call of each kind at a time."""

    def __init__(self, uid: str, target: str) -> None:
        """Create for sink `uid`.

        `target` is the target's location, or "" if the sink does not say.
        """
        self._uid = uid
        self._target = target or f"the target of sink {uid}"
        self._began_at: dict[OutsideCall, float] = {}
        self._failed: set[OutsideCall] = set()

    @contextmanager
    def during(self, call: OutsideCall) -> Generator[None]:
        """Register `call` for the duration of the block."""
        self.begin(call)
        try:
            yield
        finally:
            self.end(call)

    def begin(self, call: OutsideCall) -> None:
        """Record that `call` has begun. A repeated call keeps the time of the first."""
        self._began_at.setdefault(call, time.monotonic())

    def fail(self, call: OutsideCall) -> None:
        """Record that `call` has failed and will be repeated: the target is away, or refuses."""
        self._failed.add(call)

    def end(self, call: OutsideCall) -> None:
        """Record that `call` is done."""
        self._began_at.pop(call, None)
        self._failed.discard(call)

    def list_waits(self) -> tuple[Wait, ...]:
        """Return the calls that have lasted longer than SHOWN_AFTER_S."""
        now = time.monotonic()
        return tuple(
            self._describe_wait(call, round(now - began_at, 3))
            for call, began_at in sorted([*self._began_at.items()])
            if now - began_at > SHOWN_AFTER_S
        )

    def _describe_wait(self, call: OutsideCall, waited_s: float) -> Wait:
        if call in self._failed:
            return Wait(self._uid, f"{self._target} (to {call})", waited_s)
        return Wait(self._uid, self._target, waited_s, call)
