"""The encoding of a writer's ended data files as one staged row, and the decoding.

    table_uuid      string   the table that they were written for
    spec_id         int32    its partition spec
    sequence_last   int64    the table's last sequence number when the writer began
    manifest        binary   a manifest of Iceberg's own (Avro): paths, partitions, metrics

No version of the table up to `sequence_last` can have the files.
"""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import pyarrow as pa
from pyiceberg.avro.file import AvroFile
from pyiceberg.io import FileIO, InputFile, InputStream, OutputFile, OutputStream
from pyiceberg.manifest import (
    DataFile,
    ManifestContent,
    ManifestEntry,
    ManifestEntryStatus,
    ManifestFile,
    write_manifest,
)
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table import Table
from typing_extensions import override

_SCHEMA = pa.schema(
    [
        pa.field("table_uuid", pa.string()),
        pa.field("spec_id", pa.int32()),
        pa.field("sequence_last", pa.int64()),
        pa.field("manifest", pa.binary()),
    ]
)
_NO_SNAPSHOT = 0
_FORMAT_VERSION: Literal[2] = 2
_PATH = "memory:manifest"
_SYNC = bytes(16)
"""The sync marker of manifests that are read as a single manifest."""


@dataclass(frozen=True, slots=True)
class StagedFiles:
    """The files that writers have written for one table and spec."""

    table_uuid: str
    spec: PartitionSpec
    """The spec as it was when the writer began."""
    sequence_last: int
    files: Sequence[DataFile]
    schema: Schema
    """The table's schema when the writer began."""


def encode_files(table: Table, files: Sequence[DataFile]) -> pa.RecordBatch:
    """Return the row that describes `files`, which were written for `table`."""
    output = _MemoryFile(b"")
    with write_manifest(
        format_version=_FORMAT_VERSION,
        spec=table.spec(),
        schema=table.schema(),
        output_file=output,
        snapshot_id=_NO_SNAPSHOT,
        # The staged file is compressed as a whole.
        avro_compression="null",
    ) as writer:
        for file in files:
            entry = ManifestEntry.from_args(
                status=ManifestEntryStatus.ADDED, snapshot_id=_NO_SNAPSHOT, data_file=file
            )
            writer.add(entry)
    row: dict[str, object] = {
        "table_uuid": str(table.metadata.table_uuid),
        "spec_id": table.metadata.default_spec_id,
        # The number at the writer's start: an abort then reads only later commits.
        "sequence_last": table.last_sequence_number,
        "manifest": output.content,
    }
    return pa.RecordBatch.from_pylist([row], schema=_SCHEMA)


def decode_files(staged: Sequence[pa.RecordBatch]) -> list[StagedFiles]:
    """Return the files that all of `staged` describe, grouped by table and spec.

    For the library, reading the schema in the head of a manifest takes longer than reading the
    files. So manifests with the same head are read as a single manifest.
    """
    alike: dict[tuple[str, int, bytes], list[tuple[int, bytes]]] = {}
    for batch in staged:
        for row in batch.to_pylist():
            head, blocks = _split_manifest(row["manifest"])
            key = row["table_uuid"], row["spec_id"], head
            alike.setdefault(key, []).append((row["sequence_last"], blocks))
    decoded: list[StagedFiles] = []
    for (table_uuid, spec_id, head), parts in alike.items():
        content = b"".join((head, _SYNC, *(blocks for _, blocks in parts)))
        sequence_last = min(sequence_last for sequence_last, _ in parts)
        spec, schema = _decode_head(head, spec_id)
        files = _decode_manifest(spec_id, content)
        decoded.append(StagedFiles(table_uuid, spec, sequence_last, files, schema))
    return decoded


def _split_manifest(manifest: bytes) -> tuple[bytes, bytes]:
    """Return the bytes before the first sync marker, and the blocks after it marked by `_SYNC`.

    A manifest has at least one block, so it ends with its sync marker: 16 random bytes, which do
    not occur in data by chance.

    Source: Avro specification, Object Container Files.
    """
    sync = manifest[-len(_SYNC) :]
    head, _, blocks = manifest.partition(sync)
    return head, blocks.replace(sync, _SYNC)


def _decode_manifest(spec_id: int, content: bytes) -> list[DataFile]:
    manifest = ManifestFile.from_args(
        manifest_path=_PATH,
        manifest_length=len(content),
        partition_spec_id=spec_id,
        content=ManifestContent.DATA,
        sequence_number=0,
        min_sequence_number=0,
        added_snapshot_id=_NO_SNAPSHOT,
    )
    return [entry.data_file for entry in manifest.fetch_manifest_entry(_MemoryIO(content))]


def _decode_head(head: bytes, spec_id: int) -> tuple[PartitionSpec, Schema]:
    """Return the spec and schema that Iceberg requires in the head of a manifest."""
    with AvroFile[Any](_MemoryFile(head + _SYNC)) as manifest:
        meta = manifest.header.meta
    fields = [PartitionField(**field) for field in json.loads(meta["partition-spec"])]
    return PartitionSpec(*fields, spec_id=spec_id), Schema.model_validate_json(meta["schema"])


class _MemoryFile(InputFile, OutputFile):
    def __init__(self, content: bytes) -> None:
        super().__init__(_PATH)
        self.content = content

    @override
    def __len__(self) -> int:
        return len(self.content)

    @override
    def exists(self) -> bool:
        return True

    @override
    def open(self, seekable: bool = True) -> InputStream:
        return cast("InputStream", io.BytesIO(self.content))

    @override
    def create(self, overwrite: bool = False) -> OutputStream:
        return cast("OutputStream", _MemoryStream(self))

    @override
    def to_input_file(self) -> InputFile:
        return self


class _MemoryStream(io.BytesIO):
    def __init__(self, file: _MemoryFile) -> None:
        super().__init__()
        self._file = file

    @override
    def close(self) -> None:
        if not self.closed:
            self._file.content = self.getvalue()
        super().close()


class _MemoryIO(FileIO):
    def __init__(self, content: bytes) -> None:
        super().__init__()
        self._content = content

    @override
    def new_input(self, location: str) -> InputFile:
        return _MemoryFile(self._content)

    @override
    def new_output(self, location: str) -> OutputFile:
        raise NotImplementedError

    @override
    def delete(self, location: str | InputFile | OutputFile) -> None:
        raise NotImplementedError
