"""The connection of one writer and the one transaction that is open on it at a time."""

from __future__ import annotations

from typing import Protocol

from onceflow.core.protocol.ids import CheckpointId, TransactionId
from onceflow.sinks.sql.connection import ConnectionT_co


class Transactions(Protocol[ConnectionT_co]):
    """One transaction after another. Errors are the driver's own."""

    @property
    def connection(self) -> ConnectionT_co:
        """The connection, for what runs in the transaction or ends it."""
        ...

    def begin(self) -> ConnectionT_co:
        """Return the connection with a transaction open on it, the one that is or a new one.

        Raises:
            SinkError: It was lost and cannot be opened again, or the transaction's name is in use.
        """
        ...

    def roll_back(self) -> None:
        """End the transaction, if one is open, of which nothing is kept."""
        ...

    def hasten(self) -> None:
        """From now on wait for the server only as long as leaving it may take."""
        ...

    def close(self) -> None:
        """Disconnect, by which the server rolls back what is open. Safe to call twice."""
        ...


class PlainTransactions(Transactions[ConnectionT_co], Protocol[ConnectionT_co]):
    """Ordinary ones."""

    def commit(self) -> str:
        """Commit the open one; return the server's answer, COMMIT unless it had failed."""
        ...


class PreparedTransactions(Transactions[ConnectionT_co], Protocol[ConnectionT_co]):
    """Ones that are prepared, each under a name that no other ever had."""

    @property
    def transaction(self) -> TransactionId:
        """The name of the open one."""
        ...

    def expect(self, checkpoint: CheckpointId) -> None:
        """Take note of the checkpoint that will take the next one, or the one that is open."""
        ...

    def prepare(self) -> None:
        """Prepare the open one, which survives everything from then on.

        Raises:
            SinkError: The name is in use, or the transaction had failed.
        """
        ...

    def name_in_use(self, transaction: TransactionId) -> str:
        """Return what to say, and to do, when something is prepared under the name already."""
        ...
