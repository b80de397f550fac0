"""The asynchronous part of a subtask's snapshot: uploads state while the stream goes on."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace

from onceflow.core.crash_points import reach
from onceflow.core.errors import StorageError
from onceflow.core.protocol.checkpoints.snapshots import InFlight, OperatorSnapshot, SubtaskSnapshot
from onceflow.core.protocol.messages import Acked, Declined
from onceflow.core.protocol.splits import key_group_range
from onceflow.core.runtime.dataflow.channels import encode_batches
from onceflow.core.runtime.dataflow.subtask import SnapshotTaken
from onceflow.core.runtime.slot.context import SlotContext
from onceflow.core.storage import FileStateWriter

_log = logging.getLogger("onceflow.runtime.slot")


class SnapshotUploads:
    """Two threads that each upload one snapshot at a time."""

    def __init__(self, context: SlotContext) -> None:
        self._context = context
        # Two, so that a slow upload does not block the next checkpoint, which may be the one that
        # completes.
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="upload")
        self._lock = threading.Lock()
        self._under_way: set[Future[None]] = set()
        self._abandoned: list[FileStateWriter] = []
        """Writers of declined checkpoints whose files could not be deleted yet."""

    def begin(self, taken: SnapshotTaken) -> None:
        """Upload the snapshot on another thread, which reports the outcome to the slot."""
        upload = self._threads.submit(self._upload, taken)
        with self._lock:
            self._under_way = {future for future in self._under_way if not future.done()} | {upload}

    def close(self, timeout_s: float) -> bool:
        """Start no more uploads; return True if the running ones end within `timeout_s`."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            # A cancelled upload never counts as done: `wait` would wait for it until the timeout.
            running = [upload for upload in self._under_way if not upload.cancelled()]
        return not wait(running, timeout_s).not_done

    def _upload(self, taken: SnapshotTaken) -> None:
        began = time.perf_counter()
        subtask, checkpoint, slot = taken.subtask, taken.checkpoint, self._context
        writers: list[FileStateWriter] = []
        try:
            operators: list[OperatorSnapshot] = []
            for snapshot in taken.pending:
                writer = slot.storage.writer(
                    slot.plan.attempt, checkpoint, snapshot.uid, subtask.index
                )
                writers.append(writer)
                operators.append(snapshot.upload(writer))
            in_flight = self._persist_in_flight(taken, writers)
            in_flight_bytes = sum(part.handle.size_bytes for part in in_flight)
            timings = replace(
                taken.timings,
                async_ms=round((time.perf_counter() - began) * 1000, 3),
                uploaded_bytes=sum(writer.uploaded_bytes for writer in writers),
                size_bytes=sum(h.size_bytes for o in operators for h in o.keyed + o.raw)
                + in_flight_bytes,
                in_flight_bytes=in_flight_bytes,
            )
            done = SubtaskSnapshot(subtask, tuple(operators), timings, in_flight)
            slot.post(Acked(checkpoint, done, taken.record_times))
            # Storage has just accepted files, so it may now also delete the files that it could
            # not delete before.
            self._abandon(())
        except StorageError as error:
            # First, because storage that accepts no file may not delete one either, or hang.
            slot.post(Declined(checkpoint, subtask, str(error)))
            self._abandon(writers)
            self._discard(taken)
        except BaseException as error:
            slot.fail(error)

    def _discard(self, taken: SnapshotTaken) -> None:
        """Release the frozen state of all operators, also those after the failed one."""
        try:
            for snapshot in taken.pending:
                snapshot.discard()
        except BaseException as error:
            self._context.fail(error)

    def _persist_in_flight(
        self, taken: SnapshotTaken, writers: list[FileStateWriter]
    ) -> tuple[InFlight, ...]:
        """Write the rows that the barrier overtook, one file for each side of each edge."""
        if not taken.overtaken:
            return ()
        reach("overtaken")
        subtask, plan = taken.subtask, self._context.plan
        writer = self._context.storage.writer(
            plan.attempt, taken.checkpoint, f"{subtask.chain}.in-flight", subtask.index
        )
        writers.append(writer)
        own = key_group_range(plan.max_parallelism, plan.parallelism, subtask.index)
        in_flight: list[InFlight] = []
        for number, part in enumerate(taken.overtaken):
            # Rows that were sent are at the owner of their keys; rows that wait to be sent may
            # belong to any slot.
            groups = own if part.sent else range(plan.max_parallelism)
            name = f"in-flight-{number}-{'in' if part.sent else 'to'}-{part.chain}"
            handle = writer.write(name, encode_batches(part.batches), key_groups=groups)
            in_flight.append(InFlight(part.chain, part.sent, handle, part.input))
        reach("persisted")
        return tuple(in_flight)

    def _abandon(self, writers: Sequence[FileStateWriter]) -> None:
        """Delete the files of `writers`, and those left from before. Keep the writers that fail."""
        with self._lock:
            abandoned, self._abandoned = [*self._abandoned, *writers], []
        for writer in abandoned:
            try:
                writer.abandon()
            except StorageError as error:
                _log.warning(
                    "files of a declined checkpoint are kept until the next checkpoint: %s", error
                )
                with self._lock:
                    self._abandoned.append(writer)
