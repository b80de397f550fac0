"""The writer of one subtask: it writes rows into hidden files as they arrive.

    write        rows → row groups of files in _onceflow/<sink>/open
    pre_commit   files ended and made durable → their manifest in _onceflow/<sink>/staged

Before the manifest exists, a crash leaves files that no manifest names; the next attempt's `open`
deletes them.
"""

from __future__ import annotations

import io
from collections import OrderedDict
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import IO, Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from typing_extensions import override

from onceflow.core.arrow.required_parts import find_incomplete_rows
from onceflow.core.crash_points import reach
from onceflow.core.errors import (
    BadRow,
    ConfigError,
    OnceflowError,
    PreCommitFailed,
    SettingsRefused,
    SinkError,
)
from onceflow.core.protocol.committables import Committable
from onceflow.core.protocol.ids import CheckpointId, TransactionId
from onceflow.core.spi import RejectedRows, SinkWriter, WriterContext
from onceflow.core.spi.bad_rows import BadRows
from onceflow.core.storage.filesystems.file_location import FileLocation
from onceflow.core.storage.filesystems.filesystem import StorageRefused, StreamedFiles
from onceflow.sinks.files.formats import FileEncoder, FileFormat
from onceflow.sinks.files.layout import SinkPaths, draw_writer_token
from onceflow.sinks.files.partitions import Partitions
from onceflow.sinks.files.publication import (
    ManifestFile,
    TransactionManifest,
    open_files,
    publication,
)


@dataclass(frozen=True, slots=True)
class FileSettings:
    """The settings of one directory of files and of their writers."""

    location: FileLocation
    form: FileFormat
    partition_by: tuple[str, ...]
    max_rows_per_file: int | None
    roll_bytes: int
    max_open_files: int


ROW_GROUP_ROWS = 1_000_000
ROW_GROUP_BYTES = 64 * 1024 * 1024
"""The size of rows in memory that are encoded at once. A reader must decode as many at once."""


class _Outlet(io.RawIOBase):
    """The output of an encoder: the file, or nothing once the file is dropped.

    An abandoned encoder still writes its end, at the latest when it is garbage-collected.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self.file: IO[bytes] | None = file

    @override
    def writable(self) -> bool:
        return True

    @override
    def write(self, data: Any) -> int:
        if self.file is None:
            return len(data)
        return self.file.write(data)

    @override
    def tell(self) -> int:
        return 0 if self.file is None else self.file.tell()


class PartFile:
    """A file that buffers rows up to a row group, then encodes and writes them.

    Used by one thread.
    """

    def __init__(
        self, fs: StreamedFiles, path: str, directory: str, schema: pa.Schema, form: FileFormat
    ) -> None:
        """Create the file.

        Raises:
            StorageError: The file cannot be created now.
        """
        self.path = path
        self.directory = directory
        self.rows = 0
        self.size_bytes = 0
        """The number of bytes written; the file's size once it is finished."""
        self.buffered_bytes = 0
        self._fs = fs
        self._schema = schema
        self._buffered: list[pa.RecordBatch] = []
        self._buffered_rows = 0
        self._outlet = _Outlet(fs.create(path))
        try:
            self._encoder: FileEncoder = form.encoder(cast("IO[bytes]", self._outlet), schema)
        except BaseException:
            self.drop()
            raise

    def add(self, rows: pa.RecordBatch) -> None:
        """Buffer `rows`; encode the buffer if it makes a row group."""
        self._buffered.append(rows)
        self._buffered_rows += rows.num_rows
        self.buffered_bytes += rows.nbytes
        self.rows += rows.num_rows
        if self._buffered_rows >= ROW_GROUP_ROWS or self.buffered_bytes >= ROW_GROUP_BYTES:
            self.flush()

    def flush(self) -> None:
        """Encode the buffered rows."""
        if self._buffered:
            with self._fs.explain_failure("write", self.path):
                self._encoder.write(pa.Table.from_batches(self._buffered, schema=self._schema))
            self._buffered.clear()
            self._buffered_rows = 0
            self.buffered_bytes = 0
            self.size_bytes = self._outlet.tell()

    def end(self) -> None:
        """Encode the remaining rows and the format's end; only `finish` may follow."""
        self.flush()
        with self._fs.explain_failure("write", self.path):
            self._encoder.end()

    def finish(self) -> None:
        """Make the written data durable. Any thread; no rows may be added after it."""
        file, self._outlet.file = self._outlet.file, None
        if file is not None:
            try:
                self.size_bytes = self._fs.finish(file, self.path)
            except BaseException:
                self._fs.drop(file, self.path)
                raise

    def drop(self) -> None:
        """Close and delete the file, finished or not. Never raises; may be called twice."""
        file, self._outlet.file = self._outlet.file, None
        if file is not None:
            self._fs.drop(file, self.path)
        else:
            self._fs.delete_quietly(self.path)


PATH_LENGTH_MAX_BYTES = 4095
"""The longest path on the usual systems, without the final NUL. HDFS allows more."""
KEY_LENGTH_MAX_BYTES = 1024
"""The longest object key in S3, Google Cloud Storage and Azure."""
_CHECKPOINT_MAX, _FILES_MAX = 10**9, 10**5
"""Numbers that no job reaches, used to compute the longest name."""

BUFFERED_BYTES_MAX = 128 * 1024 * 1024
"""The memory that one writer uses for all its open files before it encodes the largest buffer."""


class FileWriter(SinkWriter):
    """A writer of rows that no reader sees yet.

    Any failure deletes the files and closes the writer.
    """

    def __init__(self, settings: FileSettings, context: WriterContext) -> None:
        """Create no file yet.

        Raises:
            ConfigError: The rows do not fit the partition columns.
        """
        self._settings = settings
        self._context = context
        self._paths = SinkPaths(context.sink_id)
        self._fs = open_files(settings.location)
        self._publication = publication(self._fs, self._paths)
        self._partitions = Partitions(settings.partition_by, context.schema)
        self._file_schema = pa.schema(
            [context.schema.field(name) for name in self._partitions.file_columns],
            metadata=context.schema.metadata,
        )
        self._token = draw_writer_token()
        self._room_bytes = self._measure_room()
        self._created = 0
        self._open: OrderedDict[str, PartFile] = OrderedDict()
        """The open files by directory, the least recently written first."""
        self._finished: list[PartFile] = []
        self._closed = False
        self._where = f"sink {context.sink_id} subtask {context.subtask}, {settings.location}"
        self._bad_rows = BadRows(context.on_bad_row, context.schema, where=self._where)

    @override
    def write(self, batch: pa.RecordBatch) -> None:
        if batch.num_rows:
            with self._or_close("rows were not written", SinkError):
                for directory, rows in self._partitions.split(self._accept(batch)):
                    self._add(directory, rows)
                self._bound_memory()

    @override
    def pre_commit(self, checkpoint: CheckpointId) -> Sequence[Committable]:
        """Pre-commit in two steps: 1. finish all files, durably, 2. stage their manifest.

        Raises:
            PreCommitFailed: The attempt must end. Nothing of this checkpoint is staged, or it is
                staged under a name that no decision lists, and will be aborted.
        """
        context = self._context
        with self._or_close(f"checkpoint {checkpoint} was not pre-committed", PreCommitFailed):
            # 1.
            self._finish(list(self._open))
            files = self._finished
            if not files:
                return ()
            # One sync for the names of all files, after their contents and before the manifest that
            # refers to them.
            self._fs.make_names_durable(self._paths.open)
            reach("flushed")
            # 2.
            transaction = TransactionId(
                context.sink_id, context.attempt, checkpoint, context.subtask, sequence=0
            )
            self._publication.stage(transaction, self._manifest(transaction, files))
            # From here on the files belong to the committer.
            self._finished = []
            return (Committable(transaction, sum(file.rows for file in files)),)

    @override
    def take_rejected(self) -> Sequence[RejectedRows]:
        return self._bad_rows.take()

    @override
    def close(self) -> None:
        self._closed = True
        files = [*self._open.values(), *self._finished]
        self._open.clear()
        self._finished = []
        for file in files:
            file.drop()

    def _measure_room(self) -> int:
        """Return the maximal bytes of a partition's path, counted below the sink's own path."""
        location, context = self._settings.location, self._context
        # An object store limits the whole key after the bucket's name, and not each name.
        in_bucket = location.publish == "copy"
        own = location.root.partition("/")[2] if in_bucket else location.root
        limit = KEY_LENGTH_MAX_BYTES if in_bucket else PATH_LENGTH_MAX_BYTES
        longest = TransactionId(
            context.sink_id, context.attempt, _CHECKPOINT_MAX, context.subtask, sequence=0
        )
        suffix = self._settings.form.suffix
        name = self._paths.part(longest, _FILES_MAX, self._token, suffix)
        return limit - len(f"{own}//{name}".encode())

    def _manifest(
        self, transaction: TransactionId, files: Sequence[PartFile]
    ) -> TransactionManifest:
        def name(number: int) -> str:
            return self._paths.part(transaction, number, self._token, self._settings.form.suffix)

        return TransactionManifest(
            transaction=str(transaction),
            staged_at=datetime.now(timezone.utc),
            files=tuple(
                ManifestFile(
                    staged=file.path,
                    path="/".join(filter(None, (file.directory, name(number)))),
                    rows=file.rows,
                    size_bytes=file.size_bytes,
                )
                for number, file in enumerate(files)
            ),
        )

    def _add(self, directory: str, rows: pa.RecordBatch) -> None:
        settings = self._settings
        rows_max = settings.max_rows_per_file
        while rows.num_rows:
            file = self._file(directory)
            taken = rows.num_rows
            if rows_max is not None:
                taken = min(taken, rows_max - file.rows)
            file.add(rows.slice(0, taken))
            rows = rows.slice(taken)
            if file.rows == rows_max or file.size_bytes >= settings.roll_bytes:
                self._finish([directory])

    def _file(self, directory: str) -> PartFile:
        file = self._open.get(directory)
        if file is not None:
            self._open.move_to_end(directory)
            return file
        if len(self._open) >= self._settings.max_open_files:
            # Finish the least recently written file, because its partition is the least likely to
            # get more rows.
            self._finish([next(iter(self._open))])
        context = self._context
        path = self._paths.data(context.attempt, context.subtask, self._token, self._created)
        self._created += 1
        file = PartFile(self._fs, path, directory, self._file_schema, self._settings.form)
        self._open[directory] = file
        return file

    def _finish(self, directories: Sequence[str]) -> None:
        """Finish the files of `directories`: encode in turn, make all durable at once."""
        for directory in directories:
            self._open[directory].end()
        self._fs.for_each(lambda directory: self._open[directory].finish(), directories)
        self._finished += [self._open.pop(directory) for directory in directories]

    def _bound_memory(self) -> None:
        buffered = sorted(self._open.values(), key=lambda file: file.buffered_bytes)
        total_bytes = sum(file.buffered_bytes for file in buffered)
        while total_bytes > BUFFERED_BYTES_MAX:
            largest = buffered.pop()
            total_bytes -= largest.buffered_bytes
            # The file stays open. Encoding frees its memory, and makes the largest possible row
            # group.
            largest.flush()

    def _accept(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return the rows that files can hold; keep the others for `take_rejected`, or raise.

        Raises:
            BadRow: There are other rows, and bad rows fail the job.
        """
        refusals = {
            **self._partitions.find_long_directories(batch, self._room_bytes),
            **self._settings.form.refusals(batch),
            **self._partitions.refusals(batch),
            **_missing_values(batch),
        }
        return self._settings.form.prepare(self._bad_rows.without(batch, refusals))

    @contextmanager
    def _or_close(self, doing: str, kind: type[SinkError]) -> Generator[None]:
        if self._closed:
            raise kind(f"{self._where}: {doing}: the writer is closed, or has failed before")
        try:
            yield
        except BadRow:
            self.close()
            raise
        except (OnceflowError, OSError, pa.ArrowException, ValueError, ArithmeticError) as error:
            self.close()
            if isinstance(error, SettingsRefused | StorageRefused):
                raise SettingsRefused(f"{self._where}: {doing}: {error}") from error
            if isinstance(error, ConfigError):
                raise ConfigError(f"{self._where}: {doing}: {error}") from error
            raise kind(f"{self._where}: {doing}: {error}") from error
        except BaseException:
            self.close()
            raise


def _missing_values(batch: pa.RecordBatch) -> dict[int, str]:
    refusals: dict[int, str] = {}
    for field, column in zip(batch.schema, batch.columns, strict=True):
        if not field.nullable and column.null_count:
            for row in pc.indices_nonzero(column.is_null()).to_pylist():
                refusals.setdefault(row, f"column {field.name!r} is null, and may not be")
        for row in np.flatnonzero(find_incomplete_rows(column)).tolist():
            refusals.setdefault(
                row, f"column {field.name!r}: a part of the value is null, and may not be"
            )
    return refusals
