"""The commit and rollback of prepared or staged transactions, by name alone.

A prepared transaction has one transition: it is prepared, then gone from the server's list, with
its ledger row (committed) or without it (rolled back). The servers make the ledger row visible
before they forget the prepared transaction (Postgres: FinishPreparedTransaction in twophase.c, 12
to 18; MySQL 9.7 and MariaDB 10.11: measured over 80,000 looks). So a process that first looks for
the prepared transaction and then for the ledger row cannot miss a commit in between. In the other
order, such a commit would look lost.

The error "unknown transaction" alone proves nothing. MariaDB returns it for a transaction that it
lists, while the session that prepared it is connected. MySQL returns it while another session is
committing the transaction.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import TypeVar

from typing_extensions import override

from onceflow.clients.sql.session import (
    AccessDenied,
    BinaryLogRefuses,
    ConnectionLost,
    NameUnknown,
    ReadOnly,
    Session,
    SqlError,
    session_name,
)
from onceflow.core.backoff import Backoff
from onceflow.core.errors import CommitOutcomeUnknown, ConfigError, SinkError
from onceflow.core.protocol.committables import (
    Aborted,
    AbortOutcome,
    AlreadyCommitted,
    CommitOutcome,
    Committable,
    Committed,
    Lost,
    RetryLater,
    Unknown,
)
from onceflow.core.protocol.ids import CheckpointId, TransactionId
from onceflow.core.spi import Committer, CommitterContext
from onceflow.core.spi.staging import is_staged, make_staged_committable
from onceflow.sinks.sql.dialect import TwoPhase
from onceflow.sinks.sql.settings import CommitMode, SqlSettings
from onceflow.sinks.sql.staged_commits import StagedCommits

_T = TypeVar("_T")
_U = TypeVar("_U")
_PRUNE_ROUNDS_MAX = 100
"""The limit of rounds in one call of `prune`; the next checkpoint deletes the remaining rows."""
_HELD_PAUSE_S, _HELD_PAUSE_MAX_S = 0.001, 0.02
"""The first and the longest pause between checks whether a session still holds a transaction."""


class SqlCommitter(Committer):
    """A committer of transactions that any process prepared or staged. All calls are repeatable."""

    def __init__(self, settings: SqlSettings, context: CommitterContext) -> None:
        """Connect to nothing yet."""
        self._settings = settings
        self._endpoint = settings.endpoint
        self._ledger = settings.ledger
        self._two_phase = settings.two_phase
        self._context = context
        self._session: Session | None = None
        self._only_answered: set[TransactionId] = set()
        self._committed_last: TransactionId | None = None
        self._proven_on: Session | None = None
        """The session on which the ledger row of `_committed_last` was read."""
        self._staged = StagedCommits(settings, context, self._open_session)

    @override
    def commit(self, committable: Committable) -> CommitOutcome:
        """Return the outcome. If the connection is lost, reconnect and ask the server again.

        Waits for the server's replies and, after a lost reply, for as long as connecting may take.

        Raises:
            StateCorrupt: The staged rows differ from the sealed ones; they are not applied.
            CommitOutcomeUnknown: The transaction is committed, and the server has lost the previous
                one.
        """
        transaction = committable.transaction
        outcome: CommitOutcome
        if is_staged(committable):
            outcome = self._ask(
                lambda: self._ask_or_retry_later(lambda: self._staged.commit(committable)),
                f"COMMIT of the staged rows of {transaction}",
            )
        elif self._two_phase is None:
            return self._not_ours(transaction)
        else:
            two_phase = self._two_phase
            outcome = self._finish(
                self._commit_prepared,
                two_phase,
                transaction,
                f"{two_phase.commit_words} {transaction}",
            )
        if isinstance(outcome, (Committed, AlreadyCommitted)):
            # Check the previous commit before this commit replaces it as the proof.
            self._require_not_set_back()
            self._committed_last, self._proven_on = transaction, self._session
        return outcome

    @override
    def abort(self, committable: Committable) -> AbortOutcome:
        """Return the outcome; `Aborted` also if no transaction of the name was ever prepared.

        A transaction that a living writer of an older attempt is preparing at this moment is not
        seen. It is in doubt afterwards, and the next `in_doubt` finds it.
        """
        transaction = committable.transaction
        if is_staged(committable):
            return self._ask(
                lambda: self._ask_or_retry_later(lambda: self._staged.abort(transaction)),
                f"the ledger's question for {transaction}",
            )
        two_phase = self._two_phase
        if two_phase is None:
            return self._not_ours(transaction)
        return self._finish(
            self._abort_prepared,
            two_phase,
            transaction,
            f"{two_phase.roll_back_words} {transaction}",
        )

    @override
    def in_doubt(self) -> Sequence[Committable]:
        """Return all transactions of exactly this sink id: prepared under this ledger, or staged.

        If the user may not list prepared transactions and the sink is in ledger mode, return only
        the staged ones.

        Raises:
            SinkError: The server cannot be asked now.
            StorageError: Checkpoint storage cannot be asked now.
        """
        transactions: Sequence[TransactionId] = ()
        try:
            transactions = self._list_prepared()
        except SqlError as error:
            text = (
                f"sink {self._context.sink_id}: cannot list its transactions in doubt at"
                f" {self._endpoint}: {error}"
            )
            if not (isinstance(error, AccessDenied) and self._only_stages()):
                raise SinkError(text) from error
            self._settings.dialect.log.warning(
                "%s. Ledger mode prepares nothing, but transactions that an earlier attempt"
                " prepared stay prepared and keep their locks",
                text,
            )
        staging = self._context.staging
        staged = () if staging is None else staging.transactions()
        return (*map(Committable, transactions), *map(make_staged_committable, staged))

    @override
    def prune(self, before: CheckpointId) -> None:
        """Delete the ledger rows of committed transactions of checkpoints before `before`.

        A failure is only logged: the rows do no harm, and the next call comes soon.
        """
        if self._committed_last is not None and self._committed_last.checkpoint < before:
            # Its ledger row is deleted now, and its absence would look like a lost commit.
            self._committed_last = None
        try:
            for _ in range(_PRUNE_ROUNDS_MAX):
                if not self._ledger.prune(self._open_session(), self._context.sink_id, before):
                    return
        except (SqlError, SinkError, ConfigError) as error:
            self._give_up_pruning(before, str(error))

    @override
    def close(self) -> None:
        """Disconnect."""
        session, self._session = self._session, None
        if session is not None:
            session.close()

    @override
    def find_prepare_time(self, committable: Committable) -> datetime | None:
        """Return the server's time at which it was prepared, or None if it is not prepared.

        Raises:
            SinkError: The server cannot be asked now.
        """
        transaction = committable.transaction
        if self._two_phase is None:
            return None
        try:
            return self._two_phase.find_prepare_time(self._open_session(), transaction)
        except SqlError as error:
            raise SinkError(
                f"when {transaction} was prepared cannot be asked at {self._endpoint}: {error}"
            ) from error

    def _finish(
        self,
        decide: Callable[[TwoPhase, TransactionId], _T | None],
        two_phase: TwoPhase,
        transaction: TransactionId,
        statement: str,
    ) -> _T | RetryLater | Unknown:
        """Return the result of `decide`, and repeat it for a while if a session holds it (None)."""
        holder = Backoff(
            until=time.monotonic() + two_phase.holder_leaves_s,
            first_s=_HELD_PAUSE_S,
            longest_s=_HELD_PAUSE_MAX_S,
        )

        def ask() -> _T | RetryLater | None:
            outcome = decide(two_phase, transaction)
            # If time is left, return None: `pause` has waited, and `_ask` asks again at once.
            if outcome is not None or holder.pause():
                return outcome
            return self._ask_or_retry_later(
                lambda: RetryLater(two_phase.end_holding_session(self._open_session(), transaction))
            )

        return self._ask(ask, statement)

    def _commit_prepared(
        self, two_phase: TwoPhase, transaction: TransactionId
    ) -> CommitOutcome | None:
        session = self._open_session()
        try:
            # Servers refuse to end a transaction while the session that prepared it is connected.
            if two_phase.is_held(session, transaction):
                return None
            two_phase.commit(session, transaction)
            # MariaDB may answer OK and commit nothing; see `commit_is_proof`.
            if two_phase.commit_is_proof(session) or self._in_ledger(transaction):
                return Committed()
            # The reply was OK, but the ledger has no row. If the transaction disappears from the
            # list later, it must not be called lost: the server may list it again after a restart.
            self._only_answered.add(transaction)
            return _nothing_done(transaction)
        except NameUnknown:
            return self._ask_or_retry_later(
                lambda: self._resolve_gone_at_commit(two_phase, transaction)
            )
        except ConnectionLost:
            raise
        except SqlError as error:
            return RetryLater(f"{two_phase.commit_words} {transaction}: {error}")

    def _resolve_gone_at_commit(
        self, two_phase: TwoPhase, transaction: TransactionId
    ) -> AlreadyCommitted | Lost | RetryLater | None:
        """Tell committed from rolled back, after the server knew no prepared transaction.

        That reply was the look for the prepared transaction; the ledger is read after it. Neither
        look would see a PREPARE that is still running on another session. So both are repeated in
        the same order before rows are called lost. Returns None if a session holds the transaction.
        """
        if self._in_ledger(transaction):
            return AlreadyCommitted()
        if two_phase.is_prepared(self._open_session(), transaction):
            return None
        if self._in_ledger(transaction):
            return AlreadyCommitted()
        if transaction in self._only_answered:
            return _nothing_done(transaction)
        return Lost(
            f"prepared transaction {transaction} of checkpoint {transaction.checkpoint} is gone"
            f" from {self._endpoint} and its row is not in the ledger: it was rolled back outside"
            f" onceflow, by {two_phase.roll_back_words}, or the database was set back to an older"
            " copy"
        )

    def _abort_prepared(
        self, two_phase: TwoPhase, transaction: TransactionId
    ) -> AbortOutcome | None:
        session = self._open_session()
        try:
            if two_phase.is_held(session, transaction):
                return None
            two_phase.roll_back(session, transaction)
            return Aborted()
        except NameUnknown:
            return self._ask_or_retry_later(
                lambda: self._resolve_gone_at_abort(two_phase, transaction)
            )
        except ConnectionLost:
            raise
        except SqlError as error:
            return RetryLater(f"{two_phase.roll_back_words} {transaction}: {error}")

    def _resolve_gone_at_abort(
        self, two_phase: TwoPhase, transaction: TransactionId
    ) -> Aborted | AlreadyCommitted | None:
        # The same order of looks as `_resolve_gone_at_commit`, for the same reason.
        if self._in_ledger(transaction):
            return AlreadyCommitted()
        if two_phase.is_prepared(self._open_session(), transaction):
            return None
        return AlreadyCommitted() if self._in_ledger(transaction) else Aborted()

    def _not_ours(self, transaction: TransactionId) -> RetryLater:
        return RetryLater(
            f"{transaction} is prepared, but {self._endpoint} has no prepared transactions that"
            " another session can end: it belongs to another sink"
        )

    def _list_prepared(self) -> tuple[TransactionId, ...]:
        if self._two_phase is None:
            return ()
        try:
            return self._two_phase.list_prepared(self._open_session(), self._context.sink_id)
        except ConnectionLost:
            # The server may have restarted since the last statement.
            return self._two_phase.list_prepared(self._open_session(), self._context.sink_id)

    def _only_stages(self) -> bool:
        """Return True if the sink's attempt, which was checked, works in ledger mode."""
        if self._settings.commit_mode is not None:
            return self._settings.commit_mode is CommitMode.LEDGER
        try:
            recorded = self._ledger.commit_mode(self._open_session(), self._context.sink_id)
        except SqlError:
            return False
        return recorded == CommitMode.LEDGER.value

    def _require_not_set_back(self) -> None:
        """Raise CommitOutcomeUnknown if a new connection led to an older copy of the database.

        Raises:
            CommitOutcomeUnknown: The ledger row of the last commit is missing; the next attempt
                finds out what else is missing.
        """
        # Check once per connection: only a new connection can lead to another copy.
        last = self._committed_last
        if last is None or self._session is self._proven_on:
            return
        proven = self._ask(
            lambda: self._ask_or_retry_later(lambda: self._in_ledger(last)),
            f"the question for {last}",
        )
        if proven is False:
            raise CommitOutcomeUnknown(
                f"{last} was committed at {self._endpoint}, and since the connection was opened"
                " anew its row is not in the ledger: the database was set back to an older copy"
                " (a fail-over, or a restored backup)"
            )

    def _in_ledger(self, transaction: TransactionId) -> bool:
        return self._ledger.has(self._open_session(), transaction)

    def _ask(self, ask: Callable[[], _T | None], statement: str) -> _T | RetryLater | Unknown:
        endpoint = self._endpoint
        return ask_until_known(
            ask, statement, sent_to=endpoint, timeout_s=endpoint.connect_timeout_s
        )

    def _ask_or_retry_later(self, ask: Callable[[], _T]) -> _T | RetryLater:
        """Return the result of `ask`. It is repeatable: after a lost reply it is asked again."""
        answer: _T | RetryLater
        try:
            answer = ask()
        except ConnectionLost:
            raise
        except SqlError as error:
            if isinstance(error, ReadOnly):
                # The next call opens a new session, which may be able to write.
                self.close()
            waits = isinstance(error, (AccessDenied, BinaryLogRefuses))
            answer = RetryLater(f"the server cannot be asked: {error}", until_fixed=waits)
        if isinstance(answer, RetryLater) and answer.until_fixed:
            # MySQL applies settings, and privileges on a database, to new sessions alone.
            self.close()
        return answer

    def _open_session(self) -> Session:
        if self._session is None or not self._session.is_open:
            context = self._context
            name = session_name(context.sink_id, context.attempt, "committer")
            self._session = self._endpoint.connect(name)
        return self._session

    def _give_up_pruning(self, before: CheckpointId, reason: str) -> None:
        self.close()
        self._settings.dialect.log.warning(
            "sink %s: the ledger is not pruned below checkpoint %s: %s",
            self._context.sink_id,
            before,
            reason,
        )


def ask_until_known(
    ask: Callable[[], _T | None], statement: str, *, sent_to: object, timeout_s: float
) -> _T | RetryLater | Unknown:
    """Return the result of `ask`; after a lost reply, ask again for `timeout_s`.

    This is the only retry loop inside one call of a committer; its caller makes further calls. If
    no statement was sent, nothing can have changed, so the outcome is "retry later". After a lost
    reply, only the server knows the outcome. If `ask` returns None, it has paused, and is called
    again at once. `statement` and `sent_to` name the statement and its server.
    """
    lost_reply = ""
    backoff = Backoff(until=time.monotonic() + timeout_s)
    while True:
        try:
            answer = ask()
        except ConnectionLost as error:
            lost_reply = str(error)
        except (SinkError, ConfigError) as error:
            # The connection could not be opened: nothing was sent, and nothing can have changed.
            if not lost_reply:
                return RetryLater(str(error))
        else:
            if answer is not None:
                return answer
            continue
        if not backoff.pause():
            return Unknown(
                f"{statement} was sent to {sent_to}, but not answered ({lost_reply}), and the"
                f" server did not say within {timeout_s:g} s whether it was committed"
            )


def _nothing_done(transaction: TransactionId) -> RetryLater:
    return RetryLater(
        f"the server answered the commit of {transaction} with OK, but committed nothing. Its"
        " rows are still prepared: they are listed again after a restart of the server"
    )
