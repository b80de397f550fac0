"""The asynchronous part of a subtask's snapshot: state goes to storage beside the stream."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Protocol

from onceflow.core.errors import StorageError
from onceflow.core.protocol.ids import AttemptId, CheckpointId, SubtaskRef
from onceflow.core.protocol.snapshots import OperatorSnapshot, SnapshotTimings, SubtaskSnapshot
from onceflow.core.runtime.operators import PendingSnapshot
from onceflow.core.storage import FileStateWriter, JobStorage


class UploadReports(Protocol):
    """Hears how uploads end, on their threads."""

    def snapshot_uploaded(self, checkpoint: CheckpointId, snapshot: SubtaskSnapshot) -> None:
        """All of it is durable."""
        ...

    def snapshot_declined(self, subtask: SubtaskRef, checkpoint: CheckpointId, reason: str) -> None:
        """Storage did not take it; nothing of it is left."""
        ...

    def upload_failed(self, error: BaseException) -> None:
        """Something else went wrong."""
        ...


class SnapshotUploads:
    """Two threads that upload one snapshot each at a time."""

    def __init__(self, storage: JobStorage, attempt: AttemptId, reports: UploadReports) -> None:
        self._storage = storage
        self._attempt = attempt
        self._reports = reports
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="upload")

    def begin(
        self,
        subtask: SubtaskRef,
        checkpoint: CheckpointId,
        pending: tuple[PendingSnapshot, ...],
        timings: SnapshotTimings,
    ) -> None:
        """Upload `pending` on another thread, and report how that ended."""
        self._threads.submit(self._upload, subtask, checkpoint, pending, timings)

    def close(self, *, wait: bool) -> None:
        """Begin no further upload; return when those under way are done, if `wait`."""
        self._threads.shutdown(wait=wait, cancel_futures=True)

    def _upload(
        self,
        subtask: SubtaskRef,
        checkpoint: CheckpointId,
        pending: tuple[PendingSnapshot, ...],
        timings: SnapshotTimings,
    ) -> None:
        began = time.perf_counter()
        writers: list[FileStateWriter] = []
        try:
            operators: list[OperatorSnapshot] = []
            for snapshot in pending:
                writer = self._storage.writer(
                    self._attempt, checkpoint, snapshot.uid, subtask.index
                )
                writers.append(writer)
                operators.append(snapshot.upload(writer))
        except StorageError as error:
            for writer in writers:
                writer.abandon()
            self._reports.snapshot_declined(subtask, checkpoint, str(error))
            return
        except BaseException as error:
            self._reports.upload_failed(error)
            return
        timings = replace(
            timings,
            async_ms=round((time.perf_counter() - began) * 1000, 3),
            size_bytes=sum(h.size_bytes for o in operators for h in o.keyed + o.raw),
        )
        self._reports.snapshot_uploaded(
            checkpoint, SubtaskSnapshot(subtask, tuple(operators), timings)
        )
