"""The statements that write rows, given with the rows spelled in them or in a file.

Where rows are found by key they stand in a table of their own in front of a STRAIGHT_JOIN, so that
the server goes through them and looks each up in the unique index. A full walk through the target
would wait for rows of other transactions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa

from onceflow.sinks.mysql.catalog import TEXTS
from onceflow.sinks.mysql.fitting import MySQLFit, fits_of
from onceflow.sinks.mysql.names import identifier, quoted
from onceflow.sinks.mysql.spelling import value_rows
from onceflow.sinks.mysql.types import Spelling
from onceflow.sinks.sql.tables import Target
from onceflow.sinks.sql.write_mode import WriteMode


@dataclass(frozen=True, slots=True)
class RowsStatement:
    """A statement around the rows that it writes."""

    before: bytes
    after: bytes = b""
    row_word: str = ""
    """What each row begins with, before its parenthesis."""

    def __call__(self, fits: Sequence[MySQLFit], rows: pa.RecordBatch) -> bytes:
        """Return the statement with `rows`, which are `fitted_rows` of `fits`, in it."""
        return b"".join((self.before, value_rows(fits, rows, word=self.row_word), self.after))


_TEMPORALS = {"date": "DATE", "datetime": "DATETIME(6)", "timestamp": "DATETIME(6)"}


def load_statement(target: Target) -> str:
    """Return the LOAD DATA whose file is of `file_lines`; LOCAL makes an error a warning."""
    places: list[str] = []
    assigned: list[str] = []
    for number, fit in enumerate(fits_of(target)):
        match fit.wire.spelling:
            case Spelling.HEX:
                assigned.append(f"{quoted(fit.name)} = UNHEX(@c{number})")
                places.append(f"@c{number}")
            case Spelling.BITS:
                assigned.append(f"{quoted(fit.name)} = CAST(@c{number} AS UNSIGNED)")
                places.append(f"@c{number}")
            case Spelling.NUMBER | Spelling.QUOTED | Spelling.TEXT:
                places.append(quoted(fit.name))
    places.append("@end_of_line")
    return (
        f"LOAD DATA LOCAL INFILE 'rows' INTO TABLE {identifier(target.name)} CHARACTER SET utf8mb4 "
        "FIELDS TERMINATED BY '\\t' ESCAPED BY '\\\\' LINES TERMINATED BY '\\n' "
        f"({', '.join(places)}){' SET ' if assigned else ''}{', '.join(assigned)}"
    )


def insert_statement(target: Target) -> RowsStatement:
    """Return the INSERT of many rows."""
    return RowsStatement(f"{_insert_into(target)} VALUES ".encode())


def put_statements(
    target: Target, mode: WriteMode, key: Sequence[str], *, mariadb: bool
) -> tuple[RowsStatement, ...]:
    """Return what puts rows of all columns by `key`, one after the other; none for no change."""
    others = [number for number, fit in enumerate(fits_of(target)) if fit.name not in key]
    if mode is WriteMode.UPDATE:
        return (_update(target, key, others, mariadb=mariadb),) if others else ()
    changes = others if mode is WriteMode.UPSERT else []
    if len(target.table.unique_keys) == 1 and not target.table.other_unique:
        return (_on_duplicate_key(target, key, changes, mariadb=mariadb),)
    # ON DUPLICATE KEY goes by any unique index, and would change another key's row.
    update = (_update(target, key, changes, mariadb=mariadb),) if changes else ()
    return (*update, _insert_absent(target, key, mariadb=mariadb))


def delete_statement(target: Target, key: Sequence[str], *, mariadb: bool) -> RowsStatement:
    """Return what deletes the rows of the keys given."""
    fits = fits_of(target, key)
    tail = f" STRAIGHT_JOIN {_indexed(target, key)} ON {_same(fits, range(len(fits)))}"
    return _around_rows(fits, "DELETE FROM t USING ", tail, mariadb=mariadb)


def _on_duplicate_key(
    target: Target, key: Sequence[str], others: Sequence[int], *, mariadb: bool
) -> RowsStatement:
    names = [target.fits[number].name for number in others]
    new = "VALUES({})" if mariadb else "new_row.{}"
    assigned = ", ".join(f"{quoted(name)} = {new.format(quoted(name))}" for name in names)
    # Of an ignored row nothing changes.
    unchanged = f"{identifier(target.name)}.{quoted(key[0])}"
    tail = f" ON DUPLICATE KEY UPDATE {assigned or f'{quoted(key[0])} = {unchanged}'}"
    tail = tail if mariadb else f" AS new_row{tail}"
    return RowsStatement(f"{_insert_into(target)} VALUES ".encode(), tail.encode())


def _update(
    target: Target, key: Sequence[str], others: Sequence[int], *, mariadb: bool
) -> RowsStatement:
    numbers = _numbers(target, key)
    fits = fits_of(target)
    assigned = ", ".join(f"t.{quoted(fits[number].name)} = r.c{number}" for number in others)
    tail = f" STRAIGHT_JOIN {_indexed(target, key)} ON {_same(fits, numbers)} SET {assigned}"
    return _around_rows(fits, "UPDATE ", tail, mariadb=mariadb)


def _insert_absent(target: Target, key: Sequence[str], *, mariadb: bool) -> RowsStatement:
    fits = fits_of(target)
    columns = ", ".join(f"r.c{number}" for number in range(len(fits)))
    tail = (
        f" LEFT JOIN {_indexed(target, key)} ON {_same(fits, _numbers(target, key))} "
        f"WHERE t.{quoted(key[0])} IS NULL"
    )
    head = f"{_insert_into(target)} SELECT {columns} FROM "
    return _around_rows(fits, head, tail, mariadb=mariadb)


def _insert_into(target: Target) -> str:
    columns = ", ".join(quoted(fit.name) for fit in target.fits)
    return f"INSERT INTO {identifier(target.name)} ({columns})"


def _around_rows(fits: Sequence[MySQLFit], head: str, tail: str, *, mariadb: bool) -> RowsStatement:
    """Return a statement on the rows as a table `r` with the columns c0, c1 and so on."""
    names = ", ".join(f"c{number}" for number in range(len(fits)))
    typed = ", ".join(_typed(number, fit) for number, fit in enumerate(fits))
    before = f"{head}(WITH given({names}) AS (VALUES ".encode()
    after = f") SELECT {typed} FROM given) AS r{tail}".encode()
    return RowsStatement(before, after, "" if mariadb else "ROW")


def _typed(number: int, fit: MySQLFit) -> str:
    """Return a column as values that compare by the index, and assign as they are."""
    name, kind = f"c{number}", fit.type
    if fit.is_key and kind.name in _TEMPORALS:
        return f"CAST({name} AS {_TEMPORALS[kind.name]}) AS {name}"
    if fit.is_key and kind.name == "decimal":
        return f"CAST({name} AS DECIMAL({kind.precision},{kind.scale})) AS {name}"
    return name


def _same(fits: Sequence[MySQLFit], numbers: Sequence[int]) -> str:
    return " AND ".join(
        f"t.{quoted(fits[number].name)} = {_compared(number, fits[number])}" for number in numbers
    )


def _compared(number: int, fit: MySQLFit) -> str:
    kind = fit.type
    if kind.name in TEXTS and kind.collation:
        return f"CONVERT(r.c{number} USING {kind.charset}) COLLATE {kind.collation}"
    return f"r.c{number}"


def _numbers(target: Target, key: Sequence[str]) -> list[int]:
    return [number for number, fit in enumerate(fits_of(target)) if fit.name in key]


def _indexed(target: Target, key: Sequence[str]) -> str:
    index = target.table.index_over(key)
    hint = f" FORCE INDEX ({quoted(index)})" if index else ""
    return f"{identifier(target.name)} AS t{hint}"
