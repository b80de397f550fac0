"""The sinks of one slot: a committer each, and how far all of a subtask's have come."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from onceflow.core.graph import Operator, WriteTo
from onceflow.core.protocol.commits import CommitQueue, CommitRetryPolicy
from onceflow.core.protocol.ids import CheckpointId, SubtaskRef
from onceflow.core.runtime.chain_builder import SlotPlan
from onceflow.core.runtime.commit_worker import CommitWorker
from onceflow.core.runtime.messages import SinkMetrics
from onceflow.core.runtime.sink_meter import SinkMeter
from onceflow.core.spi import CommitterContext
from onceflow.core.storage import JobStorage


class Committed(Protocol):
    """Hears, on a committer's thread, how far every sink of a subtask has come."""

    def __call__(self, ref: SubtaskRef, through: CheckpointId, commit_ms: float) -> None:
        """All checkpoints up to `through` are committed in all sinks of `ref`."""
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
        self._through.setdefault(ref, {})[operator.uid] = CheckpointId(0)

        def committed(through: CheckpointId, commit_ms: float) -> None:
            with self._lock:
                self._through[ref][operator.uid] = through
                lowest = min(self._through[ref].values())
            self._report(ref, lowest, round(commit_ms, 3))

        worker = CommitWorker(
            f"{operator.uid}[{ref.index}]",
            CommitQueue(CommitRetryPolicy(deadline_s=self._plan.settings.commit_deadline_s)),
            work.sink.committer(context),
            committed=committed,
            failed=self._failed,
            meter=SinkMeter(operator.uid, work.sink_id, ref.index),
        )
        self._workers.append(worker)
        return worker

    def are_of(self, ref: SubtaskRef) -> bool:
        """Return whether subtask `ref` has a sink, and so reports what it has committed."""
        return ref in self._through

    def completed(self, checkpoint: CheckpointId, proofs_needed_from: CheckpointId) -> None:
        """Let every committer commit what `checkpoint` decided."""
        for worker in self._workers:
            worker.completed(checkpoint, proofs_needed_from)

    def metrics(self) -> tuple[SinkMetrics, ...]:
        """Return what each sink's transactions have gone through."""
        return tuple(worker.meter.metrics() for worker in self._workers)

    def close(self, left_s: Callable[[], float]) -> None:
        """End every committer, within the seconds that are left."""
        for worker in self._workers:
            worker.close(left_s())
