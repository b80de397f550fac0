"""Data files of one subtask: Parquet by pyiceberg's own writer, in the table's layout.

Rows wait until they make a row group; a file is ended when it has the table's target size. Its name
is of `lake.data_file_names`, below the directories of its partition.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlparse

import pyarrow as pa
from pyarrow.fs import FileSelector, FileType
from pyiceberg.io import FileIO, InputFile, OutputFile, OutputStream
from pyiceberg.io.fileformat import FileFormatFactory
from pyiceberg.io.pyarrow import PyArrowFileIO
from pyiceberg.manifest import DataFile, DataFileContent, FileFormat
from pyiceberg.partitioning import PartitionKey
from pyiceberg.schema import sanitize_column_names
from pyiceberg.table import Table, TableProperties
from pyiceberg.typedef import Record
from typing_extensions import override

from onceflow.core.errors import SinkError
from onceflow.core.protocol.ids import CheckpointId
from onceflow.core.spi import WriterContext
from onceflow.core.spi.bad_rows import BadRows
from onceflow.sinks.checkpoint_files import make_durable
from onceflow.sinks.iceberg.catalogs import TableAddress
from onceflow.sinks.iceberg.columns import make_columns
from onceflow.sinks.iceberg.partitions import split_rows
from onceflow.sinks.iceberg.staged_files import encode_files
from onceflow.sinks.lake.data_file_names import DataFileNames
from onceflow.sinks.lake.dictionaries import choose_dictionaries
from onceflow.sinks.lake.errors import library_errors
from onceflow.sinks.lake.rolling_files import EncodedFile, RollingFiles
from onceflow.sinks.lake.table import DataFiles

_logger = logging.getLogger("onceflow.sinks.iceberg")


class IcebergDataFiles(DataFiles):
    """Writes for the newest version of the table when it was made, and keeps to that."""

    def __init__(
        self, address: TableAddress, table: Table, context: WriterContext, bad_rows: BadRows
    ) -> None:
        """Read the table's layout; write nothing yet.

        Raises:
            ConfigError: The rows cannot go into the table.
        """
        self._address, self._table, self._bad_rows = address, table, bad_rows
        self._columns = make_columns(str(address), table.schema(), context.schema)
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
    """Data files of rows that have the table's columns, one or more a partition. One thread."""

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
            # Not its path, which is the same for a null and for the text "null".
            name = repr([field.value for field in key.field_values]) if key else ""
            self._files.add(name, part, partial(self._begin, key))

    def end(self) -> Sequence[DataFile]:
        """Make all files durable, and begin anew; return them."""
        return self._files.end()

    def drop(self) -> None:
        """Delete what was not ended. Safe to call twice."""
        delete_files(self._table.io, self._files.drop())

    def _begin(self, key: PartitionKey | None) -> _OpenFile:
        path = self._table.location_provider().new_data_location(self._names.next(), key)
        return _OpenFile(self._table, path, key)


def delete_files(io: FileIO, paths: Sequence[str]) -> None:
    """Delete `paths`; those that are gone are no error, and others are logged."""
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
    """Yield every file below `location`, with the time at which it was written last.

    Raises:
        SinkError: They cannot be listed.
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
        self._spec_id = table.metadata.default_spec_id
        self._output = _CountedOutput(table.io.new_output(path))
        self._writer = FileFormatFactory.get(FileFormat.PARQUET).create_writer(
            self._output, sanitize_column_names(table.schema()), table.properties
        )

    @property
    @override
    def size_bytes(self) -> int:
        return self._output.size_bytes

    @override
    def write(self, rows: pa.Table) -> None:
        if not self._output.is_created:
            # The library has no setting for it, and makes its file with the first row group.
            settings: dict[str, Any] = cast("Any", self._writer)._parquet_writer_kwargs
            settings["use_dictionary"] = choose_dictionaries(rows)
        self._writer.write(rows)

    @override
    def end(self) -> DataFile:
        statistics = self._writer.close()
        _make_local_file_durable(self.path)
        return DataFile.from_args(
            content=DataFileContent.DATA,
            file_path=self.path,
            file_format=FileFormat.PARQUET,
            partition=self._key.partition if self._key else Record(),
            file_size_in_bytes=len(self._output),
            sort_order_id=None,
            spec_id=self._spec_id,
            equality_ids=None,
            key_metadata=None,
            **statistics.to_serialized_dict(),
        )

    @override
    def drop(self) -> None:
        self._output.close()


class _CountedOutput(OutputFile):
    """An output that knows its stream."""

    def __init__(self, output: OutputFile) -> None:
        super().__init__(output.location)
        self._output = output
        self._stream: OutputStream | None = None

    @property
    def is_created(self) -> bool:
        return self._stream is not None

    @property
    def size_bytes(self) -> int:
        stream = self._stream
        return stream.tell() if stream is not None and hasattr(stream, "tell") else 0

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()

    @override
    def __len__(self) -> int:
        return len(self._output)

    @override
    def exists(self) -> bool:
        return self._output.exists()

    @override
    def create(self, overwrite: bool = False) -> OutputStream:
        self._stream = self._output.create(overwrite)
        return self._stream

    @override
    def to_input_file(self) -> InputFile:
        return self._output.to_input_file()


def _make_local_file_durable(location: str) -> None:
    """Wait for the disk; what stores objects is durable when the file is closed."""
    url = urlparse(location)
    if url.scheme in ("", "file"):
        make_durable(Path(url.path))
        make_durable(Path(url.path).parent)
