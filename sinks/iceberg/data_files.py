"""The data files of one subtask: Parquet in the table's layout, with partitions and statistics.

Rows wait until they make a row group; a file ends at the table's target size. Its name follows
`lake.data_files`, below the directories of its partition.

A wrong bound makes readers and upserts skip the file. So a column has bounds only if every row
group of it has bounds.

Source: Iceberg specification, Manifests and Appendix D (single-value serialization).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import IO, Any, cast
from urllib.parse import urlparse

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow import types as arrow
from pyarrow.fs import FileSelector, FileType
from pyiceberg.conversions import to_bytes
from pyiceberg.io import FileIO, OutputStream
from pyiceberg.io.pyarrow import (
    MetricModeTypes,
    MetricsMode,
    PyArrowFileIO,
    _get_parquet_writer_kwargs,  # pyright: ignore[reportPrivateUsage]
    compute_statistics_plan,
    parquet_path_to_id_mapping,
)
from pyiceberg.manifest import DataFile, DataFileContent, FileFormat
from pyiceberg.partitioning import PartitionField, PartitionFieldValue, PartitionKey, PartitionSpec
from pyiceberg.schema import Schema, sanitize_column_names
from pyiceberg.table import Table, TableProperties
from pyiceberg.transforms import parse_transform
from pyiceberg.typedef import Record
from pyiceberg.types import (
    BinaryType,
    DecimalType,
    DoubleType,
    FloatType,
    PrimitiveType,
    StringType,
)
from pyiceberg.utils.decimal import unscaled_to_decimal
from pyiceberg.utils.truncate import truncate_upper_bound_binary_string
from typing_extensions import override

from onceflow.core.errors import ConfigError, SinkError
from onceflow.core.protocol.ids import CheckpointId
from onceflow.core.spi import WriterContext
from onceflow.sinks.files.checkpoint_files import make_durable
from onceflow.sinks.iceberg.catalogs import TableAddress
from onceflow.sinks.iceberg.staged_files import encode_files
from onceflow.sinks.lake.data_files import (
    DataFileNames,
    EncodedFile,
    RollingFiles,
    choose_dictionaries,
    group_rows,
    shorten_upper_text,
)
from onceflow.sinks.lake.table import DataFiles, library_errors
from onceflow.sinks.lake.writer import RefusedRows

_TERM = re.compile(r"(\w+)\((?:(\d+)\s*,\s*)?([^()]+)\)")
# Iceberg's specification assigns partition fields ids from 1000 on, distinct from columns' ids.
_FIRST_PARTITION_ID = 1000


def split_rows(
    rows: pa.RecordBatch, spec: PartitionSpec, schema: Schema
) -> Iterator[tuple[PartitionKey | None, pa.RecordBatch]]:
    """Yield each partition with its rows, in order; the partition is None without partitions.

    `schema` and `rows` have the names of columns in data files.
    """
    if spec.is_unpartitioned() or not rows.num_rows:
        yield None, rows
        return
    values = [_transform(rows, field, schema) for field in spec.fields]
    for row, part in group_rows(rows, values):
        key = PartitionKey(
            field_values=[
                PartitionFieldValue(field=field, value=column[row].as_py())
                for field, column in zip(spec.fields, values, strict=True)
            ],
            partition_spec=spec,
            schema=schema,
        )
        yield key, part


def parse_spec(terms: Sequence[str], schema: Schema) -> PartitionSpec:
    """Return the spec of `terms`, such as `country`, `day(at)`, `bucket(16, id)`.

    Raises:
        ConfigError: A term is not valid, or names a column or transform that does not exist.
    """
    fields: list[PartitionField] = []
    for number, term in enumerate(terms):
        match = _TERM.fullmatch(term.strip())
        name, width, column = match.groups() if match else ("identity", None, term)
        try:
            source = schema.find_field(column.strip())
            transform = parse_transform(f"{name}[{width}]" if width else name)
            accepted = transform.can_transform(source.field_type)
        except ValueError as error:
            raise ConfigError(f"partition_by names {term!r}: {error}") from error
        if not accepted:
            raise ConfigError(f"partition_by names {term!r}, but the column is {source.field_type}")
        suffix = "" if name == "identity" else f"_{name}"
        fields.append(
            PartitionField(
                source_id=source.field_id,
                field_id=_FIRST_PARTITION_ID + number,
                transform=transform,
                name=f"{source.name}{suffix}",
            )
        )
    return PartitionSpec(*fields)


def _transform(rows: pa.RecordBatch, field: PartitionField, schema: Schema) -> pa.Array:
    source = schema.find_field(field.source_id)
    # In data files no name contains a dot: dots only separate the parts of a path.
    name, *inner = (schema.find_column_name(field.source_id) or "").split(".")
    column = rows.column(name)
    if inner:
        column = pc.struct_field(column, inner)
    if arrow.is_large_binary(column.type):
        # The library itself uses this type for bytes, but its `truncate` does not accept it.
        column = column.cast(pa.binary())
    transformed = cast("Any", field).transform.pyarrow_transform(source.field_type)(column)
    return transformed.combine_chunks() if isinstance(transformed, pa.ChunkedArray) else transformed


@dataclass
class _Column:
    """The facts about one column from the row groups so far."""

    kind: PrimitiveType
    mode: MetricsMode
    size_bytes: int = 0
    values: int = 0
    nulls: int | None = 0
    """The number of nulls; None if a row group does not record it."""
    bounds: list[Any] = field(default_factory=list[Any])
    has_bounds: bool = True

    def add(self, chunk: Any) -> None:
        """Add the facts of the column's part in one row group."""
        self.size_bytes += chunk.total_compressed_size
        self.values += chunk.num_values
        statistics = chunk.statistics
        if statistics is None or not statistics.has_null_count:
            self.nulls, self.has_bounds = None, False
            return
        if self.nulls is not None:
            self.nulls += statistics.null_count
        if statistics.has_min_max:
            raw_bounds = (statistics.min_raw, statistics.max_raw)
            self.bounds += [_to_value(self.kind, raw) for raw in raw_bounds]
        elif statistics.null_count < chunk.num_values and not isinstance(
            # Parquet has no bounds of NaN, and Iceberg's bounds ignore NaN.
            self.kind,
            FloatType | DoubleType,
        ):
            self.has_bounds = False

    @property
    def lower_bound(self) -> bytes | None:
        """The smallest value, or a prefix of it; None if there is none."""
        if not self.has_bounds or not self.bounds:
            return None
        lowest = min(self.bounds)
        return to_bytes(self.kind, lowest[: self.mode.length] if self.is_truncated else lowest)

    @property
    def upper_bound(self) -> bytes | None:
        """The largest value, or a shorter value above it; None if there is none."""
        if not self.has_bounds or not self.bounds:
            return None
        highest = max(self.bounds)
        if self.is_truncated:
            length = self.mode.length or 0
            if isinstance(highest, str):
                highest = shorten_upper_text(highest, length)
            else:
                highest = truncate_upper_bound_binary_string(highest, length)
        return None if highest is None else to_bytes(self.kind, highest)

    @property
    def is_truncated(self) -> bool:
        """True if bounds may be shorter than values."""
        return isinstance(self.kind, StringType | BinaryType) and self.mode.length is not None


def describe_statistics(
    footer: Any, schema: Schema, properties: Mapping[str, str]
) -> dict[str, Any]:
    """Return the arguments of a `DataFile` about the rows of a file; `schema` is the file's.

    `footer` is a `pyarrow.parquet.FileMetaData`.
    """
    plan = compute_statistics_plan(schema, dict(properties))
    ids = parquet_path_to_id_mapping(schema)
    columns: dict[int, _Column] = {}
    split_offsets: list[int] = []
    for group_number in range(footer.num_row_groups):
        group = footer.row_group(group_number)
        split_offsets.append(_find_offset(group.column(0)))
        for number in range(footer.num_columns):
            chunk = group.column(number)
            planned = plan[ids[chunk.path_in_schema]]
            column = columns.setdefault(
                planned.field_id, _Column(planned.iceberg_type, planned.mode)
            )
            column.add(chunk)
    counted = {
        field_id: column
        for field_id, column in columns.items()
        if column.mode.type is not MetricModeTypes.NONE
    }
    bounded = {
        field_id: column
        for field_id, column in counted.items()
        if column.mode.type is not MetricModeTypes.COUNTS
    }
    return {
        "record_count": footer.num_rows,
        "column_sizes": {field_id: column.size_bytes for field_id, column in columns.items()},
        "value_counts": {field_id: column.values for field_id, column in counted.items()},
        "null_value_counts": _drop_unknown({key: column.nulls for key, column in counted.items()}),
        "nan_value_counts": {},
        "lower_bounds": _drop_unknown({key: column.lower_bound for key, column in bounded.items()}),
        "upper_bounds": _drop_unknown({key: column.upper_bound for key, column in bounded.items()}),
        "split_offsets": sorted(split_offsets),
    }


def _to_value(kind: PrimitiveType, raw: Any) -> Any:
    """Return the value of a bound that Parquet stores as `raw`, with dates and times as numbers.

    Python has no dates outside of the years 1 to 9999.
    """
    match kind:
        case StringType():
            return raw.decode()
        case DecimalType():
            unscaled = int.from_bytes(raw, "big", signed=True) if isinstance(raw, bytes) else raw
            return unscaled_to_decimal(unscaled, kind.scale)
        case _:
            return raw


def _find_offset(chunk: Any) -> int:
    """Return the offset of a row group whose first column is `chunk`."""
    if chunk.has_dictionary_page and chunk.dictionary_page_offset < chunk.data_page_offset:
        return int(chunk.dictionary_page_offset)
    return int(chunk.data_page_offset)


def _drop_unknown(facts: dict[int, Any]) -> dict[int, Any]:
    return {field_id: fact for field_id, fact in facts.items() if fact is not None}


_logger = logging.getLogger("onceflow.sinks.iceberg")

_NAME_LENGTH_MAX_BYTES = 255
"""The longest name in a directory, on the usual file systems."""


class IcebergDataFiles(DataFiles):
    """A writer of files for the newest table version at its creation; it keeps that layout."""

    def __init__(
        self, address: TableAddress, table: Table, context: WriterContext, refused: RefusedRows
    ) -> None:
        """Read the table's layout; write nothing yet."""
        self._address, self._table = address, table
        self._columns, self._bad_rows = refused.columns, refused.bad_rows
        self._names = DataFileNames.of_writer(context)
        self._files = PartitionedFiles(table, self._names)

    @override
    def write(self, rows: pa.RecordBatch) -> int:
        rows = self._columns.convert(rows, self._bad_rows)
        with library_errors(f"{self._address}: rows cannot be written"):
            self._files.write(rows)
        return rows.num_rows

    @override
    def end(self, checkpoint: CheckpointId) -> pa.RecordBatch:
        with library_errors(f"{self._address}: data files are not durable"):
            self._names.advance_past(checkpoint)
            return encode_files(self._table, self._files.end())

    @override
    def drop(self) -> None:
        self._files.drop()


class PartitionedFiles:
    """The data files of rows with the table's columns, one or more per partition.

    Used by one thread.
    """

    def __init__(self, table: Table, names: DataFileNames) -> None:
        """Read the table's layout; write nothing yet."""
        self._table, self._names = table, names
        self._schema, self._spec = sanitize_column_names(table.schema()), table.spec()
        roll_bytes = table.properties.get(
            TableProperties.WRITE_TARGET_FILE_SIZE_BYTES,
            TableProperties.WRITE_TARGET_FILE_SIZE_BYTES_DEFAULT,
        )
        self._files = RollingFiles[DataFile](int(roll_bytes), lambda file: file.file_path)

    def write(self, rows: pa.RecordBatch) -> None:
        """Add `rows`."""
        for key, part in split_rows(rows, self._spec, self._schema):
            # The name is not the partition's path, which is the same for a null and the text
            # "null".
            name = repr([field.value for field in key.field_values]) if key else ""
            self._files.add(name, part, partial(self._begin, key))

    def end(self) -> Sequence[DataFile]:
        """Make all files durable and begin new ones; return the ended files."""
        return self._files.end()

    def drop(self) -> None:
        """Delete the files that were not ended. May be called twice."""
        delete_files(self._table.io, self._files.drop())

    def _begin(self, key: PartitionKey | None) -> _OpenFile:
        provider, name = self._table.location_provider(), self._names.next()
        path = provider.new_data_location(name, key)
        if any(len(part.encode()) > _NAME_LENGTH_MAX_BYTES for part in path.split("/")):
            # Only manifests define a file's partition; directories are for people.
            path = provider.new_data_location(name, None)
        return _OpenFile(self._table, self._schema, path, key)


def delete_files(io: FileIO, paths: Sequence[str]) -> None:
    """Delete `paths`; missing files are no error, and failures are logged."""
    for path in paths:
        try:
            io.delete(path)
        except FileNotFoundError:
            pass
        except OSError as error:
            _logger.warning(
                "data file %s is not deleted, and nothing refers to it: %s", path, error
            )


def list_files(io: FileIO, location: str) -> Iterator[tuple[str, datetime]]:
    """Yield every file below `location`, with its modification time.

    Raises:
        SinkError: The files cannot be listed.
    """
    if not isinstance(io, PyArrowFileIO):
        raise SinkError(
            f"{location} is read by {type(io).__name__}, which cannot list files; leave out the"
            " catalog's property py-io-impl, or let an engine remove orphan files"
        )
    root = location.rstrip("/")
    with library_errors(f"the files below {location} cannot be listed"):
        scheme, netloc, path = io.parse_location(root)
        files = io.fs_by_scheme(scheme, netloc).get_file_info(
            FileSelector(path, recursive=True, allow_not_found=True)
        )
    for file in files:
        if file.type is FileType.File and file.mtime is not None:
            yield root + file.path[len(path) :], file.mtime


class _OpenFile(EncodedFile[DataFile]):
    def __init__(self, table: Table, schema: Schema, path: str, key: PartitionKey | None) -> None:
        self.path = path
        self._schema, self._key = schema, key
        self._table = table
        self._output = table.io.new_output(path)
        self._stream: OutputStream | None = None
        self._writer: pq.ParquetWriter | None = None

    @property
    @override
    def size_bytes(self) -> int:
        stream = self._stream
        return stream.tell() if stream is not None and hasattr(stream, "tell") else 0

    @override
    def write(self, rows: pa.Table) -> None:
        properties = self._table.properties
        if self._writer is None:
            self._stream = self._output.create(overwrite=True)
            self._writer = pq.ParquetWriter(
                cast("IO[bytes]", self._stream),
                rows.schema,
                store_decimal_as_integer=True,
                use_dictionary=choose_dictionaries(rows),
                **_get_parquet_writer_kwargs(properties),
            )
        row_group_rows = properties.get(
            TableProperties.PARQUET_ROW_GROUP_LIMIT,
            TableProperties.PARQUET_ROW_GROUP_LIMIT_DEFAULT,
        )
        self._writer.write_table(rows, row_group_size=int(row_group_rows))

    @override
    def end(self) -> DataFile:
        assert self._writer is not None
        assert self._stream is not None
        self._writer.close()
        footer = cast("Any", self._writer).writer.metadata
        self._stream.close()
        _make_local_file_durable(self.path)
        return DataFile.from_args(
            content=DataFileContent.DATA,
            file_path=self.path,
            file_format=FileFormat.PARQUET,
            partition=self._key.partition if self._key else Record(),
            file_size_in_bytes=len(self._output),
            sort_order_id=None,
            spec_id=self._table.metadata.default_spec_id,
            equality_ids=None,
            key_metadata=None,
            **describe_statistics(footer, self._schema, self._table.properties),
        )

    @override
    def drop(self) -> None:
        if self._stream is not None:
            self._stream.close()


def _make_local_file_durable(location: str) -> None:
    """Wait for the disk if the file is local.

    In an object store a closed file is already durable.
    """
    url = urlparse(location)
    if url.scheme in ("", "file"):
        make_durable(Path(url.path))
        make_durable(Path(url.path).parent)
