"""The data files of one subtask, with statistics: Parquet without the partition columns.

Their names are those of `lake.data_files`. A staged description is one row:

    table_id       string   the table that the files were written for
    files          binary   each `DeltaFile`, as JSON
    columns        string   the table's schema when the writer began, as JSON of Delta's log
    partition_by   list     its partition columns

Readers skip a file by its bounds, so a bound is exact, or wider than all values. The datasets of
the Python package `deltalake` treat an absent bound as a bound that no value lies within. A file
therefore has bounds of all columns whose bounds these readers look for, or of no column.

    integers, decimals, booleans, dates   exact
    floats                                exact; none if a value is infinite or not a number
    timestamps                            whole milliseconds around all values
    text                                  32 characters, the upper one above all texts that are cut

Source: Delta transaction log protocol, "Per-file Statistics".
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from functools import partial
from typing import Any, cast

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from deltalake import DeltaTable, Schema
from pyarrow import types as arrow
from pyarrow.fs import FileSystem
from typing_extensions import override

from onceflow.core.arrow.kinds import is_bytes
from onceflow.core.decoding import json_decoder
from onceflow.core.protocol.ids import CheckpointId
from onceflow.core.spi import WriterContext
from onceflow.sinks.delta.layout import TableLayout, read_layout, to_arrow_schema
from onceflow.sinks.delta.location import TableLocation
from onceflow.sinks.files.checkpoint_files import make_durable
from onceflow.sinks.lake.data_files import (
    DataFileNames,
    EncodedFile,
    RollingFiles,
    check_own_path,
    choose_dictionaries,
    group_rows,
    shorten_upper_text,
)
from onceflow.sinks.lake.table import DataFiles, library_errors
from onceflow.sinks.lake.writer import RefusedRows

_TEXT_LENGTH_MAX = 32
_MILLISECOND = timedelta(milliseconds=1)


class FileStatistics:
    """A collector of the statistics of one file."""

    def __init__(self) -> None:
        """Begin with no rows."""
        self._with_nan: set[str] = set()

    def add(self, rows: pa.Table) -> None:
        """Record the properties of `rows`, which are written to the file."""
        for field in rows.schema:
            # Parquet's bounds do not cover NaN.
            if arrow.is_floating(field.type) and pc.any(pc.is_nan(rows.column(field.name))).as_py():
                self._with_nan.add(field.name)

    def describe(self, metadata: Any, columns: pa.Schema) -> str:
        """Return the statistics as JSON, from the Parquet `metadata` of the whole file."""
        nulls: dict[str, int] = {}
        bounds: dict[str, tuple[Any, Any]] = {}
        unbounded = set(self._with_nan)
        for group in range(metadata.num_row_groups):
            for number in range(metadata.num_columns):
                column = metadata.row_group(group).column(number)
                # Paths of members of structs and lists contain a dot, as some names do.
                name, ends = column.path_in_schema, column.statistics
                if "." in name or ends is None or not ends.has_null_count:
                    continue
                nulls[name] = nulls.get(name, 0) + ends.null_count
                pair = _read_ends(ends)
                if pair is not None:
                    low, high = bounds.get(name, pair)
                    bounds[name] = min(low, pair[0]), max(high, pair[1])
                elif ends.null_count < column.num_values:
                    unbounded.add(name)
        written = {
            field.name: _to_json(bounds, field.name, unbounded)
            for field in columns
            if _is_bounded(field.type) and nulls.get(field.name) != metadata.num_rows
        }
        described: dict[str, Any] = {"numRecords": metadata.num_rows, "nullCount": nulls}
        known = {name: pair for name, pair in written.items() if pair is not None}
        if len(known) == len(written):
            described["minValues"] = {name: low for name, (low, _) in known.items()}
            described["maxValues"] = {name: high for name, (_, high) in known.items()}
        return msgspec.json.encode(described).decode()


def _is_bounded(kind: pa.DataType) -> bool:
    """Return True if readers look for bounds of columns of this type."""
    return not (arrow.is_nested(kind) or is_bytes(kind))


def _read_ends(ends: Any) -> tuple[Any, Any] | None:
    if not ends.has_min_max:
        return None
    try:
        return ends.min, ends.max
    except (OverflowError, ValueError):
        # Python has no dates before year 1 or after year 9999.
        return None


def _to_json(
    bounds: Mapping[str, tuple[Any, Any]], name: str, unbounded: set[str]
) -> tuple[object, object] | None:
    """Return both bounds of a column in JSON form, or None if the column has none."""
    if name in unbounded or name not in bounds:
        return None
    low, high = bounds[name]
    if isinstance(low, float) and not (math.isfinite(low) and math.isfinite(high)):
        return None
    if isinstance(low, str):
        above = shorten_upper_text(high, _TEXT_LENGTH_MAX)
        return None if above is None else (low[:_TEXT_LENGTH_MAX], above)
    if isinstance(low, datetime):
        return _to_milliseconds(low, high)
    return _to_number(low), _to_number(high)


def _to_milliseconds(low: datetime, high: datetime) -> tuple[str, str] | None:
    """Return the whole milliseconds around all times: the one at or before, the one at or after."""
    above = high
    if high.microsecond % 1_000:
        try:
            above = high + _MILLISECOND
        except OverflowError:
            # The last millisecond of year 9999 has no successor.
            return None
    return _to_time(low), _to_time(above)


def _to_time(value: datetime) -> str:
    zone = "" if value.tzinfo is None else "Z"
    return value.replace(tzinfo=None).isoformat("T", "milliseconds") + zone


def _to_number(value: object) -> object:
    if isinstance(value, Decimal):
        # A number with all digits, because a float would round it.
        return msgspec.Raw(format(value, "f").encode())
    return value.isoformat() if isinstance(value, date) else value


_logger = logging.getLogger("onceflow.sinks.delta")

_ROLL_BYTES = 100 * 1024 * 1024
"""Delta's own default; a table may set `delta.targetFileSize`."""
_SCHEMA = pa.schema(
    [
        pa.field("table_id", pa.string()),
        pa.field("files", pa.binary()),
        pa.field("columns", pa.string()),
        pa.field("partition_by", pa.list_(pa.string())),
    ]
)


class DeltaFile(msgspec.Struct, frozen=True):
    """The description of one file in a version."""

    path: str
    size_bytes: int
    partition: dict[str, str | None]
    statistics: str


@dataclass(frozen=True, slots=True)
class DescribedFiles:
    """The files that one writer has written for one checkpoint, with their table."""

    table_id: str
    files: Sequence[DeltaFile]
    layout: TableLayout
    """The layout of the table when the writer began."""


def encode_files(table_id: str, layout: TableLayout, files: Sequence[DeltaFile]) -> pa.RecordBatch:
    """Return the row that describes `files`, which were written for a table of `layout`."""
    row = {
        "table_id": table_id,
        "files": msgspec.json.encode(files),
        "columns": layout.columns.to_json(),
        "partition_by": layout.partition_by,
    }
    return pa.RecordBatch.from_pylist([row], schema=_SCHEMA)


def decode_files(staged: pa.RecordBatch, sink_id: str) -> DescribedFiles:
    """Return the files that `staged` describes.

    Raises:
        SinkError: A path is not one that the sink id writes.
    """
    (row,) = staged.to_pylist()
    files = json_decoder(list[DeltaFile]).decode(row["files"])
    for file in files:
        check_own_path(file.path, sink_id)
    layout = TableLayout(Schema.from_json(row["columns"]), row["partition_by"])
    return DescribedFiles(row["table_id"], files, layout)


def delete_files(fs: FileSystem, paths: Sequence[str]) -> None:
    """Delete `paths`; missing files are no error, and failures are logged."""
    for path in paths:
        try:
            with suppress(FileNotFoundError):
                fs.delete_file(path)
        except OSError as error:
            _logger.warning(
                "data file %s is not deleted, and nothing refers to it: %s", path, error
            )


class DeltaDataFiles(DataFiles):
    """A writer of data files with the columns that the table has when the writer is created."""

    def __init__(
        self,
        location: TableLocation,
        table: DeltaTable,
        context: WriterContext,
        refused: RefusedRows,
    ) -> None:
        """Read the table's columns; write nothing yet."""
        self._location = location
        self._columns, self._bad_rows = refused.columns, refused.bad_rows
        self._fs = location.open_files()
        metadata = table.metadata()
        self._table_id, self._layout = str(metadata.id), read_layout(table)
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
            return encode_files(self._table_id, self._layout, self._files.end())

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
        self._statistics = FileStatistics()

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
        self._statistics.add(rows)

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
        statistics = self._statistics.describe(metadata, self._writer.schema)
        return DeltaFile(self.path, size_bytes, self._partition, statistics)

    @override
    def drop(self) -> None:
        self._stream.close()


def _path(file: DeltaFile) -> str:
    return file.path


def _to_partition_value(value: object) -> str | None:
    """Return `value` in the form of Delta's protocol for an action.

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
            # Without the Z, Spark would read it in the time zone of its session.
            utc = value.astimezone(timezone.utc).replace(tzinfo=None)
            return utc.isoformat("T", "microseconds") + "Z"
        case bytes():
            return value.decode("utf-8", "surrogateescape")
        case _:
            return str(value)
