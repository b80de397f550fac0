"""What a job tells about the transactions of its sinks; a part of the fold in `status`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, replace

from onceflow.core.protocol.messages import SinkMetrics
from onceflow.core.runtime.events.job_events import RecoveredSink


@dataclass(frozen=True, slots=True)
class SinkStatus:
    """Transactions of one sink, over all its subtasks.

    Counts are over all attempts of this driver, recoveries included. All else is of the running
    attempt. As last told by the slots, so up to a heartbeat old.
    """

    uid: str
    sink_id: str
    open: int = 0
    """Subtasks that have written rows since their last barrier."""
    prepared: int = 0
    """In doubt now: pre-committed, and not known to be committed."""
    committed: int = 0
    aborted: int = 0
    """What older attempts had left, rolled back by recovery."""
    retried: int = 0
    """Tries of commits that did not succeed and were repeated."""
    rows_committed: int = 0
    rows_rejected: int = 0
    """Bad rows that the writers left out."""
    oldest_prepared_s: float = 0.0
    """Age of what has been in doubt for longest; 0 when nothing is."""
    last_commit_ms: float = 0.0
    """The slowest subtask's last commit, from hearing the decision to the target's answer."""
    commit_refusal: str = ""
    """Why a decided transaction or checkpoint is not committed yet, and what to do, for people.

    Empty: the target has refused none.
    """
    commit_stuck: bool = False
    """Whether the target refuses that commit again and again until a person helps."""


def keep_counts(sink: SinkStatus) -> SinkStatus:
    """Return what the next attempt goes on counting from: nothing that is of one attempt alone."""
    return SinkStatus(
        sink.uid,
        sink.sink_id,
        committed=sink.committed,
        aborted=sink.aborted,
        retried=sink.retried,
        rows_committed=sink.rows_committed,
        rows_rejected=sink.rows_rejected,
    )


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
        total[done.uid] = replace(
            known,
            committed=known.committed + done.committed,
            rows_committed=known.rows_committed + done.rows_committed,
            aborted=known.aborted + done.aborted,
        )
    for one in reports:
        known = total.get(one.uid, SinkStatus(one.uid, one.sink_id))
        total[one.uid] = replace(
            known,
            open=known.open + one.open,
            prepared=known.prepared + one.prepared,
            committed=known.committed + one.committed,
            retried=known.retried + one.retried,
            rows_committed=known.rows_committed + one.rows_committed,
            rows_rejected=known.rows_rejected + one.rows_rejected,
            oldest_prepared_s=max(known.oldest_prepared_s, one.oldest_prepared_s),
            last_commit_ms=max(known.last_commit_ms, one.last_commit_ms),
            commit_refusal=known.commit_refusal or one.commit_refusal,
            commit_stuck=known.commit_stuck or one.commit_stuck,
        )
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
