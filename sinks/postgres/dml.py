"""The statements that write rows: binary COPY for inserts, statements over arrays by key.

Statements by key take their rows as one array parameter per column. `unnest($1, $2, …)` turns the
arrays into rows without a temporary table. A prepared transaction may not touch a temporary table,
and each one costs work in the catalogs. Parameters are numbered, because column names may contain a
percent sign.

The bytes of an array are those that the encoder writes for a list: number of dimensions, a flag for
nulls, element type, length, first index, then the elements, each with its length. Only the element
type is replaced, because the encoder names the type that it would have chosen.

Values of types without an Arrow type are texts. COPY in binary format takes no texts for them, so
rows with such columns are inserted by statements, too: they cast each text to the column's type.

Other inserts use binary COPY in the open transaction. libpq reports no error before the COPY is
ended, and the server silently drops rows that follow an error. So a COPY is ended after a second
and another one begins in the same transaction. A refused row is then reported soon, whatever the
checkpoint interval, at the cost of one round trip per second. This also bounds the checks of
foreign keys that the server queues until the end of the statement.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pgpq
import pgpq.encoders
import pgpq.schema
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types as arrow
from typing_extensions import override

from onceflow.clients.postgres.catalog import identifier, quote
from onceflow.clients.postgres.connection import BinaryArray, CopyIn, own, type_number
from onceflow.clients.postgres.types import PostgresFit, fits_of
from onceflow.clients.sql.session import Session
from onceflow.clients.sql.tables import Target
from onceflow.core.arrow.kinds import is_bytes
from onceflow.core.errors import SinkError
from onceflow.sinks.sql.dialect import DmlExecutor, InsertStream
from onceflow.sinks.sql.write_mode import WriteMode

_COPY_S_MAX = 1.0
"""The time after which a COPY is ended, so that the server reports the rows that it refuses."""


class CopyStream(InsertStream):
    """A sequence of COPYs into one table."""

    def __init__(self, target: Target) -> None:
        """Begin nothing yet."""
        self._format = BinaryRows(fits_of(target))
        columns = ", ".join(quote(fit.name) for fit in target.fits)
        self._copy_in = f"COPY {identifier(target.name)} ({columns}) FROM STDIN (FORMAT binary)"
        self._copy: CopyIn | None = None
        self._copying_since = 0.0

    @override
    def write(self, begin: Callable[[], Session], rows: pa.RecordBatch) -> None:
        copy = self._copy or self._begin_copy(begin())
        copy.write(self._format.encode(rows))
        if time.monotonic() - self._copying_since > _COPY_S_MAX:
            self.finish(begin())

    @override
    def finish(self, session: Session) -> None:
        copy = self._copy
        if copy is not None:
            copy.write(self._format.end())
            self._copy = None
            copy.end()

    @override
    def give_up(self) -> None:
        copy, self._copy = self._copy, None
        if copy is not None:
            copy.give_up()

    def _begin_copy(self, session: Session) -> CopyIn:
        copy = own(session).copy_in(self._copy_in)
        self._copy = copy
        copy.write(self._format.begin())
        self._copying_since = time.monotonic()
        return copy


class StatementStream(InsertStream):
    """A sequence of INSERT statements into one table, for columns that COPY cannot write."""

    def __init__(self, target: Target) -> None:
        self._fits = fits_of(target)
        statement = put_statement(target, WriteMode.INSERT, ())
        assert statement is not None
        self._statement = statement

    @override
    def write(self, begin: Callable[[], Session], rows: pa.RecordBatch) -> None:
        _execute(begin(), self._statement, self._fits, rows)

    @override
    def finish(self, session: Session) -> None:
        """Do nothing: the server has answered every statement."""

    @override
    def give_up(self) -> None:
        """Do nothing: no statement is unanswered."""


class BinaryRows:
    """An encoder of converted rows into the bytes of COPYs: begin, encode*, end, and again."""

    def __init__(self, fits: Sequence[PostgresFit]) -> None:
        """Begin no COPY yet."""
        # All fields are nullable: for other fields the encoder would write stray bytes for a null.
        self._schema = pa.schema([pa.field(fit.name, type_to_encode(fit.wire)) for fit in fits])
        self._jsonb = frozenset(fit.name for fit in fits if fit.type.name == "jsonb")
        self._encoder = self._new_encoder()

    def begin(self) -> bytes:
        """Return the head of a new COPY; an unfinished COPY is discarded."""
        self._encoder = self._new_encoder()
        return self._encoder.write_header()

    def encode(self, rows: pa.RecordBatch) -> bytes:
        """Return the bytes of `rows`, which are converted and have the columns of the fits."""
        if not rows.schema.equals(self._schema):
            columns = [encodable(column) for column in rows.columns]
            rows = pa.RecordBatch.from_arrays(columns, schema=self._schema)
        return self._encoder.write_batch(rows)

    def end(self) -> bytes:
        """Return the tail of the COPY."""
        return self._encoder.finish()

    def _new_encoder(self) -> pgpq.ArrowToPostgresBinaryEncoder:
        builders = {
            field.name: _builder(field, jsonb=field.name in self._jsonb) for field in self._schema
        }
        return pgpq.ArrowToPostgresBinaryEncoder.new_with_encoders(self._schema, builders)


def type_to_encode(wire: pa.DataType) -> pa.DataType:
    """Return the type that the encoder receives. Nulls have no bytes, so any known type will do."""
    return pa.int64() if arrow.is_null(wire) else wire


def encodable(column: pa.Array) -> pa.Array:
    """Return `column` in the type of `type_to_encode`."""
    return pa.nulls(len(column), pa.int64()) if arrow.is_null(column.type) else column


def _builder(field: pa.Field, *, jsonb: bool) -> Any:
    if not jsonb or (not arrow.is_large_string(field.type) and not arrow.is_string(field.type)):
        return pgpq.ArrowToPostgresBinaryEncoder.infer_encoder(field)
    output = pgpq.schema.Jsonb()
    if arrow.is_large_string(field.type):
        return pgpq.encoders.LargeStringEncoderBuilder.new_with_output(field, output)
    return pgpq.encoders.StringEncoderBuilder.new_with_output(field, output)


_BYTES_A_STATEMENT = 16 * 1024 * 1024

# The signature, flags and extension length of a COPY. A row is a number of columns, then each
# column with its length.
_COPY_HEAD_BYTES = 11 + 4 + 4
_COUNT = struct.Struct(">h")
_LENGTH = struct.Struct(">i")
_ELEMENT_TYPE_AT = 8
"""The position of the element type in the binary form of an array: after two numbers of 4 bytes."""
_ELEMENT_TYPE = struct.Struct(">I")
# Other types have no own array format on the wire, or need a version byte: they are sent as text.
_OWN_ARRAYS = frozenset(
    {"int2", "int4", "int8", "float4", "float8", "bool", "bytea", "numeric", "date", "timestamp"}
    | {"timestamptz", "time", "interval", "uuid"}
)


class PostgresDmlExecutor(DmlExecutor):
    """The executor of Postgres: COPY for inserts, statements over arrays for changes by key."""

    @override
    def inserts(self, target: Target) -> InsertStream:
        if all(fit.has_binary_form for fit in fits_of(target)):
            return CopyStream(target)
        return StatementStream(target)

    @override
    def change(self, session: Session, target: Target, rows: pa.RecordBatch) -> None:
        statement = put_statement(target, self.mode, self.key)
        if statement is None:
            return
        _execute(session, statement, fits_of(target), rows)

    @override
    def update(self, session: Session, target: Target, rows: pa.RecordBatch) -> int:
        fits, keys = fits_of(target), fits_of(target, self.key)
        if len(fits) > len(keys):
            count = _execute(session, update_statement(target, self.key), fits, rows)
            if count == rows.num_rows:
                return count
        # A trigger may skip the update of a row that the table has.
        statement = lock_statement(target, self.key)
        return _execute(session, statement, keys, rows.select(list(self.key)))

    @override
    def delete(self, session: Session, target: Target, rows: pa.RecordBatch) -> None:
        statement = delete_statement(target, self.key)
        _execute(session, statement, fits_of(target, self.key), rows.select(list(self.key)))


def _execute(
    session: Session, statement: str, fits: Sequence[PostgresFit], rows: pa.RecordBatch
) -> int:
    """Carry out `statement` for all rows; return the number of rows that the server counted."""
    set_text_settings(session, fits)
    return sum(
        own(session).execute_arrays(statement, array_parameters(fits, part))
        for part in split_into_statements(rows)
    )


def set_text_settings(session: Session, fits: Sequence[PostgresFit]) -> None:
    """Let the open transaction read texts in one form, whatever the server's settings are.

    The texts of money depend on a locale. With `xmloption` = document, the server would refuse
    fragments of XML, which an xml column may hold. Types without a name may contain both.
    """
    types = (fit.type.element or fit.type.name for fit in fits if fit.is_text_form)
    if any(name in ("money", "xml", "") for name in types):
        session.execute("SET LOCAL lc_monetary = 'C'; SET LOCAL xmloption = content")


def split_into_statements(rows: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Split a batch into parts, so that each statement stays near `_BYTES_A_STATEMENT`."""
    parts = max(1, -(-rows.nbytes // _BYTES_A_STATEMENT))
    size = max(1, -(-rows.num_rows // parts))
    for start in range(0, rows.num_rows, size):
        yield rows.slice(start, size)


def put_statement(target: Target, mode: WriteMode, key: Sequence[str]) -> str | None:
    """Return the statement that writes rows by `mode`, or None if it would change nothing.

    Values are cast to the type without its limits, so that the server refuses a value over a limit.
    An explicit cast to the limited type would silently cut it.
    """
    fits = fits_of(target)
    others = [number for number, fit in enumerate(fits) if fit.name not in key]
    if mode is WriteMode.UPDATE:
        return update_statement(target, key) if others else None
    columns = ", ".join(quote(fit.name) for fit in fits)
    values = ", ".join(cast_value(number, fit) for number, fit in enumerate(fits))
    statement = (
        f"INSERT INTO {identifier(target.name)} ({columns}) OVERRIDING SYSTEM VALUE "
        f"SELECT {values} FROM {unnest_rows(fits)}"
    )
    if mode is WriteMode.INSERT:
        return statement
    conflict = f" ON CONFLICT ({', '.join(map(quote, key))}) "
    if mode is WriteMode.IGNORE or not others:
        return f"{statement}{conflict}DO NOTHING"
    names = [quote(fits[number].name) for number in others]
    assigned = ", ".join(f"{name} = excluded.{name}" for name in names)
    return f"{statement}{conflict}DO UPDATE SET {assigned}"


def delete_statement(target: Target, key: Sequence[str]) -> str:
    """Return the statement that deletes the rows of the given keys, one array per key column."""
    fits = fits_of(target, key)
    return (
        f"DELETE FROM {identifier(target.name)} AS t USING {unnest_rows(fits)} WHERE {_same(fits)}"
    )


def update_statement(target: Target, key: Sequence[str]) -> str:
    """Return the statement that sets the columns of existing rows outside their key."""
    fits = fits_of(target)
    assigned = ", ".join(
        f"{quote(fit.name)} = {cast_value(number, fit)}"
        for number, fit in enumerate(fits)
        if fit.name not in key
    )
    return (
        f"UPDATE {identifier(target.name)} AS t SET {assigned} FROM {unnest_rows(fits)} "
        f"WHERE {_same(fits, key)}"
    )


def lock_statement(target: Target, key: Sequence[str]) -> str:
    """Return the statement that selects and locks the rows of the given keys."""
    fits = fits_of(target, key)
    return (
        f"SELECT FROM {identifier(target.name)} AS t, {unnest_rows(fits)} "
        f"WHERE {_same(fits)} FOR KEY SHARE OF t"
    )


def unnest_rows(fits: Sequence[PostgresFit]) -> str:
    """Return the FROM item that turns one array parameter per fit into rows u(c0, c1, …)."""
    arrays = ", ".join(
        f"${number}::pg_catalog.{parameter_type(fit)}[]" for number, fit in enumerate(fits, 1)
    )
    names = ", ".join(f"c{number}" for number in range(len(fits)))
    return f"unnest({arrays}) AS u({names})"


def cast_value(number: int, fit: PostgresFit) -> str:
    """Return the expression of a value of `unnest_rows`, cast to its type without limits."""
    column = f"u.c{number}"
    return column if parameter_type(fit) == fit.type.name else f"{column}::{fit.type.base}"


def _same(fits: Sequence[PostgresFit], key: Sequence[str] | None = None) -> str:
    return " AND ".join(
        f"t.{quote(fit.name)} = {cast_value(number, fit)}"
        for number, fit in enumerate(fits)
        if key is None or fit.name in key
    )


def parameter_type(fit: PostgresFit) -> str:
    """Return the element type in which values of `fit` are sent: their own, or text."""
    is_own = fit.type.name in _OWN_ARRAYS and not fit.type.element and not fit.is_text_form
    return fit.type.name if is_own else "text"


def array_parameters(fits: Sequence[PostgresFit], rows: pa.RecordBatch) -> list[BinaryArray]:
    """Return the columns of the converted `rows` that `fits` name, each as one array."""
    columns = [_element_form(fit, rows.column(fit.name)) for fit in fits]
    bounds = pa.array([0, rows.num_rows], pa.int32())
    lists = [pa.ListArray.from_arrays(bounds, column) for column in columns]
    fields = [pa.field(str(number), array.type) for number, array in enumerate(lists)]
    single = pa.RecordBatch.from_arrays(lists, schema=pa.schema(fields))
    encoder = pgpq.ArrowToPostgresBinaryEncoder(single.schema)
    data = bytearray(encoder.write_header())
    # The encoder holds back data of a small batch until the end.
    data += encoder.write_batch(single)
    data += encoder.finish()
    encoded = _fields(data, len(fits))
    for (start, _), fit in zip(encoded, fits, strict=True):
        oid = type_number(parameter_type(fit))
        _ELEMENT_TYPE.pack_into(data, start + _ELEMENT_TYPE_AT, oid)
    with memoryview(data) as view:
        return [BinaryArray(bytes(view[start:end])) for start, end in encoded]


def _fields(data: bytearray, expected: int) -> list[tuple[int, int]]:
    """Return the start and end of each field of the only row, without its length."""
    position = _COPY_HEAD_BYTES
    (count,) = _COUNT.unpack_from(data, position)
    if count != expected:
        raise SinkError(f"the encoder wrote {count} columns for {expected}")
    position += _COUNT.size
    fields: list[tuple[int, int]] = []
    for _ in range(count):
        (length,) = _LENGTH.unpack_from(data, position)
        start = position + _LENGTH.size
        position = start + length
        fields.append((start, position))
    return fields


def _element_form(fit: PostgresFit, column: pa.Array) -> pa.Array:
    if not fit.type.element or fit.is_text_form:
        return encodable(column)
    if not arrow.is_list(column.type):
        return pa.nulls(len(column), pa.large_string())
    return array_literals(column)


def array_literals(lists: pa.Array) -> pa.Array:
    """Return each list as the text of a Postgres array: {"a",NULL}."""
    values = lists.flatten()
    if is_bytes(values.type):
        text = pa.array(
            [None if value is None else f"\\x{value.hex()}" for value in values.to_pylist()],
            pa.large_string(),
        )
    else:
        if arrow.is_timestamp(values.type) and values.type.tz is not None:
            values = values.cast(pa.timestamp(values.type.unit, "UTC"))
        text = values.cast(pa.large_string())
    for special in ("\\", '"'):
        text = pc.replace_substring(text, special, f"\\{special}")
    elements = pc.fill_null(_enclose('"', text, '"'), _large("NULL"))
    lengths = pc.fill_null(pc.list_value_length(lists), 0).to_numpy(zero_copy_only=False)
    bounds = pa.array([0, *lengths.cumsum().tolist()], pa.int64())
    joined = pc.binary_join(pa.LargeListArray.from_arrays(bounds, elements), _large(","))
    literals: pa.Array = pc.if_else(lists.is_valid(), _enclose("{", joined, "}"), _large(None))
    return literals


def _enclose(before: str, texts: pa.Array, after: str) -> pa.Array:
    enclosed: pa.Array = pc.binary_join_element_wise(
        _large(before), texts, _large(after), _large("")
    )
    return enclosed


def _large(text: str | None) -> pa.Scalar:
    return pa.scalar(text, pa.large_string())
