"""Data files of one subtask: Parquet by pyiceberg's own writer, in the table's layout.

    <data>/<partition>/onceflow-<attempt>-<checkpoint>-<subtask>-<token>-<number>.parquet

`<checkpoint>` is the one that the writer expects next when it begins the file. Rows wait until they
make a row group; a file is ended when it has the table's target size.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlparse

import pyarrow as pa
from pyiceberg.io import FileIO, InputFile, OutputFile, OutputStream
from pyiceberg.io.fileformat import FileFormatFactory
from pyiceberg.manifest import DataFile, DataFileContent, FileFormat
from pyiceberg.partitioning import PartitionKey
from pyiceberg.schema import sanitize_column_names
from pyiceberg.table import Table, TableProperties
from pyiceberg.typedef import Record
from typing_extensions import override

from onceflow.core.protocol.ids import CheckpointId
from onceflow.core.spi import WriterContext
from onceflow.core.spi.bad_rows import BadRows
from onceflow.sinks.checkpoint_files import make_durable
from onceflow.sinks.iceberg.catalogs import TableAddress, catalog_errors
from onceflow.sinks.iceberg.columns import TableColumns
from onceflow.sinks.iceberg.partitions import split_rows
from onceflow.sinks.iceberg.staged_files import encode_files
from onceflow.sinks.lake.table import DataFiles

_logger = logging.getLogger("onceflow.sinks.iceberg")

ROW_GROUP_BYTES = 32 * 1024 * 1024
"""Of rows that wait in memory, of all files of a writer; then the fullest has a row group."""
OPEN_FILES_MAX = 128
"""Partitions that a writer writes at a time; with more, files get smaller."""


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
        self._schema, self._spec = table.schema(), table.spec()
        self._columns = TableColumns(str(address), self._schema, context.schema)
        self._prefix = f"onceflow-{context.attempt}"
        self._suffix = f"{context.subtask}-{uuid.uuid4().hex}"
        self._checkpoint = context.first_checkpoint
        self._number = 0
        self._roll_bytes = int(
            table.properties.get(
                TableProperties.WRITE_TARGET_FILE_SIZE_BYTES,
                TableProperties.WRITE_TARGET_FILE_SIZE_BYTES_DEFAULT,
            )
        )
        self._open: dict[str, _OpenFile] = {}
        self._ended: list[DataFile] = []

    @override
    def write(self, rows: pa.RecordBatch) -> int:
        rows = self._columns.convert(rows, self._bad_rows)
        with catalog_errors(f"{self._address}: rows cannot be written"):
            for key, part in split_rows(rows, self._spec, self._schema):
                self._add(key, part)
        return rows.num_rows

    @override
    def end(self, checkpoint: CheckpointId) -> pa.RecordBatch:
        with catalog_errors(f"{self._address}: data files are not durable"):
            for file in self._open.values():
                self._ended.append(file.end())
            self._open.clear()
            self._checkpoint = CheckpointId(checkpoint + 1)
            ended, self._ended = self._ended, []
            return encode_files(self._table, ended)

    @override
    def drop(self) -> None:
        open_files, self._open = list(self._open.values()), {}
        paths = [file.path for file in open_files] + [file.file_path for file in self._ended]
        self._ended = []
        for file in open_files:
            file.drop()
        delete_files(self._table.io, paths)

    def _add(self, key: PartitionKey | None, rows: pa.RecordBatch) -> None:
        if not rows.num_rows:
            return
        name = key.to_path() if key else ""
        file = self._open.get(name)
        if file is None:
            if len(self._open) >= OPEN_FILES_MAX:
                self._end_file(max(self._open, key=lambda one: self._open[one].buffered_bytes))
            file = self._open[name] = self._begin(key)
        file.add(rows)
        if sum(one.buffered_bytes for one in self._open.values()) >= ROW_GROUP_BYTES:
            max(self._open.values(), key=lambda one: one.buffered_bytes).flush()
        if file.size_bytes >= self._roll_bytes:
            self._end_file(name)

    def _end_file(self, name: str) -> None:
        self._ended.append(self._open.pop(name).end())

    def _begin(self, key: PartitionKey | None) -> _OpenFile:
        name = f"{self._prefix}-{self._checkpoint}-{self._suffix}-{self._number}.parquet"
        self._number += 1
        path = self._table.location_provider().new_data_location(name, key)
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


class _OpenFile:
    """One Parquet file that is being written."""

    def __init__(self, table: Table, path: str, key: PartitionKey | None) -> None:
        self.path = path
        self.buffered_bytes = 0
        self._key = key
        self._spec_id = table.metadata.default_spec_id
        self._output = _CountedOutput(table.io.new_output(path))
        self._writer = FileFormatFactory.get(FileFormat.PARQUET).create_writer(
            self._output, sanitize_column_names(table.schema()), table.properties
        )
        self._buffered: list[pa.RecordBatch] = []

    @property
    def size_bytes(self) -> int:
        """What is in the file so far."""
        return self._output.size_bytes

    def add(self, rows: pa.RecordBatch) -> None:
        self._buffered.append(rows)
        self.buffered_bytes += rows.nbytes

    def flush(self) -> None:
        """Write what waits as a row group."""
        if self._buffered:
            self._writer.write(pa.Table.from_batches(self._buffered))
            self._buffered, self.buffered_bytes = [], 0

    def end(self) -> DataFile:
        """Make the file whole and durable; return it as a manifest names it."""
        self.flush()
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

    def drop(self) -> None:
        """End it as far as it was written; the caller deletes it."""
        self._buffered = []
        self._output.close()


class _CountedOutput(OutputFile):
    """An output that knows its stream."""

    def __init__(self, output: OutputFile) -> None:
        super().__init__(output.location)
        self._output = output
        self._stream: OutputStream | None = None

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
