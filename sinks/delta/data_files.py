"""Data files of one subtask: Parquet in the table's directory, without its partition columns.

They are named as `lake.data_file_names` says. A staged description is one row: the table's id, and
the `DeltaFile`s as JSON.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import date, datetime, timezone
from functools import partial
from typing import Any, cast

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable
from pyarrow.fs import FileSystem
from typing_extensions import override

from onceflow.core.msgspec_decoders import json_decoder
from onceflow.core.protocol.ids import CheckpointId
from onceflow.core.spi import WriterContext
from onceflow.core.spi.bad_rows import BadRows
from onceflow.sinks.checkpoint_files import make_durable
from onceflow.sinks.delta.layout import make_columns, to_arrow_schema
from onceflow.sinks.delta.location import TableLocation
from onceflow.sinks.lake.data_file_names import DataFileNames, check_own_path
from onceflow.sinks.lake.dictionaries import choose_dictionaries
from onceflow.sinks.lake.errors import library_errors
from onceflow.sinks.lake.rolling_files import EncodedFile, RollingFiles, group_rows
from onceflow.sinks.lake.table import DataFiles

_logger = logging.getLogger("onceflow.sinks.delta")

_ROLL_BYTES = 100 * 1024 * 1024
"""Delta's own default; a table says otherwise by `delta.targetFileSize`."""
_STATISTICS_LENGTH_MAX = 32
_SCHEMA = pa.schema([pa.field("table_id", pa.string()), pa.field("files", pa.binary())])


class DeltaFile(msgspec.Struct, frozen=True):
    """What a version says of one file."""

    path: str
    size_bytes: int
    partition: dict[str, str | None]
    statistics: str


def encode_files(table_id: str, files: Sequence[DeltaFile]) -> pa.RecordBatch:
    """Return the row that describes `files`."""
    row = {"table_id": table_id, "files": msgspec.json.encode(files)}
    return pa.RecordBatch.from_pylist([row], schema=_SCHEMA)


def decode_files(staged: pa.RecordBatch, sink_id: str) -> tuple[str, list[DeltaFile]]:
    """Return the table's id and the files that `staged` describes.

    Raises:
        SinkError: A file is none that the sink id writes.
    """
    (row,) = staged.to_pylist()
    files = json_decoder(list[DeltaFile]).decode(row["files"])
    for file in files:
        check_own_path(file.path, sink_id)
    return row["table_id"], files


def delete_files(fs: FileSystem, paths: Sequence[str]) -> None:
    """Delete `paths`; those that are gone are no error, and others are logged."""
    for path in paths:
        try:
            with suppress(FileNotFoundError):
                fs.delete_file(path)
        except OSError as error:
            _logger.warning(
                "data file %s is not deleted, and nothing refers to it: %s", path, error
            )


class DeltaDataFiles(DataFiles):
    """Writes for the version of the table when it was made, and keeps to that one's columns."""

    def __init__(
        self,
        location: TableLocation,
        table: DeltaTable,
        context: WriterContext,
        bad_rows: BadRows,
    ) -> None:
        """Read the table's columns; write nothing yet.

        Raises:
            ConfigError: The rows cannot go into the table.
        """
        self._location, self._bad_rows = location, bad_rows
        self._fs = location.open_files()
        metadata = table.metadata()
        self._table_id = str(metadata.id)
        self._columns = make_columns(str(location), table, context.schema)
        self._partition_by = list(metadata.partition_columns)
        names = to_arrow_schema(table).names
        self._file_columns = [name for name in names if name not in self._partition_by]
        self._file_names = DataFileNames.of_writer(context)
        roll_bytes = metadata.configuration.get("delta.targetFileSize", "")
        self._files = RollingFiles(int(roll_bytes) if roll_bytes.isdigit() else _ROLL_BYTES, _path)

    @override
    def write(self, rows: pa.RecordBatch) -> int:
        rows = self._columns.convert(rows, self._bad_rows)
        if not rows.num_rows:
            return 0
        file_rows = rows.select(self._file_columns)
        keys = [rows.column(name) for name in self._partition_by]
        with library_errors(f"{self._location}: rows cannot be written"):
            for row, part in group_rows(file_rows, keys) if keys else [(0, file_rows)]:
                partition = {
                    name: _to_partition_value(key[row].as_py())
                    for name, key in zip(self._partition_by, keys, strict=True)
                }
                self._files.add(json.dumps(partition), part, partial(self._begin, partition))
        return rows.num_rows

    @override
    def end(self, checkpoint: CheckpointId) -> pa.RecordBatch:
        with library_errors(f"{self._location}: data files are not durable"):
            self._file_names.advance_past(checkpoint)
            return encode_files(self._table_id, self._files.end())

    @override
    def drop(self) -> None:
        delete_files(self._fs, self._files.drop())

    def _begin(self, partition: Mapping[str, str | None]) -> _OpenFile:
        return _OpenFile(self._location, self._fs, self._file_names.next(), partition)


class _OpenFile(EncodedFile[DeltaFile]):
    def __init__(
        self,
        location: TableLocation,
        fs: FileSystem,
        path: str,
        partition: Mapping[str, str | None],
    ) -> None:
        self.path = path
        self._location, self._partition = location, dict(partition)
        self._stream = fs.open_output_stream(path)
        self._writer: pq.ParquetWriter | None = None

    @property
    @override
    def size_bytes(self) -> int:
        return int(self._stream.tell())

    @override
    def write(self, rows: pa.Table) -> None:
        if self._writer is None:
            self._writer = pq.ParquetWriter(
                self._stream,
                rows.schema,
                compression="zstd",
                use_dictionary=choose_dictionaries(rows),
            )
        self._writer.write_table(rows)

    @override
    def end(self) -> DeltaFile:
        assert self._writer is not None
        self._writer.close()
        metadata = cast("Any", self._writer).writer.metadata
        size_bytes = self.size_bytes
        self._stream.close()
        if self._location.directory is not None:
            make_durable(self._location.directory / self.path)
            make_durable(self._location.directory)
        return DeltaFile(self.path, size_bytes, self._partition, _statistics(metadata))

    @override
    def drop(self) -> None:
        self._stream.close()


def _path(file: DeltaFile) -> str:
    return file.path


def _to_partition_value(value: object) -> str | None:
    """Return `value` as Delta's protocol writes it in an action.

    Source: Delta transaction log protocol, "Partition Value Serialization".
    """
    match value:
        case None:
            return None
        case bool():
            return str(value).lower()
        case datetime():
            if value.tzinfo is None:
                return value.isoformat(" ", "microseconds")
            # Without the Z, Spark reads it in the time zone of its session.
            utc = value.astimezone(timezone.utc).replace(tzinfo=None)
            return utc.isoformat("T", "microseconds") + "Z"
        case bytes():
            return value.decode("utf-8", "surrogateescape")
        case _:
            return str(value)


def _statistics(metadata: Any) -> str:
    """Return counts and bounds as Delta keeps them: JSON, of top-level columns.

    Bounds of integers, dates and short text, which no rounding can make wrong.
    """
    nulls: dict[str, int] = {}
    lowest: dict[str, Any] = {}
    highest: dict[str, Any] = {}
    unbounded: set[str] = set()
    for group in range(metadata.num_row_groups):
        for number in range(metadata.num_columns):
            column = metadata.row_group(group).column(number)
            name, bounds = column.path_in_schema, column.statistics
            if "." in name or bounds is None or not bounds.has_null_count:
                continue
            nulls[name] = nulls.get(name, 0) + bounds.null_count
            exact = _read_exact_bounds(bounds)
            if exact is not None:
                lowest[name] = min(lowest.get(name, exact[0]), exact[0])
                highest[name] = max(highest.get(name, exact[1]), exact[1])
            elif bounds.null_count < column.num_values:
                unbounded.add(name)
    return json.dumps(
        {
            "numRecords": metadata.num_rows,
            "nullCount": nulls,
            "minValues": {k: _to_json(v) for k, v in lowest.items() if k not in unbounded},
            "maxValues": {k: _to_json(v) for k, v in highest.items() if k not in unbounded},
        }
    )


def _read_exact_bounds(bounds: Any) -> tuple[Any, Any] | None:
    if not bounds.has_min_max:
        return None
    try:
        lowest, highest = bounds.min, bounds.max
    except (OverflowError, ValueError):
        # Python has no dates before year 1 and after year 9999.
        return None
    return (lowest, highest) if _is_exact(lowest) and _is_exact(highest) else None


def _is_exact(value: object) -> bool:
    if isinstance(value, bool | datetime):
        return False
    if isinstance(value, str):
        return len(value) <= _STATISTICS_LENGTH_MAX
    return isinstance(value, int | date)


def _to_json(value: object) -> object:
    return value.isoformat() if isinstance(value, date) else value
