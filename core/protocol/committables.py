"""What a sink's pre-commit returns, and every way in which its commit can end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from onceflow.core.protocol.ids import CheckpointId, TransactionId


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


CommitOutcome: TypeAlias = Committed | AlreadyCommitted | RetryLater | Lost | Unknown
AbortOutcome: TypeAlias = Aborted | AlreadyCommitted | RetryLater | Unknown
