"""Messages that are read by columns, many at once, give the rows that one-by-one reading gives."""

from __future__ import annotations

import random
import struct
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from itertools import accumulate, pairwise

import pyarrow as pa
import pytest

from onceflow.clients.postgres import pgoutput
from onceflow.clients.postgres.binary_rows import (
    BinaryColumn,
    RowBuffer,
    encode_tuple,
    split_copy_rows,
    split_tuples,
)
from onceflow.clients.postgres.catalog import PostgresType
from onceflow.clients.sql.tables import TableName
from onceflow.core.errors import BadRecord, SourceUnavailable
from onceflow.sources.postgres.copying import read_all_rows, read_rows, split_rows
from onceflow.sources.postgres.first_copy import CopiedChunks
from onceflow.sources.postgres.metadata import Metadata, MetadataColumns
from onceflow.sources.postgres.position import Cut, SlotPosition, TablePosition
from onceflow.sources.postgres.row_builder import RowBuilder
from onceflow.sources.postgres.table import SourceColumn, SourceTable
from onceflow.sources.postgres.transactions import ChangeReader

_OID = 0x01020304
_ROW = tuple[bytes | None, ...]


def _column(name: str, kind: str, number: int, arrow: pa.DataType) -> SourceColumn:
    return SourceColumn(
        name, PostgresType(kind, kind), arrow, number, can_be_large=False, is_binary_text=True
    )


_TABLE = SourceTable(
    TableName("public", "t"),
    _OID,
    "d",
    (
        _column("id", "int4", 23, pa.int32()),
        _column("v", "text", 25, pa.string()),
        _column("b", "bool", 16, pa.bool_()),
        _column("n", "float8", 701, pa.float64()),
    ),
    ("id",),
    stops_at_new_columns=False,
    ignored_columns=frozenset({"left_out"}),
)
_TYPES = {"id": 23, "v": 25, "b": 16, "n": 701, "left_out": 25}
_METADATA = (Metadata.XID, Metadata.TABLE, Metadata.LSN, Metadata.COMMITTED_AT)
_AT_START = TablePosition(TableName("public", "t"), _OID, None)
_START = SlotPosition("s", "1", 1, 100, (_AT_START,))


def _relation(*names: str) -> bytes:
    columns = b"".join(
        bytes([name == "id"]) + name.encode() + b"\0" + struct.pack("!Ii", _TYPES[name], -1)
        for name in names
    )
    head = b"R" + struct.pack("!I", _OID) + b"public\0t\0d"
    return head + struct.pack("!H", len(names)) + columns


_ALL = _relation("left_out", "id", "v", "b", "n")


def _begin(lsn: int, xid: int = 9, committed_us: int = 0) -> bytes:
    return b"B" + struct.pack("!QqI", lsn, committed_us, xid)


def _commit(lsn: int) -> bytes:
    return b"C\0" + struct.pack("!QQq", lsn, lsn + 5, 0)


def _change(kind: bytes, *marks_and_rows: bytes, oid: int = _OID) -> bytes:
    return kind + struct.pack("!I", oid) + b"".join(marks_and_rows)


def _draw_row(draw: random.Random) -> _ROW:
    text = "".join(draw.choice("aäß漢\n") for _ in range(draw.choice((0, 1, 7, 300)))).encode()
    return (
        b"ignored",
        draw.randrange(-(2**31), 2**31).to_bytes(4, "big", signed=True),
        draw.choice((None, text)),
        draw.choice((None, b"\0", b"\1")),
        draw.choice((None, struct.pack("!d", draw.uniform(-1, 1)))),
    )


def _draw_change(draw: random.Random) -> bytes:
    row, other = encode_tuple(_draw_row(draw)), encode_tuple(_draw_row(draw))
    key = encode_tuple((None, _draw_row(draw)[1], None, None, None))
    return draw.choice(
        (
            _change(b"I", b"N", row),
            _change(b"I", b"N", row),
            _change(b"U", b"N", row),
            _change(b"U", b"K", key, b"N", row),
            _change(b"U", b"O", other, b"N", row),
            _change(b"D", b"K", key),
            _change(b"D", b"O", row),
            _change(b"I", b"N", row, oid=_OID + 1),
        )
    )


def _read(messages: Sequence[bytes], *, by_columns: bool, take_after: int = 10**9) -> pa.Table:
    reader = ChangeReader([_TABLE], _START, cut_changes=5)
    builder = RowBuilder(_TABLE)
    batches: list[pa.RecordBatch] = []
    for number, message in enumerate(messages):
        if by_columns:
            reader.add_message(message)
        else:
            reader.add(pgoutput.decode(message))
        if number % take_after == take_after - 1 or number == len(messages) - 1:
            batches.append(_take(reader, builder))
    return pa.Table.from_batches(batches)


def _take(reader: ChangeReader, builder: RowBuilder) -> pa.RecordBatch:
    taken = reader.take().tables
    return builder.build_changes(taken[0]) if taken else builder.build((), ())


@pytest.mark.parametrize("seed", range(20))
def test_both_ways_give_the_same_rows(seed: int) -> None:
    draw = random.Random(seed)
    messages = [_begin(200), _ALL]
    for lsn in range(300, 1_300, 100):
        messages += [_draw_change(draw) for _ in range(draw.randrange(12))]
        messages += [_commit(lsn - 100), _begin(lsn)]
    expected = _read(messages, by_columns=False)
    assert expected.num_rows > 10
    for take_after in (1, 7, 10**9):
        found = _read(messages, by_columns=True, take_after=take_after)
        assert found.to_pylist() == expected.to_pylist()


@pytest.mark.parametrize("seed", range(20))
def test_each_row_has_the_metadata_of_its_own_transaction(seed: int) -> None:
    draw = random.Random(seed)
    # The copy contains changes of some transactions, and part of one was returned before.
    copied = CopiedChunks().divide(()).extend(0, None, "10:20:13,16", 900)
    position = replace(
        _START,
        tables=(replace(_AT_START, copied=draw.choice((None, copied))),),
        cut=draw.choice((None, Cut(200, draw.randrange(4)))),
    )
    messages: list[bytes] = []
    for number in range(12):
        lsn = 200 + 100 * number
        messages += [_begin(lsn, 9 + number, 1_000_000 * number), _ALL]
        messages += [_draw_change(draw) for _ in range(draw.randrange(12))]
        messages.append(_commit(lsn))
    expected = _read_singly(messages, position)
    assert len({row["_lsn"] for row in expected}) > 3
    for take_after in (1, 7, 10**9):
        for by_columns in (False, True):
            assert _read_with_metadata(messages, position, take_after, by_columns) == expected


def _read_singly(messages: Sequence[bytes], position: SlotPosition) -> list[Mapping[str, object]]:
    """Return the rows; each change is taken at once, so its transaction is the open one."""
    reader = ChangeReader([_TABLE], position, cut_changes=0)
    builder = RowBuilder(_TABLE)
    rows: list[Mapping[str, object]] = []
    begin: pgoutput.TransactionBegin | None = None
    for message in messages:
        decoded = pgoutput.decode(message)
        if isinstance(decoded, pgoutput.TransactionBegin):
            begin = decoded
        reader.add(decoded)
        for row in _take(reader, builder).to_pylist():
            assert begin is not None
            second = begin.committed_us // 1_000_000
            rows.append(
                row
                | {
                    "_xid": begin.xid,
                    "_table": "public.t",
                    "_lsn": f"0/{begin.commit_lsn:X}",
                    "_committed_at": datetime(2000, 1, 1, 0, 0, second, tzinfo=timezone.utc),
                }
            )
    return rows


def _read_with_metadata(
    messages: Sequence[bytes], position: SlotPosition, take_after: int, by_columns: bool
) -> list[Mapping[str, object]]:
    reader = ChangeReader([_TABLE], position, cut_changes=5, keeps_transactions=True)
    builder, metadata = RowBuilder(_TABLE), MetadataColumns(_TABLE, _METADATA)
    rows: list[Mapping[str, object]] = []
    for number, message in enumerate(messages, 1):
        if by_columns:
            reader.add_message(message)
        else:
            reader.add(pgoutput.decode(message))
        if number % take_after == 0 or number == len(messages):
            for changed in reader.take().tables:
                batch = builder.build_changes(changed)
                rows += metadata.extend_changes(batch, changed).to_pylist()
    return rows


def test_changes_that_were_refused_keep_their_transactions() -> None:
    reader = ChangeReader([_TABLE], _START, cut_changes=1, keeps_transactions=True)
    insert = _change(b"I", b"N", encode_tuple((None, bytes(4), None, None, None)))
    short = _change(b"I", b"N", encode_tuple((None, bytes(4))))
    for message in (_begin(200, 8), _ALL, insert, _commit(200), _begin(300, 9), insert, short):
        reader.add_message(message)
    for _ in range(2):
        with pytest.raises(BadRecord, match="has 2 columns"):
            reader.take()
    reader.add_message(_relation("id"))
    assert reader.stop is not None
    (changed,) = reader.take().tables
    assert [(begin.xid, count) for begin, count in changed.transactions] == [(8, 1)]


def test_a_copied_row_has_its_table_and_no_transaction() -> None:
    batch = RowBuilder(_TABLE).build([(bytes(4), None, None, None)], "r")
    (row,) = MetadataColumns(_TABLE, _METADATA).extend_copy(batch).to_pylist()
    facts = {column.value: row[column.value] for column in _METADATA}
    assert facts == {"_xid": None, "_table": "public.t", "_lsn": None, "_committed_at": None}


def test_messages_before_other_columns_are_read_with_their_own() -> None:
    first = _change(b"I", b"N", encode_tuple((b"x", (1).to_bytes(4), b"a", None, None)))
    swapped = _relation("v", "b", "n", "id")
    second = _change(b"I", b"N", encode_tuple((b"b", None, None, (2).to_bytes(4))))
    messages = [_begin(200), _ALL, first, swapped, second, _commit(200)]
    rows = _read(messages, by_columns=True).to_pylist()
    assert [(row["id"], row["v"]) for row in rows] == [(1, "a"), (2, "b")]


def test_an_unchanged_large_value_is_refused_and_a_left_out_one_is_not() -> None:
    row = (b"n" + b"b" + struct.pack("!I", 4) + bytes(4), b"u", b"n", b"n")
    unsent = _change(b"U", b"N", struct.pack("!H", 5) + b"".join(row))
    reader = ChangeReader([_TABLE], _START, cut_changes=5)
    for message in (_begin(200), _ALL, unsent, _commit(200)):
        reader.add_message(message)
    with pytest.raises(BadRecord, match="left the large value of column 'v' as it was"):
        reader.take()
    assert reader.position == _START
    left_out = (b"u" + b"b" + struct.pack("!I", 4) + bytes(4), b"n", b"n", b"n")
    fine = _change(b"U", b"N", struct.pack("!H", 5) + b"".join(left_out))
    rows = _read([_begin(200), _ALL, fine, _commit(200)], by_columns=True).to_pylist()
    assert rows == [{"id": 0, "v": None, "b": None, "n": None, "_op": "u"}]


def test_a_row_with_too_few_columns_is_refused() -> None:
    short = _change(b"I", b"N", encode_tuple((b"x", bytes(4))))
    with pytest.raises(BadRecord, match="has 2 columns, and the table had 5"):
        _read([_begin(200), _ALL, short, _commit(200)], by_columns=True)


def test_changes_that_the_copy_contains_are_left_out() -> None:
    copied = CopiedChunks().divide(()).extend(0, None, "10:20:", 1_000)
    position = replace(_START, tables=(replace(_AT_START, copied=copied),))
    reader = ChangeReader([_TABLE], position, cut_changes=5)
    insert = _change(b"I", b"N", encode_tuple((None, bytes(4), None, None, None)))
    for lsn, xid in ((200, 9), (300, 25), (2_000, 9)):
        for message in (_begin(lsn, xid), _ALL, insert, _commit(lsn)):
            reader.add_message(message)
    assert len(reader.take().tables[0].operations) == 2


def test_the_part_of_a_cut_transaction_that_was_read_is_skipped() -> None:
    cut = replace(_START, cut=Cut(200, changes=2))
    reader = ChangeReader([_TABLE], cut, cut_changes=1)
    inserts = [
        _change(b"I", b"N", encode_tuple((None, id_.to_bytes(4), None, None, None)))
        for id_ in range(3)
    ]
    for message in (_begin(200), _ALL, *inserts, _commit(200), _begin(300), inserts[0]):
        reader.add_message(message)
    batch = _take(reader, RowBuilder(_TABLE))
    assert batch.column("id").to_pylist() == [2]


def _values(columns: Sequence[BinaryColumn] | None) -> list[list[bytes | None]]:
    assert columns is not None
    assert [[column[at] for at in range(len(column))] for column in columns] == list(
        map(list, columns)
    )
    return [list(column) for column in columns]


def test_rows_of_copy_are_split_into_columns() -> None:
    rows: list[_ROW] = [(b"ab", None), (b"", b"x" * 1_000), (None, b"\0\0\0\1")]
    messages = [encode_copy_row(row) for row in rows]
    assert _values(split_copy_rows(RowBuffer.of(messages), 2)) == [
        list(column) for column in zip(*rows, strict=True)
    ]
    assert split_copy_rows(RowBuffer.of(messages), 3) is None
    assert split_copy_rows(RowBuffer.of([*messages, b"\xff\xff"]), 2) is None
    assert split_copy_rows(RowBuffer.of([messages[0] + messages[1]]), 2) is None
    assert split_copy_rows(RowBuffer.of([messages[0][:-1]]), 2) is None
    # A length that leads into the next row, and one that leads behind the last row.
    for length in (5, 1_000_000):
        wrong = struct.pack("!hii", 2, -1, length) + b"x"
        assert split_copy_rows(RowBuffer.of([wrong, *messages]), 2) is None
        assert split_copy_rows(RowBuffer.of([*messages, wrong]), 2) is None


def encode_copy_row(row: _ROW) -> bytes:
    parts = [struct.pack("!h", len(row))]
    for value in row:
        parts += [struct.pack("!i", -1 if value is None else len(value)), value or b""]
    return b"".join(parts)


@pytest.mark.parametrize(
    "row",
    [
        encode_tuple((b"ab", b"c"))[:-1],
        encode_tuple((b"ab", b"c")) + b"x",
        encode_tuple((b"ab",)),
        b"\0\2n",
        b"\0",
        b"\0\2nt\0\0\0\1x",
        b"\0\2nu",
        b"\0\2nz",
        b"\0\2nb\xff\xff\xff\xff",
    ],
)
def test_what_is_no_row_of_binary_values_is_left_to_the_reader_of_single_rows(row: bytes) -> None:
    fine = encode_tuple((b"ab", b"c"))
    assert _values(split_tuples([fine], 0, 2, (1, 0))) == [[b"c"], [b"ab"]]
    assert split_tuples([fine, row], 0, 2, (1, 0)) is None
    assert split_tuples([row, fine], 0, 2, (1, 0)) is None


def test_numbers_of_another_size_and_large_values_are_exact() -> None:
    columns = split_tuples([encode_tuple((b"1234", b"y" * 100_000))], 0, 2, (0, 1))
    assert columns is not None
    assert columns[0].to_numbers(">i8") is None
    numbers = columns[0].to_numbers(">i4")
    assert numbers is not None
    assert numbers.tolist() == [0x31323334]
    assert columns[1].to_arrow().to_pylist() == [b"y" * 100_000]


_HEAD = b"PGCOPY\n\xff\r\n\0" + bytes(8)
_END = b"\xff\xff"


@pytest.mark.parametrize("seed", range(10))
def test_copied_rows_are_the_same_by_columns_and_row_by_row(seed: int) -> None:
    draw = random.Random(seed)
    rows = [_draw_row(draw)[1:] for _ in range(draw.choice((1, 2, 200)))]
    messages = [encode_copy_row(row) for row in rows]
    messages[0] = _HEAD + messages[0]
    arrivals: list[list[bytes]] = [[]]
    for message in (*messages, _END):
        arrivals[-1].append(message)
        if draw.randrange(4) == 0:
            arrivals.append([])
    found = read_all_rows(map(RowBuffer.of, filter(None, arrivals)))
    assert _list_rows(found) == [encode_copy_row(row) for row in rows]
    columns = split_rows(_TABLE, found)
    assert _values(columns) == [list(column) for column in zip(*rows, strict=True)]
    assert [column[-1] for column in columns] == list(rows[-1])
    builder = RowBuilder(_TABLE)
    assert builder.build_copied(columns, len(rows)) == builder.build(rows, "r")


def _list_rows(rows: RowBuffer) -> list[bytes]:
    """Return the rows that `rows` has in one buffer."""
    ends = [16, *(16 + end for end in accumulate(rows.sizes))]
    assert ends[-1] == len(rows.data)
    return [bytes(rows.data[start:end]) for start, end in pairwise(ends)]


def _read_copy(*arrivals: Sequence[bytes]) -> list[list[bytes]]:
    return [_list_rows(rows) for rows in read_rows(map(RowBuffer.of, arrivals))]


def test_a_copy_without_rows_or_with_a_head_of_its_own_is_read() -> None:
    row = encode_copy_row((b"ab", None))
    assert _read_copy([_HEAD + _END]) == []
    assert _read_copy([_HEAD], [row], [_END]) == [[row]]
    assert _read_copy([_HEAD, row, _END]) == [[row]]


def test_a_copy_without_its_head_or_its_end_mark_is_refused() -> None:
    row = encode_copy_row((b"ab", None))
    with pytest.raises(SourceUnavailable, match="without its end mark"):
        _read_copy([_HEAD + row])
    with pytest.raises(SourceUnavailable, match="signature"):
        _read_copy([row])


def test_a_copy_is_read_to_the_end_of_its_messages() -> None:
    # psycopg cancels a COPY that is left before its last message.
    arrivals = map(RowBuffer.of, [[_HEAD], [_END], []])
    list(read_rows(arrivals))
    assert list(arrivals) == []


@pytest.mark.parametrize("whole", [True, False])
def test_a_message_that_is_not_one_row_is_refused(whole: bool) -> None:
    row = encode_copy_row((bytes(4), b"x", None, None))
    with pytest.raises(BadRecord, match=r"table public\.t .* not one row of 4 columns"):
        split_rows(_TABLE, RowBuffer.of([row, row + row if whole else row[:-1]]))
