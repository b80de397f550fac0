"""Columns of drawn types in databases: each value is as it was, or its row was refused by name.

An example is some columns of drawn values, some columns of the database, and a way of writing; its
cells are the pairs that the sink takes at its start.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.integration.sql import round_trips
from tests.integration.sql.databases import DATABASES
from tests.integration.sql.round_trip_columns import (
    MARIADB,
    MARIADB_TYPES,
    MYSQL,
    MYSQL_TYPES,
    POSTGRES,
    POSTGRES_TYPES,
    SQLITE,
    STRICT,
)
from tests.support.drawn_columns import SCALAR_TYPES, columns, nested_types, run_drawn
from tests.support.edge_values import EdgeColumn

_SETUP = {"postgres": POSTGRES_TYPES, "mysql": MYSQL_TYPES, "mariadb": MARIADB_TYPES}
_PARTS = {"postgres": POSTGRES, "mysql": MYSQL, "mariadb": MARIADB}
_COLUMNS: dict[str, list[round_trips.StoredAs]] = {
    # Columns with values of their own, such as JSON, take no drawn ones.
    **{
        name: [stored for part in parts.values() for stored in part if not stored.edges]
        for name, parts in _PARTS.items()
    },
    "sqlite": list(SQLITE),
    "strict": list(STRICT),
}
_SQLITES = ("sqlite", "strict")
_TYPES = st.one_of(SCALAR_TYPES, nested_types(1))


@pytest.fixture(scope="module")
def open_store(
    request: pytest.FixtureRequest,
) -> Iterator[Callable[[str, Path], round_trips.Store]]:
    """Returns the database of a name, one for the module, or a file in the test's directory."""
    with ExitStack() as stack:

        @cache
        def open_database(name: str) -> round_trips.Store:
            kind = next(kind for kind in DATABASES if kind.name == name)
            server = request.getfixturevalue(f"onceflow_{name}")
            database = kind.create(server, f"drawn_{uuid.uuid4().hex[:16]}")
            stack.callback(database.drop, server)
            database.query(*_SETUP[name], "SELECT 1")
            return database

        def open_one(name: str, directory: Path) -> round_trips.Store:
            is_file = name in _SQLITES
            return (
                round_trips.SQLiteFile(directory / "drawn.db") if is_file else open_database(name)
            )

        yield open_one


def _draw_edges(data: st.DataObject) -> list[EdgeColumn]:
    edges: list[EdgeColumn] = []
    for kind in data.draw(st.lists(_TYPES, min_size=1, max_size=3)):
        values = data.draw(columns(kind, data.draw(st.integers(1, 5))))
        edges.append(EdgeColumn(str(kind), lambda values=values: values))  # type: ignore[misc]
    return edges


def _examples(few: int, many: int) -> Iterator[object]:
    for name in _COLUMNS:
        marks = [pytest.mark.integration] if name in _SETUP else []
        yield pytest.param(name, few, id=f"{name}-{few}", marks=marks)
        yield pytest.param(name, many, id=f"{name}-{many}", marks=[*marks, pytest.mark.slow])


@pytest.mark.parametrize(("name", "examples"), list(_examples(5, 200)))
@pytest.mark.timeout(900)
def test_a_drawn_value_is_what_was_written_or_its_row_was_refused(
    open_store: Callable[[str, Path], round_trips.Store], name: str, examples: int, tmp_path: Path
) -> None:
    store = open_store(name, tmp_path)
    ending = " STRICT" if name == "strict" else ""
    ways = [way for way in round_trips.WAYS if way.is_ledger or name not in _SQLITES]

    def find_altered(
        edges: list[EdgeColumn], stored: list[round_trips.StoredAs], way: round_trips.Way
    ) -> list[str]:
        cells = round_trips.find_cells(store, edges, stored, ending)
        parts = round_trips.open_parts(store, cells, tmp_path, ending)
        return [fault for part in parts for fault in part.judge(way)[0]]

    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        edges = _draw_edges(data)
        stored = data.draw(st.lists(st.sampled_from(_COLUMNS[name]), min_size=8, max_size=20))
        assert find_altered(edges, stored, data.draw(st.sampled_from(ways))) == []

    run_drawn(check, examples)
