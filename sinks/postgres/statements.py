"""The statements that change rows by their key, over rows given as one array a column.

Their parameters are numbered, $1 and so on: names of columns may hold a percent sign.
"""

from __future__ import annotations

from collections.abc import Sequence

from onceflow.sinks.postgres.arrays import parameter_type
from onceflow.sinks.postgres.catalog import identifier, quoted
from onceflow.sinks.postgres.fitting import PostgresFit, fits_of
from onceflow.sinks.sql.tables import Target
from onceflow.sinks.sql.write_mode import WriteMode


def put_statement(target: Target, mode: WriteMode, key: Sequence[str]) -> str | None:
    """Return what puts rows of all columns; None when the mode changes nothing with them.

    Values are cast to the type without its limits, so that a value over a limit is refused: an
    explicit cast to the limited type would cut it in silence.
    """
    fits = fits_of(target)
    others = [number for number, fit in enumerate(fits) if fit.name not in key]
    if mode is WriteMode.UPDATE:
        return _update(target, key, others) if others else None
    columns = ", ".join(quoted(fit.name) for fit in fits)
    values = ", ".join(_value(number, fit) for number, fit in enumerate(fits))
    statement = (
        f"INSERT INTO {identifier(target.name)} ({columns}) OVERRIDING SYSTEM VALUE "
        f"SELECT {values} FROM {_rows(fits)}"
    )
    if mode is WriteMode.INSERT:
        return statement
    conflict = f" ON CONFLICT ({', '.join(map(quoted, key))}) "
    if mode is WriteMode.IGNORE or not others:
        return f"{statement}{conflict}DO NOTHING"
    names = [quoted(fits[number].name) for number in others]
    assigned = ", ".join(f"{name} = excluded.{name}" for name in names)
    return f"{statement}{conflict}DO UPDATE SET {assigned}"


def delete_statement(target: Target, key: Sequence[str]) -> str:
    """Return what deletes the rows of the keys given, one array a key column."""
    fits = fits_of(target, key)
    return f"DELETE FROM {identifier(target.name)} AS t USING {_rows(fits)} WHERE {_same(fits)}"


def _update(target: Target, key: Sequence[str], others: Sequence[int]) -> str:
    fits = fits_of(target)
    assigned = ", ".join(
        f"{quoted(fits[number].name)} = {_value(number, fits[number])}" for number in others
    )
    return (
        f"UPDATE {identifier(target.name)} AS t SET {assigned} FROM {_rows(fits)} "
        f"WHERE {_same(fits, key)}"
    )


def _rows(fits: Sequence[PostgresFit]) -> str:
    arrays = ", ".join(
        f"${number}::pg_catalog.{parameter_type(fit.type)}[]" for number, fit in enumerate(fits, 1)
    )
    names = ", ".join(f"c{number}" for number in range(len(fits)))
    return f"unnest({arrays}) AS u({names})"


def _value(number: int, fit: PostgresFit) -> str:
    column = f"u.c{number}"
    return column if parameter_type(fit.type) == fit.type.name else f"{column}::{fit.type.base}"


def _same(fits: Sequence[PostgresFit], key: Sequence[str] | None = None) -> str:
    return " AND ".join(
        f"t.{quoted(fit.name)} = {_value(number, fit)}"
        for number, fit in enumerate(fits)
        if key is None or fit.name in key
    )
