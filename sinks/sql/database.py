"""The seam: everything that a writer or committer of any dialect wants its database to do."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Generic

from onceflow.core.protocol.ids import TransactionId
from onceflow.sinks.sql.connection import ConnectionT, Endpoint
from onceflow.sinks.sql.dml import DmlExecutor
from onceflow.sinks.sql.failures import ErrorT, Failures
from onceflow.sinks.sql.ledger import Ledger
from onceflow.sinks.sql.row_loader import RowLoader
from onceflow.sinks.sql.settings import SinkSettings
from onceflow.sinks.sql.tables import FitT, Tables, TableT, Target
from onceflow.sinks.sql.transactions import Transactions
from onceflow.sinks.sql.write_mode import WriteMode


class Database(ABC, Generic[ConnectionT, ErrorT, TableT, FitT]):
    """One sink's database, for one writer or committer. Errors are the driver's own."""

    lists_locks: ClassVar[str]
    """Where the server tells who holds which locks."""

    def __init__(
        self,
        settings: SinkSettings[Endpoint[ConnectionT], Ledger[ConnectionT]],
        failures: Failures[ConnectionT, ErrorT],
        tables: Tables[ConnectionT, ErrorT, TableT, FitT],
        log: logging.Logger,
    ) -> None:
        """Connect to nothing yet; `log` is the dialect's."""
        self.settings = settings
        self.failures = failures
        self.tables = tables
        self.log = log

    @abstractmethod
    def writer_name(self, sink_id: str, attempt: int, subtask: int) -> str:
        """Return the name of a writer's connection, by which its attempt is known."""

    @abstractmethod
    def executor(
        self, connection: ConnectionT, mode: WriteMode, key: Sequence[str]
    ) -> DmlExecutor[ConnectionT, Target[TableT, FitT]]:
        """Return what puts and deletes rows on `connection`; `key` may be empty for inserts."""

    @abstractmethod
    def streamed(
        self, transactions: Transactions[ConnectionT], target: Target[TableT, FitT]
    ) -> RowLoader:
        """Return what sends inserts as they come; the first bad row is the transaction's end."""

    @abstractmethod
    def prepared(self, connection: ConnectionT, sink_id: str) -> tuple[TransactionId, ...]:
        """Return what is prepared under exactly this sink id with this ledger, by anybody."""

    @abstractmethod
    def endings(self, transaction: TransactionId) -> str:
        """Return the statements by which an operator ends a prepared transaction."""

    @abstractmethod
    def is_open(self, connection: ConnectionT) -> bool:
        """Return whether there is a connection; false after it broke."""

    @abstractmethod
    def begin(self, connection: ConnectionT) -> None:
        """Open an ordinary transaction whose commit is durable and whose waits end."""

    @abstractmethod
    def commit(self, connection: ConnectionT) -> str:
        """Commit it; return the server's answer, COMMIT, or ROLLBACK where that is no error."""

    @abstractmethod
    def roll_back(self, connection: ConnectionT) -> None:
        """End what is open, if anything is, by closing the connection where that fails."""
