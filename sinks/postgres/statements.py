"""The statements that change rows by their key, over rows given as one array a column.

Their parameters are numbered, $1 and so on: names of columns may hold a percent sign.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

from psycopg import sql

from onceflow.sinks.postgres.arrays import parameter_type
from onceflow.sinks.postgres.catalog import identifier
from onceflow.sinks.postgres.fitting import ColumnFit
from onceflow.sinks.postgres.tables import PostgresTarget
from onceflow.sinks.sql import WriteMode


def put_statement(
    target: PostgresTarget, mode: WriteMode, key: Sequence[str]
) -> sql.Composed | None:
    """Return what puts rows of all columns; None when the mode changes nothing with them.

    Values are cast to the type without its limits, so that a value over a limit is refused: an
    explicit cast to the limited type would cut it in silence.
    """
    others = [number for number, fit in enumerate(target.fits) if fit.name not in key]
    if mode is WriteMode.UPDATE:
        return _update(target, key, others) if others else None
    statement = sql.SQL(
        "INSERT INTO {table} ({columns}) OVERRIDING SYSTEM VALUE SELECT {values} FROM {rows}"
    ).format(
        table=identifier(target.name),
        columns=_joined(sql.Identifier(fit.name) for fit in target.fits),
        values=_joined(_value(number, fit) for number, fit in enumerate(target.fits)),
        rows=_rows(target.fits),
    )
    if mode is WriteMode.INSERT:
        return statement
    conflict = sql.SQL(" ON CONFLICT ({}) ").format(_joined(map(sql.Identifier, key)))
    if mode is WriteMode.IGNORE or not others:
        return statement + conflict + sql.SQL("DO NOTHING")
    names = [sql.Identifier(target.fits[number].name) for number in others]
    assigned = _joined(sql.SQL("{0} = excluded.{0}").format(name) for name in names)
    return statement + conflict + sql.SQL("DO UPDATE SET ") + assigned


def delete_statement(target: PostgresTarget, key: Sequence[str]) -> sql.Composed:
    """Return what deletes the rows of the keys given, one array a key column."""
    fits = target.fits_of(tuple(key))
    return sql.SQL("DELETE FROM {table} AS t USING {rows} WHERE {same}").format(
        table=identifier(target.name), rows=_rows(fits), same=_same(fits)
    )


def _update(target: PostgresTarget, key: Sequence[str], others: Sequence[int]) -> sql.Composed:
    assigned = _joined(
        sql.SQL("{} = {}").format(
            sql.Identifier(target.fits[number].name), _value(number, target.fits[number])
        )
        for number in others
    )
    return sql.SQL("UPDATE {table} AS t SET {assigned} FROM {rows} WHERE {same}").format(
        table=identifier(target.name),
        assigned=assigned,
        rows=_rows(target.fits),
        same=_same(target.fits, key),
    )


def _rows(fits: Sequence[ColumnFit]) -> sql.Composed:
    arrays = _joined(
        _text(f"${number}::pg_catalog.{parameter_type(fit.column.type)}[]")
        for number, fit in enumerate(fits, 1)
    )
    names = _joined(sql.Identifier(f"c{number}") for number in range(len(fits)))
    return sql.SQL("unnest({}) AS u({})").format(arrays, names)


def _value(number: int, fit: ColumnFit) -> sql.Composed:
    column = sql.Identifier("u", f"c{number}")
    if parameter_type(fit.column.type) == fit.column.type.name:
        return sql.Composed([column])
    return sql.SQL("{}::{}").format(column, _text(fit.column.type.base))


def _same(fits: Sequence[ColumnFit], key: Sequence[str] | None = None) -> sql.Composed:
    return sql.SQL(" AND ").join(
        sql.SQL("t.{} = {}").format(sql.Identifier(fit.name), _value(number, fit))
        for number, fit in enumerate(fits)
        if key is None or fit.name in key
    )


def _joined(parts: Iterable[sql.Composable]) -> sql.Composed:
    return sql.SQL(", ").join(parts)


def _text(made: str) -> sql.SQL:
    """Return SQL that is made of numbers and of what the catalogs say of types."""
    return sql.SQL(cast("Any", made))
