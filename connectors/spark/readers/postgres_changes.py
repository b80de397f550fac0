"""The reader of Postgres changes for `readStream`: the slot on the driver, files for executors.

A slot has one reader. Spark keeps one `ChangesStreamReader` in a Python process of the driver as
long as the query runs, and that reader has the connection. For each micro-batch it

    1. reads rows from the slot, or from the first copy
    2. writes them to a file below `changesLocation`, durably
    3. returns the position after these rows and the name of the file, as the end of the batch

Spark logs the end of the batch, runs the batch, and logs its commit. When it has logged the end of
the next batch, it calls `commit`. Only then the slot moves, and the file is deleted. So a batch
that Spark repeats after a crash reads the same file, and rows that are in no logged batch are still
in the slot. A file of a batch that was never logged is deleted with the file that replaces it.

    <changesLocation>/onceflow-postgres-changes/<slot>-<cluster>/<batch>-<random>.arrow

The end of a batch, as Spark stores it:

    {"batch": 7, "rows": 120, "file": "onceflow-postgres-changes/…", "slot": "orders",
     "position": {…}}

`position` is a position of the source (sources/postgres/position.py). `batch` counts the ends that
this format has returned; it is not Spark's number. A batch without rows has no file.

Importing this module needs a Spark with `SparkInterface.READ_LIMITS`.
"""

from __future__ import annotations

import io
import json
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from onceflow.connectors.spark.arrow_rows import fit, spark_schema
from onceflow.connectors.spark.options.postgres_changes import ChangesRead
from onceflow.connectors.spark.options.words import Speaker, in_option_words
from onceflow.core.errors import ConfigError, OffsetOutOfRange, StateIncompatible
from onceflow.core.protocol.ids import AttemptId
from onceflow.core.spi import ReaderContext, Source, Split
from onceflow.core.storage.filesystems.file_location import FileLocation
from onceflow.core.storage.filesystems.local import CHECKPOINT_STORAGE
from onceflow.formats.debezium.changes import OPERATION
from onceflow.sources.postgres.position import SlotPosition
from onceflow.sources.postgres.reader import PostgresReader
from onceflow.sources.postgres.slot import read_present_lsn, wait_until_free

Document: TypeAlias = "dict[str, Any]"
"""A value that Spark stores as JSON."""

_DIRECTORY = "onceflow-postgres-changes"
_COPY_ANEW = (
    "drop the slot and empty the target, and start the query with another checkpointLocation and"
    " firstCopy=all, which copies the table anew"
)
_WAIT_S = 0.1
"""The longest wait for the first row of a micro-batch. Other sources of the query wait, too."""
_GATHERED_S = 0.5
"""The time for which the reader gathers rows after the first one.

A micro-batch costs as much as thousands of rows.
"""
_WAL_MOVED_MIN = 16 * 1024 * 1024
"""The size of a WAL segment, the unit in which a server removes WAL, in bytes."""


@dataclass(frozen=True, slots=True)
class BatchEnd:
    """The end of a micro-batch."""

    batch: int
    rows: int
    file: str
    """The path of the file with the rows, below `changesLocation`; empty without rows."""
    split: Split
    """The position after the rows."""

    @property
    def position(self) -> SlotPosition:
        """The position after the rows."""
        return SlotPosition.from_split(self.split)

    @property
    def directory(self) -> str:
        """The directory of the files of this slot, below `changesLocation`."""
        position = self.position
        return f"{_DIRECTORY}/{position.slot}-{position.system}"

    def to_document(self) -> Document:
        """Return the document that Spark stores."""
        return {
            "batch": self.batch,
            "rows": self.rows,
            "file": self.file,
            "slot": self.split.id,
            "position": json.loads(self.split.position),
        }

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> BatchEnd:
        """Return the end of a batch that `document` describes.

        Raises:
            StateIncompatible: Another format has written the document.
        """
        try:
            position = json.dumps(document["position"], separators=(",", ":")).encode()
            return cls(
                int(document["batch"]),
                int(document["rows"]),
                str(document["file"]),
                Split(str(document["slot"]), position),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise StateIncompatible(
                f"the checkpoint's offsets {str(document)[:200]!r} are not those of"
                " onceflow-postgres-changes: the query read another source before. Give it another"
                " checkpointLocation"
            ) from error


class StagedBatches:
    """The files of batches that are not committed yet. Pickles. Any process may use it."""

    def __init__(self, location: FileLocation) -> None:
        """Store the location. Accesses no file."""
        self._location = location

    def write(self, directory: str, batch: int, rows: Sequence[pa.RecordBatch]) -> str:
        """Write the file of `batch`, durably, and return its path.

        Raises:
            StorageError: The file cannot be written.
        """
        # Another driver, or a driver before a crash, may write a file for the same batch. The
        # random part gives each file a name of its own.
        path = f"{directory}/{batch:012d}-{uuid.uuid4().hex[:12]}.arrow"
        self._location.open(CHECKPOINT_STORAGE).write(path, _encode(rows))
        return path

    def has(self, path: str) -> bool:
        """Return True if the file exists."""
        return self._location.open(CHECKPOINT_STORAGE).size(path) is not None

    def read(self, path: str) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a file.

        Raises:
            OffsetOutOfRange: The file does not exist.
            StorageError: The file cannot be read.
        """
        data = self._location.open(CHECKPOINT_STORAGE).read(path)
        if data is None:
            raise self.missing(path)
        with pa.ipc.open_stream(data) as reader:
            yield from reader

    def delete_through(self, end: BatchEnd) -> None:
        """Delete the files of all batches up to `end`, which is committed.

        Raises:
            StorageError: A file cannot be deleted.
        """
        files = self._location.open(CHECKPOINT_STORAGE)
        for name in files.list(end.directory):
            number = name.partition("-")[0]
            if number.isdecimal() and int(number) <= end.batch:
                files.delete(f"{end.directory}/{name}")

    def missing(self, path: str) -> OffsetOutOfRange:
        """Return the error for a file that does not exist."""
        return OffsetOutOfRange(
            f"the file {path} below changesLocation={self._location} does not exist, and it has the"
            " rows of a micro-batch that is not committed. If changesLocation is another one now,"
            " give the former one; if the file was deleted, restore it. If it is lost,"
            f" {_COPY_ANEW}"
        )


def _encode(rows: Sequence[pa.RecordBatch]) -> Iterator[bytes]:
    """Yield the bytes of an Arrow stream of `rows`, a batch at a time."""
    buffer = io.BytesIO()
    with pa.ipc.new_stream(buffer, rows[0].schema) as writer:
        for batch in rows:
            writer.write_batch(batch)
            yield buffer.getvalue()
            buffer.seek(0)
            buffer.truncate()
    yield buffer.getvalue()


class ChangesTask(InputPartition):
    """A task that reads one file, or nothing."""

    def __init__(self, file: str) -> None:
        super().__init__(None)
        self.file = file


class ChangesStreamReader(Speaker, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """A reader of one table for a Spark query. It pickles without the database."""

    def __init__(self, read: ChangesRead, schema: StructType) -> None:
        """Store the arguments. Connects to nothing.

        Raises:
            ConfigError: `changesLocation` is not a path or a supported URL.
        """
        self._source = read
        self._staged = StagedBatches(read.location)
        self._schema = schema
        self._initial: BatchEnd | None = None
        self._reader: PostgresReader | None = None
        self._at: BatchEnd | None = None
        """The last end that was returned. The reader has read everything before it."""
        self._at_s = 0.0
        """The time at which `_at` was returned."""
        self._committed = -1
        """The number of the last batch that is known to be committed."""
        self._ends_now = False
        """True with Trigger.AvailableNow."""
        self._target: int | None = None
        """The LSN at which Trigger.AvailableNow ends; None while the table is copied."""

    def __getstate__(self) -> dict[str, Any]:
        # A task reads files, and needs neither the address of the database nor its password.
        return {"staged": self._staged, "schema": self._schema, "words": self.words}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._staged, self._schema = state["staged"], state["schema"]
        self.words = state["words"]

    @in_option_words
    def initialOffset(self) -> Document:  # noqa: N802 - Spark's name
        """Create publication and slot if there are none, and return the slot's position.

        Spark asks for it until the first batch is committed. The slot does not move until then, so
        each process returns the same position.

        Raises:
            ConfigError: The table, the publication or the slot cannot be used.
            SourceUnavailable: The server does not answer.
        """
        if self._initial is None:
            source = self._source
            source.validate()
            wait_until_free(source.endpoint, source.slot_name, source.connect_timeout_s)
            (split,) = source.splits()
            self._initial = BatchEnd(0, 0, "", split)
        return self._initial.to_document()

    @in_option_words
    def latestOffset(self, start: Document, limit: object = None) -> Document:  # noqa: N802
        """Stage the rows after `start`, and return their end; or return `start` if there are none.

        A crash leaves a file that no batch of Spark names. The rows are then read again.

        Raises:
            BadRecord: A change cannot be passed on exactly, or a table's columns were changed.
            ConfigError: The server refuses the user or an option.
            OffsetOutOfRange: The slot no longer has the changes after `start`.
            SourceUnavailable: The server did not answer, or another reader uses the slot.
            StorageError: The file cannot be written.
        """
        del limit
        at = BatchEnd.from_document(start)
        reader = self._open_reader(at)
        batches = self._gather(reader, at)
        (split,) = reader.snapshot()
        rows = sum(batch.num_rows for batch in batches)
        if not batches and not self._needs_empty_batch(at, SlotPosition.from_split(split)):
            # Spark compares texts, so return the document that it has.
            return start
        number = at.batch + 1
        file = self._staged.write(at.directory, number, batches) if batches else ""
        self._at, self._at_s = BatchEnd(number, rows, file, split), time.monotonic()
        return self._at.to_document()

    @in_option_words
    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        """Make Trigger.AvailableNow end after the transactions that the server has now."""
        self._ends_now = True
        self._target = read_present_lsn(self._source.endpoint)

    @in_option_words
    def partitions(self, start: Document, end: Document) -> Sequence[InputPartition]:
        """Return the task that reads the file of the batch from `start` to `end`.

        One task, because changes of a row must stay in their order.

        Raises:
            OffsetOutOfRange: The file does not exist any more.
            StateIncompatible: `end` does not follow `start`.
        """
        first, last = BatchEnd.from_document(start), BatchEnd.from_document(end)
        if first == last:
            # Spark runs the first batch of a query even if there is no row yet.
            return [ChangesTask("")]
        if last.batch != first.batch + 1:
            raise StateIncompatible(
                f"the micro-batch from {first.batch} to {last.batch} of slot {last.split.id} is not"
                " one that was read: files of the checkpoint were deleted or exchanged. Restore"
                f" them. If they are lost, {_COPY_ANEW}"
            )
        if last.file and not self._staged.has(last.file):
            raise self._staged.missing(last.file)
        return [ChangesTask(last.file)]

    @in_option_words
    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of one task. Runs on an executor.

        Raises:
            ConfigError: The query has other columns than the file.
            OffsetOutOfRange: The file does not exist any more.
        """
        assert isinstance(partition, ChangesTask)
        if not partition.file:
            return iter(())
        return fit(self._check_columns(self._staged.read(partition.file)), self._schema)

    @in_option_words
    def commit(self, end: Document) -> None:
        """Let the slot move to `end`, and delete the files up to it. The sink has these rows.

        Spark calls this when it has logged the end of the next batch.
        """
        done = BatchEnd.from_document(end)
        self._committed = done.batch
        if self._reader is not None:
            self._reader.commit([done.split])
        self._staged.delete_through(done)

    def stop(self) -> None:
        """Close the connections. The slot stays. A second call does nothing."""
        reader, self._reader, self._at = self._reader, None, None
        if reader is not None:
            reader.close()

    def _open_reader(self, at: BatchEnd) -> PostgresReader:
        """Return a reader that continues after `at`: the open one if it is there, or a new one.

        Raises:
            ConfigError: The query's DataFrame has other columns than the source now reads.
        """
        if self._reader is not None and self._at == at:
            return self._reader
        self.stop()
        splits = self._source.discover([at.split])
        self._require_same_columns()
        context = ReaderContext("spark", self._source.slot_name, 0, 1, AttemptId(1))
        self._reader = self._source.reader(splits, context)
        self._at, self._at_s = at, time.monotonic()
        return self._reader

    def _require_same_columns(self) -> None:
        """Raise ConfigError if the query has more or fewer columns than the source."""
        source: Source = self._source
        read, expected = source.schema.names, self._schema.fieldNames()
        state = "is read, and the query's DataFrame does not have it"
        other = [name for name in read if name not in expected]
        if not other:
            state = "of the query's DataFrame is not read"
            other = [name for name in expected if name not in read]
        if other:
            raise ConfigError(
                f"table {self._source.table}: column {other[0]!r} {state}. If the table's columns"
                " were changed after the DataFrame was made, make it by load() again, and start"
                " the query from the new one. To read some of the columns, name them by option"
                " schema, and not by .schema(…)"
            )

    def _gather(self, reader: PostgresReader, at: BatchEnd) -> list[pa.RecordBatch]:
        """Return the rows of the next batch.

        With Trigger.AvailableNow, wait for rows until the end is reached.
        """
        batches: list[pa.RecordBatch] = []
        rows, deadline = 0, float("inf")
        while rows < self._source.trigger_rows_max and time.monotonic() < deadline:
            (split,) = reader.snapshot()
            position = SlotPosition.from_split(split)
            if self._has_reached_target(position):
                break
            polled = reader.poll(_WAIT_S)
            if isinstance(polled, pa.RecordBatch):
                deadline = min(deadline, time.monotonic() + _GATHERED_S)
                batches.append(polled)
                rows += polled.num_rows
            elif batches or not self._ends_now or self._needs_empty_batch(at, position):
                break
        return batches

    def _has_reached_target(self, position: SlotPosition) -> bool:
        if not self._ends_now:
            return False
        if position.is_copying:
            self._target = None
            return False
        if self._target is None:
            # Changes during the copy are part of the table that the copy is to equal.
            self._target = read_present_lsn(self._source.endpoint)
        return position.cut is None and position.lsn >= self._target

    def _needs_empty_batch(self, at: BatchEnd, position: SlotPosition) -> bool:
        """Return True if a batch without rows is due, so that the slot moves.

        Spark commits a batch after it has logged the next one. Without a next one the server would
        keep its WAL, and a change of the table's columns would wait for ever for the batch before.
        """
        if at.position.is_copying and not position.is_copying:
            # Otherwise the next start would continue the copy, with rows that are added until then.
            return True
        has_moved = position.lsn - at.position.lsn >= _WAL_MOVED_MIN
        if self._has_reached_target(position):
            return has_moved
        is_uncommitted = at.rows > 0 and self._committed < at.batch
        if self._reader is not None and self._reader.waits_for_decision:
            # The error about the changed columns comes when all batches before it are committed.
            return True
        is_idle = time.monotonic() - self._at_s >= self._source.status_interval
        return is_idle and (has_moved or is_uncommitted)

    def _check_columns(self, rows: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield `rows`. Raise ConfigError if a column of the query is not among theirs."""
        for batch in rows:
            present = batch.schema.names
            if missing := [name for name in self._schema.fieldNames() if name not in present]:
                raise ConfigError(
                    f"column {missing[0]!r} is not in this micro-batch, which was read without it."
                    " Start the query once with trigger(availableNow=True) and the options"
                    f" {_describe_options(batch.schema)}. It commits the micro-batch, and may then"
                    " end with an error about the column. In both cases start it next with the"
                    " options and the trigger of this start"
                )
            yield batch


def _describe_options(rows: pa.Schema) -> str:
    """Return the options that read exactly the columns of `rows`."""
    # The table's columns come first, then the operation, then the metadata.
    names = rows.names
    own = spark_schema(pa.schema(list(rows)[: names.index(OPERATION)]))
    columns = [f"`{c.name.replace('`', '``')}` {c.dataType.simpleString()}" for c in own.fields]
    metadata = ",".join(names[names.index(OPERATION) + 1 :])
    last = f'metadata="{metadata}"' if metadata else "without option metadata"
    return f'schema="{", ".join(columns)}" and onSchemaChange="stop", {last}'
