"""`onceflow-files` for `read` and `readStream`: what pipelines and queries have published as files.

A read takes the files that are published whole when it is planned, and never one of a transaction
in progress. A stream's offset is a checkpoint of the job that writes: {"checkpoint": 7}.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.types import StructType

from onceflow.connectors.spark.arrow_rows import arrow_schema, fit, spark_schema
from onceflow.connectors.spark.options.files import FILES_READ, LATEST, FilesRead
from onceflow.connectors.spark.options.words import Speaker, in_option_words
from onceflow.core.errors import ConfigError
from onceflow.core.protocol.ids import CheckpointId
from onceflow.sinks.files.published import PublishedTable


def files_read(options: Mapping[str, str]) -> FilesRead:
    """Return what `options` say, in lower case or not.

    Raises:
        ConfigError: One is unknown, missing or cannot be read.
    """
    source = FILES_READ.make(options)
    sink_id = next((value for name, value in options.items() if name.lower() == "sinkid"), None)
    return replace(source, sink_id=sink_id)


def files_schema(options: Mapping[str, str]) -> StructType:
    """Return the columns of what is published."""
    with FILES_READ.words.translate_errors():
        return spark_schema(files_read(options).table.schema())


class FileTask(InputPartition):
    """One file."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.path = path


class FilesBatchReader(Speaker, DataSourceReader):
    """All that is published whole, or as of a checkpoint."""

    def __init__(self, read: FilesRead, schema: StructType) -> None:
        """Describe it; asks nothing yet."""
        self._read = read
        self._schema = schema

    @in_option_words
    def partitions(self) -> Sequence[InputPartition]:
        """Return a task a file. Driver, once a plan.

        Raises:
            ConfigError: `asOfCheckpoint` is not published by all subtasks.
        """
        table, as_of = self._read.table, self._read.as_of_checkpoint
        if as_of is None:
            files = table.files()
        else:
            through = table.whole_through() if as_of == LATEST else CheckpointId(int(as_of))
            files = table.files_between(CheckpointId(0), through)
        return _tasks(files)

    @in_option_words
    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of one file. Task."""
        return _rows(self._read.table, partition, self._schema)


class FilesStreamReader(Speaker, DataSourceStreamReader):
    """A job's checkpoints, as they are published by all of its subtasks."""

    def __init__(self, read: FilesRead, schema: StructType) -> None:
        """Describe it; asks nothing yet.

        Raises:
            ConfigError: It is to be read as of one checkpoint.
        """
        if read.as_of_checkpoint is not None:
            raise ConfigError("asOfCheckpoint is for read: readStream goes on from its own offset")
        self._table = read.table
        self._schema = schema

    def initialOffset(self) -> dict[str, int]:  # noqa: N802 - Spark's name
        """Return the place before the first checkpoint."""
        return {"checkpoint": 0}

    @in_option_words
    def latestOffset(  # noqa: N802 - Spark's name
        self, start: dict[str, int] | None = None, limit: object = None
    ) -> dict[str, int]:
        """Return the last checkpoint that is certain to be published whole. Driver, each batch."""
        del limit
        known = (start or {}).get("checkpoint", 0)
        return {"checkpoint": max(known, self._table.whole_through())}

    @in_option_words
    def partitions(self, start: dict[str, int], end: dict[str, int]) -> Sequence[InputPartition]:
        """Return a task for each file of the checkpoints after `start`, through `end`. Driver."""
        after, through = (CheckpointId(one["checkpoint"]) for one in (start, end))
        return _tasks(self._table.files_between(after, through))

    @in_option_words
    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of one file. Task."""
        return _rows(self._table, partition, self._schema)

    def commit(self, end: dict[str, int]) -> None:
        """Forget nothing: files belong to their readers."""


def _tasks(files: Sequence[str]) -> Sequence[InputPartition]:
    # Spark takes no source without tasks.
    return [FileTask(path) for path in files] or [FileTask("")]


def _rows(
    table: PublishedTable, partition: InputPartition, schema: StructType
) -> Iterator[pa.RecordBatch]:
    assert isinstance(partition, FileTask)
    if partition.path:
        yield from fit(table.read(partition.path, arrow_schema(schema)), schema)
