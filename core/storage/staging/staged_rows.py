"""The staged rows of a job as files of its checkpoint storage, and the input files of its sources.

Each transaction is one file, `<job>/staged/<sink
id>/<attempt>-<checkpoint>-<subtask>-<sequence>.arrow`:

    frame*      part length (2 bytes), body length (8), part (UTF-8), body (an Arrow IPC stream)
    trailer     length of all frames (8 bytes), their XXH3-64 (8)

All numbers are little endian. A file is listed only once it is whole: see `FileSystem`.

A savepoint holds copies of these files, under the same names. A job that starts from it in empty
storage copies them there, and `<job>/staged/<sink id>/imported` lists them, one a line.
"""

from __future__ import annotations

import re
import struct
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import IO

import pyarrow as pa
import xxhash
from pyarrow import types as arrow
from typing_extensions import override

from onceflow.core.arrow.kinds import holds
from onceflow.core.errors import StateCorrupt, StorageError
from onceflow.core.protocol.committables import Committable
from onceflow.core.protocol.ids import TransactionId
from onceflow.core.spi.staging import StagedRows, StagingArea, make_staged_committable
from onceflow.core.storage.filesystems.filesystem import FileSystem
from onceflow.core.storage.filesystems.local import (
    CHECKPOINT_STORAGE,
    LocalFileSystem,
    Modes,
    sync_directory,
    sync_file,
)
from onceflow.core.storage.layout import safe_name

MEMORY_BYTES_MAX = 32 * 1024 * 1024
"""The number of bytes that one transaction holds in memory before it uses a temporary file."""

_HEADER = struct.Struct("<HQ")
_TRAILER = struct.Struct("<QQ")
_CHUNK_BYTES = 1 << 20
_FRAME_BYTES = 1 << 18
"""The size at which a frame takes no further batch, because it is in memory until it ends."""
_NAME = re.compile(r"(\d+)-(\d+)-(\d+)-(\d+)\.arrow")
_IMPORTED = "imported"


@dataclass(frozen=True, slots=True)
class FileStagingArea(StagingArea):
    """A directory of `fs`, which the driver and all executors see."""

    fs: FileSystem = field(repr=False)
    directory: str
    sink_id: str

    @classmethod
    def in_directory(cls, root: str, sink_id: str) -> FileStagingArea:
        """Return the area of `sink_id` in the local directory `root`, without a job."""
        files = LocalFileSystem(root, Modes(), advice=CHECKPOINT_STORAGE)
        return cls(files, f"staged/{safe_name(sink_id)}", sink_id)

    @override
    def open(self) -> StagedRows:
        return _SpooledRows(self)

    @override
    def read(self, transaction: TransactionId) -> Iterator[tuple[str, pa.RecordBatch]] | None:
        path = self.path(transaction)
        chunks = self.fs.read_chunks(path)
        if chunks is None:
            return None
        # The whole file is read and verified before the first row is yielded: the caller applies
        # rows immediately, and a damaged file must not leave half of them applied.
        spool = tempfile.SpooledTemporaryFile(max_size=MEMORY_BYTES_MAX)  # noqa: SIM115
        try:
            for chunk in chunks:
                spool.write(chunk)
            size_bytes = _verify_size(spool, self.fs.location(path))
        except BaseException:
            spool.close()
            raise
        return _frames(spool, size_bytes)

    @override
    def contains(self, transaction: TransactionId) -> bool:
        return self.fs.size(self.path(transaction)) is not None

    @override
    def transactions(self) -> Sequence[TransactionId]:
        matches = map(_NAME.fullmatch, self.fs.list(self.directory))
        return sorted(
            TransactionId(self.sink_id, *map(int, match.groups())) for match in matches if match
        )

    @override
    def find_seal_time(self, transaction: TransactionId) -> datetime | None:
        return self.fs.find_modified_time(self.path(transaction))

    @override
    def is_imported(self, transaction: TransactionId) -> bool:
        names = self.fs.read(f"{self.directory}/{_IMPORTED}") or b""
        return self._name(transaction).encode() in names.splitlines()

    @override
    def discard(self, transaction: TransactionId) -> None:
        self.fs.delete(self.path(transaction))

    def copy_to(
        self, target: FileStagingArea, is_wanted: Callable[[TransactionId], bool]
    ) -> tuple[TransactionId, ...]:
        """Copy the staged transactions that are wanted. Return their ids.

        May run while sinks stage and commit. If a sink commits a transaction meanwhile, its file
        disappears and a proof may replace it. So the area is listed again until the listing shows
        nothing new. Then each wanted transaction, or its proof, was copied, or the target has the
        proof.

        Raises:
            StateCorrupt: The bytes of a file are not those that were sealed.
            StorageError: Not all files are durable in `target`.
        """
        seen: set[TransactionId] = set()
        copied: list[TransactionId] = []
        while True:
            listed = [
                transaction
                for transaction in self.transactions()
                if transaction not in seen and is_wanted(transaction)
            ]
            if not listed:
                return tuple(copied)
            seen.update(listed)
            copied += [transaction for transaction in listed if self._copy(transaction, target)]

    def import_from(self, source: FileStagingArea) -> tuple[TransactionId, ...]:
        """Copy all staged files of `source`, a savepoint's area. Return their ids. Idempotent.

        Copies nothing if `source` is this area itself: the job starts from a checkpoint that it
        retains.

        Raises:
            StateCorrupt: The bytes of a file are not those that were sealed.
            StorageError: Not all files are durable here.
        """
        if source.fs.location(source.directory) == self.fs.location(self.directory):
            return ()
        names = [self._name(transaction) for transaction in source.transactions()]
        # Written before the rows, so that rows are never here without a record of their origin.
        self.fs.write(f"{self.directory}/{_IMPORTED}", ("\n".join(names).encode(),))
        return source.copy_to(self, lambda _: True)

    def _copy(self, transaction: TransactionId, target: FileStagingArea) -> bool:
        path = self.path(transaction)
        chunks = self.fs.read_chunks(path)
        if chunks is None:
            return False
        target.fs.write(target.path(transaction), _verify_chunks(chunks, self.fs.location(path)))
        return True

    def path(self, transaction: TransactionId) -> str:
        """Return the file of `transaction`, relative to the file system's root."""
        if transaction.sink_id != self.sink_id:
            raise ValueError(
                f"transaction {transaction} was given to the staging area of sink {self.sink_id}"
            )
        return f"{self.directory}/{self._name(transaction)}"

    @staticmethod
    def _name(t: TransactionId) -> str:
        return f"{t.attempt}-{t.checkpoint}-{t.subtask}-{t.sequence}.arrow"


class _Frame:
    """Consecutive batches of one schema, as one Arrow stream.

    A stream for each batch would cost more, in writing and reading, than the rows of a small batch.
    """

    def __init__(self, part: str, schema: pa.Schema) -> None:
        self.part = part
        self._schema = schema
        self._body = pa.BufferOutputStream()
        self._stream = pa.ipc.new_stream(self._body, schema)
        # Each batch has its own dictionaries, which a stream would have to replace.
        self._takes_more = not any(holds(kind, arrow.is_dictionary) for kind in schema.types)

    def fits(self, part: str, schema: pa.Schema) -> bool:
        """Return True if a batch of `part` with `schema`, metadata included, may be appended."""
        return (
            self._takes_more
            and part == self.part
            and self._body.tell() < _FRAME_BYTES
            and schema.equals(self._schema, check_metadata=True)
        )

    def write(self, batch: pa.RecordBatch) -> None:
        """Append `batch`."""
        self._stream.write_batch(batch)

    def end(self) -> pa.Buffer:
        """End the stream and return its bytes."""
        self._stream.close()
        return self._body.getvalue()


class _SpooledRows(StagedRows):
    """Frames in memory, or in a local file if they are large, until they are sealed."""

    def __init__(self, area: FileStagingArea) -> None:
        self._area = area
        self._spool: IO[bytes] | None = None
        self._frame: _Frame | None = None
        self._hash = xxhash.xxh3_64()
        self._rows = 0

    @property
    @override
    def rows(self) -> int:
        return self._rows

    @override
    def write(self, batch: pa.RecordBatch, *, part: str = "") -> None:
        frame = self._frame
        if frame is not None and not frame.fits(part, batch.schema):
            self._end_frame()
            frame = None
        if frame is None:
            frame = self._frame = _Frame(part, batch.schema)
        frame.write(batch)
        self._rows += batch.num_rows

    def _end_frame(self) -> None:
        frame, self._frame = self._frame, None
        if frame is None:
            return
        if self._spool is None:
            self._spool = tempfile.SpooledTemporaryFile(max_size=MEMORY_BYTES_MAX)  # noqa: SIM115
        data = frame.end()
        label = frame.part.encode()
        for piece in (_HEADER.pack(len(label), data.size), label, memoryview(data)):
            self._spool.write(piece)
            self._hash.update(piece)

    @override
    def seal(self, transaction: TransactionId) -> Committable:
        self._end_frame()
        spool = self._spool
        if spool is None:
            raise ValueError(f"{transaction}: no rows were written, so there is nothing to seal")
        if self._area.contains(transaction):
            raise StorageError(
                f"rows are already staged under {transaction}, so attempt or checkpoint numbers"
                " were used twice. Check whether the decision log was deleted"
            )
        spool.write(_TRAILER.pack(spool.tell(), self._hash.intdigest()))
        spool.seek(0)
        # The file gets its name only when it is whole and durable. This is the pre-commit.
        self._area.fs.write(self._area.path(transaction), _chunks(spool))
        rows = self._rows
        self.close()
        return make_staged_committable(transaction, rows)

    @override
    def close(self) -> None:
        spool, self._spool = self._spool, None
        self._frame = None
        self._rows = 0
        self._hash = xxhash.xxh3_64()
        if spool is not None:
            spool.close()


def _chunks(file: IO[bytes]) -> Iterator[bytes]:
    while chunk := file.read(_CHUNK_BYTES):
        yield chunk


def _verify_size(file: IO[bytes], location: str) -> int:
    """Return the number of bytes of frames in `file`.

    Raise StateCorrupt unless they are as sealed.
    """
    # The position is at the end of the written bytes, so it is the size.
    found_bytes = file.tell() - _TRAILER.size
    if found_bytes >= 0:
        file.seek(found_bytes)
        size_bytes, digest = _TRAILER.unpack(file.read(_TRAILER.size))
        file.seek(0)
        if size_bytes == found_bytes:
            actual = xxhash.xxh3_64()
            left = size_bytes
            while left:
                chunk = file.read(min(left, _CHUNK_BYTES))
                actual.update(chunk)
                left -= len(chunk)
            if actual.intdigest() == digest:
                return found_bytes
    raise _damage_at(location)


def _verify_chunks(chunks: Iterator[bytes], location: str) -> Iterator[bytes]:
    """Yield `chunks`, the last one only after all bytes are verified.

    Raise StateCorrupt otherwise.
    """
    frames, size_bytes, held_back = xxhash.xxh3_64(), 0, b""
    # The trailer is the last bytes of `chunks`, whose end is not known in advance. So as many bytes
    # are always held back.
    for chunk in chunks:
        data = held_back + chunk
        held_back = data[-_TRAILER.size :]
        ready = data[: -_TRAILER.size]
        frames.update(ready)
        size_bytes += len(ready)
        yield ready
    if held_back != _TRAILER.pack(size_bytes, frames.intdigest()):
        raise _damage_at(location)
    yield held_back


def _damage_at(location: str) -> StateCorrupt:
    return StateCorrupt(
        f"staged rows {location} are damaged: their length or checksum differs from the sealed"
        " value. Restore the file from a copy of its storage; the job cannot commit without it"
    )


def _frames(file: IO[bytes], size_bytes: int) -> Iterator[tuple[str, pa.RecordBatch]]:
    with file:
        file.seek(0)
        while file.tell() < size_bytes:
            label_bytes, body_bytes = _HEADER.unpack(file.read(_HEADER.size))
            part = file.read(label_bytes).decode()
            with pa.ipc.open_stream(file.read(body_bytes)) as stream:
                for batch in stream:
                    yield part, batch


@dataclass(frozen=True, slots=True)
class InputFiles:
    """A directory of `fs`, with one directory of files for each time that Spark wrote them."""

    fs: FileSystem = field(repr=False)
    directory: str

    def make(self) -> None:
        """Create the directory. Only users of checkpoint storage may write below it."""
        self.fs.make_directory(self.directory)

    def path(self, name: str = "") -> Path:
        """Return the path of `name` on a machine that has mounted the storage."""
        return Path(self.fs.location(self.directory)) / name

    def make_durable(self, written: str) -> None:
        """Make the files in directory `written` survive a crash, whichever process wrote them."""
        directory = self.path(written)
        for path in directory.iterdir():
            sync_file(path)
        sync_directory(str(directory))
        sync_directory(str(self.path()))

    def delete(self, *, besides: Collection[str] = ()) -> None:
        """Delete all files except the directories in `besides`. Idempotent."""
        for name in self.fs.list(self.directory):
            if name not in besides:
                self.fs.delete_tree(f"{self.directory}/{name}")
        if not besides:
            self.fs.delete_tree(self.directory)
