"""The format `onceflow-files` for `read` and `readStream`: the published files of sinks.

A read takes the files that are completely published when it is planned, and never a file of an
unfinished transaction. The offset of a stream is a checkpoint of the writing job: {"checkpoint":
7}.
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
    """Return the read that `options` describe, whatever their case.

    Raises:
        ConfigError: An option is unknown, missing or not valid.
    """
    source = FILES_READ.make(options)
    sink_id = next((value for name, value in options.items() if name.lower() == "sinkid"), None)
    return replace(source, sink_id=sink_id)


def files_schema(options: Mapping[str, str]) -> StructType:
    """Return the columns of the published files."""
    with FILES_READ.words.translate_errors():
        return spark_schema(files_read(options).table.schema())


class FileTask(InputPartition):
    """A task that reads one file."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.path = path


class FilesBatchReader(Speaker, DataSourceReader):
    """A reader of all completely published files, or of those up to a checkpoint."""

    def __init__(self, read: FilesRead, schema: StructType) -> None:
        """Store the read. Sends no request yet."""
        self._read = read
        self._schema = schema

    @in_option_words
    def partitions(self) -> Sequence[InputPartition]:
        """Return one task for each file. Runs on the driver, once for each plan.

        Raises:
            ConfigError: Not all subtasks have published `asOfCheckpoint`.
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
        """Yield the rows of one file. Runs in a task."""
        return _rows(self._read.table, partition, self._schema)


class FilesStreamReader(Speaker, DataSourceStreamReader):
    """A stream reader of a job's checkpoints, as all of its subtasks publish them."""

    def __init__(self, read: FilesRead, schema: StructType) -> None:
        """Store the read. Sends no request yet.

        Raises:
            ConfigError: `asOfCheckpoint` is given, which is only for `read`.
        """
        if read.as_of_checkpoint is not None:
            raise ConfigError("asOfCheckpoint is for `read`: a stream continues at its own offset")
        self._table = read.table
        self._schema = schema

    def initialOffset(self) -> dict[str, int]:  # noqa: N802 - Spark's name
        """Return the position before the first checkpoint."""
        return {"checkpoint": 0}

    @in_option_words
    def latestOffset(  # noqa: N802 - Spark's name
        self, start: dict[str, int] | None = None, limit: object = None
    ) -> dict[str, int]:
        """Return the last checkpoint that is certainly complete.

        Runs on the driver, for each batch.
        """
        del limit
        known = (start or {}).get("checkpoint", 0)
        return {"checkpoint": max(known, self._table.whole_through())}

    @in_option_words
    def partitions(self, start: dict[str, int], end: dict[str, int]) -> Sequence[InputPartition]:
        """Return a task for each file of the checkpoints after `start`, up to `end`.

        Runs on the driver.
        """
        after, through = (CheckpointId(offset["checkpoint"]) for offset in (start, end))
        return _tasks(self._table.files_between(after, through))

    @in_option_words
    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of one file. Runs in a task."""
        return _rows(self._table, partition, self._schema)

    def commit(self, end: dict[str, int]) -> None:
        """Do nothing: this reader has nothing to delete, and the files stay."""


def _tasks(files: Sequence[str]) -> Sequence[InputPartition]:
    # Spark accepts no source without tasks.
    return [FileTask(path) for path in files] or [FileTask("")]


def _rows(
    table: PublishedTable, partition: InputPartition, schema: StructType
) -> Iterator[pa.RecordBatch]:
    assert isinstance(partition, FileTask)
    if partition.path:
        yield from fit(table.read(partition.path, arrow_schema(schema)), schema)
