"""Columns of rows as array parameters of one statement, for rows that COPY cannot put.

`unnest($1, $2, …)` gives a statement its rows without a temporary table, which a prepared
transaction may not touch, and which has a cost in the catalogs each time. The bytes of an array are
the encoder's own for a list: number of dimensions, whether there are nulls, element type, length,
first index, then the elements, each with its length. Only the element type is ours, because the
encoder names the one that it would have chosen.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import pgpq
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types as arrow

from onceflow.core.errors import SinkError
from onceflow.sinks.postgres.catalog import PostgresType
from onceflow.sinks.postgres.connection import BinaryArray, type_number
from onceflow.sinks.postgres.fitting import PostgresFit

# Signature, flags and length of the extension area of a COPY, then the number of columns.
_COPY_HEAD_BYTES = 11 + 4 + 4
_COUNT = struct.Struct(">h")
_LENGTH = struct.Struct(">i")
_ELEMENT_TYPE_AT = 8
_ELEMENT_TYPE = struct.Struct(">I")
# The others have no array form of their own on the wire, or need a version byte: they go as text.
_OWN_ARRAYS = frozenset(
    {"int2", "int4", "int8", "float4", "float8", "bool", "bytea", "numeric", "date", "timestamp"}
    | {"timestamptz", "time", "interval", "uuid"}
)


def parameter_type(target: PostgresType) -> str:
    """Return the element type in which values of `target` travel: its own, or text."""
    return target.name if target.name in _OWN_ARRAYS and not target.element else "text"


def array_parameters(fits: Sequence[PostgresFit], rows: pa.RecordBatch) -> list[BinaryArray]:
    """Return the columns of `rows` that `fits` name, each as one array.

    Raises:
        BadRow: A value does not fit the table; names column and value.
    """
    columns = [_element_form(fit, fit.apply(rows.column(fit.name))) for fit in fits]
    bounds = pa.array([0, rows.num_rows], pa.int32())
    lists = [pa.ListArray.from_arrays(bounds, column) for column in columns]
    fields = [pa.field(str(number), one.type) for number, one in enumerate(lists)]
    single = pa.RecordBatch.from_arrays(lists, schema=pa.schema(fields))
    encoder = pgpq.ArrowToPostgresBinaryEncoder(single.schema)
    data = bytearray(encoder.write_header()) + encoder.write_batch(single) + encoder.finish()
    return [
        BinaryArray(_with_element_type(one, parameter_type(fit.type)))
        for one, fit in zip(_fields(data, len(fits)), fits, strict=True)
    ]


def _fields(data: bytearray, expected: int) -> list[bytearray]:
    position = _COPY_HEAD_BYTES
    (count,) = _COUNT.unpack_from(data, position)
    if count != expected:
        raise SinkError(f"the encoder wrote {count} columns for {expected}")
    position += _COUNT.size
    fields: list[bytearray] = []
    for _ in range(count):
        (length,) = _LENGTH.unpack_from(data, position)
        position += _LENGTH.size
        fields.append(data[position : position + length])
        position += length
    return fields


def _with_element_type(array: bytearray, name: str) -> bytes:
    _ELEMENT_TYPE.pack_into(array, _ELEMENT_TYPE_AT, type_number(name))
    return bytes(array)


def _element_form(fit: PostgresFit, column: pa.Array) -> pa.Array:
    if not fit.type.element:
        return column
    if not arrow.is_list(column.type):
        return pa.nulls(len(column), pa.large_string())
    return array_literals(column)


def array_literals(lists: pa.Array) -> pa.Array:
    """Return each list as the text that Postgres reads as an array: {"a",NULL}."""
    values = lists.flatten()
    if arrow.is_binary(values.type) or arrow.is_large_binary(values.type):
        text = pa.array(
            [None if one is None else f"\\x{one.hex()}" for one in values.to_pylist()],
            pa.large_string(),
        )
    else:
        text = values.cast(pa.large_string())
    for special in ("\\", '"'):
        text = pc.replace_substring(text, special, f"\\{special}")
    elements = pc.fill_null(_enclosed('"', text, '"'), _large("NULL"))
    lengths = pc.fill_null(pc.list_value_length(lists), 0).to_numpy(zero_copy_only=False)
    bounds = pa.array([0, *lengths.cumsum().tolist()], pa.int64())
    joined = pc.binary_join(pa.LargeListArray.from_arrays(bounds, elements), _large(","))
    literals: pa.Array = pc.if_else(lists.is_valid(), _enclosed("{", joined, "}"), _large(None))
    return literals


def _enclosed(before: str, texts: pa.Array, after: str) -> pa.Array:
    enclosed: pa.Array = pc.binary_join_element_wise(
        _large(before), texts, _large(after), _large("")
    )
    return enclosed


def _large(text: str | None) -> pa.Scalar:
    return pa.scalar(text, pa.large_string())
