"""What is tidied up beside a running attempt: correctness waits for none of it.

What fails is tried again at the next completed checkpoint (I3, I9); what a crash leaves undone is
done by a later attempt.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial

from onceflow.core.protocol.ids import GENESIS, CheckpointId
from onceflow.core.protocol.snapshots import CompletedCheckpoint, StateHandle
from onceflow.core.runtime.driver.attempt_context import AttemptContext
from onceflow.core.runtime.driver.background import Background

_log = logging.getLogger("onceflow.runtime.attempt")


class CheckpointsCleaner:
    """Asked by the attempt's thread, done on `background`, in order."""

    def __init__(self, context: AttemptContext, background: Background) -> None:
        self._context = context
        self._background = background
        # A slot of an older attempt may have written after recovery and the first sweep had looked.
        self._left_by_older = [self._sweep_sinks, self._sweep_storage]
        self._undeleted: list[StateHandle] = []
        self._sweeping = False

    def discard(self, handles: Sequence[StateHandle]) -> None:
        """Delete state that no checkpoint names any more."""
        self._background.submit(lambda: self._discard(handles))

    def completed(
        self,
        checkpoint: CheckpointId,
        oldest_retained: CheckpointId,
        newest: CompletedCheckpoint,
    ) -> None:
        """Drop what `checkpoint` has made superfluous, and once what older attempts left."""
        # Records go before the files that they name: a crash in between leaves no dangling name.
        self._background.submit(
            lambda: self._done(lambda: self._context.log.prune(oldest_retained))
        )
        if self._undeleted:
            self.discard(())
        if self._left_by_older and not self._sweeping and checkpoint > GENESIS:
            self._sweeping = True
            self._background.submit(lambda: self._sweep(newest))

    def _sweep(self, newest: CompletedCheckpoint) -> None:
        self._left_by_older = [
            sweep for sweep in self._left_by_older if not self._done(partial(sweep, newest))
        ]
        self._sweeping = False

    def _sweep_sinks(self, newest: CompletedCheckpoint) -> None:
        self._context.progress.swept(self._context.recovery.sweep(newest).sinks)

    def _sweep_storage(self, newest: CompletedCheckpoint) -> None:
        del newest
        self._context.storage.sweep(self._context.log.view, self._context.plan.attempt)

    def _discard(self, handles: Sequence[StateHandle]) -> None:
        handles, self._undeleted = (*self._undeleted, *handles), []
        if not self._done(lambda: self._context.storage.discard(handles)):
            self._undeleted = list(handles)

    def _done(self, work: Callable[[], object]) -> bool:
        try:
            work()
        except Exception:
            _log.exception(
                "cleaning up after job %s; tried again at its next checkpoint",
                self._context.plan.job,
            )
            return False
        return True
