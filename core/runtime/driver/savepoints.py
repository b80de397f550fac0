"""The savepoints that were requested of one job in this process: their directories and outcomes.

    asked --given to the coordinator--> under way --written--> done
      +---------------the job ends------------+--aborted, or the attempt ends--> failed

A savepoint that is requested while no attempt runs waits for the next attempt. It fails if no
attempt begins it within the checkpoint timeout, so each request is answered. A savepoint that an
attempt has begun fails if the attempt ends: its number and its barrier belong to that attempt.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from onceflow.core.crash_points import reach
from onceflow.core.errors import OnceflowError, SavepointFailed, StorageError
from onceflow.core.protocol.checkpoints.decisions import (
    CheckpointKind,
    SavepointRequest,
    StateForm,
    WriteSavepoint,
)
from onceflow.core.protocol.checkpoints.snapshots import CompletedCheckpoint, handles_of
from onceflow.core.protocol.ids import TransactionId
from onceflow.core.protocol.log.memory import LogMemory
from onceflow.core.protocol.savepoints.savepoint import Savepoint, is_staged_for
from onceflow.core.storage import CheckpointStorage, ClaimedLog, JobStorage
from onceflow.core.storage.described_storage import may_slots_write, savepoint_directory
from onceflow.core.storage.snapshots.savepoints import SavepointDirectory

_log = logging.getLogger("onceflow.runtime.driver")


@dataclass(slots=True)
class AskedSavepoint:
    """A requested savepoint: its directory, and a future with its outcome."""

    request: SavepointRequest
    directory: SavepointDirectory
    done: Future[str] = field(default_factory=Future[str])
    under_way: bool = False
    """True if an attempt has begun the savepoint: the attempt's end then answers the request."""
    failure: str = ""
    """The reason why the savepoint has failed. From then on its metadata is not written."""
    is_finishing: bool = False
    """True while another thread writes the metadata."""
    may_be_whole: bool = False
    """True if the metadata may exist: it must be deleted before a failure is reported."""
    written: Savepoint | None = None

    @property
    def location(self) -> str:
        """The directory as text."""
        return str(self.directory)


class Savepoints:
    """The requested savepoints of one job, each in its own directory. Any thread."""

    def __init__(
        self,
        job: str,
        checkpoint_storage: CheckpointStorage,
        storage: JobStorage,
        directory: str | None,
        native_form: str,
        wait_s: float,
    ) -> None:
        """Create the registry.

        `wait_s` limits how long a request waits for an attempt to begin it.
        """
        self._job = job
        self._checkpoint_storage = checkpoint_storage
        self._storage = storage
        self._directory = directory or storage.savepoints
        self._native_form = native_form
        self._wait_s = wait_s
        self._lock = threading.Lock()
        self._asked: dict[str, AskedSavepoint] = {}

    def ask(self, kind: CheckpointKind, directory: str | None, form: StateForm) -> AskedSavepoint:
        """Create the directory of a new savepoint; return its request and its future.

        Raises:
            ConfigError: The checkpoint storage cannot reach `directory`.
            StorageError: `directory` cannot be written to; the job is not affected.
        """
        savepoint_id = uuid.uuid4().hex
        parent = (directory or self._directory).rstrip("/")
        location = savepoint_directory(
            self._checkpoint_storage, f"{parent}/savepoint-{savepoint_id[:12]}"
        )
        # Before the request is registered: if the directory cannot be written, only the caller gets
        # an error, and the job loses no checkpoint.
        target = location.prepare(savepoint_id)
        slots_write = may_slots_write(self._checkpoint_storage, target.location)
        request = SavepointRequest(savepoint_id, kind, form, target if slots_write else None)
        asked = AskedSavepoint(request, location)
        with self._lock:
            self._asked[request.id] = asked
        # A job that keeps restarting may never begin the savepoint, and a caller waits for it.
        deadline = threading.Timer(self._wait_s, self._give_up, (request,))
        deadline.daemon = True
        deadline.start()
        asked.done.add_done_callback(lambda _: deadline.cancel())
        return asked

    def begin(self, request: SavepointRequest) -> bool:
        """Mark the savepoint as begun by an attempt. Return False if it has failed before."""
        with self._lock:
            asked = self._asked[request.id]
            # `_give_up` takes the same lock: either the attempt begins the savepoint, or the timer
            # fails it.
            asked.under_way = not asked.done.done()
            return asked.under_way

    def _give_up(self, request: SavepointRequest) -> None:
        """Fail the request unless an attempt has begun the savepoint."""
        with self._lock:
            asked = self._asked[request.id]
            if asked.under_way or asked.done.done():
                return
            asked.failure = f"no attempt started it within {self._wait_s:g} s; request it again"
            self._fail(asked, asked.failure)
        _dispose(asked)

    def write(self, decision: WriteSavepoint, log: ClaimedLog) -> int:
        """Write the savepoint durably and return the size of its state. Runs on a separate thread.

        Deletes the savepoint if its request has failed meanwhile, for example because the attempt
        ended.

        Raises:
            StorageError: The savepoint could not be written completely.
            CheckpointCorrupt: A state file differs from what was written.
        """
        asked = self._asked[decision.request.id]
        try:
            return self._write(asked, decision, log)
        finally:
            with self._lock:
                asked.is_finishing = False
            # `clean_up` may have deleted the files that existed then; delete those written since.
            if asked.failure:
                self._dispose_and_fail(asked)

    def _write(self, asked: AskedSavepoint, decision: WriteSavepoint, log: ClaimedLog) -> int:
        request, completed = decision.request, decision.completed
        memory = log.view.memory_at(completed)
        # Copy staged rows first: while the job goes on, proofs of later commits are pruned.
        staged = self._copy_staged(asked, completed, memory)
        savepoint = Savepoint(
            request.id,
            self._job,
            self._storage.log_id,
            request.kind,
            completed,
            memory,
            self._native_form if request.form is StateForm.NATIVE else "",
            staged,
        )
        savepoint = asked.directory.collect(savepoint, self._storage.reader(), decision.in_target)
        with self._lock:
            # A savepoint whose failure was reported must never be whole, not even for a moment in
            # which this process may be killed.
            if asked.failure:
                raise StorageError(f"the savepoint has failed meanwhile: {asked.failure}")
            asked.is_finishing = asked.may_be_whole = True
        reach("collected")
        asked.directory.finish(savepoint)
        reach("finished")
        with self._lock:
            # Set before the request is answered: from the next checkpoint on, pruning of proofs
            # spares what this savepoint needs.
            asked.written = None if asked.failure else savepoint
        return sum(handle.size_bytes for handle in handles_of(completed.snapshots))

    def find_location(self, request: SavepointRequest) -> str:
        """Return the savepoint's directory."""
        return str(self._asked[request.id].directory)

    def record_success(self, request: SavepointRequest) -> None:
        """Answer the request: the savepoint is complete, and independent of the attempt."""
        asked = self._asked[request.id]
        asked.done.set_result(str(asked.directory))

    def record_failure(self, request: SavepointRequest, reason: str) -> None:
        """Record that the savepoint has failed. Returns at once; `clean_up` must follow.

        Answers the request with an error, unless the metadata may exist: then `clean_up` answers.
        """
        with self._lock:
            asked = self._asked[request.id]
            if asked.done.done() or asked.failure:
                return
            # From now on no metadata is created.
            asked.failure, asked.written = reason, None
            if not asked.may_be_whole:
                self._fail(asked, reason)

    def clean_up(self, request: SavepointRequest) -> None:
        """Delete the files of a failed savepoint, then answer the request if it is unanswered.

        Do nothing while another thread writes the metadata: that thread then does both.
        """
        with self._lock:
            asked = self._asked[request.id]
            if asked.is_finishing or not asked.failure:
                return
        self._dispose_and_fail(asked)

    def _dispose_and_fail(self, asked: AskedSavepoint) -> None:
        """Delete the files of a failed savepoint, then answer the request if nobody has."""
        reason = asked.failure
        if not _dispose(asked):
            reason += f"; its files in {asked.directory} could not be deleted: do not use them"
        with self._lock:
            if not asked.done.done():
                self._fail(asked, reason)

    def _fail(self, asked: AskedSavepoint, reason: str) -> None:
        what = f"{asked.request.kind.value.replace('_', ' with ')} of job {self._job!r}"
        asked.done.set_exception(SavepointFailed(f"{what} failed: {reason}"))

    @property
    def last_written(self) -> CompletedCheckpoint | None:
        """The checkpoint in the last durable savepoint of this process; None if there is none."""
        written = (savepoint.completed for _, savepoint in self._list_written())
        return max(written, key=lambda completed: completed.checkpoint, default=None)

    def _list_written(self) -> Sequence[tuple[AskedSavepoint, Savepoint]]:
        with self._lock:
            return [
                (asked, asked.written)
                for asked in self._asked.values()
                if asked.written is not None
            ]

    def add_proofs(self) -> None:
        """Add the proofs of the last commits to the savepoint with which the job has stopped.

        Runs once everything is committed. Without these proofs a start from the savepoint depends
        on the proofs of the target, which a target may forget: Kafka does after a week without
        commits.
        """
        for asked, written in self._list_written():
            if not asked.request.kind.stops_sources:
                continue
            try:
                self._copy_staged(asked, written.completed, written.memory)
            except OnceflowError as error:
                location = asked.directory
                _log.warning(
                    "savepoint %s does not contain proofs of its last commits: %s", location, error
                )

    def _copy_staged(
        self, asked: AskedSavepoint, taken: CompletedCheckpoint, memory: LogMemory
    ) -> tuple[TransactionId, ...]:
        def is_wanted(transaction: TransactionId) -> bool:
            return is_staged_for(transaction, taken)

        return self._storage.copy_staged(asked.directory, memory.sinks, is_wanted)

    def fail_begun(self, why: str) -> None:
        """Fail the savepoints that an attempt has begun. Called when that attempt has ended."""
        for asked in self._open():
            if asked.under_way:
                self.record_failure(asked.request, f"{why}; ask again")
                self.clean_up(asked.request)
                self._answer_unfinished(asked)

    def fail_all(self, why: str) -> None:
        """Fail all unanswered savepoints. Called when the job has ended."""
        for asked in self._open():
            self.record_failure(asked.request, why)
            self._answer_unfinished(asked)
        with self._lock:
            failed = [asked for asked in self._asked.values() if asked.failure]
        for asked in failed:
            # Slots that were ending may have written more after the files were deleted, and an
            # attempt that ended may have dropped its `clean_up`.
            self.clean_up(asked.request)

    def _answer_unfinished(self, asked: AskedSavepoint) -> None:
        """Answer a failed savepoint although storage does not end the write of its metadata."""
        with self._lock:
            if asked.is_finishing and not asked.done.done():
                self._fail(
                    asked,
                    f"{asked.failure}; storage has not answered its last write, so a whole"
                    f" savepoint may be in {asked.directory}: look for _metadata there",
                )

    def _open(self) -> Sequence[AskedSavepoint]:
        with self._lock:
            return [asked for asked in self._asked.values() if not asked.done.done()]


def _dispose(asked: AskedSavepoint) -> bool:
    """Delete the files of a failed savepoint. Return False if some stay."""
    try:
        asked.directory.dispose()
    except StorageError as error:
        _log.warning("files of a failed savepoint could not be deleted: %s", error)
        return False
    return True


def text_of(error: BaseException) -> str:
    """Return the text of `error` for messages."""
    return str(error) if isinstance(error, OnceflowError) else f"{type(error).__name__}: {error}"
