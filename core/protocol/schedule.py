"""When a checkpoint is due, and of which kind."""

from __future__ import annotations

from dataclasses import dataclass

from onceflow.core.protocol.decisions import CheckpointKind
from onceflow.core.protocol.ids import SubtaskRef

FINAL_RETRY_PAUSE_S = 1.0
"""From a failed final checkpoint to the next: a sink that always declines must not spin."""


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

    @property
    def concurrent(self) -> int:
        """How many checkpoints may be pending at once."""
        return 1 if self.min_pause_s > 0 else self.max_concurrent


class TriggerSchedule:
    """Remembers what was asked for and when the last checkpoint began and ended.

    Precedence: FINAL (all sources at their end), STOP, MANUAL, PERIODIC. A request waits for
    nothing; the interval and the pause bind PERIODIC alone. After STOP or FINAL comes nothing,
    unless it is aborted.
    """

    def __init__(
        self, settings: CheckpointSettings, sources: frozenset[SubtaskRef], now_s: float
    ) -> None:
        self._settings = settings
        self._reading = set(sources)
        self._bounded = bool(sources)
        self._wants_manual = False
        self._wants_stop = False
        self._due_at_s = None if settings.interval_s is None else now_s + settings.interval_s
        self._periodic_not_before_s = now_s
        self._final_not_before_s = now_s

    def request_manual(self) -> None:
        """Have a MANUAL checkpoint triggered next."""
        self._wants_manual = True

    def request_stop(self) -> None:
        """Have a STOP checkpoint triggered next."""
        self._wants_stop = True

    def exhausted(self, subtask: SubtaskRef) -> None:
        """Take in that a source is at its end; when all are, FINAL is due."""
        self._reading.discard(subtask)

    def kind_due(self, now_s: float) -> CheckpointKind | None:
        """Return the kind to trigger now, if one may be; None when nothing is due."""
        if self._all_exhausted():
            return CheckpointKind.FINAL if now_s >= self._final_not_before_s else None
        if self._wants_stop:
            return CheckpointKind.STOP
        if self._wants_manual:
            return CheckpointKind.MANUAL
        wake_s = self._periodic_at_s()
        return CheckpointKind.PERIODIC if wake_s is not None and now_s >= wake_s else None

    def wake_s(self) -> float | None:
        """Return when `kind_due` says more than now, by time alone; None: never."""
        return self._final_not_before_s if self._all_exhausted() else self._periodic_at_s()

    def triggered(self, kind: CheckpointKind, now_s: float) -> None:
        """Take in that a checkpoint began: what was requested before is fulfilled by it."""
        if self._settings.interval_s is not None:
            self._due_at_s = now_s + self._settings.interval_s
        self._wants_manual = False
        self._wants_stop = self._wants_stop and not kind.ends_job

    def ended(self, now_s: float) -> None:
        """Take in that a checkpoint was decided or aborted."""
        self._periodic_not_before_s = now_s + self._settings.min_pause_s

    def failed(self, kind: CheckpointKind, now_s: float) -> None:
        """Take in that a checkpoint failed."""
        self.ended(now_s)
        if kind is CheckpointKind.FINAL:
            pause_s = max(FINAL_RETRY_PAUSE_S, self._settings.min_pause_s)
            self._final_not_before_s = now_s + pause_s

    def _all_exhausted(self) -> bool:
        return self._bounded and not self._reading

    def _periodic_at_s(self) -> float | None:
        if self._due_at_s is None:
            return None
        return max(self._due_at_s, self._periodic_not_before_s)
