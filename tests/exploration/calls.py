"""Procedures of production that ask servers, run in steps without threads.

A procedure is called again from its beginning for each step, with the answers that it has received
so far. When it asks for the next one, `Suspended` ends the call. So the state of a procedure is its
name, its arguments and a tuple of answers, and the code that runs is production's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from onceflow.core.errors import OnceflowError
from onceflow.core.protocol.committables import Committable
from onceflow.core.protocol.ids import AttemptId, CheckpointId, TransactionId
from onceflow.core.protocol.savepoints.savepoint import Savepoint

# --- requests to the decision log ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ListRecords:
    """Return the bytes of each record, by number."""


@dataclass(frozen=True, slots=True)
class ReadRecord:
    """Return the bytes of one record, or None."""

    sequence: int


@dataclass(frozen=True, slots=True)
class CreateRecord:
    """Create a record if its number is free; return the bytes that are there otherwise."""

    sequence: int
    data: bytes


# --- requests to targets -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OpenTarget:
    """Fence all older attempts."""

    sink: str
    attempt: AttemptId


@dataclass(frozen=True, slots=True)
class ReadTarget:
    """Return the `TargetRecord` of the sink id."""

    sink: str


@dataclass(frozen=True, slots=True)
class ListInDoubt:
    """Return the transactions that are prepared, or staged and not applied."""

    sink: str


@dataclass(frozen=True, slots=True)
class ReadThrough:
    """Return the last whole checkpoint that is committed."""

    sink: str


@dataclass(frozen=True, slots=True)
class CheckFence:
    """Return False if a newer attempt has opened the target."""

    sink: str
    attempt: AttemptId


@dataclass(frozen=True, slots=True)
class Prepare:
    """Make rows durable and not visible."""

    transaction: TransactionId
    rows: tuple[int, ...]

    @property
    def sink(self) -> str:
        return self.transaction.sink_id


@dataclass(frozen=True, slots=True)
class CommitTransaction:
    """Make the rows of a prepared transaction visible."""

    transaction: TransactionId

    @property
    def sink(self) -> str:
        return self.transaction.sink_id


@dataclass(frozen=True, slots=True)
class RollBack:
    """Drop a prepared transaction."""

    transaction: TransactionId

    @property
    def sink(self) -> str:
        return self.transaction.sink_id


@dataclass(frozen=True, slots=True)
class ReadStaged:
    """Return the rows of a staged transaction; None if they are gone."""

    transaction: TransactionId

    @property
    def sink(self) -> str:
        return self.transaction.sink_id


@dataclass(frozen=True, slots=True)
class ApplyStaged:
    """Insert the rows with a proof, unless the proof is there; return False then."""

    transaction: TransactionId
    rows: tuple[int, ...]

    @property
    def sink(self) -> str:
        return self.transaction.sink_id


@dataclass(frozen=True, slots=True)
class HasProof:
    """Return True if the transaction is committed."""

    transaction: TransactionId

    @property
    def sink(self) -> str:
        return self.transaction.sink_id


@dataclass(frozen=True, slots=True)
class CommitVersion:
    """Make the rows of a whole checkpoint visible, unless the target is as far already."""

    sink: str
    checkpoint: CheckpointId
    committables: tuple[Committable, ...]


# --- requests to the storage of savepoints -------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CopyState:
    """Copy the state of a savepoint; the jobs of worlds have none."""


@dataclass(frozen=True, slots=True)
class WriteMetadata:
    """Make a savepoint whole."""

    savepoint: Savepoint


@dataclass(frozen=True, slots=True)
class DeleteMetadata:
    """Delete the savepoint."""


@dataclass(frozen=True, slots=True)
class ReadMetadata:
    """Return the savepoint, or None if there is no whole one."""


LogRequest: TypeAlias = ListRecords | ReadRecord | CreateRecord
SavepointCall: TypeAlias = CopyState | WriteMetadata | DeleteMetadata | ReadMetadata
TargetRequest: TypeAlias = (
    OpenTarget
    | ReadTarget
    | ListInDoubt
    | ReadThrough
    | CheckFence
    | Prepare
    | CommitTransaction
    | RollBack
    | ReadStaged
    | ApplyStaged
    | HasProof
    | CommitVersion
)
Request: TypeAlias = LogRequest | SavepointCall | TargetRequest

# --- procedures ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Failed:
    """An answer that is raised in the procedure."""

    error: Exception


class Suspended(BaseException):  # production catches `Exception`, and this must not be caught
    """Raised where a procedure asks for an answer that has not come yet."""

    def __init__(self, request: Request) -> None:
        super().__init__(str(request))
        self.request = request


class Calls:
    """The answers to the requests of one procedure, in their order."""

    def __init__(self, answers: Sequence[Any]) -> None:
        self._answers = answers
        self._used = 0

    def ask(self, request: Request) -> Any:
        """Return the answer to `request`, or suspend the procedure."""
        if self._used == len(self._answers):
            raise Suspended(request)
        answer = self._answers[self._used]
        self._used += 1
        if isinstance(answer, Failed):
            raise answer.error
        return answer


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of a procedure: its result, or the error that it raised."""

    result: Any = None
    error: BaseException | None = None


@dataclass(frozen=True, slots=True)
class Thread:
    """A thread of a process that carries out one procedure."""

    procedure: Callable[..., Any]
    arguments: tuple[Any, ...]
    answers: tuple[Any, ...] = ()
    request: Request | None = None
    """The request that waits for its answer."""

    def run(self, *answer: Any) -> Thread | Ended:
        """Go on with `answer`, if any, up to the next request or the end."""
        answers = (*self.answers, *answer)
        try:
            return Ended(self.procedure(Calls(answers), *self.arguments))
        except Suspended as suspended:
            return replace(self, answers=answers, request=suspended.request)
        except OnceflowError as error:
            return Ended(error=error)
