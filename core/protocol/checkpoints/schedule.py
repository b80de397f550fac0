"""When a checkpoint is due, and of which kind."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from onceflow.core.protocol.checkpoints.decisions import CheckpointKind, SavepointRequest
from onceflow.core.protocol.ids import CheckpointId, SubtaskRef

RETRY_PAUSE_S = 1.0
"""From a failed checkpoint to one that does not wait for the interval: a sink that always declines
must not spin."""


@dataclass(frozen=True, slots=True)
class CheckpointSettings:
    """When checkpoints are taken and how many failures are borne."""

    interval_s: float | None
    """From trigger to trigger; None: only on request and at the end of the input."""
    timeout_s: float = 600.0
    min_pause_s: float = 0.0
    """From the end of one to the trigger of the next; over 0 it means one at a time."""
    max_concurrent: int = 1
    tolerable_failures: int = 0
    """Failures in a row that are borne; one more fails the attempt."""
    retained: int = 1
    overtakes_after_s: float | None = None
    """How long barriers wait their turn behind rows; 0: never, None: as long as it takes. Such
    checkpoints are taken one at a time."""

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
        """How many checkpoints may be pending at once."""
        # A pause between two checkpoints has no meaning while two are under way, and of two
        # barriers that overtake the second would pass the first.
        alone = self.min_pause_s > 0 or self.overtakes_after_s is not None
        return 1 if alone else self.max_concurrent

    def overtakes_after(self, kind: CheckpointKind) -> float | None:
        """Return how long the barrier of a checkpoint of `kind` waits behind rows.

        In a savepoint, from which another pipeline may begin, nothing is to be in flight: it waits
        for all rows; so does END, before which nothing is left but functions' last rows. Another
        that ends the job waits for them, too, and no longer than from one
        checkpoint to the next: a restart must not begin with all of them again.
        """
        if kind.is_savepoint or kind.ends_input or self.overtakes_after_s is None:
            return None
        if not kind.ends_job:
            return self.overtakes_after_s
        # Half of the timeout at most, or the checkpoint would be given up before its barriers begin
        # to overtake.
        patience_s = min(self.interval_s or self.timeout_s, self.timeout_s / 2)
        return max(self.overtakes_after_s, patience_s)


class TriggerSchedule:
    """Remembers what was asked for and when the last checkpoint began and ended.

    Precedence: END (all rows of all sources are decided), savepoints as they were asked for, FINAL
    (all sources at their end), STOP, MANUAL, PERIODIC. The interval binds PERIODIC alone;
    savepoints wait for nothing, the others for a pause after a failed checkpoint. A savepoint is
    tried once, and fulfills nothing else. What else was asked for stays asked until a checkpoint
    triggered after it is decided: any for MANUAL, and for a stop a STOP or FINAL one that leaves
    no rows in flight. Times are of a clock that is never set.
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
        """The lowest checkpoint that fulfills every MANUAL request; None: nobody waits."""
        self._wants_stop = False
        self._stop_follows = False
        """A stop that follows a savepoint: it ends with the attempt, as the savepoint does."""
        self._savepoints: deque[SavepointRequest] = deque()
        self._due_at_s = None if settings.interval_s is None else now_s + settings.interval_s
        self._periodic_not_before_s = now_s
        self._others_not_before_s = now_s

    @property
    def requested(self) -> frozenset[CheckpointKind]:
        """What was asked for and is not fulfilled."""
        kinds = {
            CheckpointKind.MANUAL: self._manual_from is not None,
            CheckpointKind.STOP: self._wants_stop,
        }
        return frozenset(kind for kind, is_asked in kinds.items() if is_asked)

    def end_job_after_input(self) -> None:
        """Have END checkpoints triggered until the job has ended."""
        self._input_is_decided = True

    def request_manual(self, next_checkpoint: CheckpointId) -> None:
        """Have a MANUAL checkpoint triggered next, which is `next_checkpoint` at the lowest."""
        self._manual_from = next_checkpoint

    def request_stop(self) -> None:
        """Have STOP checkpoints triggered until the job has ended."""
        self._wants_stop = True

    def stop_after_savepoint(self) -> None:
        """Have STOP checkpoints triggered until the attempt has ended."""
        self._stop_follows = True

    def request_savepoint(self, request: SavepointRequest) -> None:
        """Have a savepoint triggered after those that were asked for before."""
        self._savepoints.append(request)

    def next_savepoint(self) -> SavepointRequest:
        """Return the savepoint that is triggered now."""
        return self._savepoints.popleft()

    def note_source_end(self, subtask: SubtaskRef) -> None:
        """Take in that a source is at its end; when all are, FINAL is due."""
        self._reading.discard(subtask)

    def due(self, newest_pending: CheckpointId) -> tuple[CheckpointKind, float] | None:
        """Return what to trigger next and when; None when nothing is to be triggered.

        `newest_pending` is the newest checkpoint under way that is no savepoint, or GENESIS.
        """
        if self._input_is_decided:
            # Before savepoints: one that holds what functions make at their end would have it
            # made again by a start from it.
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
        """Return what has been asked for, or follows from the end of the input."""
        if self._stop_follows:
            # Before FINAL: functions would make last rows, of which the savepoint knows nothing.
            return CheckpointKind.STOP
        if self._bounded and not self._reading:
            return CheckpointKind.FINAL
        if self._wants_stop:
            return CheckpointKind.STOP
        if self._manual_from is not None and newest_pending < self._manual_from:
            return CheckpointKind.MANUAL
        return None

    def note_trigger(self, now_s: float) -> None:
        """Take in that a checkpoint began."""
        if self._settings.interval_s is not None:
            self._due_at_s = now_s + self._settings.interval_s

    def note_decision(self, checkpoint: CheckpointId, now_s: float) -> None:
        """Take in that a checkpoint was decided, and so fulfills what was asked before it."""
        self._periodic_not_before_s = now_s + self._settings.min_pause_s
        if self._manual_from is not None and checkpoint >= self._manual_from:
            self._manual_from = None

    def note_failure(self, now_s: float) -> None:
        """Take in that a checkpoint failed."""
        self._periodic_not_before_s = now_s + self._settings.min_pause_s
        # What was asked for is still due, and without a pause a target that refuses would be asked
        # in a tight loop.
        self._others_not_before_s = now_s + max(RETRY_PAUSE_S, self._settings.min_pause_s)
