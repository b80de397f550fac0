"""The status of the transactions of a job's sinks; a part of the fold in `status`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, replace

from onceflow.core.protocol.messages import SinkMetrics
from onceflow.core.protocol.sink_counts import SinkCounts, add_counts
from onceflow.core.runtime.events.job_events import RecoveredSink


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
