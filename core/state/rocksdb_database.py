"""The one place that speaks to rocksdict: a database of bytes to bytes, on local disk.

Writes come sorted and in bulk, so each becomes one file that RocksDB takes in as it stands: no
write-ahead log, no memtable, nothing to flush at a checkpoint. Universal compaction keeps what is
rewritten, and so uploaded again, to a few times what changed; levels would rewrite the whole
database every few checkpoints.
"""

from __future__ import annotations

import shutil
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any
from uuid import uuid4

from rocksdict import (
    AccessType,
    BlockBasedOptions,
    Cache,
    Checkpoint,
    DBCompactionStyle,
    DBCompressionType,
    IngestExternalFileOptions,
    Options,
    Rdict,
    ReadOptions,
    SstFileWriter,
    WriteOptions,
)

from onceflow.core.errors import StateError
from onceflow.core.state.rocksdb_rows import Pair

_BLOOM_BITS_A_KEY = 10
_SORTED_RUNS = 8
"""Files that may lie on each other before they are merged. A snapshot adds one; a merge is uploaded
with the snapshot after it. 4, RocksDB's default, merges in most snapshots; more slow down reads."""
MANIFEST_BYTES_MAX = 128 << 10
"""RocksDB's manifest grows with every file and is uploaded whole; past this it is begun anew."""


@dataclass(frozen=True, slots=True)
class DatabaseOptions:
    """Sizes of RocksDB's own memory."""

    block_cache_bytes: int
    write_buffer_bytes: int


class Database:
    """A RocksDB of this process, deleted on close; any thread may read, one at a time writes."""

    def __init__(self, path: Path, options: DatabaseOptions) -> None:
        path.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._options = _options(options)
        self._database = Rdict(str(path / "db"), self._options)
        self._no_log = WriteOptions()
        self._no_log.disable_wal = True  # type: ignore[method-assign,assignment]

    def get(self, key: bytes) -> bytes | None:
        """Return the value at `key`."""
        return self._database.get(key)

    def get_many(self, keys: list[bytes]) -> list[bytes | None]:
        """Return the value at each of `keys`; fastest when they are sorted."""
        wanted: list[Any] = list(keys)
        found: list[bytes | None] = self._database.get(wanted) or []
        return found

    def scan(self, start: bytes, stop: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Yield the rows from `start` to before `stop`, as of the first one asked for."""
        return _scan(self._database, start, stop)

    def write(self, pairs: Iterable[Pair]) -> None:
        """Take `pairs`, sorted by key without repetition, all or none.

        Raises:
            StateError: RocksDB cannot; the local disk is full, most likely.
        """
        iterator = iter(pairs)
        first = next(iterator, None)
        if first is None:
            return
        file = str(self.path / f"{uuid4().hex}.sst")
        writer = SstFileWriter(self._options)
        options = IngestExternalFileOptions()
        options.set_move_files(True)
        with self._errors_of("take rows"):
            writer.open(file)
            for key, value in chain([first], iterator):
                if value is None:
                    del writer[key]
                else:
                    writer[key] = value
            writer.finish()
            self._database.ingest_external_file([file], options)

    def delete_range(self, start: bytes, stop: bytes) -> None:
        """Delete the rows from `start` to before `stop`."""
        if start < stop:
            self._database.delete_range(start, stop, self._no_log)

    def link_to(self, path: Path) -> None:
        """Leave a consistent copy at `path`, of hard links and a few small files.

        Raises:
            StateError: RocksDB cannot.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        with self._errors_of("be copied"):
            Checkpoint(self._database).create_checkpoint(str(path))

    @contextmanager
    def _errors_of(self, work: str) -> Generator[None, None, None]:
        """Turn rocksdict's errors, plain `Exception`s, into ours."""
        try:
            yield
        except Exception as error:
            raise StateError(
                f"the RocksDB in {self.path} cannot {work}: {error}; check the disk's free space"
            ) from error

    def close(self) -> None:
        """Close and delete the database."""
        self._database.close()
        shutil.rmtree(self.path, ignore_errors=True)


def scan_copy(path: Path, ranges: Iterable[tuple[bytes, bytes]]) -> Iterator[tuple[bytes, bytes]]:
    """Yield the rows of each range (start, stop) of the copy at `path`, which stays as it is."""
    options = Options(raw_mode=True)
    database = Rdict(str(path), options, access_type=AccessType.read_only(False))
    try:
        for start, stop in ranges:
            yield from _scan(database, start, stop)
    finally:
        database.close()


def _scan(database: Rdict, start: bytes, stop: bytes) -> Iterator[tuple[bytes, bytes]]:
    options = ReadOptions()
    options.set_iterate_upper_bound(stop)
    # A generator, so that `options` outlives the iterator, which does not keep its bound alive.
    items: Any = database.items(from_key=start, read_opt=options)
    yield from items


def _options(sizes: DatabaseOptions) -> Options:
    table = BlockBasedOptions()
    table.set_block_cache(Cache(sizes.block_cache_bytes))
    table.set_bloom_filter(_BLOOM_BITS_A_KEY, False)
    # Indexes and filters stay out of the block cache: a few MB a million keys, and a file's filter
    # is larger than a shard of the cache, so each look-up would read it again (85 µs, not 3).
    table.set_format_version(5)
    options = Options(raw_mode=True)
    options.create_if_missing(True)
    options.set_block_based_table_factory(table)
    options.set_write_buffer_size(sizes.write_buffer_bytes)
    options.set_compression_type(DBCompressionType.lz4())
    options.set_compaction_style(DBCompactionStyle.universal())
    options.set_level_zero_file_num_compaction_trigger(_SORTED_RUNS)
    options.set_keep_log_file_num(1)
    options.set_max_manifest_file_size(MANIFEST_BYTES_MAX)
    options.set_max_background_jobs(2)
    return options
