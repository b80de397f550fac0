"""The data files of a lake sink: their names, encoding and row groups, and the removal of orphans.

    onceflow-<sink id>-<attempt>-<checkpoint>-<subtask>-<token>-<number>.parquet

`<checkpoint>` is the checkpoint that the writer expects next when it begins the file. `<token>` is
random, 32 hex digits, one per writer.

Parquet's writers build a dictionary of every column until it gets too large, and only then write
plain values. For a column of ids, times or other values that hardly repeat, this work is wasted: it
takes half of the time of a data file, and makes the file larger.

An orphan is a data file whose writer was killed before it had described the file. The removal:

    1. list the files of the sink id's earlier attempts that are old enough
    2. leave out files that a staged description names: they wait for their commit or abort
    3. leave out files that a version of the table needs
    4. delete the other files

Runs after the attempt has claimed the log and the table. From then on no checkpoint is decided
under an earlier attempt, and all decided ones are staged or committed. An overtaken driver's commit
moves files from staged descriptions into a version, so they are read in this order. Files of other
writers have other names.
"""

from __future__ import annotations

import logging
import re
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types as arrow

from onceflow.core.arrow.kinds import to_plain_column, to_plain_type
from onceflow.core.decoding import UnsafeName, resolve_stored_name
from onceflow.core.errors import OnceflowError, SinkError
from onceflow.core.protocol.ids import CheckpointId
from onceflow.core.spi import CommitterContext, WriterContext
from onceflow.core.spi.staging import StagingArea, require_staging
from onceflow.sinks.lake.table import LakeTable


class DataFileNames:
    """The names of the files of one writer, or of one version that the driver makes."""

    def __init__(self, sink_id: str, attempt: int, checkpoint: int, *, subtask: int) -> None:
        """Begin with files of `checkpoint`."""
        self._prefix = f"onceflow-{sink_id}-{attempt}"
        self._suffix = f"{subtask}-{uuid.uuid4().hex}"
        self._checkpoint = checkpoint
        self._number = 0

    @classmethod
    def of_writer(cls, context: WriterContext) -> DataFileNames:
        """Return the names of a writer's files, from its first checkpoint on."""
        first = context.first_checkpoint
        return cls(context.sink_id, context.attempt, first, subtask=context.subtask)

    def next(self) -> str:
        """Return a unique name."""
        number, self._number = self._number, self._number + 1
        return f"{self._prefix}-{self._checkpoint}-{self._suffix}-{number}.parquet"

    def advance_past(self, checkpoint: CheckpointId) -> None:
        """Name files from now on for the checkpoint after `checkpoint`."""
        self._checkpoint = checkpoint + 1


def check_own_path(path: str, sink_id: str, directory: Path | None = None) -> None:
    """Raise SinkError unless `path`, below the table's directory, is a data file of the sink id.

    A staged description is read from checkpoint storage, so it must not add or delete other files.

    Raises:
        SinkError: The path is no such file, or a link leads from `directory` to it.
    """
    try:
        resolve_stored_name(path, directory)
    except UnsafeName as error:
        raise SinkError(f"a staged description is damaged: {error}") from error
    if not compile_own_name(sink_id).fullmatch(to_name(path)):
        raise SinkError(
            f"a staged description is damaged: {path!r} is no data file of sink id {sink_id!r}"
        )


def to_name(path: str) -> str:
    """Return the last part of `path`, with slashes."""
    return path.rpartition("/")[2]


def compile_own_name(sink_id: str) -> re.Pattern[str]:
    """Return the pattern of full names of the sink id's files; group 1 is the attempt.

    A table may let names begin with a hash in binary digits, which spreads them over a bucket.
    """
    own = rf"onceflow-{re.escape(sink_id)}-(\d+)-\d+-\d+-[0-9a-f]{{32}}-\d+\.parquet"
    return re.compile(rf"(?:[01]+-)?{own}")


_SAMPLED_SHARE = 50
"""The divisor of the sample: one row in 50 costs less than a tenth of what a good choice saves."""
_SAMPLED_ROWS_MIN = 1000
_DISTINCT_SHARE_MAX = 0.95
"""The largest share of distinct values in the sample. If values are spread evenly, a row group 50
times as large then has one new value in five: about where a dictionary makes a file larger."""


def choose_dictionaries(rows: pa.Table) -> list[str] | bool:
    """Return the columns that get a dictionary, in the form of `ParquetWriter`'s option.

    `rows` is the first row group of a file. Its first rows are the sample, because sorted columns
    repeat their values there. If there are nested columns, whose parts have other names, every
    column gets a dictionary.
    """
    if any(arrow.is_nested(field.type) for field in rows.schema):
        return True
    count = max(_SAMPLED_ROWS_MIN, rows.num_rows // _SAMPLED_SHARE)
    sample = [column.slice(0, count) for column in rows.columns]
    return [
        name for name, column in zip(rows.column_names, sample, strict=True) if _is_repeated(column)
    ]


def _is_repeated(column: pa.ChunkedArray) -> bool:
    if arrow.is_boolean(column.type):
        return False  # one bit each: there is nothing to save
    # Arrow counts no values of extension types.
    plain = [to_plain_column(chunk) for chunk in column.chunks]
    values = pa.chunked_array(plain, to_plain_type(column.type))
    distinct: int = pc.count_distinct(values, mode="only_valid").as_py()
    return distinct <= _DISTINCT_SHARE_MAX * (len(column) - column.null_count)


_LAST_BEFORE_SURROGATES, _FIRST_AFTER_SURROGATES = 0xD7FF, 0xE000
_LAST_CHARACTER = 0x10FFFF


def shorten_upper_text(text: str, length_max: int) -> str | None:
    """Return a text of at most `length_max` characters that is not below `text`.

    Return None if there is no such text. Texts are ordered by code points. UTF-8 has no surrogates,
    U+D800 to U+DFFF, so the character after U+D7FF is U+E000.
    """
    if len(text) <= length_max:
        return text
    kept = text[:length_max].rstrip(chr(_LAST_CHARACTER))
    if not kept:
        return None
    code = ord(kept[-1])
    following = _FIRST_AFTER_SURROGATES if code == _LAST_BEFORE_SURROGATES else code + 1
    return kept[:-1] + chr(following)


F = TypeVar("F")

ROW_GROUP_BYTES = 32 * 1024 * 1024
"""The limit of waiting rows in memory, over all files of a writer. Then the fullest file writes a
row group."""
OPEN_FILES_MAX = 128
"""The largest number of partitions that a writer writes at a time; with more, files get smaller."""


class EncodedFile(ABC, Generic[F]):
    """A file that is being written."""

    path: str

    @property
    @abstractmethod
    def size_bytes(self) -> int:
        """The number of bytes written so far."""

    @abstractmethod
    def write(self, rows: pa.Table) -> None:
        """Add a row group."""

    @abstractmethod
    def end(self) -> F:
        """Complete the file and make it durable.

        Return its description for a version of the table.
        """

    @abstractmethod
    def drop(self) -> None:
        """Release the file; the caller deletes it."""


class RollingFiles(Generic[F]):
    """A set of files that begins a file when a partition has rows, and ends it at `roll_bytes`."""

    def __init__(self, roll_bytes: int, path_of: Callable[[F], str]) -> None:
        """Begin with no file; `path_of` returns the path of an ended file."""
        self._roll_bytes, self._path_of = roll_bytes, path_of
        self._open: dict[str, _Buffered[F]] = {}
        self._ended: list[F] = []

    def add(
        self, partition: str, rows: pa.RecordBatch, begin: Callable[[], EncodedFile[F]]
    ) -> None:
        """Add `rows` to the file of `partition`, which `begin` creates if there is none."""
        if not rows.num_rows:
            return
        file = self._open.get(partition)
        if file is None:
            if len(self._open) >= OPEN_FILES_MAX:
                self._end(max(self._open, key=lambda name: self._open[name].buffered_bytes))
            file = self._open[partition] = _Buffered(begin())
        file.add(rows)
        if sum(open_file.buffered_bytes for open_file in self._open.values()) >= ROW_GROUP_BYTES:
            max(self._open.values(), key=lambda open_file: open_file.buffered_bytes).flush()
        if file.encoded.size_bytes >= self._roll_bytes:
            self._end(partition)

    def end(self) -> Sequence[F]:
        """End every file; return all files that ended since the last call."""
        for partition in list(self._open):
            self._end(partition)
        ended, self._ended = self._ended, []
        return ended

    def drop(self) -> Sequence[str]:
        """Release every file; return the paths of all files that `end` did not return."""
        files, self._open = list(self._open.values()), {}
        ended, self._ended = self._ended, []
        for file in files:
            file.encoded.drop()
        return [*(file.encoded.path for file in files), *map(self._path_of, ended)]

    def _end(self, partition: str) -> None:
        file = self._open[partition]
        file.flush()
        self._ended.append(file.encoded.end())
        del self._open[partition]


class _Buffered(Generic[F]):
    def __init__(self, encoded: EncodedFile[F]) -> None:
        self.encoded = encoded
        self.buffered_bytes = 0
        self._rows: list[pa.RecordBatch] = []

    def add(self, rows: pa.RecordBatch) -> None:
        self._rows.append(rows)
        self.buffered_bytes += rows.nbytes

    def flush(self) -> None:
        if self._rows:
            self.encoded.write(pa.Table.from_batches(self._rows))
            self._rows, self.buffered_bytes = [], 0


def group_rows(
    rows: pa.RecordBatch, keys: Sequence[pa.Array]
) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Yield for each combination of `keys` the index of one of its rows, and its rows in order.

    `rows` has at least one row, and each of `keys` has a value for each row.
    """
    groups = np.zeros(rows.num_rows, np.int64)
    for column in keys:
        encoded = to_plain_column(column).dictionary_encode(null_encoding="encode")
        codes = encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64)
        # The product is at most rows times values, because the groups are renumbered for each
        # column.
        _, groups = np.unique(groups * len(encoded.dictionary) + codes, return_inverse=True)
        groups = groups.reshape(-1)
    order = np.argsort(groups, kind="stable")
    ends = np.cumsum(np.bincount(groups))
    sorted_rows = rows if len(ends) == 1 else rows.take(pa.array(order))
    begin = 0
    for end in ends.tolist():
        yield int(order[begin]), sorted_rows.slice(begin, end - begin)
        begin = end


_logger = logging.getLogger("onceflow.sinks.lake")

DELETED_MAX = 1000
"""The limit of deleted files per start, which waits for the deletion. The next start continues."""


def try_to_remove_orphans(table: LakeTable, context: CommitterContext, age_s: float) -> None:
    """Remove orphan files that are older than `age_s`; if that is not possible now, log why."""
    try:
        removed = remove_orphans(table, context, age_s)
    except OnceflowError as error:
        _logger.warning("sink %s: orphan files are left: %s", context.sink_id, error)
        return
    if removed:
        _logger.info("sink %s: %d orphan files removed", context.sink_id, removed)


def remove_orphans(table: LakeTable, context: CommitterContext, age_s: float) -> int:
    """Delete at most `DELETED_MAX` files as the module says; return their number.

    Raises:
        OnceflowError: The table or staged descriptions cannot be read, so no file was deleted.
    """
    staging = require_staging(context.staging, context.sink_id, "the description of data files is")
    # 1.
    before = datetime.now(timezone.utc) - timedelta(seconds=age_s)
    own_name = compile_own_name(context.sink_id)
    paths: dict[str, str] = {}
    for path, modified in table.list_files():
        match = own_name.fullmatch(to_name(path))
        if match and int(match[1]) < context.attempt and modified < before:
            paths[to_name(path)] = path
    # 2.
    for name in _list_staged_names(table, staging):
        paths.pop(name, None)
    if not paths:
        return 0
    # 3.
    unnamed = sorted(table.load().find_unnamed(paths.keys()))[:DELETED_MAX]
    # 4.
    table.delete_files([paths[name] for name in unnamed])
    return len(unnamed)


def _list_staged_names(table: LakeTable, staging: StagingArea) -> Iterator[str]:
    for transaction in staging.transactions():
        for _, description in staging.read(transaction) or ():
            yield from map(to_name, table.list_paths(description))
