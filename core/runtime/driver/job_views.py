"""Views of a job for the HTTP endpoint, in addition to its status, as plain values for JSON.

graph      the operators as the user named them, and the chains in which they run
overview   the state of the job now; its size does not depend on the number of subtasks
proof      the decision log compared with each target, read on request
stored     checkpoints and savepoints in storage
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from onceflow.core.commit.loop import read_target_record
from onceflow.core.commit.proof import SinkProof, describe_unreachable, judge_sink
from onceflow.core.errors import OnceflowError
from onceflow.core.plan.graph import Chain, Graph, Operator
from onceflow.core.plan.work import WriteTo
from onceflow.core.protocol.checkpoints.snapshots import CompletedCheckpoint
from onceflow.core.protocol.ids import AttemptId
from onceflow.core.protocol.log.rules import LogView
from onceflow.core.runtime.events.job_history import CheckpointSummary, JobHistory
from onceflow.core.runtime.events.status import JobStatus
from onceflow.core.runtime.events.status_parts import describe_warnings
from onceflow.core.runtime.metrics.commit_latency import RecentLatency
from onceflow.core.spi import CommittedBy, CommitterContext, Sink, SourceProgress
from onceflow.core.storage import CheckpointStorage, JobStorage, stored_checkpoints

SPLITS_SHOWN_MAX = 200
"""The number of splits of one source that an overview lists: those with the largest lag."""
CHECKPOINTS_SHOWN_MAX = 1_000
"""The largest number of checkpoints in one answer: about 500 KB."""


@dataclass(frozen=True, slots=True)
class OperatorView:
    """An operator as the web page draws it."""

    uid: str
    kind: str
    """The word source or sink, or the class of the operator's work."""
    name: str
    """The class of the source or sink; otherwise the same as `kind`."""
    chain: str
    inputs: tuple[str, ...]
    """The uids of the operators whose rows flow into it."""
    sink_id: str = ""
    takes_dead_letters: bool = False
    streams: tuple[str, ...] = ()
    """The same as `inputs`, with `uid.output` for an output of a source that has several."""


@dataclass(frozen=True, slots=True)
class EdgeView:
    """An edge on which rows flow from one chain to another."""

    above: str
    below: str
    exchange: str
    """The kind of exchange: forward, by_key or broadcast."""
    key: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class GraphView:
    """A job's dataflow."""

    operators: tuple[OperatorView, ...]
    edges: tuple[EdgeView, ...]
    parallelism: int


def describe_graph(graph: Graph, parallelism: int) -> GraphView:
    """Return `graph` as the web page draws it. Each operator comes after all of its inputs."""
    chains = graph.chains()
    home = {operator.uid: chain.id for chain in chains for operator in chain.operators}
    return GraphView(
        tuple(
            _describe_operator(graph, operator, home[operator.uid]) for operator in graph.operators
        ),
        tuple(edge for chain in chains for edge in _describe_edges(chain)),
        parallelism,
    )


def _describe_operator(graph: Graph, operator: Operator, chain: str) -> OperatorView:
    inputs = tuple(dict.fromkeys(feed.uid for feed in operator.feeds))
    work = operator.work
    sources = dict(graph.sources())
    streams = tuple(
        dict.fromkeys(
            f"{feed.uid}.{feed.tag}"
            if feed.uid in sources and feed.tag in sources[feed.uid].outputs
            else feed.uid
            for feed in operator.feeds
        )
    )
    view = OperatorView(operator.uid, work.kind, work.label, chain, inputs, streams=streams)
    if isinstance(work, WriteTo):
        return replace(view, sink_id=work.sink_id, takes_dead_letters=work.takes_dead_letters)
    return view


def _describe_edges(chain: Chain) -> Iterable[EdgeView]:
    for edge in chain.edges:
        yield EdgeView(edge.above, chain.id, edge.exchange.value, edge.key)


def describe_now(
    status: JobStatus, history: JobHistory, instance: str, latencies: Mapping[str, RecentLatency]
) -> dict[str, Any]:
    """Return the state of the job now; the page and `onceflow top` poll it.

    `latencies` holds, by uid, the sinks that have recently committed.
    """
    last = status.last_checkpoint
    return {
        "job": status.job,
        "instance": instance,
        "running": not status.state.ended,
        "now_ms": int(time.time() * 1000),
        "state": status.state,
        "summary": status.describe(time.time()),
        "attempt": status.attempt,
        "restores": status.restores,
        "attempt_count": len(status.attempts),
        "attempt_began_at_s": status.attempts[-1].began_at_s if status.attempts else None,
        "last_error": status.last_error,
        "last_error_at_s": status.last_error_at_s,
        "warnings": describe_warnings(status.progress),
        "waits": [asdict(wait) | {"summary": wait.describe(time.time())} for wait in status.waits],
        "records_in": status.records_in,
        "rejected": status.rejected,
        "checkpoints_completed": status.checkpoints_completed,
        "checkpoints_failed": status.checkpoints_failed,
        "last_checkpoint": CheckpointSummary.from_stats(last) if last else None,
        "pending": [
            {
                "checkpoint": pending.checkpoint,
                "kind": pending.kind,
                "triggered_at_s": pending.triggered_at.wall_s,
                "acked": len(pending.subtasks),
            }
            for pending in status.pending
        ],
        "sources": [_describe_source(uid, status) for uid in sorted(status.sources)],
        "sinks": [
            asdict(sink)
            | {"blockers": status.blockers.get(sink.uid, ()), "latency": latencies.get(sink.uid)}
            for sink in status.sinks
        ],
        "chains": history.chains(status),
        "slots": [
            {
                "slot": slot.slot,
                "host": slot.host,
                "pid": slot.pid,
                "rss_bytes": slot.rss_bytes,
                "heard_at_s": slot.heard_at_s,
            }
            for slot in status.slots
        ],
        "dropped_state": status.dropped_state,
        "restored_savepoint": status.restored_savepoint,
        "savepoints": status.savepoints,
    }


def _describe_source(uid: str, status: JobStatus) -> dict[str, Any]:
    splits, progress = status.offsets.get(uid), status.progress.get(uid)
    shown = sorted(splits or (), key=lambda split: -split.lag)[:SPLITS_SHOWN_MAX]
    return {
        "uid": uid,
        "lag": None if splits is None else status.lag[uid],
        "split_count": None if splits is None else len(splits),
        "splits": [
            {"split": split.split_id, "next": split.next, "end": split.end, "lag": split.lag}
            for split in shown
        ],
        "progress": None if progress is None else _describe_progress(progress),
    }


def _describe_progress(progress: SourceProgress) -> dict[str, Any]:
    copies = [asdict(copy) | {"share": copy.share} for copy in progress.copies]
    warnings = [warning.text for warning in progress.warnings]
    return asdict(progress) | {"copies": copies, "warnings": warnings}


def describe_timeline(status: JobStatus, history: JobHistory) -> dict[str, Any]:
    """Return the attempts, the incidents, and half an hour of measurements, with their times."""
    return {
        "now_ms": int(time.time() * 1000),
        "attempts": status.attempts,
        "incidents": history.incidents(),
        "samples": history.samples(),
    }


def describe_history(
    status: JobStatus, history: JobHistory, before: int | None, limit: int
) -> dict[str, Any]:
    """Return completed checkpoints below number `before`, and the last failed checkpoints."""
    limit = max(1, min(limit, CHECKPOINTS_SHOWN_MAX))
    return {
        "completed": status.checkpoints_completed,
        "failed": status.checkpoints_failed,
        "checkpoints": history.checkpoints(before, limit, status),
        "failures": [
            {
                "checkpoint": failure.checkpoint,
                "attempt": failure.attempt,
                "failed_at_s": failure.failed_at_s,
                "reason": failure.reason,
                "acked": len(failure.subtasks),
            }
            for failure in status.failures
        ],
    }


# --- read from storage and targets ---------------------------------------------------------------


def prove_sinks(graph: Graph, storage: JobStorage) -> dict[str, Any]:
    """Read the decision log and each target and compare them. Changes nothing. Any thread.

    Raises:
        StorageError: The decision log cannot be read.
        CheckpointCorrupt: The decision log is damaged.
    """
    before = storage.log.read()
    proofs = [
        _prove_sink(operator.uid, work.sink_id, work.sink, storage, before)
        for operator, work in graph.sinks()
    ]
    return describe_decision(before) | {"sinks": proofs, "read_at_ms": int(time.time() * 1000)}


def _prove_sink(
    uid: str, sink_id: str, sink: Sink, storage: JobStorage, before: LogView
) -> SinkProof:
    context = CommitterContext(
        storage.job,
        uid,
        sink_id,
        AttemptId(max(1, before.attempt)),
        log_id=storage.log_id,
        staging=storage.staging(sink_id),
    )
    try:
        in_doubt = None
        if sink.committed_by is CommittedBy.SLOTS:
            committer = sink.committer(context)
            try:
                in_doubt = len(committer.in_doubt())
            finally:
                committer.close()
        record = read_target_record(sink, context)
    except OnceflowError as error:
        return describe_unreachable(uid, sink_id, before, f"{type(error).__name__}: {error}")
    return judge_sink(uid, sink_id, before, record, storage.log.read(), in_doubt)


def describe_decision(view: LogView) -> dict[str, Any]:
    """Return the last decision of a log and the attempt that owns the log."""
    last: CompletedCheckpoint | None = view.completed[-1] if view.decided else None
    return {
        "attempt": view.attempt,
        "decision": None
        if last is None
        else {
            "checkpoint": last.checkpoint,
            "attempt": last.attempt,
            "completed_at_ms": last.completed_at_ms,
            "final": last.final,
        },
    }


def describe_stored(described: CheckpointStorage, storage: JobStorage) -> dict[str, Any]:
    """Return the checkpoints and savepoints in storage, and why some savepoints cannot be read.

    Raises:
        StorageError: Storage cannot be read now.
        CheckpointCorrupt: The log is damaged.
    """
    stored: list[stored_checkpoints.StoredCheckpoint] = stored_checkpoints.checkpoints_of(storage)
    refused: list[str] = []
    for savepoint in stored_checkpoints.savepoints_of(described, storage):
        if isinstance(savepoint, stored_checkpoints.StoredCheckpoint):
            stored.append(savepoint)
        else:
            refused.append(str(savepoint))
    return {
        "location": str(storage),
        "checkpoints": [checkpoint.describe() for checkpoint in stored],
        "unfinished": refused,
    }
