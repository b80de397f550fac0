"""The way from messages of pgoutput to changes of one table, transaction by transaction. No I/O.

A transaction is passed on as a whole, when its commit has come. Only a transaction with more than
`cut_changes` changes is passed on in parts. `take` returns changes, and `position` is the position
after exactly these. After a restart from a cut, the changes that were returned before are skipped:
the server sends a transaction's changes in the same order each time.

    insert                  c
    update                  u; d of the old key first, if the update changed the key
    delete                  d
    truncate                refused: it changes no single row
    message, origin, type   ignored

At a change of the table's columns the reader stops: `stop` holds the error, and no later message is
taken in. The position is then before the first transaction with the new columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

from typing_extensions import assert_never

from onceflow.clients.postgres import pgoutput
from onceflow.clients.postgres.binary_rows import BinaryColumn, encode_tuple, split_tuples
from onceflow.clients.postgres.catalog import identifier
from onceflow.clients.postgres.pgoutput import UNCHANGED, Row, Value
from onceflow.clients.postgres.replication import to_unix_ms
from onceflow.core.errors import BadRecord, OffsetOutOfRange
from onceflow.sources.postgres.keys import key_of
from onceflow.sources.postgres.position import Cut, SlotPosition
from onceflow.sources.postgres.table import FULL, SourceTable
from onceflow.sources.postgres.text_values import Encode, binary_encoder

INSERT, UPDATE, DELETE = "c", "u", "d"

_PLAIN_MARKS = (
    (b"I", b"N", INSERT),
    (b"U", b"N", UPDATE),
    (b"D", b"K", DELETE),
    (b"D", b"O", DELETE),
)
"""The kinds of messages that are one change with one row, and the marks of their rows."""
_ROW_START = 6
"""The index of the row in such a message, after its kind, the table's OID and the mark."""
_ROW_PREFIX = bytes(_ROW_START)


@dataclass(frozen=True, slots=True)
class ChangedRows:
    """Changes in commit order: an operation for each, and the values of their rows."""

    operations: Sequence[str]
    rows: Sequence[Sequence[Value]]
    """The values of each row; empty if `columns` has the values."""
    columns: Sequence[BinaryColumn] = ()
    """The values of each column, if all of them are binary."""
    times: Sequence[tuple[int, int]] = ()
    """The times of commits: (milliseconds since 1970, number of changes)."""


class ChangeReader:
    """The changes of one table, from the messages of its slot."""

    def __init__(self, table: SourceTable, position: SlotPosition, *, cut_changes: int) -> None:
        self._table = table
        self.position = position
        """The position after the changes that `take` has returned."""
        self._next = position
        """The position after all transactions that ended."""
        self._cut_changes = cut_changes
        self._operations: list[str] = []
        self._rows: list[list[Value] | bytes] = []
        """The values of rows, or the messages of plain changes, which `take` reads together."""
        oid = table.oid.to_bytes(4, "big")
        self._plain_starts = {kind + oid + mark: op for kind, mark, op in _PLAIN_MARKS}
        self._plain: Mapping[bytes, str] = {}
        """The operation by the first bytes of a message, while plain changes are passed on as they
        are."""
        self._complete = 0
        """The number of changes of transactions that ended."""
        self._times: list[tuple[int, int]] = []
        self._timed = 0
        """The number of changes that `_times` counts."""
        self._begin: pgoutput.TransactionBegin | None = None
        self._changes = 0
        """The number of the open transaction's messages about the table."""
        self._columns: list[int] | None = None
        """The index of each column in the relation's rows; None before the first relation."""
        self._relation_columns = 0
        self._encoders: list[Encode] = [
            str.encode if column.is_text_form else binary_encoder(column.source)
            for column in table.columns
        ]
        self.stop: BadRecord | None = None
        """The reason why no later message is taken in, or None."""

    @property
    def is_inside(self) -> bool:
        """True if a transaction has begun and not ended."""
        return self._begin is not None

    @property
    def ready_count(self) -> int:
        """The number of changes that `take` would return."""
        return len(self._operations) if self._is_large and not self.stop else self._complete

    def add_message(self, data: bytes) -> None:
        """Take in the next message of pgoutput. Raises the errors of `add`."""
        operation = self._plain.get(data[:_ROW_START])
        if operation is None:
            self.add(pgoutput.decode(data))
            return
        self._changes += 1
        self._operations.append(operation)
        self._rows.append(data)

    def add(self, message: pgoutput.Decoded | None) -> None:
        """Take in the next message.

        Raises:
            BadRecord: A change cannot be passed on exactly.
            OffsetOutOfRange: The rest of a cut transaction is gone.
        """
        if self.stop is not None:
            return
        match message:
            case pgoutput.Insert() | pgoutput.Update() | pgoutput.Delete():
                if message.relation == self._table.oid:
                    self._add_change(message)
            case pgoutput.TransactionBegin():
                self._start(message)
            case pgoutput.TransactionCommit():
                self._end(message)
            case pgoutput.Relation():
                self._meet_relation(message)
            case pgoutput.Truncate():
                if self._table.oid in message.relations:
                    self._meet_truncate()
            case pgoutput.TransactionOrigin() | pgoutput.Type() | pgoutput.Message() | None:
                pass
            case _:
                assert_never(message)

    def advance(self, lsn: int, as_of_ms: int) -> None:
        """Move the position to `lsn`, up to which the server has sent every transaction.

        `as_of_ms` is the server's time when it said so.
        """
        if self.is_inside or self.stop is not None or lsn <= self._next.lsn:
            return
        cut = self._next.cut
        if cut is not None:
            if lsn > cut.commit_lsn:
                raise self._missing_cut(cut)
            return
        self._next = self._without_passed_copy(replace(self._next, lsn=lsn, as_of_ms=as_of_ms))
        if not self._operations:
            self.position = self._next

    def take(self) -> ChangedRows:
        """Return the changes of all transactions that ended, and a large one's so far.

        Raises:
            BadRecord: A change cannot be passed on exactly. It stays to be taken.
        """
        count = self.ready_count
        if self._begin is not None and count > self._complete:
            self._add_time(to_unix_ms(self._begin.committed_us))
        taken = self._read_changes(self._operations[:count], self._rows[:count])
        self._times.clear()
        self._timed = 0
        del self._operations[:count], self._rows[:count]
        self._complete = 0
        self.position = self._next
        if self._begin is not None and self._is_large and not self._operations:
            known = 0 if self._next.cut is None else self._next.cut.changes
            cut = Cut(self._begin.commit_lsn, max(known, self._changes))
            self.position = replace(self._next, cut=cut)
        return taken

    def _add_time(self, committed_ms: int) -> None:
        if count := len(self._operations) - self._timed:
            self._times.append((committed_ms, count))
            self._timed += count

    @property
    def _is_large(self) -> bool:
        return self._changes > self._cut_changes

    def _start(self, begin: pgoutput.TransactionBegin) -> None:
        cut = self._next.cut
        if cut is not None and begin.commit_lsn > cut.commit_lsn:
            raise self._missing_cut(cut)
        self._begin, self._changes = begin, 0
        self._choose_plain()

    def _choose_plain(self) -> None:
        """Pass on plain changes as they are, if no change of the transaction must be left out."""
        begin, cut, copied = self._begin, self._next.cut, self._next.table.copied
        is_plain = (
            begin is not None
            and self._columns is not None
            and self.stop is None
            and not self._table.is_sent_as_text
            and (cut is None or cut.commit_lsn != begin.commit_lsn)
            and (copied is None or not copied.may_contain(begin.commit_lsn))
        )
        self._plain = self._plain_starts if is_plain else {}

    def _read_changes(
        self, operations: Sequence[str], rows: Sequence[list[Value] | bytes]
    ) -> ChangedRows:
        """Return the changes by columns if there are messages among `rows`, otherwise by rows."""
        if any(isinstance(row, bytes) for row in rows) and self._columns is not None:
            messages = [row if isinstance(row, bytes) else self._encode(row) for row in rows]
            if None not in messages:
                columns = split_tuples(
                    cast("list[bytes]", messages), _ROW_START, self._relation_columns, self._columns
                )
                if columns is not None:
                    return ChangedRows(operations, (), columns, tuple(self._times))
        return ChangedRows(
            operations, [self._read_row(row) for row in rows], times=tuple(self._times)
        )

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
            return self._pick(change.key or change.old or ())
        assert isinstance(change, pgoutput.Insert | pgoutput.Update), change
        values = self._pick(change.new)
        self._require_sent(values)
        return values

    def _missing_cut(self, cut: Cut) -> OffsetOutOfRange:
        return OffsetOutOfRange(
            f"slot {self._next.slot}: a transaction of which {cut.changes} changes were read is not"
            " sent again: the publication was changed or the slot was made anew."
            f" {self._next.copy_anew}"
        )

    def _end(self, commit: pgoutput.TransactionCommit) -> None:
        cut, begin = self._next.cut, self._begin
        if cut is not None and begin is not None and begin.commit_lsn == cut.commit_lsn:
            cut = None
        as_of_ms = to_unix_ms(commit.committed_us)
        self._next = self._without_passed_copy(
            replace(self._next, lsn=commit.end_lsn, cut=cut, as_of_ms=as_of_ms)
        )
        self._add_time(as_of_ms)
        self._begin, self._changes, self._plain = None, 0, {}
        self._complete = len(self._operations)
        if not self._operations:
            self.position = self._next

    def _without_passed_copy(self, position: SlotPosition) -> SlotPosition:
        """Return `position` without the copied chunks if no later transaction is in one."""
        copied = position.table.copied
        if copied is None or copied.may_contain(position.lsn):
            return position
        return replace(position, table=replace(position.table, copied=None))

    def _add_change(self, change: pgoutput.Insert | pgoutput.Update | pgoutput.Delete) -> None:
        assert self._begin is not None
        self._changes += 1
        cut = self._next.cut
        if (
            cut is not None
            and cut.commit_lsn == self._begin.commit_lsn
            and self._changes <= cut.changes
        ):
            return
        match change:
            case pgoutput.Insert():
                self._emit(INSERT, self._pick(change.new))
            case pgoutput.Delete():
                old = self._pick(change.key or change.old or ())
                self._require_key(old)
                self._emit(DELETE, old)
            case pgoutput.Update():
                self._add_update(change)

    def _add_update(self, update: pgoutput.Update) -> None:
        old = None if update.old is None else self._pick(update.old)
        new = self._pick(update.new)
        if old is not None:
            new = [
                before if value is UNCHANGED else value
                for before, value in zip(old, new, strict=True)
            ]
        before = old if update.key is None else self._pick(update.key)
        if before is not None:
            self._require_key(before)
            if self._key(before) != self._key(new):
                self._emit(DELETE, before)
        self._emit(UPDATE, new)

    def _emit(self, operation: str, row: list[Value]) -> None:
        """Queue a change, unless the first copy contains it."""
        copied, begin = self._next.table.copied, self._begin
        assert begin is not None
        if copied is not None and copied.may_contain(begin.commit_lsn):
            key = key_of(self._table, row) if self._table.has_chunks else None
            if copied.contains(begin.xid, key):
                return
        if operation != DELETE:
            self._require_sent(row)
        self._operations.append(operation)
        self._rows.append(row)

    def _require_key(self, old: Sequence[Value]) -> None:
        """Raise BadRecord if the server sent another key than the table's: a partition's own."""
        if self._table.identity != FULL and None in self._key(old):
            raise BadRecord(
                f"a change of table {self._table.name} does not have the key"
                f" {', '.join(self._table.key)} of its old row: a partition has another replica"
                f" identity. Give all partitions the same one. {self._next.copy_anew}"
            )

    def _require_sent(self, row: Sequence[Value]) -> None:
        for column, value in zip(self._table.columns, row, strict=True):
            if value is UNCHANGED:
                table = identifier(self._table.name)
                raise BadRecord(
                    f"an update of table {self._table.name} left the large value of column"
                    f" {column.name!r} as it was, and Postgres does not send such values under the"
                    f" table's replica identity. The row has the key {self._describe_key(row)}. Run"
                    f" ALTER TABLE {table} REPLICA IDENTITY FULL. {self._next.copy_anew}"
                )

    def _describe_key(self, row: Sequence[Value]) -> str:
        return repr(self._key(row))

    def _key(self, row: Sequence[Value]) -> tuple[Value, ...]:
        names = [column.name for column in self._table.columns]
        return tuple(row[names.index(name)] for name in self._table.key)

    def _pick(self, row: Row) -> list[Value]:
        """Return the values of the table's columns, in binary format or as the bytes of texts."""
        if self._columns is None:
            raise BadRecord(f"a change of {self._table.name} came before its columns")
        if len(row) != self._relation_columns:
            raise BadRecord(
                f"a change of {self._table.name} has {len(row)} columns, and the table had"
                f" {self._relation_columns}"
            )
        picked = [row[at] for at in self._columns]
        if not self._table.is_sent_as_text:
            return picked
        return [
            encode(value) if isinstance(value, str) else value
            for value, encode in zip(picked, self._encoders, strict=True)
        ]

    def _meet_relation(self, relation: pgoutput.Relation) -> None:
        """Find the table's columns in the rows that follow, or stop if they were changed."""
        self._find_columns(relation)
        self._choose_plain()

    def _find_columns(self, relation: pgoutput.Relation) -> None:
        if relation.number != self._table.oid:
            if (relation.schema, relation.name) == (self._table.name.schema, self._table.name.name):
                self.stop = self._refuse_schema("was dropped and created again")
            return
        present = {column.name: at for at, column in enumerate(relation.columns)}
        indexes: list[int] = []
        for column in self._table.columns:
            at = present.pop(column.name, None)
            if at is None:
                self.stop = self._refuse_schema(f"has no column {column.name!r}")
                return
            if relation.columns[at].type_number != column.type_number:
                self.stop = self._refuse_schema(f"has column {column.name!r} of another type")
                return
            indexes.append(at)
        key = {column.name for column in relation.columns if column.is_key}
        # The server sends the key of an old row alone, and only if it changes.
        if relation.identity != FULL and key != set(self._table.key):
            self.stop = self._refuse_schema("has another replica identity")
            return
        added = sorted(set(present) - self._table.ignored)
        if self._table.reads_all and added:
            self.stop = self._refuse_schema(f"has a new column {added[0]!r}")
            return
        if (indexes, len(relation.columns)) != (self._columns, self._relation_columns):
            # The queued messages have the columns of before.
            self._rows = [self._read_row(row) for row in self._rows]
        self._columns = indexes
        self._relation_columns = len(relation.columns)

    def _refuse_schema(self, what: str) -> BadRecord:
        return BadRecord(
            f"the columns of table {self._table.name} were changed: the next change comes from a"
            f" table that {what}. Every change before it is done. Change the target alike, and"
            " start the job again: it reads on with the table's present columns, or with those in"
            " schema=. If that start ends with this error, too, the job was behind when the columns"
            f" were changed, and cannot read the changes from before. Then: {self._next.copy_anew}"
        )

    def _meet_truncate(self) -> None:
        begin, copied = self._begin, self._next.table.copied
        assert begin is not None
        if (
            copied is not None
            and copied.may_contain(begin.commit_lsn)
            and copied.contains_everywhere(begin.xid)
        ):
            return
        raise BadRecord(
            f"table {self._table.name} was truncated, and only changes of single rows can be read."
            f" {self._next.copy_anew}"
        )
