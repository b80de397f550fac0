"""The metadata columns of changes: facts about each row's transaction and table. No I/O.

For a row of the first copy, the facts about the transaction are null: the stream does not send it.

For an update, Postgres does not send a large value that the update did not change. `_unchanged`
contains the names of the columns whose values were not sent; these columns are null in the row. If
the job does not read `_unchanged`, such an update stops the job with BadRecord.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
import pyarrow as pa

from onceflow.clients.postgres.pgoutput import TransactionBegin
from onceflow.clients.postgres.replication import format_lsn, to_unix_us
from onceflow.core.arrow.exact_arrays import array_of
from onceflow.core.errors import ConfigError
from onceflow.core.setting_values import choice_of
from onceflow.sources.postgres.queued_changes import ChangedRows
from onceflow.sources.postgres.table import SourceTable, format_name


class Metadata(Enum):
    """A metadata column, by its name."""

    LSN = "_lsn"
    """The LSN of the transaction's commit record, as Postgres writes it."""
    COMMITTED_AT = "_committed_at"
    """The time of the commit."""
    XID = "_xid"
    """The transaction's id: the lower 32 bits, as `xmin` of the row shows them."""
    TABLE = "_table"
    """The table's name with its schema, as the option `tables` takes it."""
    UNCHANGED = "_unchanged"
    """The columns whose large values an update left as they were and did not send."""

    @property
    def field(self) -> pa.Field:
        """The column in the schema of the rows."""
        match self:
            case Metadata.LSN:
                return pa.field(self.value, pa.string())
            case Metadata.COMMITTED_AT:
                return pa.field(self.value, pa.timestamp("us", "UTC"))
            case Metadata.XID:
                return pa.field(self.value, pa.int64())
            case Metadata.TABLE:
                return pa.field(self.value, pa.string(), nullable=False)
            case Metadata.UNCHANGED:
                return pa.field(self.value, pa.list_(pa.string()))


def parse_metadata(names: Sequence[str]) -> tuple[Metadata, ...]:
    """Return the columns that `names` choose, in their order.

    Raises:
        ConfigError: There is no such column, or it is named twice.
    """
    chosen = tuple(choice_of(Metadata, name, setting="metadata") for name in names)
    for column in chosen:
        if chosen.count(column) > 1:
            raise ConfigError(f"metadata= names {column.value!r} twice")
    return chosen


def require_free_names(table: SourceTable, chosen: Sequence[Metadata]) -> None:
    """Raise ConfigError if a column of `table` has the name of a metadata column."""
    present = {column.name for column in table.columns}
    for column in chosen:
        if column.value in present:
            raise ConfigError(
                f"metadata= names {column.value!r}, and table {table.name} has a column of this"
                " name: remove it from metadata=, or read the table's other columns with schema="
                " or schemas="
            )


def extend_schema(schema: pa.Schema, chosen: Sequence[Metadata]) -> pa.Schema:
    """Return `schema` with the chosen columns added at the end."""
    return pa.schema([*schema, *(column.field for column in chosen)])


@dataclass(frozen=True, slots=True)
class MetadataColumns:
    """The metadata columns of one table's rows."""

    table: SourceTable
    chosen: tuple[Metadata, ...]

    def extend_copy(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return `batch`, whose rows are of the first copy, with the chosen columns."""
        if not self.chosen:
            return batch
        return self._extend(batch, (), pa.nulls(batch.num_rows, pa.int64()))

    def extend_changes(self, batch: pa.RecordBatch, changed: ChangedRows) -> pa.RecordBatch:
        """Return `batch`, the rows of `changed`, with the chosen columns added."""
        if not self.chosen:
            return batch
        transactions = changed.transactions
        counts = [count for _, count in transactions]
        assert sum(counts) == batch.num_rows, (self.table.name, batch.num_rows, counts)
        indexes = pa.array(np.repeat(np.arange(len(counts)), counts), pa.int64())
        begins = [transaction for transaction, _ in transactions]
        return self._extend(batch, begins, indexes, changed.unchanged)

    def _extend(
        self,
        batch: pa.RecordBatch,
        transactions: Sequence[TransactionBegin],
        indexes: pa.Array,
        unchanged: Sequence[Sequence[str]] = (),
    ) -> pa.RecordBatch:
        added = [
            _build_lists(unchanged, batch.num_rows)
            if column is Metadata.UNCHANGED
            else self._build(column, transactions, indexes)
            for column in self.chosen
        ]
        schema = extend_schema(batch.schema, self.chosen)
        return pa.RecordBatch.from_arrays([*batch.columns, *added], schema=schema)

    def _build(
        self, column: Metadata, transactions: Sequence[TransactionBegin], indexes: pa.Array
    ) -> pa.Array:
        """Return the values of `column`: for each row those of the transaction at its index."""
        match column:
            case Metadata.LSN:
                lsns = [format_lsn(each.commit_lsn) for each in transactions]
                values = pa.array(lsns, pa.string())
            case Metadata.COMMITTED_AT:
                times = [to_unix_us(each.committed_us) for each in transactions]
                values = pa.array(times, pa.timestamp("us", "UTC"))
            case Metadata.XID:
                values = pa.array([each.xid for each in transactions], pa.int64())
            case Metadata.TABLE:
                name = pa.scalar(format_name(self.table.name), pa.string())
                return pa.repeat(name, len(indexes))
            case Metadata.UNCHANGED:
                raise AssertionError("the rows name these columns, and not their transactions")
        return values.take(indexes)


def _build_lists(unchanged: Sequence[Sequence[str]], count: int) -> pa.Array:
    """Return the names in `unchanged` for each row, and null for a row that has all values."""
    kind = Metadata.UNCHANGED.field.type
    if not unchanged:
        return pa.nulls(count, kind)
    return array_of([list(names) or None for names in unchanged], kind)
