"""The parts of a job's status: commits, transactions of sinks, waits, and times as text.

A call that takes long may wait for its server, or the server may be working on it. The job knows
the difference only for a failed call that is being retried: that call waits for the server.

The status fold creates a new tally for each event. With a single dict of all subtasks, each event
would copy the whole dict: quadratic work per checkpoint. Here an event copies one block of
subtasks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone

from onceflow.core.protocol.ids import SubtaskRef
from onceflow.core.protocol.messages import SinkMetrics, Wait
from onceflow.core.protocol.sink_counts import SinkCounts, add_counts
from onceflow.core.runtime.events.job_events import RecoveredSink
from onceflow.core.spi import CopyProgress, SourceProgress, SplitOffsets


def describe_moment(at_s: float, now_s: float | None) -> str:
    """Return " at …", with the age if `now_s` is given; empty if `at_s` is 0.

    Both are in seconds since the epoch; the text is in UTC.
    """
    if not at_s:
        return ""
    text = f" at {datetime.fromtimestamp(at_s, timezone.utc):%Y-%m-%d %H:%M:%S} UTC"
    return text if now_s is None else f"{text}, {describe_age(now_s - at_s)} ago"


def describe_age(seconds: float) -> str:
    """Return a duration as text in seconds, minutes, hours or days, depending on its length."""
    left = max(0, int(seconds))
    if left < 60:
        return f"{left} s"
    minutes, left = divmod(left, 60)
    if minutes < 60:
        return f"{minutes} min {left} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 48 else f"{hours // 24} days"


def describe_bytes(size: int) -> str:
    """Return a size as text with three digits, in a unit from B to TB."""
    value, units = float(size), ["B", "kB", "MB", "GB", "TB"]
    while abs(value) >= 999.5 and len(units) > 1:
        value /= 1000
        del units[0]
    return f"{value:.3g} {units[0]}"


def describe_progress(progress: SourceProgress, now_s: float | None = None) -> tuple[str, ...]:
    """Return the clauses about a source, without its warnings, to follow the source's name."""
    texts = [f"has copied {describe_copy(copy)}" for copy in progress.copies]
    behind: list[str] = []
    if progress.lag_bytes is not None:
        behind.append(describe_bytes(progress.lag_bytes))
    if progress.lag_s is not None:
        behind.append(f"{progress.lag_s:.1f} s")
    if behind:
        texts.append(f"is {' and '.join(behind)} behind")
    if progress.retained_bytes is not None:
        kept = f"makes the server keep {describe_bytes(progress.retained_bytes)}"
        if progress.moved_at_s is not None and now_s is not None:
            kept += f", the same position for {describe_age(now_s - progress.moved_at_s)}"
        texts.append(kept)
    return tuple(texts)


def describe_sources(
    measured: Mapping[str, SourceProgress], now_s: float | None = None
) -> tuple[str, ...]:
    """Return the clauses about all sources, each with the source's name, and their warnings."""
    texts = (
        f"{uid} {text}"
        for uid, progress in sorted(measured.items())
        for text in describe_progress(progress, now_s)
    )
    return (*texts, *describe_warnings(measured))


def describe_warnings(measured: Mapping[str, SourceProgress]) -> tuple[str, ...]:
    """Return the warnings of all sources, each with the source's name."""
    return tuple(
        f"{uid}: {warning.text}"
        for uid, progress in sorted(measured.items())
        for warning in progress.warnings
    )


def describe_copy(copy: CopyProgress) -> str:
    """Return the number of copied rows and chunks of a table, and their share if it is known."""
    chunks = f"{copy.chunks}"
    if copy.chunks_expected is not None and copy.chunks_expected >= copy.chunks:
        chunks += f" of about {copy.chunks_expected}"
    if copy.rows_expected is None or copy.share is None:
        return f"{copy.rows:,} rows of {copy.table} in {chunks} chunks"
    rows = f"{copy.rows:,} of about {max(copy.rows, copy.rows_expected):,} rows"
    return f"{rows} of {copy.table} in {chunks} chunks ({copy.share:.0%})"


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


_BLOCK = 128


@dataclass(frozen=True, slots=True)
class CommitTally:
    """The newest checkpoint that each subtask is known to have committed."""

    blocks: Mapping[tuple[str, int], Mapping[int, int]] = field(
        default_factory=dict[tuple[str, int], Mapping[int, int]]
    )
    """The checkpoints by chain and index // `_BLOCK`, then by index."""
    counts: Mapping[int, int] = field(default_factory=dict[int, int])
    """The number of subtasks by the newest checkpoint that they have committed."""

    def lowest_of(self, subtasks: int) -> int:
        """Return the newest checkpoint that all `subtasks` have committed; 0 if one is missing."""
        return min(self.counts) if sum(self.counts.values()) >= subtasks and self.counts else 0

    def with_commit(self, subtask: SubtaskRef, checkpoint: int) -> CommitTally:
        """Return the tally after `subtask` has committed `checkpoint`.

        An older one has no effect.
        """
        number = subtask.chain, subtask.index // _BLOCK
        block = self.blocks.get(number, {})
        before = block.get(subtask.index)
        newest = max(checkpoint, before or 0)
        counts = {**self.counts}
        if before is not None:
            counts[before] -= 1
        counts[newest] = counts.get(newest, 0) + 1
        return CommitTally(
            {**self.blocks, number: {**block, subtask.index: newest}},
            {n: count for n, count in counts.items() if count},
        )


@dataclass(frozen=True, slots=True)
class SinkStatus(SinkCounts):
    """The transactions of one sink, over all its subtasks.

    Counts cover all attempts of this driver, including recoveries. The other fields are of the
    running attempt. The data is from the slots' last heartbeats.
    """

    uid: str
    sink_id: str
    aborted: int = 0
    """The number of transactions of older attempts that recovery has rolled back."""


def count_sinks(
    earlier: Iterable[SinkStatus],
    recovered: Iterable[RecoveredSink],
    reports: Iterable[SinkMetrics],
    refusals: Mapping[str, str],
    stuck: Set[str],
) -> tuple[SinkStatus, ...]:
    """Return the status of every sink, by uid: earlier attempts, last recovery, and reports.

    `refusals` are of commits by the driver, which are not counted here. The sinks in `stuck` refuse
    until a person helps.
    """
    total = {sink.uid: sink for sink in earlier}
    for done in recovered:
        known = total.get(done.uid, SinkStatus(done.uid, done.sink_id))
        counted = SinkCounts(committed=done.committed, rows_committed=done.rows_committed)
        aborted = known.aborted + done.aborted
        total[done.uid] = replace(add_counts(known, counted), aborted=aborted)
    for report in reports:
        known = total.get(report.uid, SinkStatus(report.uid, report.sink_id))
        total[report.uid] = add_counts(known, report)
    for uid, refusal in refusals.items():
        # During a recovery, sinks are not counted yet.
        known = total.get(uid, SinkStatus(uid, ""))
        total[uid] = replace(known, commit_refusal=refusal, commit_stuck=uid in stuck)
    return tuple(total[uid] for uid in sorted(total))


def describe_refusals(sinks: Iterable[SinkStatus]) -> str:
    """Return a clause for each sink that refuses to commit, to be appended to a sentence."""
    return "".join(
        f"; sink {sink.uid} is stuck and refuses {sink.commit_refusal}"
        if sink.commit_stuck
        else f"; sink {sink.uid} refuses {sink.commit_refusal}"
        for sink in sinks
        if sink.commit_refusal
    )
