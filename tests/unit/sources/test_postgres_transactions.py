"""Messages of pgoutput become changes of whole transactions; what has no exact change is named."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pyarrow as pa
import pytest

from onceflow.clients.postgres import pgoutput
from onceflow.clients.postgres.catalog import PostgresType
from onceflow.clients.postgres.pgoutput import UNCHANGED
from onceflow.clients.sql.tables import TableName
from onceflow.core.errors import BadRecord, OffsetOutOfRange, StateIncompatible
from onceflow.core.spi import Split
from onceflow.sources.postgres.first_copy import CopiedChunks
from onceflow.sources.postgres.position import (
    Cut,
    SlotPosition,
    StreamPosition,
    TablePosition,
)
from onceflow.sources.postgres.table import SourceColumn, SourceTable
from onceflow.sources.postgres.transactions import ChangeReader

_OID = 7


def _column(name: str, kind: str, number: int, arrow: pa.DataType) -> SourceColumn:
    return SourceColumn(
        name, PostgresType(kind, kind), arrow, number, can_be_large=False, is_binary_text=True
    )


_TABLE = SourceTable(
    TableName("public", "t"),
    _OID,
    "d",
    (_column("id", "int4", 23, pa.int32()), _column("v", "text", 25, pa.string())),
    ("id",),
    stops_at_new_columns=True,
    ignored_columns=frozenset(),
)
_ID = pgoutput.RelationColumn("id", 23, -1, True)
_V = pgoutput.RelationColumn("v", 25, -1, False)
_RELATION = pgoutput.Relation(_OID, "public", "t", "d", (_ID, _V))
_START = SlotPosition("s", "1", 1, 100, (TablePosition(TableName("public", "t"), _OID, None),))
_COMMITTED_MS = 946_684_800_000
"""The time 0 of Postgres, 2000-01-01, at which the transactions commit."""


def _set_copy(copied: CopiedChunks) -> SlotPosition:
    (table,) = _START.tables
    return replace(_START, tables=(replace(table, copied=copied),))


def _copied(*snapshots: str) -> CopiedChunks:
    """Return a copy whose chunks end at 5, 10, … and have these snapshots."""
    uppers = [*((5 * at,) for at in range(1, len(snapshots))), None]
    copied = CopiedChunks().divide(())
    for upper, snapshot in zip(uppers, snapshots, strict=True):
        copied = copied.extend(0, upper, snapshot, 400)
    return copied


def _key(number: int) -> bytes:
    return number.to_bytes(4, "big")


def _insert(number: int) -> pgoutput.Insert:
    return pgoutput.Insert(_OID, (_key(number), b"x"))


def _begin(lsn: int, xid: int = 9) -> pgoutput.TransactionBegin:
    return pgoutput.TransactionBegin(lsn, 0, xid)


def _commit(lsn: int) -> pgoutput.TransactionCommit:
    return pgoutput.TransactionCommit(lsn, lsn + 5, 0)


def _reader(
    position: SlotPosition = _START, *, cut_changes: int = 100, table: SourceTable = _TABLE
) -> ChangeReader:
    return ChangeReader([table], position, cut_changes=cut_changes)


def _rows(reader: ChangeReader) -> Sequence[Sequence[pgoutput.Value]]:
    (changed,) = reader.take().tables
    return changed.rows


def _taken(reader: ChangeReader) -> list[tuple[str, int]]:
    rows = [
        pair
        for changed in reader.take().tables
        for pair in zip(changed.operations, changed.rows, strict=True)
    ]
    return [(operation, int.from_bytes(bytes(row[0] or b""), "big")) for operation, row in rows]  # type: ignore[arg-type]


def _add(reader: ChangeReader, *messages: pgoutput.Decoded) -> None:
    for message in messages:
        reader.add(message)


def test_an_open_transaction_is_not_passed_on_and_not_in_the_position() -> None:
    reader = _reader()
    _add(reader, _begin(200), _RELATION, _insert(1), _commit(200), _begin(300), _insert(2))
    assert _taken(reader) == [("c", 1)]
    assert reader.position == replace(_START, lsn=205, as_of_ms=_COMMITTED_MS)
    # A keepalive inside of a transaction says nothing about it.
    reader.advance(400, 7)
    assert reader.position.lsn == 205
    _add(reader, _insert(3), _commit(300))
    assert reader.position.lsn == 205
    assert _taken(reader) == [("c", 2), ("c", 3)]
    assert reader.position.lsn == 305


def test_a_keepalive_moves_the_position_only_past_what_was_returned() -> None:
    reader = _reader()
    reader.advance(150, 7)
    assert reader.position.lsn == 150
    reader.advance(120, 7)
    assert reader.position.lsn == 150
    _add(reader, _begin(200), _RELATION, _insert(1), _commit(200))
    reader.advance(500, 7)
    assert reader.position.lsn == 150
    assert _taken(reader) == [("c", 1)]
    assert reader.position == replace(_START, lsn=500, as_of_ms=7)
    assert SlotPosition.from_split(reader.position.to_split()) == reader.position


def test_the_time_of_each_commit_comes_with_the_number_of_its_changes() -> None:
    reader = _reader(cut_changes=2)
    second = replace(_commit(300), committed_us=2_000_000)
    large = replace(_begin(400), committed_us=5_000_000)
    _add(reader, _begin(200), _RELATION, _insert(1), _insert(2), _commit(200))
    _add(reader, _begin(300), _insert(3), second, large, *map(_insert, range(3)))
    at_ms = _COMMITTED_MS
    assert reader.take().times == ((at_ms, 2), (at_ms + 2_000, 1), (at_ms + 5_000, 3))
    _add(reader, _insert(9), replace(_commit(400), committed_us=5_000_000))
    assert reader.take().times == ((at_ms + 5_000, 1),)
    assert reader.take().times == ()


def test_a_large_transaction_is_cut_and_continued_after_each_change() -> None:
    messages: list[pgoutput.Decoded] = [
        _begin(200),
        _RELATION,
        *map(_insert, range(6)),
        _commit(200),
    ]
    for crash_at in range(4, len(messages)):
        reader = _reader(cut_changes=1)
        taken: list[tuple[str, int]] = []
        for message in messages[:crash_at]:
            reader.add(message)
            taken += _taken(reader)
        position = SlotPosition.from_split(reader.position.to_split())
        again = _reader(position, cut_changes=1)
        for message in messages:
            again.add(message)
            taken += _taken(again)
            # A checkpoint while changes are skipped must not go back.
            cut = again.position.cut
            assert again.position.lsn == 205 or (cut is not None and cut.changes >= crash_at - 2)
        assert taken == [("c", number) for number in range(6)]
        assert again.position == replace(_START, lsn=205, as_of_ms=_COMMITTED_MS)


def test_a_transaction_before_a_cut_one_that_is_sent_again_leaves_the_cut() -> None:
    reader = _reader(replace(_START, lsn=155, cut=Cut(200, 3)), cut_changes=1)
    _add(reader, _begin(150), _RELATION, _insert(9), _commit(150))
    assert _taken(reader) == []
    assert reader.position.cut == Cut(200, 3)
    _add(reader, _begin(200), *map(_insert, range(6)), _commit(200))
    assert _taken(reader) == [("c", 3), ("c", 4), ("c", 5)]


def test_the_rest_of_a_cut_transaction_must_come() -> None:
    reader = _reader(replace(_START, cut=Cut(200, 3)))
    reader.advance(180, 7)
    assert reader.position.cut == Cut(200, 3)
    with pytest.raises(OffsetOutOfRange, match="3 changes were read is not sent again"):
        reader.add(_begin(300))
    with pytest.raises(OffsetOutOfRange, match="3 changes were read is not sent again"):
        reader.advance(250, 7)


def test_an_update_of_the_key_deletes_the_old_row() -> None:
    reader = _reader()
    moved = pgoutput.Update(_OID, (_key(1), None), None, (_key(2), b"x"))
    same_key = pgoutput.Update(_OID, None, (_key(3), b"x"), (_key(3), b"y"))
    deleted = pgoutput.Delete(_OID, (_key(4), None), None)
    _add(reader, _begin(200), _RELATION, moved, same_key, deleted, _commit(200))
    assert _taken(reader) == [("d", 1), ("u", 2), ("u", 3), ("d", 4)]


def test_a_large_key_that_is_not_sent_again_is_no_changed_key() -> None:
    reader = _reader()
    update = pgoutput.Update(_OID, (_key(1), None), None, (UNCHANGED, b"y"))
    _add(reader, _begin(200), _RELATION, update, _commit(200))
    assert _taken(reader) == [("u", 1)]


def test_an_unchanged_large_value_comes_from_the_old_row_or_is_refused() -> None:
    reader = _reader()
    known = pgoutput.Update(_OID, None, (_key(1), b"long"), (_key(1), UNCHANGED))
    _add(reader, _begin(200), _RELATION, known, _commit(200))
    assert _rows(reader) == [[_key(1), b"long"]]
    unknown = pgoutput.Update(_OID, None, None, (_key(1), UNCHANGED))
    _add(reader, _begin(300))
    with pytest.raises(BadRecord, match=r"'v' as it was.*REPLICA IDENTITY FULL"):
        reader.add(unknown)


def test_a_null_is_told_from_an_unchanged_value() -> None:
    reader = _reader()
    update = pgoutput.Update(_OID, None, (_key(1), b"long"), (_key(1), None))
    _add(reader, _begin(200), _RELATION, update, _commit(200))
    assert _rows(reader) == [[_key(1), None]]


@pytest.mark.parametrize(
    ("columns", "match"),
    [
        ((_ID, _V, pgoutput.RelationColumn("w", 25, -1, False)), "has a new column 'w'"),
        ((_ID,), "has no column 'v'"),
        ((_ID, pgoutput.RelationColumn("v", 1043, -1, False)), "has column 'v' of another type"),
    ],
)
def test_the_reader_stops_before_the_first_change_with_other_columns(
    columns: Sequence[pgoutput.RelationColumn], match: str
) -> None:
    reader = _reader()
    changed = replace(_RELATION, columns=tuple(columns))
    _add(reader, _begin(200), _RELATION, _insert(1), _commit(200))
    _add(reader, _begin(300), _insert(2), changed, _insert(3), _commit(300))
    reader.advance(900, 7)
    assert _taken(reader) == [("c", 1)]
    assert reader.position.lsn == 205
    assert reader.stop is not None
    assert match in str(reader.stop)


def test_a_new_column_is_left_out_if_the_user_has_named_the_columns() -> None:
    reader = _reader(table=replace(_TABLE, stops_at_new_columns=False))
    wide = replace(_RELATION, columns=(pgoutput.RelationColumn("w", 25, -1, False), _V, _ID))
    insert = pgoutput.Insert(_OID, (b"w", b"v", _key(5)))
    _add(reader, _begin(200), wide, insert, _commit(200))
    assert _rows(reader) == [[_key(5), b"v"]]


def test_a_truncate_after_a_cut_is_refused_at_each_start() -> None:
    (table,) = _START.tables
    cut = replace(table, ahead=StreamPosition(100, Cut(200, 2)))
    truncate = pgoutput.Truncate((_OID,))
    reader = _reader(replace(_START, tables=(cut,)))
    with pytest.raises(BadRecord, match="was truncated"):
        _add(reader, _begin(200), _RELATION, _insert(1), _insert(2), truncate)
    # Only a truncate that the first copy contains can be between changes that were returned.
    _add(_reader(replace(_START, tables=(cut,))), _begin(200), _RELATION, _insert(1), truncate)


def test_a_truncate_is_refused_unless_the_copy_came_after_it() -> None:
    truncate = pgoutput.Truncate((_OID,))
    reader = _reader()
    _add(reader, _begin(200), pgoutput.Truncate((8,)))
    with pytest.raises(BadRecord, match="was truncated"):
        reader.add(truncate)
    copied = _copied("10:10:", "10:12:")
    position = _set_copy(copied)
    _add(_reader(position), _begin(200, xid=9), truncate)
    with pytest.raises(BadRecord, match="was truncated"):
        _add(_reader(position), _begin(200, xid=11), truncate)


def test_other_tables_and_messages_of_programs_are_skipped() -> None:
    reader = _reader()
    other = replace(_RELATION, number=8, name="other")
    message = pgoutput.Message(True, 1, "app", b"x")
    origin, kind = pgoutput.TransactionOrigin(1, "far"), pgoutput.Type(99, "public", "mood")
    insert = pgoutput.Insert(8, (_key(1),))
    _add(reader, _begin(200), origin, kind, other, insert, message, _RELATION, _insert(1))
    _add(reader, _commit(200))
    assert _taken(reader) == [("c", 1)]


def test_a_table_that_was_created_again_stops_the_reader() -> None:
    reader = _reader()
    _add(reader, _begin(200), replace(_RELATION, number=8), pgoutput.Insert(8, (_key(1), b"x")))
    assert "dropped and created again" in str(reader.stop)


def test_a_position_survives_its_encoding() -> None:
    copied = CopiedChunks().divide([(1, "ä")]).extend(0, (1, "ä"), "10:20:11,12", 300)
    for position in (
        _START,
        replace(_START, cut=Cut(200, 3)),
        _set_copy(copied),
        _set_copy(CopiedChunks()),
    ):
        assert SlotPosition.from_split(position.to_split()) == position
    with pytest.raises(StateIncompatible, match="written by another source"):
        SlotPosition.from_split(Split("payments-0", b'{"topic":"payments"}'))
