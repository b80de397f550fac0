"""Background threads of an attempt: work is done in order and awaited up to a deadline.

Correctness never depends on cleaning up. Work that fails is tried again at the next completed
checkpoint (I3, I9). If the process crashes, a later attempt does the work that is left.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from onceflow.core.protocol.checkpoints.snapshots import CompletedCheckpoint, StateHandle, paths_of
from onceflow.core.protocol.ids import GENESIS, CheckpointId
from onceflow.core.runtime.driver.attempt_context import AttemptContext
from onceflow.core.runtime.events.job_events import LeftoversAborted
from onceflow.core.runtime.json_logs import carry_fields

_log = logging.getLogger("onceflow.runtime.attempt")
T = TypeVar("T")


class Background:
    """A thread that does submitted work in order. All methods are called by one other thread.

    The thread is a daemon, so that work that hangs does not keep the process from ending.
    """

    def __init__(self, name: str) -> None:
        self._asked: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = (
            queue.SimpleQueue()
        )
        self._thread = threading.Thread(target=carry_fields(self._work), name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Do `work` after all work submitted before; the future holds its result or error."""
        future: Future[T] = Future()
        self._asked.put((work, future))
        return future

    def finish(self, timeout_s: float) -> bool:
        """Return True if all submitted work is done within `timeout_s`."""
        done = threading.Event()
        self.submit(done.set)
        return done.wait(timeout_s)

    def end(self, last: Callable[[], object], timeout_s: float) -> bool:
        """Drop work that has not begun and do `last`. Return True if the thread ends in time."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._asked.get_nowait()
        self.submit(last)
        self._asked.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _work(self) -> None:
        while (asked := self._asked.get()) is not None:
            work, future = asked
            try:
                result = work()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)


class CheckpointsCleaner:
    """Deletes files and records of old checkpoints, in order, on `background`.

    The attempt's thread calls `discard` and `clean_after`.
    """

    def __init__(self, context: AttemptContext, background: Background) -> None:
        self._context = context
        self._background = background
        # The sweep spares these files. Only the coordinator drops them: it alone knows which of
        # them a pending checkpoint references.
        self._restored_files = paths_of(
            snapshot for kept in context.log.view.completed for snapshot in kept.snapshots
        )
        # A slot of an older attempt may have written after recovery and the first sweep ran.
        self._left_by_older = [self._sweep_sinks, self._sweep_storage]
        self._undeleted: list[StateHandle] = []
        self._sweeping = False

    def discard(self, handles: Sequence[StateHandle]) -> None:
        """Delete state files that no checkpoint references any more."""
        self._background.submit(lambda: self._discard(handles))

    def clean_after(
        self,
        checkpoint: CheckpointId,
        oldest_retained: CheckpointId,
        newest: CompletedCheckpoint,
    ) -> None:
        """Delete records older than `oldest_retained`, and once the leftovers of older attempts.

        The attempt's thread calls this method with each completed checkpoint; it returns at once.
        """
        # Delete records before the files they reference: a crash in between leaves no record that
        # references a missing file.
        self._background.submit(lambda: self._try(lambda: self._context.log.prune(oldest_retained)))
        if self._undeleted:
            self.discard(())
        if self._left_by_older and not self._sweeping and checkpoint > GENESIS:
            self._sweeping = True
            self._background.submit(lambda: self._sweep(newest))

    def clean_at_end(self, newest: CompletedCheckpoint) -> None:
        """Try once more what failed: `newest` is the last checkpoint, and no other one follows.

        A transaction that an older attempt left prepared would otherwise stay so for ever: a job
        that is finished is not started again.
        """
        self._background.submit(lambda: self._sweep(newest))
        self.discard(())

    def _sweep(self, newest: CompletedCheckpoint) -> None:
        self._left_by_older = [
            sweep for sweep in self._left_by_older if not self._try(partial(sweep, newest))
        ]
        self._sweeping = False

    def _sweep_sinks(self, newest: CompletedCheckpoint) -> None:
        aborted = self._context.recovery.sweep(newest)
        self._context.publish(LeftoversAborted(self._context.plan.attempt, aborted))

    def _sweep_storage(self, newest: CompletedCheckpoint) -> None:
        del newest
        self._context.storage.sweep(
            self._context.log.view, self._context.plan.attempt, spared=self._restored_files
        )

    def _discard(self, handles: Sequence[StateHandle]) -> None:
        handles, self._undeleted = (*self._undeleted, *handles), []
        if not self._try(lambda: self._context.storage.discard(handles)):
            self._undeleted = list(handles)

    def _try(self, work: Callable[[], object]) -> bool:
        try:
            work()
        except Exception:
            _log.exception(
                "cleaning up after job %s failed; it is tried again at the next checkpoint, or at"
                " the end of the job",
                self._context.plan.job,
            )
            return False
        return True
