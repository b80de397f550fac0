"""The failures of a job in one driver: the verdict on the newest, and the streak it belongs to.

`error_rules` says which errors are final. The restart strategy decides about the others. Times are
of a monotonic clock. Used by the driver's thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from onceflow.core.protocol.error_rules import is_final, is_mistake
from onceflow.core.protocol.restart import GiveUp, RestartAfter, RestartTracker


@dataclass(frozen=True, slots=True)
class EndJob:
    """The verdict that the error ends the job, independent of the restart strategy."""


@dataclass(frozen=True, slots=True)
class FailureStreak:
    """The failures since the last completed checkpoint."""

    first_error: str
    """The first line of the first error."""
    since_s: float
    failures: int = 1

    def describe(self, error: str, now_s: float) -> str:
        """Return the text to add to `error`, the newest error; empty if it is the first."""
        if self.failures == 1:
            return ""
        text = f"failure {self.failures} in {now_s - self.since_s:.0f} s without a checkpoint"
        if _first_line(error) != self.first_error:
            text += f"; the first was {self.first_error}"
        return text


FailureVerdict: TypeAlias = EndJob | GiveUp | RestartAfter


class JobFailures:
    """The judge of a job's failures: it decides whether another attempt follows."""

    def __init__(self, tracker: RestartTracker) -> None:
        """Start without attempts; `tracker` counts what the restart strategy limits."""
        self._tracker = tracker
        self._has_run = False
        self._attempt_ran = False
        self._streak: FailureStreak | None = None

    def begin_attempt(self) -> None:
        """Record that an attempt begins."""
        self._attempt_ran = False

    def on_running(self, now_s: float) -> None:
        """Record that every slot of the attempt runs."""
        self._has_run = self._attempt_ran = True
        self._tracker.on_running(now_s)

    def on_checkpoint(self) -> None:
        """Record that a checkpoint is completed: the job makes progress, and the streak is over."""
        self._streak = None

    def on_failure(
        self, error: BaseException, text: str, fingerprint: str, now_s: float
    ) -> FailureVerdict:
        """Record that the attempt has failed; return the verdict.

        `text` is the text of `error`. `fingerprint` is equal for equal mistakes of the program.
        """
        if is_final(error, has_run=self._has_run):
            return EndJob()
        before = self._streak or FailureStreak(_first_line(text), now_s, 0)
        self._streak = FailureStreak(before.first_error, before.since_s, before.failures + 1)
        mistake = fingerprint if is_mistake(error, attempt_ran=self._attempt_ran) else ""
        return self._tracker.on_failure(now_s, mistake)

    def describe(self, text: str, now_s: float) -> str:
        """Return `text`, the newest error, with the length of the streak in its first line."""
        streak = self._streak.describe(text, now_s) if self._streak else ""
        if not streak:
            return text
        first_line, line_end, trace = text.partition("\n")
        return f"{first_line} ({streak}){line_end}{trace}"


def _first_line(text: str) -> str:
    return text.partition("\n")[0]
