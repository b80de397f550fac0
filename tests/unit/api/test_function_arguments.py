"""Arguments of users' functions in SQL: each value arrives exactly, or the query is refused."""

from __future__ import annotations

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
    for text in ("argument 1 of f(), c, is", str(kind), str(takes), "CAST(c AS "):
        assert text in str(refused.value)


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
    with pytest.raises(ConfigError, match=r"argument 1 of f\(\), Int64\(9007199254740993\)"):
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


def test_the_advice_for_an_expression_quotes_no_text_that_is_not_sql() -> None:
    with pytest.raises(ConfigError, match=r"Int64\(1\), is int64.*CAST\(… AS DOUBLE\)"):
        query(pa.int64(), pa.float64(), "f(c + 1)").resolve_schema()


def test_an_argument_that_only_the_optimizer_refuses_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match=r"(?s)c IN \(1, f\(c\)\).*call to 'f'"):
        query(pa.float64(), pa.int64(), "c IN (1, f(c))").resolve_schema()
