"""Rows of MySQL and MariaDB as one column of CSV, which Arrow parses.

The server always sends text. If a query selects columns, each value has its own length, which
Python would have to read value by value. If it selects a row as one text, Arrow's parser reads it.
So `select_rows` selects one CONCAT_WS of all columns: text in double quotes, bytes as hexadecimal
digits, and null as nothing.
"""

from __future__ import annotations

import binascii
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from pyarrow import csv

from onceflow.clients.mysql.catalog import TEXTS, MySQLType, quote
from onceflow.clients.mysql.types import BINARIES
from onceflow.core.arrow.kinds import cast_rows

_PRECISION_MAX = 38
_INTEGERS: dict[str, tuple[pa.DataType, pa.DataType]] = {
    "tinyint": (pa.int8(), pa.int16()),
    "smallint": (pa.int16(), pa.int32()),
    "mediumint": (pa.int32(), pa.int32()),
    "int": (pa.int32(), pa.int64()),
    "bigint": (pa.int64(), pa.decimal128(20, 0)),
    "year": (pa.int32(), pa.int32()),
}
"""The types of signed and unsigned integers. Spark has no unsigned numbers."""
_SIMPLE: dict[str, pa.DataType] = {
    "float": pa.float32(),
    "double": pa.float64(),
    "date": pa.date32(),
    "datetime": pa.timestamp("us"),
    "timestamp": pa.timestamp("us", "UTC"),
}
_AS_TEXT = frozenset({"json", "enum", "set", "time", "uuid", "inet4", "inet6"})
"""The types that are read as text. Others (geometry, vector) are read as bytes, in hexadecimal."""


class ReadType(NamedTuple):
    """The SQL expression that selects a column, and the Arrow type of its values."""

    expression: str
    arrow: pa.DataType


def plan_column(column: str, kind: MySQLType) -> ReadType:
    """Return the expression that selects `column`, and the Arrow type of its values."""
    name = quote(column)
    if kind.name in _SIMPLE:
        # A float is sent with six digits unless it is converted to a double.
        return ReadType(f"{name} * 1e0" if kind.name == "float" else name, _SIMPLE[kind.name])
    if kind.name in BINARIES:
        return ReadType(name, pa.binary())
    if kind.name == "bit":
        return ReadType(f"{name} + 0", pa.decimal128(20, 0))
    if (number := _number_type(kind)) is not None:
        return ReadType(name, number)
    is_text = kind.name in TEXTS or kind.name in _AS_TEXT
    return ReadType(name if is_text else f"HEX({name})", pa.string())


def _number_type(kind: MySQLType) -> pa.DataType | None:
    if is_boolean(kind):
        # This is as in JDBC. A number other than 0 and 1 is an error.
        return pa.bool_()
    if kind.name in _INTEGERS:
        signed, unsigned = _INTEGERS[kind.name]
        return unsigned if kind.unsigned else signed
    if kind.name == "decimal":
        return pa.decimal128(min(kind.precision or 10, _PRECISION_MAX), kind.scale or 0)
    return None


def is_boolean(kind: MySQLType) -> bool:
    """Return True if the column holds booleans, as drivers agree on."""
    return kind.shown.lower().startswith("tinyint(1)")


def is_whole_number(kind: MySQLType) -> bool:
    """Return True if the column holds integers of any size."""
    return kind.name in _INTEGERS and not is_boolean(kind)


def select_rows(statement: str, schema: pa.Schema) -> str:
    """Return the query for the rows of `statement`, which has the columns of `schema`, as text."""
    names = ", ".join(_select_text(field) for field in schema)
    return f"SELECT CONCAT_WS(',', {names}) FROM ({statement}) AS onceflow_rows"


def _select_text(column: pa.Field) -> str:
    name = quote(column.name)
    if pa.types.is_binary(column.type):
        # With quotes, an empty value is empty bytes; without quotes it is null.
        return f"IFNULL(CONCAT('\"', HEX({name}), '\"'), '')"
    if pa.types.is_string(column.type):
        # MySQL cannot concatenate texts of two character sets if neither is Unicode.
        text = f"CONVERT({name} USING utf8mb4)"
        return f"IFNULL(CONCAT('\"', REPLACE({text}, '\"', '\"\"'), '\"'), '')"
    return f"IFNULL({name}, '')"


def parse_rows(lines: bytes, schema: pa.Schema) -> pa.RecordBatch:
    """Return the rows that `select_rows` has selected, each value exactly.

    Raises:
        ArrowException: A value does not fit its type.
    """
    read = {field.name: _type_to_parse(field.type) for field in schema}
    table = csv.read_csv(
        pa.BufferReader(lines),
        # Use one block, so that Arrow does not cut the text between two rows and end a chunk
        # there.
        read_options=csv.ReadOptions(
            use_threads=False, column_names=list(read), block_size=len(lines) + 1
        ),
        parse_options=csv.ParseOptions(newlines_in_values=True, ignore_empty_lines=False),
        convert_options=csv.ConvertOptions(
            column_types=read,
            null_values=[""],
            strings_can_be_null=True,
            quoted_strings_can_be_null=False,
            true_values=["1"],
            false_values=["0"],
        ),
    )
    batch = table.combine_chunks().to_batches()[0]
    # Decimals are read as text, and are checked only here.
    arrays = [
        _array(column, field.type) for column, field in zip(batch.columns, schema, strict=True)
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _type_to_parse(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_timestamp(kind):
        return pa.timestamp("us")
    if pa.types.is_float32(kind):
        return pa.float64()
    # Arrow's reader would change decimals that do not fit to other numbers.
    is_text = pa.types.is_binary(kind) or pa.types.is_decimal(kind)
    return pa.string() if is_text else kind


def _array(array: pa.Array, kind: pa.DataType) -> pa.Array:
    if pa.types.is_binary(kind):
        return _decode_hex(array)
    return cast_rows(array, kind)


def _decode_hex(digits: pa.Array) -> pa.Array:
    """Return the bytes of hexadecimal digits, all values at once."""
    validity, offsets, data = digits.buffers()
    if offsets is None or data is None:
        return pa.nulls(len(digits), pa.binary())
    bounds = np.frombuffer(memoryview(offsets), dtype=np.int32, count=len(digits) + 1)
    octets = binascii.unhexlify(memoryview(data)[: int(bounds[-1])])
    # Two digits are one byte, so every offset is halved.
    halved = pa.py_buffer((bounds // 2).astype(np.int32).tobytes())
    return pa.Array.from_buffers(pa.binary(), len(digits), [validity, halved, pa.py_buffer(octets)])
