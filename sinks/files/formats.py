"""The file formats: they encode rows into the bytes of a file."""

from __future__ import annotations

import gzip
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import IO, Literal, cast

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow import types as arrow
from typing_extensions import override

from onceflow.core.arrow import nested_rows
from onceflow.core.arrow.kinds import holds, is_bytes, is_list, is_text
from onceflow.core.arrow.required_parts import complete_column
from onceflow.core.errors import ConfigError

Compression = Literal["zstd", "snappy", "gzip", "lz4", "none"]

_JSON_CHUNK_ROWS = 10_000
_GZIP_LEVEL = 6
_MILLISECOND_SECONDS_MAX = (2**63 - 1) // 1000
"""The largest number of seconds that fits into 64 bits of milliseconds."""


class FileEncoder(ABC):
    """An encoder of one file; used by one thread."""

    @abstractmethod
    def write(self, rows: pa.Table) -> None:
        """Add `rows`."""

    @abstractmethod
    def end(self) -> None:
        """Write the end of the format; do not close the file."""


class FileFormat(ABC):
    """A file format with its options. Can be pickled."""

    @property
    @abstractmethod
    def suffix(self) -> str:
        """The suffix of its files' names, without the dot."""

    @abstractmethod
    def require(self, schema: pa.Schema) -> None:
        """Raise ConfigError unless rows of `schema` can be written.

        Raises:
            ConfigError: They cannot.
        """

    @abstractmethod
    def encoder(self, file: IO[bytes], schema: pa.Schema) -> FileEncoder:
        """Return an encoder that writes into `file`."""

    def refusals(self, rows: pa.RecordBatch) -> dict[int, str]:
        """Return, by row, why the format cannot hold a row's values; empty if it can hold all."""
        del rows
        return {}

    def prepare(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Return the accepted `rows` in the form that the encoder needs, with the same values."""
        return rows


def file_format(name: str, compression: str | None) -> FileFormat:
    """Return the format called `name`; without `compression`, use the format's default.

    Raises:
        ConfigError: There is no such format or compression.
    """
    known: dict[str, tuple[type[ParquetFormat | JsonFormat], tuple[str, ...]]] = {
        "parquet": (ParquetFormat, ("zstd", "snappy", "gzip", "lz4", "none")),
        "json": (JsonFormat, ("none", "gzip")),
    }
    if name not in known:
        raise ConfigError(f"format={name!r}: choose one of {', '.join(known)}")
    kind, compressions = known[name]
    chosen = compression or compressions[0]
    if chosen not in compressions:
        raise ConfigError(
            f"compression={compression!r}: {name} takes one of {', '.join(compressions)}"
        )
    return kind(cast("Compression", chosen))


@dataclass(frozen=True, slots=True)
class ParquetFormat(FileFormat):
    """The Parquet format; each `write` makes a row group."""

    compression: Compression

    @property
    @override
    def suffix(self) -> str:
        return "parquet" if self.compression == "none" else f"{self.compression}.parquet"

    @override
    def require(self, schema: pa.Schema) -> None:
        for field in schema:
            if arrow.is_nested(field.type) and holds(field.type, _is_view):
                raise ConfigError(
                    f"column {field.name!r} of type {field.type}: Parquet's writer takes no views"
                    " inside of other values; cast it to string or binary before the sink"
                )
            self._probe(pa.schema([field]), f"column {field.name!r} of type {field.type}")
        self._probe(schema, "the rows' columns together")

    def _probe(self, schema: pa.Schema, what: str) -> None:
        """Raise ConfigError, which names `what`, if no empty file of `schema` can be written."""
        probe = cast("IO[bytes]", pa.BufferOutputStream())
        try:
            encoder = self.encoder(probe, schema)
            encoder.write(schema.empty_table())
            encoder.end()
        except (pa.ArrowException, ValueError, NotImplementedError, OSError) as error:
            raise ConfigError(
                f"Parquet does not take {what}: {error}. Cast it to another type before the sink,"
                " or leave it out"
            ) from error

    @override
    def refusals(self, rows: pa.RecordBatch) -> dict[int, str]:
        return _refuse(
            rows,
            _SECONDS_BEYOND_MILLISECONDS,
            "Parquet has timestamps in milliseconds, and this number of seconds is too large",
        )

    @override
    def prepare(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        columns = [complete_column(column, column.type) for column in rows.columns]
        return pa.RecordBatch.from_arrays(columns, schema=rows.schema)

    @override
    def encoder(self, file: IO[bytes], schema: pa.Schema) -> FileEncoder:
        return _ParquetEncoder(pq.ParquetWriter(file, schema, compression=self.compression))


class _ParquetEncoder(FileEncoder):
    def __init__(self, writer: pq.ParquetWriter) -> None:
        self._writer = writer

    @override
    def write(self, rows: pa.Table) -> None:
        self._writer.write_table(rows, row_group_size=max(1, rows.num_rows))

    @override
    def end(self) -> None:
        self._writer.close()


@dataclass(frozen=True, slots=True)
class JsonFormat(FileFormat):
    """The JSON format, with one object per line.

    Times are ISO 8601, binary values are base64, and decimals are texts, because most readers turn
    a JSON number into a binary fraction. NaN and infinity do not exist in JSON, so such rows are
    refused.
    """

    compression: Compression

    @property
    @override
    def suffix(self) -> str:
        return "json" if self.compression == "none" else "json.gz"

    @override
    def require(self, schema: pa.Schema) -> None:
        for field in schema:
            if not _in_json(field.type):
                raise ConfigError(
                    f"column {field.name!r} of type {field.type} does not go into JSON without "
                    "loss; cast it before the sink, or write Parquet"
                )

    @override
    def encoder(self, file: IO[bytes], schema: pa.Schema) -> FileEncoder:
        if self.compression == "none":
            return _JsonEncoder(file)
        # The header contains no time, so that the same rows have the same bytes.
        return _GzipJsonEncoder(
            gzip.GzipFile(filename="", mode="wb", compresslevel=_GZIP_LEVEL, fileobj=file, mtime=0)
        )

    @override
    def refusals(self, rows: pa.RecordBatch) -> dict[int, str]:
        return {
            **_refuse(
                rows, nested_rows.TIMES_BEYOND_PYTHON, "JSON has dates of the years 1 to 9999 alone"
            ),
            **_refuse(rows, _NOT_FINITE, "JSON has no NaN and no infinity; replace it by null"),
        }


class _JsonEncoder(FileEncoder):
    def __init__(self, file: IO[bytes] | gzip.GzipFile) -> None:
        self._file = file
        self._encoder = msgspec.json.Encoder()

    @override
    def write(self, rows: pa.Table) -> None:
        encode = self._encoder.encode_lines
        for batch in rows.to_batches(max_chunksize=_JSON_CHUNK_ROWS):
            self._file.write(encode(batch.to_pylist()))

    @override
    def end(self) -> None:
        """Do nothing: a file of lines has no end mark."""


class _GzipJsonEncoder(_JsonEncoder):
    @override
    def end(self) -> None:
        self._file.close()


def _in_json(kind: pa.DataType) -> bool:
    if arrow.is_struct(kind):
        return all(_in_json(field.type) for field in kind)
    if is_list(kind) or arrow.is_dictionary(kind):
        return _in_json(kind.value_type)
    if arrow.is_timestamp(kind):
        # Python's times have no nanoseconds.
        return kind.unit != "ns"
    simple = (
        arrow.is_null, arrow.is_boolean, arrow.is_integer, arrow.is_floating, arrow.is_decimal,
        arrow.is_date, is_text, is_bytes,
    )  # fmt: skip
    return any(is_kind(kind) for is_kind in simple)


def _is_view(kind: pa.DataType) -> bool:
    return arrow.is_string_view(kind) or arrow.is_binary_view(kind)


def _refuse(rows: pa.RecordBatch, trait: nested_rows.ValueTrait, why: str) -> dict[int, str]:
    """Return `why`, after the column's name, for each row with a value that has `trait`."""
    refusals: dict[int, str] = {}
    for name, column in zip(rows.schema.names, rows.columns, strict=True):
        for row in np.flatnonzero(nested_rows.find_rows(column, trait)).tolist():
            refusals.setdefault(row, f"column {name!r}: {why}")
    return refusals


def _find_not_finite(column: pa.Array) -> nested_rows.Rows:
    return nested_rows.to_numpy(pc.invert(pc.is_finite(column)).fill_null(False))


_NOT_FINITE = nested_rows.ValueTrait(arrow.is_floating, _find_not_finite)


def _is_in_seconds(kind: pa.DataType) -> bool:
    return arrow.is_timestamp(kind) and kind.unit == "s"


def _find_seconds_beyond_milliseconds(column: pa.Array) -> nested_rows.Rows:
    seconds = nested_rows.to_numpy(column.view(pa.int64()).fill_null(0))
    return np.logical_or(seconds < -_MILLISECOND_SECONDS_MAX, seconds > _MILLISECOND_SECONDS_MAX)


_SECONDS_BEYOND_MILLISECONDS = nested_rows.ValueTrait(
    _is_in_seconds, _find_seconds_beyond_milliseconds
)
