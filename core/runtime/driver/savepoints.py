"""The savepoints that were asked for of one job in this process: where they go and how they end.

    asked --given to the coordinator--> under way --written--> done
      +---------------the job ends------------+--aborted, or the attempt ends--> failed

One that is asked for while no attempt runs waits for the next one, and no longer than a checkpoint
may take: it has failed then, so each request is answered. One that is under way when an attempt
ends has failed: its number and its barrier were the attempt's.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

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
from onceflow.core.storage.descriptions import savepoint_directory
from onceflow.core.storage.snapshots.savepoints import SavepointDirectory

_log = logging.getLogger("onceflow.runtime.driver")


@dataclass(slots=True)
class AskedSavepoint:
    """A savepoint that was asked for: its directory, and what says that it is whole, or fails."""

    request: SavepointRequest
    directory: SavepointDirectory
    done: Future[str] = field(default_factory=Future[str])
    under_way: bool = False
    """Whether an attempt has begun it: its end answers the request."""
    written: Savepoint | None = None

    @property
    def location(self) -> str:
        """Its directory, for people."""
        return str(self.directory)


class Savepoints:
    """Any thread. Each savepoint has a directory of its own, made when it is asked for."""

    def __init__(
        self,
        job: str,
        checkpoint_storage: CheckpointStorage,
        storage: JobStorage,
        directory: str | None,
        native_form: str,
        wait_s: float,
    ) -> None:
        """`wait_s` is how long a request may wait for an attempt that takes it up."""
        self._job = job
        self._checkpoint_storage = checkpoint_storage
        self._storage = storage
        self._directory = directory or storage.savepoints
        self._native_form = native_form
        self._wait_s = wait_s
        self._lock = threading.Lock()
        self._asked: dict[str, AskedSavepoint] = {}

    def ask(self, kind: CheckpointKind, directory: str | None, form: StateForm) -> AskedSavepoint:
        """Make the directory of a new savepoint; return its request and its future.

        Raises:
            ConfigError: `directory` is nowhere that the checkpoint storage can reach.
            StorageError: It cannot be written to; the job is left alone.
        """
        request = SavepointRequest(uuid.uuid4().hex, kind, form)
        parent = (directory or self._directory).rstrip("/")
        location = savepoint_directory(
            self._checkpoint_storage, f"{parent}/savepoint-{request.id[:12]}"
        )
        # Before the request is known to anybody: a directory that cannot be written fails the
        # caller, and costs the job no checkpoint.
        location.prepare()
        asked = AskedSavepoint(request, location)
        with self._lock:
            self._asked[request.id] = asked
        # A job that restarts again and again may never take it up, and a caller is waiting.
        deadline = threading.Timer(self._wait_s, self._give_up, (request,))
        deadline.daemon = True
        deadline.start()
        asked.done.add_done_callback(lambda _: deadline.cancel())
        return asked

    def begin(self, request: SavepointRequest) -> bool:
        """Return whether an attempt is to take the savepoint: not once it has been given up."""
        with self._lock:
            asked = self._asked[request.id]
            # Under the lock that `_give_up` takes: either the attempt begins it or the timer fails
            # it, and never both.
            asked.under_way = not asked.done.done()
            return asked.under_way

    def _give_up(self, request: SavepointRequest) -> None:
        """Fail the request unless an attempt has taken it up."""
        with self._lock:
            asked = self._asked[request.id]
            if asked.under_way or asked.done.done():
                return
            self._fail(asked, f"no attempt has begun it within {self._wait_s:g} s; ask again")
        _dispose(asked)

    def write(self, decision: WriteSavepoint, log: ClaimedLog) -> int:
        """Return the size of the state of the savepoint, all of it durable. Own thread.

        Deletes the savepoint if its request has failed meanwhile, as it does with the attempt.

        Raises:
            StorageError: It is not whole.
            CheckpointCorrupt: A state file is not what was written.
        """
        asked = self._asked[decision.request.id]
        try:
            return self._write(asked, decision, log)
        finally:
            # `record_failure` has deleted what was there at that time, and more was written since.
            if asked.done.done():
                _dispose(asked)

    def _write(self, asked: AskedSavepoint, decision: WriteSavepoint, log: ClaimedLog) -> int:
        request, completed = decision.request, decision.completed
        memory = log.view.memory_at(completed)
        # First: proofs of what is committed meanwhile are pruned as checkpoints go on.
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
        asked.directory.write(savepoint, self._storage.reader())
        with self._lock:
            # Before the request is answered: pruning of proofs goes by it from the next checkpoint
            # on.
            asked.written = None if asked.done.done() else savepoint
        return sum(handle.size_bytes for handle in handles_of(completed.snapshots))

    def find_location(self, request: SavepointRequest) -> str:
        """Return the savepoint's directory."""
        return str(self._asked[request.id].directory)

    def record_success(self, request: SavepointRequest) -> None:
        """Answer the request: the savepoint is whole, and no part of the attempt any more."""
        asked = self._asked[request.id]
        asked.done.set_result(str(asked.directory))

    def record_failure(self, request: SavepointRequest, reason: str) -> None:
        """Answer the request with an error; delete what there is of the savepoint."""
        with self._lock:
            asked = self._asked[request.id]
            if asked.done.done():
                return
            self._fail(asked, reason)
            # Nothing is added to what is deleted now.
            asked.written = None
        _dispose(asked)

    def _fail(self, asked: AskedSavepoint, reason: str) -> None:
        what = f"{asked.request.kind.value.replace('_', ' with ')} of job {self._job!r}"
        asked.done.set_exception(SavepointFailed(f"{what} failed: {reason}"))

    @property
    def last_written(self) -> CompletedCheckpoint | None:
        """What the last savepoint of this process holds, all of it durable; None: there is none."""
        with self._lock:
            asked = list(self._asked.values())
        written = [one.written.completed for one in asked if one.written is not None]
        return max(written, key=lambda completed: completed.checkpoint, default=None)

    def add_proofs(self) -> None:
        """Add to the savepoint with which the job has stopped what its last commits left as proof.

        Runs once all is committed. Without these proofs the savepoint needs those of the target,
        and a target may forget them: Kafka does after a week without commits.
        """
        for asked in self._asked.values():
            if asked.written is None or not asked.request.kind.stops_sources:
                continue
            try:
                self._copy_staged(asked, asked.written.completed, asked.written.memory)
            except OnceflowError as error:
                location = asked.directory
                _log.warning("savepoint %s lacks proofs of its last commits: %s", location, error)

    def _copy_staged(
        self, asked: AskedSavepoint, taken: CompletedCheckpoint, memory: LogMemory
    ) -> tuple[TransactionId, ...]:
        def is_wanted(transaction: TransactionId) -> bool:
            return is_staged_for(transaction, taken)

        return self._storage.copy_staged(asked.directory, memory.sinks, is_wanted)

    def fail_begun(self, why: str) -> None:
        """Fail the savepoints that an attempt has begun. Called when the attempt has ended."""
        for asked in self._open():
            if asked.under_way:
                self.record_failure(asked.request, f"{why}; ask again")

    def fail_all(self, why: str) -> None:
        """Fail all savepoints that are left. Called when the job has ended."""
        for asked in self._open():
            self.record_failure(asked.request, why)

    def _open(self) -> Sequence[AskedSavepoint]:
        with self._lock:
            return [asked for asked in self._asked.values() if not asked.done.done()]


def _dispose(asked: AskedSavepoint) -> None:
    """Delete what there is of a savepoint that has failed."""
    try:
        asked.directory.dispose()
    except StorageError as error:
        _log.warning("parts of a savepoint that failed stay: %s", error)


def text_of(error: BaseException) -> str:
    """Return what `error` says, for people."""
    return str(error) if isinstance(error, OnceflowError) else f"{type(error).__name__}: {error}"
