"""The part of `onceflow txn` for SQL databases: list and resolve transactions in doubt."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from typing_extensions import override

from onceflow.clients.sql.session import Session, SqlError, TableMissing
from onceflow.core.errors import SinkError
from onceflow.core.protocol.log.target_records import TargetRecord
from onceflow.core.spi import Committer, CommitterContext
from onceflow.core.spi.connector import ResourceManager
from onceflow.sinks.sql.sink import SqlSink

_T = TypeVar("_T")
NO_TABLE = "onceflow"
"""The table name of a sink that only commits and rolls back by name, and needs no table."""


class SqlResourceManager(ResourceManager):
    """A resource manager of one database, for each sink id that its ledger contains.

    It connects when it is first asked.
    """

    def __init__(self, sink: SqlSink) -> None:
        """Take the `sink` that says how the database is reached.

        Staged rows are not applied here.
        """
        self._sink = sink
        self._settings = sink.settings
        self._session: Session | None = None

    @property
    def sink(self) -> SqlSink:
        """A sink for this database; the table that it names may not exist."""
        return self._sink

    @property
    @override
    def name(self) -> str:
        return str(self._settings.endpoint)

    @override
    def committer(self, context: CommitterContext) -> Committer:
        return self._sink.committer(replace(context, staging=None))

    @override
    def read_claimant(self, sink_id: str) -> str | None:
        owner = self._of_our_tables(lambda s: self._settings.ledger.owner(s, sink_id))
        return owner.log_id if owner else None

    def owners(self) -> dict[str, str]:
        """Return the log_id of the owner of each sink id that was ever claimed in this database.

        Raises:
            SinkError: The database cannot be asked now.
        """
        return self._of_our_tables(self._settings.ledger.owners) or {}

    @override
    def target_record(self, context: CommitterContext) -> TargetRecord | None:
        ledger, sink_id = self._settings.ledger, context.sink_id

        def ask(session: Session) -> TargetRecord | None:
            # Read the claim first. A process that claims and commits between the two reads has a
            # higher attempt.
            owner = ledger.owner(session, sink_id)
            if owner is None or owner.log_id != context.log_id:
                return None
            return ledger.read_record(session, sink_id, owner.attempt)

        return self._of_our_tables(ask)

    @override
    def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.close()

    def _ask(self, ask: Callable[[Session], _T]) -> _T:
        """Return the result of `ask`.

        Raises:
            SinkError: The server does not answer, or refuses the statement.
        """
        try:
            if self._session is None or not self._session.is_open:
                self._session = self._settings.endpoint.connect("onceflow txn")
            return ask(self._session)
        except SqlError as error:
            raise SinkError(f"{self._settings.endpoint}: {error}") from error

    def _of_our_tables(self, ask: Callable[[Session], _T | None]) -> _T | None:
        """Return the result of `ask`, or None if onceflow's tables do not exist."""

        def ask_unless_missing(session: Session) -> _T | None:
            try:
                return ask(session)
            except TableMissing:
                return None

        return self._ask(ask_unless_missing)
