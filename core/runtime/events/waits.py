"""The external servers for which a job waits, with one entry for all subtasks of the same server.

A call that takes long may wait for its server, or the server may be working on it. The job knows
the difference only for a failed call that is being retried: that call waits for the server.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from onceflow.core.protocol.messages import Wait
from onceflow.core.runtime.events.moments import describe_age, describe_moment
from onceflow.core.spi import SplitOffsets


@dataclass(frozen=True, slots=True)
class JobWait:
    """A source or sink that waits for a server, or whose call to it is running."""

    uid: str
    what: str
    """The server that a subtask waits for, and its address, as text for people."""
    since_s: float
    """The start of the wait in seconds since the epoch."""
    call: str = ""
    """The running call, such as pre-commit; empty if the server does not answer."""

    def describe(self, now_s: float | None = None) -> str:
        """Return one line for people, with the age if `now_s` is given."""
        since = describe_moment(self.since_s, None).removeprefix(" at ")
        age = "" if now_s is None else f", for {describe_age(now_s - self.since_s)}"
        if self.call:
            return f"{self.uid} is in a {self.call} at {self.what}, since {since}{age}"
        return f"{self.uid} is waiting for {self.what}, since {since}{age}"


def sum_up_waits(reports: Iterable[tuple[Wait, float]]) -> tuple[JobWait, ...]:
    """Return the longest wait for each source or sink, server and call, sorted by uid.

    A report has the time of its heartbeat, in seconds since the epoch.
    """
    since: dict[tuple[str, str, str], float] = {}
    for wait, heard_at_s in reports:
        key, began_at_s = (wait.uid, wait.what, wait.call), heard_at_s - wait.waited_s
        since[key] = min(since.get(key, began_at_s), began_at_s)
    return tuple(
        JobWait(uid, what, at_s, call) for (uid, what, call), at_s in sorted(since.items())
    )


def list_held_sources(offsets: Mapping[str, Sequence[SplitOffsets]]) -> tuple[JobWait, ...]:
    """Return one wait for each source that cannot read on, described by its longest hold."""
    waits: list[JobWait] = []
    for uid, splits in sorted(offsets.items()):
        held = sorted(
            (split for split in splits if split.held_by), key=lambda split: split.held_since_s
        )
        if held:
            more = f" (and {len(held) - 1} more splits are held)" if held[1:] else ""
            waits.append(JobWait(uid, held[0].held_by + more, held[0].held_since_s))
    return tuple(waits)
