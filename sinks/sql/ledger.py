"""What is asked of the bookkeeping tables, in whatever SQL a dialect has for it."""

from __future__ import annotations

from typing import Protocol

from onceflow.core.protocol.ids import CheckpointId, TransactionId
from onceflow.sinks.fence import FenceOwner
from onceflow.sinks.sql.connection import ConnectionT_contra


class Ledger(Protocol[ConnectionT_contra]):
    """The tables of `bookkeeping` in one schema. Each call runs in the connection's transaction."""

    @property
    def sinks_shown(self) -> str:
        """The quoted name of the table that says who may write."""
        ...

    def take_over(self, sink_id: str, /) -> str:
        """Return the statement by which an operator hands a sink id to another job."""
        ...

    def record(
        self, connection: ConnectionT_contra, transaction: TransactionId, rows: int, /
    ) -> bool:
        """Return whether the ledger row is written; not when a newer attempt has the sink.

        Nor, where the server would wait for it, when a prepared transaction has the name.

        Raises:
            Exception: The driver's: the transaction is committed (duplicate key), or refused.
        """
        ...

    def record_applied(
        self, connection: ConnectionT_contra, transaction: TransactionId, rows: int, /
    ) -> bool:
        """Return whether the ledger row is written; not when the transaction is committed.

        Waits for another session that is writing it, and then knows how that one ended.
        """
        ...

    def has(self, connection: ConnectionT_contra, transaction: TransactionId, /) -> bool:
        """Return whether the ledger proves that `transaction` is committed.

        A ledger that is missing proves nothing, so that is the driver's error and not False.
        """
        ...

    def owner(self, connection: ConnectionT_contra, sink_id: str, /) -> FenceOwner | None:
        """Return who claimed `sink_id` last."""
        ...

    def commit_mode(self, connection: ConnectionT_contra, sink_id: str, /) -> str | None:
        """Return the commit mode that the last claim chose; None when there is none."""
        ...

    def claim(
        self,
        connection: ConnectionT_contra,
        sink_id: str,
        job: str,
        owner: FenceOwner,
        commit_mode: str,
        /,
    ) -> bool:
        """Return whether `owner` is now the only one who may write under `sink_id`.

        Not when another log, the same attempt or a newer one has it: the rule of `fence`. May also
        be refused because another claim was quicker, which its row then tells.
        """
        ...

    def prune(self, connection: ConnectionT_contra, sink_id: str, before: CheckpointId, /) -> bool:
        """Delete a bounded number of committed rows before `before`; return whether more are left.

        Rows of prepared transactions are not seen, and stay.
        """
        ...
