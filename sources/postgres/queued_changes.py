"""The queue of one table's changes, and the decoding of their messages. No I/O.

A plain message is one change with one row, whose values need no check. Plain messages are queued
undecoded. `read` decodes them together, column by column.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias, cast

import numpy as np

from onceflow.clients.postgres import pgoutput
from onceflow.clients.postgres.binary_rows import BinaryColumn, encode_tuple, split_tuples
from onceflow.clients.postgres.catalog import identifier
from onceflow.clients.postgres.pgoutput import UNCHANGED, Row, Value
from onceflow.core.errors import BadRecord
from onceflow.sources.postgres.first_copy import CopyFilter
from onceflow.sources.postgres.keys import key_of
from onceflow.sources.postgres.position import TablePosition
from onceflow.sources.postgres.table import FULL, SourceTable
from onceflow.sources.postgres.text_values import Encode, binary_encoder

CountedTransactions: TypeAlias = Sequence[tuple[pgoutput.TransactionBegin, int]]
"""Transactions in commit order, each with the number of its changes."""

INSERT, UPDATE, DELETE = "c", "u", "d"
ROW_START = 6
"""The index of the row in a plain message, after its kind, the table's OID and the mark."""
_ROW_PREFIX = bytes(ROW_START)
_PLAIN_MARKS = (
    (b"I", b"N", INSERT),
    (b"U", b"N", UPDATE),
    (b"D", b"K", DELETE),
    (b"D", b"O", DELETE),
)
"""The kinds of plain messages, and the marks of their rows."""


@dataclass(frozen=True, slots=True)
class ChangedRows:
    """Changes of a table in commit order: an operation for each, and the values of their rows."""

    table: int
    """The OID of the table."""
    operations: Sequence[str]
    rows: Sequence[Sequence[Value]]
    """The values of each row; empty if `columns` has the values."""
    columns: Sequence[BinaryColumn] = ()
    """The values of each column, if all of them are binary."""
    transactions: CountedTransactions = ()
    """The transactions of the changes; empty if no metadata column needs them."""
    unchanged: Sequence[Sequence[str]] = ()
    """The columns of each row that the server did not send; empty if it sent all values."""


class QueuedChanges:
    """A queue of one table's changes that the reader has not returned yet."""

    def __init__(
        self,
        table: SourceTable,
        position: TablePosition,
        *,
        are_sent_as_text: bool,
        names_unchanged: bool,
        copy_anew: str,
    ) -> None:
        """Create an empty queue.

        `are_sent_as_text` is true if the stream sends values as text. `copy_anew` is an advice in
        error messages. If `names_unchanged` is false, an update without a large value is refused.
        """
        self.table = table
        self.filter = None if position.copied is None else CopyFilter(position.copied)
        """The filter of changes that the first copy contains; None after the copy's end."""
        self.ahead = position.ahead
        """The position up to which changes were returned before; None after this position."""
        self.complete = 0
        """The number of changes of transactions that ended."""
        self._names_unchanged = names_unchanged
        self._copy_anew = copy_anew
        self._operations: list[str] = []
        self._rows: list[list[Value] | bytes] = []
        """The values of rows, or plain messages."""
        self._columns: list[int] | None = None
        """The index of each column in the relation's rows; None before the first relation."""
        self._relation_columns = 0
        self._transactions: list[tuple[pgoutput.TransactionBegin, int]] = []
        """The transactions of the first `_assigned` changes."""
        self._assigned = 0
        self._encoders: Sequence[Encode] = ()
        """The conversions of texts; empty if the stream sends none."""
        if are_sent_as_text:
            self._encoders = [
                str.encode if column.is_text_form else binary_encoder(column.source)
                for column in table.columns
            ]
        oid = table.oid.to_bytes(4, "big")
        self._plain_starts = {kind + oid + mark: op for kind, mark, op in _PLAIN_MARKS}
        names = [column.name for column in table.columns]
        self._key_indexes = [names.index(name) for name in table.key or names]

    @property
    def count(self) -> int:
        """The number of changes."""
        return len(self._operations)

    @property
    def plain_starts(self) -> Mapping[bytes, str]:
        """The operation by the first bytes of a plain message; empty before the first relation."""
        is_plain = self._columns is not None and not self._encoders
        return self._plain_starts if is_plain else {}

    def passes_all(self, commit_lsn: int) -> bool:
        """Return True if no change of a transaction with this commit LSN must be skipped."""
        ahead = self.ahead
        if ahead is not None and ahead.includes(commit_lsn, 1):
            return False
        return self.filter is None or not self.filter.may_contain(commit_lsn)

    def pass_position(self, lsn: int) -> bool:
        """Drop `filter` and `ahead` if they end before `lsn`. Return True if one is left."""
        if self.filter is not None and not self.filter.may_contain(lsn):
            self.filter = None
        if self.ahead is not None and self.ahead.order <= (lsn, 0):
            self.ahead = None
        return self.filter is not None or self.ahead is not None

    def contains(self, xid: int, row: Sequence[Value]) -> bool:
        """Return True if the first copy contains a change of `row` by transaction `xid`."""
        assert self.filter is not None
        if not self.filter.needs_key:
            return self.filter.contains(xid, None)
        return self.filter.contains(xid, key_of(self.table, row, copy_anew=self._copy_anew))

    def add(self, operation: str, row: list[Value] | bytes) -> None:
        """Queue a change: the values of its row, or a plain message.

        Raises:
            BadRecord: The server did not send a large value of the row.
        """
        if operation != DELETE and not isinstance(row, bytes):
            self._require_sent(row)
        self._operations.append(operation)
        self._rows.append(row)

    def assign(self, transaction: pgoutput.TransactionBegin) -> None:
        """Record that the changes since the last call belong to `transaction`."""
        count = len(self._operations) - self._assigned
        if count:
            self._transactions.append((transaction, count))
            self._assigned += count

    def read(self, count: int) -> ChangedRows:
        """Return the first `count` changes, which stay queued.

        Raises:
            BadRecord: A change cannot be passed on exactly.
        """
        changed = self._read_changes(count)
        if not self._transactions:
            return changed
        return replace(changed, transactions=_divide(self._transactions, count)[0])

    def _read_changes(self, count: int) -> ChangedRows:
        operations, rows = self._operations[:count], self._rows[:count]
        if any(isinstance(row, bytes) for row in rows) and self._columns is not None:
            messages = [row if isinstance(row, bytes) else self._encode(row) for row in rows]
            if None not in messages:
                columns = split_tuples(
                    cast("list[bytes]", messages), ROW_START, self._relation_columns, self._columns
                )
                if columns is not None and self._have_keys(operations, columns):
                    return ChangedRows(self.table.oid, operations, (), columns)
        values = [self._read_row(row) for row in rows]
        unchanged: list[Sequence[str]] = [()] * len(values)
        for at, row in enumerate(values):
            if UNCHANGED in row:
                unchanged[at] = self._name_unchanged(row)
                values[at] = [None if value is UNCHANGED else value for value in row]
        return ChangedRows(
            self.table.oid, operations, values, unchanged=unchanged if any(unchanged) else ()
        )

    def _name_unchanged(self, row: Sequence[Value]) -> Sequence[str]:
        return [
            column.name
            for column, value in zip(self.table.columns, row, strict=True)
            if value is UNCHANGED
        ]

    def drop(self, count: int) -> None:
        """Forget the first `count` changes."""
        del self._operations[:count], self._rows[:count]
        if self._transactions:
            self._transactions = list(_divide(self._transactions, count)[1])
            self._assigned -= count
        self.complete = 0

    def key(self, row: Sequence[Value]) -> tuple[Value, ...]:
        """Return the values of the key in `row`; all of its values if the table has no key."""
        return tuple(row[at] for at in self._key_indexes)

    def fill_key(self, new: list[Value], old: Sequence[Value]) -> None:
        """Copy the values of the key that the server did not send from `old` to `new`."""
        for at in self._key_indexes:
            if new[at] is UNCHANGED:
                new[at] = old[at]

    def require_whole(self, row: Sequence[Value]) -> None:
        """Raise BadRecord if `row`, whose key was changed, lacks a large value.

        The target has no row with the new key that could keep the value.
        """
        if names := self._name_unchanged(row):
            raise BadRecord(
                f"an update of table {self.table.name} changed the key of a row to"
                f" {self.key(row)!r} and left the large value of column {names[0]!r} as it was."
                " Postgres does not send the value under the table's replica identity, and the"
                " target has no row with the new key. Run ALTER TABLE"
                f" {identifier(self.table.name)} REPLICA IDENTITY FULL. {self._copy_anew}"
            )

    def pick(self, row: Row) -> list[Value]:
        """Return the values of the columns that are read, in binary format or as bytes of text."""
        name = self.table.name
        if self._columns is None:
            raise BadRecord(f"a change of {name} came before its columns")
        if len(row) != self._relation_columns:
            raise BadRecord(
                f"a change of {name} has {len(row)} columns, and the table had"
                f" {self._relation_columns}"
            )
        picked = [row[at] for at in self._columns]
        if not self._encoders:
            return picked
        return [
            encode(value) if isinstance(value, str) else value
            for value, encode in zip(picked, self._encoders, strict=True)
        ]

    def find_difference(self, relation: pgoutput.Relation) -> str | None:
        """Read the order of the columns in later rows from `relation`.

        Return the first difference from the described table, as a text for users, or None.
        """
        present = {column.name: at for at, column in enumerate(relation.columns)}
        indexes: list[int] = []
        for column in self.table.columns:
            at = present.pop(column.name, None)
            if at is None:
                return f"has no column {column.name!r}"
            if relation.columns[at].type_number != column.type_number:
                return f"has column {column.name!r} of another type"
            indexes.append(at)
        key = {column.name for column in relation.columns if column.is_key}
        # The server sends the key of an old row alone, and only if it changes.
        if relation.identity != FULL and key != set(self.table.key):
            return "has another replica identity"
        added = sorted(set(present) - self.table.ignored_columns)
        if self.table.stops_at_new_columns and added:
            return f"has a new column {added[0]!r}"
        if (indexes, len(relation.columns)) != (self._columns, self._relation_columns):
            # The queued messages have the columns of before.
            self._rows = [self._read_row(row) for row in self._rows]
        self._columns = indexes
        self._relation_columns = len(relation.columns)
        return None

    def require_key(self, old: Sequence[Value]) -> None:
        """Raise BadRecord if `old` lacks the table's key.

        The server sends other columns if a partition has another replica identity than its table.
        """
        table = self.table
        if table.identity != FULL and None in self.key(old):
            raise BadRecord(
                f"a change of table {table.name} does not have the key {', '.join(table.key)} of"
                " its old row: a partition has another replica identity. Give all partitions the"
                f" same one. {self._copy_anew}"
            )

    def _have_keys(self, operations: Sequence[str], columns: Sequence[BinaryColumn]) -> bool:
        """Return True if each deleted row has all values of the key."""
        if self.table.identity == FULL or DELETE not in operations:
            return True
        are_deleted = np.array([operation == DELETE for operation in operations])
        nulls = [columns[at].nulls for at in self._key_indexes]
        return not any((mask & are_deleted).any() for mask in nulls if mask is not None)

    def _encode(self, row: Sequence[Value]) -> bytes | None:
        """Return a message with the values of `row`, or None if they are not all binary."""
        assert self._columns is not None
        values: list[bytes | None] = [None] * self._relation_columns
        for at, value in zip(self._columns, row, strict=True):
            if not isinstance(value, bytes | None):
                return None
            values[at] = value
        return _ROW_PREFIX + encode_tuple(values)

    def _read_row(self, row: list[Value] | bytes) -> list[Value]:
        if not isinstance(row, bytes):
            return row
        change = pgoutput.decode(row)
        if isinstance(change, pgoutput.Delete):
            old = self.pick(change.key or change.old or ())
            self.require_key(old)
            return old
        assert isinstance(change, pgoutput.Insert | pgoutput.Update), change
        values = self.pick(change.new)
        self._require_sent(values)
        return values

    def _require_sent(self, row: Sequence[Value]) -> None:
        table = self.table
        if self._names_unchanged:
            return
        for column, value in zip(table.columns, row, strict=True):
            if value is UNCHANGED:
                raise BadRecord(
                    f"an update of table {table.name} left the large value of column"
                    f" {column.name!r} as it was, and Postgres does not send such values under the"
                    f" table's replica identity. The row has the key {self.key(row)!r}. If the sink"
                    " has the option unchanged_column, start the job again with '_unchanged' in"
                    " metadata= and unchanged_column='_unchanged': the target keeps the value."
                    f" Otherwise run ALTER TABLE {identifier(table.name)} REPLICA IDENTITY FULL."
                    f" {self._copy_anew}"
                )


def _divide(
    transactions: CountedTransactions, count: int
) -> tuple[CountedTransactions, CountedTransactions]:
    """Return the transactions of the first `count` changes, and those of the later changes."""
    first: list[tuple[pgoutput.TransactionBegin, int]] = []
    later: list[tuple[pgoutput.TransactionBegin, int]] = []
    for transaction, changes in transactions:
        taken = min(changes, count)
        count -= taken
        if taken:
            first.append((transaction, taken))
        if taken < changes:
            later.append((transaction, changes - taken))
    return first, later
