"""The session of one writer and the one transaction that is open on it at a time."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable

from onceflow.clients.sql.session import ConnectionLost, Session
from onceflow.core.protocol.ids import CheckpointId, TransactionId


class Transactions:
    """A session that runs one transaction after another, and is reopened after a loss."""

    def __init__(self, connect: Callable[[], Session]) -> None:
        """Connect; no transaction is open yet.

        Raises:
            ConfigError: The server refuses the connection for good.
            SinkError: The server refuses the connection now.
        """
        self._connect = connect
        self._session: Session | None = None
        self._open = False
        _ = self.session

    @property
    def session(self) -> Session:
        """The session of the transaction; connects if there is none."""
        if self._session is None:
            self._session = self._connect()
            self._set_up(self._session)
        return self._session

    def begin(self) -> Session:
        """Return the session with a transaction open on it; open one if none is open.

        Raises:
            SinkError: The session was lost and cannot be opened again, or the transaction's name is
                in use.
        """
        if self._open:
            return self.session
        try:
            self._begin(self.session)
        except ConnectionLost:
            # No transaction was open on the lost session, so no rows are lost.
            self.close()
            self._begin(self.session)
        self._open = True
        return self.session

    def order_changes(self) -> None:
        """Prepare for `await_earlier`, which the caller may call in any transaction."""

    def await_earlier(self) -> None:
        """Wait until this writer's earlier transactions have ended, if they may hide rows.

        The open transaction must see all rows that they have written. The caller has called
        `order_changes` before the first transaction.

        Raises:
            LockTimeout: An earlier transaction is prepared and was not committed in time.
        """

    def roll_back(self) -> None:
        """Roll back the open transaction, if there is one."""
        if self._open:
            self._open = False
            self._roll_back(self.session)

    def hasten(self) -> None:
        """Shorten all further waits for the server to the time that closing may take."""
        if self._session is not None:
            self._session.hasten()

    def close(self) -> None:
        """Disconnect, so that the server rolls back an open transaction. May be called twice."""
        session, self._session = self._session, None
        self._open = False
        if session is not None:
            session.close()

    def _set_up(self, session: Session) -> None:
        """Prepare a new session for all its transactions."""

    def _begin(self, session: Session) -> None:
        session.begin()

    def _roll_back(self, session: Session) -> None:
        session.roll_back()


class PlainTransactions(Transactions):
    """The ordinary transactions of one writer."""

    def commit(self) -> None:
        """Commit the open transaction."""
        self.session.commit()
        self._open = False


class PreparedTransactions(Transactions):
    """The transactions of one writer that are prepared, each under a unique name."""

    def __init__(self, connect: Callable[[], Session], first_checkpoint: CheckpointId) -> None:
        """Connect; the first transaction is for `first_checkpoint`."""
        self._next = first_checkpoint
        super().__init__(connect)

    @property
    @abstractmethod
    def transaction(self) -> TransactionId:
        """The name of the open transaction."""

    def expect(self, checkpoint: CheckpointId) -> None:
        """Name the next transaction, or the open one if it has no name yet, after `checkpoint`."""
        self._next = checkpoint

    @abstractmethod
    def prepare(self) -> None:
        """Prepare the open transaction. From then on it survives a lost connection and a restart.

        Raises:
            SinkError: The name is in use, or the transaction had failed.
        """

    def name_in_use(self, transaction: TransactionId) -> str:
        """Return the error text for a name that is already prepared, with the remedy."""
        return (
            f"a transaction named {transaction} is already prepared, so attempt or checkpoint"
            " numbers were used twice: by a second job under this sink id, or after the decision"
            f" log was deleted. {self._way_to_end(transaction)}"
        )

    @abstractmethod
    def _way_to_end(self, transaction: TransactionId) -> str:
        """Return the advice how to list prepared transactions, and how to end this one."""
