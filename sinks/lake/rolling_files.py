"""The open data files of one writer, one per partition: rows wait until they make a row group."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

import numpy as np
import pyarrow as pa

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
        encoded = column.dictionary_encode(null_encoding="encode")
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
