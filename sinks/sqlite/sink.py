"""The sink for SQLite files that users configure."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

import pyarrow as pa
from typing_extensions import override

from onceflow.clients.sqlite.connection import SQLiteEndpoint, endpoint_of
from onceflow.core.argument_types import check_fields
from onceflow.core.errors import ConfigError
from onceflow.core.protocol.log.target_records import TargetRecord
from onceflow.core.setting_values import accept_durations
from onceflow.core.spi import CommitterContext
from onceflow.core.spi.options import document_options, option
from onceflow.sinks.sql.dialect import Dialect
from onceflow.sinks.sql.sink import SqlSink
from onceflow.sinks.sqlite.dialect import SQLITE

NO_TABLE = "onceflow"
"""The table name of a sink that only describes how its file is reached."""
_NOT_HERE = "A SQLite file has none"


@document_options
@accept_durations
@check_fields
@dataclass(frozen=True, kw_only=True, repr=False)
class SQLiteSink(SqlSink):
    """Writes every row to its table in a SQLite file; each takes effect exactly once.

    Rows wait in checkpoint storage and are written once the checkpoint is decided, in one
    transaction with a row that proves it. All processes of the job must see the file on a local
    disk, so they run on one machine; one transaction at a time writes to it, and readers go on
    reading. The file gets a write-ahead log, which stays when the job has ended.
    """

    dialect: ClassVar[Dialect] = SQLITE

    url: str = field(
        kw_only=False,
        metadata=option(
            "`sqlite:////absolute/path/of/the/file.db`, or the path alone. A missing file is"
            " created",
            spark="url",
            secret=True,
        ),
    )
    commit_mode: Literal["auto", "two_phase", "ledger"] = field(
        default="ledger", metadata=option("`ledger` only; `auto` is the same")
    )
    delivery: Literal["exactly_once", "at_least_once"] = field(
        default="exactly_once", metadata=option("Exactly once only")
    )
    user: str | None = field(default=None, metadata=option(_NOT_HERE))
    password: str | None = field(default=None, metadata=option(_NOT_HERE))
    ledger_schema: str | None = field(default=None, metadata=option(_NOT_HERE))
    statement_timeout_s: float = field(
        default=120.0, metadata=option("Of servers; there is none here")
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("user", "password", "ledger_schema"):
            if getattr(self, name) is not None:
                raise ConfigError(f"{name} is given, and a SQLite file has none; leave it out")
        if self.delivery != "exactly_once":
            raise ConfigError(
                f"delivery={self.delivery!r}: a writer would keep the whole file locked between "
                "its commits, so the SQLite sink is exactly once only; leave delivery out"
            )

    @override
    def validate(self, context: CommitterContext, schema: pa.Schema) -> None:
        """Check as `SqlSink` does. A file that does not exist yet is not opened."""
        if Path(self.endpoint.path).exists():
            super().validate(context, schema)
        elif not self.create:
            raise ConfigError(
                f"{self.endpoint} does not exist, so it has no table {self.table}; create it, or "
                "say create=True"
            )

    @override
    def target_record(self, context: CommitterContext) -> TargetRecord | None:
        """Read as `SqlSink` does. A file that does not exist yet records nothing."""
        if Path(self.endpoint.path).exists():
            return super().target_record(context)
        return TargetRecord(context.sink_id)

    @property
    @override
    def endpoint(self) -> SQLiteEndpoint:
        return endpoint_of(self, lock_timeout_s=self.lock_timeout_s)
