"""Every error that onceflow raises on purpose.

    OnceflowError                       .domain user|external|internal   .retry never|checkpoint|job
    ├── ConfigError                     user, never
    │   ├── MissingExtra                user, never: a package that an extra installs is not there
    │   ├── PreparedLimitReached        user, never: a server holds so many transactions and no more
    │   ├── SavepointRefused            user, never: the job cannot begin from it
    │   ├── SettingsRefused             external, never: a server or machine does not accept them
    │   ├── StagingMissing              user, never: rows must wait in files, and nothing says where
    │   └── StorageBehind               user, never: a target has more than the decision log knows
    ├── CheckpointError
    │   ├── CheckpointAborted           external, checkpoint
    │   ├── CheckpointCorrupt           external, never: a file is not what was written
    │   ├── Fenced                      external, never: a newer attempt owns the job
    │   └── SavepointFailed             external, never: it is not there, whatever the job does
    ├── StorageError                    external, job
    ├── SourceError                     external, job
    │   ├── OffsetOutOfRange            external, never: names the gap
    │   ├── BadRecord                   user, never: names topic, partition and offset
    │   ├── DataFrameFailed             user, never: Spark could not evaluate what is to be read
    │   └── SourceUnavailable           external, job
    ├── SinkError                       external, job
    │   ├── BadRow                      user, never: names column and value
    │   ├── PreCommitFailed             external, job: nothing of this checkpoint is durable
    │   │   └── TargetRefused           user, job: every attempt is refused alike
    │   ├── CommitFailed                external, job: still prepared
    │   ├── CommitOutcomeUnknown        external, job: the target must be asked again
    │   ├── PreparedTransactionLost     external, never: rows lost behind our back
    │   └── DecisionForgotten           external, never: in doubt, and older than the log's memory
    ├── StateError
    │   ├── StateCorrupt                external, never
    │   ├── StateIncompatible           user, never: restored with another type or max parallelism
    │   └── BadStateValue               user, job: a key or value does not fit the state
    ├── MessageCorrupt                  internal, never: driver and slots run different versions
    ├── SlotLost                        external, job
    ├── SparkStopped                    external, never: the session is gone; another must be made
    ├── SlotFailed                      internal, job: something raised another error
    └── UserFunctionError               user, job: a function of the pipeline raised
InvariantViolation                      our bug; see protocol.invariant

Each pickles, because an error of a slot crosses a process to reach the driver. A message says what
failed, both values, which checkpoint, transaction or partition, and what to do.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from onceflow.core.printable import escape_terminal_codes
from onceflow.core.protocol.invariant import InvariantViolation

Domain = Literal["user", "external", "internal"]
Retry = Literal["never", "checkpoint", "job"]


class OnceflowError(Exception):
    """The root: `except OnceflowError` catches everything that is not a bug of onceflow."""

    domain: ClassVar[Domain] = "internal"
    retry: ClassVar[Retry] = "job"
    """What may be tried again: nothing, the next checkpoint, or a new attempt of the job.

    That is for a first start. What follows once the job has run is in `protocol.error_rules`.
    """

    def __init__(self, message: str, *, fingerprint: str = "") -> None:
        """Keep `fingerprint`: equal when the same mistake is made again, empty for no mistake."""
        # A message may quote a record, a file name or what a server says of them.
        super().__init__(escape_terminal_codes(message))
        self.fingerprint = fingerprint


class ConfigError(OnceflowError):
    """Raised when a setting is wrong, or a target does not fit it any more."""

    domain: ClassVar[Domain] = "user"
    retry = "never"


class MissingExtra(ConfigError, ImportError):
    """Raised when a package is not installed here that one of onceflow's extras installs."""


class PreparedLimitReached(ConfigError):
    """Raised when a server is not set up to hold all transactions that are to be prepared."""

    def __init__(self, message: str, *, room: int = 0) -> None:
        """Keep `room`: how many it can hold for those that write together."""
        super().__init__(message)
        self.room = room


class SavepointRefused(ConfigError):
    """Raised when a job cannot begin from a savepoint without losing or doubling rows."""


class SettingsRefused(ConfigError):
    """Raised when a server or a machine does not accept the settings, and may accept them later.

    A host name that does not resolve, a refused password, certificate or right, too few free task
    slots: the settings may be right. Once the job has run with them, a restart tries again.
    """

    domain = "external"


class StagingMissing(ConfigError):
    """Raised when rows must wait in files until they are decided, and nothing says where."""


class StorageBehind(ConfigError):
    """Raised when a target has committed what the decision log does not know: it is an old copy."""


class CheckpointError(OnceflowError):
    """Raised when a checkpoint cannot be taken, decided or restored."""

    domain = "external"


class CheckpointAborted(CheckpointError):
    """Raised when a checkpoint was given up; the stream goes on."""

    retry = "checkpoint"


class CheckpointCorrupt(CheckpointError):
    """Raised when a file of a checkpoint or of the decision log is not what was written."""

    retry = "never"


class Fenced(CheckpointError):
    """Raised when a newer attempt owns the job: this one stops and commits nothing more."""

    retry = "never"


class SavepointFailed(CheckpointError):
    """Raised when a savepoint that was asked for was not taken."""

    retry = "never"


class StorageError(OnceflowError):
    """Raised when checkpoint storage cannot be read or written (full, gone, not permitted)."""

    domain = "external"


class SourceError(OnceflowError):
    """Raised when a source cannot go on."""

    domain: ClassVar[Domain] = "external"


class OffsetOutOfRange(SourceError):
    """Raised when records that were to be read are gone; names the gap."""

    retry = "never"


class BadRecord(SourceError):
    """Raised when a record cannot be decoded; names topic, partition and offset."""

    domain = "user"
    retry = "never"


class DataFrameFailed(SourceError):
    """Raised when Spark cannot evaluate a DataFrame that a job reads."""

    domain = "user"
    retry = "never"


class SourceUnavailable(SourceError):
    """Raised when the source does not answer within its deadline."""


class SinkError(OnceflowError):
    """Raised when a sink cannot go on."""

    domain: ClassVar[Domain] = "external"


class BadRow(SinkError):
    """Raised when a row does not fit the target; names column and value."""

    domain = "user"
    retry = "never"


class PreCommitFailed(SinkError):
    """Raised when rows could not be made durable; nothing of this checkpoint is."""


class TargetRefused(PreCommitFailed):
    """Raised when a target refuses rows or a statement for what they are, and no single row is bad.

    Every attempt is refused alike until a person changes the target or the program. So a restart
    strategy with `same_mistakes` ends the job after a few attempts.
    """

    domain = "user"


class CommitFailed(SinkError):
    """Raised when a decided transaction could not be committed in time; it is still prepared."""


class CommitOutcomeUnknown(SinkError):
    """Raised when nobody knows whether a commit happened; the next attempt asks the target."""


class PreparedTransactionLost(SinkError):
    """Raised when a decided transaction was rolled back by somebody else: its rows are lost."""

    retry = "never"


class DecisionForgotten(SinkError):
    """Raised when something is in doubt of an attempt that the decision log no longer remembers."""

    retry = "never"


class StateError(OnceflowError):
    """Raised when state cannot be read, written or restored."""


class StateCorrupt(StateError):
    """Raised when state on disk is not what was written."""

    domain = "external"
    retry = "never"


class StateIncompatible(StateError):
    """Raised when state is restored as something that it is not."""

    domain = "user"
    retry = "never"


class SlotLost(OnceflowError):
    """Raised when a slot or the connection to it is gone."""

    domain = "external"


class BadStateValue(StateError):
    """Raised when a key or a value is not what the state was declared to hold.

    `row` is its place in the batch, where that is known.
    """

    domain = "user"

    def __init__(self, message: str, *, fingerprint: str = "", row: int | None = None) -> None:
        super().__init__(message, fingerprint=fingerprint)
        self.row = row


class SparkStopped(OnceflowError):
    """Raised when Spark was stopped under a running job: the next start goes on, exactly once."""

    domain = "external"
    retry = "never"


class SlotFailed(OnceflowError):
    """Raised when a source, a sink or the runtime raised an unexpected error in a slot."""


class MessageCorrupt(OnceflowError):
    """Raised when driver and slots do not understand each other: they run different versions."""

    retry = "never"


class UserFunctionError(OnceflowError):
    """Raised when a function of the pipeline raised; names operator and record, has the traceback.

    Its fingerprint is that of the record and the error's class; empty for what the network does.
    """

    domain = "user"


__all__ = [
    "BadRecord",
    "BadRow",
    "BadStateValue",
    "CheckpointAborted",
    "CheckpointCorrupt",
    "CheckpointError",
    "CommitFailed",
    "CommitOutcomeUnknown",
    "ConfigError",
    "DataFrameFailed",
    "DecisionForgotten",
    "Fenced",
    "InvariantViolation",
    "MessageCorrupt",
    "MissingExtra",
    "OffsetOutOfRange",
    "OnceflowError",
    "PreCommitFailed",
    "PreparedLimitReached",
    "PreparedTransactionLost",
    "SavepointFailed",
    "SavepointRefused",
    "SettingsRefused",
    "SinkError",
    "SlotFailed",
    "SlotLost",
    "SourceError",
    "SourceUnavailable",
    "SparkStopped",
    "StagingMissing",
    "StateCorrupt",
    "StateError",
    "StateIncompatible",
    "StorageBehind",
    "StorageError",
    "TargetRefused",
    "UserFunctionError",
]
