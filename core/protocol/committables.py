"""What a sink's pre-commit returns, and every way in which its commit can end."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from onceflow.core.errors import ConfigError
from onceflow.core.protocol.ids import CheckpointId, TransactionId

GATHERED_MAX = 1000
"""Decisions that one commit may have. Each decision lists the transactions of all that wait: with
100 subtasks of the sink, that is some 10 MB at this bound."""


@dataclass(frozen=True, slots=True)
class Committable:
    """The durable handle of rows that survive any crash and that nobody can see yet.

    Holds all that a committer in another process needs besides the sink's own settings, and never a
    secret: it is written into the decision log as plain text.
    """

    transaction: TransactionId
    rows: int = 0
    payload: bytes = b""
    """For sinks that need more than the name (a staged file's path, say); under 64 KiB."""

    @property
    def checkpoint(self) -> CheckpointId:
        """The checkpoint that its transaction is named for."""
        return CheckpointId(self.transaction.checkpoint)

    def __str__(self) -> str:
        return f"transaction {self.transaction} ({self.rows} rows)"


@dataclass(frozen=True, slots=True)
class Committed:
    """This call made the rows visible."""

    files: int = field(default=0, compare=False)
    """Of a version of a target that keeps versions: how many data files it has added. A metric."""


@dataclass(frozen=True, slots=True)
class AlreadyCommitted:
    """An earlier call had made the rows visible, and the target proves it (a ledger row, say)."""


@dataclass(frozen=True, slots=True)
class Aborted:
    """The rows are gone and never were visible; also when there was nothing to abort."""


@dataclass(frozen=True, slots=True)
class RetryLater:
    """Nothing changed.

    The same call may succeed later (server restarting, owner still connected).
    """

    reason: str
    until_mended: bool = False
    """Whether it will not succeed until a person changes something: a row, a constraint."""


@dataclass(frozen=True, slots=True)
class Lost:
    """The target proves that the rows are gone: somebody rolled back what we had prepared."""

    reason: str


@dataclass(frozen=True, slots=True)
class Unknown:
    """The reply never came and the target cannot be asked now. Never taken for success."""

    reason: str
    until_mended: bool = False
    """True if the outcome stays unknown until a person changes a right or a setting."""


@dataclass(frozen=True, slots=True)
class CommitInterval:
    """When decided checkpoints that wait become visible together: at the bound that comes first.

    The end of the job, and the start of the next attempt, wait for neither. Each decision lists
    what waits, so at most `GATHERED_MAX` decisions do.
    """

    checkpoints: int | None = None
    """How many decisions one commit has; None: as many as `seconds` allow."""
    seconds: float | None = None
    """How long the oldest of them waits; None: until there are `checkpoints`."""

    def __post_init__(self) -> None:
        count, seconds = self.checkpoints, self.seconds
        if count is None and seconds is None:
            raise ConfigError("a commit interval needs a number of checkpoints, or seconds")
        if count is not None and not 1 <= count <= GATHERED_MAX:
            raise ConfigError(f"{count} checkpoints a commit: give 1 to {GATHERED_MAX}")
        if seconds is not None and seconds <= 0:
            raise ConfigError(f"{seconds} seconds between commits: give more than 0")

    @property
    def decisions_max(self) -> int:
        """How many decisions wait at most."""
        return self.checkpoints or GATHERED_MAX


CommitOutcome: TypeAlias = Committed | AlreadyCommitted | RetryLater | Lost | Unknown
AbortOutcome: TypeAlias = Aborted | AlreadyCommitted | RetryLater | Unknown
