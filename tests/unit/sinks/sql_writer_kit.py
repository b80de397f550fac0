"""Writers of a database on SQLite, whose transactions are committed when they are prepared."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from typing import Any

import pyarrow as pa
from tests.unit.sinks.sql_committer_kit import SCHEMA, SINK_ID, Target
from typing_extensions import override

from onceflow.clients.sql.session import (
    Session,
)
from onceflow.core.protocol.ids import AttemptId, CheckpointId, TransactionId
from onceflow.core.spi import WriterContext
from onceflow.sinks.sql.transactions import PreparedTransactions
from onceflow.sinks.sql.writer import SqlWriter, TwoPhaseWriter


class Preparing(PreparedTransactions):
    """Transactions that are named when they begin, and committed when they are prepared."""

    def __init__(self, connect: Callable[[], Session], context: WriterContext) -> None:
        self.context = context
        self.begun: list[TransactionId] = []
        self.ended: list[TransactionId] = []
        self.waits: list[str] = []
        super().__init__(connect, context.first_checkpoint)

    @property
    @override
    def transaction(self) -> TransactionId:
        return self.begun[-1]

    @override
    def prepare(self) -> None:
        self.session.commit()
        self._open = False
        self.ended.append(self.transaction)

    @override
    def order_changes(self) -> None:
        self.waits.append("ordered")

    @override
    def await_earlier(self) -> None:
        self.waits.append("waited")

    @override
    def _begin(self, session: Session) -> None:
        super()._begin(session)
        self.begun.append(self.context.transaction(self._next))

    @override
    def _way_to_end(self, transaction: TransactionId) -> str:
        return f"end {transaction}"


def context(target: Target, schema: pa.Schema = SCHEMA, **changes: Any) -> WriterContext:
    return replace(
        WriterContext(
            job="job",
            uid="rows",
            sink_id=SINK_ID,
            subtask=0,
            parallelism=1,
            attempt=AttemptId(1),
            first_checkpoint=CheckpointId(1),
            schema=schema,
            staging=target.area,
        ),
        **changes,
    )


def two_phase(
    target: Target, schema: pa.Schema = SCHEMA, **changes: Any
) -> tuple[TwoPhaseWriter, Preparing]:
    given = context(target, schema, **changes)
    settings = target.sink.settings
    transactions = Preparing(lambda: settings.endpoint.connect("writer"), given)
    return TwoPhaseWriter(settings, given, transactions), transactions


def ids(*numbers: int) -> pa.RecordBatch:
    return pa.record_batch({"id": list(numbers)}, schema=SCHEMA)


def rows_of(target: Target, query: str) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(target.path)) as server:
        return server.execute(query).fetchall()


def refuse_multiples_of_7(target: Target) -> Target:
    """Make a table that refuses multiples of 7."""
    target.write("DROP TABLE rows; CREATE TABLE rows (id INTEGER NOT NULL CHECK (id % 7 <> 0))")
    return target


def rejected_by(writer: SqlWriter) -> list[int]:
    return [id_ for part in writer.take_rejected() for id_ in part.rows.column("id").to_pylist()]
