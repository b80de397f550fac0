"""How a SQLite file describes a table, and what the declared types of its columns do to values.

A column's type is a word, by which SQLite converts what it is given ("affinity"): text to a number
in a column called DECIMAL, a number to text in one called VARCHAR.
Source: https://www.sqlite.org/datatype3.html, section 3.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from onceflow.core.spi.connector import Area
from onceflow.sinks.sql.session import Session
from onceflow.sinks.sql.tables import Table, TableColumn, TableName

_TEMPORAL = re.compile(r"\s*(DATE|DATETIME|TIMESTAMP|TIME)\b", re.IGNORECASE)
_GENERATED = (2, 3)
"""The values of `hidden` in `table_xinfo` for virtual and stored generated columns."""
_ROWID = "rowid"
_VIEW = Area("table").problem("it is a view", "a table", "name a table")


class Affinity(Enum):
    """What a column makes of values that it is given."""

    INTEGER = "integer"
    REAL = "real"
    TEXT = "text"
    BLOB = "blob"
    NUMERIC = "numeric"
    TEMPORAL = "temporal"
    """NUMERIC, but declared for dates and times, which are kept as text."""
    NONE = "none"
    """Every value stays as it is."""


@dataclass(frozen=True, slots=True)
class SQLiteType:
    """A column's type as it was declared."""

    shown: str
    affinity: Affinity


def quote(name: str) -> str:
    """Return `name` as an identifier."""
    return '"' + name.replace('"', '""') + '"'


def literal(value: str) -> str:
    """Return `value` as SQL."""
    return "'" + value.replace("'", "''") + "'"


def parse_declaration(words: str, *, is_strict: bool = False) -> SQLiteType:
    """Return the type that `words` declare, by SQLite's rules in their order.

    `is_strict` is true for a column of a STRICT table. There alone ANY keeps each value: in an
    ordinary table it is a word without a meaning, and the column makes numbers of text.
    """
    upper = words.strip().upper()
    if is_strict and upper == "ANY":
        return SQLiteType(f"{words} of a STRICT table", Affinity.NONE)
    if not upper:
        affinity = Affinity.NONE
    elif "INT" in upper:
        affinity = Affinity.INTEGER
    elif any(part in upper for part in ("CHAR", "CLOB", "TEXT")):
        affinity = Affinity.TEXT
    elif "BLOB" in upper:
        affinity = Affinity.BLOB
    elif any(part in upper for part in ("REAL", "FLOA", "DOUB")):
        affinity = Affinity.REAL
    elif _TEMPORAL.match(upper):
        affinity = Affinity.TEMPORAL
    else:
        affinity = Affinity.NUMERIC
    return SQLiteType(words or "no declared type", affinity)


def find_table(session: Session, name: TableName) -> Table | None:
    """Return the table called `name` in the file itself, or None."""
    if name.schema not in (None, "", "main"):
        return None
    known = session.query(
        f"SELECT name, type FROM sqlite_master WHERE type IN ('table', 'view') "
        f"AND name = {literal(name.name)} COLLATE NOCASE"
    )
    if not known:
        return None
    table, kind = known[0]
    shown = TableName(None, str(table))
    columns = session.query(f"PRAGMA table_xinfo({literal(shown.name)})")
    is_strict = _is_strict(session, shown.name)
    keys, collations = _unique_keys(session, shown.name)
    primary = [str(column[1]) for column in columns if column[5]]
    # The one integer that is the primary key is the row's own number, and has no index.
    number = (
        primary[0]
        if len(primary) == 1 and not any(key == frozenset(primary) for _, key in keys)
        else ""
    )
    if number:
        keys.append((_ROWID, frozenset((number,))))
    return Table(
        name=shown,
        columns=tuple(
            _column(
                column,
                is_strict=is_strict,
                is_number=column[1] == number,
                collation=collations.get(column[1], ""),
            )
            for column in columns
        ),
        unfit=_VIEW if kind == "view" else None,
        unique_keys=tuple(keys),
        grantee="",
    )


def _is_strict(session: Session, table: str) -> bool:
    """Return whether each value in the table must have the type of its column."""
    # SQLite before 3.37 knows neither STRICT tables nor this pragma, and answers without a row.
    listed = session.query(f"PRAGMA main.table_list({literal(table)})")
    return any(row[5] for row in listed)


def _unique_keys(
    session: Session, table: str
) -> tuple[list[tuple[str, frozenset[str]]], dict[str, str]]:
    """Return the unique indexes over whole columns, and the collations of their columns."""
    keys: list[tuple[str, frozenset[str]]] = []
    collations: dict[str, str] = {}
    for _, index, unique, _, partial in session.query(f"PRAGMA index_list({literal(table)})"):
        if not unique or partial:
            continue
        parts = [
            (number, column, collation)
            for _, number, column, _, collation, is_key in session.query(
                f"PRAGMA index_xinfo({literal(str(index))})"
            )
            if is_key
        ]
        if all(number >= 0 for number, _, _ in parts):
            keys.append((str(index), frozenset(str(column) for _, column, _ in parts)))
            collations |= {
                column: collation_name
                for _, column, collation_name in parts
                # SQLite keeps the word as the table's author wrote it, and ignores its case.
                if str(collation_name).upper() != "BINARY"
            }
    return keys, collations


def _column(row: Sequence[Any], *, is_strict: bool, is_number: bool, collation: str) -> TableColumn:
    _, name, words, not_null, default, primary, hidden = row
    fault = (
        f"key column {name!r} has the collation {collation}, by which two keys of the stream may "
        "be one in the table; declare it COLLATE BINARY, and bring the keys to one form in the "
        "pipeline"
    )
    return TableColumn(
        name=name,
        type=parse_declaration(words, is_strict=is_strict),
        # A null for the row's own number would become a number.
        nullable=not (not_null or primary),
        has_default=default is not None or is_number,
        generated=hidden in _GENERATED,
        insertable=True,
        key_fault=fault if collation else "",
    )
