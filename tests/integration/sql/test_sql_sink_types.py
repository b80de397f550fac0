"""Values of every type arrive as they were, or are refused by column and value.

Each goes in by all the ways that a database's inserts and changes by key send it. Everything is
written at least once, because that needs no fence: values are spelled the same in all modes.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.integration.sql.databases import DATABASES, Database, SqlJob
from tests.integration.sql.mysql_type_samples import MARIADB, MYSQL
from tests.integration.sql.postgres_type_samples import POSTGRES
from tests.integration.sql.type_tables import TypeTables

from onceflow.core.errors import BadRow, ConfigError, SinkError
from onceflow.core.protocol.ids import CheckpointId
from onceflow.sinks.mysql.dml import COLUMN_ROWS_MIN, COLUMNS_MAX

_TABLES = {"postgres": POSTGRES, "mysql": MYSQL, "mariadb": MARIADB}
_EVERY = [(kind, _TABLES[kind.name]) for kind in DATABASES]
_MODES = ("insert", "upsert")


@pytest.fixture(scope="module")
def of_kind(request: pytest.FixtureRequest) -> Iterator[Callable[[type[Database]], Database]]:
    """One database of each kind for the module: each test replaces its table."""
    with ExitStack() as made:

        @cache
        def of_kind(kind: type[Database]) -> Database:
            server = request.getfixturevalue(f"onceflow_{kind.name}")
            database = kind.create(server, f"types_{uuid.uuid4().hex[:16]}")
            made.callback(database.drop, server)
            database.query(*_TABLES[kind.name].setup, "SELECT 1")
            return database

        yield of_kind


@pytest.fixture
def database(kind: type[Database], of_kind: Callable[[type[Database]], Database]) -> Database:
    return of_kind(kind)


@pytest.fixture
def tables(kind: type[Database]) -> TypeTables:
    return _TABLES[kind.name]


def _create(database: Database, columns: str, table: str = "t") -> None:
    database.query(f"DROP TABLE IF EXISTS {table}", f"CREATE TABLE {table} ({columns})")


def _create_v(database: Database, shown: str) -> None:
    _create(database, f"n int PRIMARY KEY, v {shown}")


def _job(database: Database, schema: pa.Schema, mode: str = "insert", **settings: Any) -> SqlJob:
    settings = {"table": "t", "write_mode": mode, "delivery": "at_least_once", **settings}
    if mode != "insert":
        settings = {"primary_key": ("n",), **settings}
    return SqlJob(database.sink(**settings), schema=schema)


def _write(
    database: Database,
    column: pa.Array,
    mode: str,
    *,
    first: int = 0,
    announced: pa.DataType | None = None,
    **settings: Any,
) -> None:
    """Write `column` as column v, numbered from `first` on."""
    numbers = range(first, first + len(column))
    schema = pa.schema([("n", pa.int32()), ("v", announced or column.type)])
    with _job(database, schema, mode, **settings) as job:
        if mode != "insert":
            job.check()
        writer = job.writer()
        writer.write(pa.record_batch({"n": pa.array(numbers, pa.int32()), "v": column}))
        writer.pre_commit(CheckpointId(1))


def _make_room(database: Database, count: int, mode: str, *, first: int) -> None:
    """Make the rows that are updated; the other modes want none."""
    if mode == "update":
        rows = ", ".join(f"({number})" for number in range(first, first + count))
        database.query(f"INSERT INTO t (n) VALUES {rows}")


def _read(database: Database, expression: str = "v", *, first: int = 0) -> list[Any]:
    where = f"n BETWEEN {first} AND {first + 99}"
    return [
        row[0] for row in database.query(f"SELECT {expression} FROM t WHERE {where} ORDER BY n")
    ]


def _shown_types(database: Database, tables: TypeTables, table: str = "t") -> list[str]:
    return [str(row[0]) for row in database.query(tables.shown_types.format(table=table))]


@pytest.mark.parametrize(
    ("kind", "shown", "arrow_type", "values"),
    [
        pytest.param(kind, *sample, id=f"{kind.name}-{sample[1]}-{sample[0]}")
        for kind, tables in _EVERY
        for sample in tables.samples
    ],
    indirect=["kind"],
)
def test_values_arrive_as_they_were(
    database: Database, tables: TypeTables, shown: str, arrow_type: pa.DataType, values: list[Any]
) -> None:
    column = pa.array(values, arrow_type)
    _create_v(database, shown)
    expression = tables.expressions.get(shown, "v")
    for number, mode in enumerate(tables.modes):
        first = number * 100
        _make_room(database, len(column), mode, first=first)
        _write(database, column, mode, first=first)
        got = _read(database, expression, first=first)
        expected = list(map(tables.comparable, column.to_pylist()))
        assert list(map(tables.comparable, got)) == expected, mode


@pytest.mark.parametrize(
    ("kind", "shown", "arrow_type", "values"),
    [
        pytest.param(kind, *sample, id=f"{kind.name}-{sample[1]}-{sample[0]}")
        for kind, tables in _EVERY
        if kind.name == "mysql"
        for sample in tables.samples
    ],
    indirect=["kind"],
)
def test_values_of_many_rows_arrive_as_they_were_whether_new_or_changed(
    database: Database, tables: TypeTables, shown: str, arrow_type: pa.DataType, values: list[Any]
) -> None:
    """Goal: many rows go in another statement with the same values. Method: insert, then update."""
    column = pa.array(values, arrow_type)
    turned = pa.array([*values[1:], values[0]], arrow_type)
    _create_v(database, shown)
    expression = tables.expressions.get(shown, "v")
    times = COLUMN_ROWS_MIN // len(values) + 1
    for written in (column, turned):
        _write(database, pa.concat_arrays([written] * times), "upsert")
        got = [row[0] for row in database.query(f"SELECT {expression} FROM t ORDER BY n")]
        expected = list(map(tables.comparable, written.to_pylist())) * times
        assert list(map(tables.comparable, got)) == expected


@pytest.mark.parametrize(
    "column",
    [
        pa.array(["a", "b", "a", None]).dictionary_encode(),
        pa.DictionaryArray.from_arrays(pa.array([0, 1, 0, None], pa.int8()), ["a", "b"]),
        pa.RunEndEncodedArray.from_arrays([1, 2, 3, 4], pa.array(["a", "b", "a", None])),
        pa.array(["a", "b", "a", None], pa.large_string()),
        pa.array(["x", "a", "b", "a", None, "y"]).slice(1, 4),
        pa.array(["x", "a", "b", "a", None, "y"], pa.string_view()).slice(1, 4),
    ],
    ids=["dictionary", "small-index", "run-ends", "large", "slice", "view-slice"],
)
def test_encodings_of_text_are_the_same_text(database: Database, column: pa.Array) -> None:
    _create_v(database, "text")
    for number, mode in enumerate(_MODES):
        for first, announced in ((number * 200, column.type), (number * 200 + 100, pa.string())):
            _write(database, column, mode, first=first, announced=announced)
            assert _read(database, first=first) == ["a", "b", "a", None]


@pytest.mark.only_proof
def test_random_values_arrive_as_they_were(database: Database, tables: TypeTables) -> None:
    """Each of many columns holds anything its type can; what arrives is what was written."""
    shown = ", ".join(f"{name} {one[0]}" for name, one in tables.fuzzed.items())
    _create(database, f"n int PRIMARY KEY, {shown}")

    @settings(max_examples=tables.fuzzes, deadline=None)
    @given(data=st.data())
    def arrive(data: st.DataObject) -> None:
        length = data.draw(st.integers(1, 20))

        def column(elements: st.SearchStrategy[Any], kind: pa.DataType) -> pa.Array:
            values = st.lists(st.none() | elements, min_size=length + 2, max_size=length + 2)
            return pa.array(data.draw(values), kind).slice(1, length)

        columns = {name: column(*one[1:]) for name, one in tables.fuzzed.items()}
        batch = pa.record_batch({"n": pa.array(range(length), pa.int32()), **columns})
        for mode in _MODES:
            database.query("DELETE FROM t")
            with _job(database, batch.schema, mode) as job:
                writer = job.writer()
                writer.write(batch)
                writer.pre_commit(CheckpointId(1))
            found = database.query(f"SELECT {', '.join(columns)} FROM t ORDER BY n")
            for position, (name, written) in enumerate(columns.items()):
                got = [row[position] for row in found]
                assert list(map(repr, got)) == list(map(repr, written.to_pylist())), (mode, name)

    arrive()


@pytest.mark.parametrize(
    ("kind", "shown", "column", "value"),
    [
        pytest.param(kind, *misfit, id=f"{kind.name}-{misfit[1].type}-{misfit[0]}")
        for kind, tables in _EVERY
        for misfit in tables.misfits
    ],
    indirect=["kind"],
)
def test_value_that_does_not_fit_is_refused_by_column_and_value(
    database: Database, shown: str, column: pa.Array, value: str
) -> None:
    _create_v(database, shown)
    for mode in _MODES:
        with pytest.raises(BadRow, match=rf"column 'v'.*({value})"):
            _write(database, column, mode)
    assert _read(database) == []


@pytest.mark.parametrize(
    ("kind", "shown", "column", "said", "said_by_key"),
    [
        pytest.param(kind, *one, id=f"{kind.name}-{one[0]}")
        for kind, tables in _EVERY
        for one in tables.refused_by_server
    ],
    indirect=["kind"],
)
def test_value_that_the_server_refuses_is_a_bad_row_of_that_column(
    database: Database,
    tables: TypeTables,
    shown: str,
    column: pa.Array,
    said: str,
    said_by_key: str,
) -> None:
    """And it is never cut so that it fits."""
    _create_v(database, shown)
    for number, mode in enumerate(tables.modes):
        first = number * 100
        _make_room(database, len(column), mode, first=first)
        before = _read(database, first=first)
        with pytest.raises(BadRow, match=said if mode == "insert" else said_by_key):
            _write(database, column, mode, first=first)
        assert _read(database, first=first) == before


@pytest.mark.parametrize(
    ("shown", "column", "said"),
    [
        pytest.param(shown, column, said_by_key, id=shown)
        for shown, column, _, said_by_key in MYSQL.refused_by_server
    ],
)
@pytest.mark.parametrize("kind", [one for one in DATABASES if one.name == "mysql"], indirect=True)
def test_value_that_the_server_refuses_among_many_rows_is_a_bad_row(
    database: Database, shown: str, column: pa.Array, said: str
) -> None:
    _create_v(database, shown)
    many = pa.concat_arrays([column] * COLUMN_ROWS_MIN)
    with pytest.raises(BadRow, match=said):
        _write(database, many, "upsert")
    assert database.query("SELECT COUNT(*) FROM t") == [(0,)]


@pytest.mark.parametrize("kind", [one for one in DATABASES if one.name == "mysql"], indirect=True)
@pytest.mark.parametrize("table", ["given", "numbers"])
def test_many_rows_go_into_a_table_that_is_called_like_a_part_of_the_statement(
    database: Database, table: str
) -> None:
    """Goal: they update and keep rows in it. Method: its columns have such names, too."""
    database.query(
        f"DROP TABLE IF EXISTS {table}", f"CREATE TABLE {table} (n int PRIMARY KEY, c0 int)"
    )
    schema = pa.schema([("n", pa.int32()), ("c0", pa.int32())])
    for mode, added in (("upsert", 1), ("upsert", 2), ("ignore", 3)):
        keys = range(COLUMN_ROWS_MIN)
        with _job(database, schema, mode, table=table) as job:
            writer = job.writer()
            values = [key + added for key in keys]
            writer.write(pa.record_batch({"n": keys, "c0": values}, schema=schema))
            writer.pre_commit(CheckpointId(1))
    assert database.query(f"SELECT COUNT(*), SUM(c0 = n + 2) FROM {table}") == [
        (COLUMN_ROWS_MIN, COLUMN_ROWS_MIN)
    ]


@pytest.mark.parametrize("kind", [one for one in DATABASES if one.name == "mysql"], indirect=True)
@pytest.mark.parametrize("columns", [COLUMNS_MAX, COLUMNS_MAX + 1])
@pytest.mark.parametrize("engine", ["TempTable", "MEMORY"])
def test_many_wide_rows_arrive_as_they_were(database: Database, columns: int, engine: str) -> None:
    """Goal: the server has room for what cuts them, in memory and on disk, where MEMORY goes."""
    texts = [f"v{number}" for number in range(columns - 1)]
    _create(database, "n int PRIMARY KEY, " + ", ".join(f"{text} varchar(99)" for text in texts))
    schema = pa.schema([("n", pa.int32()), *((text, pa.string()) for text in texts)])
    values = pa.array(["x" * (row % 90) if row % 7 else None for row in range(COLUMN_ROWS_MIN)])
    rows = pa.record_batch([range(COLUMN_ROWS_MIN), *[values] * len(texts)], schema=schema)
    database.query(f"SET GLOBAL internal_tmp_mem_storage_engine = {engine}", "SELECT 1")
    try:
        with _job(database, schema, "upsert") as job:
            writer = job.writer()
            writer.write(rows)
            writer.pre_commit(CheckpointId(1))
    finally:
        database.query("SET GLOBAL internal_tmp_mem_storage_engine = DEFAULT", "SELECT 1")
    assert database.query(f"SELECT {', '.join(texts)} FROM t ORDER BY n") == [
        (value,) * len(texts) for value in values.to_pylist()
    ]


def test_overflow_becomes_null_where_that_is_asked_for(database: Database) -> None:
    _create_v(database, "smallint")
    for number, mode in enumerate(_MODES):
        column = pa.array([1, 100_000, -100_000], pa.int64())
        _write(database, column, mode, first=number * 100, overflow="null")
        assert _read(database, first=number * 100) == [1, None, None]


@pytest.mark.parametrize(
    ("kind", "shown", "arrow_type"),
    [
        pytest.param(kind, *one, id=f"{kind.name}-{one[0]}-{one[1]}")
        for kind, tables in _EVERY
        for one in tables.forbidden
    ],
    indirect=["kind"],
)
def test_types_that_would_change_values_are_refused_with_both_names(
    database: Database, tables: TypeTables, shown: str, arrow_type: pa.DataType
) -> None:
    _create_v(database, shown)
    _, stored = _shown_types(database, tables)
    with _job(database, pa.schema([("n", pa.int32()), ("v", arrow_type)])) as job:
        with pytest.raises(ConfigError) as failure:
            job.check()
        with pytest.raises(ConfigError):
            job.writer()
    both = f"Arrow type {arrow_type} in the rows and {database.type_word} {stored} in the table"
    assert both in str(failure.value)


def test_created_table_takes_what_it_was_created_for(
    database: Database, tables: TypeTables
) -> None:
    """Every type is created, then matched and written to as nulls."""
    database.query("DROP TABLE IF EXISTS created")
    kinds = [kind for kind, _ in tables.created]
    schema = pa.schema([(f"c{number}", kind) for number, kind in enumerate(kinds)])
    with _job(database, schema, table="created", create=True) as job:
        writer = job.check().writer()
        nulls = [pa.nulls(2, kind) for kind in kinds]
        writer.write(pa.record_batch(nulls, schema=schema))
        writer.pre_commit(CheckpointId(1))
    # MariaDB shows the width of whole numbers, which means nothing.
    widths = re.compile(r"int\((?!1\))\d+\)")
    shown = [widths.sub("int", one) for one in _shown_types(database, tables, "created")]
    assert shown == [expected for _, expected in tables.created]
    assert database.query("SELECT count(*) FROM created") == [(2,)]


@pytest.mark.parametrize(
    ("kind", "arrow_type"),
    [
        pytest.param(kind, one, id=f"{kind.name}-{one}")
        for kind, tables in _EVERY
        for one in tables.uncreated
    ],
    indirect=["kind"],
)
def test_types_that_no_table_is_created_for_are_named(
    database: Database, tables: TypeTables, arrow_type: pa.DataType
) -> None:
    database.query("DROP TABLE IF EXISTS created")
    schema = pa.schema([("v", arrow_type)])
    job = _job(database, schema, table="created", create=True)
    with job, pytest.raises(ConfigError) as failure:
        job.check()
    said = f"column 'v': {tables.said_of_uncreated} Arrow type {arrow_type}"
    assert said in str(failure.value)


@pytest.mark.parametrize(
    ("kind", "shown", "keys"),
    [
        pytest.param(kind, *key, id=f"{kind.name}-{key[1].type}-{key[0]}")
        for kind, tables in _EVERY
        for key in tables.keys
    ],
    indirect=["kind"],
)
def test_keys_of_every_type_find_their_row(database: Database, shown: str, keys: pa.Array) -> None:
    _create(database, f"n {shown} PRIMARY KEY, v int")
    distinct = len(set(keys.to_pylist()))
    schema = pa.schema([("n", keys.type), ("v", pa.int32())])
    with _job(database, schema, "upsert", tombstones=True) as job:
        writer = job.check().writer()
        for checkpoint in (1, 2):
            values = pa.array(range(checkpoint, checkpoint + 3), pa.int32())
            writer.write(pa.record_batch([keys, values], schema=schema))
            writer.pre_commit(CheckpointId(checkpoint))
        assert database.query("SELECT count(*), max(v) FROM t") == [(distinct, 4)]
        writer.write(pa.record_batch([keys, pa.nulls(3, pa.int32())], schema=schema))
        writer.pre_commit(CheckpointId(3))
    assert database.query("SELECT count(*) FROM t") == [(0,)]


def test_batch_of_other_columns_or_types_than_announced_is_refused(database: Database) -> None:
    _create_v(database, "int")
    for batch, said in (
        (pa.record_batch({"n": [1], "x": [1]}), "announced"),
        (pa.record_batch({"n": [1]}), "announced"),
        (pa.record_batch({"n": [1], "v": [1.0]}), "Arrow type double.*int"),
    ):
        announced = pa.schema([("n", pa.int64()), ("v", pa.int64())])
        with _job(database, announced) as job:
            writer = job.writer()
            with pytest.raises(SinkError, match=said):
                writer.write(batch)
    assert database.query("SELECT count(*) FROM t") == [(0,)]


def test_columns_may_come_in_another_order(database: Database) -> None:
    _create_v(database, "text")
    announced = pa.schema([("n", pa.int64()), ("v", pa.string())])
    with _job(database, announced) as job:
        writer = job.writer()
        writer.write(pa.record_batch({"v": ["a"], "n": [1]}))
        writer.write(pa.record_batch({"n": [2], "v": ["b"]}))
        writer.pre_commit(CheckpointId(1))
    assert database.query("SELECT n, v FROM t ORDER BY n") == [(1, "a"), (2, "b")]
