"""The first copy and the stream together: a model of the server, interleaved at random by seeds."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from unittest.mock import Mock

import pyarrow as pa
import pytest

from onceflow.clients.postgres import pgoutput
from onceflow.clients.postgres.catalog import PostgresType
from onceflow.clients.sql.tables import TableName
from onceflow.sources.postgres.first_copy import CopiedChunks, Snapshot, widen_xid
from onceflow.sources.postgres.position import SlotPosition, TablePosition
from onceflow.sources.postgres.table import SourceColumn, SourceTable
from onceflow.sources.postgres.transactions import ChangeReader

_OID = 7
_INT = PostgresType("int4", "integer")
_COLUMNS = tuple(
    SourceColumn(name, _INT, pa.int32(), 23, can_be_large=False, is_binary_text=False)
    for name in ("id", "v")
)
_TABLE = SourceTable(
    TableName("public", "t"), _OID, "d", _COLUMNS, ("id",), reads_all=True, ignored=frozenset()
)
_RELATION = pgoutput.Relation(
    _OID,
    "public",
    "t",
    "d",
    (
        pgoutput.RelationColumn("id", 23, -1, True),
        pgoutput.RelationColumn("v", 23, -1, False),
    ),
)


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


@dataclass
class _Transaction:
    xid: int
    changes: list[pgoutput.Insert | pgoutput.Update | pgoutput.Delete] = field(
        default_factory=list[pgoutput.Insert | pgoutput.Update | pgoutput.Delete]
    )
    after: dict[int, int] = field(default_factory=dict[int, int])
    """The table's changed rows; -1 stands for a deleted row."""
    keys: set[int] = field(default_factory=set[int])


class _Server:
    """A model of a server: the WAL order of commits, and what snapshots see, which is later."""

    def __init__(self, draw: random.Random, first_xid: int) -> None:
        self._draw = draw
        self._next_xid = first_xid
        self._newest_ended = first_xid - 1
        self.lsn = 100
        self.rows: dict[int, int] = {}
        """The visible rows."""
        self.latest: dict[int, int] = {}
        """The rows by the WAL: the next transaction builds on them."""
        self.open: list[_Transaction] = []
        self.committing: list[_Transaction] = []
        """The transactions whose commit is in the WAL, and that snapshots do not see yet."""
        self.wal: list[tuple[int, _Transaction]] = []

    def step(self) -> None:
        roll = self._draw.random()
        if roll < 0.3 or not (self.open or self.committing):
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

    def _with(self, rows: dict[int, int], transaction: _Transaction) -> dict[int, int]:
        return {k: v for k, v in (rows | transaction.after).items() if v >= 0}

    def _change(self, transaction: _Transaction) -> None:
        """Change a row that no other transaction has locked."""
        others = [*self.open, *self.committing]
        locked = {key for other in others if other is not transaction for key in other.keys}
        free = [key for key in range(12) if key not in locked]
        if not free:
            return
        now = self._with(self.latest, transaction)
        key, value = self._draw.choice(free), self._draw.randrange(1000)
        new = (_wire(key), _wire(value))
        if key not in now:
            transaction.changes.append(pgoutput.Insert(_OID, new))
        elif self._draw.random() < 0.3:
            transaction.changes.append(pgoutput.Delete(_OID, (_wire(key), None), None))
            value = -1
        else:
            unused = [other for other in free if other not in now]
            if unused and self._draw.random() < 0.4:
                moved = self._draw.choice(unused)
                after = (_wire(moved), _wire(value))
                transaction.changes.append(pgoutput.Update(_OID, (_wire(key), None), None, after))
                transaction.after[moved] = value
                transaction.keys.add(moved)
                value = -1
            else:
                transaction.changes.append(pgoutput.Update(_OID, None, None, new))
        transaction.after[key] = value
        transaction.keys.add(key)

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

    def messages(self, position: SlotPosition) -> Iterator[pgoutput.Decoded]:
        for commit_lsn, transaction in self.wal:
            if commit_lsn >= position.lsn:
                yield pgoutput.TransactionBegin(commit_lsn, 0, transaction.xid % 2**32)
                yield _RELATION
                yield from transaction.changes
                yield pgoutput.TransactionCommit(commit_lsn, commit_lsn + 5, 0)


def _apply(rows: dict[int, int], operation: str, row: Sequence[pgoutput.Value]) -> None:
    """Apply a change as strictly as a target that counts rows: nothing is put or deleted twice."""
    key = _number(row[0])
    if operation == "d":
        assert key in rows, f"key {key} is deleted, and is not there"
        del rows[key]
        return
    assert (operation == "u") or key not in rows, f"key {key} is inserted a second time"
    rows[key] = _number(row[1])


def _run(seed: int, *, chunk_rows: int, cut_changes: int, waits: bool = True) -> None:
    draw = random.Random(seed)
    first_xid = draw.choice((3, 2**32 - 6, 5 * 2**32 - 6, 7 * 2**32 + 3))
    server = _Server(draw, first_xid)
    for _ in range(draw.randrange(60)):
        server.step()
    start = server.lsn
    own_xid = server.take_xid()
    while waits and not Snapshot.parse(server.snapshot()).has_ended_before(own_xid):
        server.step()
    target: dict[int, int] = {}
    copied = CopiedChunks()
    while not copied.is_finished:
        for _ in range(draw.randrange(25)):
            server.step()
        last = copied.last_key
        keys = sorted(key for key in server.rows if last is None or (key,) > last)[:chunk_rows]
        upper = (keys[-1],) if len(keys) == chunk_rows else None
        copied = copied.extend(upper, server.snapshot(), server.lsn + 1)
        for key in keys:
            _apply(target, "r", (_wire(key), _wire(server.rows[key])))
    for _ in range(60):
        server.step()
    position = SlotPosition("s", "1", 1, start, TablePosition("public.t", _OID, copied))
    while True:
        position, is_over = _stream(draw, server, position, target, cut_changes)
        if is_over:
            break
    assert target == server.latest
    assert not server.wal or position.lsn >= server.wal[-1][0] or position.lsn == start


def _stream(
    draw: random.Random,
    server: _Server,
    position: SlotPosition,
    target: dict[int, int],
    cut_changes: int,
) -> tuple[SlotPosition, bool]:
    """Read on from `position` up to a random crash after a checkpoint, or to the end."""
    # The position goes through its encoding, as in a checkpoint.
    position = SlotPosition.from_split(position.to_split())
    reader = ChangeReader(_TABLE, position, cut_changes=cut_changes)
    for message in server.messages(position):
        reader.add(message)
        if draw.random() < 0.3:
            taken = reader.take()
            for operation, row in zip(taken.operations, taken.rows, strict=True):
                _apply(target, operation, row)
            if draw.random() < 0.1:
                return reader.position, False
    taken = reader.take()
    for operation, row in zip(taken.operations, taken.rows, strict=True):
        _apply(target, operation, row)
    return reader.position, True


@pytest.mark.parametrize("chunk_rows", [1, 3, 100])
@pytest.mark.parametrize("cut_changes", [1, 1000])
def test_no_change_is_lost_and_none_is_applied_twice(chunk_rows: int, cut_changes: int) -> None:
    """Chunks, transactions, crashes, cuts of large transactions and wrapping ids in any order."""
    for seed in range(150):
        _run(seed, chunk_rows=chunk_rows, cut_changes=cut_changes)


def test_the_model_notices_a_broken_filter(monkeypatch: pytest.MonkeyPatch) -> None:
    """The broken filter leaves out too little or too much."""
    for answer in (False, True):
        broken = Mock(return_value=answer)
        monkeypatch.setattr(CopiedChunks, "contains", broken)
        with pytest.raises(AssertionError):
            for seed in range(30):
                _run(seed, chunk_rows=3, cut_changes=1000)


def test_the_model_notices_a_copy_that_does_not_wait_for_running_transactions() -> None:
    """Their commit may be before the slot, and their end after the first snapshot."""
    with pytest.raises(AssertionError):
        for seed in range(300):
            _run(seed, chunk_rows=3, cut_changes=1000, waits=False)
