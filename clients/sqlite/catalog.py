"""The tables of a SQLite file, and the effect of declared column types on values.

A column's type is a word, by which SQLite converts values ("affinity"): text to a number in a
column called DECIMAL, a number to text in a column called VARCHAR.

Source: https://www.sqlite.org/datatype3.html, section 3.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from onceflow.clients.sql.session import Session
from onceflow.clients.sql.tables import CheckConstraint, Table, TableColumn, TableName
from onceflow.core.spi.connector import Area

_TEMPORAL = re.compile(r"\s*(DATE|DATETIME|TIMESTAMP|TIME)\b", re.IGNORECASE)
_GENERATED = (2, 3)
"""The values of `hidden` in `table_xinfo` for virtual and stored generated columns."""
_ROWID = "rowid"
_VIEW = Area("table").problem("it is a view", "a table", "name a table")


class Affinity(Enum):
    """The conversion that a column applies to its values."""

    INTEGER = "integer"
    REAL = "real"
    TEXT = "text"
    BLOB = "blob"
    NUMERIC = "numeric"
    TEMPORAL = "temporal"
    """NUMERIC, but declared for dates and times, which are stored as text."""
    NONE = "none"
    """No conversion: every value stays unchanged."""


@dataclass(frozen=True, slots=True)
class SQLiteType:
    """The type of a column as it was declared."""

    shown: str
    affinity: Affinity


def quote(name: str) -> str:
    """Return `name` as a quoted identifier."""
    return '"' + name.replace('"', '""') + '"'


def literal(value: str) -> str:
    """Return `value` as a SQL literal."""
    return "'" + value.replace("'", "''") + "'"


def parse_declaration(words: str, *, is_strict: bool = False) -> SQLiteType:
    """Return the type that `words` declare, by SQLite's rules in their order.

    `is_strict` is True for a column of a STRICT table. Only there ANY keeps each value. In an
    ordinary table the word has no meaning, and the column turns numeric text into numbers.
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
    """Return the table called `name` in the file itself (not an attached one), or None."""
    if name.schema not in (None, "", "main"):
        return None
    known = session.query(
        f"SELECT name, type, sql FROM sqlite_master WHERE type IN ('table', 'view') "
        f"AND name = {literal(name.name)} COLLATE NOCASE"
    )
    if not known:
        return None
    table, kind, definition = known[0]
    shown = TableName(None, str(table))
    columns = session.query(f"PRAGMA table_xinfo({literal(shown.name)})")
    is_strict = _is_strict(session, shown.name)
    keys, collations = _unique_keys(session, shown.name)
    primary = [str(column[1]) for column in columns if column[5]]
    # A single integer column as the primary key is the rowid, and has no index.
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
        # SQLite does not list constraints: they are only in the definition of the table.
        checks=(CheckConstraint(shown.name, str(definition), frozenset()),),
    )


def list_referenced_tables(session: Session, name: TableName) -> frozenset[TableName]:
    """Return the tables to which foreign keys of the table called `name` refer."""
    rows = session.query(f"PRAGMA foreign_key_list({literal(name.name)})")
    return frozenset(TableName(None, str(row[2])) for row in rows)


def _is_strict(session: Session, table: str) -> bool:
    """Return True if the table is STRICT: each value must have the type of its column."""
    # SQLite before 3.37 has neither STRICT tables nor this pragma, and returns no row.
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
                # SQLite stores the word as the table's author wrote it, and ignores its case.
                if str(collation_name).upper() != "BINARY"
            }
    return keys, collations


def _column(row: Sequence[Any], *, is_strict: bool, is_number: bool, collation: str) -> TableColumn:
    _, name, words, not_null, default, primary, hidden = row
    fault = (
        f"key column {name!r} has the collation {collation}, with which two keys of the stream"
        " may become one row; declare it COLLATE BINARY, and normalize the keys in the pipeline"
    )
    return TableColumn(
        name=name,
        type=parse_declaration(words, is_strict=is_strict),
        # A null in the rowid column would be replaced by a number.
        nullable=not (not_null or primary),
        has_default=default is not None or is_number,
        generated=hidden in _GENERATED,
        insertable=True,
        key_fault=fault if collation else "",
    )
