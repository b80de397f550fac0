"""The restart loop of a job: runs one attempt after another until the job ends."""

from __future__ import annotations

import logging
import math
import random
import threading
import time
from collections.abc import Callable

from onceflow.core.errors import Fenced, OnceflowError
from onceflow.core.protocol.failures import EndJob, JobFailures
from onceflow.core.protocol.loops.attempt_facts import CancelRequested, JobCancelled
from onceflow.core.protocol.restart import GiveUp, RestartAfter
from onceflow.core.runtime.driver.attempt_start import AttemptStarter, name_and_text_of
from onceflow.core.runtime.driver.checkpoint_deletion import delete_checkpoints
from onceflow.core.runtime.driver.job_context import JobContext
from onceflow.core.runtime.driver.source_splits import splits_of
from onceflow.core.runtime.events.job_events import JobEnded, JobRestarting, JobState
from onceflow.core.runtime.messages import fingerprint_of

_log = logging.getLogger("onceflow.runtime.driver")


class RestartLoop:
    """The loop of one job. `run` is called by the job's thread, `leave` and `cancel` by any."""

    def __init__(
        self,
        context: JobContext,
        *,
        owned: Callable[[], None],
        end_with_process: Callable[[], None],
    ) -> None:
        """Start nothing yet.

        `owned` is called as soon as an attempt owns the job. `end_with_process` is called if the
        process ends while an attempt runs.
        """
        self._context = context
        self._plan = context.plan
        self._cluster = context.cluster
        self._owner = context.owner
        self._failures = JobFailures(
            context.plan.restart.tracker(random.Random())  # noqa: S311 - jitter
        )
        self._starter = AttemptStarter(context, self._failures, owned, end_with_process)
        self._asked_to_leave = threading.Event()
        self._cancelled_by_request = False
        self._error: BaseException | None = None

    @property
    def error(self) -> BaseException | None:
        """The error that made the job fail; None while the job runs, or if it did not fail."""
        return self._error

    def cancel(self) -> None:
        """Cancel the job by the user's wish. Like `leave`, but may delete its checkpoints."""
        self._cancelled_by_request = True
        self.leave()

    def leave(self) -> None:
        """Request an end without a checkpoint. Returns at once."""
        self._asked_to_leave.set()
        # The flag wakes a driver that waits for a restart, the event wakes a running attempt.
        self._context.events.put(CancelRequested())

    def run(self) -> JobEnded:
        """Run attempts until the job ends. Return how it has ended; `error` has the failure."""
        try:
            finished = self._attempts()
            # All decided transactions are committed now, so savepoints can store the proofs.
            self._context.savepoints.add_proofs()
            if finished:
                self._tell_sources()
            return JobEnded(JobState.FINISHED if finished else JobState.STOPPED)
        except JobCancelled:
            return self._finish_cancelled()
        except BaseException as error:  # the edge: the user sees it through the job handle
            self._error = error
            fields = {"error": type(error).__name__}
            _log.error("job %s failed: %s", self._plan.name, error, extra=fields)
            return JobEnded(JobState.FAILED, name_and_text_of(error))

    def _finish_cancelled(self) -> JobEnded:
        """Delete the checkpoints if the settings say so; return the JobEnded event.

        A job that is cancelled because its process ends keeps its checkpoints.
        """
        deletes_checkpoints = (
            self._cancelled_by_request and self._plan.checkpointing.deletes_on_cancel()
        )
        log = self._owner.log
        if not deletes_checkpoints or log is None or not log.view.completed:
            return JobEnded(JobState.CANCELLED)
        self._context.observation.promise(math.inf)  # There may be many files to delete.
        try:
            # The new claim fails if another driver owns the job by now: the checkpoints then belong
            # to that driver.
            log = self._owner.claim()
            delete_checkpoints(log, self._owner.open_recovery(log), self._context.storage)
        except Exception as error:  # the job is cancelled all the same, and can go on
            text = f"its checkpoints were not deleted: {name_and_text_of(error)}"
            _log.warning("job %s is cancelled; %s", self._plan.name, text)
            return JobEnded(JobState.CANCELLED, text)
        return JobEnded(JobState.CANCELLED)

    def _tell_sources(self) -> None:
        assert self._owner.log is not None
        last = self._owner.log.view.completed[-1]
        for uid, source in self._plan.graph.sources():
            try:
                source.on_finished(splits_of(last, uid) or ())
            except Exception as error:  # the job is over and well, whatever stays behind
                _log.warning("source %s could not clean up: %s", uid, error)

    def _attempts(self) -> bool:
        while True:
            try:
                return self._starter.run()
            except (Fenced, JobCancelled):
                raise
            except Exception as error:
                self._await_restart(error)

    def _await_restart(self, error: Exception) -> None:
        """Wait until the next attempt is due.

        If no restart is allowed, raise `error` or its cause.
        """
        self._owner.check_owned()
        if not isinstance(error, OnceflowError):
            self._cluster.check_alive()
        now, text = time.monotonic(), name_and_text_of(error)
        match self._failures.on_failure(error, text, fingerprint_of(error), now):
            case EndJob():
                raise error
            case GiveUp(reason):
                self._cluster.check_alive()
                if not isinstance(error, OnceflowError):
                    _log.error("no further restart of job %s: %s", self._plan.name, reason)
                    raise error
                first_line, line_end, trace = self._failures.describe(text, now).partition("\n")
                text = f"{first_line} (no further restart: {reason}){line_end}{trace}"
                raise type(error)(text.removeprefix(f"{type(error).__name__}: ")) from error
            case RestartAfter(delay_s):
                self._cluster.check_alive()
                # Count from the failure: part of the delay has passed while the slots ended.
                left_s = max(0.0, (self._starter.failed_at or now) + delay_s - now)
                text = self._failures.describe(text, now)
                # The other lines are a traceback, which is the same each time the attempt fails.
                fields = {"error": type(error).__name__, "cause": text}
                first_line = text.partition("\n")[0]
                _log.warning("restart in %.2f s: %s", left_s, first_line, extra=fields)
                self._context.observation.tracker.publish(JobRestarting(left_s, text))
                self._context.observation.promise(left_s)
                if self._asked_to_leave.wait(left_s):
                    raise JobCancelled("cancelled while restarting") from error
