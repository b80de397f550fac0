"""The conversion of pgoutput messages to changes of tables, transaction by transaction. No I/O.

A transaction is returned as a whole, with its changes of all tables, after its commit message
arrived. Only a transaction with more than `cut_changes` changes is returned in parts. `take`
returns changes, and `position` is the position after exactly these changes. After a restart in the
middle of a cut transaction, the reader skips the changes that it returned before: the server sends
a transaction's changes in the same order each time.

    insert                  c
    update                  u; d of the old key first, if the update changed the key. Without a key,
                            the whole row is the key. A large value that the update did not change
                            is copied from the old row, or is not known
    delete                  d
    truncate                refused: it is not a change of single rows
    message, origin, type   ignored

If the table's columns change, the reader stops: `stop` holds the error, and later messages are
ignored. The position is then before the first transaction with the new columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from typing_extensions import assert_never

from onceflow.clients.postgres import pgoutput
from onceflow.clients.postgres.pgoutput import UNCHANGED, Value
from onceflow.clients.postgres.replication import to_unix_ms
from onceflow.core.errors import BadRecord, OffsetOutOfRange
from onceflow.sources.postgres.position import Cut, SlotPosition, StreamPosition, TablePosition
from onceflow.sources.postgres.queued_changes import (
    DELETE,
    INSERT,
    ROW_START,
    UPDATE,
    ChangedRows,
    QueuedChanges,
)
from onceflow.sources.postgres.table import SourceTable


@dataclass(frozen=True, slots=True)
class TakenChanges:
    """The changes that one call of `take` returns: an entry for each changed table."""

    tables: Sequence[ChangedRows]
    times: Sequence[tuple[int, int]] = ()
    """The times of commits: (milliseconds since 1970, number of changes)."""


class ChangeReader:
    """The changes of some tables, from the messages of their slot.

    `tables` are the tables whose changes are read. If `position` has further tables, their first
    copy is not finished. In this case the slot does not move, and each followed table has a
    position of its own, at or after that of the slot.
    """

    def __init__(
        self,
        tables: Sequence[SourceTable],
        position: SlotPosition,
        *,
        cut_changes: int,
        keeps_transactions: bool = False,
        names_unchanged: bool = False,
    ) -> None:
        known = {table.oid: table for table in position.tables}
        self.are_sent_as_text = any(table.is_sent_as_text for table in tables)
        """True if the stream must send texts: the server has one format for all tables."""
        self._tables = {
            table.oid: QueuedChanges(
                table,
                known[table.oid],
                are_sent_as_text=self.are_sent_as_text,
                names_unchanged=names_unchanged,
                copy_anew=position.copy_anew,
            )
            for table in tables
        }
        self._by_name = {(table.name.schema, table.name.name): table.oid for table in tables}
        self._base = position
        self._is_held = any(table.oid not in self._tables for table in position.tables)
        self._next = position.start
        """The position after all transactions that ended, and the returned part of the open one."""
        if self._is_held:
            followed = (known[oid].ahead or position.start for oid in self._tables)
            self._next = min(followed, key=lambda at: at.order)
        self.start = self._next
        """The position from which the slot must be read."""
        self._returned = self._next
        """The position after the changes that `take` has returned."""
        self._cut_changes = cut_changes
        self._keeps_transactions = keeps_transactions
        """True if `take` returns the transactions of the changes, too."""
        self._touched: set[int] = set()
        """The tables with changes in the open transaction."""
        self._queued = 0
        """The number of changes that `take` has not returned."""
        self._complete = 0
        """The number of changes of transactions that ended."""
        self._times: list[tuple[int, int]] = []
        self._timed = 0
        """The number of changes that `_times` counts."""
        self._as_of_ms = position.as_of_ms
        """The server's time at `_next`."""
        self._returned_as_of_ms = position.as_of_ms
        self._begin: pgoutput.TransactionBegin | None = None
        self._index = 0
        """The number of the open transaction's changes, of all tables that the slot sends."""
        self._open_queued = 0
        """The number of the open transaction's changes that were queued."""
        self._is_large = False
        """True if the open transaction is passed on in parts."""
        self._all_plain: dict[bytes, tuple[str, QueuedChanges]] = {}
        """The operation and the table by the first bytes of each plain message."""
        self._plain: Mapping[bytes, tuple[str, QueuedChanges]] = {}
        """The operation and the table by the first bytes of messages that are queued undecoded."""
        self._has_passing = True
        """True if a table may still have a filter or a position of its own."""
        self.stop: BadRecord | None = None
        """The error because of which later messages are ignored, or None."""

    @property
    def position(self) -> SlotPosition:
        """The position after the changes that `take` has returned."""
        return self.move(self._base)

    def move(self, position: SlotPosition) -> SlotPosition:
        """Return `position` with the followed tables after the changes that `take` has returned."""
        at = self._returned
        tables = tuple(self._move(table, at) for table in position.tables)
        if self._is_held:
            return replace(position, tables=tables)
        return replace(
            position,
            lsn=at.lsn,
            cut=at.cut,
            tables=tables,
            as_of_ms=self._returned_as_of_ms,
        )

    @property
    def is_inside(self) -> bool:
        """True if a transaction has begun and not ended."""
        return self._begin is not None

    @property
    def ready_count(self) -> int:
        """The number of changes that `take` would return."""
        return self._queued if self._is_large and not self.stop else self._complete

    def add_message(self, data: bytes) -> None:
        """Process the next message of pgoutput. Raises the errors of `add`."""
        plain = self._plain.get(data[:ROW_START])
        if plain is None:
            self.add(pgoutput.decode(data))
            return
        operation, changes = plain
        self._index += 1
        self._queue(changes, operation, data)

    def add(self, message: pgoutput.Decoded | None) -> None:
        """Process the next message.

        Raises:
            BadRecord: A change cannot be converted exactly.
            OffsetOutOfRange: The server does not send the remaining changes of a cut transaction.
        """
        if self.stop is not None:
            return
        match message:
            case pgoutput.Insert() | pgoutput.Update() | pgoutput.Delete():
                self._add_change(message)
            case pgoutput.TransactionBegin():
                self._start(message)
            case pgoutput.TransactionCommit():
                self._end(message)
            case pgoutput.Relation():
                self._meet_relation(message)
            case pgoutput.Truncate():
                for oid in message.relations:
                    if oid in self._tables:
                        self._meet_truncate(self._tables[oid])
            case pgoutput.TransactionOrigin() | pgoutput.Type() | pgoutput.Message() | None:
                pass
            case _:
                assert_never(message)

    def advance(self, lsn: int, as_of_ms: int) -> None:
        """Move the position to `lsn`, up to which the server has sent every transaction.

        `as_of_ms` is the server's time in the message that contained `lsn`.
        """
        if self.is_inside or self.stop is not None or lsn <= self._next.lsn:
            return
        self._require_cuts_before(lsn)
        if self._next.cut is None:
            self._pass(lsn)
            self._as_of_ms = as_of_ms
            if not self._queued:
                self._return()

    def take(self) -> TakenChanges:
        """Return the changes of all ended transactions. Remove them from the queue.

        If a transaction with more than `cut_changes` changes is open, its changes so far are
        returned, too.

        Raises:
            BadRecord: A change cannot be converted exactly. All changes stay queued.
        """
        is_part = self._is_large and not self.stop
        if self._begin is not None and is_part:
            self._add_time(to_unix_ms(self._begin.committed_us))
            self._assign(self._begin)
        counts = [
            (changes, changes.count if is_part else changes.complete)
            for changes in self._tables.values()
        ]
        taken = [changes.read(count) for changes, count in counts if count]
        for changes, count in counts:
            if count:
                changes.drop(count)
        count = sum(count for _, count in counts)
        self._queued -= count
        self._timed -= count
        self._complete = 0
        times = tuple(self._times)
        self._times.clear()
        if self._begin is not None and is_part:
            known = 0 if self._next.cut is None else self._next.cut.changes
            cut = Cut(self._begin.commit_lsn, max(known, self._index))
            self._next = StreamPosition(self._next.lsn, cut)
        self._return()
        return TakenChanges(taken, times)

    def _return(self) -> None:
        """Record that all processed changes were returned: `position` is then after them."""
        self._returned, self._returned_as_of_ms = self._next, self._as_of_ms

    def _assign(self, transaction: pgoutput.TransactionBegin) -> None:
        """Record that the changes queued since the last call belong to `transaction`."""
        if self._keeps_transactions:
            for oid in self._touched:
                self._tables[oid].assign(transaction)

    def _add_time(self, committed_ms: int) -> None:
        if count := self._queued - self._timed:
            self._times.append((committed_ms, count))
            self._timed += count

    def _move(self, table: TablePosition, at: StreamPosition) -> TablePosition:
        """Return the position of `table` after every change before `at` was returned."""
        if table.oid not in self._tables:
            return table
        ahead, copied = table.ahead, table.copied
        if ahead is None or not at.is_before(ahead):
            ahead = at if self._is_held else None
        if copied is not None and copied.ends_at <= at.lsn:
            copied = None
        return replace(table, copied=copied, ahead=ahead)

    def _pass(self, lsn: int) -> None:
        """Move to `lsn`, where no transaction is open.

        Drop the filters and the tables' own positions that end before `lsn`.
        """
        self._next = StreamPosition(lsn)
        if not self._has_passing:
            return
        self._has_passing = False
        for changes in self._tables.values():
            self._has_passing |= changes.pass_position(lsn)

    def _start(self, begin: pgoutput.TransactionBegin) -> None:
        self._require_cuts_before(begin.commit_lsn)
        self._begin, self._index, self._open_queued = begin, 0, 0
        # A cut transaction was over the limit, so its other changes are passed on as they come.
        self._is_large = any(cut.commit_lsn == begin.commit_lsn for cut in self._list_cuts())
        self._choose_plain()

    def _choose_plain(self) -> None:
        """Choose the messages of the begun transaction that are queued without decoding.

        The messages of a table are not chosen if changes of the transaction may have to be skipped.
        """
        begin = self._begin
        self._plain = {}
        if begin is None or self.stop is not None:
            return
        if self._next.cut is not None and self._next.cut.commit_lsn == begin.commit_lsn:
            return
        self._plain = self._all_plain
        if self._has_passing:
            self._plain = {
                start: plain
                for start, plain in self._all_plain.items()
                if plain[1].passes_all(begin.commit_lsn)
            }

    def _list_cuts(self) -> Sequence[Cut]:
        positions = [self._next]
        if self._has_passing:
            positions += [table.ahead for table in self._tables.values() if table.ahead is not None]
        return [position.cut for position in positions if position.cut is not None]

    def _require_cuts_before(self, lsn: int) -> None:
        """Raise OffsetOutOfRange if the server left out a cut transaction from before `lsn`."""
        for cut in self._list_cuts():
            if lsn > cut.commit_lsn:
                raise OffsetOutOfRange(
                    f"slot {self._base.slot}: a transaction of which {cut.changes} changes were"
                    " read is not sent again: the publication was changed or the slot was made"
                    f" anew. {self._base.copy_anew}"
                )

    def _end(self, commit: pgoutput.TransactionCommit) -> None:
        cut, begin = self._next.cut, self._begin
        self._begin, self._is_large, self._plain = None, False, {}
        if cut is not None and begin is not None and begin.commit_lsn != cut.commit_lsn:
            # A transaction before the cut one, which the server sends again.
            self._next = StreamPosition(commit.end_lsn, cut)
        else:
            self._pass(commit.end_lsn)
        if begin is not None:
            self._assign(begin)
        for oid in self._touched:
            self._tables[oid].complete = self._tables[oid].count
        self._touched.clear()
        self._complete = self._queued
        self._as_of_ms = to_unix_ms(commit.committed_us)
        self._add_time(self._as_of_ms)
        if not self._queued:
            self._return()

    def _add_change(self, change: pgoutput.Insert | pgoutput.Update | pgoutput.Delete) -> None:
        begin = self._begin
        assert begin is not None
        self._index += 1
        changes = self._tables.get(change.relation)
        if changes is None or (
            self._next.cut is not None and self._next.includes(begin.commit_lsn, self._index)
        ):
            return
        if changes.ahead is not None and changes.ahead.includes(begin.commit_lsn, self._index):
            return
        match change:
            case pgoutput.Insert():
                self._emit(changes, INSERT, changes.pick(change.new))
            case pgoutput.Delete():
                old = changes.pick(change.key or change.old or ())
                changes.require_key(old)
                self._emit(changes, DELETE, old)
            case pgoutput.Update():
                self._add_update(changes, change)

    def _add_update(self, changes: QueuedChanges, update: pgoutput.Update) -> None:
        old = None if update.old is None else changes.pick(update.old)
        new = changes.pick(update.new)
        if old is not None:
            new = [
                before if value is UNCHANGED else value
                for before, value in zip(old, new, strict=True)
            ]
        before = old if update.key is None else changes.pick(update.key)
        if before is not None:
            changes.require_key(before)
            # The server also sends the old key if a large value of the key is as it was.
            changes.fill_key(new, before)
            if changes.key(before) != changes.key(new):
                changes.require_whole(new)
                self._emit(changes, DELETE, before)
        self._emit(changes, UPDATE, new)

    def _emit(self, changes: QueuedChanges, operation: str, row: list[Value]) -> None:
        """Queue a change, unless the first copy contains it."""
        begin = self._begin
        assert begin is not None
        if (
            changes.filter is not None
            and changes.filter.may_contain(begin.commit_lsn)
            and changes.contains(begin.xid, row)
        ):
            return
        self._queue(changes, operation, row)

    def _queue(self, changes: QueuedChanges, operation: str, row: list[Value] | bytes) -> None:
        changes.add(operation, row)
        self._touched.add(changes.table.oid)
        self._queued += 1
        self._open_queued += 1
        if self._open_queued > self._cut_changes:
            self._is_large = True

    def _meet_relation(self, relation: pgoutput.Relation) -> None:
        """Read the order of the columns in later rows. Set `stop` if the columns changed."""
        changes = self._tables.get(relation.number)
        if changes is None:
            oid = self._by_name.get((relation.schema, relation.name))
            if oid is not None:
                self._stop(self._tables[oid], "was dropped and created again", relation)
            return
        difference = changes.find_difference(relation)
        if difference is not None:
            self._stop(changes, difference, relation)
        else:
            for start, operation in changes.plain_starts.items():
                self._all_plain[start] = (operation, changes)
            self._choose_plain()

    def _stop(self, changes: QueuedChanges, what: str, relation: pgoutput.Relation) -> None:
        self._plain = {}
        names = ", ".join(column.name for column in relation.columns)
        self.stop = BadRecord(
            f"the columns of table {changes.table.name} were changed: the next change comes from a"
            f" table that {what}. Every change before it is done. Change the target alike, and"
            " start the job again: it reads on with the table's present columns, or with those in"
            " schema=. If that start ends with this error, too, the job was behind when the columns"
            f" were changed. The next changes have the columns {names}. If the table has all of"
            " them, and others that were added later, start the job with schema= with exactly these"
            " columns and on_schema_change='stop': it stops again before the next new column. Then"
            " remove both options. If the table has only some of them, and no others, start the job"
            " with schema= with the table's columns and on_schema_change='ignore': the dropped"
            " columns are left out. Remove both options when the job has read the changes from"
            " before the drop. If the table lacks some of them and has others, or if a column has"
            f" another type: {self._base.copy_anew}"
        )

    def _meet_truncate(self, changes: QueuedChanges) -> None:
        begin, copied = self._begin, changes.filter
        assert begin is not None
        # A truncate has no number. It was met before a cut only if a later change was, too.
        following = self._index + 1
        if changes.ahead is not None and changes.ahead.includes(begin.commit_lsn, following):
            return
        if (
            copied is not None
            and copied.may_contain(begin.commit_lsn)
            and copied.contains_everywhere(begin.xid)
        ):
            return
        raise BadRecord(
            f"table {changes.table.name} was truncated, and only changes of single rows can be"
            f" read. {self._base.copy_anew}"
        )
