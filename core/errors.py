"""The errors that onceflow raises on purpose, and the check of invariants that is always on.

    OnceflowError                       .domain user|external|internal   .retry never|checkpoint|job
    ├── ConfigError                     user, never
    │   ├── MissingExtra                user, never: a package of an extra is not installed
    │   ├── PreparedLimitReached        user, never: a server's limit of prepared transactions
    │   ├── SavepointRefused            user, never: the job cannot start from it
    │   ├── SettingsRefused             external, never: a server or machine does not accept them
    │   ├── StagingMissing              user, never: rows need a staging directory, and none is set
    │   └── StorageBehind               user, never: a target is ahead of the decision log
    ├── CheckpointError
    │   ├── CheckpointAborted           external, checkpoint
    │   ├── CheckpointCorrupt           external, never: the content of a file is damaged
    │   ├── Fenced                      external, never: a newer attempt owns the job
    │   └── SavepointFailed             external, never: the savepoint was not taken
    ├── StorageError                    external, job
    ├── SourceError                     external, job
    │   ├── OffsetOutOfRange            external, never: names the gap
    │   ├── BadRecord                   user, never: names topic, partition and offset
    │   ├── DataFrameFailed             user, never: Spark could not evaluate the DataFrame
    │   └── SourceUnavailable           external, job
    ├── SinkError                       external, job
    │   ├── BadRow                      user, never: names column and value
    │   ├── PreCommitFailed             external, job: the checkpoint's rows are not durable
    │   │   └── TargetRefused           user, job: the target refuses every attempt
    │   ├── CommitFailed                external, job: the transaction is still prepared
    │   ├── CommitOutcomeUnknown        external, job: the next attempt queries the target
    │   ├── PreparedTransactionLost     external, never: rolled back from outside, rows lost
    │   └── DecisionForgotten           external, never: in doubt, and no longer in the decision log
    ├── StateError
    │   ├── StateCorrupt                external, never
    │   ├── StateIncompatible           user, never: restored with another type or max parallelism
    │   └── BadStateValue               user, job: a key or value does not fit the state
    ├── MessageCorrupt                  internal, never: driver and slots run different versions
    ├── SlotLost                        external, job
    ├── SparkStopped                    external, never: the session has ended; create another
    ├── SlotFailed                      internal, job: an unexpected error in a slot
    └── UserFunctionError               user, job: a function of the pipeline raised
InvariantViolation                      our bug; `require` raises it, also under `python -O`

Every error can be pickled, because slots send errors to the driver. A message has the failed
operation, the expected and the actual value, the checkpoint, transaction or partition, and the
remedy.
"""

from __future__ import annotations

from typing import ClassVar, Literal, NoReturn

from onceflow.core.printable import escape_terminal_codes

Domain = Literal["user", "external", "internal"]
Retry = Literal["never", "checkpoint", "job"]


class OnceflowError(Exception):
    """The base class. `except OnceflowError` catches all errors except bugs of onceflow."""

    domain: ClassVar[Domain] = "internal"
    retry: ClassVar[Retry] = "job"
    """The possible retry: none, the next checkpoint, or a new attempt of the job. This holds for a
    first start. For a job that has already run, see `protocol.failures`.
    """

    def __init__(self, message: str, *, fingerprint: str = "") -> None:
        """`fingerprint` is equal if the same user error repeats, and empty for other errors."""
        # A message may quote a record, a file name or a server's error text.
        super().__init__(escape_terminal_codes(message))
        self.fingerprint = fingerprint


class ConfigError(OnceflowError):
    """Raised when a setting is wrong, or a target no longer fits it."""

    domain: ClassVar[Domain] = "user"
    retry = "never"


class MissingExtra(ConfigError, ImportError):
    """Raised when a package of one of onceflow's extras is not installed."""


class PreparedLimitReached(ConfigError):
    """Raised when a server's configuration allows too few prepared transactions."""

    def __init__(self, message: str, *, room: int = 0) -> None:
        """`room` is the number of transactions that the server can hold for all writers."""
        super().__init__(message)
        self.room = room


class SavepointRefused(ConfigError):
    """Raised when a start from a savepoint would lose rows or write rows a second time."""


class SettingsRefused(ConfigError):
    """Raised when a server or a machine does not accept the settings, but may accept them later.

    Examples: a host name does not resolve, a password, certificate or permission is refused, or too
    few task slots are free. The settings may still be right. If the job has already run with them,
    a restart tries again.
    """

    domain = "external"


class StagingMissing(ConfigError):
    """Raised when rows must be staged in files until their decision, and no directory is set."""


class StorageBehind(ConfigError):
    """Raised when a target has commits that the decision log lacks: the log is an old copy."""


class CheckpointError(OnceflowError):
    """Raised when a checkpoint cannot be taken, decided or restored."""

    domain = "external"


class CheckpointAborted(CheckpointError):
    """Raised when a checkpoint was aborted. The stream continues."""

    retry = "checkpoint"


class CheckpointCorrupt(CheckpointError):
    """Raised when a file of a checkpoint or of the decision log is damaged or missing."""

    retry = "never"


class Fenced(CheckpointError):
    """Raised when a newer attempt owns the job. The older one stops and commits nothing more."""

    retry = "never"


class SavepointFailed(CheckpointError):
    """Raised when a requested savepoint was not taken."""

    retry = "never"


class StorageError(OnceflowError):
    """Raised when checkpoint storage cannot be read or written (full, missing, not permitted)."""

    domain = "external"


class SourceError(OnceflowError):
    """Raised when a source cannot continue."""

    domain: ClassVar[Domain] = "external"


class OffsetOutOfRange(SourceError):
    """Raised when records were deleted before they were read. The message names the gap."""

    retry = "never"


class BadRecord(SourceError):
    """Raised when a record cannot be decoded. The message names topic, partition and offset."""

    domain = "user"
    retry = "never"


class DataFrameFailed(SourceError):
    """Raised when Spark cannot evaluate a DataFrame that a job reads."""

    domain = "user"
    retry = "never"


class SourceUnavailable(SourceError):
    """Raised when the source does not answer within its deadline."""


class SinkError(OnceflowError):
    """Raised when a sink cannot continue."""

    domain: ClassVar[Domain] = "external"


class BadRow(SinkError):
    """Raised when a row does not fit the target. The message names column and value."""

    domain = "user"
    retry = "never"


class PreCommitFailed(SinkError):
    """Raised when a sink could not make its rows durable. The checkpoint fails."""


class TargetRefused(PreCommitFailed):
    """Raised when a target refuses a statement or rows, and no single row can be blamed.

    The target refuses every attempt until a person changes the target or the program. So a restart
    strategy with `same_mistakes` ends the job after a few attempts.
    """

    domain = "user"


class CommitFailed(SinkError):
    """Raised when a decided transaction was not committed in time. It is still prepared."""


class CommitOutcomeUnknown(SinkError):
    """Raised when the outcome of a commit is unknown. The next attempt queries the target."""


class PreparedTransactionLost(SinkError):
    """Raised when another program rolled back a decided transaction. Its rows are lost."""

    retry = "never"


class DecisionForgotten(SinkError):
    """Raised when a transaction is in doubt and the decision log has forgotten its attempt."""

    retry = "never"


class StateError(OnceflowError):
    """Raised when state cannot be read, written or restored."""


class StateCorrupt(StateError):
    """Raised when state on disk is damaged."""

    domain = "external"
    retry = "never"


class StateIncompatible(StateError):
    """Raised when restored state does not fit: another type, source or max parallelism."""

    domain = "user"
    retry = "never"


class SlotLost(OnceflowError):
    """Raised when a slot or the connection to it is lost."""

    domain = "external"


class BadStateValue(StateError):
    """Raised when a key or a value does not fit the declared type of the state.

    `row` is the index of the row in the batch, or None if it is unknown.
    """

    domain = "user"

    def __init__(self, message: str, *, fingerprint: str = "", row: int | None = None) -> None:
        super().__init__(message, fingerprint=fingerprint)
        self.row = row


class SparkStopped(OnceflowError):
    """Raised when Spark was stopped while a job ran. The next start continues, exactly once."""

    domain = "external"
    retry = "never"


class SlotFailed(OnceflowError):
    """Raised when a source, a sink or the runtime raised an unexpected error in a slot."""


class MessageCorrupt(OnceflowError):
    """Raised when a message cannot be decoded, because driver and slots run different versions."""

    retry = "never"


class UserFunctionError(OnceflowError):
    """Raised when a user function raised. The message has operator, record and traceback.

    Its fingerprint is built from the record and the error's class. It is empty for network errors.
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


class InvariantViolation(AssertionError):
    """The error for a bug in onceflow. It is never caught, and ends the subtask or the driver."""


def require(condition: bool, message: str) -> None:
    """Raise InvariantViolation, with the broken rule as `message`, unless `condition` holds."""
    if not condition:
        raise InvariantViolation(message)


def unreachable(value: NoReturn) -> NoReturn:
    """Raise: type checkers prove that a `match` before it covers every case of `value`.

    Raises:
        InvariantViolation: Always (a value of no known type came from outside the type checker).
    """
    raise InvariantViolation(f"no case for {value!r}")
