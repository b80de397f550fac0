"""A bounded Spark DataFrame as a replayable source: evaluated once, then read from files.

    <checkpoint storage>/<job>/inputs/<uid>/<token>/part-….parquet     as Spark has written them

The first attempt of a job that reads the DataFrame writes these files. The decision log records the
list of files before the first row is read. Every later attempt, in any process, reads the files. It
does not evaluate the DataFrame again, because the rows could differ or come in another order. The
job deletes the files when all of their rows are committed and the job has finished.

A split is a run of row groups of one file. Its position, as UTF-8 JSON:

    {"file":"<token>/part-….parquet","size":1234,"group":3,"row":20000,"stop":8,"schema":"9f…"}

`row` rows of row group `group` have been read; `stop` is the row group after the split's last one.
A split that has been read to its end is no longer part of the checkpoint.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
from typing_extensions import TypeIs, override

from onceflow.core import errors
from onceflow.core.arrow.kinds import cast_batch
from onceflow.core.arrow.schema_text import schema_of
from onceflow.core.decoding import json_decoder
from onceflow.core.plan.dataframe_times import check_session_times, refuse_beyond_int96
from onceflow.core.spi import EndOfInput, ReaderContext, Source, SourceReader, Split
from onceflow.core.storage import CheckpointStorage, FileSystemStorage
from onceflow.core.storage.staging.staged_rows import InputFiles

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_log = logging.getLogger("onceflow.dataframes")

ROW_GROUP_BYTES = 8 * 1024 * 1024
"""The approximate memory that one subtask needs for a file. Spark counts bytes before
compression."""
SPLIT_BYTES = 32 * 1024 * 1024
"""The size of a split. It is small enough to divide a DataFrame of few partitions among
subtasks."""
BATCH_ROWS = 10_000
"""The number of rows in one batch that the source emits."""


def is_dataframe(value: object) -> TypeIs[DataFrame]:
    """Return True if `value` is a Spark DataFrame. Does not import pyspark."""
    sql = sys.modules.get("pyspark.sql")
    return sql is not None and isinstance(value, sql.DataFrame)


def schema_of_dataframe(dataframe: DataFrame, what: str) -> pa.Schema:
    """Return the Arrow schema of a bounded DataFrame. `what` names the caller in errors.

    Raises:
        ConfigError: The DataFrame is a stream, or a column has a type that Arrow batches do not
            support.
    """
    if dataframe.isStreaming:
        raise errors.ConfigError(
            f"{what}: the DataFrame is a stream, which has no end and no positions that a restart"
            " could go back to; read its source with onceflow (pipeline.read(KafkaSource(…))), or"
            " write the stream with Structured Streaming"
        )
    return schema_of(dataframe.schema, setting=what)


class _Position(msgspec.Struct, frozen=True, kw_only=True):
    file: str
    size: int
    group: int
    row: int
    stop: int
    schema: str

    @classmethod
    def of(cls, split: Split) -> _Position:
        try:
            return json_decoder(cls).decode(split.position)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise errors.StateIncompatible(
                f"split {split.id!r} of the checkpoint holds {split.position[:80]!r}, which does"
                " not read as a position in a DataFrame: it was written by another source. Give"
                " this source another uid, or start the job as it was"
            ) from error

    @property
    def token(self) -> str:
        return self.file.partition("/")[0]

    @property
    def is_read(self) -> bool:
        return self.group >= self.stop

    def as_split(self, split_id: str) -> Split:
        return Split(split_id, msgspec.json.encode(self))


@dataclass(frozen=True)
class DataFrameSource(Source):
    """A source that evaluates a DataFrame once in the life of a job. Built by `Pipeline.read`."""

    dataframe: DataFrame | None = field(repr=False)
    """The DataFrame, or None in slots, which only read the files."""
    storage: FileSystemStorage
    job: str
    uid: str
    rows_schema: pa.Schema = field(repr=False)

    @classmethod
    def of(
        cls, dataframe: DataFrame, storage: CheckpointStorage, job: str, uid: str
    ) -> DataFrameSource:
        """Return the source. Does not evaluate the DataFrame.

        Raises:
            ConfigError: The DataFrame is a stream or has a column of an unsupported type, or the
                storage is not a directory.
        """
        if not isinstance(storage, FileSystemStorage):
            raise errors.ConfigError(
                f"read(dataframe, uid={uid!r}) keeps the rows in the checkpoint storage until they"
                " are committed, which needs a directory that Spark's executors and slots share;"
                f" the storage is {storage}. Use Checkpointing(storage=<such a directory>)"
            )
        schema = schema_of_dataframe(dataframe, f"read(dataframe, uid={uid!r})")
        return cls(dataframe, storage, job, uid, schema)

    def __getstate__(self) -> dict[str, Any]:
        # Slots read files; a DataFrame belongs to the driver's session and does not pickle.
        return self.__dict__ | {"dataframe": None}

    @property
    @override
    def schema(self) -> pa.Schema:
        return self.rows_schema

    @property
    @override
    def bounded(self) -> bool:
        return True

    @override
    def splits(self) -> Sequence[Split]:
        """Evaluate the DataFrame into files, and return them as splits.

        Deletes no files, because another driver of the same job may be evaluating the DataFrame at
        the same time. The decision log later decides which driver's files count. `discover` or the
        end of the job deletes the other files.

        Raises:
            ConfigError: A setting of the session would make Spark write altered dates or times.
            DataFrameFailed: Spark could not evaluate the DataFrame. The message has Spark's reason.
                The job ends, and it may be started again.
        """
        assert self.dataframe is not None
        check_session_times(self.dataframe, self.rows_schema, f"read(uid={self.uid!r})")
        # Each evaluation gets its own directory, because two drivers of one job may evaluate at the
        # same time. The log decides whose splits count.
        token, files = secrets.token_hex(8), self._files
        target = files.path(token)
        files.make()
        try:
            rows = refuse_beyond_int96(self.dataframe)
            writer = rows.write.option("parquet.block.size", ROW_GROUP_BYTES)
            writer.option("compression", "snappy").parquet(target.as_uri())
        except Exception as error:
            raise errors.DataFrameFailed(
                f"read(uid={self.uid!r}): Spark could not evaluate the DataFrame into"
                f" {target}: {type(error).__name__}: {str(error)[:2000]}"
            ) from error
        digest = _digest(self.rows_schema)
        splits = [
            split
            for path in sorted(target.glob("part-*.parquet"))
            for split in _plan_splits(path, f"{token}/{path.name}", digest)
        ]
        # The files must be durable before the splits are returned. The splits go into the decision
        # log, which must not name files that a power failure can delete.
        files.make_durable(token)
        _log.info("source %s: the DataFrame is in %s, %d splits", self.uid, target, len(splits))
        return splits

    @override
    def discover(self, known: Sequence[Split]) -> Sequence[Split]:
        """Check the files of `known`, delete files that no split needs, and return `known`.

        Raises:
            StateIncompatible: The DataFrame has other columns than the one that was evaluated.
            OffsetOutOfRange: A file is missing, or its size has changed.
        """
        files = self._files
        positions = [_Position.of(split) for split in known]
        for position in positions:
            path = files.path(position.file)
            size = path.stat().st_size if path.exists() else None
            if size != position.size:
                raise errors.OffsetOutOfRange(
                    f"read(uid={self.uid!r}): file {path} of the DataFrame is"
                    f" {'gone' if size is None else f'{size} bytes long'}, and it was written with"
                    f" {position.size} bytes: restore it from a copy of checkpoint storage, or the"
                    " rows in it that are not read yet are lost"
                )
            if position.schema != _digest(self.rows_schema):
                raise errors.StateIncompatible(
                    f"read(uid={self.uid!r}): the DataFrame has columns"
                    f" {_columns(self.rows_schema)}, and the job reads, since its first start,"
                    f" from one with {_columns(pq.read_schema(str(path)))}: give a DataFrame of the"
                    " old columns, or another uid to the new one"
                )
        # Delete the files of other evaluations only after all of our own files are found complete.
        files.delete(besides={position.token for position in positions})
        return known

    @override
    def on_finished(self, splits: Sequence[Split]) -> None:
        """Delete the files that are read to their end. Keep those that `splits` still need."""
        self._files.delete(besides={_Position.of(split).token for split in splits})

    @override
    def reader(self, splits: Sequence[Split], context: ReaderContext) -> SourceReader:
        del context
        return DataFrameReader(self._files, self.rows_schema, splits)

    @property
    def _files(self) -> InputFiles:
        return self.storage.open(self.job).inputs(self.uid)


def _digest(schema: pa.Schema) -> str:
    return hashlib.sha256(_columns(schema).encode()).hexdigest()[:16]


def _columns(schema: pa.Schema) -> str:
    return ", ".join(f"{column.name} {column.type}" for column in schema)


def _plan_splits(path: Path, file: str, digest: str) -> Iterator[Split]:
    """Yield splits: runs of row groups of about `SPLIT_BYTES` each."""
    footer = pq.read_metadata(str(path))
    size = path.stat().st_size
    first, held = 0, 0
    for group in range(footer.num_row_groups):
        held += footer.row_group(group).total_byte_size
        if held >= SPLIT_BYTES or group == footer.num_row_groups - 1:
            position = _Position(
                file=file, size=size, group=first, row=0, stop=group + 1, schema=digest
            )
            yield position.as_split(f"{file}@{first}")
            first, held = group + 1, 0


class DataFrameReader(SourceReader):
    """A reader that reads its splits one after the other, a row group at a time."""

    def __init__(self, files: InputFiles, schema: pa.Schema, splits: Sequence[Split]) -> None:
        self._files = files
        self._schema = schema
        self._left = {split.id: _Position.of(split) for split in splits}
        self._open: tuple[str, Iterator[pa.RecordBatch]] | None = None
        self._ended: list[str] = []
        self._last: list[tuple[str, int]] = []

    @override
    def poll(self, timeout_s: float) -> pa.RecordBatch | EndOfInput | None:
        del timeout_s
        while self._left:
            # Read the first remaining split. A dict keeps its order, so a restarted reader
            # continues with the split that the previous reader was in.
            split_id = next(iter(self._left))
            position = self._left[split_id]
            if position.is_read:
                del self._left[split_id]
                self._ended.append(split_id)
                continue
            if self._open is None or self._open[0] != split_id:
                self._open = split_id, self._batches(position)
            rows = next(self._open[1], None)
            if rows is None:
                self._open = None
                self._left[split_id] = _at(position, position.group + 1, 0)
            else:
                read = position.row + rows.num_rows
                self._left[split_id] = _at(position, position.group, read)
                self._last = [(split_id, rows.num_rows)]
                return rows
        return EndOfInput()

    @override
    def rows_by_split(self) -> Sequence[tuple[str, int]]:
        return self._last

    @override
    def list_ended_splits(self) -> Sequence[str]:
        return self._ended

    @override
    def snapshot(self) -> Sequence[Split]:
        return [position.as_split(split_id) for split_id, position in self._left.items()]

    @override
    def close(self) -> None:
        self._open = None

    def _batches(self, position: _Position) -> Iterator[pa.RecordBatch]:
        """Yield the remaining rows of the position's row group."""
        path = self._files.path(position.file)
        try:
            with pq.ParquetFile(
                str(path), coerce_int96_timestamp_unit="us", page_checksum_verification=True
            ) as file:
                skipped = 0
                for batch in file.iter_batches(BATCH_ROWS, row_groups=[position.group]):
                    # Parquet readers cannot start at a row number. So the rows that were read
                    # before the snapshot are decoded again and skipped.
                    rows = batch.slice(max(0, position.row - skipped))
                    skipped += batch.num_rows
                    if rows.num_rows:
                        yield cast_batch(rows.select(self._schema.names), self._schema)
        except (OSError, pa.ArrowException) as error:
            what = (
                f"file {path} of a DataFrame, row group {position.group}, cannot be read: {error}"
            )
            if isinstance(error, OSError) and error.errno is not None:
                raise errors.SourceUnavailable(
                    f"{what}; does this machine see the job's checkpoint storage?"
                ) from error
            # Arrow's own error without an errno: the file's content is damaged.
            raise errors.OffsetOutOfRange(
                f"{what}; restore it from a copy of the storage"
            ) from error


def _at(position: _Position, group: int, row: int) -> _Position:
    """Return `position` at row `row` of `group`."""
    return msgspec.structs.replace(position, group=group, row=row)
