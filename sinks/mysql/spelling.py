r"""Spells batches of rows: as the lines of a file that is loaded, or as rows of a statement.

Columns are spelled one by one and joined by Arrow's own kernels, without a Python object a value.

    file        1<tab>it's<tab>00FF<tab><newline>   null is \N, bytes are hex; the last field is
                                                    empty and dropped
    statement   (1,'it''s',x'00FF'),(2,NULL,NULL)
"""

from __future__ import annotations

import binascii
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types as arrow

from onceflow.sinks.mysql.fitting import MySQLFit
from onceflow.sinks.mysql.types import Spelling


def file_lines(fits: Sequence[MySQLFit], rows: pa.RecordBatch) -> memoryview:
    """Return `rows`, which are `fitted_rows` of `fits`, as lines."""
    fields = [_field(*one) for one in zip(fits, rows.columns, strict=True)]
    return _bytes_of(pc.binary_join_element_wise(*fields, _NEWLINE, _TAB))


def value_rows(fits: Sequence[MySQLFit], rows: pa.RecordBatch, *, word: str = "") -> memoryview:
    """Return `rows`, which are `fitted_rows` of `fits`, in parentheses, each after `word`."""
    values = [_value(*one) for one in zip(fits, rows.columns, strict=True)]
    joined = values[0] if len(values) == 1 else pc.binary_join_element_wise(*values, _COMMA)
    whole = pc.binary_join_element_wise(_text(f"{word}("), joined, _text("),"), _text(""))
    return _bytes_of(whole)[:-1]


def _field(fit: MySQLFit, column: pa.Array) -> pa.Array:
    match fit.wire.spelling:
        case Spelling.TEXT:
            column = _escaped_for_file(column)
        case Spelling.HEX:
            column = _hex(column)
        case Spelling.NUMBER | Spelling.BITS | Spelling.QUOTED:
            column = _spelled(column)
    return column if not column.null_count else pc.fill_null(column, _text("\\N"))


def _value(fit: MySQLFit, column: pa.Array) -> pa.Array:
    match fit.wire.spelling:
        case Spelling.TEXT:
            column = _between("'", _escaped_for_sql(column))
        case Spelling.HEX:
            column = _between("x'", _hex(column))
        case Spelling.QUOTED:
            column = _between("'", _spelled(column))
        case Spelling.NUMBER | Spelling.BITS:
            column = _spelled(column)
    return column if not column.null_count else pc.fill_null(column, _text("NULL"))


def _spelled(column: pa.Array) -> pa.Array:
    if arrow.is_timestamp(column.type) and column.type.tz:
        # The microseconds are in UTC, whatever zone they are shown in.
        column = column.view(pa.int64()).cast(pa.timestamp("us"))
    elif arrow.is_boolean(column.type):
        column = column.cast(pa.int8())
    elif arrow.is_float32(column.type):
        # In so few digits as tell it from other floats, the largest one would be over the range.
        column = column.cast(pa.float64())
    return column.cast(pa.large_string())


def _between(prefix: str, column: pa.Array) -> pa.Array:
    joined: pa.Array = pc.binary_join_element_wise(_text(prefix), column, _text("'"), _text(""))
    return joined


def _escaped_for_file(column: pa.Array) -> pa.Array:
    data = _data_of(column)
    for plain, escaped in (("\\", "\\\\"), ("\t", "\\t"), ("\n", "\\n")):
        if plain.encode() in data:
            column = pc.replace_substring(column, plain, escaped)
    return column.cast(pa.large_string())


def _escaped_for_sql(column: pa.Array) -> pa.Array:
    data = _data_of(column)
    for plain, escaped in (("\\", "\\\\"), ("'", "''")):
        if plain.encode() in data:
            column = pc.replace_substring(column, plain, escaped)
    return column.cast(pa.large_string())


def _hex(column: pa.Array) -> pa.Array:
    """Return the bytes of each value as hexadecimal digits: the whole data at once."""
    validity, offsets, data = column.buffers()
    if offsets is None:
        return pa.array([None] * len(column), pa.large_string())
    count = column.offset + len(column) + 1
    bounds = np.frombuffer(memoryview(offsets), dtype=np.int64, count=count)[column.offset :]
    first, last = int(bounds[0]), int(bounds[-1])
    digits = b"" if data is None else binascii.hexlify(data.slice(first, last - first))
    moved = pa.py_buffer(((bounds - first) * 2).tobytes())
    every = pa.Array.from_buffers(
        pa.large_string(), len(column), [None, moved, pa.py_buffer(digits)]
    )
    if validity is None or not column.null_count:
        return every
    result: pa.Array = pc.if_else(column.is_valid(), every, _text(None))
    return result


def _data_of(column: pa.Array) -> bytes:
    """Return the bytes of all values, perhaps also of some that are null."""
    if arrow.is_string(column.type):
        column = column.cast(pa.large_string())
    return bytes(_bytes_of(column))


def _bytes_of(column: pa.Array) -> memoryview:
    """Return the bytes of all values, one after the other."""
    _, offsets, data = column.buffers()
    if data is None or offsets is None or not len(column):
        return memoryview(b"")
    count = column.offset + len(column) + 1
    bounds = np.frombuffer(memoryview(offsets), dtype=np.int64, count=count)
    first, last = int(bounds[column.offset]), int(bounds[-1])
    return memoryview(data)[first:last]


def _text(value: str | None) -> pa.Scalar:
    return pa.scalar(value, pa.large_string())


_TAB, _NEWLINE, _COMMA = _text("\t"), _text("\n"), _text(",")
