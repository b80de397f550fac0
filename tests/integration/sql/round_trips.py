"""One part of the round-trip matrix: columns of the catalogue into columns of one table.

A cell is a column of the catalogue and a column of the database. All cells of a part share a table,
in which each cell has a column of its own; a row holds one value of one cell. So a whole part takes
one batch a way of writing, and what a row says of one value depends on no other.

The rule of a cell: each value is read back, by a client that knows nothing of the sink, as it was
written, or its row was handed back as a bad row and the table does not have it.
"""

from __future__ import annotations

import sqlite3
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import pyarrow as pa
from tests.integration.sink_kit import Job
from tests.support.edge_values import EdgeColumn
from tests.support.exact_values import exact_values, same

from onceflow.clients.sql.tables import Table, TableName
from onceflow.core.arrow.kinds import is_text, to_plain_type
from onceflow.core.protocol.committables import Committed
from onceflow.core.protocol.ids import CheckpointId
from onceflow.core.spi import OnBadRow
from onceflow.core.storage import FileStagingArea
from onceflow.sinks import SQLiteSink

Meaning = Callable[[Any], object]


class Store(Protocol):
    """A database that a sink writes to and that another client reads."""

    def sink(self, **settings: Any) -> Any:
        """Return a sink into it."""
        ...

    def query(self, *statements: str) -> list[tuple[Any, ...]]:
        """Return the rows of the last of `statements`, each run alone."""
        ...


@dataclass(frozen=True)
class SQLiteFile:
    """A SQLite file, as Python's own client reads it."""

    path: Path

    def sink(self, **settings: Any) -> SQLiteSink:
        """Return a sink into it."""
        return SQLiteSink(f"sqlite:///{self.path}", **settings)

    def query(self, *statements: str) -> list[tuple[Any, ...]]:
        """Return the rows of the last of `statements`."""
        rows: list[tuple[Any, ...]] = []
        with closing(sqlite3.connect(self.path)) as database, database:
            for statement in statements:
                rows = database.execute(statement).fetchall()
        return rows


def _keep_value(value: Any) -> object:
    return value


@dataclass(frozen=True)
class StoredAs:
    """One column type of a database, and how a client reads its values exactly."""

    declared: str
    """The type as a table declares it."""
    reads: str = "{}"
    """The expression that reads the column, which stands for `{}`."""
    shows: Meaning = _keep_value
    """Takes what the client returns to the exact form of `tests.support.exact_values`."""
    means: Meaning = _keep_value
    """Takes a value that was written to the form that the documents promise for this column."""
    edges: Sequence[EdgeColumn] = ()
    """Columns of values of its own, in place of the catalogue's: documents of JSON, for example."""
    text_of: str | None = None
    """The expression of the text that stands for the value, if the column takes texts that are
    not kept as texts."""


@dataclass(frozen=True)
class Cell:
    """A column of the catalogue, and the column that takes its values."""

    edge: EdgeColumn
    stored: StoredAs

    def __str__(self) -> str:
        return f"{self.edge.name} into {self.stored.declared}"

    @property
    def text_of(self) -> str | None:
        """The expression to compare with the written texts; None if values are compared."""
        return self.stored.text_of if is_text(to_plain_type(self.edge.values.type)) else None


@dataclass(frozen=True)
class Way:
    """One way of writing rows, which sends values in a form of its own."""

    name: str
    settings: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    into_rows: bool = False
    """True if the rows are there already, without a value."""

    @property
    def is_ledger(self) -> bool:
        """True if the server sees no row before its checkpoint is decided."""
        return self.settings.get("commit_mode") == "ledger"


def _upsert(commit_mode: str, write_mode: str = "upsert") -> Mapping[str, Any]:
    return MappingProxyType(
        {"write_mode": write_mode, "primary_key": ("n",), "commit_mode": commit_mode}
    )


WAYS: tuple[Way, ...] = (
    Way("insert", MappingProxyType({"commit_mode": "two_phase"})),
    Way("upsert", _upsert("two_phase")),
    Way("upsert of rows that exist", _upsert("two_phase"), into_rows=True),
    Way("update", _upsert("two_phase", "update"), into_rows=True),
    Way("insert by ledger", MappingProxyType({"commit_mode": "ledger"})),
    Way("upsert by ledger", _upsert("ledger")),
    Way("update by ledger", _upsert("ledger", "update"), into_rows=True),
)


CELLS_A_PART = 40
"""Most values of a part are null, so its work grows with the square of its cells."""


@dataclass(frozen=True)
class Part:
    """A table with one column for each cell, and the rows of all cells."""

    store: Store
    cells: Sequence[Cell]
    firsts: Sequence[int]
    """The number of each cell's first row."""
    storage: str
    """The directory of staged rows."""

    @property
    def schema(self) -> pa.Schema:
        """The schema of the batch."""
        kinds = [pa.field(f"c{at}", cell.edge.type) for at, cell in enumerate(self.cells)]
        return pa.schema([pa.field("n", pa.int64()), *kinds])

    def batch(self) -> pa.RecordBatch:
        """Return all rows."""
        total = self.firsts[-1]
        columns = [
            _between(cell.edge.values, first, total)
            for cell, first in zip(self.cells, self.firsts, strict=False)
        ]
        numbers = pa.array(range(total), pa.int64())
        return pa.record_batch([numbers, *columns], schema=self.schema)

    def write(self, way: Way) -> dict[int, str]:
        """Write all rows into an empty table; return why rows were refused, by their numbers."""
        self.store.query("DELETE FROM t")
        if way.into_rows:
            numbers = ", ".join(f"({number})" for number in range(self.firsts[-1]))
            self.store.query(f"INSERT INTO t (n) VALUES {numbers}")
        sink = self.store.sink(table="t", **way.settings)
        refused: dict[int, str] = {}
        sink_id = f"matrix.{uuid.uuid4().hex[:16]}"
        staging = FileStagingArea.in_directory(self.storage, sink_id)
        with Job(
            sink, sink_id, schema=self.schema, staging=staging, on_bad_row=OnBadRow.DROP
        ) as job:
            writer = job.check().writer()
            writer.write(self.batch())
            committables = writer.pre_commit(CheckpointId(1))
            for part in writer.take_rejected():
                refused |= dict(zip(part.rows.column("n").to_pylist(), part.reasons, strict=True))
            for committable in committables:
                outcome = job.committer().commit(committable)
                assert outcome == Committed(), outcome
        return refused

    def judge(self, way: Way) -> tuple[list[str], dict[Cell, int]]:
        """Write in one way; return each altered value, and how many of each cell arrived."""
        refused = self.write(way)
        altered: list[str] = []
        arrived: dict[Cell, int] = {}
        for at, cell in enumerate(self.cells):
            first, end = self.firsts[at], self.firsts[at + 1]
            expression = (cell.text_of or cell.stored.reads).format(f"c{at}")
            rows = self.store.query(
                f"SELECT n, {expression} FROM t WHERE n >= {first} AND n < {end}"
            )
            read = {int(number): value for number, value in rows}
            written = exact_values(cell.edge.values)
            arrived[cell] = 0
            for number, value in enumerate(written, first):
                fault = _judge_value(cell, value, number, read, refused, way)
                arrived[cell] += not fault and number not in refused
                altered += [f"{cell}, {way.name}: {fault}"] if fault else []
        return altered, arrived


def _judge_value(
    cell: Cell,
    written: object,
    number: int,
    read: Mapping[int, Any],
    refused: Mapping[int, str],
    way: Way,
) -> str:
    """Return what is wrong with one value, or nothing."""
    if number in refused:
        untouched = number in read and read[number] is None if way.into_rows else number not in read
        return "" if untouched and refused[number] else f"{written!r} was refused, and written"
    if number not in read:
        return f"{written!r} is neither written nor refused"
    if cell.text_of is not None:
        is_same = _is_same_text(read[number], written)
        return "" if is_same else f"{written!r} was read as {_short(read[number])}"
    stored = cell.stored
    shown = None if read[number] is None else stored.shows(read[number])
    meant = None if written is None else stored.means(written)
    return "" if same(shown, meant) else f"{_short(meant)} was read as {_short(shown)}"


def _is_same_text(shown: Any, written: Any) -> bool:
    """Return True if two texts are equal, or are texts of one number."""
    if shown == written or shown is None or written is None:
        return bool(shown == written)
    try:
        return same(Decimal(shown), Decimal(written))
    except InvalidOperation:
        return False


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) < 90 else f"{text[:60]}…{text[-20:]} ({len(text)})"


def _between(values: pa.Array, first: int, total: int) -> pa.Array:
    """Return `values` at the rows from `first` on, and nulls before and after."""
    before, after = first, total - first - len(values)
    if isinstance(values, pa.DictionaryArray):
        # Its parts keep the one dictionary: pyarrow does not unify those that hold null.
        indices = _between(values.indices, first, total)
        dictionaries: Any = pa.DictionaryArray
        encoded: pa.Array = dictionaries.from_arrays(indices, values.dictionary)
        return encoded
    parts = [pa.nulls(before, values.type), values, pa.nulls(after, values.type)]
    return pa.concat_arrays(parts)


def find_cells(
    store: Store,
    edges: Iterable[EdgeColumn],
    columns: Sequence[StoredAs],
    ending: str = "",
) -> list[Cell]:
    """Return the pairs of values and columns that the sink takes at its start."""
    return list(_candidates(store, list(edges), columns, ending))


def open_parts(
    store: Store, cells: Sequence[Cell], directory: Path, ending: str = ""
) -> Iterator[Part]:
    """Create table after table, with `ending` behind its columns, and yield the part of each."""
    for start in range(0, len(cells), CELLS_A_PART):
        own = cells[start : start + CELLS_A_PART]
        declared = [f"c{at} {cell.stored.declared}" for at, cell in enumerate(own)]
        create = f"CREATE TABLE t ({', '.join(['n integer PRIMARY KEY', *declared])}){ending}"
        store.query("DROP TABLE IF EXISTS t", create)
        firsts = [0]
        for cell in own:
            firsts.append(firsts[-1] + len(cell.edge.values))
        yield Part(store, own, firsts, str(directory / "storage"))


def _candidates(
    store: Store,
    edges: Sequence[EdgeColumn],
    columns: Sequence[StoredAs],
    ending: str,
    *,
    is_key: bool = False,
) -> Iterator[Cell]:
    declared = ", ".join(f"c{at} {stored.declared}" for at, stored in enumerate(columns))
    create = f"CREATE TABLE t (n integer PRIMARY KEY, {declared}){ending}"
    store.query("DROP TABLE IF EXISTS t", create)
    table = _find_table(store)
    dialect = store.sink(table="t").dialect
    for at, stored in enumerate(columns):
        column = table.column(f"c{at}")
        assert column is not None
        for edge in stored.edges or edges:
            if is_key and column.key_fault:
                continue
            if dialect.fit(column, to_plain_type(edge.type), is_key=is_key) is not None:
                yield Cell(edge, stored)


def _find_table(store: Store) -> Table:
    sink = store.sink(table="t")
    with sink.endpoint.connect("matrix") as session:
        table: Table | None = sink.dialect.find_table(session, TableName(None, "t"))
    assert table is not None
    return table


def judge_key(store: Store, cell: Cell, directory: Path) -> list[str]:
    """Put a row under each value of `cell`, and delete all again; return what went wrong.

    Two keys that differ must be two rows, and a delete must find its row.
    """
    column = cell.stored.declared.removesuffix(" null")
    store.query("DROP TABLE IF EXISTS t", f"CREATE TABLE t (k {column} PRIMARY KEY, n integer)")
    keys = cell.edge.values
    sink_id = f"matrix.{uuid.uuid4().hex[:16]}"
    settings = {"write_mode": "upsert", "primary_key": ("k",), "tombstones": True}
    sink = store.sink(table="t", commit_mode="ledger", **settings)
    staging = FileStagingArea.in_directory(str(directory / "storage"), sink_id)
    schema = pa.schema([pa.field("k", keys.type), pa.field("n", pa.int64())])
    counts: list[int] = []
    refused: set[int] = set()
    with Job(sink, sink_id, schema=schema, staging=staging, on_bad_row=OnBadRow.DROP) as job:
        writer, committer = job.check().writer(), job.committer()
        numbers = pa.array(range(len(keys)), pa.int64())
        for checkpoint, values in enumerate((numbers, pa.nulls(len(keys), pa.int64())), 1):
            writer.write(pa.record_batch([keys, values], schema=schema))
            committables = writer.pre_commit(CheckpointId(checkpoint))
            if checkpoint == 1:
                for part in writer.take_rejected():
                    refused |= set(part.rows.column("n").to_pylist())
            for committable in committables:
                assert committer.commit(committable) == Committed()
            counts.append(int(store.query("SELECT count(*) FROM t")[0][0]))
    faults: list[str] = []
    if counts[0] != len(keys) - len(refused):
        faults.append(f"{len(keys) - len(refused)} keys are {counts[0]} rows")
    if counts[1]:
        faults.append(f"{counts[1]} rows outlive their delete")
    return [f"{cell} as key: {fault}" for fault in faults]


def find_key_cells(
    store: Store, edges: Iterable[EdgeColumn], columns: Sequence[StoredAs]
) -> list[Cell]:
    """Return the pairs of values and columns that the sink takes for a key at its start."""
    return list(_candidates(store, list(edges), columns, "", is_key=True))
