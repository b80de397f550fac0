"""A decoder of CSV values. Each value is one line of fields in the order of the columns.

The format is RFC 4180: a field with commas, quotes or line ends is enclosed in double quotes, and a
quote inside it is doubled. An empty field is null; a quoted empty field is empty text. Arrow reads
all values of a batch as one text if each is certainly one line. Otherwise it reads value by value.

Arrow accepts more than RFC 4180: text after a closing quote, a quote that is never closed,
hexadecimal integers (which wrap around), and numbers beyond a float's range, as infinity. Each of
these is a bad record here. If a decimal does not fit its column, Arrow changes it to another
number. So decimals are read as text, which `cast_decimals` converts.
"""

from __future__ import annotations

import re
from codecs import BOM_UTF8
from collections import ChainMap
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from confluent_kafka import Message
from pyarrow import csv
from pyarrow import types as arrow

from onceflow.core.arrow.kinds import IsKind, to_plain_column, to_plain_type
from onceflow.core.errors import ConfigError
from onceflow.formats.decoding import Decoded, PlainDecoder
from onceflow.formats.fitting import Faults, fit_column
from onceflow.formats.registry_schemas import TOMBSTONE

_FIELD = rb'(?:"[^"]*(?:""[^"]*)*"|[^",][^,]*|)'
_QUOTED_LINE = re.compile(_FIELD + rb"(?:," + _FIELD + rb")*")
"""A line in which a quote that begins a field also ends it."""
_MISQUOTED = (
    "a quote does not enclose a whole field: it is never closed, or text follows it. Inside a"
    " quoted field, write a quote twice"
)
_HEXADECIMAL = r"^\s*0[xX]"
_INFINITY = r"(?i)^\s*[+-]?inf"

_BLOCK_BYTES = 1 << 30
"""A size above that of any batch, so that Arrow reads a batch's text as one block."""


def require_csv_columns(columns: pa.Schema) -> None:
    """Raise ConfigError if CSV cannot fill `columns`. The message names the column."""
    for column in columns:
        if not _is_readable(column.type):
            raise ConfigError(f"column {column.name!r} is {column.type}, which no CSV field holds")


def _is_readable(kind: pa.DataType) -> bool:
    """Return True if Arrow can convert a CSV field to `kind`."""
    if arrow.is_nested(kind):
        return False
    options = csv.ConvertOptions(column_types={"field": _read_type(kind)}, null_values=[""])
    try:
        csv.read_csv(
            pa.BufferReader(b"\n"),
            read_options=csv.ReadOptions(use_threads=False, column_names=["field"]),
            parse_options=csv.ParseOptions(ignore_empty_lines=False),
            convert_options=options,
        )
    except pa.ArrowNotImplementedError:
        return False
    return True


class CsvDecoder(PlainDecoder):
    """A decoder that assigns fields to columns by their order."""

    def __init__(self, columns: pa.Schema) -> None:
        self._columns = columns
        self._read_options = csv.ReadOptions(
            use_threads=False, column_names=columns.names, block_size=_BLOCK_BYTES
        )
        self._parse_options = csv.ParseOptions(newlines_in_values=True, ignore_empty_lines=False)
        self._integers = _select_names(columns, arrow.is_integer)
        self._floats = _select_names(columns, arrow.is_floating)

    def decode(self, values: Sequence[bytes | None], messages: Sequence[Message]) -> Decoded:
        """Decode `values`, each of which is one line."""
        del messages
        faults: Faults = {}
        indices: list[int] = []
        lines: list[bytes] = []
        for at, value in enumerate(values):
            # Arrow removes a byte order mark only from the first line of a text.
            line = None if value is None else value.removeprefix(BOM_UTF8).rstrip(b"\r\n")
            if not line:
                faults[at] = TOMBSTONE if line is None else "it is empty"
            elif b'"' in line and not _QUOTED_LINE.fullmatch(line):
                faults[at] = _MISQUOTED
            else:
                indices.append(at)
                lines.append(line)
        decoded = self._decode_lines(lines, indices)
        return replace(decoded, faults={**faults, **decoded.faults})

    def _decode_lines(self, lines: Sequence[bytes], indices: Sequence[int]) -> Decoded:
        """Decode `lines`, the values at `indices` of the batch."""
        # Decoding all lines as one text is much faster. It is safe only if no line can extend into
        # the next one.
        if lines and all(map(_is_one_line, lines)):
            try:
                return self._decode_text(b"\n".join(lines), indices)
            except (pa.ArrowInvalid, _OtherLines):
                pass
        parts: list[Decoded] = []
        faults: Faults = {}
        for at, line in zip(indices, lines, strict=True):
            try:
                parts.append(self._decode_text(line, [at]))
            except pa.ArrowInvalid as error:
                faults[at] = (
                    f"it is not a line of {len(self._columns)} fields of the schema: {error}"
                )
            except _OtherLines as error:
                faults[at] = f"it holds {error} lines instead of one"
        columns = zip(*(part.columns for part in parts), strict=True)
        return Decoded(
            [pa.concat_arrays(list(chunks)) for chunks in columns]
            if parts
            else [pa.array([], column.type) for column in self._columns],
            [at for part in parts for at in part.kept],
            dict(ChainMap(faults, *(dict(part.faults) for part in parts))),
        )

    def _decode_text(self, text: bytes, indices: Sequence[int]) -> Decoded:
        """Decode `text`, which has one line for each of `indices`.

        Raises:
            ArrowInvalid: A line has other fields.
            _OtherLines: The number of lines differs.
        """
        table = self._read(text, self._columns)
        if table.num_rows != len(indices):
            raise _OtherLines(table.num_rows)
        late = self._find_changed_numbers(text, table)
        columns = [
            fit_column(_trim(_one_chunk(table.column(at)), column.type), column, late)
            for at, column in enumerate(self._columns)
        ]
        return Decoded(columns, indices, {}).drop_rows(late)

    def _find_changed_numbers(self, text: bytes, table: pa.Table) -> Faults:
        """Return the rows of `table` in which Arrow read another number than `text` contains."""
        infinite = [name for name in self._floats if _has_infinities(table.column(name))]
        hexadecimal = self._integers if b"0x" in text or b"0X" in text else []
        if not infinite and not hexadecimal:
            return {}
        texts = pa.schema([pa.field(name, pa.string()) for name in (*infinite, *hexadecimal)])
        written = self._read(text, texts)
        faults: Faults = {}
        for name in infinite:
            read = to_plain_column(_one_chunk(table.column(name)))
            words: Any = pc.match_substring_regex(_one_chunk(written.column(name)), _INFINITY)
            beyond: Any = pc.and_(_is_infinite(read), pc.invert(words))
            self._note(faults, beyond, name, "is outside the range of the column", written)
        for name in hexadecimal:
            column = _one_chunk(written.column(name))
            self._note(
                faults,
                pc.match_substring_regex(column, _HEXADECIMAL),
                name,
                "is hexadecimal; write it in decimal digits",
                written,
            )
        return faults

    def _note(self, faults: Faults, rows: Any, name: str, why: str, written: pa.Table) -> None:
        kind = self._columns.field(name).type
        for row in pc.indices_nonzero(pc.fill_null(rows, False)).to_pylist():
            given = written.column(name)[row].as_py()
            faults.setdefault(row, f"column {name!r} ({kind}): {given!r} {why}")

    def _read(self, text: bytes, columns: pa.Schema) -> pa.Table:
        """Read the named `columns` of `text`, with their types."""
        table: pa.Table = csv.read_csv(
            pa.BufferReader(text),
            read_options=self._read_options,
            parse_options=self._parse_options,
            convert_options=csv.ConvertOptions(
                column_types=pa.schema(
                    [pa.field(column.name, _read_type(column.type)) for column in columns]
                ),
                include_columns=columns.names,
                null_values=[""],
                strings_can_be_null=True,
                quoted_strings_can_be_null=False,
            ),
        )
        return table


def _read_type(kind: pa.DataType) -> pa.DataType:
    """Return the type as which Arrow reads a column: text for a decimal, else `kind` itself."""
    return pa.string() if arrow.is_decimal(to_plain_type(kind)) else kind


def _trim(column: pa.Array, kind: pa.DataType) -> pa.Array:
    """Return `column` without the blanks around decimals. Arrow ignores them for other numbers."""
    if not arrow.is_decimal(to_plain_type(kind)):
        return column
    trimmed: pa.Array = pc.ascii_trim(column, " \t")
    return trimmed


class _OtherLines(Exception):
    """Raised if the number of lines differs from the number of values."""


def _select_names(columns: pa.Schema, is_kind: IsKind) -> list[str]:
    return [column.name for column in columns if is_kind(to_plain_type(column.type))]


def _has_infinities(column: pa.ChunkedArray) -> bool:
    return any(
        pc.any(_is_infinite(to_plain_column(column.chunk(at)))).as_py() is True
        for at in range(column.num_chunks)
    )


def _is_infinite(column: pa.Array) -> Any:
    return pc.is_inf(column)


def _is_one_line(line: bytes) -> bool:
    """Return True if `line` remains one line when it is joined with other lines."""
    # After an odd number of quotes a field is still open and would continue in the next line.
    return b"\n" not in line and b"\r" not in line and line.count(b'"') % 2 == 0


def _one_chunk(column: pa.ChunkedArray) -> pa.Array:
    if column.num_chunks == 1:
        return column.chunk(0)
    return pa.concat_arrays([column.chunk(at) for at in range(column.num_chunks)])
