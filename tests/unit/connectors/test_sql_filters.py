"""Filters of Spark as SQL: what the database may decide, and what Spark must look at again."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from typing import Any

import pytest
from pyspark.sql import datasource as spark

from onceflow.connectors.spark.readers.sql_filters import (
    Comparable,
    FilterColumn,
    PushedFilter,
    SqlWords,
    push_down,
)

_WORDS = SqlWords(text=lambda text: f"'{text}'", instant=lambda text: f"INSTANT '{text}'")
_COLUMNS = {
    "id": FilterColumn("id", Comparable.NUMBER),
    "word": FilterColumn("word", Comparable.TEXT),
    "day": FilterColumn("day", Comparable.DATE),
    "at": FilterColumn("at", Comparable.INSTANT),
    "local": FilterColumn("local", Comparable.LOCAL_TIME),
    "list": FilterColumn("list", None),
}
_ID, _WORD, _DAY, _AT, _LOCAL = ("id",), ("word",), ("day",), ("at",), ("local",)
_NOON = dt.datetime(2026, 1, 31, 12)
_NOON_IN_PARIS = dt.datetime(2026, 1, 31, 13, tzinfo=dt.timezone(dt.timedelta(hours=1)))


def _push(one: Any) -> PushedFilter | None:
    return push_down(one, _COLUMNS, _WORDS)


@pytest.mark.parametrize(
    ("one", "sql"),
    [
        (spark.EqualTo(_ID, 2), "id = 2"),
        (spark.GreaterThanOrEqual(_ID, Decimal("1E+2")), "id >= 100"),
        (spark.LessThan(_ID, -0.5), "id < -0.5"),
        (spark.In(_ID, (1, 4)), "id IN (1, 4)"),
        (spark.Not(spark.In(_ID, (1, 4))), "NOT (id IN (1, 4))"),
        (spark.LessThanOrEqual(_DAY, dt.date(2026, 1, 31)), "day <= DATE '2026-01-31'"),
        (spark.GreaterThan(_AT, _NOON_IN_PARIS), "at > INSTANT '2026-01-31 12:00:00.000000'"),
        (spark.EqualTo(_LOCAL, _NOON), "local = TIMESTAMP '2026-01-31 12:00:00.000000'"),
        (spark.IsNull(("list",)), "list IS NULL"),
        (spark.Not(spark.IsNotNull(_WORD)), "NOT (word IS NOT NULL)"),
    ],
)
def test_what_a_database_decides_as_spark_does_is_left_to_it(one: Any, sql: str) -> None:
    assert _push(one) == PushedFilter(sql, exact=True)


@pytest.mark.parametrize(
    ("one", "sql"),
    [
        (spark.EqualTo(_WORD, "a"), "word = 'a'"),
        (spark.In(_WORD, ("a", "b")), "word IN ('a', 'b')"),
        (spark.StringStartsWith(_WORD, "a%_!"), "word LIKE 'a!%!_!!%' ESCAPE '!'"),
        (spark.StringEndsWith(_WORD, "a"), "word LIKE '%a' ESCAPE '!'"),
        (spark.StringContains(_WORD, "a"), "word LIKE '%a%' ESCAPE '!'"),
    ],
)
def test_text_is_sought_by_the_database_and_looked_at_again_by_spark(one: Any, sql: str) -> None:
    """A collation may take 'A' for 'a': the opposite of such a filter would leave out 'A'."""
    assert _push(one) == PushedFilter(sql, exact=False)
    assert _push(spark.Not(one)) is None


@pytest.mark.parametrize(
    "one",
    [
        spark.GreaterThan(_WORD, "a"),
        spark.EqualTo(_WORD, "a\0"),
        spark.StringContains(_WORD, "a\0"),
        spark.StringContains(_ID, "1"),
        spark.EqualTo(_ID, "2"),
        spark.EqualTo(_ID, True),
        spark.EqualTo(_ID, float("nan")),
        spark.EqualTo(_ID, 1 << 63),
        spark.In(_ID, (1, None)),
        spark.In(_ID, ()),
        spark.EqualTo(_AT, _NOON),
        spark.EqualTo(_LOCAL, _NOON_IN_PARIS),
        spark.EqualTo(_DAY, _NOON),
        spark.EqualTo(("list",), (1,)),
        spark.EqualTo(("id", "inner"), 1),
        spark.EqualTo(("other",), 1),
    ],
)
def test_what_a_database_may_decide_otherwise_is_left_to_spark(one: Any) -> None:
    assert _push(one) is None
