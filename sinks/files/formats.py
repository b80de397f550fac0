"""How rows become the bytes of a file."""

from __future__ import annotations

import gzip
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import IO, Any, Literal, cast

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow import types as arrow
from typing_extensions import override

from onceflow.core.arrow.kinds import holds, is_bytes, is_finite, is_list, is_text
from onceflow.core.errors import ConfigError

Compression = Literal["zstd", "snappy", "gzip", "lz4", "none"]

_JSON_CHUNK_ROWS = 10_000
_GZIP_LEVEL = 6


class FileEncoder(ABC):
    """One file on its way; used by one thread."""

    @abstractmethod
    def write(self, rows: pa.Table) -> None:
        """Add `rows`."""

    @abstractmethod
    def end(self) -> None:
        """Write what the format wants at the end; does not close the file."""


class FileFormat(ABC):
    """A format with its options. Pickles."""

    @property
    @abstractmethod
    def suffix(self) -> str:
        """What names of its files end in, without the dot."""

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
        """Return, by row, why the format cannot hold a row's values; empty when it can all."""
        del rows
        return {}


def file_format(name: str, compression: str | None) -> FileFormat:
    """Return the format called `name`; without `compression` the usual one.

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
    """Parquet; each `write` makes a row group."""

    compression: Compression

    @property
    @override
    def suffix(self) -> str:
        return "parquet" if self.compression == "none" else f"{self.compression}.parquet"

    @override
    def require(self, schema: pa.Schema) -> None:
        probe = cast("IO[bytes]", pa.BufferOutputStream())
        try:
            encoder = self.encoder(probe, schema)
            encoder.write(schema.empty_table())
            encoder.end()
        except (pa.ArrowException, ValueError, NotImplementedError) as error:
            raise ConfigError(f"the rows' columns do not go into Parquet: {error}") from error

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
    """One JSON object a line.

    Times are ISO 8601, binary is base64, decimals are texts (a JSON number is read back as a
    binary fraction by most). NaN and infinity do not exist in JSON, so such rows are refused.
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
        # Without a time in its header, so that the same rows are the same bytes.
        return _GzipJsonEncoder(
            gzip.GzipFile(filename="", mode="wb", compresslevel=_GZIP_LEVEL, fileobj=file, mtime=0)
        )

    @override
    def refusals(self, rows: pa.RecordBatch) -> dict[int, str]:
        refusals: dict[int, str] = {}
        for name, column in zip(rows.schema.names, rows.columns, strict=True):
            for row in _not_finite(column):
                refusals.setdefault(
                    row, f"column {name!r}: JSON has no NaN and no infinity; replace it by null"
                )
            for row in _beyond_python(column):
                refusals.setdefault(
                    row,
                    f"column {name!r}: a date beyond the years 1 to 9999 does not go into JSON",
                )
        return refusals


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
        """Nothing ends a file of lines."""


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
        # Python's times end at the microsecond.
        return kind.unit != "ns"
    simple = (
        arrow.is_null, arrow.is_boolean, arrow.is_integer, arrow.is_floating, arrow.is_decimal,
        arrow.is_date, is_text, is_bytes,
    )  # fmt: skip
    return any(is_kind(kind) for is_kind in simple)


def _not_finite(column: pa.Array) -> list[int]:
    """Return the rows that hold NaN or infinity, at any depth."""
    kind = column.type
    if arrow.is_floating(kind):
        bad = pc.invert(pc.is_finite(column))
        return _rows_where(bad)
    if holds(kind, arrow.is_floating):
        return [row for row, value in enumerate(column.to_pylist()) if not is_finite(value)]
    return []


def _beyond_python(column: pa.Array) -> list[int]:
    kind = column.type
    if not (arrow.is_date(kind) or arrow.is_timestamp(kind)):
        return []
    years = pc.year(column)
    return _rows_where(pc.or_(pc.less(years, 1), pc.greater(years, 9999)))


def _rows_where(mask: Any) -> list[int]:
    if not pc.any(mask).as_py():
        return []
    return cast("list[int]", pc.indices_nonzero(mask).to_pylist())
