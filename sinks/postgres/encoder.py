"""Turns Arrow batches into the bytes of one binary COPY."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pgpq
import pgpq.encoders
import pgpq.schema
import pyarrow as pa
from pyarrow import types as arrow

from onceflow.core.errors import SinkError
from onceflow.sinks.postgres.fitting import PostgresFit
from onceflow.sinks.postgres.types import wire_of
from onceflow.sinks.sql.values import plain


class BinaryRows:
    """The rows of one COPY after another: begin, encode*, end, and again."""

    def __init__(self, fits: Sequence[PostgresFit]) -> None:
        self._fits = tuple(fits)
        self._names = [fit.name for fit in fits]
        # Nullable throughout: for other fields the encoder would write a null's stray bytes.
        self._schema = pa.schema([pa.field(fit.name, fit.wire.type) for fit in fits])
        self._encoder: pgpq.ArrowToPostgresBinaryEncoder | None = None
        self._accepted = pa.schema([])

    @property
    def names(self) -> tuple[str, ...]:
        """The columns that COPY must list, in this order."""
        return tuple(self._names)

    def begin(self) -> bytes:
        """Return the head of a new COPY; an unfinished one is forgotten."""
        builders = {
            fit.name: _builder(field, jsonb=fit.wire.jsonb)
            for fit, field in zip(self._fits, self._schema, strict=True)
        }
        encoder = pgpq.ArrowToPostgresBinaryEncoder.new_with_encoders(self._schema, builders)
        self._encoder = encoder
        return encoder.write_header()

    def encode(self, batch: pa.RecordBatch) -> bytes:
        """Return the rows of `batch`, whose columns may stand in any order; extra ones are refused.

        Raises:
            BadRow: A value does not fit the table; names column and value.
            SinkError: The batch has other columns than announced.
        """
        if not batch.schema.equals(self._accepted):
            self._accept(batch.schema)
        if self._encoder is None:
            raise SinkError("rows were encoded before the COPY began")
        columns = [fit.apply(batch.column(fit.name)) for fit in self._fits]
        wire = pa.RecordBatch.from_arrays(columns, schema=self._schema)
        return self._encoder.write_batch(wire)

    def _accept(self, schema: pa.Schema) -> None:
        """Remember that batches of `schema` can be fitted; looked at once a schema, not a batch."""
        if sorted(schema.names) != sorted(self._names):
            raise SinkError(
                f"a batch has the columns {schema.names}, and {self._names} were announced"
            )
        for fit in self._fits:
            given = schema.field(fit.name).type
            if wire_of(plain(given), fit.type) is None:
                raise SinkError(
                    f"column {fit.name!r}: a batch has Arrow type {given}, which does not go into "
                    f"the table's type {fit.shown}"
                )
        self._accepted = schema

    def end(self) -> bytes:
        """Return the tail of the COPY."""
        encoder, self._encoder = self._encoder, None
        return b"" if encoder is None else encoder.finish()


def _builder(field: pa.Field, *, jsonb: bool) -> Any:
    if not jsonb:
        return pgpq.ArrowToPostgresBinaryEncoder.infer_encoder(field)
    output = pgpq.schema.Jsonb()
    if arrow.is_large_string(field.type):
        return pgpq.encoders.LargeStringEncoderBuilder.new_with_output(field, output)
    return pgpq.encoders.StringEncoderBuilder.new_with_output(field, output)
