"""Inserts by binary COPY in the open transaction, and the bytes of its rows.

libpq does not tell of an error before the COPY is ended, and the server drops what comes after one
in silence. So a COPY is ended after a second and another begun in the same transaction: a refused
row is heard of soon, whatever the checkpoint interval, at the cost of one round trip a second. It
also bounds what the server queues for the end of the statement, the checks of foreign keys.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import pgpq
import pgpq.encoders
import pgpq.schema
import pyarrow as pa
from pyarrow import types as arrow
from typing_extensions import override

from onceflow.sinks.postgres.catalog import identifier, quoted
from onceflow.sinks.postgres.connection import CopyIn, own
from onceflow.sinks.postgres.types import PostgresFit, fits_of
from onceflow.sinks.sql.dml import InsertStream
from onceflow.sinks.sql.session import Session
from onceflow.sinks.sql.tables import Target

_COPY_S_MAX = 1.0


class CopyStream(InsertStream):
    """One COPY after another into one table."""

    def __init__(self, target: Target) -> None:
        """Begin nothing yet."""
        self._format = BinaryRows(fits_of(target))
        columns = ", ".join(quoted(fit.name) for fit in target.fits)
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


class BinaryRows:
    """Converted rows as the bytes of one COPY after another: begin, encode*, end, and again."""

    def __init__(self, fits: Sequence[PostgresFit]) -> None:
        """Begin no COPY yet."""
        # Nullable throughout: for other fields the encoder would write a null's stray bytes.
        self._schema = pa.schema([pa.field(fit.name, encoded_type(fit.wire)) for fit in fits])
        self._jsonb = frozenset(fit.name for fit in fits if fit.type.name == "jsonb")
        self._encoder = self._new_encoder()

    def begin(self) -> bytes:
        """Return the head of a new COPY; an unfinished one is forgotten."""
        self._encoder = self._new_encoder()
        return self._encoder.write_header()

    def encode(self, rows: pa.RecordBatch) -> bytes:
        """Return `rows`, whose columns are those of the fits, converted."""
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


def encoded_type(wire: pa.DataType) -> pa.DataType:
    """Return what the encoder is given: for nulls, which have no bytes, any type that it knows."""
    return pa.int64() if arrow.is_null(wire) else wire


def encodable(column: pa.Array) -> pa.Array:
    """Return `column` in its `encoded_type`."""
    return pa.nulls(len(column), pa.int64()) if arrow.is_null(column.type) else column


def _builder(field: pa.Field, *, jsonb: bool) -> Any:
    if not jsonb or (not arrow.is_large_string(field.type) and not arrow.is_string(field.type)):
        return pgpq.ArrowToPostgresBinaryEncoder.infer_encoder(field)
    output = pgpq.schema.Jsonb()
    if arrow.is_large_string(field.type):
        return pgpq.encoders.LargeStringEncoderBuilder.new_with_output(field, output)
    return pgpq.encoders.StringEncoderBuilder.new_with_output(field, output)
