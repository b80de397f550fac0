"""What committers of all dialects do alike, on a connection of their own.

Both kinds of transactions at any time, because a job may change its commit mode between two
attempts. What is staged is settled by `staged_commits`; how a prepared one is ended is the
dialect's, and so is how one that the server does not know is told from a committed one.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar, Generic, TypeVar

from typing_extensions import override

from onceflow.core.errors import CommitOutcomeUnknown, ConfigError, SinkError
from onceflow.core.protocol.committables import (
    AbortOutcome,
    AlreadyCommitted,
    CommitOutcome,
    Committable,
    Committed,
    RetryLater,
    Unknown,
)
from onceflow.core.protocol.ids import CheckpointId, TransactionId
from onceflow.core.spi import Committer, CommitterContext
from onceflow.core.staging import is_staged, staged_committable
from onceflow.sinks.sql.connection import ConnectionT, session_name
from onceflow.sinks.sql.database import Database
from onceflow.sinks.sql.failures import ErrorT
from onceflow.sinks.sql.replies import NoReply, settled
from onceflow.sinks.sql.settings import CommitMode
from onceflow.sinks.sql.staged_commits import StagedCommits
from onceflow.sinks.sql.tables import FitT, TableT

_T = TypeVar("_T")
_PRUNE_ROUNDS_MAX = 100


class SqlCommitter(Committer, Generic[ConnectionT, ErrorT, TableT, FitT]):
    """Commits by name alone: who prepared, where, and how often it is asked do not matter."""

    commit_words: ClassVar[str]
    """What commits a prepared transaction, as messages call it; its name follows."""
    abort_words: ClassVar[str]
    """What rolls one back."""

    def __init__(
        self, database: Database[ConnectionT, ErrorT, TableT, FitT], context: CommitterContext
    ) -> None:
        """Connect to nothing yet."""
        self._database = database
        self._endpoint = database.settings.endpoint
        self._failures = database.failures
        self._context = context
        self._connection: ConnectionT | None = None
        self._committed_last: TransactionId | None = None
        self._proven_on: ConnectionT | None = None
        """The connection on which that one is known to be in the ledger."""
        self._staged = StagedCommits(database, context, self._connected)

    @override
    def commit(self, committable: Committable) -> CommitOutcome:
        """Return how it ended. A lost connection is opened anew and the server asked again.

        Waits for the server's replies and, when one was lost, for as long as connecting may take.

        Raises:
            StateCorrupt: Staged rows are not what was staged; they are not applied.
            CommitOutcomeUnknown: It is committed, and the server has forgotten the one before.
        """
        transaction = committable.transaction
        if is_staged(committable):
            outcome = self._settled(
                lambda: self._answered(lambda: self._staged.commit(committable)),
                f"COMMIT of the staged rows of {transaction}",
            )
        else:
            outcome = self._settled(
                lambda: self._commit_prepared(transaction), f"{self.commit_words} {transaction}"
            )
        if isinstance(outcome, (Committed, AlreadyCommitted)):
            self._require_not_set_back()
            self._committed_last, self._proven_on = transaction, self._connection
        return outcome

    @override
    def abort(self, committable: Committable) -> AbortOutcome:
        """Return how it ended; `Aborted` also when nothing of the name was ever prepared.

        What a living writer of an older attempt is preparing at this moment is not seen: it is in
        doubt afterwards, and found by the next `in_doubt`.
        """
        transaction = committable.transaction
        if is_staged(committable):
            return self._settled(
                lambda: self._answered(lambda: self._staged.abort(transaction)),
                f"the ledger's question for {transaction}",
            )
        return self._settled(
            lambda: self._abort_prepared(transaction), f"{self.abort_words} {transaction}"
        )

    @override
    def in_doubt(self) -> Sequence[Committable]:
        """Return all that is prepared under exactly this sink id with this ledger, or staged.

        A user who may not list what is prepared works in ledger mode, and gets what is staged.

        Raises:
            SinkError: The server cannot be asked now.
            StorageError: Checkpoint storage cannot be asked now.
        """
        found: Sequence[TransactionId] = ()
        try:
            found = self._listed()
        except self._failures.errors as error:
            text = (
                f"sink {self._context.sink_id}: what is in doubt at {self._endpoint} cannot be "
                f"listed: {self._failures.described(error)}"
            )
            if not (self._failures.is_denied(error) and self._only_stages()):
                raise SinkError(text) from error
            self._database.log.warning(
                "%s. Nothing is prepared in ledger mode, but what an earlier attempt left prepared "
                "stays so and keeps its locks",
                text,
            )
        staging = self._context.staging
        staged = () if staging is None else staging.transactions()
        return (*map(Committable, found), *map(staged_committable, staged))

    @override
    def prune(self, before: CheckpointId) -> None:
        """Delete the ledger rows of committed transactions of checkpoints before `before`.

        A failure is logged and nothing else: the rows do no harm, and the next call comes soon.
        """
        if self._committed_last is not None and self._committed_last.checkpoint < before:
            self._committed_last = None
        ledger = self._database.settings.ledger
        try:
            for _ in range(_PRUNE_ROUNDS_MAX):
                if not ledger.prune(self._connected(), self._context.sink_id, before):
                    return
        except self._failures.errors as error:
            self._give_up_pruning(before, self._failures.described(error))
        except (SinkError, ConfigError) as error:
            self._give_up_pruning(before, str(error))

    @override
    def close(self) -> None:
        """Disconnect."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    @abstractmethod
    def _commit_prepared(self, transaction: TransactionId) -> CommitOutcome:
        """Commit what is prepared.

        Raises:
            NoReply: The connection broke; the server must be asked again.
        """

    @abstractmethod
    def _abort_prepared(self, transaction: TransactionId) -> AbortOutcome:
        """Roll back what is prepared.

        Raises:
            NoReply: The connection broke; the server must be asked again.
        """

    def _listed(self) -> tuple[TransactionId, ...]:
        connection = self._connected()
        try:
            return self._database.prepared(connection, self._context.sink_id)
        except self._failures.errors as error:
            if not self._failures.is_lost(connection, error):
                raise
            # The server may have restarted while nothing was asked of it.
            self.close()
            return self._database.prepared(self._connected(), self._context.sink_id)

    def _only_stages(self) -> bool:
        """Return whether the sink's attempt, which was checked, works in ledger mode."""
        settings = self._database.settings
        if settings.commit_mode is not None:
            return settings.commit_mode is CommitMode.LEDGER
        try:
            recorded = settings.ledger.commit_mode(self._connected(), self._context.sink_id)
        except self._failures.errors:
            return False
        return recorded == CommitMode.LEDGER.value

    def _require_not_set_back(self) -> None:
        """Return unless a new connection led to an older copy of the database.

        Raises:
            CommitOutcomeUnknown: What was committed last is not there; the next attempt finds out
                what else is missing.
        """
        last = self._committed_last
        if last is None or self._connection is self._proven_on:
            return
        proven = self._settled(
            lambda: self._answered(lambda: self._in_ledger(last)), f"the question for {last}"
        )
        if proven is False:
            raise CommitOutcomeUnknown(
                f"{last} was committed at {self._endpoint}, and since the connection was opened"
                " anew its row is not in the ledger: the database has gone back to an older copy of"
                " itself (a fail-over, or a restored backup)"
            )

    def _in_ledger(self, transaction: TransactionId) -> bool:
        return self._database.settings.ledger.has(self._connected(), transaction)

    def _settled(self, ask: Callable[[], _T], statement: str) -> _T | RetryLater | Unknown:
        endpoint = self._endpoint
        return settled(ask, statement, sent_to=endpoint, timeout_s=endpoint.connect_timeout_s)

    def _answered(self, ask: Callable[[], _T]) -> _T | RetryLater:
        """Return what `ask` returns; it may be asked twice, so a lost reply means to ask again."""
        try:
            return ask()
        except self._failures.errors as error:
            connection = self._connection
            if connection is None or self._failures.is_lost(connection, error):
                raise self._no_reply(error) from error
            return RetryLater(f"the server cannot be asked: {self._failures.described(error)}")

    def _no_reply(self, error: ErrorT) -> NoReply:
        """Return what tells that `error` broke the connection, which is given up."""
        self.close()
        return NoReply(self._failures.described(error))

    def _connected(self) -> ConnectionT:
        if self._connection is None or not self._database.is_open(self._connection):
            context = self._context
            name = session_name(context.sink_id, context.attempt, "committer")
            self._connection = self._endpoint.connect(name)
        return self._connection

    def _give_up_pruning(self, before: CheckpointId, reason: str) -> None:
        self.close()
        self._database.log.warning(
            "sink %s: the ledger is not pruned below checkpoint %s: %s",
            self._context.sink_id,
            before,
            reason,
        )
