"""The options of a source of Postgres changes, as users give them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from onceflow.clients.postgres.connection import PostgresEndpoint
from onceflow.clients.sql.session import DatabaseAccess
from onceflow.core.arrow.schema_text import SchemaLike
from onceflow.core.spi.options import COUNT, DURATION, JSON_VALUE, NAMES, choice, option
from onceflow.sources.postgres.metadata import Metadata
from onceflow.sources.postgres.table import SourceTable


class FirstCopy(Enum):
    """The choice whether the rows are read that a table has before its first change."""

    ALL = "all"
    """The rows are read first, then the changes."""
    NONE = "none"
    """Only changes are read: those after the slot was created."""
    ONLY = "only"
    """Only the rows are read, all as of one moment. Then the source ends."""


class SchemaChange(Enum):
    """The choice what happens when changes have a column that is not read."""

    STOP = "stop"
    """The job stops before the first such change."""
    IGNORE = "ignore"
    """The column is left out."""


@dataclass(frozen=True, kw_only=True, repr=False)
class ChangesOptions(DatabaseAccess):
    """The options of the source."""

    table: str | None = field(
        default=None,
        metadata=option(
            "Name of the one table to read: `table` or `schema.table`; upper and lower case are"
            " kept. A part with a dot in it is in double quotes",
            spark="table",
            aliases=("dbtable",),
        ),
    )
    tables: Sequence[str] | None = field(
        default=None,
        metadata=option(
            "Names of the tables to read from one slot. The source has an output for each, with the"
            " name as it is given here. A later start may name more tables, which are then copied,"
            " or fewer. Default without `table`: all tables of `publication`, which must exist; an"
            " output has the name `schema.table`",
            NAMES,
        ),
    )
    slot: str | None = field(
        default=None,
        metadata=option(
            "Name of the replication slot. It is created if there is none. Default:"
            " `onceflow_<job>_<uid>`",
            spark="slot",
        ),
    )
    publication: str | None = field(
        default=None,
        metadata=option(
            "Name of the publication. It is created if there is none, which needs the tables'"
            " owner. Default: the name of the slot. The source adds tables to and removes them from"
            " a publication of this name only",
            spark="publication",
        ),
    )
    first_copy: str | FirstCopy = field(
        default=FirstCopy.ALL.value,
        metadata=option(
            "`all` reads the rows that the table has, and then its changes. `none` reads only the"
            " changes after the slot was created. `only` reads only the rows, all as of one moment,"
            " and ends; it uses no slot and no publication",
            choice(FirstCopy),
            spark="firstCopy",
        ),
    )
    schema: SchemaLike | None = field(
        default=None,
        metadata=option(
            "Columns to read, with their types: DDL as in `id BIGINT, amount DECIMAL(38, 9)`, an"
            " Arrow schema, or a mapping from name to type. Default: all columns of the table. With"
            " `tables`, see `schemas`",
            spark="schema",
        ),
    )
    on_schema_change: str | SchemaChange | None = field(
        default=None,
        metadata=option(
            "What happens when changes have a column that is not read. `stop`: the job stops before"
            " it. `ignore`: the column is left out; it needs `schema`, or `schemas` for each table."
            " Default: `ignore` for tables whose columns are named, `stop` for others. A column"
            " that is dropped, renamed or gets another type always stops the job",
            choice(SchemaChange),
            spark="onSchemaChange",
        ),
    )
    schemas: Mapping[str, object] | None = field(
        default=None,
        metadata=option(
            "Columns to read of some of the `tables`: a mapping from the name of an output to what"
            " `schema` takes",
            JSON_VALUE,
        ),
    )
    metadata: Sequence[str] = field(
        default=(),
        metadata=option(
            "Metadata columns to add behind `_op`: `_lsn` (LSN of the commit), `_committed_at`,"
            " `_xid`, `_table` (`schema.table`), `_unchanged` (the columns that an update left as"
            " they were and did not send). All but `_table` are null in copied rows",
            NAMES,
            spark="metadata",
        ),
    )
    copy_parallelism: int = field(
        default=2,
        metadata=option(
            "Number of connections that read the first copy: tables, and ranges of a large table's"
            " key, side by side",
            COUNT,
            spark="copyParallelism",
        ),
    )
    chunk_rows: int = field(
        default=100_000,
        metadata=option(
            "Number of rows that one transaction of the first copy reads",
            COUNT,
            spark="chunkRows",
        ),
    )
    batch_rows: int = field(
        default=10_000, metadata=option("Maximum number of rows in a batch", COUNT)
    )
    transaction_rows_max: int = field(
        default=100_000,
        metadata=option(
            "Number of changes up to which a transaction is passed on as a whole, so that no"
            " checkpoint cuts it. They are kept in memory",
            COUNT,
            spark="transactionRowsMax",
        ),
    )
    status_interval: float = field(
        default=10.0,
        metadata=option(
            "How often the server is told the position; it must be shorter than"
            " `wal_sender_timeout`",
            DURATION,
            spark="statusInterval",
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderSettings:
    """The settings of a reader, in their final form."""

    endpoint: PostgresEndpoint
    tables: tuple[SourceTable, ...]
    outputs: Mapping[int, str]
    """The name of the output of each table, by OID; empty if the source has one stream."""
    publication: str
    metadata: tuple[Metadata, ...]
    """The chosen metadata columns."""
    follows: bool
    """False if the source ends after the first copy."""
    copies_rows: bool
    """False if a table that is added later is read from its next change on."""
    copy_parallelism: int
    chunk_rows: int
    batch_rows: int
    transaction_rows_max: int
    status_interval_s: float
    connect_timeout_s: float
    silence_max_s: float
    """The time after which a server that has sent nothing counts as lost."""
