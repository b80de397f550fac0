"""Arguments of users' functions in SQL: each value arrives exactly, or the query is refused."""

from __future__ import annotations

import re
from datetime import date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from onceflow import SqlFunction
from onceflow.core.errors import ConfigError
from onceflow.core.plan.function_arguments import widens
from onceflow.core.plan.sql_functions import name_functions
from onceflow.core.plan.stream_sql import StreamSql

pytest.importorskip("datafusion")

VALUES: dict[pa.DataType, Any] = {
    pa.int8(): -128,
    pa.int16(): -(1 << 15) + 1,
    pa.int32(): (1 << 31) - 1,
    pa.int64(): (1 << 63) - 1,
    pa.uint8(): 255,
    pa.uint16(): (1 << 16) - 1,
    pa.uint32(): (1 << 32) - 1,
    pa.uint64(): (1 << 64) - 1,
    pa.float16(): 0.1,
    pa.float32(): 0.1,
    pa.float64(): 0.1,
    pa.decimal128(10, 2): Decimal("0.11"),
    pa.decimal128(38, 10): Decimal("1234567890123456789012345678.0123456789"),
    pa.string(): "2026-01-01T00:00:00.0000000019",
    pa.large_string(): "x",
    pa.binary(): b"\xff",
    pa.bool_(): True,
    pa.date32(): date(2026, 1, 31),
    pa.timestamp("s"): datetime(2026, 1, 31),
    pa.timestamp("us"): datetime(2026, 1, 31, 0, 0, 0, 1),
    pa.timestamp("ns"): 1_800_000_000_000_000_001,
    pa.timestamp("ms", "UTC"): 1_800_000_000_001,
    pa.timestamp("us", "UTC"): 1_800_000_000_000_001,
    pa.timestamp("ns", "UTC"): 1_800_000_000_000_000_001,
    pa.timestamp("us", "Europe/Berlin"): 1_800_000_000_000_001,
    pa.time64("ns"): 1,
    pa.duration("ns"): 1,
    pa.list_(pa.int64()): [(1 << 63) - 1],
    pa.list_(pa.float32()): [0.1],
}
"""A value of each type that a narrower type does not hold."""


def keep(array: pa.Array) -> pa.Array:
    return array


def query(kind: pa.DataType, takes: pa.DataType, call: str = "f(c)") -> StreamSql:
    functions = name_functions({"f": SqlFunction(keep, (takes,), takes)})
    return StreamSql(f"SELECT {call} AS made FROM stream", pa.schema([("c", kind)]), functions)


@pytest.mark.parametrize("kind", VALUES, ids=str)
def test_each_argument_arrives_exactly_or_is_refused(kind: pa.DataType) -> None:
    given, refused = pa.array([VALUES[kind], None], kind), list[pa.DataType]()
    for takes in VALUES:
        sql = query(kind, takes)
        try:
            sql.resolve_schema()
        except ConfigError:
            refused.append(takes)
            continue
        [made] = sql.apply(pa.record_batch([given], names=["c"]))
        # The way back has no effect on values of a wider type.
        assert made.column(0).cast(kind, safe=True) == given, f"{kind} as {takes}"
        assert widens(kind, takes)
    assert kind not in refused


@pytest.mark.parametrize(
    ("kind", "takes"),
    [
        (pa.int64(), pa.float64()),
        (pa.int32(), pa.float32()),
        (pa.uint64(), pa.float64()),
        (pa.decimal128(10, 2), pa.float64()),
        (pa.timestamp("ns"), pa.timestamp("us", "UTC")),
        (pa.timestamp("us"), pa.timestamp("us", "Europe/Berlin")),
        (pa.list_(pa.int64()), pa.list_(pa.float32())),
        (pa.string(), pa.timestamp("ns")),
        (pa.float64(), pa.string()),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "call", ["f(c)", "CASE WHEN f(c) IS NULL THEN 1 END", "[f(c)]", "f(f(c))", "coalesce(f(c))"]
)
def test_a_lossy_argument_is_refused_with_both_types(
    kind: pa.DataType, takes: pa.DataType, call: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        query(kind, takes, call).resolve_schema()
    for text in ("argument 1 of f(), c, is", str(kind), str(takes)):
        assert text in str(refused.value)
    assert re.search(r"or write (CAST\(c AS .+\)|arrow_cast\(c, '.+'\)) to", str(refused.value))


@pytest.mark.parametrize(
    ("kind", "takes", "call"),
    [
        (pa.int64(), pa.float64(), "f(CAST(c AS DOUBLE))"),
        (pa.timestamp("ns"), pa.timestamp("us", "UTC"), "f(CAST(c AS TIMESTAMP(6)))"),
        (pa.decimal128(10, 2), pa.float64(), "f(CAST(c AS DOUBLE))"),
        (pa.float64(), pa.string(), "f(CAST(c AS VARCHAR))"),
        (pa.int32(), pa.float32(), "f(CAST(c AS REAL))"),
        (pa.int64(), pa.float64(), "f(3)"),
        (pa.int64(), pa.float64(), "f(-3)"),
        (pa.int64(), pa.float64(), "f(NULL)"),
    ],
)
def test_the_advised_cast_and_exact_constants_are_accepted(
    kind: pa.DataType, takes: pa.DataType, call: str
) -> None:
    assert query(kind, takes, call).resolve_schema().field(0).type == takes


def test_a_constant_that_would_be_rounded_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"argument 1 of f\(\), 9007199254740993, is int64"):
        query(pa.int64(), pa.float64(), f"f({(1 << 53) + 1})").resolve_schema()


@pytest.mark.parametrize("name", ["c", "a b", 'q"x', "Größe"])
def test_the_advised_cast_of_a_column_is_accepted_word_for_word(name: str) -> None:
    schema = pa.schema([(name, pa.int64())])
    functions = name_functions({"f": SqlFunction(keep, (pa.float64(),), pa.float64())})
    quoted = name.replace('"', '""')
    call = f'SELECT f("{quoted}") AS made FROM stream'
    with pytest.raises(ConfigError) as refused:
        StreamSql(call, schema, functions).resolve_schema()
    advised = str(refused.value).partition("or write ")[2].partition(" to round")[0]
    sql = StreamSql(f"SELECT f({advised}) AS made FROM stream", schema, functions)
    assert sql.resolve_schema().field(0).type == pa.float64()


def make_query(argument: str, takes: pa.DataType, source: str = "stream") -> StreamSql:
    """Return the query of f(`argument`) over rows with numbers at several places."""
    number = pa.int64()
    columns = [("c", number), ("i", pa.int32()), ("s", pa.struct([("a", number)]))]
    columns += [
        ("l", pa.list_(number)),
        ("m", pa.map_(pa.string(), number)),
        ("at", pa.time64("us")),
    ]
    columns += [("order", number), ("d", pa.decimal128(10, 2))]
    functions = name_functions({"f": SqlFunction(keep, (takes,), takes)})
    text = f"SELECT f({argument}) AS made FROM {source}"
    return StreamSql(text, pa.schema(columns), functions)


@pytest.mark.parametrize(
    ("argument", "takes", "source"),
    [
        ("c + 1", pa.float64(), "stream"),
        ("q.c", pa.float64(), "stream AS q"),
        ("y", pa.float64(), "(SELECT c AS y FROM stream) AS z"),
        ("s.a", pa.float64(), "stream"),
        ("l[1]", pa.float64(), "stream"),
        ("m['k']", pa.float64(), "stream"),
        ('"order"', pa.float64(), "stream"),
        ("unnest(l)", pa.float64(), "stream"),
        ("CASE WHEN m['it''s'] > 1 THEN c END", pa.float64(), "stream"),
        ("l", pa.list_(pa.float64()), "stream"),
    ],
)
def test_the_advised_cast_of_an_expression_is_accepted_word_for_word(
    argument: str, takes: pa.DataType, source: str
) -> None:
    with pytest.raises(ConfigError, match="is .*int64") as refused:
        make_query(argument, takes, source).resolve_schema()
    advised = str(refused.value).partition("or write ")[2].partition(" to round")[0]
    make_query(advised, takes, source).resolve_schema()


@pytest.mark.parametrize(
    ("argument", "takes"),
    [
        ("3", pa.int32()),
        ("3", pa.uint8()),
        ("0.5", pa.float32()),
        ("'2026-01-01'", pa.date32()),
        ("c", pa.int32()),
        ("c", pa.decimal128(38, 0)),
        ("d", pa.decimal128(12, 2)),
        ("at", pa.time32("ms")),
        ("s", pa.struct([("a", pa.float64())])),
    ],
    ids=str,
)
def test_an_argument_that_is_never_converted_is_refused_with_the_call_to_write(
    argument: str, takes: pa.DataType
) -> None:
    with pytest.raises(ConfigError, match=r"Call it as f\(.*….*\) to round") as refused:
        make_query(argument, takes).resolve_schema()
    advised = str(refused.value).partition("Call it as f(")[2].partition(") to round")[0]
    sql = make_query(advised.replace("…", argument), takes)
    assert sql.resolve_schema().field(0).type == takes


def test_the_type_of_a_case_is_that_of_all_its_branches() -> None:
    large = 2**53 + 1
    with pytest.raises(ConfigError, match="is int64. The function takes double"):
        make_query(f"CASE WHEN c = {large} THEN c ELSE i END", pa.float64()).resolve_schema()
    with pytest.raises(ConfigError, match="is int64. The function takes double"):
        make_query(f"CASE WHEN c < {large} THEN i ELSE c END", pa.float64()).resolve_schema()
    make_query("CASE WHEN c = 1 THEN 1 ELSE 0.5 END", pa.float64()).resolve_schema()


def test_an_argument_that_only_the_optimizer_refuses_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match=r"(?s)c IN \(1, f\(c\)\).*call to 'f'"):
        query(pa.float64(), pa.int64(), "c IN (1, f(c))").resolve_schema()
