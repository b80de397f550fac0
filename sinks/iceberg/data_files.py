"""The data files of one subtask: Parquet in the table's layout, with the table's settings.

Rows wait until they make a row group; a file ends at the table's target size. Its name follows
`lake.data_file_names`, below the directories of its partition.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import IO, Any, cast
from urllib.parse import urlparse

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow.fs import FileSelector, FileType
from pyiceberg.io import FileIO, OutputStream
from pyiceberg.io.pyarrow import (
    PyArrowFileIO,
    _get_parquet_writer_kwargs,  # pyright: ignore[reportPrivateUsage]
)
from pyiceberg.manifest import DataFile, DataFileContent, FileFormat
from pyiceberg.partitioning import PartitionKey
from pyiceberg.schema import sanitize_column_names
from pyiceberg.table import Table, TableProperties
from pyiceberg.typedef import Record
from typing_extensions import override

from onceflow.core.errors import SinkError
from onceflow.core.protocol.ids import CheckpointId
from onceflow.core.spi import WriterContext
from onceflow.sinks.files.checkpoint_files import make_durable
from onceflow.sinks.iceberg.catalogs import TableAddress
from onceflow.sinks.iceberg.partitions import split_rows
from onceflow.sinks.iceberg.staged_files import encode_files
from onceflow.sinks.iceberg.statistics import describe_statistics
from onceflow.sinks.lake.data_file_names import DataFileNames
from onceflow.sinks.lake.dictionaries import choose_dictionaries
from onceflow.sinks.lake.errors import library_errors
from onceflow.sinks.lake.refused_rows import RefusedRows
from onceflow.sinks.lake.rolling_files import EncodedFile, RollingFiles
from onceflow.sinks.lake.table import DataFiles

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
        self._schema, self._spec = table.schema(), table.spec()
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
        return _OpenFile(self._table, path, key)


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
            f"{location} is reached by {type(io).__name__}, which lists no files; leave out the"
            " catalog's property py-io-impl, or remove orphan files by an engine"
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
    def __init__(self, table: Table, path: str, key: PartitionKey | None) -> None:
        self.path = path
        self._key = key
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
            **describe_statistics(
                footer, sanitize_column_names(self._table.schema()), self._table.properties
            ),
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
