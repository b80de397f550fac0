"""The round-trip matrix of databases: each value is read back as it was, or its row was refused.

In short form it has one Arrow type of each kind, and whole it has the catalogue.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tests.integration.sql import round_trips
from tests.integration.sql.databases import DATABASES, Database, SqlServer
from tests.integration.sql.round_trip_columns import (
    KEYS,
    MARIADB,
    MARIADB_TYPES,
    MYSQL,
    MYSQL_TYPES,
    POSTGRES,
    POSTGRES_TYPES,
    SQLITE,
    STRICT,
)
from tests.support.edge_values import NESTED, SCALARS, SHAPES, EdgeColumn

SHORT = frozenset(
    {"int8", "int64", "uint64", "bool", "halffloat", "float", "double"}
    | {"decimal128(38, 10)", "decimal128(5, -2)", "decimal256(50, 4)"}
    | {"string", "dictionary of string", "binary", "fixed_size_binary[3]"}
    | {"date32[day]", "time64[us]", "time64[ns]", "duration[us]", "null"}
    | {"timestamp[us]", "timestamp[ns]", "timestamp[us, tz=UTC]"}
    | {"list of int64", "list of double", "list of string", "list of decimal128(38, 10)"}
    | {"list of date32[day]", "list of timestamp[us]", "list of two of int64"}
)
"""The columns of the short form, by their names."""
_TEXTS = frozenset({"string", "dictionary of string"})
KEYS_IN_SHORT = frozenset(
    {"int64", "bool", "decimal128(38, 10)", "string", "binary"}
    | {"fixed_size_binary[3]", "fixed_size_binary[16]", "date32[day]", "time64[us]"}
    | {"timestamp[us]", "timestamp[us, tz=UTC]", "duration[us]"}
)
COLUMNS: Mapping[str, Mapping[str, Sequence[round_trips.StoredAs]]] = {
    "postgres": POSTGRES,
    "mysql": MYSQL,
    "mariadb": MARIADB,
}
_SETUP = {"postgres": POSTGRES_TYPES, "mysql": MYSQL_TYPES, "mariadb": MARIADB_TYPES}
_SHORT_WAY_OF_SQLITE = "upsert by ledger"
_SHORT_WAYS = frozenset({"insert", "upsert of rows that exist"})
"""Of the others, the whole form has all: they send the same values by the same statements."""


@pytest.fixture(scope="module")
def open_database(request: pytest.FixtureRequest) -> Iterator[Callable[[str], Database]]:
    """One database of each kind for the module: each test replaces its table."""
    with ExitStack() as stack:

        @cache
        def open_one(name: str) -> Database:
            kind = next(kind for kind in DATABASES if kind.name == name)
            server: SqlServer = request.getfixturevalue(f"onceflow_{name}")
            database = kind.create(server, f"matrix_{uuid.uuid4().hex[:16]}")
            stack.callback(database.drop, server)
            database.query(*_SETUP[name], "SELECT 1")
            return database

        yield open_one


def _cases() -> Iterator[Any]:
    for name, parts in COLUMNS.items():
        for part in parts:
            for way in round_trips.WAYS:
                for whole in (False, True):
                    slow = whole or way.name not in _SHORT_WAYS
                    mark = pytest.mark.slow if slow else ()
                    form = "whole" if whole else "short"
                    yield pytest.param(
                        name, part, way, whole, id=f"{name}-{part}-{way.name}-{form}", marks=mark
                    )


def _edges(*, whole: bool) -> list[EdgeColumn]:
    every = [*SCALARS, *NESTED]
    return every if whole else [edge for edge in every if edge.name in SHORT]


def _require_exact(
    store: round_trips.Store,
    columns: Sequence[round_trips.StoredAs],
    way: round_trips.Way,
    directory: Path,
    *,
    edges: Sequence[EdgeColumn],
    ending: str = "",
) -> None:
    """Write all cells in one way, and fail with the list of altered values."""
    altered: list[str] = []
    empty: list[str] = []
    cells = round_trips.find_cells(store, edges, columns, ending)
    for part in round_trips.open_parts(store, cells, directory, ending):
        faults, arrived = part.judge(way)
        altered += faults
        empty += [str(cell) for cell, count in arrived.items() if not count]
    assert altered == []
    assert empty == [], "the sink takes these columns at its start, and then no value"


@pytest.mark.parametrize(("name", "part", "way", "whole"), list(_cases()))
def test_a_value_in_a_database_is_what_was_written_or_its_row_was_refused(
    open_database: Callable[[str], Database],
    name: str,
    part: str,
    way: round_trips.Way,
    whole: bool,
    tmp_path: Path,
) -> None:
    edges = _edges(whole=whole)
    if part == "lists" and not whole:
        # The server refuses most of these texts as arrays, one by one, which takes half a minute.
        # `test_postgres_round_trip` writes the texts of arrays.
        edges = [edge for edge in edges if edge.name not in _TEXTS]
    _require_exact(open_database(name), COLUMNS[name][part], way, tmp_path, edges=edges)


@pytest.mark.parametrize("name", [*COLUMNS, "sqlite"])
def test_two_keys_of_the_stream_are_two_rows_and_a_delete_finds_its_row(
    open_database: Callable[[str], Database], name: str, tmp_path: Path
) -> None:
    is_file = name == "sqlite"
    store = round_trips.SQLiteFile(tmp_path / "matrix.db") if is_file else open_database(name)
    parts = [SQLITE] if is_file else [part for key, part in COLUMNS[name].items() if key != "lists"]
    columns = [stored for part in parts for stored in part if stored.declared in KEYS[name]]
    edges = [edge for edge in SCALARS if edge.name in KEYS_IN_SHORT]
    faults: list[str] = []
    for cell in round_trips.find_key_cells(store, edges, columns):
        faults += round_trips.judge_key(store, cell, tmp_path)
    assert faults == []


@pytest.mark.parametrize(
    ("way", "whole"),
    [
        pytest.param(
            way,
            whole,
            id=f"{way.name}-{'whole' if whole else 'short'}",
            marks=pytest.mark.slow if whole or way.name != _SHORT_WAY_OF_SQLITE else (),
        )
        for way in round_trips.WAYS
        if way.is_ledger
        for whole in (False, True)
    ],
)
@pytest.mark.parametrize("ending", ["", " STRICT"])
def test_a_value_in_sqlite_is_what_was_written_or_its_row_was_refused(
    ending: str, way: round_trips.Way, whole: bool, tmp_path: Path
) -> None:
    columns = STRICT if ending else SQLITE
    file = round_trips.SQLiteFile(tmp_path / "matrix.db")
    edges = _edges(whole=whole)
    _require_exact(file, columns, way, tmp_path, edges=edges, ending=ending)


_DOCUMENT = Path(__file__).resolve().parents[3] / "docs/internals/round-trips.md"


def test_the_document_lists_the_cells_of_the_matrix() -> None:
    sections = dict(
        section.split("\n", 1) for section in _DOCUMENT.read_text("utf-8").split("\n## ")[1:]
    )
    lists: dict[str, list[str]] = {
        "Ways of writing": [way.name for way in round_trips.WAYS],
        "Arrow types of the short form": [edge.name for edge in _edges(whole=False)],
        "All Arrow types": [*(edge.name for edge in SCALARS), *SHAPES],
        "Columns of SQLite": [stored.declared or "no declared type" for stored in SQLITE],
        "Columns of a STRICT table of SQLite": [stored.declared for stored in STRICT],
    }
    for name, title in (("postgres", "Postgres"), ("mysql", "MySQL"), ("mariadb", "MariaDB")):
        parts = COLUMNS[name].values()
        lists[f"Columns of {title}"] = [stored.declared for part in parts for stored in part]
    for title, names in lists.items():
        # Paragraphs of names alone, not of sentences.
        listed = [
            name
            for paragraph in sections[title].split("\n\n")
            if paragraph.lstrip().startswith("`")
            for name in re.findall("`([^`]*)`", paragraph)
        ]
        assert listed == names, title
