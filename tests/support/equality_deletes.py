"""Adds an equality delete to an Iceberg table, as Flink does and pyiceberg does not."""

from __future__ import annotations

import struct
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
    path = f"{table.location()}/data/equality-{value}.parquet"
    field = pa.field(column, pa.int64(), metadata={"PARQUET:field_id": str(field_id)})
    rows = pa.table([[value]], schema=pa.schema([field]))
    with table.io.new_output(path).create() as stream:
        pq.write_table(rows, stream)
    bound = struct.pack("<q", value)
    deletes = DataFile.from_args(
        content=DataFileContent.EQUALITY_DELETES,
        file_path=path,
        file_format=FileFormat.PARQUET,
        partition=Record(),
        record_count=1,
        file_size_in_bytes=len(table.io.new_input(path)),
        sort_order_id=None,
        spec_id=table.spec().spec_id,
        equality_ids=[field_id],
        key_metadata=None,
        column_sizes={},
        value_counts={field_id: 1},
        null_value_counts={field_id: 0},
        nan_value_counts={},
        lower_bounds={field_id: bound},
        upper_bounds={field_id: bound},
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
