"""The translation of Spark's filters to SQL, where the database decides like Spark.

Spark does not apply a filter again if it is told that the filter is exact. It applies all others
again. A text comparison by the database's collation may accept more values than Spark's comparison
of bytes. Such a filter is pushed down anyway, because an index may serve it, and Spark applies it
again. A filter that might accept fewer values is not pushed down.
"""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from enum import Enum
from typing import Any


class Comparable(Enum):
    """A kind as which a column is compared."""

    NUMBER = "number"
    BOOLEAN = "boolean"
    TEXT = "text"
    DATE = "date"
    LOCAL_TIME = "timestamp without time zone"
    INSTANT = "timestamp with time zone"


@dataclass(frozen=True, slots=True)
class FilterColumn:
    """A column for filters."""

    expression: str
    """The SQL expression that is read."""
    kind: Comparable | None
    """The kind of the column; None if only null checks are possible."""


@dataclass(frozen=True, slots=True)
class SqlWords:
    """The functions with which one database writes values."""

    text: Callable[[str], str]
    instant: Callable[[str], str]
    """A function that writes a UTC time, given as `2026-01-31 12:00:00.000001`."""


@dataclass(frozen=True, slots=True)
class PushedFilter:
    """A filter as SQL."""

    sql: str
    exact: bool
    """True if the filter accepts the same rows as Spark's."""


_OPERATORS = {
    "EqualTo": "=",
    "GreaterThan": ">",
    "GreaterThanOrEqual": ">=",
    "LessThan": "<",
    "LessThanOrEqual": "<=",
}
_PATTERNS = {
    "StringStartsWith": "{}%",
    "StringEndsWith": "%{}",
    "StringContains": "%{}%",
}
_NULLS = {"IsNull": "IS NULL", "IsNotNull": "IS NOT NULL"}
_INT64_BITS = 63


def push_down(
    spark_filter: Any, columns: Mapping[str, FilterColumn], words: SqlWords
) -> PushedFilter | None:
    """Return the `pyspark.sql.datasource` filter as SQL, or None if Spark must apply it."""
    name = type(spark_filter).__name__
    if name == "Not":
        inner = push_down(spark_filter.child, columns, words)
        # Do not negate a filter that accepts extra rows: its negation would drop rows.
        return PushedFilter(f"NOT ({inner.sql})", True) if inner and inner.exact else None
    column = columns.get(spark_filter.attribute[0]) if len(spark_filter.attribute) == 1 else None
    if column is None:
        return None
    if name in _NULLS:
        return PushedFilter(f"{column.expression} {_NULLS[name]}", True)
    return (
        None
        if column.kind is None
        else _by_value(name, spark_filter.value, column, column.kind, words)
    )


def _by_value(
    name: str, value: Any, column: FilterColumn, kind: Comparable, words: SqlWords
) -> PushedFilter | None:
    if name == "In":
        return _in(value, column, kind, words)
    if name in _PATTERNS:
        return _like(name, value, column, words)
    return _push_comparison(name, value, column, kind, words)


def _push_comparison(
    name: str, value: Any, column: FilterColumn, kind: Comparable, words: SqlWords
) -> PushedFilter | None:
    operator = _OPERATORS.get(name)
    text = _literal(value, kind, words)
    if operator is None or text is None:
        return None
    if kind is Comparable.TEXT and operator != "=":
        return None
    return PushedFilter(f"{column.expression} {operator} {text}", kind is not Comparable.TEXT)


def _in(
    values: tuple[Any, ...], column: FilterColumn, kind: Comparable, words: SqlWords
) -> PushedFilter | None:
    texts = [_literal(value, kind, words) for value in values]
    listed = [text for text in texts if text is not None]
    if not listed or len(listed) != len(texts):
        return None
    return PushedFilter(
        f"{column.expression} IN ({', '.join(listed)})", kind is not Comparable.TEXT
    )


def _like(name: str, value: Any, column: FilterColumn, words: SqlWords) -> PushedFilter | None:
    if column.kind is not Comparable.TEXT or not isinstance(value, str) or "\0" in value:
        return None
    escaped = value.replace("!", "!!").replace("%", "!%").replace("_", "!_")
    pattern = words.text(_PATTERNS[name].format(escaped))
    return PushedFilter(f"{column.expression} LIKE {pattern} ESCAPE '!'", False)


def _literal(value: Any, kind: Comparable, words: SqlWords) -> str | None:
    """Return `value` as SQL, or None if it is not of the column's kind or cannot be written."""
    match kind:
        case Comparable.BOOLEAN:
            return str(value).upper() if isinstance(value, bool) else None
        case Comparable.NUMBER:
            return _number(value)
        case Comparable.TEXT:
            return words.text(value) if isinstance(value, str) and "\0" not in value else None
        case Comparable.DATE:
            is_day = isinstance(value, dt.date) and not isinstance(value, dt.datetime)
            return f"DATE '{value.isoformat()}'" if is_day else None
        case Comparable.LOCAL_TIME | Comparable.INSTANT:
            return _time(value, kind, words)


def _number(value: Any) -> str | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return str(value) if value.bit_length() <= _INT64_BITS else None
    if isinstance(value, Decimal) and value.is_finite():
        return format(value, "f")
    # Both databases read the text of a double as the same number.
    return repr(value) if isinstance(value, float) and math.isfinite(value) else None


def _time(value: Any, kind: Comparable, words: SqlWords) -> str | None:
    if not isinstance(value, dt.datetime) or (value.tzinfo is None) is (kind is Comparable.INSTANT):
        return None
    if value.tzinfo is None:
        return f"TIMESTAMP '{value.isoformat(' ', 'microseconds')}'"
    utc = value.astimezone(dt.timezone.utc).replace(tzinfo=None)
    return words.instant(utc.isoformat(" ", "microseconds"))
