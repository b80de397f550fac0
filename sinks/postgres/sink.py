"""The sink for Postgres that users configure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from typing_extensions import override

from onceflow.clients.postgres.connection import PostgresEndpoint, endpoint_of
from onceflow.core.argument_types import check_fields
from onceflow.core.setting_values import accept_durations
from onceflow.core.spi.options import document_options, option, option_of
from onceflow.sinks.postgres.dialect import POSTGRES
from onceflow.sinks.sql.dialect import Dialect
from onceflow.sinks.sql.sink import SqlSink


@document_options
@accept_durations
@check_fields
@dataclass(frozen=True, kw_only=True, repr=False)
class PostgresSink(SqlSink):
    """Writes every row to its table in Postgres; each takes effect exactly once.

    Rows are kept invisible from their barrier on and committed once the checkpoint is decided: in a
    prepared transaction of the server, which needs `max_prepared_transactions` of at least twice
    the parallelism, or in checkpoint storage.
    """

    dialect: ClassVar[Dialect] = POSTGRES

    url: str = field(
        kw_only=False,
        metadata=option(
            "`postgresql://user:password@host:5432/database?sslmode=require` as libpq takes it, or"
            " SQLAlchemy's `postgresql+psycopg://…`, or JDBC's `jdbc:postgresql://…`",
            spark="url",
            secret=True,
        ),
    )
    ledger_schema: str = field(default="onceflow", metadata=option_of(SqlSink, "ledger_schema"))

    @property
    @override
    def endpoint(self) -> PostgresEndpoint:
        return endpoint_of(self, lock_timeout_s=self.lock_timeout_s)
