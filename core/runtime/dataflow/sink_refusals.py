"""Classifies failures of a sink's writer: refused rows, or a target that is away.

onceflow's own errors say whether they are refusals. An error of another package counts as a refusal
unless the network, a disk or a lack of memory may have caused it. If equal refusals occur in a few
attempts without progress, the job stops, because further attempts would fail in the same way.

Used by the thread of the chain. `protocol.failures` decides which refusals are equal.
"""

from __future__ import annotations

import traceback
from collections.abc import Generator, Sequence
from contextlib import contextmanager

from onceflow.core.errors import (
    InvariantViolation,
    OnceflowError,
    PreCommitFailed,
    SinkError,
    TargetRefused,
)
from onceflow.core.protocol.committables import Committable
from onceflow.core.protocol.failures import make_fingerprint
from onceflow.core.protocol.ids import CheckpointId
from onceflow.core.spi.bad_rows import is_data_at_fault, may_pass

_TRACE_LENGTH_MAX = 4000
_ADVICE = (
    "No row is lost: all rows since the last checkpoint will be read again. If the error"
    " repeats, change the rows before the sink, the sink, or its target, and start the job again"
)


class SinkRefusals:
    """The failures of one writer in one attempt."""

    def __init__(self, uid: str, attempt: int) -> None:
        """Start without any decided rows."""
        self._uid = uid
        self._attempt = attempt
        self._pre_committed: list[CheckpointId] = []
        self._has_got_on = False

    def record_pre_commit(
        self, checkpoint: CheckpointId, committables: Sequence[Committable]
    ) -> None:
        """Record a pre-commit of the writer."""
        if committables and not self._has_got_on:
            self._pre_committed.append(checkpoint)

    def record_decision(self, checkpoint: CheckpointId) -> None:
        """Record that `checkpoint` is decided. If it contains rows, the sink has made progress."""
        self._has_got_on |= any(
            pre_committed <= checkpoint for pre_committed in self._pre_committed
        )

    @contextmanager
    def name_refusal(self, doing: str) -> Generator[None, None, None]:
        """Raise refusals with their fingerprint, and other failures unchanged.

        Raises:
            TargetRefused: The target could not handle a value; contains the traceback.
            PreCommitFailed: The sink raised another error of its own; contains the traceback.
        """
        try:
            yield
        except InvariantViolation:
            raise
        except OnceflowError as error:
            if error.retry == "job" and self._is_refusal(error):
                error.fingerprint = self._make_fingerprint(error)
            raise
        except Exception as error:
            if may_pass(error):
                raise
            kind = type(error).__name__
            trace = "".join(traceback.format_exception(error))[-_TRACE_LENGTH_MAX:].rstrip()
            error_class = TargetRefused if is_data_at_fault(error) else PreCommitFailed
            raise error_class(
                f"sink {self._uid!r}: {doing}: {kind}: {error}. {_ADVICE}\n{trace}",
                fingerprint=self._make_fingerprint(error),
            ) from error

    def _is_refusal(self, error: OnceflowError) -> bool:
        if isinstance(error, TargetRefused):
            return True
        return isinstance(error, SinkError) and is_data_at_fault(error)

    def _make_fingerprint(self, error: Exception) -> str:
        only_in = self._attempt if self._has_got_on else None
        return make_fingerprint(self._uid, type(error).__name__, str(error), only_in=only_in)
