"""The schedule that says when the next checkpoint is due and of which kind it is."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from onceflow.core.protocol.checkpoints.decisions import CheckpointKind, SavepointRequest
from onceflow.core.protocol.ids import CheckpointId, SubtaskRef

RETRY_PAUSE_S = 1.0
"""The pause between a failed checkpoint and the next one that ignores the interval. Without a
pause, a sink that always declines would cause a tight loop."""


@dataclass(frozen=True, slots=True)
class CheckpointSettings:
    """The settings for when checkpoints are taken and how many failures are tolerated."""

    interval_s: float | None
    """The time from one trigger to the next. None: checkpoints are taken only on request and at the
    end of the input."""
    timeout_s: float = 600.0
    min_pause_s: float = 0.0
    """The minimum time from the end of a checkpoint to the trigger of the next. If it is over 0,
    only one checkpoint is pending at a time."""
    max_concurrent: int = 1
    tolerable_failures: int = 0
    """The number of failures in a row that are tolerated. One more failure ends the attempt."""
    retained: int = 1
    overtakes_after_s: float | None = None
    """The time for which barriers wait behind rows before they overtake them. 0: barriers do not
    wait. None: barriers wait as long as it takes. If it is set, checkpoints are taken one at a
    time."""

    def __post_init__(self) -> None:
        if self.interval_s is not None and self.interval_s <= 0:
            raise ValueError(f"interval_s={self.interval_s} must be over 0, or None")
        if self.timeout_s <= 0:
            raise ValueError(f"timeout_s={self.timeout_s} must be over 0")
        if self.min_pause_s < 0:
            raise ValueError(f"min_pause_s={self.min_pause_s} must be 0 or more")
        if self.max_concurrent < 1:
            raise ValueError(f"max_concurrent={self.max_concurrent} must be 1 or more")
        if self.tolerable_failures < 0:
            raise ValueError(f"tolerable_failures={self.tolerable_failures} must be 0 or more")
        if self.retained < 1:
            raise ValueError(f"retained={self.retained} must be 1 or more")
        if self.overtakes_after_s is not None and self.overtakes_after_s < 0:
            raise ValueError(f"overtakes_after_s={self.overtakes_after_s} must be 0 or more")

    @property
    def concurrent(self) -> int:
        """The number of checkpoints that may be pending at once."""
        # A pause between two checkpoints has no meaning while two are pending. With two overtaking
        # barriers, the second would pass the first.
        alone = self.min_pause_s > 0 or self.overtakes_after_s is not None
        return 1 if alone else self.max_concurrent

    def overtakes_after(self, kind: CheckpointKind) -> float | None:
        """Return the seconds that a barrier of `kind` waits behind rows, or None for no limit.

        A savepoint's barrier waits for all rows: another pipeline may start from the savepoint, so
        no row may be in flight. An END barrier also waits: only the functions' last rows precede
        it. Any other barrier that ends the job waits for rows too, but no longer than one
        checkpoint interval. Otherwise a restart would have to process all these rows again.
        """
        if kind.is_savepoint or kind.ends_input or self.overtakes_after_s is None:
            return None
        if not kind.ends_job:
            return self.overtakes_after_s
        # Wait for half of the timeout at most. Otherwise the checkpoint would time out before its
        # barriers begin to overtake.
        patience_s = min(self.interval_s or self.timeout_s, self.timeout_s / 2)
        return max(self.overtakes_after_s, patience_s)


class TriggerSchedule:
    """The requests for checkpoints, and the times of the last trigger and the last end.

    Precedence: END (all rows of all sources are decided), savepoints in the order of their
    requests, FINAL (all sources at their end), STOP, MANUAL, PERIODIC. The interval applies to
    PERIODIC only. Savepoints wait for nothing. The other kinds wait for a pause after a failed
    checkpoint.

    A savepoint is tried once and fulfills no other request. The other requests stay open until a
    checkpoint that was triggered after the request is decided. For MANUAL, any checkpoint counts.
    For a stop, only a STOP or FINAL checkpoint that leaves no rows in flight counts. All times are
    from a monotonic clock.
    """

    def __init__(
        self, settings: CheckpointSettings, sources: frozenset[SubtaskRef], now_s: float
    ) -> None:
        self._settings = settings
        self._began_s = now_s
        self._reading = set(sources)
        self._bounded = bool(sources)
        self._input_is_decided = False
        self._manual_from: CheckpointId | None = None
        """The lowest checkpoint that fulfills every MANUAL request; None if there is no open
        request."""
        self._wants_stop = False
        self._stop_follows = False
        """True if a stop follows a written savepoint. Like the savepoint, this stop ends with the
        attempt."""
        self._savepoints: deque[SavepointRequest] = deque()
        self._due_at_s = None if settings.interval_s is None else now_s + settings.interval_s
        self._periodic_not_before_s = now_s
        self._others_not_before_s = now_s

    @property
    def requested(self) -> frozenset[CheckpointKind]:
        """The kinds that were requested and are not fulfilled yet."""
        kinds = {
            CheckpointKind.MANUAL: self._manual_from is not None,
            CheckpointKind.STOP: self._wants_stop,
        }
        return frozenset(kind for kind, is_asked in kinds.items() if is_asked)

    def end_job_after_input(self) -> None:
        """Trigger END checkpoints from now on, until the job has ended."""
        self._input_is_decided = True

    def request_manual(self, next_checkpoint: CheckpointId) -> None:
        """Request a MANUAL checkpoint.

        Any checkpoint from `next_checkpoint` on fulfills the request.
        """
        self._manual_from = next_checkpoint

    def request_stop(self) -> None:
        """Request STOP checkpoints until the job has ended."""
        self._wants_stop = True

    def stop_after_savepoint(self) -> None:
        """Request STOP checkpoints until the attempt has ended."""
        self._stop_follows = True

    def request_savepoint(self, request: SavepointRequest) -> None:
        """Request a savepoint, to be triggered after those that were requested before it."""
        self._savepoints.append(request)

    def next_savepoint(self) -> SavepointRequest:
        """Remove and return the oldest savepoint request, which the caller triggers now."""
        return self._savepoints.popleft()

    def note_source_end(self, subtask: SubtaskRef) -> None:
        """Record that a source has reached its end. When all sources have, FINAL is due."""
        self._reading.discard(subtask)

    def due(self, newest_pending: CheckpointId) -> tuple[CheckpointKind, float] | None:
        """Return the kind to trigger next and its time, or None if nothing is to be triggered.

        `newest_pending` is the newest pending checkpoint that is no savepoint, or GENESIS.
        """
        if self._input_is_decided:
            # END comes before savepoints: a savepoint taken now would hold the last rows of
            # functions, and a start from it would make them again.
            return CheckpointKind.END, self._others_not_before_s
        if self._savepoints:
            return self._savepoints[0].kind, self._began_s
        at_once = self._kind_at_once(newest_pending)
        if at_once is not None:
            return at_once, self._others_not_before_s
        if self._due_at_s is None:
            return None
        return CheckpointKind.PERIODIC, max(self._due_at_s, self._periodic_not_before_s)

    def _kind_at_once(self, newest_pending: CheckpointId) -> CheckpointKind | None:
        """Return the kind that a request or the end of the input makes due now, or None."""
        if self._stop_follows:
            # STOP comes before FINAL: with FINAL, functions would make last rows that the savepoint
            # does not contain.
            return CheckpointKind.STOP
        if self._bounded and not self._reading:
            return CheckpointKind.FINAL
        if self._wants_stop:
            return CheckpointKind.STOP
        if self._manual_from is not None and newest_pending < self._manual_from:
            return CheckpointKind.MANUAL
        return None

    def note_trigger(self, now_s: float) -> None:
        """Record that a checkpoint was triggered."""
        if self._settings.interval_s is not None:
            self._due_at_s = now_s + self._settings.interval_s

    def note_decision(self, checkpoint: CheckpointId, now_s: float) -> None:
        """Record that a checkpoint was decided.

        It fulfills the requests made before its trigger.
        """
        self._periodic_not_before_s = now_s + self._settings.min_pause_s
        if self._manual_from is not None and checkpoint >= self._manual_from:
            self._manual_from = None

    def note_failure(self, now_s: float) -> None:
        """Record that a checkpoint failed."""
        self._periodic_not_before_s = now_s + self._settings.min_pause_s
        # The request is still due. Without a pause, a target that always refuses would be asked in
        # a tight loop.
        self._others_not_before_s = now_s + max(RETRY_PAUSE_S, self._settings.min_pause_s)
