"""The rules for failures: by error class, by equal refusals, and by the streak of failures.

A target that is away answers later, so the job waits for it. If a target refuses rows, every
attempt meets the same refusal, and attempts would follow each other for ever. So a refusal has a
fingerprint, which is equal when the same sink refuses in the same way again. A source's reader that
cannot handle a record has a fingerprint, too. The restart strategy counts equal fingerprints and
ends the job (`same_mistakes` in `protocol.restart`).

A decided commit is never given up. If its target refuses it again and again for the same reason,
the commit is called stuck. The status shows that, and the job goes on trying.

Invariants:
    if the sink has made progress in an attempt, the attempt's fingerprint equals no other one's
    a failure that the network or a disk may have caused has no fingerprint: `spi.bad_rows` decides
    an error of another package that neither of them may have caused has a fingerprint

Rules by error class:

The driver asks at two times. At the first start, no attempt of this driver has run. An error about
the settings then ends the job at once, because the user has most likely mistyped something. Later,
an attempt of this driver has reached RUNNING with the same settings. The settings were accepted
once, so a refusal now comes from the environment: a name that does not resolve, a secret that is
being rotated, a machine that is away. The environment may recover, so the restart strategy decides.

The decision log does not record settings. So an earlier run of another driver does not count: the
first start of each driver is a first start.

Invariants:
    an error that is FINAL later is FINAL at the first start
    a class without a row of its own has the row of its nearest base class
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final, TypeAlias

from onceflow.core.errors import ConfigError
from onceflow.core.protocol.restart import GiveUp, RestartAfter, RestartTracker

STUCK_TRIES: Final = 3
"""The number of tries with the same answer after which a commit is called stuck."""

_VARIES = re.compile(r"\b[0-9a-f]{8,}\b|\d+")
"""The numbers of attempts and transactions, addresses, times, and random parts of file names."""


def make_fingerprint(uid: str, error_class: str, text: str, *, only_in: int | None = None) -> str:
    """Return the fingerprint, which is equal when sink or source `uid` fails in the same way again.

    `only_in` is the number of an attempt in which rows of `uid` were decided before the failure.
    The current failure then differs from earlier ones, and the count starts again.
    """
    parts = (uid, error_class, describe_kind(text), "" if only_in is None else str(only_in))
    return hashlib.sha256("\0".join(parts).encode("utf-8", "replace")).hexdigest()[:16]


def describe_kind(text: str) -> str:
    """Return `text` without the parts that differ between two attempts with equal failures."""
    return _VARIES.sub("#", text)


@dataclass(frozen=True, slots=True)
class RefusalCount:
    """The number of refusals in a row of one commit for the same reason."""

    reason: str = ""
    tries: int = 0

    def add(self, reason: str) -> RefusalCount:
        """Return the count after another refusal for `reason`."""
        kind = describe_kind(reason)
        return RefusalCount(kind, self.tries + 1 if kind == self.reason else 1)

    @property
    def is_stuck(self) -> bool:
        """True after so many equal refusals that only a person can change the answer."""
        return self.tries >= STUCK_TRIES


class Consequence(Enum):
    """The effect of an error of an attempt on the job."""

    FINAL = "final"
    """The job has failed."""
    RESTART = "restart"
    """The restart strategy decides."""


@dataclass(frozen=True, slots=True)
class ErrorRule:
    """The consequences of one error class."""

    first_start: Consequence
    """The consequence while no attempt of this driver has reached RUNNING."""
    later: Consequence
    """The consequence once an attempt of this driver has reached RUNNING."""


_ALWAYS_FINAL = ErrorRule(Consequence.FINAL, Consequence.FINAL)
_FINAL_AT_FIRST = ErrorRule(Consequence.FINAL, Consequence.RESTART)
_ALWAYS_RESTART = ErrorRule(Consequence.RESTART, Consequence.RESTART)

RULES: Final[Mapping[str, ErrorRule]] = {
    # Any error from outside onceflow: from a library, or from a user's source or sink.
    "Exception": _FINAL_AT_FIRST,
    # A bug of onceflow. Results after a broken invariant cannot be trusted.
    "InvariantViolation": _ALWAYS_FINAL,
    "OnceflowError": _ALWAYS_RESTART,
    # The settings were accepted once: now a table, a right, a worker or a file is missing.
    "ConfigError": _FINAL_AT_FIRST,
    "MissingExtra": _FINAL_AT_FIRST,
    "PreparedLimitReached": _FINAL_AT_FIRST,
    "SettingsRefused": _FINAL_AT_FIRST,
    # The savepoint, the decision log and the settings stay as they are.
    "SavepointRefused": _ALWAYS_FINAL,
    "StagingMissing": _ALWAYS_FINAL,
    "StorageBehind": _ALWAYS_FINAL,
    "CheckpointError": _ALWAYS_RESTART,
    "CheckpointAborted": _ALWAYS_RESTART,
    "CheckpointCorrupt": _ALWAYS_FINAL,
    "DecisionUnknown": _ALWAYS_RESTART,
    "Fenced": _ALWAYS_FINAL,
    "SavepointFailed": _ALWAYS_FINAL,
    "StorageError": _ALWAYS_RESTART,
    "CreationUnknown": _ALWAYS_RESTART,
    "NotServed": _ALWAYS_RESTART,
    "RemoteError": _ALWAYS_RESTART,
    "ReplyLost": _ALWAYS_RESTART,
    # A right or a key of checkpoint storage may be changed while the job runs.
    "StorageRefused": _FINAL_AT_FIRST,
    "SourceError": _ALWAYS_RESTART,
    "BadRecord": _ALWAYS_FINAL,
    "DataFrameFailed": _ALWAYS_FINAL,
    "OffsetOutOfRange": _ALWAYS_FINAL,
    "SourceUnavailable": _ALWAYS_RESTART,
    "SinkError": _ALWAYS_RESTART,
    "BadRow": _ALWAYS_FINAL,
    "CommitFailed": _ALWAYS_RESTART,
    "CommitOutcomeUnknown": _ALWAYS_RESTART,
    "CommitUnknown": _ALWAYS_RESTART,
    "DecisionForgotten": _ALWAYS_FINAL,
    "PreCommitFailed": _ALWAYS_RESTART,
    "PreparedTransactionLost": _ALWAYS_FINAL,
    "PublicationBegun": _ALWAYS_RESTART,
    # Counted as a mistake: a few attempts follow.
    "TargetRefused": _ALWAYS_RESTART,
    "StateError": _ALWAYS_RESTART,
    "BadStateValue": _ALWAYS_RESTART,
    "StateCorrupt": _ALWAYS_FINAL,
    "StateIncompatible": _ALWAYS_FINAL,
    "MessageCorrupt": _ALWAYS_FINAL,
    "SlotFailed": _ALWAYS_RESTART,
    "SlotLost": _ALWAYS_RESTART,
    "SparkStopped": _ALWAYS_FINAL,
    "UserFunctionError": _ALWAYS_RESTART,
    "JobCancelled": _ALWAYS_FINAL,
    # Only commits by hand raise these errors. They never end an attempt.
    "ContradictsLog": _ALWAYS_FINAL,
    "SinkNeeded": _ALWAYS_FINAL,
}
"""The rules by class name, because a slot sends an error to the driver by its name."""


def find_rule(error_class: type[BaseException]) -> ErrorRule:
    """Return the rule of `error_class`, or that of its nearest base class with a rule."""
    names = (base.__name__ for base in error_class.__mro__)
    return next((RULES[name] for name in names if name in RULES), _ALWAYS_FINAL)


def is_final(error: BaseException, *, has_run: bool) -> bool:
    """Return True if `error` ends the job, independent of the restart strategy.

    `has_run` is true once an attempt of this driver has reached RUNNING.
    """
    rule = find_rule(type(error))
    return (rule.later if has_run else rule.first_start) is Consequence.FINAL


def is_mistake(error: BaseException, *, attempt_ran: bool) -> bool:
    """Return True if equal errors count as one repeated mistake of the program.

    A ConfigError before the attempt runs does not count: an earlier attempt began with the same
    settings, so the environment has changed since.
    """
    return attempt_ran or not isinstance(error, ConfigError)


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
