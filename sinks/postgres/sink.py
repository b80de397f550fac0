"""What a user writes to have rows in Postgres."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from typing_extensions import override

from onceflow.sinks.postgres.connection import PostgresEndpoint, endpoint_of
from onceflow.sinks.postgres.dialect import POSTGRES
from onceflow.sinks.sql.dialect import Dialect
from onceflow.sinks.sql.sink import SqlSink


@dataclass(frozen=True, repr=False)
class PostgresSink(SqlSink):
    """Writes every row to its table in Postgres; each takes effect exactly once.

    Rows are kept invisible from their barrier on and committed once the checkpoint is decided: in a
    prepared transaction of the server, which needs `max_prepared_transactions` of at least twice
    the parallelism, or in checkpoint storage.

    Args:
        url: `postgresql://user:password@host:5432/database?sslmode=require` as libpq takes it, or
            SQLAlchemy's `postgresql+psycopg://…`, or JDBC's `jdbc:postgresql://…`.
        ledger_schema: Where onceflow's own tables are; created if it may be.
        others: As `SqlSink` has them.
    """

    dialect: ClassVar[Dialect] = POSTGRES

    ledger_schema: str = field(default="onceflow", kw_only=True)

    @property
    @override
    def endpoint(self) -> PostgresEndpoint:
        return endpoint_of(
            self.url,
            user=self.user,
            password=self.password,
            connect_timeout_s=self.connect_timeout_s,
            reply_timeout_s=self.statement_timeout_s,
            lock_timeout_s=self.lock_timeout_s,
        )
