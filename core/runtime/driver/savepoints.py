"""The savepoints that were asked for of one job in this process: where they go and how they end.

    asked --given to the coordinator--> under way --written--> done
      +---------------the job ends------------+--aborted, or the attempt ends--> failed

One that is asked for while no attempt runs waits for the next one. One that is under way when an
attempt ends has failed: its number and its barrier were the attempt's.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from onceflow.core.errors import OnceflowError, SavepointFailed, StorageError
from onceflow.core.protocol.decisions import (
    CheckpointKind,
    SavepointRequest,
    StateForm,
    WriteSavepoint,
)
from onceflow.core.protocol.savepoints import Savepoint
from onceflow.core.protocol.snapshots import handles_of
from onceflow.core.storage import CheckpointStorage, ClaimedLog, JobStorage
from onceflow.core.storage.descriptions import savepoint_directory
from onceflow.core.storage.savepoints import SavepointDirectory

_log = logging.getLogger("onceflow.runtime.driver")


@dataclass(frozen=True, slots=True)
class AskedSavepoint:
    """A savepoint that was asked for: its directory, and what says that it is whole, or fails."""

    request: SavepointRequest
    place: str
    done: Future[str]


@dataclass(slots=True)
class _Asked:
    request: SavepointRequest
    directory: SavepointDirectory
    done: Future[str] = field(default_factory=Future[str])
    under_way: bool = False
    written: bool = False


class Savepoints:
    """Any thread. Each savepoint has a directory of its own, made when it is asked for."""

    def __init__(
        self,
        job: str,
        place: CheckpointStorage,
        storage: JobStorage,
        directory: str | None,
        native_form: str,
    ) -> None:
        self._job = job
        self._place = place
        self._storage = storage
        self._directory = directory or storage.savepoints
        self._native_form = native_form
        self._lock = threading.Lock()
        self._asked: dict[str, _Asked] = {}

    def ask(self, kind: CheckpointKind, directory: str | None, form: StateForm) -> AskedSavepoint:
        """Return what to tell the attempt, and where the new savepoint comes to be.

        Raises:
            ConfigError: `directory` is nowhere that the checkpoint storage can reach.
            StorageError: It cannot be written to; the job is left alone.
        """
        request = SavepointRequest(uuid.uuid4().hex, kind, form)
        parent = (directory or self._directory).rstrip("/")
        place = savepoint_directory(self._place, f"{parent}/savepoint-{request.id[:12]}")
        place.prepare()
        asked = _Asked(request, place)
        with self._lock:
            self._asked[request.id] = asked
        return AskedSavepoint(request, str(place), asked.done)

    def begun(self, request: SavepointRequest) -> None:
        """Take in that an attempt has been told."""
        self._asked[request.id].under_way = True

    def write(self, decision: WriteSavepoint, log: ClaimedLog) -> int:
        """Return the size of the state of the savepoint, all of it durable. Own thread.

        Raises:
            StorageError: It is not whole.
            CheckpointCorrupt: A state file is not what was written.
        """
        request, completed = decision.request, decision.completed
        savepoint = Savepoint(
            request.id,
            self._job,
            self._storage.log_id,
            request.kind,
            completed,
            log.view.memory,
            self._native_form if request.form is StateForm.NATIVE else "",
        )
        self._asked[request.id].directory.write(savepoint, self._storage.reader())
        return sum(handle.size_bytes for handle in handles_of(completed.snapshots))

    def place_of(self, request: SavepointRequest) -> str:
        """Return the savepoint's directory."""
        return str(self._asked[request.id].directory)

    def succeeded(self, request: SavepointRequest) -> None:
        """Take in that the savepoint is whole, and no part of the attempt any more."""
        asked = self._asked[request.id]
        asked.written = True
        asked.done.set_result(str(asked.directory))

    def failed(self, request: SavepointRequest, reason: str) -> None:
        """Take in that there will be no such savepoint; delete what there is of it."""
        with self._lock:
            asked = self._asked[request.id]
            if asked.done.done():
                return
            what = f"{request.kind.value.replace('_', ' with ')} of job {self._job!r} failed: "
            asked.done.set_exception(SavepointFailed(f"{what}{reason}"))
        try:
            asked.directory.dispose()
        except StorageError as error:
            _log.warning("parts of a savepoint that failed stay: %s", error)

    def attempt_ended(self, why: str) -> None:
        """Fail those that are under way."""
        for asked in self._open():
            if asked.under_way:
                self.failed(asked.request, f"{why}; ask again")

    def job_ended(self, why: str) -> None:
        """Fail all that are left."""
        for asked in self._open():
            self.failed(asked.request, why)

    def _open(self) -> Sequence[_Asked]:
        with self._lock:
            return [asked for asked in self._asked.values() if not asked.done.done()]


def text_of(error: BaseException) -> str:
    """Return what `error` says, for people."""
    return str(error) if isinstance(error, OnceflowError) else f"{type(error).__name__}: {error}"
