"""The first copy and the stream together: a model of the server, interleaved at random by seeds."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TypeAlias
from unittest.mock import Mock

import pyarrow as pa
import pytest

from onceflow.clients.postgres import pgoutput
from onceflow.clients.postgres.catalog import PostgresType
from onceflow.clients.sql.tables import TableName
from onceflow.sources.postgres.first_copy import CopiedChunks, CopyFilter, Snapshot, widen_xid
from onceflow.sources.postgres.position import SlotPosition, StreamPosition, TablePosition
from onceflow.sources.postgres.table import SourceColumn, SourceTable
from onceflow.sources.postgres.table_set import adapt_position
from onceflow.sources.postgres.transactions import ChangeReader

_FIRST, _SECOND, _LATER = 7, 8, 9
_INT = PostgresType("int4", "integer")
_COLUMNS = tuple(
    SourceColumn(name, _INT, pa.int32(), 23, can_be_large=False, is_binary_text=False)
    for name in ("id", "v")
)
_TABLES = {
    oid: SourceTable(
        TableName("public", name),
        oid,
        "d",
        _COLUMNS,
        ("id",),
        stops_at_new_columns=True,
        ignored_columns=frozenset(),
    )
    for oid, name in ((_FIRST, "first"), (_SECOND, "second"), (_LATER, "later"))
}
_KEYS = 10
_RUNNING_MAX = 6

Rows: TypeAlias = dict[tuple[int, int], int]
"""The values of rows by the table's OID and the key."""


def _relation(oid: int) -> pgoutput.Relation:
    columns = (
        pgoutput.RelationColumn("id", 23, -1, True),
        pgoutput.RelationColumn("v", 23, -1, False),
    )
    return pgoutput.Relation(oid, "public", _TABLES[oid].name.name, "d", columns)


def _wire(number: int) -> bytes:
    return number.to_bytes(4, "big", signed=True)


def _number(value: pgoutput.Value) -> int:
    assert isinstance(value, bytes)
    return int.from_bytes(value, "big", signed=True)


def test_a_snapshot_sees_what_had_ended() -> None:
    snapshot = Snapshot.parse("10:20:10,14")
    assert [xid for xid in range(8, 22) if snapshot.sees(xid)] == [8, 9, 11, 12, 13, *range(15, 20)]
    assert Snapshot.parse("10:10:") == Snapshot(10, 10, frozenset())


@pytest.mark.parametrize("epoch", [0, 1, 5])
def test_an_xid_gets_the_epoch_next_to_the_snapshot(epoch: int) -> None:
    wrap = epoch << 32
    for near in (wrap + 5, wrap + 2**31, wrap + 2**32 - 2):
        for distance in (-3, 0, 3, 2**31 - 1, -(2**31)):
            if near + distance >= 0:
                assert widen_xid((near + distance) % 2**32, near) == near + distance


Change: TypeAlias = pgoutput.Insert | pgoutput.Update | pgoutput.Delete


@dataclass
class _Transaction:
    xid: int
    changes: list[Change] = field(default_factory=list[Change])
    """The changes of tables that were published when they were made."""
    after: Rows = field(default_factory=Rows)
    """The changed rows; -1 stands for a deleted row."""


class _Server:
    """A model of a server: the WAL order of commits, and what snapshots see, which is later."""

    def __init__(self, draw: random.Random, first_xid: int) -> None:
        self._draw = draw
        self._next_xid = first_xid
        self._newest_ended = first_xid - 1
        self.published: set[int] = set()
        self.lsn = 100
        self.rows: Rows = {}
        """The visible rows."""
        self.latest: Rows = {}
        """The rows by the WAL: the next transaction builds on them."""
        self.open: list[_Transaction] = []
        self.committing: list[_Transaction] = []
        """The transactions whose commit is in the WAL, and that snapshots do not see yet."""
        self.wal: list[tuple[int, _Transaction]] = []

    def step(self) -> None:
        roll = self._draw.random()
        running = len(self.open) + len(self.committing)
        if (roll < 0.3 and running < _RUNNING_MAX) or not running:
            self.open.append(_Transaction(self._next_xid))
            self._next_xid += self._draw.choice((1, 1, 1, 2, 5))
        elif roll < 0.6 and self.open:
            self._change(self._draw.choice(self.open))
        elif roll < 0.65 and self.open:
            self._end(self.open)
        elif roll < 0.82 and self.open:
            transaction = self._draw.choice(self.open)
            self.open.remove(transaction)
            self.lsn += 10
            self.wal.append((self.lsn, transaction))
            self.lsn += 5
            self.latest = self._with(self.latest, transaction)
            self.committing.append(transaction)
        elif self.committing:
            # Snapshots may see commits in another order than the WAL has them.
            self.rows = self._with(self.rows, self._end(self.committing))

    def _end(self, running: list[_Transaction]) -> _Transaction:
        transaction = self._draw.choice(running)
        running.remove(transaction)
        self._newest_ended = max(self._newest_ended, transaction.xid)
        return transaction

    def _with(self, rows: Rows, transaction: _Transaction) -> Rows:
        return {k: v for k, v in (rows | transaction.after).items() if v >= 0}

    def _change(self, transaction: _Transaction) -> None:
        """Change a row that no other transaction has locked."""
        others = [*self.open, *self.committing]
        locked = {row for other in others if other is not transaction for row in other.after}
        oid = self._draw.choice(list(_TABLES))
        free = [key for key in range(_KEYS) if (oid, key) not in locked]
        if not free:
            return
        now = self._with(self.latest, transaction)
        key, value = self._draw.choice(free), self._draw.randrange(1000)
        new = (_wire(key), _wire(value))
        change: Change = pgoutput.Update(oid, None, None, new)
        if (oid, key) not in now:
            change = pgoutput.Insert(oid, new)
        elif self._draw.random() < 0.3:
            change = pgoutput.Delete(oid, (_wire(key), None), None)
            value = -1
        else:
            unused = [other for other in free if (oid, other) not in now]
            if unused and self._draw.random() < 0.4:
                moved = self._draw.choice(unused)
                after = (_wire(moved), _wire(value))
                change = pgoutput.Update(oid, (_wire(key), None), None, after)
                transaction.after[oid, moved] = value
                value = -1
        transaction.after[oid, key] = value
        if oid in self.published:
            transaction.changes.append(change)

    def take_xid(self) -> int:
        """Return the id of a transaction that ends at once."""
        self._newest_ended = self._next_xid
        self._next_xid += 1
        return self._newest_ended

    def snapshot(self) -> str:
        xmax = self._newest_ended + 1
        running = sorted(transaction.xid for transaction in (*self.open, *self.committing))
        active = [xid for xid in running if xid < xmax]
        return f"{active[0] if active else xmax}:{xmax}:{','.join(map(str, active))}"

    def messages(self, start: int) -> Iterator[pgoutput.Decoded | None]:
        """Yield what the slot sends from `start` on, and None while there is no more."""
        at = 0
        while True:
            if at == len(self.wal):
                yield None
                continue
            commit_lsn, transaction = self.wal[at]
            at += 1
            if commit_lsn >= start:
                yield pgoutput.TransactionBegin(commit_lsn, 0, transaction.xid % 2**32)
                yield from map(_relation, sorted({c.relation for c in transaction.changes}))
                yield from transaction.changes
                yield pgoutput.TransactionCommit(commit_lsn, commit_lsn + 5, 0)


class _Job:
    """A model of the reader and of a target that counts rows strictly."""

    def __init__(
        self,
        draw: random.Random,
        server: _Server,
        position: SlotPosition,
        *,
        chunk_rows: int,
        cut_changes: int,
        waits: bool,
    ) -> None:
        self._draw, self._server = draw, server
        self.position = position
        self.target: Rows = {}
        self._chunk_rows, self._cut_changes = chunk_rows, cut_changes
        self._waits = waits
        self._changes: ChangeReader | None = None
        self._messages: Iterator[pgoutput.Decoded | None] = iter(())

    def restart(self) -> None:
        """Begin an attempt with the last position, which goes through its encoding."""
        self._changes = None
        self.position = SlotPosition.from_split(self.position.to_split())
        new = [
            table
            for table in self.position.tables
            if table.copied is not None and table.is_copying and not table.copied.is_begun
        ]
        own_xid = self._server.take_xid()
        if new and self._waits:
            while not Snapshot.parse(self._server.snapshot()).has_ended_before(own_xid):
                self._server.step()
        for table in new:
            count = self._draw.randrange(4)
            uppers = sorted((key,) for key in self._draw.sample(range(_KEYS), count))
            self._set_copy(table, CopiedChunks().divide(uppers))

    def _set_copy(self, table: TablePosition, copied: CopiedChunks) -> None:
        tables = [
            replace(old, copied=copied) if old.oid == table.oid else old
            for old in self.position.tables
        ]
        self.position = replace(self.position, tables=tuple(tables))

    def copy(self) -> None:
        """Read a part of a chunk, of any range of any table."""
        copying = [table for table in self.position.tables if table.is_copying]
        if not copying:
            return
        table = self._draw.choice(copying)
        copied = table.copied
        assert copied is not None
        ranges = [at for at, part in enumerate(copied.ranges) if not part.is_finished]
        at = self._draw.choice(ranges)
        lower, upper = copied.lower(at), copied.ranges[at].upper
        snapshot, lsn = self._server.snapshot(), self._server.lsn + 1
        keys = sorted(
            key
            for oid, key in self._server.rows
            if oid == table.oid
            and (lower is None or (key,) > lower)
            and (upper is None or (key,) <= upper)
        )
        chunk = keys[: self._chunk_rows]
        values = {key: self._server.rows[table.oid, key] for key in chunk}
        while chunk:
            part = chunk[: self._draw.randrange(1, len(chunk) + 1)]
            del chunk[: len(part)]
            for key in part:
                self._apply(table.oid, "r", (_wire(key), _wire(values[key])))
            copied = copied.extend(at, (part[-1],), snapshot, lsn)
            if self._draw.random() < 0.1:
                # The attempt ends within the chunk.
                self._set_copy(table, copied)
                self.restart()
                return
        if len(keys) < self._chunk_rows:
            copied = copied.extend(at, upper, snapshot, lsn)
        self._set_copy(table, copied)
        if not self.position.is_copying:
            self._changes = None

    def stream(self, count: int) -> bool:
        """Take in up to `count` messages; return False if there are no more."""
        is_copying = self.position.is_copying
        followed = [t for t in self.position.tables if not is_copying or t.ahead is not None]
        if not followed:
            return False
        if self._changes is None:
            tables = [_TABLES[table.oid] for table in followed]
            self._changes = ChangeReader(tables, self.position, cut_changes=self._cut_changes)
            self._messages = self._server.messages(self._changes.start.lsn)
        message = None
        for message in islice(self._messages, count):
            if message is None:
                break
            self._changes.add(message)
        if message is None or self._draw.random() < 0.5:
            for changed in self._changes.take().tables:
                for operation, row in zip(changed.operations, changed.rows, strict=True):
                    self._apply(changed.table, operation, row)
            self.position = self._changes.move(self.position)
        return message is not None

    def _apply(self, oid: int, operation: str, row: Sequence[pgoutput.Value]) -> None:
        """Apply a change strictly: nothing is put or deleted twice."""
        key = (oid, _number(row[0]))
        if operation == "d":
            assert key in self.target, f"{key} is deleted, and is not there"
            del self.target[key]
            return
        assert (operation == "u") or key not in self.target, f"{key} is inserted a second time"
        self.target[key] = _number(row[1])


def _run(
    seed: int,
    *,
    chunk_rows: int,
    cut_changes: int,
    waits: bool = True,
    publishes_before_the_wait: bool = True,
) -> None:
    draw = random.Random(seed)
    server = _Server(draw, draw.choice((3, 2**32 - 6, 5 * 2**32 - 6, 7 * 2**32 + 3)))
    for _ in range(draw.randrange(60)):
        server.step()
    first = [_FIRST, _SECOND]
    server.published.update(first)
    tables = tuple(TablePosition(_TABLES[oid].name, oid, CopiedChunks()) for oid in first)
    position = SlotPosition("s", "1", 1, server.lsn, tables)
    job = _Job(draw, server, position, chunk_rows=chunk_rows, cut_changes=cut_changes, waits=waits)
    job.restart()
    for later in (False, True):
        if later:
            named = [*first, _LATER]
            adapted = adapt_position(job.position, [_TABLES[oid] for oid in named], only_same=False)
            job.position = adapted.position
            if publishes_before_the_wait:
                server.published.add(_LATER)
            job.restart()
            server.published.add(_LATER)
        for _ in range(draw.randrange(30, 90)):
            for _ in range(draw.randrange(8)):
                server.step()
            if draw.random() < 0.5:
                job.copy()
            else:
                job.stream(draw.randrange(1, 12))
            if draw.random() < 0.05:
                job.restart()
    while job.position.is_copying:
        job.copy()
    while job.stream(1000):
        pass
    assert job.target == server.latest
    assert all(table.ahead is None for table in job.position.tables)


@pytest.mark.parametrize("chunk_rows", [1, 3, 100])
@pytest.mark.parametrize("cut_changes", [1, 1000])
@pytest.mark.parametrize(
    "seeds",
    [range(15), pytest.param(range(15, 200), marks=pytest.mark.servers)],
    ids=["few seeds", "more seeds"],
)
def test_no_change_is_lost_and_none_is_applied_twice(
    chunk_rows: int, cut_changes: int, seeds: range
) -> None:
    """Chunks and ranges of tables, one of them added later, transactions, crashes and cuts."""
    for seed in seeds:
        _run(seed, chunk_rows=chunk_rows, cut_changes=cut_changes)


def test_the_model_notices_a_broken_filter(monkeypatch: pytest.MonkeyPatch) -> None:
    """The broken filter leaves out too little or too much."""
    for answer in (False, True):
        broken = Mock(return_value=answer)
        monkeypatch.setattr(CopyFilter, "contains", broken)
        with pytest.raises(AssertionError):
            for seed in range(30):
                _run(seed, chunk_rows=3, cut_changes=1000)


def test_the_model_notices_a_copy_that_does_not_wait_for_running_transactions() -> None:
    """Their commit may be before the slot, and their end after the first snapshot."""
    with pytest.raises(AssertionError):
        for seed in range(300):
            _run(seed, chunk_rows=3, cut_changes=1000, waits=False)


def test_the_model_notices_a_later_table_that_is_published_after_the_wait() -> None:
    """A transaction that runs since then has changed the table, and the slot does not send it."""
    with pytest.raises(AssertionError):
        for seed in range(300):
            _run(seed, chunk_rows=3, cut_changes=1000, publishes_before_the_wait=False)


def test_the_model_notices_tables_that_forget_their_own_position(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their changes would be read twice after the copy of a later table."""
    monkeypatch.setattr(StreamPosition, "includes", Mock(return_value=False))
    with pytest.raises(AssertionError):
        for seed in range(30):
            _run(seed, chunk_rows=3, cut_changes=1000)
