"""Checkpoint storage in the driver's memory: for tests, and for jobs that may start from nothing.

State travels to the driver inside each subtask's acknowledgement and stays there, in the decision
log's records. It survives the loss of a slot and ends with the driver's process.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path

import pyarrow as pa
from typing_extensions import Buffer, override

from onceflow.core.argument_types import check_fields
from onceflow.core.errors import ConfigError, StorageError
from onceflow.core.protocol.checkpoints.snapshots import StateHandle
from onceflow.core.protocol.ids import AttemptId, CheckpointId, TransactionId
from onceflow.core.spi.staging import StagedRows, StagingArea
from onceflow.core.storage.filesystems import filesystem
from onceflow.core.storage.filesystems.local import CHUNK_BYTES
from onceflow.core.storage.layout import StateNames
from onceflow.core.storage.snapshots.state_files import FileStateWriter
from onceflow.core.storage.storage import CheckpointStorage, JobStorage

STATE_BYTES_MAX = 5_000_000
"""The limit of one piece of state: each checkpoint sends it to the driver, which keeps it."""


@check_fields
@dataclass(frozen=True, slots=True)
class MemoryStorage(CheckpointStorage):
    """Checkpoint storage in the heap of the process that describes it (the driver): `memory://`.

    Jobs with the same description share one storage. Sinks that stage rows are refused.

    Raises:
        ConfigError: `state_bytes_max` is not over 0.
    """

    state_bytes_max: int = STATE_BYTES_MAX
    identity: str = field(init=False, default_factory=lambda: uuid.uuid4().hex)
    """The identity of the memory: descriptions with the same identity share their memory."""

    def __post_init__(self) -> None:
        if self.state_bytes_max < 1:
            raise ConfigError(f"state_bytes_max={self.state_bytes_max} must be over 0")

    @override
    def open(self, job: str) -> JobStorage:
        with _lock:
            files = _heaps.setdefault(self.identity, MemoryFiles())
        return _MemoryJobStorage(files, job, self.state_bytes_max)

    @override
    def __str__(self) -> str:
        return "memory://"


class MemoryFiles(filesystem.CreatesAtomically):
    """Files as a mapping in this process. Any thread."""

    def __init__(self) -> None:
        """Create an empty file system."""
        self._lock = threading.Lock()
        self._files: dict[str, tuple[bytes, datetime]] = {}

    @override
    def location(self, path: str) -> str:
        return f"memory://{path}"

    @override
    def create_if_absent(self, path: str, data: bytes) -> filesystem.CreateOutcome:
        with self._lock:
            if path in self._files:
                return filesystem.AlreadyExists(self._files[path][0])
            # Copied, because the caller may reuse its buffer.
            self._files[path] = bytes(data), _now()
            return filesystem.Created()

    @override
    def write(self, path: str, chunks: Iterable[bytes | memoryview]) -> int:
        # Joined outside of the lock: the chunks may come from an upload, and reads must not wait
        # for it.
        data = b"".join(chunks)
        with self._lock:
            self._files[path] = data, _now()
        return len(data)

    @override
    def read(self, path: str) -> bytes | None:
        with self._lock:
            return self._files[path][0] if path in self._files else None

    @override
    def read_chunks(self, path: str) -> Iterator[bytes] | None:
        data = self.read(path)
        if data is None:
            return None
        return (data[at : at + CHUNK_BYTES] for at in range(0, len(data), CHUNK_BYTES))

    @override
    def size(self, path: str) -> int | None:
        data = self.read(path)
        return None if data is None else len(data)

    @override
    def find_modified_time(self, path: str) -> datetime | None:
        with self._lock:
            return self._files[path][1] if path in self._files else None

    @override
    def list(self, directory: str) -> tuple[str, ...]:
        start = f"{directory}/" if directory else ""
        with self._lock:
            below = [path[len(start) :] for path in self._files if path.startswith(start)]
        return tuple(sorted({path.partition("/")[0] for path in below}))

    @override
    def delete(self, path: str) -> None:
        with self._lock:
            self._files.pop(path, None)

    @override
    def delete_tree(self, path: str) -> None:
        with self._lock:
            for file_path in [name for name in self._files if name.startswith(f"{path}/")]:
                del self._files[file_path]


class _MemoryJobStorage(JobStorage):
    """Storage in the driver's memory. A writer in a slot sends all state to the driver."""

    @override
    def writer(
        self, attempt: AttemptId, checkpoint: CheckpointId, uid: str, subtask: int
    ) -> FileStateWriter:
        names = StateNames(attempt, checkpoint, uid, subtask)
        return _InlineWriter(self._fs, self._paths, names, self._inline_threshold_bytes)

    @override
    def staging(self, sink_id: str) -> StagingArea:
        return _NoStaging(sink_id)

    @override
    def probe_read(self, path: str) -> str:
        # Slots need not see the driver's memory, because acknowledgements carry all that they
        # write. The probe's path ends with its token, so a slot "reads" the token without any file.
        return path.rpartition("@")[2]


class _InlineWriter(FileStateWriter):
    """A writer that keeps all state in handles, and refuses state that is too large for that."""

    @override
    def write(self, name: str, data: object, *, key_groups: range | None = None) -> StateHandle:
        size_bytes = memoryview(data).nbytes  # type: ignore[arg-type]
        if size_bytes >= self._inline_threshold_bytes:
            raise StorageError(
                f"state {name} of {self._names.uid}@{self._names.subtask} has {size_bytes} bytes,"
                " but storage in the driver's memory accepts at most"
                f" {self._inline_threshold_bytes - 1}: use a directory or a bucket"
                " (storage='/path', 's3://bucket/prefix'), or raise"
                " MemoryStorage(state_bytes_max=…)"
            )
        return super().write(name, data, key_groups=key_groups)  # type: ignore[arg-type]

    @override
    def write_chunks(
        self,
        name: str,
        chunks: Iterable[Buffer],
        *,
        shared: bool = False,
        key_groups: range | None = None,
    ) -> StateHandle:
        del shared
        return self.write(name, b"".join(chunks), key_groups=key_groups)

    @override
    def write_file(
        self, name: str, path: Path, *, shared: bool, key_groups: range | None = None
    ) -> StateHandle:
        del shared
        return self.write(name, path.read_bytes(), key_groups=key_groups)


@dataclass(frozen=True, slots=True)
class _NoStaging(StagingArea):
    """A staging area that refuses to stage: other processes could not see the rows."""

    sink_id: str

    @override
    def open(self) -> StagedRows:
        raise ConfigError(
            f"sink {self.sink_id} stages rows, which every process of the job must see, but"
            " checkpoints are stored in the driver's memory: use a directory or a bucket"
        )

    @override
    def read(self, transaction: TransactionId) -> Iterator[tuple[str, pa.RecordBatch]] | None:
        return None

    @override
    def contains(self, transaction: TransactionId) -> bool:
        return False

    @override
    def transactions(self) -> Sequence[TransactionId]:
        return ()

    @override
    def find_seal_time(self, transaction: TransactionId) -> datetime | None:
        return None

    @override
    def discard(self, transaction: TransactionId) -> None:
        """Do nothing: no rows are staged here."""


_lock = threading.Lock()
_heaps: dict[str, MemoryFiles] = {}
_now: Callable[[], datetime] = lambda: datetime.now(timezone.utc)  # noqa: E731
