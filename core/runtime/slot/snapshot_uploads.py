"""The asynchronous part of a subtask's snapshot: uploads state while the stream goes on."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace

from onceflow.core.crash_points import reach
from onceflow.core.errors import OnceflowError, StorageError
from onceflow.core.protocol.checkpoints.decisions import SavepointTarget
from onceflow.core.protocol.checkpoints.snapshots import InFlight, OperatorSnapshot, SubtaskSnapshot
from onceflow.core.protocol.messages import Acked, Declined
from onceflow.core.protocol.splits import key_group_range
from onceflow.core.runtime.dataflow.channels import encode_batches
from onceflow.core.runtime.dataflow.subtask import SnapshotTaken
from onceflow.core.runtime.slot.context import SlotContext
from onceflow.core.storage import FileStateWriter
from onceflow.core.storage.described_storage import savepoint_directory
from onceflow.core.storage.snapshots.savepoints import SavepointDirectory

_log = logging.getLogger("onceflow.runtime.slot")


class SnapshotUploads:
    """Two threads that each upload one snapshot at a time, and two more for savepoints."""

    def __init__(self, context: SlotContext) -> None:
        self._context = context
        # Two, so that a slow upload does not block the next checkpoint, which may be the one that
        # completes.
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="upload")
        # Threads of their own: the directory of a savepoint may hang, and checkpoints must not.
        self._savepoint_threads = ThreadPoolExecutor(2, thread_name_prefix="savepoint upload")
        self._lock = threading.Lock()
        self._under_way: set[Future[None]] = set()
        self._abandoned: list[FileStateWriter] = []
        """Writers of declined checkpoints whose files could not be deleted yet."""
        self._targets = SavepointTargets(context)

    def begin(self, taken: SnapshotTaken) -> None:
        """Upload the snapshot on another thread, which reports the outcome to the slot."""
        threads = self._threads if taken.target is None else self._savepoint_threads
        upload = threads.submit(self._upload, taken)
        with self._lock:
            self._under_way = {future for future in self._under_way if not future.done()} | {upload}

    def close(self, timeout_s: float) -> bool:
        """Start no more uploads; return True if the running ones end within `timeout_s`."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._savepoint_threads.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            # A cancelled upload never counts as done: `wait` would wait for it until the timeout.
            running = [upload for upload in self._under_way if not upload.cancelled()]
        return not wait(running, timeout_s).not_done

    def _upload(self, taken: SnapshotTaken) -> None:
        began = time.perf_counter()
        subtask, checkpoint, slot = taken.subtask, taken.checkpoint, self._context
        writers: list[FileStateWriter] = []
        target: SavepointDirectory | None = None
        try:
            target = self._targets.find(taken.target)
            operators: list[OperatorSnapshot] = []
            for snapshot in taken.pending:
                if target is None:
                    writer = slot.storage.writer(
                        slot.plan.attempt, checkpoint, snapshot.uid, subtask.index
                    )
                else:
                    writer = slot.storage.savepoint_writer(target, snapshot.uid, subtask.index)
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
            if target is not None:
                reach("saved")
                _check_not_given_up(target, taken.target)
            slot.post(Acked(checkpoint, done, taken.record_times, in_target=target is not None))
            # Storage has just accepted files, so it may now also delete the files that it could
            # not delete before.
            self._abandon(())
        except StorageError as error:
            # First, because storage that accepts no file may not delete one either, or hang.
            slot.post(Declined(checkpoint, subtask, str(error)))
            self._abandon(writers)
            if target is not None:
                _delete_if_empty(target)
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


class SavepointTargets:
    """The directories of savepoints, and whether this slot can write there. Any thread.

    A slot that cannot uploads to the job's storage, from where the driver copies the state.
    """

    def __init__(self, context: SlotContext) -> None:
        self._context = context
        self._lock = threading.Lock()
        self._last: tuple[SavepointTarget, SavepointDirectory | None] | None = None
        """The last target and its directory. Savepoints are taken one after the other."""

    def find(self, target: SavepointTarget | None) -> SavepointDirectory | None:
        """Return the directory of `target`, or None if the slot must upload to the job's storage.

        Looks at the directory once for all subtasks of the slot.
        """
        if target is None:
            return None
        with self._lock:
            if self._last is None or self._last[0] != target:
                self._last = target, self._look(target)
            return self._last[1]

    def _look(self, target: SavepointTarget) -> SavepointDirectory | None:
        storage = self._context.plan.storage
        try:
            directory = savepoint_directory(storage, target.location)
            # The mark first: a directory of the same name may be on this machine's own disk.
            if directory.has_mark(target.id):
                directory.check_writable()
                return directory
            reason = "it does not have the mark that the driver wrote"
        except OnceflowError as error:
            reason = str(error)
        _log.info(
            "slot %d does not write to savepoint %s, so the driver copies its state there: %s",
            self._context.slot,
            target.location,
            reason,
        )
        return None


def _check_not_given_up(directory: SavepointDirectory, target: SavepointTarget | None) -> None:
    """Raise StorageError if the driver has deleted the mark, and so perhaps missed new files."""
    if target is not None and not directory.has_mark(target.id):
        raise StorageError(f"the driver has given up savepoint {directory} meanwhile")


def _delete_if_empty(directory: SavepointDirectory) -> None:
    try:
        directory.delete_if_empty()
    except StorageError as error:
        _log.warning("a directory of a savepoint that failed stays: %s", error)
