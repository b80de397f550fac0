"""MySQL and MariaDB for the tools: what they hold in doubt, and what the catalogue finds."""

from __future__ import annotations

from collections.abc import Sequence

from typing_extensions import override

from onceflow.core.connector import ServerAccess, SinkConnector
from onceflow.core.protocol.ids import TransactionId
from onceflow.core.protocol.in_doubt import LogFacts
from onceflow.sinks.mysql.catalog import XaNames, literal
from onceflow.sinks.mysql.diagnosis import questions_of_mysql, sink_of_tools
from onceflow.sinks.mysql.sink import MySQLSink
from onceflow.sinks.mysql.two_phase import recovered
from onceflow.sinks.sql.connector import SqlResourceManager
from onceflow.sinks.sql.session import Session

# A recursion ends at 1000 rows unless a server is told otherwise; so do the subtasks looked at.
_HELD_LOCKS = """
    WITH RECURSIVE every_subtask (number) AS (
        SELECT 0 UNION ALL SELECT number + 1 FROM every_subtask WHERE number < 998
    )
    SELECT number, IS_USED_LOCK(CONCAT({prefix}, number)) AS session FROM every_subtask
    HAVING session IS NOT NULL
"""


class MySQLResourceManager(SqlResourceManager):
    """One server, and what every sink id has prepared there with one ledger."""

    def __init__(self, access: ServerAccess) -> None:
        """Raise `ConfigError` when the URL cannot be read; connect to nothing yet."""
        super().__init__(
            sink_of_tools(
                access.url, access.password, access.options.get("ledger_schema"), access.timeout_s
            )
        )
        self._names = XaNames(self._settings.ledger_schema)

    @override
    def sink_ids(self, log: LogFacts | None) -> Sequence[str]:
        parsed = (
            self._names.parsed(int(format_id), int(gtrid), data)
            for format_id, gtrid, _, data in self._asked(recovered)
        )
        return sorted({transaction.sink_id for transaction in parsed if transaction})

    @override
    def sessions(self, sink_id: str) -> Sequence[str]:
        statement = _HELD_LOCKS.format(prefix=literal(self._names.writers_lock(sink_id)))
        return [
            f"the writer of subtask {subtask} is connected to {self.name} (session {session})"
            for subtask, session in self._asked(lambda session: session.query(statement))
        ]

    @override
    def rows(self, transaction: TransactionId) -> int | None:
        # The ledger row is in the transaction itself, and nobody else may see it otherwise.
        statement = (
            f"SELECT row_count FROM {self._settings.ledger.ledger} "
            f"WHERE transaction_id = {literal(str(transaction))}"
        )

        def ask(session: Session) -> int | None:
            session.execute("SET TRANSACTION ISOLATION LEVEL READ UNCOMMITTED")
            found = session.query(statement)
            return int(found[0][0]) if found else None

        return self._of_our_tables(ask)


CONNECTOR = SinkConnector(
    sink=MySQLSink, resource_manager=MySQLResourceManager, diagnosis=questions_of_mysql
)
"""What the catalogue finds."""
