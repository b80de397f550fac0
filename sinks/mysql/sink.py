"""The sink for MySQL and MariaDB that users configure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from typing_extensions import override

from onceflow.clients.mysql.endpoint import MySQLEndpoint, endpoint_of
from onceflow.core.argument_types import check_fields
from onceflow.core.setting_values import accept_durations
from onceflow.core.spi.options import document_options, option
from onceflow.sinks.mysql.dialect import MYSQL
from onceflow.sinks.sql.dialect import Dialect
from onceflow.sinks.sql.sink import SqlSink


@document_options
@accept_durations
@check_fields
@dataclass(frozen=True, kw_only=True, repr=False)
class MySQLSink(SqlSink):
    """Writes every row to its table in MySQL or MariaDB; each takes effect exactly once.

    Rows are kept invisible from their barrier on and committed once the checkpoint is decided: in a
    prepared XA transaction of the server, which needs MySQL 8.0.29 or MariaDB 10.6, or in
    checkpoint storage.
    """

    dialect: ClassVar[Dialect] = MYSQL

    url: str = field(
        kw_only=False,
        metadata=option(
            "`mysql://user:password@host:3306/database?ssl_mode=required`, or with `mariadb`, or"
            " SQLAlchemy's `mysql+pymysql://…`, or JDBC's `jdbc:mysql://…` and `jdbc:mariadb://…`",
            spark="url",
            secret=True,
        ),
    )
    table: str = field(
        metadata=option(
            "The table, `database.table` or `table`, with upper and lower case exactly as in the"
            " database",
            spark="dbtable",
            aliases=("table",),
        )
    )
    ledger_schema: str | None = field(
        default=None,
        metadata=option(
            "Database of onceflow's own tables, created if it is missing. Default: that of the url",
            spark="ledgerSchema",
        ),
    )

    @property
    @override
    def endpoint(self) -> MySQLEndpoint:
        return endpoint_of(self, lock_timeout_s=self.lock_timeout_s)

    @override
    def _ledger_schema(self) -> str:
        return self.ledger_schema or self.endpoint.database
