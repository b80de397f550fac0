"""The options of `onceflow-postgres-changes`.

Most of them are those of `PostgresChanges`, which are declared in sources/postgres/settings.py, as
fields with `option(…, spark="name")`. The options of the connection are declared in
clients/sql/session.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from typing_extensions import override

from onceflow.connectors.spark.options.option_table import OptionTable
from onceflow.core.errors import ConfigError
from onceflow.core.spi.options import COUNT, option, option_of
from onceflow.core.storage.filesystems.file_location import FileLocation
from onceflow.sources import PostgresChanges

_ROWS_MAX = 100_000
_POLLED_ROWS_MAX = 10_000


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class ChangesRead(PostgresChanges):
    """The changes of one table, and the directory for micro-batches that are not committed yet."""

    table: str = field(metadata=option_of(PostgresChanges, "table"))
    slot: str = field(metadata=option_of(PostgresChanges, "slot"))
    changes_location: str = field(
        metadata=option(
            "Directory in which each micro-batch waits until it is committed: a path or URL that"
            " driver and executors share. Queries may share one. Keep it from run to run",
            spark="changesLocation",
        )
    )
    trigger_rows_max: int = field(
        default=_ROWS_MAX,
        metadata=option(
            "Number of rows after which a micro-batch ends, with the transaction that reaches it",
            COUNT,
            spark="maxRowsPerTrigger",
        ),
    )

    @override
    def __post_init__(self) -> None:
        if not self.table:
            raise ConfigError("table= is empty: name the table to read")
        if not self.slot:
            raise ConfigError("slot= is empty: name the replication slot of this query")
        if not self.follows:
            raise ConfigError(
                "first_copy='only' has no changes to follow: read the rows by"
                ' spark.read.format("onceflow-postgres")'
            )
        object.__setattr__(self, "batch_rows", min(_POLLED_ROWS_MAX, self.trigger_rows_max))
        super().__post_init__()

    @property
    def location(self) -> FileLocation:
        """The directory for the files of micro-batches that are not committed yet.

        Raises:
            ConfigError: `changesLocation` is not a path or a supported URL.
        """
        return FileLocation.parse(self.changes_location, publish="auto", options={})


_ONE_TABLE = (
    "a stream of Spark has one schema, so it reads one table: name it by table, and start a query"
    " for each other table, with a slot of its own"
)
_OF_QUERIES: Mapping[str, str] = {
    " and the table is not new in tables=": "",
    "schema= for table=, or schemas=": "schema=",
    "schema= or schemas=": "schema=",
    "start the job under another name": "start the query with another checkpointLocation",
    "Give this source another uid, or start the job as it was": "Give the query another"
    " checkpointLocation",
    "start the job from that one": "start the query from that one",
    "The job": "The query",
    "the job": "the query",
}
"""The replacements in errors, which are written for jobs and for sources of several tables."""

CHANGES_READ = OptionTable(
    format="onceflow-postgres-changes",
    direction="readStream",
    description=ChangesRead,
    helps={
        "slot": "Name of the replication slot. It is created if there is none. Each query needs its"
        " own. The server keeps its WAL for the slot until the query has committed the changes, so"
        " drop the slot when the query is given up",
        "publication": "Name of the publication. It is created if there is none, which needs the"
        " table's owner. Default: the name of the slot",
        "first_copy": "`all` reads the rows that the table has, and then its changes. `none` reads"
        " only the changes after the slot was created",
        "schema": "Columns to read, with their types: DDL as in `id BIGINT, amount DECIMAL(38, 9)`."
        " Columns that are added to the table later are then not read. Default: all columns of the"
        " table; the query ends when one is added, and its next start reads it, too",
        "on_schema_change": "What happens when changes have a column that is not read. `stop`: the"
        " query ends before it. `ignore`: the column is left out; it needs `schema`. Default:"
        " `ignore` with `schema`, otherwise `stop`. A column that is dropped, renamed or gets"
        " another type always ends the query",
        "transaction_rows_max": "Number of changes up to which a transaction is in one micro-batch"
        " as a whole. They are kept in memory",
        "connect_timeout_s": "Timeout of one connection attempt, and how long a query waits for a"
        " slot that is in use",
    },
    # The option of the sink, which errors name.
    named={"unchanged_column": "unchangedColumn"},
    instead=_OF_QUERIES,
    refused={
        "tables": _ONE_TABLE,
        "schemas": _ONE_TABLE,
        "batchRows": "maxRowsPerTrigger limits a micro-batch",
        "query": "name the table by table; rows of a query have no changes",
        "startingOffsets": "firstCopy says where a new query begins",
    },
)
