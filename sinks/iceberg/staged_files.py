"""Data files that a writer has ended, as one row of staged rows, and back.

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
from functools import lru_cache
from typing import Literal, cast

import pyarrow as pa
from pyiceberg.avro.decoder import new_decoder
from pyiceberg.avro.file import AvroFile
from pyiceberg.avro.reader import Reader
from pyiceberg.avro.resolver import resolve_reader
from pyiceberg.io import InputFile, InputStream, OutputFile, OutputStream
from pyiceberg.manifest import (
    MANIFEST_ENTRY_SCHEMAS,
    DataFile,
    DataFileContent,
    FileFormat,
    ManifestEntry,
    ManifestEntryStatus,
    write_manifest,
)
from pyiceberg.table import Table
from pyiceberg.utils.schema_conversion import AvroSchemaConversion
from typing_extensions import Self, override

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


@dataclass(frozen=True, slots=True)
class StagedFiles:
    """What one writer has written for one checkpoint."""

    table_uuid: str
    spec_id: int
    sequence_last: int
    files: Sequence[DataFile]


def encode_files(table: Table, files: Sequence[DataFile]) -> pa.RecordBatch:
    """Return the row that describes `files`, which were written for `table`."""
    output = _MemoryFile(b"")
    with write_manifest(
        format_version=_FORMAT_VERSION,
        spec=table.spec(),
        schema=table.schema(),
        output_file=output,
        snapshot_id=_NO_SNAPSHOT,
        # It lies in a staged file, which is compressed as a whole.
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
        # As of when the writer began: an abort then has to read only what was committed later.
        "sequence_last": table.last_sequence_number,
        "manifest": output.content,
    }
    return pa.RecordBatch.from_pylist([row], schema=_SCHEMA)


def decode_files(staged: pa.RecordBatch) -> StagedFiles:
    """Return what `staged` describes."""
    (row,) = staged.to_pylist()
    with _StagedManifest(_MemoryFile(row["manifest"])) as entries:
        files = [entry.data_file for entry in entries]
    for file in files:
        file.spec_id = row["spec_id"]
    return StagedFiles(row["table_uuid"], row["spec_id"], row["sequence_last"], files)


class _StagedManifest(AvroFile[ManifestEntry]):
    """A manifest whose schema is parsed once for all subtasks and checkpoints, not for each."""

    @override
    def __enter__(self) -> Self:
        with self.input_file.open() as stream:
            self.decoder = new_decoder(stream.read())
        self.header = self._read_header()
        self.reader = _make_reader(self.header.meta["avro.schema"])
        return self


@lru_cache(maxsize=16)
def _make_reader(avro_schema: str) -> Reader:
    """Return what reads entries of a manifest; it keeps nothing of what it has read."""
    return resolve_reader(
        AvroSchemaConversion().avro_to_iceberg(json.loads(avro_schema)),
        MANIFEST_ENTRY_SCHEMAS[_FORMAT_VERSION],
        read_types={-1: ManifestEntry, 2: DataFile},
        read_enums={0: ManifestEntryStatus, 101: FileFormat, 134: DataFileContent},
    )


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
