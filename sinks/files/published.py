"""The checkpoints, columns and rows of published files, read as a table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq

from onceflow.core.arrow.kinds import cast_rows
from onceflow.core.decoding import json_decoder
from onceflow.core.errors import ConfigError, SinkError
from onceflow.core.protocol.ids import CheckpointId
from onceflow.core.storage.filesystems.file_location import FileLocation, Publish
from onceflow.core.storage.filesystems.filesystem import StreamedFiles
from onceflow.core.storage.filesystems.local import LocalFileSystem
from onceflow.sinks.files import publication
from onceflow.sinks.files.layout import HIDDEN, Owner
from onceflow.sinks.files.partitions import NULL_DIRECTORY

_PARQUET = ".parquet"
_BATCH_ROWS = 50_000


@dataclass(frozen=True)
class PublishedTable:
    """The Parquet files that sinks have published below `url`. Pickles with its storage options."""

    url: str
    sink_id: str | None = None
    """The sink whose files are read; None for the files of all sinks that have written there."""
    storage_options: Mapping[str, Any] = field(default_factory=dict[str, Any], repr=False)
    publish: Publish = "auto"

    def sinks(self) -> tuple[str, ...]:
        """Return the ids of the sinks that have written there.

        Raises:
            ConfigError: No sink has written there, or not the requested one.
        """
        fs = self._open()
        with publication.sink_errors():
            names = fs.list(HIDDEN)
            owners = [fs.read(f"{HIDDEN}/{name}/owner.json") for name in names]
        files = tuple(
            sorted(json_decoder(Owner).decode(owner).sink_id for owner in owners if owner)
        )
        if not files:
            raise ConfigError(f"no sink of onceflow has written to {fs.location('')}")
        if self.sink_id is None:
            return files
        if self.sink_id not in files:
            raise ConfigError(
                f"sink {self.sink_id!r} has not written to {fs.location('')}; {', '.join(files)}"
                " have"
            )
        return (self.sink_id,)

    def files(self) -> list[str]:
        """Return the files of all wholly published transactions at this moment."""
        return [path for sink_id in self.sinks() for path in self._list_files(sink_id).paths()]

    def files_between(self, after: CheckpointId, through: CheckpointId) -> list[str]:
        """Return the files of checkpoints after `after`, up to and including `through`.

        Raises:
            ConfigError: Several sinks have written there, or it is not certain that every subtask
                has published `through`.
        """
        listed = self._list_files(self._only_sink())
        whole_through = listed.whole_before - 1
        if through > whole_through:
            raise ConfigError(
                f"checkpoint {through} of {self._only_sink()!r}: all subtasks are known to have"
                f" published only up to checkpoint {max(whole_through, 0)}. Read that checkpoint"
                " or an older one, or wait for the job's next checkpoints"
            )
        return [
            path
            for transaction, path in listed.of_transactions
            if after < transaction.checkpoint <= through
        ]

    def whole_through(self) -> CheckpointId:
        """Return the last checkpoint that all subtasks have certainly published.

        0 if there is none.
        """
        return CheckpointId(max(0, self._list_files(self._only_sink()).whole_before - 1))

    def schema(self) -> pa.Schema:
        """Return the columns of the newest file, and its partition columns as text.

        Raises:
            ConfigError: No file is published yet.
        """
        files = self.files()
        if not files:
            raise ConfigError(
                f"nothing is published in {self._open().location('')} yet, so its columns are not"
                " known: give them, as in spark.read.schema('id BIGINT, …')"
            )
        read = self._parquet(files[-1]).schema_arrow
        return pa.schema([*read, *(pa.field(name, pa.string()) for name in _values(files[-1]))])

    def read(self, path: str, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """Yield the rows of one file with the columns of `schema`; missing columns are null.

        Raises:
            SinkError: The file is gone: a reader has moved or deleted it.
        """
        values = _values(path)
        file = self._parquet(path)
        there = set(file.schema_arrow.names)
        inside = [name for name in schema.names if name in there and name not in values]
        for batch in file.iter_batches(_BATCH_ROWS, columns=inside):
            columns: list[pa.Array] = []
            for column in schema:
                if column.name in inside:
                    columns.append(batch.column(column.name))
                else:
                    text = pa.scalar(values.get(column.name), pa.string())
                    columns.append(cast_rows(pa.repeat(text, batch.num_rows), column.type))
            yield pa.RecordBatch.from_arrays(columns, names=schema.names)

    def _open(self) -> StreamedFiles:
        return publication.open_files(
            FileLocation.parse(self.url, publish=self.publish, options=self.storage_options)
        )

    def _only_sink(self) -> str:
        sinks = self.sinks()
        if len(sinks) > 1:
            raise ConfigError(
                f"{', '.join(sinks)} have written to {self._open().location('')}, each with its"
                " own checkpoints: choose one with the option sinkId"
            )
        return next(iter(sinks))

    def _list_files(self, sink_id: str) -> publication.PublishedFiles:
        return publication.list_committed_files(
            self.url, sink_id, storage_options=self.storage_options, publish=self.publish
        )

    def _parquet(self, path: str) -> pq.ParquetFile:
        fs = self._open()
        where = fs.location(path)
        if not path.endswith(_PARQUET):
            raise ConfigError(
                f"{where} is not a Parquet file, and this reads Parquet only. For JSON use"
                " spark.read.json([f'{url}/{name}' for name in names]), with the names that"
                " onceflow.sinks.list_committed_files(url, sink_id).paths() returns"
            )
        if isinstance(fs, LocalFileSystem):
            try:
                return pq.ParquetFile(where, memory_map=True)
            except FileNotFoundError as error:
                raise SinkError(_describe_deleted(where)) from error
        with publication.sink_errors():
            chunks = fs.read_chunks(path)
            if chunks is None:
                raise SinkError(_describe_deleted(where))
            return pq.ParquetFile(pa.BufferReader(b"".join(chunks)))


def _describe_deleted(where: str) -> str:
    return f"{where} was published and is gone: files are not deleted while they are read"


def _values(path: str) -> dict[str, str | None]:
    """Return the partition columns and their values from the directories of `path`."""
    parts: Sequence[str] = path.split("/")[:-1]
    named = [part.partition("=") for part in parts if "=" in part]
    return {
        unquote(name): None if value == NULL_DIRECTORY else unquote(value)
        for name, _, value in named
    }
