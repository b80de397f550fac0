"""A reader that follows a table while it copies another one: where it stops, and its slot."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, nullcontext
from typing import Any

import pyarrow as pa
import pytest

from onceflow.clients.postgres import pgoutput
from onceflow.clients.postgres.catalog import PostgresType
from onceflow.clients.postgres.replication import Changes, StreamRefused
from onceflow.clients.sql.tables import TableName
from onceflow.core.errors import BadRecord, OffsetOutOfRange
from onceflow.core.protocol.ids import AttemptId
from onceflow.core.spi import ReaderContext
from onceflow.sources.postgres.copying import CopiedRows
from onceflow.sources.postgres.first_copy import CopiedChunks
from onceflow.sources.postgres.position import SlotPosition, StreamPosition, TablePosition
from onceflow.sources.postgres.reader import PostgresReader
from onceflow.sources.postgres.settings import ReaderSettings
from onceflow.sources.postgres.table import SourceColumn, SourceTable
from onceflow.sources.postgres.transactions import ChangeReader

_READER = "onceflow.sources.postgres.reader"
_ID = SourceColumn(
    "id", PostgresType("int4", "int4"), pa.int32(), 23, can_be_large=False, is_binary_text=False
)


def _table(oid: int, name: str) -> SourceTable:
    return SourceTable(
        TableName("public", name),
        oid,
        "d",
        (_ID,),
        ("id",),
        stops_at_new_columns=True,
        ignored_columns=frozenset(),
    )


def _relation(*columns: str) -> pgoutput.Relation:
    described = tuple(pgoutput.RelationColumn(name, 23, -1, name == "id") for name in columns)
    return pgoutput.Relation(7, "public", "followed", "d", described)


_ACKNOWLEDGED: list[int] = []


class _Silent:
    """A stream without messages, and a copy without rows."""

    silent_s = 0.0

    @classmethod
    def open(cls, *_: Any, **__: Any) -> _Silent:
        return cls()

    def start(self, *_: Any, **__: Any) -> None: ...

    def receive(self, _: float) -> None: ...

    def poll(self, _: float) -> None: ...

    def acknowledge(self, lsn: int) -> None:
        _ACKNOWLEDGED.append(lsn)

    def close(self) -> None: ...


def _connect(*_: object) -> AbstractContextManager[None]:
    return nullcontext()


def _accept(*_: object) -> None: ...


def _find_no_form(*_: object) -> dict[int, Any]:
    return {}


@pytest.fixture(name="reader")
def _reader(monkeypatch: pytest.MonkeyPatch) -> Iterator[PostgresReader]:
    """Return a reader to which the server has sent a row, and then other columns."""
    messages: list[pgoutput.Decoded] = [
        pgoutput.TransactionBegin(200, 0, 9),
        _relation("id"),
        pgoutput.Insert(7, ((1).to_bytes(4, "big"),)),
        pgoutput.TransactionCommit(200, 205, 0),
        pgoutput.TransactionBegin(300, 0, 10),
        _relation("id", "added"),
    ]

    def make_reader(*tables: Any, **options: Any) -> ChangeReader:
        changes = ChangeReader(*tables, **options)
        for message in messages:
            changes.add(message)
        return changes

    monkeypatch.setattr(f"{_READER}.ChangeReader", make_reader)
    monkeypatch.setattr(f"{_READER}.ReplicationStream", _Silent)
    monkeypatch.setattr(f"{_READER}.CopyThreads", _Silent.open)
    monkeypatch.setattr(f"{_READER}.connect", _connect)
    monkeypatch.setattr(f"{_READER}.check_position", _accept)
    monkeypatch.setattr(f"{_READER}.read_forms", _find_no_form)
    followed, copied = _table(7, "followed"), _table(8, "copied")
    position = SlotPosition(
        "s",
        "1",
        1,
        100,
        (
            TablePosition(followed.name, 7, None, ahead=StreamPosition(150)),
            TablePosition(copied.name, 8, CopiedChunks().divide(())),
        ),
    )
    context = ReaderContext("job", "uid", 0, 1, AttemptId(1))
    _ACKNOWLEDGED.clear()
    reader = PostgresReader(_settings(followed, copied), [position.to_split()], context)
    yield reader
    reader.close()


def _settings(*tables: SourceTable) -> ReaderSettings:
    return ReaderSettings(
        endpoint=None,  # type: ignore[arg-type]
        tables=tables,
        outputs={},
        publication="p",
        metadata=(),
        follows=True,
        copies_rows=True,
        copy_parallelism=1,
        chunk_rows=10,
        batch_rows=10,
        transaction_rows_max=10,
        status_interval_s=1.0,
        connect_timeout_s=1.0,
        silence_max_s=1.0,
    )


def test_a_copy_whose_last_range_alone_is_read_does_not_continue_by_another_key() -> None:
    """The bounds of the other ranges would be read as values of the new key."""
    table = _table(8, "copied")
    copied = CopiedChunks().divide([(5,)], ("id date",)).extend(1, None, "9:9:", 150, 1)
    position = SlotPosition("s", "1", 1, 100, (TablePosition(table.name, 8, copied),))
    context = ReaderContext("job", "uid", 0, 1, AttemptId(1))
    reader = PostgresReader(_settings(table), [position.to_split()], context)
    with closing(reader), pytest.raises(OffsetOutOfRange, match="id date, and the key is id numb"):
        reader.poll(0.0)


def test_changed_columns_stop_a_table_ahead_of_a_copy_after_its_changes(
    reader: PostgresReader,
) -> None:
    rows = reader.poll(0.0)
    assert isinstance(rows, pa.RecordBatch)
    assert rows.column("id").to_pylist() == [1]
    # A start now would read this row again, with columns that the table does not have any more.
    assert reader.poll(0.0) is None
    reader.commit(reader.snapshot())
    with pytest.raises(BadRecord, match="Every change before it is done"):
        reader.poll(0.0)


def test_the_slot_does_not_move_for_a_table_ahead_of_a_copy(reader: PostgresReader) -> None:
    assert reader.poll(0.0) is not None
    reader.commit(reader.snapshot())
    # The table that is copied needs the changes after the start of the copy.
    assert _ACKNOWLEDGED == [100]


class _Ending(_Silent):
    """A copy that ends without a row."""

    def poll(self, _: float) -> CopiedRows:  # type: ignore[override]
        return CopiedRows(8, None, CopiedChunks().divide(()).extend(0, None, "9:9:", 150))


def test_the_end_of_a_copy_stays_although_the_same_poll_moves_the_stream(
    reader: PostgresReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise rows that are added from now on would be copied, and come as changes, too."""
    monkeypatch.setattr(f"{_READER}.CopyThreads", _Ending.open)
    for _ in range(2):
        reader.poll(0.0)
    (split,) = reader.snapshot()
    assert not SlotPosition.from_split(split).is_copying


def test_an_error_that_comes_behind_other_messages_has_its_consequence(
    reader: PostgresReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without its own error, the job would meet it again at each start."""

    def receive(*_: object) -> Changes:
        return Changes(b"O" + bytes(8) + b"origin\0")

    def receive_available(*_: object) -> None:
        raise StreamRefused("invalid byte sequence", "22021")

    monkeypatch.setattr(_Silent, "receive", receive)
    monkeypatch.setattr(_Silent, "receive_available", receive_available, raising=False)
    with pytest.raises(BadRecord, match="cannot send the next change: invalid byte sequence"):
        for _ in range(2):
            reader.poll(1.0)
