"""The rules by error class: which errors end a job, and after which another attempt follows.

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

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final

from onceflow.core.errors import ConfigError


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
