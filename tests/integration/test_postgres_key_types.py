"""Keys of many types: their order is the server's, and the copy continues after each of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import psycopg
import pytest
from psycopg.rows import TupleRow
from tests.integration.postgres_changes_kit import (
    CONTEXT,
    drop_slots,
    open_database,
    read_rows,
    source_of,
)

from onceflow.clients.postgres.binary_rows import split_copy_rows
from onceflow.core.errors import BadRecord, OffsetOutOfRange
from onceflow.integration.servers.postgres import EmbeddedPostgres
from onceflow.sources.postgres.copying import read_all_rows, select_chunk
from onceflow.sources.postgres.keys import key_of
from onceflow.sources.postgres.position import SlotPosition
from onceflow.sources.postgres.slot import connect

_KEYS: dict[str, tuple[Sequence[str], str]] = {
    "date": (
        ["date"],
        "('4713-01-01 BC'), ('1999-12-31'), ('2000-01-01'), ('2026-02-28'), ('5874897-12-31')",
    ),
    "timestamp": (
        ["timestamp"],
        (
            "('4713-11-24 BC'), ('1999-12-31 23:59:59.999999'), ('2000-01-01'),"
            " ('2026-03-29 02:30:00.000001'), ('2026-03-29 02:30:00.000002'), ('290000-01-01')"
        ),
    ),
    "timestamptz": (
        ["timestamptz"],
        (
            "('4713-11-25 BC'), ('2026-03-29 00:59:59.999999Z'), ('2026-03-29 01:00Z'),"
            " ('2026-10-25 00:30Z'), ('2026-10-25 01:30Z'), ('290000-01-01Z')"
        ),
    ),
    "numeric": (
        ["numeric(38, 9)"],
        (
            "(-12345678901234567890123456789.123456789), (-0.000000001), (0), (0.5), (10000),"
            " (9999.999999999), (12345678901234567890123456789.123456789)"
        ),
    ),
    "bytea": (["bytea"], r"('\x'), ('\x00'), ('\x0001'), ('\x7f'), ('\x80'), ('\xff00')"),
    "mixed": (
        ["date", "boolean", "numeric(9, 2)", 'text COLLATE "C"', "timestamptz"],
        (
            "('2026-01-01', false, 1.5, 'é', '2026-01-01Z'),"
            " ('2026-01-01', true, -1, '', '2026-01-01Z'),"
            " ('2026-01-01', false, 1.5, 'a', '2026-01-01Z'),"
            " ('2025-01-01', true, 7, '''\\', '2025-06-01Z'),"
            " ('2026-01-01', false, 1.5, 'a', '2026-01-01 00:00:00.000001Z'),"
            " ('2026-01-02', false, 0, 'z', '1999-01-01Z')"
        ),
    ),
}


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedPostgres]:
    # Settings of a session in which texts of times and intervals have other meanings.
    settings = {
        "wal_level": "logical",
        "timezone": "Europe/Berlin",
        "datestyle": "German, DMY",
        "intervalstyle": "sql_standard",
    }
    with EmbeddedPostgres(settings) as running:
        yield running


@pytest.fixture
def database(server: EmbeddedPostgres) -> Iterator[psycopg.Connection[TupleRow]]:
    with open_database(server) as connection:
        yield connection


def _create(database: psycopg.Connection[TupleRow], kind: str) -> str:
    """Create the table t with rows of this kind of key, and return the names of the key."""
    types, values = _KEYS[kind]
    names = [f"k{number}" for number in range(len(types))]
    columns = ", ".join(f"{name} {given}" for name, given in zip(names, types, strict=True))
    key = ", ".join(names)
    database.execute("SET datestyle = 'ISO'")
    database.execute(f"CREATE TABLE t ({columns}, v int DEFAULT 0, PRIMARY KEY ({key}))".encode())
    database.execute(f"INSERT INTO t ({key}) VALUES {values}".encode())
    return key


@pytest.mark.parametrize("kind", _KEYS)
def test_every_key_divides_the_table_where_its_order_does(
    server: EmbeddedPostgres, database: psycopg.Connection[TupleRow], kind: str
) -> None:
    key = _create(database, kind)
    source = source_of(server, first_copy="none")
    table = source.described_tables["t"]
    assert table.has_small_chunks
    count = len(table.columns)
    with connect(source.endpoint, "test") as session:

        def select(statement: str) -> list[tuple[Any, ...]]:
            columns = split_copy_rows(read_all_rows(session.copy_out(statement)), count)
            assert columns is not None
            return list(zip(*columns, strict=True))

        rows = select(f"COPY (SELECT * FROM t ORDER BY {key}) TO STDOUT (FORMAT binary)")
        keys = [key_of(table, row, copy_anew="") for row in rows]
        assert keys == sorted(keys)
        for at, bound in enumerate(keys):
            assert select(select_chunk(table, bound, None, 100)) == rows[at + 1 :], bound
            assert select(select_chunk(table, None, bound, 100)) == rows[: at + 1], bound
        chunk = select_chunk(table, keys[1], keys[-1], 2)
        query = chunk.removeprefix("COPY (").removesuffix(") TO STDOUT (FORMAT binary)")
        session.execute("SET enable_seqscan = off")
        plan = "\n".join(str(line) for (line,) in session.query(f"EXPLAIN {query}"))
        assert "Index Cond" in plan
        assert "Sort" not in plan


@pytest.mark.parametrize("kind", ["mixed", pytest.param("numeric", marks=pytest.mark.servers)])
def test_the_copy_continues_after_each_key_while_rows_change(
    server: EmbeddedPostgres, database: psycopg.Connection[TupleRow], kind: str
) -> None:
    key = _create(database, kind)
    source = source_of(server, batch_rows=1, chunk_rows=2)
    position = source.splits()
    target: dict[tuple[Any, ...], int] = {}
    steps, is_copied = 0, False
    while not is_copied:
        with contextlib.closing(source.reader(position, CONTEXT)) as reader:
            for row in read_rows(reader, 1):
                values = tuple(row[name] for name in key.split(", "))
                # A change that counts up is neither lost nor applied twice.
                assert (values in target) == (row["_op"] == "u"), row
                assert row["_op"] != "u" or row["v"] == target[values] + 1, row
                target[values] = row["v"]
                is_copied = is_copied or row["_op"] == "u"
            position = reader.snapshot()
        steps += 1
        if not is_copied:
            database.execute("UPDATE t SET v = v + 1")
    assert steps > len(target)
    assert len(target) == database.execute("SELECT count(*) FROM t").fetchall()[0][0]


def test_a_key_that_gets_another_type_in_the_copy_ends_it(
    server: EmbeddedPostgres, database: psycopg.Connection[TupleRow]
) -> None:
    """Its numbers would be read as other values, and rows between would be left out."""
    _create(database, "date")
    database.execute("DELETE FROM t WHERE k0 NOT BETWEEN '1000-01-01' AND '2100-01-01'")
    source = source_of(server, batch_rows=1, chunk_rows=2)
    with contextlib.closing(source.reader(source.splits(), CONTEXT)) as reader:
        read_rows(reader, 1)
        position = reader.snapshot()
    assert SlotPosition.from_split(position[0]).is_copying
    database.execute("ALTER TABLE t ALTER k0 TYPE timestamp")
    later = source_of(server, batch_rows=1, chunk_rows=2)
    with (
        contextlib.closing(later.reader(position, CONTEXT)) as reader,
        pytest.raises(OffsetOutOfRange, match="by the key k0 date, and the key is k0 timestamp"),
    ):
        read_rows(reader, 1)


def test_a_copy_does_not_continue_by_another_key_of_the_same_type(
    server: EmbeddedPostgres, database: psycopg.Connection[TupleRow]
) -> None:
    """Rows whose new key is below the old key's last value would be left out."""
    database.execute("CREATE TABLE t (k0 int PRIMARY KEY, v int NOT NULL)")
    database.execute("INSERT INTO t SELECT n, 10 - n FROM generate_series(1, 9) AS n")
    source = source_of(server, batch_rows=1, chunk_rows=2)
    with contextlib.closing(source.reader(source.splits(), CONTEXT)) as reader:
        read_rows(reader, 1)
        position = reader.snapshot()
    assert SlotPosition.from_split(position[0]).is_copying
    database.execute("ALTER TABLE t DROP CONSTRAINT t_pkey, ADD PRIMARY KEY (v)")
    later = source_of(server, batch_rows=1, chunk_rows=2)
    with (
        contextlib.closing(later.reader(position, CONTEXT)) as reader,
        pytest.raises(OffsetOutOfRange, match="by the key k0 number, and the key is v number"),
    ):
        read_rows(reader, 9)


def test_a_key_that_is_no_finite_number_is_read_as_the_error_advises(
    server: EmbeddedPostgres, database: psycopg.Connection[TupleRow]
) -> None:
    database.execute("CREATE TABLE t (k0 numeric(9, 2) PRIMARY KEY, v int)")
    database.execute("INSERT INTO t VALUES (1, 1), (2, 1), (3, 1)")
    source = source_of(server, batch_rows=1, chunk_rows=2)
    with contextlib.closing(source.reader(source.splits(), CONTEXT)) as reader:
        read_rows(reader, 1)
        position = reader.snapshot()
    # The copy does not find this row, and the stream has changes with its key.
    database.execute("INSERT INTO t VALUES ('NaN', 1)")
    database.execute("DELETE FROM t WHERE k0 = 'NaN'")
    with contextlib.closing(source.reader(position, CONTEXT)) as reader:
        with pytest.raises(BadRecord, match=r"no finite number.*string for it\. Drop the slot"):
            read_rows(reader, 9)
        position = reader.snapshot()
    assert not SlotPosition.from_split(position[0]).is_copying
    as_text = {"schema": {"k0": "string", "v": "int"}}
    # Only the first half of the advice: the copied part cannot be used.
    with (
        contextlib.closing(source_of(server, **as_text).reader(position, CONTEXT)) as reader,
        pytest.raises(OffsetOutOfRange, match=r"by the key k0 numeric.*not known.*Drop the slot"),
    ):
        read_rows(reader, 9)
    drop_slots(database)
    database.execute("INSERT INTO t VALUES ('NaN', 1)")
    anew = source_of(server, **as_text)
    with contextlib.closing(anew.reader(anew.splits(), CONTEXT)) as reader:
        rows = read_rows(reader, 4)
        database.execute("UPDATE t SET v = 2 WHERE k0 = 'NaN'")
        rows += read_rows(reader, 1)
    assert [row["k0"] for row in rows] == ["1.00", "2.00", "3.00", "NaN", "NaN"]
