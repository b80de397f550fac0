"""The result of a sink's pre-commit, and all outcomes of its commit."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from onceflow.core.errors import ConfigError
from onceflow.core.protocol.ids import CheckpointId, TransactionId

GATHERED_MAX = 1000
"""The maximum number of decisions in one commit. Each decision lists the transactions of all
waiting decisions: with 100 subtasks of the sink, that is some 10 MB at this bound."""


@dataclass(frozen=True, slots=True)
class Committable:
    """The durable handle of rows that survive any crash and that are not visible yet.

    It contains everything that a committer in another process needs besides the sink's own
    settings. It never contains a secret, because the decision log stores it as plain text.
    """

    transaction: TransactionId
    rows: int = 0
    payload: bytes = b""
    """The data of sinks that need more than the name, such as a staged file's path; under 64
    KiB."""

    @property
    def checkpoint(self) -> CheckpointId:
        """The checkpoint in the name of its transaction."""
        return CheckpointId(self.transaction.checkpoint)

    def __str__(self) -> str:
        return f"transaction {self.transaction} ({self.rows} rows)"


@dataclass(frozen=True, slots=True)
class Committed:
    """The outcome that this call made the rows visible."""

    files: int = field(default=0, compare=False)
    """The number of data files added, if the target keeps versions. A metric."""


@dataclass(frozen=True, slots=True)
class AlreadyCommitted:
    """The outcome that an earlier call made the rows visible, proven by, say, a ledger row."""


@dataclass(frozen=True, slots=True)
class Aborted:
    """The outcome that the rows are gone and never were visible, or there was nothing to abort."""


@dataclass(frozen=True, slots=True)
class RetryLater:
    """The outcome that nothing changed.

    The same call may succeed later (server restarting, owner still connected).
    """

    reason: str
    until_fixed: bool = False
    """True if the call will not succeed until a person changes something: a row, a constraint."""


@dataclass(frozen=True, slots=True)
class Lost:
    """The outcome that the rows are gone: the target proves that someone rolled them back."""

    reason: str


@dataclass(frozen=True, slots=True)
class Unknown:
    """The outcome that no reply came and the target cannot be asked now.

    Never taken for success.
    """

    reason: str
    until_fixed: bool = False
    """True if the outcome stays unknown until a person changes a right or a setting."""


@dataclass(frozen=True, slots=True)
class CommitInterval:
    """The bounds after which waiting decided checkpoints become visible together.

    The bound that is reached first counts. The end of the job and the start of the next attempt do
    not wait for either bound. Each decision lists the waiting transactions, so at most
    `GATHERED_MAX` decisions wait.
    """

    checkpoints: int | None = None
    """The number of decisions in one commit. None: as many as `seconds` allow."""
    seconds: float | None = None
    """The time that the oldest decision waits. None: until there are `checkpoints` decisions."""

    def __post_init__(self) -> None:
        count, seconds = self.checkpoints, self.seconds
        if count is None and seconds is None:
            raise ConfigError("a commit interval needs a number of checkpoints, or seconds")
        if count is not None and not 1 <= count <= GATHERED_MAX:
            raise ConfigError(
                f"{count} checkpoints per commit: give a number from 1 to {GATHERED_MAX}"
            )
        if seconds is not None and seconds <= 0:
            raise ConfigError(f"{seconds} seconds between commits: give more than 0")

    @property
    def decisions_max(self) -> int:
        """The maximum number of decisions that wait."""
        return self.checkpoints or GATHERED_MAX


CommitOutcome: TypeAlias = Committed | AlreadyCommitted | RetryLater | Lost | Unknown
AbortOutcome: TypeAlias = Aborted | AlreadyCommitted | RetryLater | Unknown
