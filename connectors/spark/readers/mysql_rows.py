"""The reader of MySQL and MariaDB rows: the server sends one column of CSV, which Arrow parses.

The server always sends text. If a query selects columns, each value has its own length, which
Python would have to read value by value. If it selects a row as one text, Arrow's parser reads it.
So each task selects one CONCAT_WS of all columns: text in double quotes, bytes as hexadecimal
digits, and null as nothing. Rows are read from the connection as they arrive.

A task reads the data that is committed when it begins, because MySQL cannot share a snapshot
between connections. If rows change meanwhile, none of the tasks or two tasks may read them. A
single task reads a consistent state.
"""

from __future__ import annotations

import binascii
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pyarrow as pa
from pyarrow import csv
from typing_extensions import override

from onceflow.clients.mysql import catalog
from onceflow.clients.mysql.catalog import grantee, identifier, quote
from onceflow.clients.mysql.connection import ResultColumn, own
from onceflow.clients.mysql.endpoint import MySQLEndpoint
from onceflow.clients.mysql.types import BINARIES
from onceflow.clients.sql.session import Session, SqlError
from onceflow.clients.sql.tables import Table, TableColumn, TableName
from onceflow.connectors.spark.readers.sql import (
    Bounds,
    ReadColumn,
    RowSource,
    TaskPlan,
    stride_conditions,
)
from onceflow.connectors.spark.readers.sql_filters import Comparable
from onceflow.core.arrow.kinds import cast_rows
from onceflow.core.errors import ConfigError, SinkError
from onceflow.sinks.mysql.dialect import MYSQL
from onceflow.sinks.sql.dialect import Dialect

_PRECISION_MAX = 38
_CHUNK_BYTES = 4 * 1024 * 1024
_INTEGERS: dict[str, tuple[pa.DataType, pa.DataType]] = {
    "tinyint": (pa.int8(), pa.int16()),
    "smallint": (pa.int16(), pa.int32()),
    "mediumint": (pa.int32(), pa.int32()),
    "int": (pa.int32(), pa.int64()),
    "bigint": (pa.int64(), pa.decimal128(20, 0)),
    "year": (pa.int32(), pa.int32()),
}
"""The types of signed and unsigned integers. Spark has no unsigned numbers."""
_SIMPLE: dict[str, tuple[pa.DataType, Comparable | None]] = {
    "float": (pa.float32(), None),
    "double": (pa.float64(), Comparable.NUMBER),
    "date": (pa.date32(), Comparable.DATE),
    "datetime": (pa.timestamp("us"), Comparable.LOCAL_TIME),
    "timestamp": (pa.timestamp("us", "UTC"), Comparable.INSTANT),
}


_AS_TEXT = frozenset({"json", "enum", "set", "time", "uuid", "inet4", "inet6"})
"""The types that are read as text. Others (geometry, vector) are read as bytes, in hexadecimal."""


@dataclass(frozen=True, slots=True)
class MySQLRows(RowSource):
    """A table or a query of MySQL or MariaDB."""

    dialect: ClassVar[Dialect] = MYSQL
    endpoint: MySQLEndpoint

    @override
    def format_instant(self, text: str) -> str:
        # Sessions of onceflow are in UTC.
        return f"TIMESTAMP '{text}'"

    @override
    def columns(self) -> Sequence[ReadColumn]:
        """Return all columns, as the server describes them.

        Raises:
            ConfigError: There is no such table, or no right to read it.
            SinkError: The server does not answer now, or the query is not valid.
        """
        with self.endpoint.connect("onceflow read") as session:
            if self.table is not None:
                return [_column(column) for column in self._describe(session, self.table).columns]
            try:
                columns = own(session).describe(f"SELECT * FROM {self.relation} LIMIT 0")  # noqa: S608
            except SqlError as error:
                raise SinkError(f"reading {self.relation} of {self.endpoint}: {error}") from error
            return [_read(column.name, _format_type(column)) for column in columns]

    @override
    def plan(self, columns: Sequence[ReadColumn], bounds: Bounds | None, tasks: int) -> TaskPlan:
        """Return the division of rows into tasks: by a column's strides, else by an integer key.

        Raises:
            ConfigError: There is no suitable key, and no column was named.
            SinkError: The server does not answer now.
        """
        if tasks == 1:
            return TaskPlan(("",))
        if bounds is None:
            bounds = self._key_bounds(columns, tasks)
        if bounds is None:
            return TaskPlan(("",))
        return TaskPlan(stride_conditions(columns, bounds, tasks, self.words))

    @override
    def batches(
        self, statement: str, columns: Sequence[ReadColumn], snapshot: str
    ) -> Iterator[pa.RecordBatch]:
        """Yield the rows that `statement` selects, from one consistent read.

        Raises:
            ConfigError: A value does not fit its column's Arrow type. The message names the column.
            SinkError: The server refused the query, or the connection broke.
        """
        del snapshot
        names = ", ".join(_select_text(column) for column in columns)
        rows = f"SELECT CONCAT_WS(',', {names}) FROM ({statement}) AS onceflow_rows"  # noqa: S608
        with self.endpoint.connect("onceflow read") as session:
            try:
                for chunk in own(session).single_texts(rows, _CHUNK_BYTES):
                    yield _parse_lines(chunk, columns)
            except SqlError as error:
                raise SinkError(f"reading {self.relation} of {self.endpoint}: {error}") from error

    def _describe(self, session: Session, name: TableName) -> Table:
        try:
            table = catalog.find_table(session, name)
        except SqlError as error:
            raise SinkError(f"reading {self.relation} of {self.endpoint}: {error}") from error
        if table is None:
            ((user,),) = session.query("SELECT CURRENT_USER()")
            raise ConfigError(
                f"table {name} does not exist in {self.endpoint}, or user {user} may not read it."
                f" If it exists, run as its owner: GRANT SELECT ON {identifier(name)} TO"
                f" {grantee(str(user))}"
            )
        return table

    def _key_bounds(self, columns: Sequence[ReadColumn], tasks: int) -> Bounds | None:
        """Return the first and last value of a key of one integer, or None if there are no rows."""
        if self.table is None:
            raise ConfigError(
                f"numPartitions={tasks} of a query needs partitionColumn, lowerBound and upperBound"
            )
        whole = {
            column.name
            for column in columns
            if column.kind is Comparable.NUMBER
            and (pa.types.is_integer(column.type) or column.type == pa.decimal128(20, 0))
        }
        with self.endpoint.connect("onceflow read") as session:
            keys = [
                key for _, key in self._describe(session, self.table).unique_keys if len(key) == 1
            ]
            key = next(
                (name for key_columns in keys for name in key_columns if name in whole), None
            )
            if key is None:
                raise ConfigError(
                    f"numPartitions={tasks}: {self.table} has no unique key of one whole number;"
                    " give partitionColumn, lowerBound and upperBound"
                )
            ends = f"SELECT MIN({quote(key)}), MAX({quote(key)}) FROM {self.relation}"  # noqa: S608
            ((low, high),) = session.query(ends)
        # The end of strides is exclusive.
        return None if low is None else Bounds(key, str(low), str(int(high) + 1))


def _column(column: TableColumn) -> ReadColumn:
    assert isinstance(column.type, catalog.MySQLType), column.type
    return _read(column.name, column.type)


def _format_type(column: ResultColumn) -> catalog.MySQLType:
    """Return the type of a query's column in the form of a table's column."""
    name = column.type
    # The length includes the decimal point and the sign.
    precision = column.length - (column.scale > 0) - (not column.is_unsigned)
    shown = f"{name}({column.length})" if name == "tinyint" else name
    return catalog.MySQLType(
        name,
        f"{shown} unsigned" if column.is_unsigned else shown,
        precision=max(precision, 1),
        scale=column.scale,
    )


def _read(column: str, kind: catalog.MySQLType) -> ReadColumn:
    name = quote(column)
    expression, compared = name, None
    arrow: pa.DataType = pa.string()
    if kind.shown.lower().startswith("tinyint(1)"):
        # This is as in JDBC. A number other than 0 and 1 is an error.
        arrow = pa.bool_()
    elif kind.name in _INTEGERS:
        signed, unsigned = _INTEGERS[kind.name]
        arrow, compared = (unsigned if kind.unsigned else signed), Comparable.NUMBER
    elif kind.name == "bit":
        arrow, expression = pa.decimal128(20, 0), f"{name} + 0"
    elif kind.name == "decimal":
        precision, scale = min(kind.precision or 10, _PRECISION_MAX), kind.scale or 0
        arrow, compared = pa.decimal128(precision, scale), Comparable.NUMBER
    elif kind.name in _SIMPLE:
        arrow, compared = _SIMPLE[kind.name]
        if kind.name == "float":
            # A float is sent with six digits unless it is converted to a double.
            expression = f"{name} * 1e0"
    elif kind.name in BINARIES:
        arrow = pa.binary()
    elif kind.name in catalog.TEXTS:
        compared = Comparable.TEXT
    elif kind.name not in _AS_TEXT:
        expression = f"HEX({name})"
    return ReadColumn(column, expression, arrow, compared)


def _select_text(column: ReadColumn) -> str:
    name = quote(column.name)
    if pa.types.is_binary(column.type):
        # With quotes, an empty value is empty bytes; without quotes it is null.
        return f"IFNULL(CONCAT('\"', HEX({name}), '\"'), '')"
    if pa.types.is_string(column.type):
        # MySQL cannot concatenate texts of two character sets if neither is Unicode.
        text = f"CONVERT({name} USING utf8mb4)"
        return f"IFNULL(CONCAT('\"', REPLACE({text}, '\"', '\"\"'), '\"'), '')"
    return f"IFNULL({name}, '')"


def _parse_lines(lines: bytes, columns: Sequence[ReadColumn]) -> pa.RecordBatch:
    read = {read_column.name: _type_to_parse(read_column.type) for read_column in columns}
    try:
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
            _array(column, read_column.type)
            for column, read_column in zip(batch.columns, columns, strict=True)
        ]
    except pa.ArrowException as error:
        listed = ", ".join(f"{read_column.name}: {read_column.type}" for read_column in columns)
        raise ConfigError(
            f"a value does not fit the type as which its column is read ({listed}): {error}."
            " Give a schema without this column"
        ) from error
    return pa.RecordBatch.from_arrays(arrays, names=[read_column.name for read_column in columns])


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
