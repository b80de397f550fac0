"""Writes the state of a job's run into checkpoint storage, in the background."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import time
from dataclasses import dataclass, field

import msgspec

from onceflow.core.errors import OnceflowError
from onceflow.core.runtime.driver.background import Background
from onceflow.core.runtime.events.job_events import JobState
from onceflow.core.storage import JobStorage
from onceflow.core.storage.log.driver_files import ERROR_LENGTH_MAX, LastRun

END_TIMEOUT_S = 10.0
"""The time in seconds that an ended job waits until storage has the record. It ends in any case."""

_log = logging.getLogger("onceflow.runtime.driver")


@dataclass(slots=True)
class RunRecorder:
    """The record of one driver's run. Called by the job's own thread; errors never fail the job."""

    storage: JobStorage
    _run: LastRun | None = None
    _writer: Background = field(default_factory=lambda: Background("last run"))

    def begin(self) -> None:
        """Write, in the background, that this driver owns the job. Idempotent."""
        if self._run is None:
            self._run = run = LastRun(
                run=secrets.token_hex(8),
                state=JobState.RUNNING.value,
                host=socket.gethostname(),
                pid=os.getpid(),
                began_ms=int(time.time() * 1000),
            )
            self._writer.submit(lambda: self._write(run))

    def end(self, state: JobState, attempt: int, error: str) -> None:
        """Write how the job ended. Returns when that is written, or after a timeout.

        A driver that never owned the job writes nothing.
        """
        run = self._run
        if run is not None:
            run = msgspec.structs.replace(
                run,
                state=state.value,
                ended_ms=int(time.time() * 1000),
                attempt=attempt,
                error=error[:ERROR_LENGTH_MAX],
            )
            ended = run
            self._writer.submit(lambda: self._write(ended))
            if not self._writer.finish(END_TIMEOUT_S):
                _log.warning("the end of the job is not recorded in %s yet", self.storage)
        self._writer.end(lambda: None, 0)

    def _write(self, run: LastRun) -> None:
        try:
            if run.ended_ms:
                self.storage.last_run.end(run)
            else:
                self.storage.last_run.begin(run)
        except OnceflowError as error:
            _log.warning("the state of the job cannot be written into %s: %s", self.storage, error)
