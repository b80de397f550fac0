"""Snapshot producers that can write manifests of a partition spec whose source column was dropped.

A table may get another partition spec and then lose the column that the former spec partitions by.
The type of a partition value follows from its column, so pyiceberg can no longer write a manifest
of the former spec. Manifests that were written before the drop have the values in the type of the
dropped column, and every reader accepts them. So the producers write further manifests of that spec
with a schema that still has the column. If no schema of the table has it any more, they take the
schema from a manifest of that spec.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, cast
from uuid import UUID

from pyiceberg.avro.file import AvroFile
from pyiceberg.expressions.visitors import manifest_evaluator
from pyiceberg.io import FileIO
from pyiceberg.manifest import DataFile, ManifestFile, ManifestWriter, write_manifest
from pyiceberg.partitioning import PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table import Transaction
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.snapshots import Operation
from pyiceberg.table.update.snapshot import (
    UpdateSnapshot,
    _MergeAppendFiles,  # pyright: ignore[reportPrivateUsage]
    _OverwriteFiles,  # pyright: ignore[reportPrivateUsage]
    _SnapshotProducer,  # pyright: ignore[reportPrivateUsage]
)
from pyiceberg.typedef import Record
from typing_extensions import override

from onceflow.sinks.iceberg.staged_files import StagedFiles


class Snapshots(UpdateSnapshot):
    """A factory of snapshot producers, whose manifests can have every spec of the table."""

    def __init__(
        self, transaction: Transaction, io: FileIO, branch: str, summary: Mapping[str, str]
    ) -> None:
        """Write nothing yet."""
        super().__init__(transaction, io, branch, dict(summary))

    def append(self, written: Sequence[Schema]) -> _MergeAppendFiles:
        """Return a producer that adds files; `written` are the schemas of the files."""
        producer = _Append(
            Operation.APPEND,
            self._transaction,
            self._io,
            self._branch,
            snapshot_properties=self._snapshot_properties,
        )
        producer.written_schemas = written
        return producer

    @override
    def overwrite(self, commit_uuid: UUID | None = None) -> _OverwriteFiles:
        return _Overwrite(
            Operation.OVERWRITE,
            self._transaction,
            self._io,
            commit_uuid,
            self._snapshot_properties,
            self._branch,
        )


def find_spec(metadata: TableMetadata, written: PartitionSpec) -> PartitionSpec | None:
    """Return the table's spec that files of the spec `written` can have, or None.

    A removed spec leaves its id to the next spec, so the id alone does not identify it. Every file
    can be part of a spec without partitions.
    """
    specs = sorted(metadata.partition_specs, key=lambda spec: spec.spec_id != written.spec_id)
    terms = _list_terms(written)
    same = (spec for spec in specs if _list_terms(spec) == terms)
    return next(same, None) or next((spec for spec in specs if spec.is_unpartitioned()), None)


def assign_spec(metadata: TableMetadata, staged: StagedFiles) -> Iterator[tuple[int, DataFile]]:
    """Yield each file with the id of the table's spec that it gets.

    Raises:
        ValueError: The table has no such spec.
    """
    spec = find_spec(metadata, staged.spec)
    if spec is None:
        raise ValueError(f"the table has no partition spec {staged.spec}")
    for file in staged.files:
        yield spec.spec_id, _remove_partition(file) if spec.is_unpartitioned() else file


class _Append(_MergeAppendFiles):
    written_schemas: Sequence[Schema] = ()
    """The schemas of the added files, for a table whose former schemas were removed."""

    @override
    def new_manifest_writer(self, spec: PartitionSpec) -> ManifestWriter:
        return _open_manifest(self, spec, _choose_schema(self, spec, self.written_schemas))


class _Overwrite(_OverwriteFiles):
    @override
    def new_manifest_writer(self, spec: PartitionSpec) -> ManifestWriter:
        return _open_manifest(self, spec, _choose_schema(self, spec))

    @override
    def _build_manifest_evaluator(self, spec_id: int) -> Callable[[ManifestFile], bool]:
        spec = self.spec(spec_id)
        schema, rows = _choose_schema(self, spec), self.partition_filters[spec_id]
        return manifest_evaluator(spec, schema, rows, self._case_sensitive)


def _choose_schema(
    producer: _SnapshotProducer[Any], spec: PartitionSpec, written: Sequence[Schema] = ()
) -> Schema:
    """Return the current schema, or another one that has all source columns of `spec`.

    The table's newest former schema comes first. If an engine has removed the former schemas, a
    schema of `written` follows, and then one of the manifests of `spec`.
    """
    metadata = producer._transaction.table_metadata  # pyright: ignore[reportPrivateUsage]
    sources = {field.source_id for field in spec.fields}
    former = sorted(metadata.schemas, key=lambda schema: schema.schema_id, reverse=True)
    known = (metadata.schema(), *former, *written)
    schemas = chain(known, _read_manifest_schemas(producer, spec))
    return next((schema for schema in schemas if sources <= schema.field_ids), metadata.schema())


def _read_manifest_schemas(
    producer: _SnapshotProducer[Any], spec: PartitionSpec
) -> Iterator[Schema]:
    """Yield the schema of each manifest of `spec` in the parent snapshot."""
    metadata, io = producer._transaction.table_metadata, producer._io  # pyright: ignore[reportPrivateUsage]
    parent_id = producer._parent_snapshot_id  # pyright: ignore[reportPrivateUsage]
    parent = None if parent_id is None else metadata.snapshot_by_id(parent_id)
    for manifest in parent.manifests(io) if parent else ():
        if manifest.partition_spec_id == spec.spec_id:
            with AvroFile[Any](io.new_input(manifest.manifest_path)) as file:
                yield Schema.model_validate_json(file.header.meta["schema"])


def _open_manifest(
    producer: _SnapshotProducer[Any], spec: PartitionSpec, schema: Schema
) -> ManifestWriter:
    return write_manifest(
        format_version=producer._transaction.table_metadata.format_version,  # pyright: ignore[reportPrivateUsage]
        spec=spec,
        schema=schema,
        output_file=producer.new_manifest_output(),
        snapshot_id=producer.snapshot_id,
        avro_compression=producer._compression,  # pyright: ignore[reportPrivateUsage]
    )


def _remove_partition(file: DataFile) -> DataFile:
    values = [file[index] for index in range(len(file))]
    values[values.index(file.partition)] = Record()
    return DataFile(*values)


def _list_terms(spec: PartitionSpec) -> Sequence[tuple[int, str]]:
    return [(field.source_id, str(cast("Any", field).transform)) for field in spec.fields]
