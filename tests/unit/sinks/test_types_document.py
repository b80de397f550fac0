"""The type table of the documents says what the code does, cell by cell.

That values arrive as they were is tested on a real server: see postgres_type_samples.py.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import types as spark
from pyspark.sql.pandas.types import to_arrow_type

from onceflow.clients.postgres.catalog import PostgresType
from onceflow.clients.postgres.types import wire_of
from onceflow.clients.sql.tables import TableName
from onceflow.core.arrow.kinds import to_plain_type
from onceflow.core.errors import ConfigError
from onceflow.sinks.postgres.dialect import POSTGRES
from onceflow.sinks.sql.ddl import creation

_DOCUMENT = Path(__file__).resolve().parents[3] / "docs/reference/types.md"

ARROW: dict[str, pa.DataType] = {
    "int8": pa.int8(), "int16": pa.int16(), "int32": pa.int32(), "int64": pa.int64(),
    "uint8": pa.uint8(), "uint16": pa.uint16(), "uint32": pa.uint32(), "uint64": pa.uint64(),
    "float16": pa.float16(), "float32": pa.float32(), "float64": pa.float64(),
    "decimal128(p,s)": pa.decimal128(20, 4), "decimal256(p,s)": pa.decimal256(50, 4),
    "bool": pa.bool_(), "string": pa.string(), "large_string": pa.large_string(),
    "string_view": pa.string_view(), "dictionary of string": pa.dictionary(pa.int8(), pa.string()),
    "binary": pa.binary(), "large_binary": pa.large_binary(), "binary_view": pa.binary_view(),
    "fixed_size_binary(16)": pa.binary(16), "fixed_size_binary(n)": pa.binary(5),
    "uuid (extension)": pa.uuid(), "date32": pa.date32(), "date64": pa.date64(),
    "timestamp": pa.timestamp("us"), "timestamp with zone": pa.timestamp("us", "UTC"),
    "time32, time64": pa.time64("us"), "duration": pa.duration("us"),
    "list of int32": pa.list_(pa.int32()), "list of string": pa.list_(pa.string()),
    "null": pa.null(), "struct": pa.struct([("a", pa.int32())]),
    "map": pa.map_(pa.string(), pa.int32()),
}  # fmt: skip
SPARK: dict[str, spark.DataType] = {
    "int8": spark.ByteType(), "int16": spark.ShortType(), "int32": spark.IntegerType(),
    "int64": spark.LongType(), "float32": spark.FloatType(), "float64": spark.DoubleType(),
    "decimal128(p,s)": spark.DecimalType(20, 4), "bool": spark.BooleanType(),
    "string": spark.StringType(), "binary": spark.BinaryType(), "date32": spark.DateType(),
    "timestamp": spark.TimestampNTZType(), "timestamp with zone": spark.TimestampType(),
    "duration": spark.DayTimeIntervalType(), "null": spark.NullType(),
    "list of int32": spark.ArrayType(spark.IntegerType()),
    "list of string": spark.ArrayType(spark.StringType()),
}  # fmt: skip
_NAMES = {
    "int2": "smallint", "int4": "integer", "int8": "bigint", "float4": "real",
    "float8": "double precision", "numeric": "numeric", "bool": "boolean", "text": "text",
    "varchar": "varchar(n)", "bpchar": "char(n)", "citext": "citext", "enum": "enum",
    "json": "json", "jsonb": "jsonb", "bytea": "bytea", "uuid": "uuid", "date": "date",
    "timestamp": "timestamp", "timestamptz": "timestamptz", "time": "time",
    "interval": "interval",
}  # fmt: skip
_ARRAYS = {"int4": "integer[]", "text": "text[]"}


def taken_by(kind: pa.DataType) -> list[str]:
    """Return the Postgres types into which columns of `kind` go."""
    targets = {PostgresType(name, name): shown for name, shown in _NAMES.items()}
    arrays = {
        PostgresType(f"_{name}", shown, element=name): shown for name, shown in _ARRAYS.items()
    }
    every = targets | arrays
    found = [
        shown for target, shown in every.items() if wire_of(to_plain_type(kind), target) is not None
    ]
    return ["any"] if len(found) == len(every) else found


def created_as(kind: pa.DataType) -> str:
    """Return the type of the column in a table that onceflow creates, or "-"."""
    try:
        text = creation(POSTGRES, TableName(None, "t"), pa.schema([("v", kind)]), ())
    except ConfigError:
        return "-"
    made = re.sub(r"\s+", " ", text.partition("(")[2].rpartition(")")[0]).strip()
    return made.removeprefix("v ").lower()


def row(name: str) -> str:
    """Return the line of the table for the Arrow type called so."""
    taken = ", ".join(taken_by(ARROW[name])) or "-"
    spark_name = SPARK[name].typeName() if name in SPARK else "-"
    # The table shows any precision and scale.
    created = created_as(ARROW[name]).replace("20, 4", "p, s")
    return f"| {name} | {spark_name} | {taken} | {created} |"


@pytest.mark.parametrize("name", ARROW)
def test_line_of_the_document_is_what_the_code_does(name: str) -> None:
    lines: dict[str, str] = {}
    for line in _DOCUMENT.read_text(encoding="utf-8").splitlines():
        if line.startswith("| "):
            lines.setdefault(line.split(" | ")[0].removeprefix("| "), line)
    assert lines.get(name) == row(name)


@pytest.mark.parametrize("name", SPARK)
def test_spark_types_are_those_arrow_types(name: str) -> None:
    convert: Any = to_arrow_type
    # Newer versions of Spark want to be told the session's zone.
    zone = {"timezone": "UTC"} if "timezone" in inspect.signature(convert).parameters else {}
    found = convert(SPARK[name], **zone)
    if pa.types.is_list(found):
        assert found.value_type == ARROW[name].value_type
    elif pa.types.is_timestamp(found) and found.tz:
        assert pa.types.is_timestamp(ARROW[name])
        assert ARROW[name].tz
    else:
        assert found == ARROW[name]
