"""Adds deletes of rows to an Iceberg table, as Flink and Spark do and pyiceberg does not."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.manifest import (
    DataFile,
    DataFileContent,
    FileFormat,
    ManifestContent,
    ManifestEntry,
    ManifestEntryStatus,
    ManifestFile,
    ManifestWriterV2,
)
from pyiceberg.table import Table
from pyiceberg.table.snapshots import Operation
from pyiceberg.table.update.snapshot import (
    _FastAppendFiles,  # pyright: ignore[reportPrivateUsage]
)
from pyiceberg.typedef import Record
from typing_extensions import override


def delete_by_equality(table: Table, column: str, value: int) -> None:
    """Delete the rows whose `column`, of type long, is `value`, in a snapshot of its own."""
    field_id = table.schema().find_field(column).field_id
    rows = pa.table([[value]], schema=pa.schema([_file_field(column, pa.int64(), field_id)]))
    bounds = {field_id: struct.pack("<q", value)}
    _add_deletes(table, f"equality-{value}", rows, DataFileContent.EQUALITY_DELETES, bounds)


def delete_by_position(table: Table, path: str, positions: Sequence[int]) -> None:
    """Delete the rows at `positions` of the data file at `path`, in a snapshot of its own."""
    fields = [_file_field("file_path", pa.string(), 2147483546)]
    fields.append(_file_field("pos", pa.int64(), 2147483545))
    rows = pa.table([[path] * len(positions), list(positions)], schema=pa.schema(fields))
    bounds = {2147483546: path.encode()}
    _add_deletes(table, "positions", rows, DataFileContent.POSITION_DELETES, bounds)


def _file_field(name: str, kind: pa.DataType, field_id: int) -> pa.Field:
    return pa.field(name, kind, metadata={"PARQUET:field_id": str(field_id)})


def _add_deletes(
    table: Table, name: str, rows: pa.Table, content: DataFileContent, bounds: Mapping[int, bytes]
) -> None:
    path = f"{table.location()}/data/{name}.parquet"
    with table.io.new_output(path).create() as stream:
        pq.write_table(rows, stream)
    deletes = DataFile.from_args(
        content=content,
        file_path=path,
        file_format=FileFormat.PARQUET,
        partition=Record(),
        record_count=rows.num_rows,
        file_size_in_bytes=len(table.io.new_input(path)),
        sort_order_id=None,
        spec_id=table.spec().spec_id,
        equality_ids=[*bounds] if content is DataFileContent.EQUALITY_DELETES else None,
        key_metadata=None,
        column_sizes={},
        value_counts=dict.fromkeys(bounds, rows.num_rows),
        null_value_counts=dict.fromkeys(bounds, 0),
        nan_value_counts={},
        lower_bounds=dict(bounds),
        upper_bounds=dict(bounds),
        split_offsets=None,
    )
    transaction = table.transaction()
    _AddDeletes(Operation.DELETE, transaction, table.io, deletes).commit()
    transaction.commit_transaction()


class _DeletesWriter(ManifestWriterV2):
    @override
    def content(self) -> ManifestContent:
        return ManifestContent.DELETES

    @property
    @override
    def _meta(self) -> dict[str, str]:
        return {**super()._meta, "content": "deletes"}


class _AddDeletes(_FastAppendFiles):
    def __init__(self, operation: Operation, transaction: Any, io: Any, file: DataFile) -> None:
        super().__init__(operation, transaction, io)
        self._table = transaction.table_metadata
        self._file = file

    @override
    def _manifests(self) -> list[ManifestFile]:
        spec, schema = self._table.spec(), self._table.schema()
        output = self.new_manifest_output()
        with _DeletesWriter(spec, schema, output, self._snapshot_id, "null") as writer:
            writer.add(
                ManifestEntry.from_args(
                    status=ManifestEntryStatus.ADDED,
                    snapshot_id=self._snapshot_id,
                    sequence_number=None,
                    file_sequence_number=None,
                    data_file=self._file,
                )
            )
        return [writer.to_manifest_file(), *self._existing_manifests()]
