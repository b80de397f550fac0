"""The session of one writer and the one transaction that is open on it at a time."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable

from onceflow.core.protocol.ids import CheckpointId, TransactionId
from onceflow.sinks.sql.session import ConnectionLost, Session


class Transactions:
    """One transaction after another, each on the same session until that is lost or closed."""

    def __init__(self, connect: Callable[[], Session]) -> None:
        """Connect; nothing is open yet.

        Raises:
            ConfigError: The server refuses the connection for good.
            SinkError: It refuses it now.
        """
        self._connect = connect
        self._session: Session | None = None
        self._open = False
        _ = self.session

    @property
    def session(self) -> Session:
        """The session, for what runs in the transaction or ends it."""
        if self._session is None:
            self._session = self._connect()
            self._set_up(self._session)
        return self._session

    def begin(self) -> Session:
        """Return the session with a transaction open on it, the one that is or a new one.

        Raises:
            SinkError: It was lost and cannot be opened again, or the transaction's name is in use.
        """
        if self._open:
            return self.session
        try:
            self._begin(self.session)
        except ConnectionLost:
            # Nothing was open on it, so nothing is lost with it.
            self.close()
            self._begin(self.session)
        self._open = True
        return self.session

    def roll_back(self) -> None:
        """End the transaction, if one is open, of which nothing is kept."""
        if self._open:
            self._open = False
            self._roll_back(self.session)

    def hasten(self) -> None:
        """Wait for the server, from now on, only as long as leaving it may take."""
        if self._session is not None:
            self._session.hasten()

    def close(self) -> None:
        """Disconnect, by which the server rolls back what is open. Safe to call twice."""
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
    """Ordinary ones."""

    def commit(self) -> None:
        """Commit the open one."""
        self.session.commit()
        self._open = False


class PreparedTransactions(Transactions):
    """Ones that are prepared, each under a name that no other ever had."""

    def __init__(self, connect: Callable[[], Session], first_checkpoint: CheckpointId) -> None:
        """Connect; the first transaction is for `first_checkpoint`."""
        self._next = first_checkpoint
        super().__init__(connect)

    @property
    @abstractmethod
    def transaction(self) -> TransactionId:
        """The name of the open one."""

    def expect(self, checkpoint: CheckpointId) -> None:
        """Name the next transaction, or the open one if it has no name yet, after `checkpoint`."""
        self._next = checkpoint

    @abstractmethod
    def prepare(self) -> None:
        """Prepare the open one, which survives everything from then on.

        Raises:
            SinkError: The name is in use, or the transaction had failed.
        """

    def name_in_use(self, transaction: TransactionId) -> str:
        """Return what to say, and to do, when something is prepared under the name already."""
        return (
            f"a transaction named {transaction} is prepared already, so attempt or checkpoint "
            "numbers were used twice: by a second job under this sink id, or after the decision "
            f"log was deleted. {self._way_to_end(transaction)}"
        )

    @abstractmethod
    def _way_to_end(self, transaction: TransactionId) -> str:
        """Say where what is prepared is listed, and by which statements it is ended."""
