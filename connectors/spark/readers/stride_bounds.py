"""The conditions that divide a table into strides of equal width of a column, as in JDBC."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation

from onceflow.connectors.spark.readers.sql import Bounds, ReadColumn, strides
from onceflow.connectors.spark.readers.sql_filters import Comparable, SqlWords
from onceflow.core.errors import ConfigError

_DAY = dt.date(1970, 1, 1)
_TIME = dt.datetime(1970, 1, 1)
_MICROSECOND = dt.timedelta(microseconds=1)


def stride_conditions(
    columns: Sequence[ReadColumn], bounds: Bounds, tasks: int, words: SqlWords
) -> tuple[str, ...]:
    """Return a condition for each task. Together they cover every row exactly once.

    Raises:
        ConfigError: There is no such column, it has no order here, or a bound is not of its type.
    """
    column = next((candidate for candidate in columns if candidate.name == bounds.column), None)
    if column is None:
        raise ConfigError(
            f"partitionColumn={bounds.column!r} is not among"
            f" {', '.join(candidate.name for candidate in columns)}"
        )
    low, high = (_position(bound, column, bounds) for bound in (bounds.lower, bounds.upper))
    if low >= high:
        raise ConfigError(f"lowerBound={bounds.lower} is not below upperBound={bounds.upper}")
    # For integers there cannot be more strides than numbers.
    count = min(tasks, high - low)
    cuts = [low + (high - low) * index // count for index in range(1, count)]
    return strides(column.expression, [_to_sql(cut, column, words) for cut in cuts])


def _position(text: str, column: ReadColumn, bounds: Bounds) -> int:
    """Return a bound as an integer: the number itself, or days or microseconds since 1970."""
    try:
        match column.kind:
            case Comparable.NUMBER:
                return int(Decimal(text))
            case Comparable.DATE:
                return (dt.date.fromisoformat(text) - _DAY).days
            case Comparable.LOCAL_TIME:
                return (dt.datetime.fromisoformat(text) - _TIME) // _MICROSECOND
            case Comparable.INSTANT:
                given = dt.datetime.fromisoformat(text)
                utc = given if given.tzinfo is None else given.astimezone(dt.timezone.utc)
                return (utc.replace(tzinfo=None) - _TIME) // _MICROSECOND
            case _:
                raise ConfigError(
                    f"partitionColumn={bounds.column!r} is {column.type}; name one of numbers,"
                    " dates or timestamps"
                )
    except (ValueError, TypeError, InvalidOperation) as error:
        raise ConfigError(
            f"bound {text!r} does not fit partitionColumn={bounds.column!r} of type {column.type}:"
            f" {error}"
        ) from error


def _to_sql(position: int, column: ReadColumn, words: SqlWords) -> str:
    match column.kind:
        case Comparable.DATE:
            return f"DATE '{(_DAY + dt.timedelta(days=position)).isoformat()}'"
        case Comparable.LOCAL_TIME:
            at = _TIME + position * _MICROSECOND
            return f"TIMESTAMP '{at.isoformat(' ', 'microseconds')}'"
        case Comparable.INSTANT:
            at = _TIME + position * _MICROSECOND
            return words.instant(at.isoformat(" ", "microseconds"))
        case _:
            return str(position)
