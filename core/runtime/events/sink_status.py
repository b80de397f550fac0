"""What a job tells about the transactions of its sinks; a part of the fold in `status`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, replace

from onceflow.core.protocol.messages import SinkMetrics
from onceflow.core.protocol.sink_counts import SinkCounts, add_counts
from onceflow.core.runtime.events.job_events import RecoveredSink


@dataclass(frozen=True, slots=True)
class SinkStatus(SinkCounts):
    """Transactions of one sink, over all its subtasks.

    Counts are over all attempts of this driver, recoveries included. All else is of the running
    attempt. As last told by the slots, so up to a heartbeat old.
    """

    uid: str
    sink_id: str
    aborted: int = 0
    """Transactions of older attempts that recovery has rolled back."""


def count_sinks(
    earlier: Iterable[SinkStatus],
    recovered: Iterable[RecoveredSink],
    reports: Iterable[SinkMetrics],
    refusals: Mapping[str, str],
    stuck: Set[str],
) -> tuple[SinkStatus, ...]:
    """Return every sink, by uid: earlier attempts, the last recovery, and each subtask's report.

    `refusals` are of commits by the driver, which are not counted here. Those of `stuck` are
    refused again and again.
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
        # In a recovery, sinks are not counted yet.
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
