"""The catalogue of the round-trip matrix holds what it says, and its comparison misses nothing."""

from __future__ import annotations

import datetime as dt
import math
import re
from collections import Counter
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pytest
from tests.support.edge_values import (
    NESTED,
    SCALARS,
    EdgeColumn,
    invalid_text,
    parameters,
    times_beyond_a_day,
)
from tests.support.exact_values import (
    Clock,
    Day,
    Instant,
    Local,
    Span,
    exact_values,
    same,
    same_digits,
)
from tests.support.spark_values import SCALARS as SPARK
from tests.support.spark_values import TIMES
from tests.unit.sinks.test_types_document import ARROW

UTC = dt.timezone.utc


@pytest.mark.parametrize("edge", parameters([*SCALARS, *NESTED]))
def test_a_column_of_the_catalogue_is_valid_and_equals_itself_alone(edge: EdgeColumn) -> None:
    edge.values.validate(full=True)
    values = exact_values(edge.values)
    assert len(values) == len(edge.values)
    assert same(values, exact_values(edge.values))
    assert edge.values.null_count or edge.type == pa.null() or "run ends" in edge.name


def test_each_column_has_a_name_of_its_own() -> None:
    counts = Counter(edge.name for edge in (*SCALARS, *NESTED))
    assert [name for name, count in counts.items() if count > 1] == []


def test_every_type_that_sinks_speak_of_is_in_the_catalogue() -> None:
    types, names = {edge.type for edge in SCALARS}, {edge.name for edge in SCALARS}
    missing = [
        name
        for name, kind in ARROW.items()
        if not (pa.types.is_nested(kind) or kind in types or name in names)
    ]
    # Of some other width than that of a UUID.
    assert missing == ["fixed_size_binary(n)"]


@pytest.mark.parametrize(
    ("read", "written"),
    [
        (0.0, -0.0),
        (1, True),
        (1, 1.0),
        (None, 0),
        (None, math.nan),
        ("a", b"a"),
        ("a", "a "),
        ([1, None], [1]),
        ({"a": None}, {}),
        ({"a": 0.0}, {"a": -0.0}),
        (Decimal("1.0"), 1.0),
        (dt.datetime(1970, 1, 1), Day(0)),
        (dt.datetime(1970, 1, 1), Instant(0)),
        (dt.datetime(1970, 1, 1, tzinfo=UTC), Local(0)),
        (dt.time(0), Span(0)),
    ],
)
def test_values_that_python_takes_for_equal_or_nearly_are_not_the_same(
    read: object, written: object
) -> None:
    assert not same(read, written)
    assert not same(written, read)


@pytest.mark.parametrize(
    ("read", "written"),
    [
        (math.nan, -math.nan),
        ((1, [None]), [1, (None,)]),
        (dt.date(1969, 12, 31), Day(-1)),
        (dt.datetime(1970, 1, 1, 0, 0, 0, 1), Local(1_000)),
        (dt.datetime(1, 1, 1, 5, 30, tzinfo=dt.timezone(dt.timedelta(hours=5))),
         Instant((-62_135_596_800 + 1_800) * 10**9)),
        (dt.time(0, 0, 1), Clock(10**9)),
        (dt.timedelta(microseconds=-1), Span(-1_000)),
        (Decimal("1.0"), Decimal(1)),
    ],
)  # fmt: skip
def test_values_in_another_form_are_the_same(read: object, written: object) -> None:
    assert same(read, written)


def test_the_document_lists_the_types_of_spark() -> None:
    document = Path(__file__).resolve().parents[3] / "docs/internals/round-trips.md"
    section = document.read_text("utf-8").partition("\n## Spark's types\n")[2].partition("\n## ")[0]
    (names,) = [part for part in section.split("\n\n") if part.lstrip().startswith("`TINYINT`")]
    assert re.findall("`([^`]*)`", names) == [column.name for column in (*SPARK, *TIMES)]


def test_digits_after_the_point_count_where_they_are_asked_for() -> None:
    assert not same_digits([Decimal("1.0")], [Decimal(1)])
    assert same_digits([Decimal("1.0")], [Decimal("1.0")])


def test_what_is_no_valid_column_is_given_all_the_same() -> None:
    for column in (invalid_text(), times_beyond_a_day(pa.time64("us"))):
        with pytest.raises(pa.ArrowInvalid):
            column.validate(full=True)
