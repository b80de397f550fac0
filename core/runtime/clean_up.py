"""What is tidied up beside a running attempt: correctness waits for none of it.

All of it is done again by a later attempt if a crash leaves it undone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from onceflow.core.protocol.ids import GENESIS, CheckpointId
from onceflow.core.protocol.snapshots import CompletedCheckpoint, StateHandle
from onceflow.core.runtime.attempt_parts import AttemptParts

_log = logging.getLogger("onceflow.runtime.attempt")


class CleanUp:
    """Asked by the attempt's thread, done on `background`, in order."""

    def __init__(self, parts: AttemptParts, background: ThreadPoolExecutor) -> None:
        self._parts = parts
        self._background = background
        self._swept = False

    def discard(self, handles: Sequence[StateHandle]) -> None:
        """Delete state that no checkpoint names any more."""
        self._do(self._parts.storage.discard, handles)

    def completed(
        self,
        checkpoint: CheckpointId,
        oldest_retained: CheckpointId,
        newest: CompletedCheckpoint,
    ) -> None:
        """Drop what `checkpoint` has made superfluous; at the first one, what attempts left."""
        # Records go before the files that they name: a crash in between leaves no dangling name.
        self._do(self._parts.log.prune, oldest_retained)
        if not self._swept and checkpoint > GENESIS:
            self._swept = True
            self._do(self._sweep_sinks, newest)
            # A slot of an older attempt may have written after the sweep at the start.
            self._do(self._parts.storage.sweep, self._parts.log.view, self._parts.plan.attempt)

    def _sweep_sinks(self, completed: CompletedCheckpoint) -> None:
        self._parts.progress.swept(self._parts.recovery.sweep(completed).sinks)

    def _do(self, work: Callable[..., object], *arguments: object) -> None:
        def logged() -> None:
            try:
                work(*arguments)
            except Exception:
                _log.exception("cleaning up after job %s", self._parts.plan.job)

        self._background.submit(logged)
