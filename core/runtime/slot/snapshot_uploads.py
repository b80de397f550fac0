"""The asynchronous part of a subtask's snapshot: state goes to storage beside the stream."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from typing import Protocol

from onceflow.core.errors import StorageError
from onceflow.core.protocol.ids import AttemptId, CheckpointId, SubtaskRef
from onceflow.core.protocol.snapshots import OperatorSnapshot, SnapshotTimings, SubtaskSnapshot
from onceflow.core.runtime.dataflow.operators import PendingSnapshot
from onceflow.core.storage import FileStateWriter, JobStorage

_log = logging.getLogger("onceflow.runtime.slot")


class UploadReports(Protocol):
    """Hears how uploads end, on their threads."""

    def snapshot_uploaded(self, checkpoint: CheckpointId, snapshot: SubtaskSnapshot) -> None:
        """All of it is durable."""
        ...

    def snapshot_declined(self, subtask: SubtaskRef, checkpoint: CheckpointId, reason: str) -> None:
        """Storage did not take it; what was written of it is deleted after this, or later."""
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
        self._lock = threading.Lock()
        self._under_way: set[Future[None]] = set()
        self._abandoned: list[FileStateWriter] = []
        """Of declined checkpoints: storage did not delete their files when it was asked."""

    def begin(
        self,
        subtask: SubtaskRef,
        checkpoint: CheckpointId,
        pending: tuple[PendingSnapshot, ...],
        timings: SnapshotTimings,
    ) -> None:
        """Upload `pending` on another thread, and report how that ended."""
        upload = self._threads.submit(self._upload, subtask, checkpoint, pending, timings)
        with self._lock:
            self._under_way = {one for one in self._under_way if not one.done()} | {upload}

    def close(self, timeout_s: float) -> bool:
        """Begin no further upload; return whether those under way end within `timeout_s`."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            under_way = self._under_way
        return not wait(under_way, timeout_s).not_done

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
            timings = replace(
                timings,
                async_ms=round((time.perf_counter() - began) * 1000, 3),
                size_bytes=sum(h.size_bytes for o in operators for h in o.keyed + o.raw),
            )
            self._reports.snapshot_uploaded(
                checkpoint, SubtaskSnapshot(subtask, tuple(operators), timings)
            )
            self._abandon(())
        except StorageError as error:
            # First: storage that takes no file may not delete one either, nor answer soon.
            self._reports.snapshot_declined(subtask, checkpoint, str(error))
            self._abandon(writers)
        except BaseException as error:
            self._reports.upload_failed(error)

    def _abandon(self, writers: Sequence[FileStateWriter]) -> None:
        """Delete what `writers` wrote, and what could not be deleted before; or remember it."""
        with self._lock:
            abandoned, self._abandoned = [*self._abandoned, *writers], []
        for writer in abandoned:
            try:
                writer.abandon()
            except StorageError as error:
                _log.warning("files of a declined checkpoint stay until the next: %s", error)
                with self._lock:
                    self._abandoned.append(writer)
