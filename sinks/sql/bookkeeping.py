"""The two tables that onceflow keeps in a target database, described once for every dialect.

onceflow_ledger   one row a transaction, written inside it: visible if and only if the
                  transaction is committed, so it tells "committed" from "rolled back" when the
                  prepared transaction itself is gone
onceflow_sinks    one row a sink id: which decision log owns it, its newest attempt, and how that
                  one commits
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Column,
    DateTime,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    func,
)

from onceflow.core.protocol.ids import SINK_ID_LENGTH_MAX, TRANSACTION_ID_LENGTH_MAX

LEDGER = "onceflow_ledger"
SINKS = "onceflow_sinks"
COMMIT_MODE_LENGTH_MAX = 16


def ledger_table(schema: str) -> Table:
    """Return the ledger in `schema`; its index serves pruning, which goes by sink and age."""
    return Table(
        LEDGER,
        MetaData(),
        Column("transaction_id", String(TRANSACTION_ID_LENGTH_MAX), primary_key=True),
        Column("sink_id", String(SINK_ID_LENGTH_MAX), nullable=False),
        Column("attempt", Integer, nullable=False),
        Column("checkpoint", BigInteger, nullable=False),
        Column("subtask", Integer, nullable=False),
        Column("row_count", BigInteger, nullable=False),
        Column("prepared_at", DateTime(timezone=True), nullable=False, server_default=func.now()),
        Index("onceflow_ledger_by_checkpoint", "sink_id", "checkpoint"),
        schema=schema,
    )


def sinks_table(schema: str) -> Table:
    """Return the fence in `schema`."""
    return Table(
        SINKS,
        MetaData(),
        Column("sink_id", String(SINK_ID_LENGTH_MAX), primary_key=True),
        Column("job", Text, nullable=False),
        Column("log_id", Text, nullable=False),
        Column("attempt", Integer, nullable=False),
        Column("claimed_at", DateTime(timezone=True), nullable=False, server_default=func.now()),
        # What `open` chose for the attempt, so that all its subtasks do the same.
        Column("commit_mode", String(COMMIT_MODE_LENGTH_MAX)),
        schema=schema,
    )
