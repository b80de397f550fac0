"""A database of bytes to bytes on local disk: its rows, the order of writes, and rocksdict itself.

Row key (checkpoint format): key group, 2 bytes big-endian; length of the state's name, 1 byte; the
name; the row's key as in the canonical form. So a range of key groups is a range of row keys.

Writes are sorted and in bulk, so each becomes one file that RocksDB ingests unchanged: no
write-ahead log, no memtable, nothing to flush at a checkpoint. With universal compaction, the
rewritten bytes, which are uploaded again, are a few times the changed ones. Leveled compaction
would rewrite the whole database every few checkpoints.

A snapshot takes the owner's dirty entries and stores them here. The thread that uploads writes them
and creates the copy that it uploads. If the owner must write earlier (its cache is full, or the
next snapshot begins), it does both first. So the copy never holds data newer than its barrier.

Invariants:
    writes reach the database in the order of the snapshots, and the owner's own after pending ones
    a copy is created right after its snapshot's writes, under the same lock
"""

from __future__ import annotations

import shutil
import struct
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias, TypeVar
from uuid import uuid4

import pyarrow as pa
import pyarrow.compute as pc
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
from onceflow.core.local_files import advise_on_disk
from onceflow.core.state.keys.key_index import to_fixed_binary
from onceflow.core.state.snapshots.canonical import Groups, StateRows

Pair: TypeAlias = tuple[bytes, "bytes | None"]
"""A row key and its value, or None to delete the row."""

T = TypeVar("T")

_pack_group = struct.Struct(">H").pack


def group_prefix(group: int) -> bytes:
    """Return the prefix of the row keys of key group `group`."""
    return _pack_group(group)


def state_prefix(name: str) -> bytes:
    """Return the part of row keys of state `name` that follows the key group."""
    encoded = name.encode()
    return bytes([len(encoded)]) + encoded


def split_row_key(data: bytes) -> tuple[int, str, bytes]:
    """Return the key group, the state's name and the remaining bytes of a row key."""
    # The name follows 2 bytes of key group and 1 byte of length.
    end = 3 + data[2]
    return int.from_bytes(data[:2], "big"), data[3:end].decode(), data[end:]


def next_prefix(prefix: bytes) -> bytes:
    """Return the smallest key above all keys with `prefix`, which must not be all FF bytes."""
    # The prefix plus 1, as a number: if its last byte is FF, the carry changes the others.
    return (int.from_bytes(prefix, "big") + 1).to_bytes(len(prefix), "big")


def to_pairs(rows: StateRows, name: str) -> list[Pair]:
    """Return the rows as sorted pairs. A null value deletes the row."""
    return sort_pairs(rows.groups, name, rows.keys, rows.values.to_pylist())


def sort_pairs(
    groups: Groups, name: str, keys: pa.Array, values: Sequence[T]
) -> list[tuple[bytes, T]]:
    """Return the row keys and values of rows of state `name`, sorted by row key."""
    if not len(groups):
        return []
    kind = pa.large_binary()
    row_keys = pc.binary_join_element_wise(
        to_fixed_binary(groups.astype(">u2")),
        pa.scalar(state_prefix(name), kind),
        keys.cast(pa.large_binary()),
        pa.scalar(b"", kind),
    )
    order = pc.array_sort_indices(row_keys)
    ordered = map(values.__getitem__, order.to_pylist())
    return list(zip(row_keys.take(order).to_pylist(), ordered, strict=True))


def merge_pairs(sources: Iterable[Callable[[], list[Pair]]]) -> list[Pair]:
    """Return the sorted pairs of all sources, which must not have common keys."""
    lists = [pairs for source in sources if (pairs := source())]
    if len(lists) == 1:
        return lists[0]
    pairs = [pair for part in lists for pair in part]
    # Python's sort detects the sorted runs and merges them.
    pairs.sort()
    return pairs


_BLOOM_BITS_A_KEY = 10
"""RocksDB's recommendation: one in a hundred look-ups of a missing key reads a file in vain."""
_SORTED_RUNS = 8
"""The number of sorted files above which RocksDB merges them. A snapshot adds one file, and a merge
is uploaded with the next snapshot. RocksDB's default, 4, would merge in most snapshots; more files
slow down reads."""
_UNMERGED_FILES = "rocksdb.num-files-at-level0"
_UNMERGED_FILES_MAX = 20
"""The number of files at which RocksDB would slow down writes by default."""
_FAILED_MERGES = "rocksdb.background-errors"
_MERGE_WAIT_S = 10.0
_MERGE_POLL_S = 0.02
_NEVER = 1 << 30
"""A number of files that no database reaches."""
MANIFEST_BYTES_MAX = 128 << 10
"""The size above which RocksDB starts a new manifest. It grows with each file and is uploaded
whole."""


@dataclass(frozen=True, slots=True)
class DatabaseOptions:
    """The sizes of RocksDB's own memory."""

    block_cache_bytes: int
    write_buffer_bytes: int


class Database:
    """A RocksDB of this process, deleted on close. Any thread may read, one at a time may write."""

    def __init__(self, path: Path, options: DatabaseOptions) -> None:
        self.path = path
        self._options = _options(options)
        with self._translate_errors("be opened"):
            path.mkdir(parents=True, exist_ok=True)
            self._database = Rdict(str(path / "db"), self._options)
        self._no_log = WriteOptions()
        self._no_log.disable_wal = True  # type: ignore[method-assign,assignment]

    def get(self, key: bytes) -> bytes | None:
        """Return the value at `key`, or None if there is none."""
        return self._database.get(key)

    def get_many(self, keys: list[bytes]) -> list[bytes | None]:
        """Return the value at each of `keys`; fastest if they are sorted."""
        row_keys: list[Any] = list(keys)
        values: list[bytes | None] = self._database.get(row_keys) or []
        return values

    def scan(self, start: bytes, stop: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Yield the rows from `start` to before `stop`, as of the first `next`."""
        return _scan(self._database, start, stop)

    def write(self, pairs: Iterable[Pair]) -> None:
        """Write `pairs`, which are sorted by key without repetition, all or none.

        Raises:
            StateError: RocksDB cannot write; the local disk is full, most likely.
        """
        iterator = iter(pairs)
        first = next(iterator, None)
        if first is None:
            return
        file = str(self.path / f"{uuid4().hex}.sst")
        writer = SstFileWriter(self._options)
        options = IngestExternalFileOptions()
        # RocksDB links the file instead of copying it.
        options.set_move_files(True)
        # Ingesting a file is atomic: if the disk is full, none of its rows is in the database.
        with self._translate_errors("take rows"):
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
            # Without the write-ahead log, like all writes: after a crash, a new database is created
            # from a checkpoint, and this one is never opened again.
            with self._translate_errors("delete rows"):
                self._database.delete_range(start, stop, self._no_log)

    def link_to(self, path: Path) -> None:
        """Create a consistent copy at `path`, of hard links and a few small files.

        Raises:
            StateError: RocksDB cannot create the copy.
        """
        self._wait_for_merges()
        with self._translate_errors("be copied"):
            path.parent.mkdir(parents=True, exist_ok=True)
            Checkpoint(self._database).create_checkpoint(str(path))

    @contextmanager
    def _translate_errors(self, work: str) -> Generator[None, None, None]:
        """Convert rocksdict's errors, which are plain instances of `Exception`, to StateError."""
        try:
            yield
        except Exception as error:
            raise StateError(
                f"the RocksDB in {self.path} cannot {work}: {error}; {advise_on_disk(self.path)}"
            ) from error

    def _wait_for_merges(self) -> None:
        """Wait while there are too many unmerged files, for `_MERGE_WAIT_S` at most.

        RocksDB's own wait never ends on a full disk, and holds the interpreter, so that the slot
        stops responding. Does not wait after a failed merge.
        """
        deadline = time.monotonic() + _MERGE_WAIT_S
        while (
            (self._database.property_int_value(_UNMERGED_FILES) or 0) >= _UNMERGED_FILES_MAX
            and not self._database.property_int_value(_FAILED_MERGES)
            and time.monotonic() < deadline
        ):
            time.sleep(_MERGE_POLL_S)

    def close(self) -> None:
        """Close and delete the database."""
        self._database.close()
        shutil.rmtree(self.path, ignore_errors=True)


def scan_copy(path: Path, ranges: Iterable[tuple[bytes, bytes]]) -> Iterator[tuple[bytes, bytes]]:
    """Yield the rows of each range (start, stop) of the copy at `path`, without changing it."""
    options = Options(raw_mode=True)
    database = Rdict(str(path), options, access_type=AccessType.read_only(False))
    try:
        for start, stop in ranges:
            yield from _scan(database, start, stop)
    finally:
        database.close()


def _scan(database: Rdict, start: bytes, stop: bytes) -> Iterator[tuple[bytes, bytes]]:
    options = ReadOptions()
    # RocksDB itself ends the iteration: rows beyond `stop` are neither read nor passed to Python.
    options.set_iterate_upper_bound(stop)
    # A generator, so that `options` outlives the iterator, which does not keep the bound alive.
    items: Any = database.items(from_key=start, read_opt=options)
    yield from items


def _options(sizes: DatabaseOptions) -> Options:
    table = BlockBasedOptions()
    table.set_block_cache(Cache(sizes.block_cache_bytes))
    table.set_bloom_filter(_BLOOM_BITS_A_KEY, False)
    # Indexes and filters are not in the block cache: they need a few MB for a million keys. A
    # file's filter is larger than a shard of the cache, so each look-up would read it again (85 µs,
    # not 3).
    table.set_format_version(5)
    options = Options(raw_mode=True)
    options.create_if_missing(True)
    options.set_block_based_table_factory(table)
    options.set_write_buffer_size(sizes.write_buffer_bytes)
    options.set_compression_type(DBCompressionType.lz4())
    options.set_compaction_style(DBCompactionStyle.universal())
    options.set_level_zero_file_num_compaction_trigger(_SORTED_RUNS)
    # `link_to` waits for merges instead.
    options.set_level_zero_slowdown_writes_trigger(_NEVER)
    options.set_level_zero_stop_writes_trigger(_NEVER)
    options.set_keep_log_file_num(1)
    options.set_max_manifest_file_size(MANIFEST_BYTES_MAX)
    options.set_max_background_jobs(2)
    return options


PAIRS_A_SLICE = 512
"""The number of pairs to write before the processing thread may run: about 0.2 ms."""
_YIELD_S = 50e-6
"""The length of a sleep, just long enough for another thread to take the interpreter."""


class PendingWrites:
    """The pairs that one snapshot has to write, and the path of its copy of the database."""

    def __init__(self, pairs: Callable[[], Sequence[Pair]], copy: Path) -> None:
        self.pairs = pairs
        self.copy = copy
        self.wanted = True
        """False once the snapshot is discarded: then the writes are still needed, the copy is not.
        """


class WriteQueue:
    """The writes of one store. At most one snapshot's writes are outstanding."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._lock = threading.Lock()
        self._pending: PendingWrites | None = None
        self._closed = False

    @property
    def is_empty(self) -> bool:
        """True if the writes of all snapshots are in the database."""
        return self._pending is None

    def flush(self) -> None:
        """Write the pending pairs of snapshots to the database, and create their copies."""
        # Checked without the lock, which an upload holds while it writes. Only the owner's thread
        # submits, so None stays None here.
        if self._pending is not None or self._closed:
            with self._lock:
                self._flush(lambda pairs: pairs)

    def flush_in_background(self) -> None:
        """Write the pending pairs like `flush`, but slower: the owner's thread runs in between."""
        with self._lock:
            self._flush(_pace)

    def submit(self, pending: PendingWrites) -> None:
        """Store a snapshot's writes as pending. Earlier pending writes are done first."""
        with self._lock:
            self._flush(lambda pairs: pairs)
            self._pending = pending

    def write(self, pairs: Sequence[Pair]) -> None:
        """Write the owner's `pairs`, sorted by key, after all pending pairs."""
        with self._lock:
            self._flush(lambda pairs: pairs)
            self._database.write(pairs)

    def discard(self, pending: PendingWrites) -> None:
        """Delete the snapshot's copy, whether it exists or not."""
        with self._lock:
            pending.wanted = False
            shutil.rmtree(pending.copy, ignore_errors=True)

    def close(self) -> None:
        """Close the database after the current write. Pending pairs are lost. Idempotent."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._pending = None
                self._database.close()

    def _flush(self, paced: Callable[[Sequence[Pair]], Iterable[Pair]]) -> None:
        if self._closed:
            raise StateError("the state was closed during its snapshot")
        pending = self._pending
        if pending is None:
            return
        # Written before the copy is linked, under one lock, so the copy has no data newer than the
        # barrier.
        self._database.write(paced(pending.pairs()))
        if pending.wanted:
            self._database.link_to(pending.copy)
        self._pending = None


def _pace(pairs: Sequence[Pair]) -> Iterator[Pair]:
    for start in range(0, len(pairs), PAIRS_A_SLICE):
        yield from pairs[start : start + PAIRS_A_SLICE]
        time.sleep(_YIELD_S)
