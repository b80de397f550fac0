"""The sinks of one slot: a committer each, and how far each subtask has come with all its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from onceflow.core.graph import Operator, WriteTo
from onceflow.core.protocol.commits import CommitQueue, CommitRetryPolicy
from onceflow.core.protocol.ids import GENESIS, CheckpointId, SubtaskRef
from onceflow.core.runtime.dataflow.sink_metric_group import SinkMetricGroup
from onceflow.core.runtime.messages import SinkMetrics
from onceflow.core.runtime.slot.chain_builder import SlotPlan
from onceflow.core.runtime.slot.commit_worker import CommitWorker
from onceflow.core.spi import CommitterContext
from onceflow.core.storage import JobStorage

_HEARD, _NO_SINK = "", "no sink"
"""Beside the uids of a subtask's sinks: the subtask itself, and what stands for none."""


class Committed(Protocol):
    """Hears how far a subtask has come, on the thread that has brought it there."""

    def __call__(
        self, ref: SubtaskRef, confirmed: CheckpointId, committed: CheckpointId, commit_ms: float
    ) -> None:
        """All sinks of `ref` have committed up to `committed`; up to `confirmed` it knows, too."""
        ...


class SlotCommits:
    """One committer, on a thread of its own, for each sink of each subtask."""

    def __init__(
        self,
        plan: SlotPlan,
        storage: JobStorage,
        log_id: str,
        *,
        committed: Committed,
        failed: Callable[[BaseException], None],
    ) -> None:
        self._plan = plan
        self._storage = storage
        self._log_id = log_id
        self._report = committed
        self._failed = failed
        self._workers: list[CommitWorker] = []
        self._through: dict[SubtaskRef, dict[str, CheckpointId]] = {}
        self._lock = threading.Lock()

    def worker(self, ref: SubtaskRef, operator: Operator, work: WriteTo) -> CommitWorker:
        """Return the running committer of one sink of subtask `ref`."""
        context = CommitterContext(
            job=self._plan.job,
            uid=operator.uid,
            sink_id=work.sink_id,
            attempt=self._plan.attempt,
            log_id=self._log_id,
            staging=self._storage.staging(work.sink_id),
        )
        with self._lock:
            self._through.setdefault(ref, {_HEARD: GENESIS})[operator.uid] = GENESIS

        def committed(through: CheckpointId, commit_ms: float) -> None:
            self._come(ref, operator.uid, through, commit_ms)

        worker = CommitWorker(
            f"{operator.uid}[{ref.index}]",
            CommitQueue(CommitRetryPolicy(deadline_s=self._plan.settings.commit_deadline_s)),
            work.sink.committer(context),
            committed=committed,
            failed=self._failed,
            metrics=SinkMetricGroup(operator.uid, work.sink_id, ref.index),
        )
        self._workers.append(worker)
        return worker

    def heard(self, ref: SubtaskRef, checkpoint: CheckpointId) -> None:
        """Take in that subtask `ref` knows `checkpoint` to be decided. Its own thread.

        Shared state files may go when all have confirmed a later decision, so a committer must not
        confirm one that the subtask's state has not heard of.
        """
        self._come(ref, _HEARD, checkpoint, 0.0)

    def _come(self, ref: SubtaskRef, who: str, through: CheckpointId, commit_ms: float) -> None:
        with self._lock:
            known = self._through.setdefault(ref, {_HEARD: GENESIS, _NO_SINK: GENESIS})
            before = _lowest(known)
            known[who] = max(known[who], through)
            confirmed, committed = _lowest(known)
        if (confirmed, committed) != before:
            self._report(ref, confirmed, committed, round(commit_ms, 3))

    def completed(
        self,
        checkpoint: CheckpointId,
        retain_ledger_from: Mapping[str, CheckpointId],
        subtasks: Iterable[SubtaskRef],
    ) -> None:
        """Let every committer commit what `checkpoint` decided; `subtasks` are all of the slot."""
        for worker in self._workers:
            worker.completed(checkpoint, retain_ledger_from[worker.metrics.sink_id])
        for ref in subtasks:
            if _NO_SINK in self._through.get(ref, {_NO_SINK: GENESIS}):
                self._come(ref, _NO_SINK, checkpoint, 0.0)

    def metrics(self) -> tuple[SinkMetrics, ...]:
        """Return what each sink's transactions have gone through."""
        return tuple(worker.metrics.read() for worker in self._workers)

    def close(self, left_s: Callable[[], float]) -> bool:
        """End every committer; return whether all ended within the seconds that are left."""
        return min([worker.close(left_s()) for worker in self._workers], default=True)


def _lowest(known: dict[str, CheckpointId]) -> tuple[CheckpointId, CheckpointId]:
    """Return (what the subtask and its sinks have come to, what its sinks have)."""
    committed = min(through for who, through in known.items() if who != _HEARD)
    return min(known[_HEARD], committed), committed
