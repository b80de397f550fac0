"""Which servers outside a job waits for: one line for all subtasks that wait for the same."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from onceflow.core.protocol.messages import Wait
from onceflow.core.runtime.events.moments import describe_age, describe_moment


@dataclass(frozen=True, slots=True)
class JobWait:
    """A source or sink waits for a server."""

    uid: str
    what: str
    """The server that a subtask waits for, and its address, as text for people."""
    since_s: float
    """Since when, in seconds since the epoch."""

    def describe(self, now_s: float | None = None) -> str:
        """Return one line for people, at `now_s` with the age."""
        since = describe_moment(self.since_s, None).removeprefix(" at ")
        age = "" if now_s is None else f", for {describe_age(now_s - self.since_s)}"
        return f"{self.uid} is waiting for {self.what}, since {since}{age}"


def sum_up_waits(reports: Iterable[tuple[Wait, float]]) -> tuple[JobWait, ...]:
    """Return one wait for each source or sink and server, the longest, by uid.

    A report comes with the time of its heartbeat, in seconds since the epoch.
    """
    since: dict[tuple[str, str], float] = {}
    for wait, heard_at_s in reports:
        key, began_at_s = (wait.uid, wait.what), heard_at_s - wait.waited_s
        since[key] = min(since.get(key, began_at_s), began_at_s)
    return tuple(JobWait(uid, what, at_s) for (uid, what), at_s in sorted(since.items()))
